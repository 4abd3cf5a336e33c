"""The package is light: importing it, and asking for help, takes no framework."""

from __future__ import annotations

import importlib
import os
import resource
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hvdcomp
from tests.package_index import environment_on_top, fresh_environment, pip_with_index, source_of_package

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ["torch", "tensorflow", "tf_keras", "keras", "horovod", "mpi4py"]
# Nor anything else that is heavy and optional.
FRAMEWORKS += ["accelerate", "lightning", "transformers"]
FRAMEWORKS += ["matplotlib", "jinja2", "sklearn", "kubernetes", "prometheus_client"]


def run(*command: str | Path, timeout: float = 300, environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=timeout, cwd="/", env=environment
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def hidden(code: str) -> list[str]:
    """A Python command in which the frameworks cannot be imported at all."""
    return [sys.executable, "-c", f"import sys; sys.modules.update(dict.fromkeys({FRAMEWORKS}))\n{code}"]


def test_importing_imports_no_framework() -> None:
    loaded = run(sys.executable, "-c", "import hvdcomp, sys; print(*sys.modules)").split()
    assert "hvdcomp" in loaded
    assert not set(FRAMEWORKS) & {module.partition(".")[0] for module in loaded}


def test_importing_is_quick(tmp_path: Path) -> None:
    """It takes at most five times the CPU time of importing NumPy alone, the start of the interpreter included.

    On three machines it took 2.0 to 3.3 times as long. Importing a framework takes more than ten times as long.
    The two imports take turns. The test has byte code of its own, so it does not matter what this checkout has.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def import_in_a_new_process(module: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(sys.executable, "-c", f"import {module}", environment=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    modules = ("numpy", "hvdcomp")
    for module in modules:  # writes the byte code
        import_in_a_new_process(module)
    seconds = [[import_in_a_new_process(module) for module in modules] for _ in range(7)]
    of_numpy, of_hvdcomp = map(statistics.median, zip(*seconds, strict=True))
    assert of_hvdcomp < 5 * of_numpy, seconds


def test_everything_public_is_there_without_frameworks() -> None:
    code = """
import hvdcomp, numpy
assert all(hasattr(hvdcomp, name) for name in hvdcomp.__all__)
compression = hvdcomp.Compression.from_spec("topk:ratio=0.01", named_parameters=[("w", object())])
try:
    compression.compress(numpy.zeros(3))
except hvdcomp.ConfigurationError as error:
    print(error)
"""
    assert "hvdcomp.Compression was given a gradient of type numpy.ndarray" in run(*hidden(code))


@pytest.mark.parametrize("name", ["compiled", "dcp", "ddp", "fsdp"])
def test_what_needs_pytorch_is_a_module_like_any_other(name: str) -> None:
    pytest.importorskip("torch")
    module = importlib.import_module(f"hvdcomp.{name}")
    assert getattr(hvdcomp, name) is module
    assert all(hasattr(module, offered) for offered in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'horse'"):
        hvdcomp.horse  # noqa: B018


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_command_needs_no_framework(arguments: list[str]) -> None:
    shown = run(*hidden(f"from hvdcomp.tools.cli import main; main({arguments}, prog_name='hvdcomp')"))
    assert ("Commands:" if arguments == ["--help"] else "hvdcomp, version") in shown


@pytest.mark.parametrize("command", ["build-horovod", "doctor", "report", "train"])
def test_the_help_of_each_command_needs_no_framework(command: str) -> None:
    assert f"hvdcomp {command} [OPTIONS]" in run(
        *hidden(f"from hvdcomp.tools.cli import main; main(['{command}', '--help'], prog_name='hvdcomp')")
    )


_WITHOUT_TOOLS = """
import importlib.util, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "hvdcomp.tools" or name.startswith("hvdcomp.tools."):
            raise AssertionError(f"the library asks for {name}")

sys.meta_path.insert(0, Refuses())
if importlib.util.find_spec("mpi4py"):
    import mpi4py

    mpi4py.rc.initialize = False  # a module of hvdcomp imports MPI, and nothing here starts it
lacking = set()
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking.add(error.name.partition(".")[0])

import numpy as np
import hvdcomp
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors import TensorInfo
from hvdcomp.exchange import Engine

def step(ranks):
    engine = Engine(ranks, [TensorInfo("w", (64, 64), "float32")], hvdcomp.TopK(ratio=0.125))
    engine.begin()
    return np.count_nonzero(engine.step({"w": np.ones((64, 64), np.float32)})["w"])

print("sent", *run_ranks(2, step), "lacking", *lacking)
if "hvdcomp.ddp" in sys.argv and "torch" not in lacking:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvdcomp.Compression.from_spec("topk:ratio=0.1", policy="accordion:low=0.1,high=0.01,steps=1")
    hvdcomp.ddp.register(model, compression, optimizer)
    for _ in range(3):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    print("steps", compression.ledger.steps)
"""


@pytest.mark.parametrize("of_tensorflow", [False, True])
def test_the_library_works_without_the_tools(of_tensorflow: bool) -> None:
    """TensorFlow has a process of its own: Triton cannot be imported after it."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "hvdcomp").rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths if "tools" not in path.parts]
    names.remove("hvdcomp.__main__")  # the command itself
    chosen = [name for name in names if ("tensorflow" in name) == of_tensorflow]
    assert len(chosen) > (10 if of_tensorflow else 200)
    shown = run(sys.executable, "-c", _WITHOUT_TOOLS, *chosen)
    lacking = set(shown.partition("lacking")[2].partition("\n")[0].split())
    assert shown.startswith("sent 512 512")
    assert lacking <= {*FRAMEWORKS, "triton"}
    assert of_tensorflow or "torch" in lacking or "steps 3" in shown


@pytest.mark.parametrize("clone", ["hvdcomp", "another"])
def test_an_editable_installation_is_found_before_the_folder_of_the_clone(tmp_path: Path, clone: str) -> None:
    """A script beside a clone named hvdcomp has the clone's folder, which is no package, first in its path."""
    source = source_of_package(tmp_path / "work" / clone)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("hvdcomp-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = tmp_path / "work" / "train.py"
    script.write_text(
        f"import site, importlib.util\nsite.addsitedir({str(tmp_path / 'site')!r})\n"
        "print(importlib.util.find_spec('hvdcomp').origin)\n"
    )
    found = subprocess.run([sys.executable, "-S", str(script)], capture_output=True, text=True, env=environment)
    assert found.stdout.strip() == str(source / "hvdcomp" / "__init__.py"), found.stderr


@pytest.mark.thorough
def test_pip_installs_a_clone_that_scripts_beside_it_can_import(tmp_path: Path) -> None:
    python = environment_on_top(tmp_path / "venv")
    source = source_of_package(tmp_path / "work" / "hvdcomp")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Python 3.10 and 3.11 bring an old setuptools, in place of the running environment's.
    subprocess.run([*pip, "uninstall", "--yes", "setuptools"], check=True, timeout=300, env=environment)
    words = ["install", "--no-deps", "--no-build-isolation", "--editable", str(source)]
    subprocess.run([*pip, *words], check=True, timeout=300, env=environment)
    script = source.parent / "train.py"
    script.write_text("import hvdcomp\nprint(hvdcomp.Compression, hvdcomp.__file__)\n")
    expected = f"<class 'hvdcomp.compression.Compression'> {source / 'hvdcomp' / '__init__.py'}"
    for words in ([str(script)], ["-c", script.read_text()]):
        done = subprocess.run([str(python), *words], cwd=source.parent, capture_output=True, text=True, env=environment)
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.thorough
@pytest.mark.network
def test_installs_into_a_fresh_environment_without_frameworks(tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv")
    pip = pip_with_index(python, tmp_path)
    run(*pip, "install", source_of_package(tmp_path / "source"))
    installed = run(*pip, "list", "--format=freeze").lower()
    assert not [name for name in FRAMEWORKS if f"{name}==" in installed]
    assert run(python, "-I", "-c", "import hvdcomp; print(hvdcomp.TopK(ratio=0.01))").strip() == "topk:ratio=0.01"
    shown = run(python, "-I", tmp_path / "venv" / "bin" / "hvdcomp", "--help")
    assert "Commands:" in shown
    assert "powersgd" in run(python, "-I", tmp_path / "venv" / "bin" / "hvdcomp", "compressors")
    # Files that are not Python must be installed too.
    package = next((tmp_path / "venv" / "lib").glob("python*/site-packages/hvdcomp"))
    files = [path for path in (ROOT / "hvdcomp").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    wanted = {path.relative_to(ROOT / "hvdcomp") for path in files}
    assert {path.suffix for path in wanted} >= {".html", ".json", ".sh", ".typed"}
    assert all((package / path).is_file() for path in wanted)
