"""Methods at their own best learning rates: docs/best-rates.md, README's table, and the evidence of the package."""
