"""Programs that make the figures of this project's own pages. They are not installed: run them from a clone's root.

    python -m benchmarks.best_rates --dry-run
    python -m benchmarks.reproduce accordion-table1 --quick

best_rates: methods at their own best learning rates, README's table of methods, and the evidence behind hvdcomp's
    advice.
diagnostics: the curvature of the loss, beside the norm of the gradient.
quality: what compression does to gradients and to trained weights.
reproduce: tables and figures of papers.
steps: predicted beside measured times of steps, on emulated hosts.
times: times of steps, and of trainings to a target.
soak: long trainings with faults, in which nothing may grow.

`measured` has the records of trainings, which are not repeated. docs/measured.toml has the command of each page.
"""
