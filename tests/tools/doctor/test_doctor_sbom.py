"""The bill of materials: all that is installed here, in the form that scanners read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from urllib.parse import unquote

import pytest

from hvdcomp.tools.doctor import sbom


def test_it_has_every_python_package_once() -> None:
    bill = sbom.bill()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    python = [one for one in bill["components"] if one["purl"].startswith("pkg:pypi/")]
    installed = {re.sub(r"[-_.]+", "-", one.name).lower() for one in distributions()}
    assert [one["name"] for one in python] == sorted(installed)
    numpy = next(one for one in python if one["name"] == "numpy")
    assert numpy["purl"] == f"pkg:pypi/numpy@{__import__('numpy').__version__}"
    assert "BSD" in json.dumps(numpy["licenses"])
    references = [one["bom-ref"] for one in bill["components"]]
    assert len(references) == len(set(references))


def test_it_has_every_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("no dpkg here")
    listed = subprocess.run(["dpkg", "--list"], capture_output=True, text=True, check=True).stdout
    installed = {tuple(line.split()[1:3]) for line in listed.splitlines() if re.match(r".i ", line)}
    debian = [one for one in sbom.bill()["components"] if one["purl"].startswith("pkg:deb/")]
    named = {(one["name"], one["version"]) for one in debian}
    assert named == {(name.split(":")[0], number) for name, number in installed}
    for one in debian:
        match = re.fullmatch(r"pkg:deb/\w+/([\w.%-]+)@([\w.%~-]+)\?arch=\w+&distro=[\w.-]+", one["purl"])
        assert match is not None, one["purl"]
        assert [unquote(part) for part in match.groups()] == [one["name"], one["version"]]
        assert one["properties"][0]["value"]
    monkeypatch.setenv("PATH", "")
    assert not [one for one in sbom.bill()["components"] if one["purl"].startswith("pkg:deb/")]


def test_it_is_printed_the_same_each_time() -> None:
    command = [sys.executable, "-m", "hvdcomp.tools.doctor.sbom"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == json.dumps(sbom.bill(), indent=1) + "\n"
