"""Compares the tables and figures of four papers with hvdcomp's results: `python -m benchmarks.reproduce`.

These are the papers whose methods hvdcomp implements: Agarwal et al. 2021, *Accordion: Adaptive Gradient Communication
via Critical Learning Regime Identification* (arXiv:2010.16248); Agarwal et al. 2022, *On the Utility of Gradient
Compression in Distributed Training Systems* (arXiv:2103.00543); Agarwal et al. 2023, *Bagpipe: Accelerating Deep
Recommendation Model Training* (arXiv:2202.12429), only its abstract; Tyagi and Swany 2023, *GraVAC: Adaptive
Compression for Communication-Efficient Distributed DL Training* (arXiv:2305.12201).

`published` has the published numbers, in one file for each paper. A counterpart is a function that computes hvdcomp's
numbers. The counterparts in `counted` use shapes and formulas. The counterparts in `bagpipe` use synthetic ids. The
counterparts in `predicted` use the performance model with published times of V100s. The counterparts in `accordion` and
`gravac` use training runs on simulated ranks (`workloads`). They compare these training runs with each other
(`compared`) and with control runs (`controls`). The counterparts in `timed` measure times on this machine.
"""

from __future__ import annotations

from benchmarks.reproduce.counterparts import run
from benchmarks.reproduce.outcome import Curve, Outcome, Row, read, write
from benchmarks.reproduce.published import PAPERS, Artifact, artifacts

__all__ = ["PAPERS", "Artifact", "Curve", "Outcome", "Row", "artifacts", "read", "run", "write"]
