"""What training looks like from outside the gradients: curvature of the loss, and the regimes it marks as critical.

Accordion tells critical regimes by the norm of the gradient because the eigenvalues of the Hessian, which earlier work
looks at, cost far too much to be followed in every training. Here both can be measured, to see whether they agree on
a model of one's own. Needs PyTorch; pictures need matplotlib.
"""

from __future__ import annotations

from hvdcomp.tools.diagnostics.hessian import HessianEigenvalue, largest_hessian_eigenvalue
from hvdcomp.tools.diagnostics.regimes import CRITERIA, RegimeRecord

__all__ = ["CRITERIA", "HessianEigenvalue", "RegimeRecord", "largest_hessian_eigenvalue"]
