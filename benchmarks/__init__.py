"""Programs that produce the figures on this project's own pages. They are not installed, so run them from the root of a
clone.

    python -m benchmarks.best_rates --dry-run
    python -m benchmarks.reproduce accordion-table1 --quick

best_rates: methods at their own best learning rates; README's table of methods; the evidence behind hvdcomp's advice.
diagnostics: the curvature of the loss, compared with the norm of the gradient. quality: what compression does to
gradients and to trained weights. reproduce: tables and figures of papers. steps: predicted and measured step times on
emulated hosts. times: times of steps, and of training runs until they reach a target. soak: long training runs with
faults, which check that the use of resources does not grow.

`measured` has the records of training runs; recorded runs are not repeated. docs/measured.toml has the command for each
page.
"""
