"""`hvdcomp demo` trains with several compressors on two ranks, times their alternating steps, and compares the
results."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from hvdcomp.perfmodel.advice import FREE
from hvdcomp.tools.launch.job import HOROVOD_ON_GPUS

# The method that README recommends for SGD, and a method that sends even fewer bytes.
_METHODS = ("eden:bits=1", "topk:ratio=0.01")
_COMPRESSIONS = {"torch": ("none", *_METHODS), "horovod": ("none", "fp16", *_METHODS)}
_IN_TENSORFLOW = _METHODS[0]
_TRAINING = {"model": "cnn", "data": "digits", "batch_size": 16, "epochs": 5, "seed": 1}
_TIMING = ("--model", "cnn@digits", "--batch-size", "16", "--no-auto", "--quiet")
_RATE = "100mbit"
_MARK = ".demo"  # marks a folder that a demo wrote, so that the next demo may replace it
_PYTHON = (sys.executable, "-m")
_IN_TURN = "hvdcomp.tools.train.in_turn"
_COMPARE = "hvdcomp.tools.bench.compare_worker"
_CLUSTER = (*_PYTHON, "hvdcomp.tools.bench.cluster", "run", "--hosts", "2", "--rate", _RATE)
_STARTS = {
    "torch": (*_PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"),
    # horovodrun would put [1,0]<stdout>: before each line, and has no option to prevent this.
    "horovod": (
        *("mpirun", "-np", "2", "-H", "localhost:2", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"),
        *_PYTHON,
    ),
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the ranks share the cores of this machine
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # emulated hosts have no names that PyTorch could look up
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    **HOROVOD_ON_GPUS,  # on a CPU, this variable is not read
    # In a container, root may be the only user. Without this variable, mpirun would refuse to run as root.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@click.command()
@click.option(
    "--backend",
    type=click.Choice(list(_STARTS)),
    default="torch",
    show_default=True,
    help="Library that connects the ranks: torch.distributed, or Horovod with MPI. With Horovod, the demo also trains "
    "in TensorFlow if it is installed.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 600),
    default=3,
    show_default=True,
    help=(
        "Approximate time to measure steps on each network. The calibration of the performance model takes the same "
        "time in addition."
    ),
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the training runs and report.html. An earlier demo in this folder is replaced.",
)
def command(backend: str, seconds: float, output: Path) -> None:
    """Train with several compressors on two ranks, and compare the results in a table and a web page.

    A small CNN learns images of digits. The demonstration takes a minute, or two minutes with Horovod. The ranks share
    this machine, so compression gains little. Steps are therefore also timed between two emulated hosts with links of
    100 Mb/s. If this machine cannot emulate hosts, these steps are predicted.
    """
    for module, extra in (("torch", "torch"), ("sklearn", "train"), ("matplotlib", "train")):
        if importlib.util.find_spec(module) is None:
            raise click.ClickException(f"{module} is not installed: pip install 'hvdcomp[{extra}]'")
    if backend == "horovod" and (importlib.util.find_spec("horovod") is None or shutil.which("mpirun") is None):
        raise click.ClickException(
            "Horovod or mpirun is not installed: see hvdcomp build-horovod, or leave out --backend horovod"
        )
    if output.exists() and not (output / _MARK).exists() and any(output.iterdir()):
        raise click.UsageError(
            f"--output {output} contains files that are not from an earlier demo: name another folder"
        )
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / _MARK).touch()
    start, specs = _STARTS[backend], _COMPRESSIONS[backend]
    trainings = {"torch": {output / spec.partition(":")[0]: spec for spec in specs}}
    if backend == "horovod" and importlib.util.find_spec("tensorflow") is not None:
        trainings["tensorflow"] = {output / "tensorflow": _IN_TENSORFLOW}
    for framework, compressions in trainings.items():
        options = [
            {**_TRAINING, "framework": framework, "compression": spec, "output": str(folder)}
            for folder, spec in compressions.items()
        ]
        _run(f"Training on two ranks ({framework})", [*start, _IN_TURN, *map(json.dumps, options)])
    runs = [folder for compressions in trainings.values() for folder in compressions]

    # The methods that the libraries themselves provide are always timed.
    compressors = [word for spec in specs if spec not in FREE for word in ("--compressor", spec)]
    timing = [*_TIMING, "--seconds", seconds, *compressors]
    here, slow = output / "turns.json", output / f"turns-{_RATE}.json"
    _run(
        "Timing the steps of all methods in turn (and once more if the times are too noisy)",
        [*start, _COMPARE, *timing, "--attempts", 2, "--output", here],
    )
    slow_link = [*_CLUSTER, "--backend", backend, "--", *_PYTHON, _COMPARE, *timing, "--rate", _RATE, "--output", slow]
    emulated = _run(
        "Timing the same steps between two emulated hosts with links of 100 Mb/s (docs/emulated-cluster.md)",
        slow_link,
        needed=False,
    )
    if not emulated:
        click.echo(
            "This machine cannot emulate two hosts with such links. Steps on links of 100 Mb/s are predicted instead, "
            "and marked as predictions"
        )
    turns = [word for file in (here, slow) if file.exists() for word in ("--turns", file)]
    _run("The comparison", [*_PYTHON, "hvdcomp", "report", *runs, *turns, "--output", output])


def _run(title: str, words: Sequence[object], needed: bool = True) -> bool:
    """Runs a program, and returns whether it succeeded. If the program fails and `needed` is True, this process exits
    with the exit status of the program."""
    click.secho(f"==> {title}", bold=True)
    sys.stdout.flush()  # so that earlier output comes before the output of the program
    # mpirun reads its standard input, and would swallow the commands that follow in a script or that the user pasted.
    variables = {**_ENVIRONMENT, **os.environ}
    code = subprocess.run([*map(str, words)], stdin=subprocess.DEVNULL, env=variables).returncode
    if code != 0 and needed:
        sys.exit(code)
    return code == 0
