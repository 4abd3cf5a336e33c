"""Disks that are full, read-only or slow, for each file that a training writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hvdcomp.adaptation.decision_log import Start, read_decisions
from tests.faults.mishaps import MOUNT, SLOW
from tests.faults.preload import with_shim
from tests.faults.table import ALL, Fault
from tests.faults.world import NotHere, Planted, World

GROUP = "files"
_WITHIN = 60
_WHOLE_TRAINING = 180  # on a busy machine
_OF_CHECKPOINTS = ("model.pt", "rank-", "run-", "SHA256SUMS")
_ENDS = "All ranks end with code 1 and print the reason. Files that were written earlier are complete. "
_AGAIN = "After a restart with free space, training continues from the newest complete checkpoint."


class OwnDisk(World):
    """A world of which a folder, `disk`, is a file system of its own, in memory.

    Raises:
        NotHere: none can be mounted.
    """

    size = "64m"

    def __init__(self, transport: str, folder: Path, within: float) -> None:
        super().__init__(transport, folder, within)
        self.disk = folder / MOUNT
        self.disk.mkdir()
        made = _mount("-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self.disk))
        if made.returncode:
            raise NotHere(f"no file system can be mounted: {made.stderr.strip()}")

    def again(self, options: str) -> None:
        """Mounts it with other options."""
        done = _mount("-o", f"remount,{options}", str(self.disk))
        assert done.returncode == 0, done.stderr

    def end(self) -> None:
        super().end()
        subprocess.run(["umount", str(self.disk)], check=True)


class SmallDisk(OwnDisk):
    """It has room for two checkpoints, and not for a third."""

    size = "2600k"


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)


def _ended_and_goes_on(world: World, ended_code: int, after: int) -> str:
    assert ended_code != 0, "the launcher's exit code is 0"
    assert world.saved[-1] == after, world.saved
    world.weights()
    return f"all ended, the launcher with exit code {ended_code}; {world.goes_on(after)}"


def _full(
    file: str, rank: int, step: int, after: int, transports: tuple[str, ...], options: tuple[str, ...] = ()
) -> Fault:
    """A disk that is full when a rank writes to a file.

    Args:
        file: one of `points.FILES`.
        after: the step of the newest checkpoint then.
    """

    def run(world: World) -> str:
        ended = world.train(*options, planted=Planted("disk-full", f"write-{file}", rank, step))
        ended.expect(f"cannot be written{f' on rank {rank}' if file in _OF_CHECKPOINTS else ''}: File too large")
        for name in ("steps.jsonl", "epochs.jsonl", "decisions.jsonl"):
            written = world.output / name
            assert not written.exists() or written.read_bytes()[-1:] in (b"", b"\n"), f"{name} ends with half a line"
        assert not list(world.output.glob("*.part")), "half a file is left"
        return _ended_and_goes_on(world, ended.code, after)

    where = {"rank-": "rank-1.pt", "run-": "run-1.json", "events.out": "TensorBoard's file"}.get(file, file)
    short = file == "model.pt"
    return Fault(f"the disk is full in the middle of {where}", GROUP, _ENDS + _AGAIN, _WITHIN, run, transports, short)


def _decisions(world: World) -> str:
    ended = world.train(planted=Planted("disk-full-for-a-moment", "write-decisions.jsonl", rank=0, step=11))
    assert ended.code == 0, f"it ended with exit code {ended.code}: {ended.output[-3000:]}"
    ended.expect("hvdcomp has stopped writing the decision log")
    kinds = [type(line) for line in read_decisions(world.output / "decisions.jsonl")]
    assert kinds == [Start], kinds
    assert world.weights() == world.undisturbed.weights(), "the weights are not those of an undisturbed training"
    return "rank 0 warned, the log ends with a whole line, and the training went on to the same weights"


def _read_only_output(world: World) -> str:
    assert isinstance(world, OwnDisk)
    world.output = world.disk / "run"
    return _refused_read_only(world, f"--output {world.output} cannot be written: Read-only file system")


def _read_only_checkpoints(world: World) -> str:
    assert isinstance(world, OwnDisk)
    world.checkpoints = world.disk / "saved"
    world.checkpoints.mkdir()
    return _refused_read_only(world, f"{world.checkpoints} cannot be used: Read-only file system; name another")


def _refused_read_only(world: OwnDisk, said: str) -> str:
    world.again("ro")
    ended = world.train(from_start=True).failed()
    ended.expect(said)
    assert not world.weights(), "steps were made"
    return f"refused before the first step, the launcher with exit code {ended.code}"


def _becomes_read_only(world: World) -> str:
    assert isinstance(world, OwnDisk)
    world.checkpoints = world.disk / "saved"
    ended = world.train(planted=Planted("read-only", "step", rank=1, step=6))
    ended.expect("cannot be written on rank", "Read-only file system")
    world.again("rw")
    return _ended_and_goes_on(world, ended.code, after=4)


def _fills_up(world: World) -> str:
    assert isinstance(world, OwnDisk)
    world.checkpoints = world.disk / "saved"
    ended = world.train(from_start=True)
    ended.expect("cannot be written on rank", "No space left on device")
    newest = world.saved[-1]
    world.again("size=64m")
    return _ended_and_goes_on(world, ended.code, newest)


def _slow(world: World) -> str:
    ended = world.train(planted=Planted("slow-disk", "step", rank=0), environment=with_shim(world))
    assert ended.code == 0, f"it ended with exit code {ended.code}: {ended.output[-3000:]}"
    assert world.weights() == world.undisturbed.weights(), "the weights are not those of an undisturbed training"
    return "it went on to the end, with the same weights"


FAULTS = [
    _full("model.pt", 0, 8, 4, ALL),
    _full("rank-", 1, 8, 4, ("ddp",)),
    _full("run-", 1, 8, 4, ("gloo",)),
    _full("SHA256SUMS", 0, 8, 4, ("mpi",)),
    _full("steps.jsonl", 0, 6, 4, ("gloo", "ddp")),
    _full("epochs.jsonl", 0, 6, 8, ("mpi",)),
    _full("summary.json", 0, 6, 20, ("ddp",)),
    _full("events.out", 0, 6, 4, ("gloo",), ("--tensorboard",)),
    Fault(
        "the disk is full for a moment in the middle of decisions.jsonl",
        GROUP,
        "Rank 0 prints a warning, the log ends with its last complete line, and training continues.",
        _WITHIN,
        _decisions,
        ("gloo", "ddp"),
    ),
    Fault(
        "the disk of the checkpoints fills up",
        GROUP,
        _ENDS + _AGAIN,
        _WHOLE_TRAINING,
        _fills_up,
        ("mpi", "ddp"),
        world=SmallDisk,
    ),
    Fault(
        "--output is on a read-only disk",
        GROUP,
        "Every rank stops with an error before the first step.",
        _WHOLE_TRAINING,
        _read_only_output,
        ("gloo", "ddp"),
        world=OwnDisk,
    ),
    Fault(
        "--checkpoint-folder is on a read-only disk",
        GROUP,
        "Every rank stops with an error before the first step.",
        _WHOLE_TRAINING,
        _read_only_checkpoints,
        ("mpi", "ddp"),
        world=OwnDisk,
    ),
    Fault(
        "the disk of the checkpoints becomes read-only",
        GROUP,
        _ENDS + _AGAIN,
        _WITHIN,
        _becomes_read_only,
        ("gloo", "ddp"),
        world=OwnDisk,
    ),
    Fault(
        f"each write to a file takes {SLOW} s longer on rank 0",
        GROUP,
        "The other rank waits for less than its timeout, and training continues.",
        _WHOLE_TRAINING,
        _slow,
        ("gloo", "ddp"),
    ),
]
