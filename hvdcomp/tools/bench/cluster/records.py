"""Records of the clusters on this machine, which show whether a process uses a cluster.

Each cluster has a record in /run. The record is created before the first namespace of the cluster, and removed after
the last. A process that creates or uses a cluster locks the record. When the process ends, the kernel releases the
lock, even if the process was killed. An unlocked record therefore shows that no process uses the cluster any more, and
a cluster is never removed while a process uses it.
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
STANDING = "standing"  # the name of the cluster that `up` creates for later runs


@dataclass(frozen=True)
class Facts:
    """The content of a cluster's record. `standing` is whether the cluster is complete and continues to exist when its
    creator ends."""

    hosts: int
    rate: str
    owner: int  # the process id of the creator
    standing: bool = False


class Record:
    """The record of a cluster. This process locks the record until it calls `release` or `remove`.

    Create it within `exclusive()`.
    """

    def __init__(self, name: str) -> None:
        """Creates the record, or locks the existing record.

        Raises:
            ClusterError: if another process holds the lock.
        """
        self.path = FOLDER / f"{name}.json"
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            facts = read(name)
            owner = "another process" if facts is None else f"process {facts.owner}"
            raise ClusterError(
                f"the cluster {name!r} is in use by {owner}; wait until that process ends, or end that process"
            ) from None

    def write(self, facts: Facts) -> None:
        """Replaces the content of the record."""
        content = json.dumps(asdict(facts)).encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def release(self) -> None:
        """Unlocks the record. The cluster remains."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Deletes the record."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """A context manager that holds the lock for reading and creating records. Only one process can hold it at a
    time."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    descriptor = os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(name: str) -> Facts | None:
    """The content of a record; None if there is no record, or its creator was killed while writing."""
    try:
        return Facts(**json.loads((FOLDER / f"{name}.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def names() -> list[str]:
    """The names of all clusters with a record."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def in_use(name: str) -> bool:
    """Whether a running process has locked the record. Call it within `exclusive()`."""
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
    """The name of the cluster to which a network namespace belongs; None if it does not belong to a cluster."""
    match = re.fullmatch(r"hvdcomp-([a-z0-9]+)-(?:host\d+|switch)", namespace)
    return None if match is None else match[1]
