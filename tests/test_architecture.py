"""What keeps the core readable: it names no framework, and no class of it is too large to be read at once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdcomp.bindings import frameworks

PACKAGE = Path(__file__).parent.parent / "hvdcomp"
TOOLS = {
    "bench", "cli.py", "commands", "diagnostics", "doctor", "horovod_build", "launch", "perfmodel", "report",
    "reproduce", "train",
}  # fmt: skip
CORE = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in TOOLS)

FRAMEWORKS = re.compile(r"(?<![a-z])(torch|pytorch|tensorflow|tf|keras)(?![a-z])", re.IGNORECASE)
OF_FRAMEWORKS = {"arrays", "communicators", "dcp.py", "ddp.py", "fsdp.py", "kernels", "torch", "tensorflow"}
TABLE = PACKAGE / "bindings" / "frameworks.py"

LINES, ATTRIBUTES = 250, 15


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


def attributes_of(kind: ast.ClassDef) -> set[str]:
    """The names that are assigned to `self` anywhere in a class, and the fields that it declares."""
    stored = (node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    own = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    declared = (node for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    return own | {node.target.id for node in declared if "ClassVar" not in ast.unparse(node.annotation)}


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_no_class_of_the_core_is_too_large(path: Path) -> None:
    for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        lines = (kind.end_lineno or kind.lineno) - kind.lineno + 1
        attributes = attributes_of(kind)
        large = lines > LINES or len(attributes) > ATTRIBUTES
        said = f"{name_of(path)}: {kind.name} has {lines} lines and {len(attributes)} attributes: {sorted(attributes)}"
        assert not large, said


def test_the_guards_see_what_they_look_for(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""About torch."""\n'
        "class Kind:\n"
        '    """Of tensorflow."""  # and keras\n'
        "    field: int\n"
        "    constant: ClassVar[int] = 3\n"
        "    def method(self, is_tf):\n"
        '        self.one, self.two[0] = f"in torch {is_tf}", 2\n'
        "        self.one.three: int = 4\n"
    )
    assert {text for _, text in words(file) if FRAMEWORKS.search(text.replace("_", " "))} == {"in torch ", "is_tf"}
    (kind,) = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))
    assert attributes_of(kind) == {"field", "one"}


@pytest.mark.parametrize("name", frameworks.NAMES)
def test_each_frameworks_folder_offers_the_same(name: str) -> None:
    module = frameworks.framework_named(name)
    for constant in inspect.get_annotations(frameworks.Framework):
        assert isinstance(getattr(module, constant), str)
    for function, asked in inspect.getmembers(frameworks.Framework, inspect.isfunction):
        if not function.startswith("_"):
            parameters = list(inspect.signature(asked).parameters)[1:]  # without self
            assert len(inspect.signature(getattr(module, function)).parameters) == len(parameters), function
