"""Measures steps of embedding tables on the emulated cluster, with four ways to exchange the rows.

The ways are PyTorch's own exchange (stock), `RowExchange.exchange`, `LookAhead`, and `LookAhead` with `ShardedTables`.

    sudo .venv/bin/python -m benchmarks.times.look_ahead                # 4 hosts, 1 Gb/s: some minutes
    sudo .venv/bin/python -m benchmarks.times.look_ahead --layers-ms 250 --rate 100mbit

"Stock" is the sparse allreduce of each table's gradient, which DistributedDataParallel uses over Gloo. All ways take
turns. About 90 % of the accesses are to 1 % of the rows (Zipf's law). The layers would run on a device, so each rank
only sleeps for the time that they would take. The emulated hosts then do not compete for cores.

Rank 0 prints JSON: the milliseconds of a step and of its parts (medians over steps, without the first turn), the
speedup of LookAhead over each of the other ways (median, smallest and largest over turns), the bytes that a rank sends
in a step, and the bytes of the rank's weights.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

from hvdcomp.tools.train.data_clicks import zipf

TABLES, ROWS, COLUMNS = 4, 50_000, 256
TURN = 10  # number of steps in a turn
STOCK, EXCHANGE, AHEAD, SHARDED = "stock", "exchange", "look ahead", "look ahead, sharded"


def batches(size: int) -> Iterator[Any]:
    """The ids of random batches, (size, tables), which are different on each rank."""
    import torch

    draws = np.random.default_rng(int(os.environ["RANK"])).random((30, size, TABLES))
    # The ids are drawn before the first step, because a real loader would draw them in its workers.
    yield from itertools.cycle(torch.from_numpy(zipf(draws, ROWS)))


@dataclass
class Way:
    """A training run with one way to exchange rows, and the seconds of its steps and of their parts, by turn."""

    model: Any
    optimizer: Any
    rows: Any
    loader: Iterator[Any]
    ahead: Any = None  # the LookAhead that the loader belongs to
    turns: list[list[float]] = field(default_factory=list)
    lookups: list[float] = field(default_factory=list)  # seconds of the lookups and the layers

    def report(self) -> dict[str, float]:
        steps = [seconds for turn in self.turns[1:] for seconds in turn]
        seconds = {"ms of a step": steps, "ms of lookups, layers and backward pass": self.lookups[TURN:]}
        return {name: round(statistics.median(values) * 1e3, 1) for name, values in seconds.items()}


def work(turns: int, layers_ms: float, size: int) -> None:
    """Runs the benchmark on one rank."""
    import torch
    import torch.distributed as dist

    import hvdcomp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def made(name: str) -> Way:
        weights = [torch.zeros(ROWS, COLUMNS) for _ in range(TABLES)]
        tables = [torch.nn.Embedding(ROWS, COLUMNS, sparse=True, _weight=weight) for weight in weights]
        model = torch.nn.ModuleList(tables)
        rows = (hvdcomp.torch.ShardedTables if name == SHARDED else hvdcomp.torch.RowExchange)(model)
        optimizer = hvdcomp.torch.RowWiseAdagrad(model.parameters(), lr=0.05)
        if name not in (AHEAD, SHARDED):
            return Way(model, optimizer, rows, batches(size))
        ahead = hvdcomp.torch.LookAhead(
            batches(size), rows, optimizer, lambda batch: dict(zip(rows.tables, batch.T, strict=True))
        )
        return Way(model, optimizer, rows, iter(ahead), ahead)

    ways = {name: made(name) for name in (STOCK, EXCHANGE, AHEAD, SHARDED)}

    def step(name: str, way: Way, batch: Any) -> None:
        start = time.perf_counter()
        loss = sum(table(ids).sin().sum() for table, ids in zip(way.model, batch.T, strict=True))
        time.sleep(layers_ms / 1000)
        loss.backward()
        way.lookups.append(time.perf_counter() - start)
        if way.ahead is not None:
            way.ahead.step()
            return
        if name == STOCK:
            gradients = [table.weight.grad for table in way.model]
            for started in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
                started.wait()
            for gradient in gradients:
                gradient.div_(dist.get_world_size())
        else:
            way.rows.exchange()
        way.optimizer.step()
        way.optimizer.zero_grad()

    for _ in range(turns):
        for name, way in ways.items():
            dist.barrier()
            moments = [time.perf_counter()]
            for batch in itertools.islice(way.loader, TURN):
                step(name, way, batch)
                moments.append(time.perf_counter())
            way.turns.append([later - earlier for earlier, later in itertools.pairwise(moments)])
            for each in ways.values():
                if each.ahead is not None:
                    each.ahead.flush()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for whole, own, part in zip(*(ways[name].model for name in (EXCHANGE, AHEAD, SHARDED)), strict=True):
        if not (torch.equal(whole.weight, own.weight) and torch.equal(whole.weight[rank::ranks], part.weight)):
            raise SystemExit("the weights differ")
    if dist.get_rank() == 0:
        medians = {name: [statistics.median(turn) for turn in way.turns[1:]] for name, way in ways.items()}
        report: dict[str, Any] = {name: way.report() for name, way in ways.items()}
        for name in (STOCK, EXCHANGE, SHARDED):
            ratios = [other / own for other, own in zip(medians[name], medians[AHEAD], strict=True)]
            spread = [statistics.median(ratios), min(ratios), max(ratios)]
            report[f"times as fast as {name}"] = [round(ratio, 2) for ratio in spread]
        for name in (EXCHANGE, AHEAD, SHARDED):
            ledger = ways[name].rows.ledger
            report[name]["kB"] = round(ledger.totals.bytes_sent / ledger.steps / 1e3)
            report[name]["MB of weights"] = round(sum(table.weight.nbytes for table in ways[name].model) / 1e6)
        print(json.dumps(report, indent=1))
    dist.barrier()
    dist.destroy_process_group()


@click.command()
@click.option("--hosts", default=4, show_default=True)
@click.option("--rate", default="1gbit", show_default=True)
@click.option("--turns", default=6, show_default=True, help="Number of turns. In a turn, each way makes 10 steps.")
@click.option("--layers-ms", default=25.0, show_default=True, help="Milliseconds that each rank sleeps in a step.")
@click.option("--batch", default=2048, show_default=True, help="Examples per rank. Each reads one row of each table.")
def main(hosts: int, rate: str, turns: int, layers_ms: float, batch: int) -> None:
    if "RANK" in os.environ:
        work(turns, layers_ms, batch)
        return
    from hvdcomp.tools.bench.cluster import Cluster

    options = ["--turns", str(turns), "--layers-ms", str(layers_ms), "--batch", str(batch)]
    with Cluster(hosts, rate) as cluster:
        command = [sys.executable, "-m", "benchmarks.times.look_ahead", *options]
        sys.exit(cluster.run(command, backend="torch", timeout=280))


if __name__ == "__main__":
    main()
