"""The mark of tests whose kernels for CUDA devices run in Triton's interpreter; `conftest` loads them so."""

from __future__ import annotations

import pytest

from hvdcomp.kernels import cuda

needs_triton = pytest.mark.skipif(not cuda.available(), reason=f"no kernels for CUDA: {cuda.why_not()}")
