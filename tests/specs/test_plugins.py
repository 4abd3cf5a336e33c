"""Classes of other packages by spec string: entry points of an installed distribution, and modules that users name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdcomp import SpecError
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.policies import parse_policy
from hvdcomp.specs import plugins
from hvdcomp.tools.commands.replay import command as replay

ROOT = Path(__file__).parents[2]
METHOD = """
from dataclasses import dataclass

from hvdcomp.compressors.base import Compressor, Count
from hvdcomp.compressors.protocol import AllReduce, Outcome


@dataclass(frozen=True)
class {kind}(Compressor):
    parts: Count = 2

    name = "{name}"
    sends = "all elements"
    biased = True

    def aggregate(self, xp, x, state, context):
        own = x * (1 / self.parts)
        mean = yield AllReduce(own)
        return Outcome(mean, own)
"""
POLICY = """
from dataclasses import dataclass

from hvdcomp.policies.schedules import LevelSchedule


@dataclass(frozen=True)
class Sawtooth(LevelSchedule):
    low: float = 0.1

    name = "sawtooth"

    def level_at(self, step, steps_per_epoch, own):
        return self.low if step % 2 else own
"""
Install = Callable[..., None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules in front of all others, without plugins of other tests."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    plugins._entry_points.cache_clear()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]
    plugins._entry_points.cache_clear()


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


def installed(folder: Path, package: str, points: str) -> None:
    """What pip leaves of a distribution with these entry points, beside its modules."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def test_an_installed_package_offers_its_classes(folder: Path) -> None:
    module(folder, "halving", METHOD.format(kind="Halves", name="halves") + POLICY)
    points = "[hvdcomp.compressors]\nhalves = halving:Halves\n[hvdcomp.policies]\nsawtooth = halving:Sawtooth\n"
    installed(folder, "hvdcomp-halving", points)
    assert str(parse_compressor("two_level(halves:parts=3)")) == "two_level(halves:parts=3)"
    assert str(parse_compressor('{"embed.*": "halves:parts=3", "*": "none"}').choices[0]) == "halves:parts=3"  # type: ignore[attr-defined]
    assert str(parse_policy("sawtooth:low=0.2")) == "sawtooth:low=0.2"
    with pytest.raises(SpecError, match=r"'part=3' in .* is not a setting of halves \(did you mean 'parts'\?\); write"):
        parse_compressor("halves:part=3")
    with pytest.raises(SpecError, match="it must be a whole number of at least 1"):
        parse_compressor("halves:parts=0")


def test_a_module_that_is_named_offers_what_it_defines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(folder, "halving", METHOD.format(kind="Halves", name="halves") + POLICY)
    with pytest.raises(SpecError, match=r"unknown compressor 'halves'.*of your own, pass --plugin MODULE"):
        parse_compressor("halves")
    monkeypatch.setenv(plugins.VARIABLE, " halving ,")
    assert str(parse_compressor("halves:parts=3")) == "halves:parts=3"
    assert str(parse_policy("sawtooth:low=0.2")) == "sawtooth:low=0.2"
    assert str(parse_compressor("topk:ratio=0.1")) == "topk:ratio=0.1"


def test_a_package_offers_what_its_modules_define(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "methods").mkdir()
    module(folder / "methods", "__init__", "from hvdcomp import TopK\nfrom methods.halves import Halves\n")
    module(folder / "methods", "halves", METHOD.format(kind="Halves", name="halves"))
    monkeypatch.setenv(plugins.VARIABLE, "methods")
    assert str(parse_compressor("halves")) == "halves"


def test_nothing_is_imported_before_its_name_is_asked_for(folder: Path) -> None:
    module(folder, "halving", "print('imported')\n" + METHOD.format(kind="Halves", name="halves"))
    installed(folder, "hvdcomp-halving", "[hvdcomp.compressors]\nhalves = halving:Halves\n")
    code = """
import sys, hvdcomp
from hvdcomp.specs.plugins import _entry_points
assert not _entry_points.cache_info().currsize, "importing reads no entry points"
hvdcomp.Compression.from_spec("topk:ratio=0.1")
print("before")
hvdcomp.Compression.from_spec("halves")
"""
    variables = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
    assert done.stdout.split() == ["before", "imported"]


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("broken:Halves", r"'halves' of the package mine \(broken:Halves\) cannot be imported: ZeroDivisionError"),
        ("nowhere:Halves", r"cannot be imported: ModuleNotFoundError: No module named 'nowhere'; fix or uninstall"),
        ("halving:Other", r"cannot be imported: AttributeError"),
        ("halving:Count", r"is not a subclass of hvdcomp\.compressors\.base\.Compressor"),
        ("halving:Thirds", r"has name = 'thirds' in its class, but its entry point has a different name"),
    ],
)
def test_a_package_with_a_mistake_is_named(folder: Path, point: str, said: str) -> None:
    module(folder, "broken", "1 / 0")
    module(folder, "halving", METHOD.format(kind="Thirds", name="thirds"))
    installed(folder, "mine", f"[hvdcomp.compressors]\nhalves = {point}\n")
    with pytest.raises(SpecError, match=said):
        parse_compressor("halves")
    assert str(parse_compressor("topk:ratio=0.1")) == "topk:ratio=0.1", "others go on"


def test_no_plugin_takes_a_name_of_hvdcomp_in_silence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(folder, "tops", METHOD.format(kind="Top", name="topk"))
    installed(folder, "mine", "[hvdcomp.compressors]\ntopk = tops:Top\n")
    with pytest.warns(UserWarning, match="the package mine offers a compressor 'topk', but hvdcomp has its own"):
        assert str(parse_compressor("topk:ratio=0.1")) == "topk:ratio=0.1"
    monkeypatch.setenv(plugins.VARIABLE, "tops")
    with pytest.raises(SpecError, match="the module 'tops' has a compressor Top with the name 'topk', but hvdcomp"):
        parse_compressor("fp16")


def test_two_of_one_name_are_refused_and_the_same_twice_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(folder, "one", METHOD.format(kind="Halves", name="halves"))
    module(folder, "two", METHOD.format(kind="Halves", name="halves"))
    installed(folder, "mine", "[hvdcomp.compressors]\nhalves = one:Halves\n")
    monkeypatch.setenv(plugins.VARIABLE, "one")
    assert str(parse_compressor("halves")) == "halves"
    monkeypatch.setenv(plugins.VARIABLE, "one,two")
    with pytest.raises(SpecError, match="'halves' is offered by the module 'one' and by the module 'two' and by"):
        parse_compressor("halves")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "'nowhere' cannot be imported: ModuleNotFoundError: No module named 'nowhere'; the module must"),
        ("halving.py", "; give the name of a module, such as halving, not of a file"),
        ("broken", "'broken' cannot be imported: ZeroDivisionError: division by zero; fix the module"),
        ("empty", "'empty' has neither a compressor nor a policy: it needs a subclass of hvdcomp.Compressor or"),
        ("tops", "the module 'tops' has a compressor Top with the name 'topk'"),
    ],
)
def test_the_option_says_at_once_what_is_wrong(folder: Path, name: str, said: str) -> None:
    module(folder, "halving", METHOD.format(kind="Halves", name="halves"))
    module(folder, "broken", "1 / 0")
    module(folder, "empty", "")
    module(folder, "tops", METHOD.format(kind="Top", name="topk"))
    (folder / "log.jsonl").write_text("")
    with_plugins = dict(os.environ)
    result = CliRunner().invoke(replay, ["log.jsonl", "--plugin", name], env={plugins.VARIABLE: None})
    os.environ.clear()
    os.environ.update(with_plugins)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
