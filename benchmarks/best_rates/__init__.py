"""Compares methods at their own best learning rates. The results are docs/best-rates.md, README's table "which method",
and the evidence for the package's own advice."""
