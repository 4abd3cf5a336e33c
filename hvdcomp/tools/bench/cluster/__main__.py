"""The command line of the emulated cluster: `python -m hvdcomp.tools.bench.cluster`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hvdcomp.tools.bench.cluster import namespaces, records
from hvdcomp.tools.bench.cluster.backends import BACKENDS
from hvdcomp.tools.bench.cluster.cluster import Cluster
from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.records import STANDING
from hvdcomp.tools.bench.cluster.throughput import measure

_hosts = click.option("--hosts", type=int, metavar="N", help="Number of hosts, at least 2.")
_rate = click.option("--rate", metavar="RATE", help="Bandwidth of each host's link, as tc writes it: 100mbit, 1gbit.")
RATES = ("100mbit", "1gbit", "10gbit")  # the rates that are measured by default
_SAY = Console(stderr=True, highlight=False, soft_wrap=True).print


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)


def _cluster(hosts: int | None, rate: str | None) -> Cluster:
    """The cluster for a command: a new cluster if both options are given, otherwise the standing cluster."""
    if hosts is not None and rate is not None:
        namespaces.become_root()
        return Cluster(hosts, rate)
    if hosts is None and rate is None:
        return Cluster.standing()
    raise click.UsageError(
        "give both --hosts and --rate to create a cluster, or leave out both to use the running cluster"
    )


@click.group()
def main() -> None:
    """Run Horovod or torch.distributed on several emulated hosts of this machine, joined by links of a chosen rate.

    Run this command as root. Two subcommands also work without root, if the kernel lets users create user namespaces:
    `run` with --hosts and --rate, and `throughput`.
    """


@main.command(context_settings={"ignore_unknown_options": True})
@_hosts
@_rate
@click.option("--ranks", type=int, metavar="N", help="Number of ranks. [default: one rank on each host]")
@click.option(
    "--backend",
    type=click.Choice(list(BACKENDS)),
    default="horovod",
    show_default=True,
    help="Launcher to imitate: each rank gets the environment variables of horovodrun or torchrun.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(hosts: int | None, rate: str | None, ranks: int | None, backend: str, command: tuple[str, ...]) -> None:
    """Run a command on every rank, and return its exit code. Write the command after `--`.

    With --hosts and --rate, the hosts are created for this run, and removed after the run. Otherwise the command uses
    the hosts that `up` created.
    """
    with _errors(), _cluster(hosts, rate) as cluster:
        _SAY(f"{cluster.hosts} hosts, links of {cluster.rate}, {ranks or cluster.hosts} ranks")
        code = cluster.run(command, ranks=ranks, backend=backend)
    sys.exit(code)


@main.command()
@click.option("--hosts", type=int, required=True, metavar="N", help="Number of hosts, at least 2.")
@click.option("--rate", required=True, metavar="RATE", help="Bandwidth of each host's link: 100mbit, 1gbit.")
def up(hosts: int, rate: str) -> None:
    """Create emulated hosts, which exist until you run `down`."""
    with _errors(), Cluster(hosts, rate, standing=True) as cluster:
        _SAY(f"{hosts} emulated hosts are running: {namespaces.namespace(cluster.name, 0)}, ...; links of {rate}")


@main.command()
def down() -> None:
    """Remove the hosts that `up` created, and the remains of killed runs."""
    with _errors():
        namespaces.check_machine()
        facts = records.read(STANDING)
        if facts is not None and facts.standing:
            with Cluster.standing() as cluster:
                cluster.remove()
            _SAY(f"removed {facts.hosts} hosts")
        with records.exclusive():
            leftovers = namespaces.remove_leftovers()
        for name in leftovers:
            _SAY(f"removed the remains of the cluster {name}")
        if facts is None and not leftovers:
            _SAY("there is no cluster to remove")


@main.command()
def status() -> None:
    """List the clusters of this machine."""
    with _errors():
        namespaces.check_machine()
        with records.exclusive():
            clusters = {name: (records.read(name), records.in_use(name)) for name in records.names()}
    if not clusters:
        print("no cluster is running")
        return
    table = Table("cluster", "hosts", "rate", "state")
    for name, (facts, used) in clusters.items():
        if used and facts is not None:
            state = f"in use by process {facts.owner}"
        else:
            state = (
                "up"
                if facts is not None and facts.standing
                else ("left behind by a killed process; run `down` to remove this cluster")
            )
        table.add_row(name, str(facts.hosts) if facts else "?", facts.rate if facts else "?", state)
    Console().print(table)


@main.command()
@click.option("--rate", "rates", multiple=True, metavar="RATE", default=RATES, show_default=True, help="Repeatable.")
@click.option(
    "--seconds", type=click.FloatRange(0.5, 60), default=3.0, show_default=True, help="How long to measure each rate."
)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the result.")
def throughput(rates: tuple[str, ...], seconds: float, output: Path | None) -> None:
    """Measure the throughput of a TCP connection between two hosts."""
    measured = {}
    with _errors():
        namespaces.become_root()
        for rate in rates:
            with Cluster(2, rate) as cluster:
                measured[rate] = measure(cluster, seconds)
            print(f"links of {rate}: {measured[rate] / 1e6:.0f} Mb/s of payload")
    if output is not None:
        result = {"payload_bits_per_second": measured, "seconds": seconds, "cores": os.cpu_count()}
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(prog_name="python -m hvdcomp.tools.bench.cluster")
