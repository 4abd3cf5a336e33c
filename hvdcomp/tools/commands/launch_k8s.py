"""`hvdcomp launch k8s` runs a training program as an MPIJob (`hvdcomp.tools.launch.k8s`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from hvdcomp.tools.commands.declared import declared_flags
from hvdcomp.tools.commands.launch import (
    INTERRUPTED,
    PROGRAM,
    NotLaunchedError,
    ProgramGroup,
    backend_option,
    checked,
    environment_option,
    refusals,
)
from hvdcomp.tools.launch.job import read_settings
from hvdcomp.tools.launch.k8s.manifest import ROLE_LABEL, render
from hvdcomp.tools.launch.k8s.scheduler import Kubernetes, MPIJob
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings, check_job_name, check_namespace
from hvdcomp.tools.launch.k8s.state import MPIJobState
from hvdcomp.tools.terminal import make_console, make_table, print_table

_where = [
    click.option(
        "--namespace",
        metavar="NAME",
        callback=checked(check_namespace),
        help="Namespace of the job. [default: the namespace of the kubeconfig]",
    ),
    click.option(
        "--context",
        metavar="NAME",
        help="Context of the kubeconfig. [default: the current context of the kubeconfig]",
    ),
]

_name = click.argument("name", callback=checked(check_job_name))

# All other settings can only be given in the settings file.
_submission = [
    click.option(
        "--settings",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with settings. Flags override the settings of the file.",
    ),
    click.option("--name", callback=checked(check_job_name), help="Name of the job."),
    click.option("--ranks", type=int, help="Number of ranks (processes)."),
    declared_flags(KubernetesSettings),
    environment_option,
    backend_option,
    *_where,
]


def _with(options: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.group(cls=ProgramGroup, invoke_without_command=True)
@_with(_submission)
@click.option("--dry-run", is_flag=True, help="Print the MPIJob as YAML, and submit nothing.")
@click.option("--detach", is_flag=True, help="Submit the job, and do not follow its log.")
@click.option("--cancel-on-interrupt", is_flag=True, help="Delete the job on Ctrl-C. [default: the job continues]")
@click.pass_context
def k8s(
    ctx: click.Context, settings: Path | None, dry_run: bool, detach: bool, cancel_on_interrupt: bool, **flags: Any
) -> None:
    """Run PROGRAM as an MPIJob, follow its log, and return its exit status.

    You can also name PROGRAM in the settings file, as `command`. The job's state is printed to standard error, and its
    log to standard output. Exit status 125 means that the job could not be submitted or followed; 2 means wrong
    settings.
    """
    program = ctx.meta[PROGRAM]
    if ctx.invoked_subcommand is not None:
        used = [name for name in ctx.params if ctx.params[name] not in (None, False, ())]
        if used or program is not None:
            raise click.UsageError(
                f"{ctx.invoked_subcommand} is a command that does not run a program. Leave the program out, and write "
                f"all options after the word {ctx.invoked_subcommand}"
            )
        return
    with refusals():
        job_settings = read_settings(settings, "k8s", KubernetesSettings, {**flags, "command": program})
        manifest = render(job_settings)
        if dry_run:
            click.echo(_as_yaml(manifest), nl=False)
            return
        kubernetes = Kubernetes(job_settings.namespace, job_settings.context)
        job = kubernetes.submit(job_settings)
        click.echo(f"MPIJob {kubernetes.namespace}/{job.name} created", err=True)
        if not detach:
            ctx.exit(_follow(kubernetes, job, cancel_on_interrupt))


def _as_yaml(manifest: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError:
        raise NotLaunchedError("--dry-run needs PyYAML: pip install 'hvdcomp[k8s]'") from None
    return yaml.safe_dump(manifest, sort_keys=False, width=120)


def _follow(kubernetes: Kubernetes, job: MPIJob, cancel_on_interrupt: bool = False) -> int:
    """Follows the job to its end, and returns the exit code for the shell."""
    try:
        state = kubernetes.follow(job, _note, click.echo)
    except KeyboardInterrupt:
        place = f"{job.name} --namespace {kubernetes.namespace}"
        if cancel_on_interrupt:
            kubernetes.cancel(job)
            _note(f"interrupted: MPIJob {kubernetes.namespace}/{job.name} deleted")
        else:
            _note(
                f"interrupted, but the job continues. `hvdcomp launch k8s logs {place} --follow` shows its log again, "
                f"and `hvdcomp launch k8s delete {place}` ends the job"
            )
        return INTERRUPTED
    return 1 if state.exit_code is None else state.exit_code


def _note(text: str) -> None:
    click.echo(f"{datetime.now():%H:%M:%S} {text}", err=True)


@k8s.command()
@_name
@_with(_where)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def status(name: str, namespace: str | None, context: str | None, as_json: bool) -> None:
    """Show the state of the job NAME, and why it waits."""
    with refusals():
        kubernetes = Kubernetes(namespace, context)
        state, pods = kubernetes.look(MPIJob(name))
    rows = [_row(pod) for pod in sorted(pods, key=lambda pod: pod["metadata"]["name"])]
    if as_json:
        report = {"name": name, "namespace": kubernetes.namespace, "phase": state.phase, "detail": state.detail}
        click.echo(json.dumps({**report, "exit_code": state.exit_code, "pods": rows}, indent=1))
        return
    click.echo(f"MPIJob {kubernetes.namespace}/{name}: {state.phase}{': ' if state.detail else ''}{state.detail}")
    if rows:
        _show(rows)


def _row(pod: dict[str, Any]) -> dict[str, Any]:
    statuses = pod["status"].get("containerStatuses") or [{}]
    return {
        "pod": pod["metadata"]["name"],
        "role": (pod["metadata"].get("labels") or {}).get(ROLE_LABEL, ""),
        "phase": pod["status"].get("phase", ""),
        "node": pod["spec"].get("nodeName", ""),
        "restarts": statuses[0].get("restartCount", 0),
    }


@k8s.command("list")
@_with(_where)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_jobs(namespace: str | None, context: str | None, as_json: bool) -> None:
    """List the jobs of the namespace, the newest first."""
    with refusals():
        kubernetes = Kubernetes(namespace, context)
        rows = [_job_row(job, state) for job, state in kubernetes.all()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif not rows:
        click.echo(f"There is no MPIJob in namespace {kubernetes.namespace}.")
    else:
        _show(rows)


def _job_row(job: dict[str, Any], state: MPIJobState) -> dict[str, Any]:
    spec = job["spec"]
    workers = (spec["mpiReplicaSpecs"].get("Worker") or {}).get("replicas", 0)
    return {
        "name": job["metadata"]["name"],
        "phase": state.phase,
        "workers": workers,
        "slots": spec.get("slotsPerWorker", 1),
        "created": job["metadata"]["creationTimestamp"],
        "detail": state.detail,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = make_table(*rows[0])
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    print_table(make_console(), table)


@k8s.command()
@_name
@_with(_where)
@click.option(
    "--follow", "until_end", is_flag=True, help="Follow the log until the job ends, and return the job's exit status."
)
@click.pass_context
def logs(ctx: click.Context, name: str, namespace: str | None, context: str | None, until_end: bool) -> None:
    """Print the log of the job NAME."""
    with refusals():
        kubernetes = Kubernetes(namespace, context)
        if until_end:
            ctx.exit(_follow(kubernetes, MPIJob(name)))
        for line in kubernetes.log(MPIJob(name)):
            click.echo(line)


@k8s.command()
@_name
@_with(_where)
def delete(name: str, namespace: str | None, context: str | None) -> None:
    """Delete the job NAME, running or not, with its pods and their logs."""
    with refusals():
        kubernetes = Kubernetes(namespace, context)
        kubernetes.cancel(MPIJob(name))
    click.echo(f"MPIJob {kubernetes.namespace}/{name} deleted")
