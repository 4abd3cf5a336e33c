"""Tables and figures of four papers, compared with hvdcomp's results: `python -m benchmarks.reproduce`.

The papers are those whose methods hvdcomp has: Agarwal et al. 2021, *Accordion: Adaptive Gradient
Communication via Critical Learning Regime Identification* (arXiv:2010.16248); Agarwal et al. 2022, *On the Utility of
Gradient Compression in Distributed Training Systems* (arXiv:2103.00543); Agarwal et al. 2023, *Bagpipe: Accelerating
Deep Recommendation Model Training* (arXiv:2202.12429), only its abstract; Tyagi and Swany 2023, *GraVAC:
Adaptive Compression for Communication-Efficient Distributed DL Training* (arXiv:2305.12201).

`published` has the published numbers, a file for each paper. A counterpart is a function that computes hvdcomp's
numbers: in `counted` from shapes and formulas, in `bagpipe` from synthetic ids, in `predicted` by the performance model
with published times of V100s, in `accordion` and `gravac` by trainings on simulated ranks (`workloads`), which are
compared (`compared`) with each other and with `controls`, and in `timed` by measurements on this machine.
"""

from __future__ import annotations

from benchmarks.reproduce.counterparts import run
from benchmarks.reproduce.outcome import Curve, Outcome, Row, read, write
from benchmarks.reproduce.published import PAPERS, Artefact, artefacts

__all__ = ["PAPERS", "Artefact", "Curve", "Outcome", "Row", "artefacts", "read", "run", "write"]
