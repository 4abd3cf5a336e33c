"""`hvdcomp launch slurm` without a Slurm: what is refused, and what the batch script makes of hostile words."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.cli import main
from hvdcomp.tools.commands.launch_slurm import slurm
from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.launch.promise import EXIT_SAVED
from hvdcomp.tools.launch.slurm.client import SlurmJobState, _parse_job
from hvdcomp.tools.launch.slurm.script import batch_script
from hvdcomp.tools.launch.slurm.settings import SlurmJob, seconds_of

_EXAMPLES = Path(__file__).parents[3] / "slurm"
_HOSTILE = [
    "two words",
    "it's",
    '"; touch injected; "',
    "$(touch injected)",
    "`touch injected`",
    "$HOME",
    "a\n#SBATCH --time=9-00\nb",
    "a\r\nb",
    "#SBATCH --partition=other",
    ":",
    "--mca",
    "-n",
    "--",
    "",
    "%j",
    "\\",
    "\t\x07\x7f",
    "é\u200b漢",
    "!!",
    "{1..3}",
    "*",
]


def _job(**changes: Any) -> SlurmJob:
    job = {"name": "test", "command": ("true",), "ranks": 1, "environment": {}}
    job |= {key: changes.pop(key) for key in list(changes) if key in {**job, "backend": None}}
    return SlurmJob(Job(**job), **changes)


def _launch(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["launch", "slurm", *arguments])


@pytest.mark.parametrize("settings", sorted(_EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_what_the_command_prints(settings: Path) -> None:
    printed = _launch("--settings", str(settings), "--dry-run")
    assert printed.exit_code == 0, printed.output
    assert printed.output == settings.with_suffix(".sbatch").read_text()


def test_examples_write_where_sbatch_finds_a_folder() -> None:
    """sbatch makes none: a job whose output has no folder fails, and nothing says so."""
    for script in _EXAMPLES.glob("*.sbatch"):
        assert Path(_options(script.read_text())["output"]).parent == Path(), script


def test_there_are_examples() -> None:
    assert len(list(_EXAMPLES.glob("*.sbatch"))) == len(list(_EXAMPLES.glob("*.toml"))) >= 4


_REFUSED = {
    "ranks: 3 ranks do not fill nodes of 2 tasks": {"ranks": 3, "tasks_per_node": 2},
    "ranks: 3 ranks do not fill 2 nodes evenly: use a multiple of 2": {"ranks": 3, "nodes": 2},
    "ranks: 2 ranks do not fill 4 nodes evenly": {"ranks": 2, "nodes": 4},
    "ranks: 4 ranks do not fill 1 nodes of 2 tasks": {"ranks": 4, "nodes": 1, "tasks_per_node": 2},
    "tasks_per_node: 0 is too few": {"tasks_per_node": 0},
    "nodes: 0 is too few": {"nodes": 0},
    "cpus_per_task: -1 is too few": {"cpus_per_task": -1},
    "gpus_per_node: -1 is below 0": {"gpus_per_node": -1},
    "gpus_per_node: 1 GPUs are too few for 2 ranks": {"ranks": 2, "gpus_per_node": 1},
    "gres: 'nic 1' is not a resource": {"gres": ("nic 1",)},
    "gres: 'nic:0' is not a resource": {"gres": ("nic:0",)},
    "gres: 'nic\\n' is not a resource": {"gres": ("nic\n",)},
    "gres: 'gpu:v100:4' asks for GPUs, which only gpus_per_node may do": {"gres": ("gpu:v100:4",)},
    "max_requeues: -1 is below 0": {"max_requeues": -1},
    "memory: '16 GB' is not an amount": {"memory": "16 GB"},
    "memory: '0G' is not an amount": {"memory": "0G"},
    "memory: '1G\\n#SBATCH -p x' is not an amount": {"memory": "1G\n#SBATCH -p x"},
    "time: '1h' is not a time limit": {"time": "1h"},
    "time: '' is not a time limit": {"time": ""},
    "time: '60\\n' is not a time limit": {"time": "60\n"},
    "time: '00:00:30' is less than a minute": {"time": "00:00:30"},
    "warning_seconds: 0 must be a number of seconds": {"warning_seconds": 0},
    "warning_seconds: a warning 300 s before the end would come before the start of the job, because time '5'": {
        "time": "5",
        "warning_seconds": 300,
    },
    "partition: 'a b' is not a valid name": {"partition": "a b"},
    "account: '$(id)' is not a valid name": {"account": "$(id)"},
    "qos: 'high\\n' is not a valid name": {"qos": "high\n"},
    "reservation: '--x' is not a valid name": {"reservation": "--x"},
    "constraint: 'a b' is not a valid name": {"constraint": "a b"},
    "constraint: 'a\"b' is not a valid name": {"constraint": 'a"b'},
    "mpi: 'pmix;id' is not a valid name": {"mpi": "pmix;id"},
    "modules: 'cuda; id' is not a valid name": {"modules": ("cuda; id",)},
    "image: this setting needs a container": {"image": "x.sif"},
    "mounts: this setting needs a container": {"mounts": ("/data",)},
    'image: container "apptainer" needs an image': {"container": "apptainer"},
    "image: '-x' starts with a hyphen": {"container": "apptainer", "image": "-x"},
    "mounts: 'data' is not a folder": {"container": "apptainer", "image": "x", "mounts": ("data",)},
    "mounts: '/a,/b' is not a folder": {"container": "enroot", "image": "x", "mounts": ("/a,/b",)},
    "launcher: enroot is started by srun": {"container": "enroot", "image": "x", "launcher": "mpirun"},
    "log_folder: 'my logs' is empty or has a blank": {"log_folder": "my logs"},
    "log_folder: '%j' is empty or has a blank": {"log_folder": "%j"},
    "log_folder: 'a\\nb' has characters that cannot be printed": {"log_folder": "a\nb"},
}


@pytest.mark.parametrize(("message", "changes"), _REFUSED.items(), ids=_REFUSED)
def test_what_slurm_could_not_take_is_refused_by_name(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        _job(**changes)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) > len(message) + 10, "it says the way out"


def _options(script: str) -> dict[str, str]:
    lines = (line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --"))
    return dict(line.partition("=")[::2] for line in lines)


@pytest.mark.parametrize(
    ("given", "nodes", "tasks"),
    [
        ({"ranks": 3}, "1", "3"),
        ({"ranks": 4, "nodes": 2}, "2", "2"),
        ({"ranks": 8, "tasks_per_node": 4}, "2", "4"),
        ({"ranks": 8, "nodes": 2, "tasks_per_node": 4}, "2", "4"),
    ],
)
def test_what_is_not_said_of_nodes_follows_from_the_ranks(given: dict[str, Any], nodes: str, tasks: str) -> None:
    options = _options(batch_script(_job(**given)))
    assert (options["nodes"], options["ntasks-per-node"], options["ntasks"]) == (nodes, tasks, str(given["ranks"]))


def test_a_job_may_be_called_what_slurm_allows() -> None:
    options = _options(batch_script(_job(name="My_run.1")))
    assert options["job-name"] == "My_run.1"
    assert options["output"].endswith("/My_run.1-%j.log")


@pytest.mark.parametrize(
    ("flags", "ranks", "nodes", "tasks"),
    [
        ("--nodes 4 --gpus-per-node 8", "32", "4", "8"),
        ("--gpus-per-node 8", "8", "1", "8"),
        ("--nodes 2 --tasks-per-node 4 --gpus-per-node 8", "8", "2", "4"),
        ("--nodes 2 --tasks-per-node 4", "8", "2", "4"),
        ("--ranks 2 --nodes 2 --gpus-per-node 8", "2", "2", "1"),
    ],
)
def test_ranks_that_are_not_given_follow_from_the_nodes(flags: str, ranks: str, nodes: str, tasks: str) -> None:
    printed = _launch("--name", "a", *flags.split(), "--dry-run", "--", "true")
    assert printed.exit_code == 0, printed.output
    options = _options(printed.output)
    assert (options["ntasks"], options["nodes"], options["ntasks-per-node"]) == (ranks, nodes, tasks)


def test_each_key_of_the_settings_file_is_a_flag_of_its_name() -> None:
    flags = {name for option in slurm.params for name in option.opts}
    keys = [one.name for one in dataclasses.fields(SlurmJob) if one.name != "job"]
    assert [key for key in keys if f"--{key.replace('_', '-')}" not in flags] == []
    job = ("--name", "a", "--ranks", "1", "--container", "enroot", "--image", "x")
    twice = ("--mounts", "/a", "--mount", "/b:/c", "--modules", "x", "--module", "y")
    printed = _launch(*job, *twice, "--dry-run", "--", "true").output
    assert 'container-mounts="$PWD:$PWD",/a:/a,/b:/c ' in printed
    assert "\nmodule load x\nmodule load y\n" in printed


def test_resources_beside_gpus_are_asked_for() -> None:
    assert _options(batch_script(_job(gres=("nic:1", "shard:big:2K"))))["gres"] == "nic:1,shard:big:2K"
    assert "gres" not in _options(batch_script(_job()))


def test_each_rank_sees_all_gpus_of_its_node_and_the_script_says_why() -> None:
    for launcher in ("srun", "mpirun"):
        script = batch_script(_job(gpus_per_node=2, launcher=launcher))
        reason, launch = script.index("\n# Each rank sees all GPUs"), script.index("\nlaunch=(")
        assert "\nunset SLURM_GPU_BIND SLURM_GPUS_PER_TASK " in script[reason:launch]
        assert "--gpu" not in script[launch:]
    assert "GPU_BIND" not in batch_script(_job())


def test_time_limits_are_read_as_sbatch_reads_them() -> None:
    seconds = {"90": 5400, "90:30": 5430, "1:02:03": 3723, "2-3": 183600, "2-03:04": 183840, "2-03:04:05": 183845}
    assert {text: seconds_of(text) for text in seconds} == seconds


def test_settings_come_from_the_file_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        '[job]\nname = "a"\ncommand = ["old"]\nranks = 2\nenvironment = { A = "1", B = "2" }\n'
        '[slurm]\ntasks_per_node = 2\ntime = "30"\n[k8s]\nimage = "other"\n'
    )
    printed = _launch(
        "--settings", str(file), "--dry-run", "--env", "B=x=y", "--time", "40", "--", "new", "--time", "5"
    )
    assert printed.exit_code == 0, printed.output
    assert "#SBATCH --time=40\n" in printed.output
    assert "#SBATCH --ntasks=2\n" in printed.output
    assert "export A=1\nexport B=x=y\n" in printed.output
    assert "command=(\n  new\n  --time\n  5\n)" in printed.output


@pytest.mark.parametrize(
    ("message", "arguments"),
    {
        "there is no setting 'tasks'": ["--settings", "job.toml", "--", "true"],
        "nowhere.toml cannot be read": ["--settings", "nowhere.toml"],
        "command (-- PROGRAM) must be set: give the flag": ["--name", "a", "--ranks", "1"],
        "name (--name), command (-- PROGRAM), ranks (--ranks) must be set: give the flags, or set name, command": [],
        "ranks (--ranks) must be set": ["--name", "a", "--nodes", "4", "--", "true"],
        "nodes (--nodes): 0 is too few": ["--name", "a", "--nodes", "0", "--gpus-per-node", "8", "--", "true"],
        "gpus_per_node (--gpus-per-node): -8 is below 0": ["--name", "a", "--gpus-per-node", "-8", "--", "true"],
        "name (--name) must be set": ["--ranks", "1", "--", "true"],
        "name (--name): 'A B' is not a valid name for a job": ["--name", "A B", "--ranks", "1", "--", "true"],
        "tasks_per_node (--tasks-per-node): 0 is too few": [
            *("--name", "a", "--ranks", "1", "--tasks-per-node", "0"),
            *("--", "true"),
        ],
        "mounts (--mounts): this setting needs a container": [
            *("--name", "a", "--ranks", "1", "--mount", "/a"),
            *("--", "true"),
        ],
        "'A' is not of the form NAME=VALUE": ["--env", "A"],
        "environment (--env): 'A-B' is not the name of a variable": [
            *("--name", "a", "--ranks", "1", "--env", "A-B=1"),
            *("--", "true"),
        ],
        "write all options after the word status": ["--time", "5", "status"],
        "--array 1-3 is not supported": ["--array", "1-3", "--name", "a", "--", "true"],
        "'12_3' is a task of a job array": ["status", "12_3"],
    }.items(),
)
def test_wrong_settings_are_said_before_anything_is_submitted(
    message: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    Path("job.toml").write_text("[slurm]\ntasks = 2\n")
    done = _launch(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_without_slurm_it_says_where_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for arguments in (["--name", "a", "--ranks", "1", "--", "true"], ["status"], ["delete", "3"], ["logs", "3"]):
        done = _launch(*arguments)
        assert done.exit_code == 125
        assert "run this on a login node of the cluster" in done.output


# Stands for srun and mpirun: starts the command that comes last, once, in an environment that can be looked at.
_LAUNCHER = """#!/bin/sh
while [ "$1" != bash ]; do shift; done
exec "$@"
"""
# Stands for Apptainer: notes its options and the image.
_APPTAINER = """#!/bin/sh
: > apptainer.txt
while [ "$1" != PYTHON ] && [ "$1" != python3 ]; do echo "$1" >> apptainer.txt; shift; done
exec "$@"
""".replace("PYTHON", sys.executable)
_SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[3-4]" ] && printf 'node3\\nnode4\\n'
"""
_RANK = "import json, os, sys; json.dump([sys.argv[1:], os.environ['VALUE']], open(os.environ['RESULT'], 'w'))"


def _started(settings: SlurmJob, folder: Path, **inherited: str) -> tuple[list[str], Any]:
    """The arguments and the variables that a rank of this job finds: bash runs the script with a stand-in for srun."""
    stand_ins = {"srun": _LAUNCHER, "mpirun": _LAUNCHER, "apptainer": _APPTAINER, "scontrol": _SCONTROL}
    for name, text in stand_ins.items():
        stand_in = folder / name
        stand_in.write_text(text)
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    result = folder / "result"
    result.unlink(missing_ok=True)
    variables = {
        **{"SLURM_JOB_ID": "70001", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "node[3-4]"},
        **{"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        **{"SLURM_STEP_TASKS_PER_NODE": "1", "MASTER_ADDR": "of-the-login-node", "PYTHONPATH": ":".join(sys.path)},
        **{"PATH": f"{folder}:{os.environ['PATH']}", "RESULT": str(result)},
        **inherited,
    }
    done = subprocess.run(
        ["bash"], input=batch_script(settings).encode(), env=variables, cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    arguments, value = json.loads(result.read_text())
    return arguments, value


def test_srun_finds_no_binding_and_no_second_memory_of_a_job_that_sbatch_was_called_in(tmp_path: Path) -> None:
    names = "[name for name in os.environ if name.startswith(('SLURM_CPU', 'SLURM_MEM'))]"
    program = f"import json, os; json.dump([{names}, os.environ['VALUE']], open(os.environ['RESULT'], 'w'))"
    job = _job(command=(sys.executable, "-c", program), environment={"VALUE": "x"})
    binding = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1"}
    per_cpu = {"SLURM_MEM_PER_CPU": "1000"}
    assert _started(job, tmp_path, **binding, **per_cpu) == (["SLURM_MEM_PER_CPU"], "x")
    assert _started(job, tmp_path, **binding, **per_cpu, SLURM_MEM_PER_NODE="9") == (["SLURM_MEM_PER_NODE"], "x")


_ASKED = "Slurm is asked to requeue the job, which then continues from this checkpoint"
_SAVED_AND = {
    "answers": ("echo RUNNING", "exit 0", 0, _ASKED),
    "answers later": ("[ -e waited ] && echo RUNNING", "exit 0", 1, _ASKED),
    "has cancelled it": ("echo COMPLETING", "exit 0", 0, "the job was cancelled, so it is not requeued"),
    "kills it at once": ("echo RUNNING", "kill -9 $PPID", 0, _ASKED),
    "refuses once": ("echo RUNNING", "[ -e waited ]", 1, _ASKED),
    "never answers": ("exit 1", "exit 1", 20, "Slurm did not requeue the job: submit it again"),
}


@pytest.mark.parametrize(("squeue", "scontrol", "waits", "said"), _SAVED_AND.values(), ids=_SAVED_AND)
def test_a_job_that_saved_is_requeued_when_the_controller_answers(
    squeue: str, scontrol: str, waits: int, said: str, tmp_path: Path
) -> None:
    """Slurm requeues a cancelled job, too: without an answer nothing is known, and nothing is asked of it."""
    sleep = 'echo "$1" >> waited'
    stand_ins = {"squeue": squeue, "scontrol": f'echo "$@" >> asked; {scontrol}', "sleep": sleep, "srun": _LAUNCHER}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = batch_script(_job(command=("sh", "-c", f"exit {EXIT_SAVED}")))
    done = subprocess.run(
        ["bash"], input=script, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == (-signal.SIGKILL if "kill" in scontrol else EXIT_SAVED), done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "saved" in line)
    assert said in line
    waited, asked = tmp_path / "waited", tmp_path / "asked"
    assert (waited.read_text().split() if waited.exists() else []) == ["15"] * waits
    assert asked.exists() is (squeue not in ("echo COMPLETING", "exit 1"))


def test_a_script_refuses_to_be_an_array() -> None:
    """All its jobs would write to the same files."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash"], input=batch_script(_job()), env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert "this script is one job, not an array" in done.stdout


_words = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_words_reach_the_program_as_they_are(launcher: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("words")

    @given(st.lists(_words, max_size=4), _words)
    @example(_HOSTILE, "a\n#SBATCH --x\r\n'\"$(id)")
    def check(words: list[str], value: str) -> None:
        command = (sys.executable, "-c", _RANK, *words)
        settings = _job(command=command, environment={"VALUE": value}, launcher=launcher)
        assert _started(settings, folder) == (words, value)
        assert not (folder / "injected").exists()

    check()


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_container_gets_its_image_and_the_program_its_words(launcher: Any, tmp_path: Path) -> None:
    image = "my $(touch injected) 'image'.sif"
    job = _job(
        command=(sys.executable, "-c", _RANK, *_HOSTILE),
        environment={"VALUE": "x"},
        **{"launcher": launcher, "container": "apptainer", "image": image, "mounts": ("/data", "/a b:/c")},
        gpus_per_node=1,
    )
    assert _started(job, tmp_path) == (_HOSTILE, "x")
    words = (tmp_path / "apptainer.txt").read_text().splitlines()
    assert words == ["exec", "--nv", "--bind=/data", "--bind=/a b:/c", image]
    assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize("plugin", [True, False])
def test_enroot_without_the_plugin_pyxis_says_so(plugin: bool, tmp_path: Path) -> None:
    """As srun lists its own options, and those of plugins at the end."""
    listed = "Options provided by plugins:\n      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"
    srun = tmp_path / "srun"
    own = "      --container              Path to OCI container bundle"
    helps = f'[ "$1" = --help ] && {{ echo "{own}"; {f"""echo "{listed}";""" if plugin else ""} exit; }}'
    srun.write_text(f"#!/bin/sh\n{helps}\n{_LAUNCHER}")
    srun.chmod(0o755)
    script = batch_script(_job(command=("touch", "ran"), container="enroot", image="x.sqsh"))
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"], input=script, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if plugin else 1), done.stderr
    assert ("job 7: srun has no --container-image here: enroot needs the plugin pyxis" in done.stdout) is not plugin
    assert (tmp_path / "ran").exists() is plugin


_TORCH_RANK = """
import json, os, sys
names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
json.dump([sys.argv[1:], [os.environ[name] for name in names]], open(os.environ["RESULT"], "w"))
"""


@pytest.mark.parametrize("container", ["none", "apptainer"])
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_rank_of_torch_gets_its_place_and_its_words(launcher: Any, container: Any, tmp_path: Path) -> None:
    image = {} if container == "none" else {"container": container, "image": "x.sif"}
    program = (sys.executable, "-c", _TORCH_RANK, *_HOSTILE)
    job = _job(backend="torch", command=program, launcher=launcher, **image)
    assert _started(job, tmp_path) == (_HOSTILE, ["0", "1", "node3", "20001", "70001"])
    place = {"MASTER_ADDR": "a", "MASTER_PORT": "7"}
    elsewhere = _job(backend="torch", command=program, launcher=launcher, environment=place, **image)
    assert _started(elsewhere, tmp_path) == (_HOSTILE, ["0", "1", "a", "7", "70001"])


def test_only_horovod_needs_a_plugin_of_srun() -> None:
    def plugin(**changes: Any) -> str:
        (word,) = (word for word in batch_script(_job(**changes)).split() if word.startswith("--mpi="))
        return word

    assert plugin() == "--mpi=pmix"
    assert plugin(backend="torch") == "--mpi=none"
    assert plugin(backend="torch", mpi="pmi2") == plugin(mpi="pmi2") == "--mpi=pmi2"


@given(st.lists(_words, max_size=3), _words)
@example(_HOSTILE, "\n#SBATCH --x\n")
def test_words_add_no_line_that_sbatch_reads(words: list[str], value: str) -> None:
    """sbatch reads options up to the first line that is no comment, and refuses carriage returns."""
    script = batch_script(_job(command=("true", *words), environment={"VALUE": value}))
    plain = batch_script(_job(command=("true",), environment={"VALUE": "x"}))
    assert [line for line in script.splitlines() if line.startswith("#SBATCH")] == [
        line for line in plain.splitlines() if line.startswith("#SBATCH")
    ]
    assert "\r" not in script
    assert script.count("\n") == plain.count("\n") + len(words)


def test_the_exit_code_is_that_of_the_job() -> None:
    def code(state: str, code: int = 0, signal: int = 0) -> int:
        return SlurmJobState(1, "a", state, "None", "", 0, code, signal, None).exit_code

    assert code("COMPLETED") == 0
    assert code("FAILED", 7) == 7
    assert code("FAILED", 0, 9) == 137
    assert code("CANCELLED", 0, 15) == 143
    assert code("TIMEOUT") == 1
    assert code("NODE_FAIL") == 1


def test_the_state_is_read_from_what_scontrol_shows() -> None:
    shown = """\
JobId=7 JobName=mnist
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=213:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=node[1-2]
   StdOut=/home/me/my runs/mnist-7.log
"""
    expected = SlurmJobState(
        7, "mnist", "FAILED", "NonZeroExitCode", "node[1-2]", 2, 213, 0, Path("/home/me/my runs/mnist-7.log")
    )
    assert _parse_job(7, shown) == expected


@pytest.mark.parametrize(
    ("job", "lines"),
    [
        ({"gpus_per_node": 2}, ["export HOROVOD_ENABLE_ASYNC_COMPLETION=1"]),
        (
            {"gpus_per_node": 2, "environment": {"HOROVOD_ENABLE_ASYNC_COMPLETION": "0"}},
            ["export HOROVOD_ENABLE_ASYNC_COMPLETION=0"],
        ),
        ({"gpus_per_node": 2, "backend": "torch"}, []),
        ({}, []),
    ],
)
def test_horovod_on_gpus_does_not_wait_for_them_in_each_round(job: dict[str, Any], lines: list[str]) -> None:
    script = batch_script(_job(ranks=2, **job)).splitlines()
    assert [line for line in script if "ASYNC_COMPLETION" in line] == lines
