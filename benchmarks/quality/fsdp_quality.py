"""Measures the loss of a GPT when a method reduces its gradients to shards, compared with dense gradients.

    python -m benchmarks.quality.fsdp_quality --seeds 0,1,2,3,4 --steps 100 --output fsdp-quality.json

Ranks are threads, with two ranks on each node. They exchange flat gradients module by module, like ranks of FSDP2. The
text is the data of `hvdcomp train --data text`. The loss is measured on its validation data, in nats per byte.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import click
import torch

from benchmarks.pages import parse_seeds, with_interval
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.exchange.ledger import Cost, Ledger
from hvdcomp.exchange.shards import ShardReducer
from hvdcomp.tools.train.data import load_data
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.models import TransformerSize
from hvdcomp.tools.train.models_torch import GPT
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.torch_learner import loss_of

RANKS, PLACES = 4, 2
LENGTH, BATCH = 64, 8  # bytes of a sequence, and number of sequences on a rank
SIZE = TransformerSize(2, 64, 4)
DENSE = "none"


@functools.cache
def text() -> DataSet:
    return load_data(TrainingOptions(model="gpt", data="text", sequence_length=LENGTH).resolved())


def trained(spec: str, memory: str, seed: int, steps: int) -> tuple[float, float]:
    """Trains the GPT, and returns the loss at the end and the compression factor between nodes."""
    data = text()
    assert data.validation is not None
    x, y, held_out_x, held_out_y = map(torch.from_numpy, (data.train_x, data.train_y, *data.validation))
    torch.manual_seed(seed)
    start = GPT(data.classes, LENGTH, SIZE).state_dict()

    def work(ranks: InProcessCommunicator) -> tuple[GPT, Cost]:
        model = GPT(data.classes, LENGTH, SIZE)
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        kept, like = parse_memory(memory), torch.empty(0)
        reducer = ShardReducer(ranks, parse_compressor(spec), kept, seed, 1024, Ledger(), like)
        inside = {parameter for block in model.blocks for parameter in block.parameters()}
        modules = {f"block{number}": list(block.parameters()) for number, block in enumerate(model.blocks)}
        modules["model"] = [parameter for parameter in model.parameters() if parameter not in inside]
        generator = torch.Generator().manual_seed(1000 * seed + ranks.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            chosen = torch.randint(len(x), (BATCH,), generator=generator)
            loss_of(model(x[chosen]), y[chosen]).backward()
            for name, parameters in modules.items():
                reduce(ranks, reducer, name, parameters)
            reducer.end_step()
            optimizer.step()
        return model, reducer.ledger.totals

    model, totals = run_ranks(RANKS, work, PLACES)[0]
    with torch.no_grad():
        loss = float(loss_of(model(held_out_x), held_out_y))
    between = totals.bytes_sent - totals.bytes_in_node
    return loss, totals.dense_bytes / (PLACES * between) if spec != DENSE else 1.0


def reduce(
    ranks: InProcessCommunicator, reducer: ShardReducer, name: str, parameters: list[torch.nn.Parameter]
) -> None:
    """Replaces gradients with their means over the ranks. All ranks get the whole means. This is equivalent to FSDP,
    which gathers the weights that are updated with the means."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]  # of all parameters
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    length = -(-len(flat) // RANKS)
    rows = torch.nn.functional.pad(flat, (0, RANKS * length - len(flat))).view(RANKS, length)
    if reducer.compresses(name, rows.numel()):
        row = reducer.reduce(name, rows, rows.nbytes)
        means = ranks.wait(ranks.start_allgather(row.contiguous(), name)).reshape(-1)
    else:
        means = ranks.wait(ranks.start_allreduce(rows.reshape(-1).clone(), "mean", name))
    start = 0
    for gradient in gradients:
        gradient.copy_(means[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


@click.command(help=__doc__)
@click.option("--method", "methods", multiple=True, default=("int4,error_feedback", "int4,none", "int8,none"))
@click.option("--seeds", default="0,1,2,3,4", show_default=True, callback=parse_seeds, metavar="SEED,...")
@click.option("--steps", default=100, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file.")
def main(methods: tuple[str, ...], seeds: tuple[int, ...], steps: int, output: Path | None) -> None:
    torch.set_num_threads(1)
    results: dict[str, list[tuple[float, float]]] = {}
    for method in (f"{DENSE},none", *methods):
        spec, _, memory = method.rpartition(",")
        results[method] = [trained(spec, memory, seed, steps) for seed in seeds]
        losses = [loss for loss, _ in results[method]]
        more = [loss - dense for loss, (dense, _) in zip(losses, results[f"{DENSE},none"], strict=True)]
        click.echo(
            f"{method:24} loss {with_interval(losses, '.4f')}, "
            f"difference from dense training {with_interval(more, '+.4f')}, {results[method][0][1]:.1f} times fewer "
            "bytes between nodes"
        )
    if output is not None:
        output.write_text(json.dumps({"seeds": seeds, "steps": steps, "loss and factor": results}, indent=1))


if __name__ == "__main__":
    main()
