"""The mark of tests whose kernels for CUDA devices `conftest` loads in Triton's interpreter."""

from __future__ import annotations

import pytest

from hvdcomp.kernels import cuda

needs_triton = pytest.mark.skipif(not cuda.available(), reason=f"no kernels for CUDA: {cuda.why_not()}")
