"""Downloads the source distribution of Horovod with the user's pip configuration, verifies it, and unpacks it."""

from __future__ import annotations

import hashlib
import sys
import tarfile
import tempfile
from pathlib import Path

from hvdcomp.tools.horovod_build import BuildError
from hvdcomp.tools.horovod_build.environment import run_logged
from hvdcomp.tools.horovod_build.plan import HOROVOD_SHA256, HOROVOD_VERSION

ARCHIVE = f"horovod-{HOROVOD_VERSION}.tar.gz"


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch_source(cache: Path) -> Path:
    """The verified source archive. If the archive is not in the cache folder, it is first downloaded to this folder.

    Raises:
        BuildError: if pip could not download the archive, or a file with this name has different content.
    """
    archive = cache / ARCHIVE
    if archive.exists():
        if sha256(archive) != HOROVOD_SHA256:
            raise BuildError(
                f"{archive} differs from the published Horovod {HOROVOD_VERSION}: remove it, and try again."
            )
        return archive
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        # If a requirements file contains the hash, pip verifies the archive before it runs any code from it.
        requirements = Path(folder) / "requirements.txt"
        pinned = f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n"
        requirements.write_text(pinned, encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes"]
        command += ["--requirement", str(requirements), "--dest", folder]
        process = run_logged(command)
        if process.returncode != 0:
            last_lines = "\n".join(process.stdout.strip().splitlines()[-5:])
            raise BuildError(
                f"pip could not download Horovod's source:\n{last_lines}\n"
                f"Check pip's index settings and the network, or put {ARCHIVE} into {cache} yourself."
            )
        (Path(folder) / ARCHIVE).replace(archive)
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks the archive below `folder`, and returns the root of the source."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # from Python 3.10.12 and 3.11.4
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)
    return folder / f"horovod-{HOROVOD_VERSION}"
