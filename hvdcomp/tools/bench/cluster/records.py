"""Which clusters there are on this machine, and whether somebody still uses them.

Each cluster has a record in /run, made before its first namespace and removed after its last one. Whoever builds or
uses a cluster holds a lock on its record; the kernel lets go of the lock when that process ends, however it ends. So
what a killed process left behind is known for certain, and a cluster in use is never taken for a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdcomp.tools.bench.cluster.errors import ClusterError

FOLDER = Path("/run/hvdcomp-cluster")
STANDING = "standing"  # the name of the one cluster that `up` leaves for later runs


@dataclass(frozen=True)
class Facts:
    """What a record tells of a cluster. `standing`: complete, and to be kept when its maker ends."""

    hosts: int
    rate: str
    owner: int  # process id
    standing: bool = False


class Record:
    """The locked record of a cluster, in the hands of this process until `release` or `remove`.

    To be made within `exclusive()`.
    """

    def __init__(self, name: str) -> None:
        """Makes the record, or takes over the one that is there.

        Raises:
            ClusterError: if another process holds it.
        """
        self.path = FOLDER / f"{name}.json"
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            facts = read(name)
            who = "another process" if facts is None else f"process {facts.owner}"
            raise ClusterError(f"the cluster {name!r} is in use by {who}; wait for it, or end it") from None

    def write(self, facts: Facts) -> None:
        """Replaces what the record says."""
        content = json.dumps(asdict(facts)).encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def release(self) -> None:
        """Lets go of the record; the cluster stays."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Deletes the record."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """While records are looked through and taken; waits until no other process does so."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    descriptor = os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(name: str) -> Facts | None:
    """What the record says; None if there is none, or its maker was killed while writing."""
    try:
        return Facts(**json.loads((FOLDER / f"{name}.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def names() -> list[str]:
    """The names of all clusters with a record."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def in_use(name: str) -> bool:
    """Whether a living process holds the record; to be asked within `exclusive()`."""
    try:
        descriptor = os.open(FOLDER / f"{name}.json", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def name_in(namespace: str) -> str | None:
    """The name of the cluster that a network namespace belongs to; None if it is nobody's here."""
    match = re.fullmatch(r"hvdcomp-([a-z0-9]+)-(?:host\d+|switch)", namespace)
    return None if match is None else match[1]
