"""Checkpoints that are damaged, of something else, of another version, or made to do harm.

The training that is started has two of them, after steps `OLDER` and `NEWEST`. What is done to the newest one is there
from the start.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.table import ALL, Fault
from tests.faults.world import World

GROUP = "checkpoints"
OLDER, NEWEST = 8, 10
_WITHIN = 180  # the whole training, on a busy machine
_PASSED_OVER = "All ranks report the damage, skip this checkpoint, and continue from the previous one."
_REFUSED = "Every rank stops with an error that gives the reason, and nothing is changed. "


def prepare(world: World) -> Path:
    """Gives a world a training of one epoch, which another one of this transport has made; the newest checkpoint."""
    made = World(world.transport, world.folder.parent / f"one-epoch-{world.transport}", world.within)
    if not made.folder.exists():
        made.folder.mkdir()
        ended = made.train("--epochs", "1")
        assert ended.code == 0, ended.output[-3000:]
        assert made.saved == [OLDER, NEWEST], made.saved
    shutil.copytree(made.folder, world.folder, dirs_exist_ok=True)
    return world.checkpoints / f"step-{NEWEST:08d}"


def sign(place: Path) -> None:
    """Makes the digests of a checkpoint right again, as whoever changes its files can do."""
    files = sorted(file for file in place.iterdir() if file.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (place / "SHA256SUMS").write_text("".join(lines))


def refused(world: World, message: str, *options: str) -> str:
    """Starts a training that is to be refused on every rank, without a traceback and without a change of a checkpoint.

    Returns:
        What happened, for the table.
    """
    before = _content(world.checkpoints)
    ended = world.train(*options, from_start=True).failed()
    ended.expect(message)
    assert "hvdcomp/tools/train/" not in ended.output, f"a traceback: {ended.output[-3000:]}"
    assert _content(world.checkpoints) == before, "the checkpoints have changed"
    return f"refused, the launcher with exit code {ended.code}"


def _content(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _passed_over(
    name: str, damage: Callable[[Path], None], said: str, transports: tuple[str, ...] = ALL, short: bool = False
) -> Fault:
    def run(world: World) -> str:
        damage(prepare(world))
        return world.goes_on(OLDER, says=["skipped a checkpoint:", said], from_start=True)

    return Fault(name, GROUP, _PASSED_OVER, _WITHIN, run, transports, short)


def _goes_on(name: str, documented: str, change: Callable[[Path], None], transports: tuple[str, ...]) -> Fault:
    def run(world: World) -> str:
        change(prepare(world))
        done = world.goes_on(NEWEST, from_start=True)
        assert not list(world.checkpoints.glob("*.part")), "a checkpoint that was never complete is left"
        return done

    return Fault(name, GROUP, documented, _WITHIN, run, transports)


def _before_digests(newest: Path) -> None:
    """As versions wrote them that knew no digests."""
    (newest / "SHA256SUMS").unlink()
    for file in newest.glob("run-*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1}))


def _never_complete(newest: Path) -> None:
    part = newest.with_name("step-00000012.part")
    part.mkdir()
    (part / "model.pt").write_bytes((newest / "model.pt").read_bytes()[:1000])


def _refused(
    name: str,
    change: Callable[[Path], None],
    message: str,
    transports: tuple[str, ...] = ALL,
    options: tuple[str, ...] = (),
    remedy: str = "",
) -> Fault:
    """A fault that is refused. Without `options`, the training continues after the newest checkpoint is removed."""

    def run(world: World) -> str:
        newest = prepare(world)
        change(newest)
        said = refused(world, message, *options)
        assert not (newest.parent / _PROOF).exists(), "the command in the checkpoint was run"
        if options:
            return said
        shutil.rmtree(newest)
        return f"{said}; without it: {world.goes_on(OLDER)}"

    documented = _REFUSED + (remedy or "If you remove this checkpoint, training continues from the previous one.")
    return Fault(name, GROUP, documented, _WITHIN, run, transports)


def _all_damaged(world: World) -> str:
    for place in prepare(world).parent.iterdir():
        _cut_off(place / "model.pt")
    return refused(world, "contains no checkpoint that can be read")


_PROOF = "proof"
"""Made beside the checkpoints by the command in a hostile one."""


class _Command:
    """Pickled, it is a command that whoever unpickles it carelessly runs."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def _hostile(name: str, in_zip: bool) -> Callable[[Path], None]:
    """A file with a command in it, as PyTorch writes files or as a plain pickle."""

    def change(newest: Path) -> None:
        import torch

        content = {"model": _Command(f"touch {newest.parent / _PROOF}")}
        if in_zip:
            torch.save(content, newest / name)
        else:
            (newest / name).write_bytes(pickle.dumps(content))
        sign(newest)

    return change


def _foreign(name: str, of_dictionary: bool) -> Callable[[Path], None]:
    """A file of another program: the weights of some layer, or no dictionary at all."""

    def change(newest: Path) -> None:
        import torch

        layer = torch.nn.Linear(3, 2)
        torch.save(layer.state_dict() if of_dictionary else [layer.weight.detach()], newest / name)
        sign(newest)

    return change


def _record(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A record of a run that was changed."""

    def changed(newest: Path) -> None:
        file = newest / name
        content = change(json.loads(file.read_text()))
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        sign(newest)

    return changed


def _as_it_is(newest: Path) -> None:
    pass


_ANEW = "Train with the options of the earlier run, or pass a different --checkpoint-folder."

FAULTS = [
    _passed_over("model.pt is cut off", lambda place: _cut_off(place / "model.pt"), "model.pt is damaged", short=True),
    _passed_over("a bit of rank-1.pt is flipped", lambda place: _flip(place / "rank-1.pt"), "rank-1.pt is damaged"),
    _passed_over("rank-1.pt is gone", lambda place: (place / "rank-1.pt").unlink(), "is damaged", ("gloo",)),
    _passed_over(
        "run-0.json is empty", lambda place: os.truncate(place / "run-0.json", 0), "run-0.json cannot be read", ("mpi",)
    ),
    _passed_over("SHA256SUMS is gone", lambda place: (place / "SHA256SUMS").unlink(), "has no SHA256SUMS", ("ddp",)),
    _passed_over(
        "SHA256SUMS names files in other folders",
        lambda place: (place / "SHA256SUMS").write_text(f"{64 * '0'}  ../../../etc/passwd\n"),
        "SHA256SUMS does not have the format that hvdcomp writes",
        ("gloo",),
    ),
    _passed_over(
        "run-1.json is nested extremely deeply, with the right digest",
        _record("run-1.json", lambda record: "[" * 200_000),
        "run-1.json cannot be read",
        ("mpi",),
    ),
    _passed_over(
        "run-1.json lacks the position in the data, with the right digest",
        _record("run-1.json", lambda record: {**record, "run": {"step": NEWEST}}),
        "run-1.json does not have the format that hvdcomp writes: these values are missing: augmenting",
        ("ddp",),
    ),
    Fault("all checkpoints are cut off", GROUP, _REFUSED.strip(), _WITHIN, _all_damaged, ("ddp",)),
    _goes_on(
        "a checkpoint of an older format, without digests", "The checkpoint is loaded.", _before_digests, ("mpi", "ddp")
    ),
    _goes_on(
        "leftovers of a rank that was killed while it saved",
        "The leftovers are removed. Training continues from the newest complete checkpoint.",
        _never_complete,
        ("gloo",),
    ),
    _refused(
        "a checkpoint of a future format",
        _record("run-0.json", lambda record: {**record, "format": 99}),
        "was written by another version of hvdcomp; name another --checkpoint-folder",
        ("gloo",),
    ),
    _refused("model.pt of another program", _foreign("model.pt", True), "cannot be read: KeyError", ("gloo", "ddp")),
    _refused("rank-1.pt is not a dictionary", _foreign("rank-1.pt", False), "cannot be read: KeyError", ("mpi",)),
    _refused("model.pt with a command in it", _hostile("model.pt", True), "cannot be read: UnpicklingError"),
    _refused(
        "rank-1.pt is a pickle with a command in it",
        _hostile("rank-1.pt", False),
        "cannot be read: UnpicklingError",
        ("ddp",),
    ),
    _refused(
        "a checkpoint of a run with a different seed",
        _as_it_is,
        "was saved by a run with seed=0, but this run has 1",
        options=("--seed", "1"),
        remedy=_ANEW,
    ),
    _refused(
        "a checkpoint of a run with a different compression",
        _as_it_is,
        "was saved by a run with compression='topk:ratio=0.02', but this run has 'fp16'",
        ("mpi",),
        ("--compression", "fp16"),
        _ANEW,
    ),
    _refused(
        "a checkpoint of a run with a different model",
        _as_it_is,
        "was saved by a run with lr=0.05 and model='mlp', but this run has 0.03 and 'cnn'",
        ("ddp",),
        ("--model", "cnn"),
        _ANEW,
    ),
]
