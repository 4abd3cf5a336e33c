"""A rank that was started with other settings, or has another version."""

from __future__ import annotations

from tests.faults.table import ALL, Fault
from tests.faults.world import Planted, World

GROUP = "disagreement"
_WITHIN = 120  # from the start, on a busy machine


def _row(act: str, name: str, message: str, transports: tuple[str, ...], short: bool = False) -> Fault:
    def run(world: World) -> str:
        ended = world.train(planted=Planted(act, "start", rank=1, step=0)).failed()
        ended.expect(message)
        assert not world.weights(), "a step was made"
        assert not world.saved, "a checkpoint was written"
        return f"refused before the first step, the launcher with exit code {ended.code}"

    documented = "Every rank stops with an error before the first step. The message names the difference and the rank."
    return Fault(f"{name} on rank 1", GROUP, documented, _WITHIN, run, transports, short)


FAULTS = [
    _row("other-seed", "a different seed", "the ranks differ in seed: 0 on rank 0, 1 on rank 1", ALL, short=True),
    _row("other-model", "a different model", "the ranks differ in model: 'mlp' on rank 0, 'cnn' on rank 1", ("gloo",)),
    _row(
        "other-spec",
        "a different compression",
        "the ranks differ in compression: 'topk:ratio=0.02' on rank 0, 'topk:ratio=0.01' on rank 1",
        ("mpi", "ddp"),
    ),
    _row("other-policy", "a different policy", "the ranks differ in policy: 'accordion:low=0.1,high=0.02,", ("gloo",)),
    _row("other-memory", "no error feedback", "the ranks differ in memory: None on rank 0, 'none' on rank 1", ("ddp",)),
    _row(
        "other-batch",
        "a different batch size",
        "the ranks differ in batch_size: 16 on rank 0, 8 on rank 1",
        ("mpi",),
    ),
    _row(
        "without-checkpoints",
        "no --checkpoint-folder",
        "the ranks differ in checkpoint_every: 4 on rank 0, None on rank 1",
        ALL,
    ),
    _row(
        "other-hvdcomp",
        "a different version of hvdcomp",
        "the ranks do not agree on how to compress: hvdcomp: ",
        ALL,
    ),
]
