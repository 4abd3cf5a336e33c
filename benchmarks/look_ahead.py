"""Time of a step with `RowExchange.exchange` and with `LookAhead`, in turns, on the emulated cluster.

    sudo .venv/bin/python benchmarks/look_ahead.py                # 4 hosts, 1 Gb/s: about a minute
    sudo .venv/bin/python benchmarks/look_ahead.py --rate 100mbit --layers-ms 100

Tables have rows of which 1 % are 90 % of the accesses (Zipf). In place of the layers' work, which would be on a device,
each rank sleeps: so the hosts do not take each other's cores. Rank 0 prints medians over steps as JSON, without the
first turn.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

TABLES, ROWS, COLUMNS, BATCH = 8, 30_000, 64, 512
TURN = 20  # steps


def batches() -> Iterator[Any]:
    """Ids (batch, tables), other ones on each rank."""
    import torch

    often = 1 / torch.arange(1, ROWS + 1).double() ** 1.335
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    # Drawn before the first step: a loader would have workers for it.
    drawn = torch.multinomial(often, 200 * TABLES * BATCH, replacement=True, generator=generator)
    yield from itertools.cycle(drawn.view(-1, BATCH, TABLES))


def work(turns: int, layers_ms: float) -> None:
    """Of one rank."""
    import torch
    import torch.distributed as dist

    import hvdcomp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def make() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList(torch.nn.Embedding(ROWS, COLUMNS, sparse=True) for _ in range(TABLES))
        return model, hvdcomp.torch.RowExchange(model), torch.optim.Adagrad(model.parameters(), lr=0.05)

    def lookup(model: Any, batch: Any) -> None:
        loss = sum(table(ids).sin().sum() for table, ids in zip(model, batch.T, strict=True))
        time.sleep(layers_ms / 1000)
        loss.backward()

    plain, rows, optimizer = make()
    other, other_rows, other_optimizer = make()
    ahead = hvdcomp.torch.LookAhead(
        batches(), other_rows, other_optimizer, lambda batch: dict(zip(other_rows.tables, batch.T, strict=True))
    )
    loader, other_loader = batches(), iter(ahead)
    seconds: dict[str, list[float]] = {"exchange": [], "look ahead": []}

    def timed(name: str, batch: Any, start: float) -> float:
        if name == "exchange":
            lookup(plain, batch)
            rows.exchange()
            optimizer.step()
            optimizer.zero_grad()
        else:
            lookup(other, batch)
            ahead.step()
        now = time.perf_counter()
        seconds[name].append(now - start)
        return now

    for _ in range(turns):
        for name, source in (("exchange", loader), ("look ahead", other_loader)):
            dist.barrier()
            start = time.perf_counter()
            for batch in itertools.islice(source, TURN):
                start = timed(name, batch, start)
            ahead.flush()
    if not all(torch.equal(one.weight, two.weight) for one, two in zip(plain, other, strict=True)):
        raise SystemExit("the weights differ")
    if dist.get_rank() == 0:
        medians = {f"{name} (ms)": 1000 * statistics.median(each[TURN:]) for name, each in seconds.items()}
        sent = [one.ledger.totals.bytes_sent / one.ledger.steps / 1e3 for one in (rows, other_rows)]
        times = statistics.median(seconds["exchange"][TURN:]) / statistics.median(seconds["look ahead"][TURN:])
        found = {**medians, "times as fast": times, "kB of a step, exchange": sent[0], "kB, look ahead": sent[1]}
        print(json.dumps({name: round(one, 2) for name, one in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


@click.command()
@click.option("--hosts", default=4, show_default=True)
@click.option("--rate", default="1gbit", show_default=True)
@click.option("--turns", default=6, show_default=True, help="of 20 steps with each")
@click.option("--layers-ms", default=20.0, show_default=True, help="that each rank sleeps in a step")
def main(hosts: int, rate: str, turns: int, layers_ms: float) -> None:
    if "RANK" in os.environ:
        work(turns, layers_ms)
        return
    from hvdcomp.bench.cluster import Cluster

    command = [sys.executable, __file__, "--turns", str(turns), "--layers-ms", str(layers_ms)]
    with Cluster(hosts, rate) as cluster:
        sys.exit(cluster.run(command, backend="torch", timeout=170))


if __name__ == "__main__":
    main()
