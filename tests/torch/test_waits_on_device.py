"""With gradients on a device, a step of a training makes the host wait for no result: all of PyTorch's bindings, and
all methods with kernels there. There is no device here, but what would wait for one fails, or is noted."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import hvdcomp
from hvdcomp.kernels import cuda

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")
import hvdcomp.ddp  # noqa: E402
from tests.cuda_kernels import SPECS, Launch, recorded  # noqa: E402
from tests.device_waits import WaitedError, nothing_waits, on_device  # noqa: E402

pytestmark = pytest.mark.skipif(not cuda.available(), reason=f"no kernels for CUDA: {cuda.why_not()}")

RANKS = 2
CAST = ("none", "fp16")  # whose sums the library makes, without kernels
QUICK = ("fp16", "topk:ratio=0.01", "powersgd:rank=4", "signsgd")
CUT = "int4:exchange=scatter", "two_level(int4)", "two_level(powersgd:rank=2)"
OTHERS = [one for one in (*SPECS, *CUT) if one not in QUICK]


def methods(turn: int) -> list[Any]:
    """In `make test-all`, each of the other methods with one of the bindings, in turns. Engines run all of them in
    `tests.exchange.test_device_waits`."""
    return [*QUICK, *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS[turn::2])]


def travels_on_host(tensor: Any) -> bool:
    """The ranks' presence does, which is a whole number; gradients and what is made of them do not."""
    return bool(tensor.dtype == torch.int64 and tensor.numel() == 1)


class Handles:
    """In place of Horovod's library in one of two ranks that do the same.

    As in gpu_operations.cc of Horovod 0.28.1: a handle is done when the device has the collective's result, or with
    HOROVOD_ENABLE_ASYNC_COMPLETION when the collective is in the device's queue. So without that, who asks for a result
    waits for the device.

    Args:
        waits: whether it is without that.
        launches: of kernels, noted by somebody else.

    Attributes:
        told: what was done, in order: "launch" of so many kernels, or "start" or "ask" of a collective on the device.
        waits_for: the names of those for which the host has waited.
    """

    def __init__(self, waits: bool, launches: list[Launch]) -> None:
        self._waits = waits
        self._launches = launches
        self._started: dict[int, tuple[str, bool, Any]] = {}
        self._polled = (0, 0)
        self.forget()

    def forget(self) -> None:
        """What was noted."""
        self.told: list[tuple[str, str]] = []
        self.waits_for: list[str] = []

    def __getattr__(self, function: str) -> Any:
        kind = re.fullmatch(r"horovod_torch_([a-z]+)_async_torch_\w+Tensor", function)
        if kind is None:
            raise AttributeError(function)
        return functools.partial(self._start, kind[1])

    def _start(self, kind: str, sent: Any, *rest: Any) -> int:
        name = next(one for one in rest if isinstance(one, bytes)).decode()
        output = [one for one in rest if isinstance(one, torch.Tensor)][kind == "alltoall"]

        def finish() -> None:
            if kind == "allgather":
                output.set_(torch.cat([sent] * RANKS))
            elif kind == "alltoall":
                output.set_(torch.cat([sent[: len(sent) // RANKS]] * RANKS))
            elif kind == "reducescatter":
                output.set_(sent[: len(sent) // RANKS].clone())

        self._started[len(self._started) + 1] = name, not travels_on_host(sent), finish
        self._tell("start", len(self._started))
        return len(self._started)

    def _tell(self, what: str, handle: int) -> None:
        name, is_on_device, _ = self._started[handle]
        if self._launches:
            self.told.append(("launch", str(len(self._launches))))
            self._launches.clear()
        if is_on_device:
            self.told.append((what, name))

    def horovod_torch_poll(self, handle: int) -> bool:
        """Done when it is asked again, after something else was started."""
        before, self._polled = self._polled, (handle, len(self._started))
        if before == self._polled:
            raise WaitedError("a loop that asks for a result")
        return before[0] == handle

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        name, is_on_device, finish = self._started[handle]
        self._tell("ask", handle)
        if is_on_device and self._waits:
            self.waits_for.append(name)
        finish()


def model_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(24, 30), torch.nn.Linear(30, 18), torch.nn.Linear(18, 7))
    return model, torch.optim.SGD(model.parameters(), 0.01)


def steps(model: Any, optimizer: Any, before: Callable[[], None] = lambda: None) -> None:
    """Three steps. In the first one the ranks compare settings and agree on an order."""
    for step in range(3):
        before()
        with nothing_waits(travels_on_host) if step else nullcontext():
            model(torch.ones(5, 24)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()


def with_horovod(spec: str, overlap: bool, waits: bool, monkeypatch: pytest.MonkeyPatch) -> Handles:
    """A training with two ranks of Horovod, as one of them sees it; what was noted of its last step."""
    hvd = pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    from horovod.torch import mpi_ops
    from horovod.torch import optimizer as optimizers

    ranks = SimpleNamespace(
        process_set_id=0, ranks=[*range(RANKS)], included=lambda: True, rank=lambda: 0, size=lambda: RANKS
    )
    model, sgd = model_and_optimizer()
    compression = hvdcomp.Compression.from_spec(
        spec, named_parameters=model.named_parameters(), min_numel=0, overlap=overlap, bucket_bytes=1500
    )
    with on_device(monkeypatch), recorded() as launches, monkeypatch.context() as patch:
        handles = Handles(waits, launches)
        patch.setattr(mpi_ops, "mpi_lib", handles)
        for module, number in ((optimizers, "size"), (mpi_ops, "size"), (hvd, "size"), (hvd, "local_size")):
            patch.setattr(module, number, lambda: RANKS)
        patch.setattr(hvd, "cross_rank", lambda: 0)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression, process_set=ranks)
        steps(model, optimizer, handles.forget)
    return handles


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("spec", methods(0))
def test_with_horovod_the_host_asks_when_all_is_launched_and_waits_for_nothing(
    spec: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = with_horovod(spec, overlap, False, monkeypatch)
    started, asked = ([name for what, name in handles.told if what == which] for which in ("start", "ask"))
    assert started
    assert sorted(started) == sorted(asked)
    first_asked = handles.told.index(("ask", asked[0]))
    assert not [name for what, name in handles.told[first_asked:] if what == "start" and "round0" in name]
    assert ("launch" in dict(handles.told[:first_asked])) == (spec not in CAST)
    assert not handles.waits_for


@pytest.mark.parametrize("spec", QUICK)
def test_without_asynchronous_completion_it_waits_in_every_round(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = with_horovod(spec, False, True, monkeypatch)
    assert handles.waits_for == [name for what, name in handles.told if what == "ask"]
    assert handles.waits_for


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("spec", methods(1))
def test_with_ddp_the_host_reads_nothing_but_the_presence(
    spec: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer()
    with on_device(monkeypatch), recorded() as launches:
        distributed = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
        compression = hvdcomp.Compression.from_spec(spec, min_numel=0, overlap=overlap)
        hvdcomp.ddp.register(distributed, compression, optimizer)
        steps(distributed, optimizer)
    assert bool(launches) == (spec not in CAST)
