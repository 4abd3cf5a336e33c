"""Steps that are timed on a device, with a device's clock in place of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hvdcomp.tools.bench import trainings  # noqa: E402
from hvdcomp.tools.bench.carrier import alone  # noqa: E402
from hvdcomp.tools.bench.probe_steps import Training, parts_of  # noqa: E402
from hvdcomp.tools.bench.workload import Workload  # noqa: E402
from tests.device_clock import CUDA, Device  # noqa: E402


class _Works(torch.autograd.Function):
    """Takes 1 s of the device forwards, and 2 s backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device) -> torch.Tensor:
        ctx.on = device
        device.add(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.on.add(2.0)
        return gradient, None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(Workload, "device", property(lambda workload: CUDA))
    return Device(monkeypatch)


def test_the_parts_of_a_step_are_the_devices_and_the_host_goes_ahead(device: Device) -> None:
    model = torch.nn.Linear(4, 1)
    workload = Workload(model, lambda: _Works.apply(model(torch.ones(2, 4)).sum(), device))
    training = Training(workload, alone(workload), after=lambda: device.add(4.0))
    steps = [training.step() for _ in range(3)]
    assert device.waits == [], "the host waits for no step"
    assert [parts_of(step) for step in steps] == [[1.0, 2.0, 4.0, 0.0]] * 3
    assert device.waits == [9], "it waits once, for all of them"


def test_a_timed_step_ends_with_the_devices_work(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "time", SimpleNamespace(perf_counter=lambda: device.now))
    carrier: Any = SimpleNamespace(ranks=SimpleNamespace(rank=0))
    timed = trainings.Training(carrier, trainings.COMPUTE, "mlp@digits", 2, 0)
    loss, model = timed._distributed.loss, timed._workload.model
    timed._distributed = alone(Workload(model, lambda: _Works.apply(loss(), device)))
    assert [timed._step(), timed._step()] == [3.0, 3.0]
    assert device.waits == [2, 2]
