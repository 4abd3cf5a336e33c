"""Loads Triton in a way that works in the same process as TensorFlow.

TensorFlow 2.20 and later export the symbols of their LLVM to every library that is loaded after TensorFlow. Triton
contains a different version of LLVM, and crashes if it uses TensorFlow's symbols. Triton works if its libraries prefer
their own symbols (RTLD_DEEPBIND).
"""

import os
import sys

_flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0))
try:
    import triton._C.libtriton
finally:
    sys.setdlopenflags(_flags)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from hvdcomp.kernels.cuda.cache import OverlaidCache  # noqa: E402

__all__ = ["INTERPRETED", "tl", "triton"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, because TRITON_INTERPRET=1 was in the environment when they were
imported."""

if triton.knobs.cache.manager_class is None:  # a class is set if TRITON_CACHE_MANAGER is in the environment
    triton.knobs.cache.manager_class = OverlaidCache
