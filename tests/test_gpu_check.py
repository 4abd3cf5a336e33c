"""`make gpu-check`, as far as it goes without a GPU: the same lines in Triton's interpreter, on tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hvdcomp.kernels import cuda

pytest.importorskip("torch")
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    if cuda.available():
        import hvdcomp.kernels.cuda.device  # noqa: F401
from tests.gpu import cases
from tests.gpu.ranks import HOST, Ranks, one_by_one

pytestmark = [
    pytest.mark.skipif(not cuda.available(), reason=f"no kernels for CUDA: {cuda.why_not()}"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of numbers that overflow
]

TINY = {"matrix": (6, 8), "odd": (5, 7, 3), "vector": (77,)}


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients on the CPU are served as if they were on a device."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with cuda.serving_host():
        yield


def quick(*chosen: tuple[str, str]) -> list[Any]:
    """Each form with each kind of numbers, of which those that are not named run in `make test-all` only."""
    return [
        pytest.param(spec, kind, marks=[pytest.mark.thorough] * ((spec, kind) not in chosen))
        for spec in cases.FORMS
        for kind in cases.NUMBERS
    ]


@pytest.mark.parametrize(
    ("spec", "kind"),
    quick(
        ("fp16", "large"), ("signsgd", "zeros"), ("efsignsgd", "normal"), ("onebit", "ties"), ("qsgd:bits=4", "zeros"),
        ("natural", "denormal"), ("topk:ratio=0.3,values=fp16", "ties"), ("powersgd:rank=4", "nan"),
    ),
)  # fmt: skip
def test_a_device_gives_what_numpy_gives(spec: str, kind: str) -> None:
    """Over steps in which nobody looks at what is kept."""
    assert list(cases.check(spec, kind, "cpu", TINY)) == []


def test_what_differs_is_named() -> None:
    """Here, ranks whose gradients are others'."""
    device, given = Ranks("none", TINY, "cpu"), [[cases.gradients("normal", TINY, rank, 0) for rank in range(2)]]
    with one_by_one():
        plain = Ranks("none", TINY, HOST)
        plain.step(given[0])
    others = [[{name: 2 * x for name, x in rank.items()} for rank in step] for step in given]

    class Otherwise(Ranks):
        def step(self, given: Any, *arguments: Any, **options: Any) -> Any:
            return super().step(others[0], *arguments, **options)

    said = list(cases.compare(device, lambda: Otherwise("none", TINY, HOST), given, "none"))
    assert len(said) == 2 * len(TINY)
    assert said[0].startswith("step 0, rank 0, matrix: 48 of 48 elements are apart, one by ")
