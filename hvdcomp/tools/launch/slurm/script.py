"""Makes the batch script of a job by inserting the job's lines into the template `job.sh`.

A line of the template that is a mark, such as `#@options`, is replaced with lines from this module. sbatch reads
options only before the first line that is not a comment. The user's text is inserted only after this line, and only
through `quoted`. All values that are inserted before this line have been checked by `SlurmJob`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hvdcomp.tools.launch.job import HOROVOD_ON_GPUS
from hvdcomp.tools.launch.promise import EXIT_SAVED
from hvdcomp.tools.launch.slurm.settings import SlurmJob

_TEMPLATE = Path(__file__).with_name("job.sh")
# srun returns the largest exit code of all ranks. Ranks that srun kills after a failure have large codes, so the first
# rank that fails writes its code to a file. If srun cannot start a rank, it may return 0, so a rank that succeeds also
# writes a file. srun sends signals to the program, too, not only to the shell that runs these commands.
_SRUN_RANK: tuple[str, ...] = (
    'notes="$PWD/.job-$SLURM_JOB_ID"',
    'rm -rf "$notes"',
    'mkdir "$notes" || { echo "job $SLURM_JOB_ID: submit from a folder that the nodes can write to"; exit 1; }',
    'note=$(printf %q "$notes")',
    "rank=\"trap '' USR1; trap : TERM; $program; code=\\$?",
    "if [ \\$code = 0 ]; then : > $note/ended; else (set -C; echo \\$code > $note/code) 2>/dev/null; fi",
    'exit \\$code"',
)
_SRUN_CODE = (
    'if [ -s "$notes/code" ]; then',
    '  code=$(cat "$notes/code")',
    'elif [ "$code" = 0 ] && [ ! -e "$notes/ended" ]; then',
    '  echo "job $SLURM_JOB_ID: srun started no rank"',
    "  code=1",
    "fi",
    'rm -rf "$notes"',
)
# srun's own message would not name the missing plugin.
_PYXIS = (
    "if ! srun --help | grep -q -e --container-image; then",
    '  echo "job $SLURM_JOB_ID: srun has no --container-image here: enroot needs the plugin pyxis.'
    ' Ask your administrators for pyxis, or set container to apptainer"',
    "  exit 1",
    "fi",
)
# mpirun returns the code of the rank that failed first, and sends signals to the process that it has started.
_MPIRUN_RANK: tuple[str, ...] = ("rank=\"trap '' USR1; exec $program\"",)
# srun's option --gpu-bind=none is not used, because with it Slurm 22.05 does not set CUDA_VISIBLE_DEVICES, so ranks
# might see the GPUs of other jobs.
_ALL_GPUS = (
    "# Each rank sees all GPUs of its job on its node, which is Slurm's default, and uses the GPU of its local rank.",
    "# With --gpus-per-task or --gpu-bind, each rank would see only one GPU, with the number 0. A program that uses",
    "# the GPU of its local rank would not find it, and NCCL might not use direct links between GPUs, such as NVLink.",
    "unset SLURM_GPU_BIND SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_TRES_BIND SLURM_TRES_PER_TASK",
)
# A node may run ranks of several jobs, so the port depends on the job's number. The port is below the range that Linux
# uses for ephemeral ports.
_TORCH = (
    "",
    "# The ranks of torch.distributed connect to rank 0, which runs on the first node.",
    'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    'export MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID="$SLURM_JOB_ID"',
)
_PLAIN_BYTES = set(range(0x20, 0x7F)) - set(b"'\\")


def batch_script(settings: SlurmJob) -> str:
    """The batch script of a job."""
    job = settings.job
    lines_of = {
        "#@options": [f"#SBATCH --{option}" for option in _options(settings)],
        "#@modules": [f"module load {shlex.quote(module)}" for module in settings.modules],
        "#@torch": list(_TORCH if job.backend == "torch" else ()),
        "#@environment": [f"export {name}={quoted(value)}" for name, value in _variables(settings).items()],
        "#@command": [f"  {quoted(argument)}" for argument in job.program],
        "#@program": [f"""program="$(printf '%q ' {_apptainer(settings)}"${{command[@]}}")\""""],
        "#@launch": _launch(settings),
        "#@code": list(_SRUN_CODE if settings.launcher == "srun" else ()),
        "#@constants": [
            f"saved={EXIT_SAVED}  # the exit code of ranks that were warned, saved a checkpoint and stopped",
            f"max_requeues={settings.max_requeues if settings.requeue else 0}",
        ],
    }
    template = _TEMPLATE.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for mark in template for line in lines_of.get(mark, [mark])) + "\n"


def quoted(text: str) -> str:
    """Quotes the text as a single word for bash. The word has no line ends, because sbatch refuses carriage returns."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(chr(byte) if byte in _PLAIN_BYTES else f"\\{byte:03o}" for byte in text.encode()) + "'"


def log_name(name: str, job_id: int | str = "%j") -> str:
    """The name of a job's output file in `log_folder`. The name stays the same if the job is started again."""
    return f"{name}-{job_id}.log"


def _options(settings: SlurmJob) -> list[str]:
    """Options of sbatch, without their hyphens."""
    nodes, tasks = settings.shape
    options = [
        f"job-name={settings.job.name}",
        f"nodes={nodes}",
        f"ntasks={settings.job.ranks}",
        f"ntasks-per-node={tasks}",
        f"cpus-per-task={settings.cpus_per_task}",
        f"time={settings.time}",
        f"signal=B:USR1@{settings.warning_seconds}",
        f"output={settings.log_folder}/{log_name(settings.job.name)}",
        "open-mode=append",
        "requeue" if settings.requeue else "no-requeue",
    ]
    if settings.gpus_per_node:
        options.append(f"gpus-per-node={settings.gpus_per_node}")
    if settings.gres:
        options.append(f"gres={','.join(settings.gres)}")
    if settings.memory is not None:
        options.append(f"mem={settings.memory}")
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        value = getattr(settings, name)
        if value is not None:
            options.append(f"{name}={value}" if re.fullmatch(r"[\w.+-]+", value) else f'{name}="{value}"')
    return options


def _variables(settings: SlurmJob) -> dict[str, str]:
    """The variables of every rank. The environment of the job overrides the defaults."""
    on_gpus = bool(settings.gpus_per_node) and settings.job.backend == "horovod"
    return (HOROVOD_ON_GPUS if on_gpus else {}) | dict(settings.job.environment)


def _launch(settings: SlurmJob) -> list[str]:
    """Lines of bash that set the array `launch`."""
    if settings.launcher == "srun":
        words = [
            "srun",
            f"--mpi={settings.mpi or ('none' if settings.job.backend == 'torch' else 'pmix')}",
            f"--ntasks={settings.job.ranks}",
            f"--cpus-per-task={settings.cpus_per_task}",
            "--kill-on-bad-exit=1",
            *_pyxis(settings),
        ]
        rank = (*_PYXIS, *_SRUN_RANK) if settings.container == "enroot" else _SRUN_RANK
    else:
        words = ["mpirun", "-np", str(settings.job.ranks), "--bind-to", "none"]
        rank = _MPIRUN_RANK
    gpus = _ALL_GPUS if settings.gpus_per_node else ()
    return [*rank, *gpus, f'launch=({" ".join(words)} bash -c "$rank")']


def _apptainer(settings: SlurmJob) -> str:
    """The command that starts the program in a container of Apptainer; "" if Apptainer is not used."""
    if settings.container != "apptainer":
        return ""
    assert settings.image is not None
    gpus = ["--nv"] if settings.gpus_per_node else []
    mounts = [f"--bind={quoted(mount)}" for mount in settings.mounts]
    return " ".join(["apptainer", "exec", *gpus, *mounts, quoted(settings.image)]) + " "


def _pyxis(settings: SlurmJob) -> list[str]:
    if settings.container != "enroot":
        return []
    assert settings.image is not None
    # enroot needs an option to mount the folder from which the job was submitted. Apptainer needs no option for this.
    mounts = "".join(f",{mount if ':' in mount else f'{mount}:{mount}'}" for mount in settings.mounts)
    return [
        f"--container-image={quoted(settings.image)}",
        f'--container-mounts="$PWD:$PWD"{quoted(mounts) if mounts else ""}',
        '--container-workdir="$PWD"',
    ]
