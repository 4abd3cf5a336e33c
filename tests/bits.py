"""Compares the results of two checkouts of hvdcomp bit for bit, such as before and after a change of the engine.

    python -m tests.bits OTHER            # compares this checkout with the one in folder OTHER
    python -m tests.bits OTHER --only stc # only the cases with "stc" in their names
    python -m tests.bits --dump FILE      # writes digests of the imported hvdcomp

Every registered method, in each of its forms, makes a few steps on 1, 2 and 4 ranks of one process, in NumPy and in
PyTorch, in every element type. In these steps its level changes, one step is skipped as not finite, and one continues
from a checkpoint. The program compares results, residuals and warm starts, checkpoints, bytes, and decisions of
policies. It uses only stable parts of hvdcomp beside the compared ones, and reads only hvdcomp of the other checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.adaptation.channel import CommunicatorBroadcaster
from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.arrays.types import Array
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.communicators.in_process import InProcessCommunicator, InProcessGroup
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import ErrorFeedback, Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.packing import pad
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, TensorInfo
from hvdcomp.compressors.sparsification import TopK
from hvdcomp.errors import SpecError
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies import parse_policy

SHAPES = {
    "empty": (0, 3), "long": (3, 2_001), "matrix": (16, 24), "odd": (5, 7, 3), "one": (1,), "scalar": (),
    "vector": (77,),
}  # fmt: skip
STEPS, FAILING, RESTORED, CHANGED = 5, 3, 4, 2
DTYPES = ("float32", "float16", "bfloat16", "float64")
POLICIES = {
    "ratio": ("accordion:low=0.2,high=0.05,steps=2,eta=0.9", "budget:factor=4,interval=3,last=2"),
    "rank": ("accordion:low=4,high=2,steps=2,eta=0.9", "lgreco:interval=3,last=2"),
    "bits": ("accordion:low=8,high=4,steps=2,eta=0.9", "adaqs:start=16,fall=0.01,steps=2"),
}
"""By what methods call their level."""
MEMORIES: dict[str, Memory] = {
    "decaying": ErrorFeedback(0.5),
    "momentum": MomentumCorrection(0.75),
    "clipped": MomentumCorrection(0.75, True, 3.0, False),
    "no memory": NoMemory(),
}


@dataclass(frozen=True)
class BlockMeans(Compressor):
    """A user's own method: means of blocks (docs/your-own-compressor.md)."""

    block: int = 4

    name = "blockmeans"
    examples = ("blockmeans:block=4",)
    level_name = "block"
    sends = "means"
    biased = True

    def aggregate(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        vector = xp.flatten(xp.astype(x, "float64"))
        blocks = xp.reshape(pad(xp, vector, self.block), (-1, self.block))
        scales = xp.astype(blocks.sum(1, keepdims=True) * (1 / self.block), "float32")

        def spread(means: Array) -> Array:
            elements = xp.flatten(xp.zeros(blocks.shape, like=means) + means)[: vector.shape[0]]
            return xp.astype(xp.reshape(elements, x.shape), xp.dtype_name(x))

        mean = yield AllReduce(scales)
        return Outcome(spread(mean), spread(scales))


@dataclass(frozen=True)
class Smoothed(Compressor):
    """A user's own method with a state in the tensor's shape, rounds that depend on the tensor's size, and sums."""

    share: float = 0.5

    name = "smoothed"
    examples = ("smoothed",)
    level_name = "share"
    sends = "all elements"
    biased = True
    keeps_state = True
    of_matrices = True

    def prepare(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        return state or (xp.zeros(x.shape, like=x),)

    def aggregate(self, xp: Any, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        sent = x * self.share + state[0] * self.share
        mean = yield AllReduce(sent, "sum")
        if len(x.shape) > 1:
            mean = yield AllReduce(mean, "max")
        return Outcome(mean * (1 / context.world_size), sent, (mean,))


@dataclass(frozen=True)
class FirstK(TopK):
    """A user's own method that inherits from a method of hvdcomp and changes it."""

    name = "firstk"
    examples = ("firstk:ratio=0.1",)

    def choose(self, xp: Any, vector: Array, k: int) -> Array:
        return xp.arange(k, like=xp.from_numpy(np.zeros(0, np.int32), like=vector))


COMPRESSORS.update({kind.name: kind for kind in (BlockMeans, Smoothed, FirstK)})


class Case(NamedTuple):
    """The settings of one run."""

    spec: str
    backend: str
    dtype: str
    ranks: int
    memory: str = ""
    policy: str = ""
    per_node: int = 0

    def __str__(self) -> str:
        more = [self.memory, self.policy, f"{self.per_node} a node" if self.per_node else ""]
        return " ".join([self.spec, self.backend, self.dtype, f"{self.ranks} ranks", *filter(None, more)])


def cases() -> Iterator[Case]:
    """All cases."""
    specs = [_of_small(spec) for kind in COMPRESSORS.values() for spec in kind.examples if kind.name != "two_level"]
    specs += [_scattered(spec) for spec in specs if _scatters(spec)]
    for spec, backend in itertools.product(specs, ("numpy", "torch")):
        for ranks in (1, 2, 4):
            yield Case(spec, backend, "float32", ranks)
        for dtype in DTYPES[1:]:
            yield Case(spec, backend, dtype, 2)
        for memory in MEMORIES:
            yield Case(spec, backend, "float32", 2, memory)
        yield Case(f"two_level({spec})", backend, "float32", 4, per_node=2)
        for policy in POLICIES.get(str(_parsed(spec).level_name), ()):
            yield Case(spec, backend, "float32", 2, policy=policy)


def _scattered(spec: str) -> str:
    return f"{spec}{',' if ':' in spec else ':'}exchange=scatter"


def _scatters(spec: str) -> bool:
    try:
        return isinstance(_parsed(spec), Gathering) and bool(_parsed(_scattered(spec)))
    except SpecError:
        return False


def _of_small(spec: str) -> str:
    """The spec with a larger ratio, for these small tensors."""
    compressor = _parsed(spec)
    return str(compressor.at_level(0.1) if compressor.level_name == "ratio" else compressor)


def _parsed(spec: str) -> Compressor:
    return parse_compressor(spec)


def digests(only: str = "") -> dict[str, dict[str, list[str]]]:
    """The digests of each case: by kind of data, one for each rank and step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {str(case): _run(case) for case in cases() if only in str(case)}


def _run(case: Case) -> dict[str, list[str]]:
    try:
        group = InProcessGroup(case.ranks, case.per_node or None)
        ranks = group.run(lambda communicator: _Rank(case, communicator).run())
    except Exception as error:  # a refusal is compared too
        return {"error": [f"{type(error).__name__}: {error}"]}
    return {kind: [digest for rank in ranks for digest in rank[kind]] for kind in ranks[0]}


class _Rank:
    """One rank of a case."""

    def __init__(self, case: Case, communicator: InProcessCommunicator) -> None:
        self._case = case
        self._communicator = communicator
        self._compressor = _parsed(case.spec)
        self._engine, self._coordinator = self._fresh()
        self._digests: dict[str, list[str]] = {}

    def _fresh(self) -> tuple[Engine, Coordinator | None]:
        case = self._case
        tensors = [TensorInfo(name, shape, case.dtype) for name, shape in SHAPES.items()]
        engine = Engine(self._communicator, tensors, self._compressor, self._memory(), min_numel=0, min_ndim=0)
        if not case.policy:
            return engine, None
        like = self._array(np.zeros(0))
        broadcaster = lambda: CommunicatorBroadcaster(self._communicator, like)  # noqa: E731
        return engine, Coordinator(parse_policy(case.policy), engine, broadcaster, like)

    def _memory(self) -> Memory | None:
        return MEMORIES.get(self._case.memory)

    def run(self) -> dict[str, list[str]]:
        for step in range(STEPS):
            if step == RESTORED:
                state = state_of(self._engine, self._coordinator, _copy)
                self._engine, self._coordinator = self._fresh()
                restore(state, self._engine, self._coordinator, lambda array, name: _copy(array))
            elif step == CHANGED and self._coordinator is None:
                self._engine.set_level(_other_level(self._compressor))
            self._step(step)
        return self._digests

    def _step(self, step: int) -> None:
        engine, coordinator = self._engine, self._coordinator
        if coordinator is not None:
            coordinator.begin_step(lambda: (0.1,))
        engine.begin()
        sums = None
        if coordinator is not None:
            coordinator.before_exchange()
            sums = coordinator.sums_of_step(1.0)
        results = engine.step(self._gradients(step), sums=sums)
        if coordinator is not None:
            coordinator.end_step()
        cost = engine.ledger.last
        assert cost is not None
        by_tensor = {
            name: (tensor.bytes_sent, tensor.bytes_in_node, tensor.floats_sent) for name, tensor in cost.tensors.items()
        }
        self._note("results", results)
        self._note("residuals", {name: state.memory for name, state in engine.states.items()})
        self._note("warm starts", {name: (state.method, *state.compressor) for name, state in engine.states.items()})
        self._note("bytes", [cost.bytes_sent, cost.bytes_in_node, cost.floats_sent, cost.dense_bytes, by_tensor])
        self._note("plan", {name: str(compressor) for name, compressor in engine.plan.items()})
        state = state_of(engine, coordinator, _copy)
        if coordinator is not None:
            self._note("statistics", [rank_state.pop("coordinator") for rank_state in state.values()])
        self._note("checkpoint", state)

    def _gradients(self, step: int) -> dict[str, Array]:
        rng = np.random.default_rng([self._communicator.rank, step])
        values = {name: 0.8**step * (rng.standard_normal(shape) + 1 / (1 + step)) for name, shape in SHAPES.items()}
        if step == FAILING and self._communicator.rank == self._communicator.world_size - 1:
            values["odd"][1, 1, 1] = np.nan
        return {name: self._array(value) for name, value in values.items()}

    def _array(self, values: Any) -> Array:
        if self._case.backend == "numpy":
            if self._case.dtype == "bfloat16":
                import ml_dtypes  # noqa: F401  # makes it a type of NumPy
            return np.asarray(values).astype(self._case.dtype)
        import torch

        return torch.tensor(np.asarray(values)).to(getattr(torch, self._case.dtype))

    def _note(self, kind: str, value: Any) -> None:
        digest = hashlib.blake2b(digest_size=6)
        _feed(digest, value)
        self._digests.setdefault(kind, []).append(digest.hexdigest())


def _other_level(compressor: Compressor) -> Any:
    level = compressor.level
    if level is None:
        return None
    return level * 2 if isinstance(level, int) and level < 8 else level / 2 if isinstance(level, float) else level // 2


def _copy(array: Array) -> Array:
    return np.array(array) if isinstance(array, np.ndarray | np.generic) else array.detach().clone()


def _feed(digest: Any, value: Any) -> None:
    """Updates the digest with the bits of all arrays, and all other values as text."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            if str(key).endswith("seconds"):  # a time is another one in each run
                continue
            digest.update(f"{key}:".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for entry in value:
            _feed(digest, entry)
        digest.update(b";")
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{np.shape(value)}{value.dtype}".encode() + value.tobytes())
    elif hasattr(value, "detach"):
        flat = value.detach().contiguous().reshape(-1)
        digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(flat.view(flat.new_empty(0).to(_bytes()).dtype).numpy().tobytes() if len(flat) else b"")
    else:
        digest.update(repr(value).encode())


def _bytes() -> Any:
    import torch

    return torch.uint8


def _digests_of(folder: Path, only: str) -> Any:
    """The digests of a checkout, made with this file in a separate process."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "digests.json")
        environment = os.environ | {"PYTHONPATH": str(folder)}
        command = [sys.executable, "-P", __file__, "--dump", str(file), "--only", only]
        subprocess.run(command, check=True, cwd=scratch, env=environment)
        return json.loads(file.read_text())


def main() -> int:
    """Runs the command, and returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="the folder of the other checkout")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="writes digests instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    options = parser.parse_args()
    if options.dump is not None:
        options.dump.write_text(json.dumps(digests(options.only)))
        return 0
    if options.other is None:
        parser.error("name the folder of the other checkout, or --dump FILE")
    if not (options.other / "hvdcomp" / "__init__.py").is_file():  # else the installed hvdcomp would be compared
        parser.error(f"{options.other} is no checkout of hvdcomp")
    here, there = (_digests_of(folder.resolve(), options.only) for folder in (Path(__file__).parents[1], options.other))
    differing = 0
    for name in sorted(here.keys() & there.keys()):
        a, b = here[name], there[name]
        kinds = []
        for kind in sorted(a.keys() | b.keys()):
            pairs = list(itertools.zip_longest(a.get(kind, []), b.get(kind, [])))
            if unequal := sum(first != second for first, second in pairs):
                kinds.append(f"{kind} ({unequal} of {len(pairs)})")
        if kinds:
            differing += 1
            print(f"{name}: {', '.join(kinds)}")
    refused = sum("error" in digests_of_case for digests_of_case in here.values())
    of_one = len(here.keys() ^ there.keys())
    print(f"{len(here)} cases, {refused} of them refused; {of_one} are of one checkout alone; {differing} differ")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
