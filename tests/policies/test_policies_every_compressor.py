"""Every compressor with a level can be steered by every kind of policy, on two ranks with gradients of their own."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.policies import POLICIES as REGISTRY
from hvdcomp.policies import Policy, parse_policy
from hvdcomp.policies.request import Candidate, Candidates
from tests.driven import Driven
from tests.harness import EXAMPLES, INSTALLED, some_of
from tests.pairs import compressor_for

SHAPES = {"a": (40, 30), "b": (24, 50)}
LEVELLED = [spec for spec in EXAMPLES if parse_compressor(spec).level is not None]
POLICIES = (
    "accordion:low={low},high={high},steps=2,eta=0.9",
    "adaqs:start=16,fall=0.01,steps=2",
    "lgreco:interval=3,last=2",
    "budget:factor=4,interval=3,last=2",
    "budget:factor=8,critical=2,interval=2,last=2",
    "budget:ms=2,calibration=nowhere.json,interval=3,last=2",
    "gravac:min=2,max=16,window=2,epsilon=0.3,smoothing=1,omega=0",
    "gravac:min=2,max=16,window=2,epsilon=0.3,smoothing=1,omega=0,factor=elements,gain=raw",
)
SECONDS = {300: 0.001, 1200: 0.003, 10_000: 0.01}  # of exchanges of so many bytes, as a calibration might say


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Gradients that shrink and lose their mean, so that policies have something to decide."""
    rng = np.random.default_rng([rank, step])
    return {
        name: (0.8**step * (rng.standard_normal(shape) + 1 / (1 + step))).astype(np.float32)
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize(("spec", "policy", "backend"), some_of(5, LEVELLED, POLICIES, INSTALLED))
def test_levels_change_on_all_ranks_alike(spec: str, policy: str, backend: str) -> None:
    own = parse_compressor(spec).level
    assert own is not None
    low = max(2, own) if isinstance(own, int) else own
    chosen = parse_policy(policy.format(low=low, high=low // 2 if isinstance(low, int) else low / 2))

    def work(communicator: InProcessCommunicator) -> Driven:
        told = {"gradients": gradients, "shapes": SHAPES, "exchange_seconds": SECONDS}
        return Driven(communicator, chosen, backend, spec=spec, **told).run(9)

    ranks = run_ranks(2, work)
    assert ranks[0].plans == ranks[1].plans
    assert ranks[0].result_bits() == ranks[1].result_bits()
    assert all(np.isfinite(x).all() for results in ranks[0].results for x in results.values())
    if policy.startswith("accordion:low"):  # of the others it depends on how much the method keeps
        assert len({str(plan) for plan in ranks[0].plans}) > 1


@pytest.mark.parametrize("spec", [spec for kind in REGISTRY.values() for spec in kind.examples])
def test_every_policy_drives_two_ranks_as_its_example_says(spec: str) -> None:
    policy = parse_policy(spec)
    if not isinstance(policy, Policy):
        pytest.skip("a schedule, which no rank decides")
    compressor = compressor_for(spec)
    candidates = Candidates(("a", "b"), {"dense": Candidate(1.0, 0, "none"), "compressed": Candidate(0.9, 1, None)})

    def work(communicator: InProcessCommunicator) -> Driven:
        driven = Driven(
            communicator,
            policy,
            "numpy",
            spec=compressor,
            steps_per_epoch=2,
            gradients=gradients,
            shapes=SHAPES,
            candidates=candidates,
            exchange_seconds=SECONDS,
        )
        return driven.run(9)

    ranks = run_ranks(2, work)
    assert ranks[0].plans == ranks[1].plans
    assert ranks[0].batches == ranks[1].batches
    assert ranks[0].result_bits() == ranks[1].result_bits()
    assert len(ranks[0].plans) == 9
