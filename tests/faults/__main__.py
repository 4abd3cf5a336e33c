"""Runs rows of the table of faults, shows each, and writes the table.

    python -m tests.faults [--row TEXT]... [--group NAME] [--transport NAME] [--short] [--resume]
        [--output FOLDER]

The rows that were run replace those in the folder, and the others stay: so the table can be made in pieces. The exit
status is 0 if every row that was run is as documented, and 1 otherwise.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from tests.faults import report
from tests.faults.table import ALL, Fault, Row, all_faults, run_row
from tests.faults.world import ROOT, NotHere

COMMAND = "make faults"


def chosen_rows(
    faults: Sequence[Fault],
    rows: Sequence[str] = (),
    group: str | None = None,
    transport: str | None = None,
    short: bool = False,
) -> Iterator[tuple[Fault, str]]:
    """Faults and transports.

    Args:
        rows: parts of the names of faults; none for all faults.
        short: only what is in the short form, over one transport each.
    """
    for fault in faults:
        named = not rows or any(row in fault.name for row in rows)
        if not named or group not in (None, fault.group) or (short and not fault.short):
            continue
        over = [one for one in fault.transports if transport in (None, one)]
        yield from ((fault, one) for one in (over[:1] if short else over))


@click.command()
@click.option("--row", multiple=True, metavar="TEXT", help="Only faults whose name has this text, or that of another.")
@click.option("--group", help="Only this group of faults.")
@click.option("--transport", type=click.Choice(ALL), help="Only over this one.")
@click.option("--short", is_flag=True, help="Only the short form of the table.")
@click.option("--resume", is_flag=True, help="Only rows that the table in --output lacks, and those that failed.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "docs" / "faults",
    help="Folder of faults.md, faults.csv and faults.json.",
)
def main(
    row: tuple[str, ...], group: str | None, transport: str | None, short: bool, resume: bool, output: Path
) -> None:
    """Make faults happen to trainings on real ranks, and write down what comes of them."""
    faults = all_faults()
    groups = list(dict.fromkeys(fault.group for fault in faults))
    if group not in (None, *groups):
        raise click.UsageError(f"--group {group!r} is not one of {', '.join(groups)}")
    chosen = list(chosen_rows(faults, row, group, transport, short))
    if not chosen:
        raise click.UsageError("no row of the table is chosen; leave out --row, --group, --transport or --short")
    if resume:
        there = {(one.fault, one.transport) for one in report.read(output) if one.passed}
        chosen = [(fault, over) for fault, over in chosen if (fault.name, over) not in there]
    done: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hvdcomp-faults-") as folder:
        for number, (fault, over) in enumerate(chosen, 1):
            click.echo(f"[{number}/{len(chosen)}] {fault.name}, over {over}")
            try:
                found = run_row(fault, over, Path(folder) / f"row-{number}")
            except NotHere as reason:
                click.echo(f"  not run: {reason}")
                continue
            took = "" if found.seconds is None else f" ({found.seconds} of {found.within:.0f} s)"
            click.echo(f"  {'as documented' if found.passed else 'FAILED'}{took}: {found.happened}")
            done.append(found)
            report.write(output, COMMAND, report.together(faults, report.read(output), done))
    failed = sum(not row.passed for row in done)
    click.echo(f"{len(done)} of {len(chosen)} rows were run, {failed} failed: {output / 'faults.md'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # after the row was cleared away
    # Started in the background by a shell, this process ignores Ctrl-C, and so would those that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
