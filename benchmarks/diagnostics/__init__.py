"""Diagnostics of training: the curvature of the loss, and the critical regimes that it indicates.

Accordion detects critical regimes by the norm of the gradient. Earlier work uses the eigenvalues of the Hessian, which
are too expensive to follow in every training run. This package measures both, to compare them on a model of your own.
It needs PyTorch; plots need matplotlib.
"""

from __future__ import annotations

from benchmarks.diagnostics.hessian import HessianEigenvalue, largest_hessian_eigenvalue
from benchmarks.diagnostics.regimes import CRITERIA, RegimeRecord

__all__ = ["CRITERIA", "HessianEigenvalue", "RegimeRecord", "largest_hessian_eigenvalue"]
