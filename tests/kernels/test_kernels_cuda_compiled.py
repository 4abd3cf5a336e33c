"""How often kernels for CUDA devices are compiled: launched in earnest, as far as that needs no device."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_WITHOUT_DEVICE = """
import sys
import torch
from hvdcomp.kernels.cuda.language import triton
from triton.backends.compiler import GPUTarget
from hvdcomp import ErrorFeedback
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda

class Driver:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 70, 32))

triton.runtime.driver.set_active(Driver())
"""

_PROGRAM = """
def note(key, repr, **rest):  # what it is called with before each compilation; that it answers takes the place of one
    compiled.add((repr, str(key)))
    return True

triton.knobs.runtime.jit_cache_hook = note

def step(communicator):
    engine = Engine(communicator, tensors, parse_compressor(spec), ErrorFeedback(), min_numel=0, min_ndim=0)
    for _ in range(2):
        engine.begin()
        engine.step({one.name: torch.zeros(one.shape) for one in tensors}, in_place=True)

for spec in sys.argv[1:]:
    counts = []
    for shapes in ([(64, 1100), (7, 3)], [(40, 30)] * 16, [(64, 33)] * 161):
        tensors = [TensorInfo(str(number), shape) for number, shape in enumerate(shapes)]
        compiled = set()
        with cuda.serving_host():
            run_ranks(1, step)
        counts.append(compiled)
    assert compiled and counts == [compiled] * 3, [len(one) for one in counts]
"""


pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("triton") is None or find_spec("torch") is None, reason="needs PyTorch and Triton"),
]


def _run(program: str, *arguments: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_compiled_does_not_depend_on_the_tensors() -> None:
    _run(_WITHOUT_DEVICE + _PROGRAM, "fp16", "efsignsgd", "qsgd:bits=4", "topk:ratio=0.01", "dgc:ratio=0.01")


_TYPES = """
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.compressors.protocol import Context
from hvdcomp.kernels.cuda.device import DeviceKernels
from tests.cuda_kernels import kernels_in_source, specialized

def note(compile, **rest):
    kinds = list(compile["signature"].values())
    values = {index: value for (index,), value in compile["configs"][0].items()}
    compiled.append(tuple((kind, values.get(place)) for place, kind in enumerate(kinds) if kind != "constexpr"))
    return True

def launch(self, kernel, programs, *arguments, **constants):
    names.add(kernel.__name__)
    recorded.append(specialized(kernel, arguments))
    launched(self, kernel, programs, *arguments, **constants)

triton.knobs.runtime.jit_cache_hook = note
launched, DeviceKernels.launch = DeviceKernels.launch, launch
numbers, names = torch.zeros(77), set()
for spec, name, bits, *first in (
    ("none", "dense_decode", 0),
    ("bf16", "bfloat16_decode", 0),
    ("efsignsgd", "two_values_decode", 0, 1),
    ("signsgd", "votes_decode", 0),
    ("int8", "multiples_decode", 8, 128),
    ("qsgd:bits=7", "multiples_decode", 7, 512),
    ("fp8", "float8_decode", 8, 128, 3),
    ("natural", "natural_decode", 0),
    ("eden", "eden_decode", 2, numbers, 1024),
    ("chunkedtopk:chunk=50,k=5", "chunks_decode", 0, 50, 0),
    ("topk:ratio=0.1", "sparse_decode", 0),
):
    recorded, compiled = [], []
    with cuda.serving_host():
        bucket = Bucket([TensorInfo("one", (77,))], [parse_compressor(spec)], NoMemory(), torch.device("cpu"))
        bucket.begin(Context("", 0, 0, 0, 1))
        bucket.segments["count"] = bits
        for row in (1, 16, 2**31 - 1, 2**31):
            rest = () if name == "dense_decode" else (3, row, False) if name == "sparse_decode" else (3, row)
            bucket.call(name, *first, numbers, *rest)
    assert len(compiled) == 4 and recorded == compiled, (spec, recorded, compiled)
    assert len(set(compiled)) == 1, (spec, compiled)
of_rows = {name for name, kernel in kernels_in_source().items() if "row" in [one.arg for one in kernel.args.args]}
assert names == of_rows | {"dense_decode"}, names
"""


_KEPT = """
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.compressors.protocol import Context
from hvdcomp.kernels.cuda import device

class Kernel:
    def __getitem__(self, grid):
        return lambda *arguments: again.append((grid, arguments))

class Launched:  # in place of Triton's: what it is called for is compiled, and handed out
    def __init__(self, function):
        self.params = for_all_numbers(function).params
    def __getitem__(self, grid):
        return lambda *numbers, **constants: first.append((grid, numbers, constants)) or Kernel()

for_all_numbers, device.for_all_numbers = device.for_all_numbers, Launched
first, again = [], []
numbers = torch.zeros(77)
with cuda.serving_host():
    bucket = Bucket([TensorInfo("one", (77,))], [parse_compressor("int8")], NoMemory(), torch.device("cpu"))
    bucket.begin(Context("", 0, 0, 0, 1))
    for ranks, row in ((3, 16), (3, 32), (3, 2**31), (3, 2**31 + 5), (4, 5)):
        bucket.call("multiples_decode", 128, numbers, ranks, row)
(grid, given, constants), (other, far, _) = first  # where a row is longer than 32 bits can say, it is compiled anew
assert (grid, other) == ((1,), (1,)) and far[:3] == given[:3]
assert [arguments[5:7] for _, arguments in again] == [(3, 32), (3, 2**31 + 5), (4, 5)], again
names = [one.name for one in for_all_numbers(device.quant.codes_decode.fn).params]
for grid, arguments in again:
    assert grid == (1, 1, 1)
    named = dict(zip(names, arguments, strict=True))
    assert {name: named[name] for name in constants if name in named} | {"enable_fp_fusion": False} == constants
"""


def test_a_launch_like_an_earlier_one_is_not_looked_up_again() -> None:
    """Its numbers are the new ones, and its constants stand where the kernel has them."""
    _run(_WITHOUT_DEVICE + _KEPT)


def test_a_launch_is_recorded_with_the_types_that_triton_compiles_it_for() -> None:
    """And however far apart payloads are, they are the same."""
    _run(_WITHOUT_DEVICE + _TYPES)


_AHEAD = """
from hvdcomp.tools.bench import kernels_ahead
from hvdcomp.kernels.cuda.language import triton

found = []

def note(cache_hit, metadata, **rest):
    found.append((cache_hit, metadata["target"]))

triton.knobs.compilation.listener = note
kernels_ahead.EXAMPLES = ("fp16", "efsignsgd")
assert kernels_ahead.compile_for(70) == len(found) > 10
assert {str(getattr(target, "arch", None) or target["arch"]) for _, target in found} == {"70"}
print(*{hit for hit, _ in found})
"""


def test_what_is_compiled_ahead_is_found_by_the_steps_of_a_training(tmp_path: Path) -> None:
    """Which take no other way than those that compiled it, but for the device."""
    where = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert _run(_AHEAD, TRITON_STORE_BINARY_ONLY="1", **where) == "False\n"
    assert _run(_AHEAD, **where) == "True\n"
    # And by users whose home is not that of who compiled it, or cannot be written.
    nobody = {"HOME": "/dev/null", "TRITON_HOME": "/dev/null"}
    assert _run(_AHEAD, HVDCOMP_TRITON_CACHE=str(tmp_path), **nobody) == "True\n"
    assert _run(_AHEAD, HVDCOMP_TRITON_CACHE=str(tmp_path / "none"), **nobody) == "False\n"
