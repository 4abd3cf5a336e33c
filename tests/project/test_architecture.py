"""What keeps the core readable: it names no framework, and no class is cut in two for the sake of its length."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hvdcomp.bindings import frameworks

PACKAGE = Path(__file__).parents[2] / "hvdcomp"
TOOLS = {"perfmodel", "tools"}
CORE = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in TOOLS)

FRAMEWORKS = re.compile(r"(?<![a-z])(torch|pytorch|tensorflow|tf|keras)(?![a-z])", re.IGNORECASE)
OF_FRAMEWORKS = {"arrays", "communicators", "kernels", "torch", "tensorflow"}
OF_FRAMEWORKS |= {"compiled.py", "dcp.py", "ddp.py", "fsdp.py"}
OF_FRAMEWORKS |= {"accelerate.py", "lightning.py", "transformers.py"}  # trainers of PyTorch
TABLE = PACKAGE / "bindings" / "frameworks.py"


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def documentation(tree: ast.Module) -> set[ast.AST]:
    """The strings that stand alone: docstrings of modules, classes, functions and attributes."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {value for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Each name and each string in the code of a file, with its line."""
    tree = ast.parse(path.read_text())
    skipped = documentation(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield getattr(node, "lineno", 0), text


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_names_no_framework(path: Path) -> None:
    if path == TABLE or path.relative_to(PACKAGE).parts[0] in OF_FRAMEWORKS:
        return
    named = [f"{line}: {text}" for line, text in words(path) if FRAMEWORKS.search(text.replace("_", " "))]
    assert not named, f"{name_of(path)} names a framework; let the framework's folder say it:\n" + "\n".join(named)


def attributes_of_others(kind: ast.ClassDef) -> set[str]:
    """The attributes that a class declares and uses, and leaves to a subclass to set."""
    bodies = (node for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    declared = {node.target.id for node in bodies if node.value is None}
    found = [node for node in ast.walk(kind) if isinstance(node, ast.Attribute)]
    stored, used = ({one.attr for one in found if isinstance(one.ctx, kind)} for kind in (ast.Store, ast.Load))
    fields = any("dataclass" in ast.unparse(one) for one in kind.decorator_list)
    return set() if fields else (declared & used) - stored


def name_of_base(base: ast.expr) -> str:
    return re.split(r"\[", ast.unparse(base))[0].rpartition(".")[2]


def halves(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Classes with a single subclass whose attributes they use: halves of a class. By name, with these attributes."""
    kinds = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    subclasses = Counter(name_of_base(base) for kind in kinds for base in kind.bases)
    return {kind.name: found for kind in kinds if subclasses[kind.name] == 1 and (found := attributes_of_others(kind))}


def test_no_class_of_the_core_is_half_of_another() -> None:
    assert not halves(ast.parse(path.read_text()) for path in CORE)


def test_the_guards_see_what_they_look_for(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""About torch."""\n'
        "class Kind:\n"
        '    """Of tensorflow."""  # and keras\n'
        "    field: int\n"
        "    constant: int = 3\n"
        "    def method(self, is_tf):\n"
        '        self.one, self.two[0] = f"in torch {is_tf}", self.field\n'
        "        self.one.three: int = 4\n"
        "class Other(file.Kind): pass\n"
    )
    assert {text for _, text in words(file) if FRAMEWORKS.search(text.replace("_", " "))} == {"in torch ", "is_tf"}
    assert halves([ast.parse(file.read_text())]) == {"Kind": {"field"}}


@pytest.mark.parametrize("name", frameworks.NAMES)
def test_each_frameworks_folder_offers_the_same(name: str) -> None:
    module = frameworks.framework_named(name)
    for constant in inspect.get_annotations(frameworks.Framework):
        assert isinstance(getattr(module, constant), str)
    for function, asked in inspect.getmembers(frameworks.Framework, inspect.isfunction):
        if not function.startswith("_"):
            parameters = list(inspect.signature(asked).parameters)[1:]  # without self
            assert len(inspect.signature(getattr(module, function)).parameters) == len(parameters), function
