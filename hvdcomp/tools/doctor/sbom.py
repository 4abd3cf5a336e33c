"""Lists all installed Python and Debian packages. `python -m hvdcomp.tools.doctor.sbom` prints the list.

The list is a software bill of materials in the JSON format of CycloneDX, for scanners that check vulnerabilities and
licenses. docker/Dockerfile stores the image's list in the image itself. The list has no time stamp, so the same
installation always gives the same text.

References:
    CycloneDX 1.6: https://cyclonedx.org/docs/1.6/json/; package URLs: https://github.com/package-url/purl-spec
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from typing import Any
from urllib.parse import quote

from hvdcomp.files import VERSION

_FIELDS = "${Package}\\t${Version}\\t${Architecture}\\t${source:Package}\\t${db:Status-Status}\\n"


def bill() -> dict[str, Any]:
    """The bill of materials of this machine and of this Python."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "hvdcomp", "version": VERSION}},
        "components": [*_python_packages(), *_debian_packages()],
    }


def _python_packages() -> list[dict[str, Any]]:
    components: dict[str, dict[str, Any]] = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name).lower()
        # If two distributions have the same name, `import` finds the first one.
        components.setdefault(name, _component("pypi", name, distribution.version) | _licence_of(distribution))
    return [components[name] for name in sorted(components)]


def _licence_of(package: Distribution) -> dict[str, Any]:
    """The license in the package's metadata, if it is a single line."""
    for expression in package.metadata.get_all("License-Expression", []):
        return {"licenses": [{"expression": expression}]}
    classifiers = package.metadata.get_all("Classifier", [])
    licenses = [line.rpartition(" :: ")[2] for line in classifiers if "License ::" in line]
    if not licenses:
        licenses = [text for text in package.metadata.get_all("License", []) if text and "\n" not in text]
    return {"licenses": [{"license": {"name": name}} for name in licenses]} if licenses else {}


def _debian_packages() -> Iterator[dict[str, Any]]:
    if shutil.which("dpkg-query") is None:
        return
    command = ["dpkg-query", "--show", f"--showformat={_FIELDS}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    release = platform.freedesktop_os_release()
    distro = f"{release['ID']}-{release.get('VERSION_ID', '')}".rstrip("-")
    for line in sorted(listed.splitlines()):
        name, number, architecture, source, status = line.split("\t")
        if status == "installed":
            about = f"arch={architecture}&distro={distro}"
            yield _component("deb", name, number, f"{release['ID']}/", f"?{about}") | {
                "properties": [{"name": "debian:source", "value": source}]
            }


def _component(kind: str, name: str, number: str, space: str = "", about: str = "") -> dict[str, Any]:
    address = f"pkg:{kind}/{space}{quote(name, safe='')}@{quote(number, safe='')}{about}"
    return {"type": "library", "bom-ref": address, "name": name, "version": number, "purl": address}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
