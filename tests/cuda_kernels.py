"""Kernels for CUDA devices on machines without one: records their launches, and compiles the launched kernels.

    python -m tests.cuda_kernels 70 80 90

compiles each kernel in each form that the methods of `COMPILED` launch, for the first of these compute capabilities.
For each form, it prints the registers, the bytes of spilled registers and the shared memory. For the other compute
capabilities, it compiles only some of the forms, but each value of each constant of each kernel is in at least one of
them. It fails if a form does not compile.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from hvdcomp import ErrorFeedback
from hvdcomp.adaptation.energies import Energies, densified
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.memory import Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda
from hvdcomp.kernels.tables import NARROW
from tests.harness import previews_of

SPECS = (
    "none", "fp16", "bf16", "signsgd", "efsignsgd", "onebit", "qsgd:bits=4", "terngrad", "natural", "globalqsgd",
    "int8", "int4", "fp8", "eden",
    "topk:ratio=0.01", "topk:ratio=0.01,values=fp16", "mstopk:ratio=0.01",
    "redsync:ratio=0.01", "dgc:ratio=0.01", "powersgd:rank=4", "powersgd:rank=4,alternating=True",
    "randomk:ratio=0.01", "randomk:ratio=0.01,unbiased=True,values=fp16",
    "topkc:ratio=0.05", "arctopk:ratio=0.2,sketch=2", "chunkedtopk", "chunkedtopk:chunk=128,k=4,values=float32",
    "chunkedtopk:chunk=8,k=1,values=sign",
)  # fmt: skip

COMPILED = (
    *SPECS, *(f"powersgd:rank={rank}" for rank in (1, 2, 8, 16, 32)), "int4:rounding=stochastic,block=100",
    "fp8:rounding=stochastic", "fp8:format=e5m2", "fp8:rounding=stochastic,format=e5m2,block=100",
    "arctopk:ratio=0.2,sketch=32", "chunkedtopk:chunk=65536,k=3000,values=fp16", "efsignsgd:exchange=scatter",
    "fp16:exchange=scatter,rounding=stochastic", "bf16:exchange=scatter,rounding=stochastic",
    "qsgd:bits=1", "qsgd:bits=7", "terngrad:clip=0", "two_level(int4)", "eden:bits=1", "eden:bits=3,block=512",
    "eden:bits=2,scaled=True", "randomk:ratio=0.01,unbiased=True", "randomk:ratio=0.01,values=fp16",
)  # fmt: skip

MEMORIES = (
    NoMemory(), *(ErrorFeedback(dtype=dtype) for dtype in ("float32", "fp16", "bf16")),
    *(MomentumCorrection(0.9, nesterov=nesterov) for nesterov in (False, True)),
)  # fmt: skip

RANKS = 1, 2, 8, 16, 64, 1024
"""Numbers of ranks for which the kernels are compiled that depend on that, besides 4."""

MOST_SPILLED = 64  # bytes a thread
MOST_SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""By compute capability, the KiB of shared memory that a block may ask for."""

Launch = tuple[Any, tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]
"""A kernel; for each argument that is no constant, the type that it is compiled for, and what else of its value; and
the constants."""


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records kernels with their types of arguments and constants within the block, instead of launching them."""
    from hvdcomp.kernels.cuda.device import DeviceKernels

    noted: list[Launch] = []

    def launch(self: Any, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        noted.append((kernel, specialized(kernel, arguments), tuple(sorted(constants.items()))))

    before = DeviceKernels.launch
    DeviceKernels.launch = launch  # type: ignore[method-assign]
    try:
        with cuda.serving_host():
            yield noted
    finally:
        DeviceKernels.launch = before  # type: ignore[method-assign]


def specialized(kernel: Any, arguments: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    """The specialization for which Triton's launcher compiles a launch with these arguments.

    The type of an integer depends on its size, unless its parameter has a type. The compiler also knows whether the
    integer is 1, and whether 16 divides it, unless that is forbidden. Empty in Triton's interpreter, which does not
    compile.
    """
    from hvdcomp.kernels.cuda.device import numbers_of
    from hvdcomp.kernels.cuda.language import INTERPRETED

    if INTERPRETED:
        return ()
    bind, constants = _binder(kernel)
    _, specialization, _ = bind(*numbers_of(arguments), **constants)
    return tuple(part for part in specialization if part[0] != "constexpr")


@functools.cache
def _binder(kernel: Any) -> tuple[Any, dict[str, None]]:
    """A function that finds the types of a launch's arguments, and constants for it that do not change the types."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from hvdcomp.kernels.cuda.device import for_all_numbers

    launched = for_all_numbers(kernel.fn)
    backend = make_backend(GPUTarget("cuda", 80, 32))
    bind = create_function_from_signature(launched.signature, launched.params, backend)
    return bind, {parameter.name: None for parameter in launched.params if parameter.is_constexpr}


def watch(engine: Engine, sources: bool = False) -> None:
    """Has everything asked that policies may ask of x, and if `sources`, C(x) compressed in place of x."""
    previews = previews_of(engine)

    def look(look: Look) -> Mapping[str, Any]:
        names = list(look)
        look.energies(names)
        look.gradient_energies(names)
        look.lost_when_sent(names)
        kept = previews.kept(look, engine.plan, names, Energies())
        replaced = {name: densified(look.xp, look[name], values) for name, values in kept.items()} if sources else {}
        previews.lost(look, engine.plan, names, replaced)
        return replaced

    observe(engine, look)


def launches(
    spec: str,
    shapes: list[tuple[int, ...]],
    memory: Memory | None = None,
    steps: int = 1,
    ranks: int = 1,
    watched: bool = False,
    sources: bool = False,
    dtype: str = "float32",
) -> list[Launch]:
    """The launches of some steps of one of some ranks that do the same, two on each node if their number is even.

    Args:
        watched: whether statistics of x and sums of gradients are requested.
        sources: as of `watch`.
    """
    import torch

    tensors = [TensorInfo(f"t{number}", shape, dtype) for number, shape in enumerate(shapes)]
    with recorded() as launches:
        communicator = LoopbackCommunicator(ranks, 1 if ranks % 2 else 2)
        engine = Engine(communicator, tensors, parse_compressor(spec), memory, min_numel=0, min_ndim=0)
        sums = AccumulatedGradients()
        if watched:
            watch(engine, sources)
        for step in range(steps):
            engine.begin()
            gradients = {tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, dtype)) for tensor in tensors}
            engine.step(gradients, in_place=step % 2 == 0, sums=sums.of_step(1.0) if watched else None)
        assert engine.buckets.with_kernels
        assert engine.buckets.with_kernels[0].bucket.device is not None
    return launches


def every_form() -> list[Launch]:
    """The different launches of all methods, memories and types of gradients, of steps with and without requested
    statistics."""
    forms: dict[Any, Launch] = {}
    shapes = [(64, 1100), (7,)]

    def add(launched: list[Launch]) -> None:
        forms.update(((kernel.__name__, *rest), (kernel, *rest)) for kernel, *rest in launched)

    for spec, memory, watched in itertools.product(COMPILED, MEMORIES, (False, True)):
        for dtype in NARROW:
            add(launches(spec, shapes, memory, 2, 4, watched, watched, dtype))
    for spec, ranks in itertools.product(("topk:ratio=0.01", "topk:ratio=0.01,values=fp16"), RANKS):
        add(launches(spec, shapes, ranks=ranks))
    return list(forms.values())


def assembly_for(launch: Launch, capability: int) -> str:
    """The assembly (PTX) of a launch's kernel, compiled for a compute capability as `DeviceKernels.launch` does."""
    return str(_compiled(launch, capability).asm["ptx"])


def code_for(launch: Launch, capability: int) -> bytes:
    """The machine code of a launch's kernel for a compute capability."""
    return bytes(_compiled(launch, capability).asm["cubin"])


def _compiled(launch: Launch, capability: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.compiler.compiler import make_backend

    kernel, arguments, constants = launch
    target = GPUTarget("cuda", capability, 32)
    names = [name for name in kernel.arg_names if name not in dict(constants)]
    signature = {name: type_ for name, (type_, _) in zip(names, arguments, strict=True)}
    signature |= {name: "constexpr" for name, _ in constants}
    parse = make_backend(target).parse_attr
    metadata = {
        (kernel.arg_names.index(name),): parse(of_value)
        for name, (_, of_value) in zip(names, arguments, strict=True)
        if isinstance(of_value, str)
    }
    source = ASTSource(kernel, signature, dict(constants), metadata)
    return compile(source, target=target, options={"enable_fp_fusion": False})


def resources(launch: Launch, capability: int) -> tuple[int, int, int]:
    """Registers of a thread, its bytes of spilled registers, and bytes of shared memory of a program."""
    from triton import knobs

    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        binary = _compiled(launch, capability)
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spilled = re.findall(r"(\d+) bytes spill", log.getvalue())
    assert registers is not None, log.getvalue()
    assert binary.asm["cubin"]
    return int(registers[1]), sum(map(int, spilled)), int(binary.metadata.shared)


def kernels_in_source() -> dict[str, ast.FunctionDef]:
    """By name, all functions in Triton that no other of them calls: those that are launched."""
    functions = {
        function.name: function
        for file in Path(cuda.__file__).parent.glob("*.py")
        for function in ast.parse(file.read_text()).body
        if isinstance(function, ast.FunctionDef) and "triton.jit" in map(ast.unparse, function.decorator_list)
    }
    called = {
        node.func.id
        for function in functions.values()
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return {name: function for name, function in functions.items() if name not in called}


def covering(forms: Iterable[Launch]) -> list[Launch]:
    """Some of the forms: each kernel has each value of each of its constants in at least one of them."""
    covered: set[tuple[str, tuple[str, Any]]] = set()
    chosen = []
    for form in forms:
        values = {(form[0].__name__, constant) for constant in form[2]}
        if not values <= covered:
            covered |= values
            chosen.append(form)
    return chosen


def main(capabilities: list[int]) -> None:
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    forms = sorted(every_form(), key=lambda form: form[0].__name__)
    forgotten = kernels_in_source().keys() - {kernel.__name__ for kernel, _, _ in forms}
    assert not forgotten, f"no method of COMPILED launches {forgotten}"
    others = {id(form) for form in covering(forms)}
    tasks = [
        (number, capability)
        for number, form in enumerate(forms)
        for capability in (capabilities if id(form) in others else capabilities[:1])
    ]
    print(f"{len(forms)} kernels; registers / bytes spilled / bytes of shared memory")
    for line in _in_processes(forms, tasks):
        print(line, flush=True)


def _in_processes(forms: list[Launch], tasks: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Compiles forms for compute capabilities, one process on each core, and yields a line about each.

    Args:
        tasks: the number of a form, and a compute capability.
    """
    _FORMS[:] = forms  # forked processes have the kernels, which cannot be pickled
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(_line_about, tasks)


_FORMS: list[Launch] = []


def _line_about(task: tuple[int, int]) -> str:
    number, capability = task
    form = _FORMS[number]
    kernel = form[0].__name__
    registers, spilled, shared = resources(form, capability)
    assert spilled <= MOST_SPILLED, f"{kernel} spills registers"
    assert shared <= MOST_SHARED[capability] << 10, f"{kernel} takes more shared memory than there is"
    constants = " ".join(f"{name}={int(value)}" for name, value in form[2] if name not in ("PIECE", "BLOCK"))
    return f"{kernel:<20} sm_{capability}: {registers:>3} / {spilled} / {shared:<6} {constants}"


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
