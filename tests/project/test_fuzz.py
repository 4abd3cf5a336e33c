"""Random cases: no exception, the same on all ranks, nothing kept that is not finite, bytes as promised.

A seed of one's own, or one case alone: HVDCOMP_FUZZ=7 or HVDCOMP_FUZZ=7:123 in the environment.
"""

from __future__ import annotations

import os
import random
import traceback

import pytest

from hvdcomp import ErrorFeedback, PowerSGD
from hvdcomp.compressors.protocol import TensorInfo
from tests.fuzz import Case, draw_case, run_case
from tests.harness import EVERY_BACKEND
from tests.interpreted import needs_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def failures(seed: int, numbers: range) -> list[str]:
    """What went wrong, and how to see it again."""
    found = []
    for number in numbers:
        case = draw_case(seed, number)
        try:
            run_case(case)
        except Exception:
            again = f"HVDCOMP_FUZZ={seed}:{number} pytest tests/project/test_fuzz.py -k many"
            found.append(f"{again}\n{case}\n{traceback.format_exc()}")
    return found


def test_some_cases() -> None:
    assert not failures(1, range(200))


def residual_of_powersgd_overflows(backend: str) -> Case:
    """Of this seed a gradient is near the largest float32, and the mean of P Q' has the other sign."""
    return Case(
        backend=backend,
        ranks=3,
        tensors=(TensorInfo("t0", (0, 3), "float32"), TensorInfo("t1", (29, 16), "float32")),
        compressor=PowerSGD(1),
        memory=ErrorFeedback(),
        changes=(None, 1),
        rescaled=(1.0, 1.0),
        spoilt=None,
        smallest=(16, 2),
        seed="454117092:436",
    )


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_what_overflows_in_a_residual_of_powersgd_becomes_zero(backend: str) -> None:
    run_case(residual_of_powersgd_overflows(backend))


@needs_triton
def test_so_it_does_on_cuda_devices(in_interpreter: None) -> None:
    run_case(residual_of_powersgd_overflows("torch"))


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_many_cases(capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config) -> None:
    """10,000 cases that were never tried before, unless by a seed that was given."""
    given, _, number = os.environ.get("HVDCOMP_FUZZ", "").partition(":")
    given = given or pytestconfig.getoption("--hypothesis-seed", None)
    seed = int(given) if given else random.SystemRandom().randrange(10**6)
    numbers = range(int(number), int(number) + 1) if number else range(10_000)
    with capsys.disabled():
        print(f"\nrandom cases of seed {seed} (HVDCOMP_FUZZ={seed} runs the same)")
    found = failures(seed, numbers)
    assert not found, f"{len(found)} of {len(numbers)} cases failed\n" + "\n".join(found[:5])
