"""The loss that a GPT reaches whose gradients are reduced to shards by each method, beside dense.

    python benchmarks/fsdp_quality.py --output fsdp-quality.json

Ranks are threads, two on each node, that do what those of FSDP2 do with flat gradients, a module at a time. The text is
the Python of the standard library, byte by byte; the loss is of files that nobody trains with, in nats a byte.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sysconfig
from pathlib import Path

import click
import torch

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.exchange.shards import ShardReducer
from hvdcomp.train.models import TransformerSize
from hvdcomp.train.models_torch import GPT

RANKS, PLACES = 4, 2
LENGTH, BATCH = 64, 8  # bytes of a sequence, sequences of a rank
VALUES = 128  # of a byte; others are left out
DENSE = "none"
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}  # of a 95 % interval, by the number of seeds


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """For training, and for the loss."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = [torch.tensor([one for one in file.read_bytes() if one < VALUES]) for file in files]
    return torch.cat([one for place, one in enumerate(whole) if place % 8]), torch.cat(whole[::8])


def batch(data: torch.Tensor, generator: torch.Generator, sequences: int) -> torch.Tensor:
    starts = torch.randint(len(data) - LENGTH - 1, (sequences,), generator=generator)
    return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).reshape(-1, VALUES), tokens[:, 1:].reshape(-1))


def trained(spec: str, memory: str, seed: int, steps: int) -> tuple[float, float]:
    """The loss in the end, and how many times fewer bytes than dense have left a node."""
    training, held_out = text()
    torch.manual_seed(seed)
    start = GPT(VALUES, LENGTH, TransformerSize(2, 64, 4)).state_dict()

    def work(ranks: InProcessCommunicator) -> tuple[float, float]:
        model = GPT(VALUES, LENGTH, TransformerSize(2, 64, 4))
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
            loss_of(model, batch(training, generator, BATCH)).backward()
            for name, parameters in modules.items():
                reduce(ranks, reducer, name, parameters)
            reducer.end_step()
            optimizer.step()
        with torch.no_grad():
            loss = float(loss_of(model, batch(held_out, torch.Generator().manual_seed(0), 256)))
        totals = reducer.ledger.totals
        between = totals.bytes_sent - totals.bytes_in_node
        return loss, totals.dense_bytes / (PLACES * between) if spec != DENSE else 1.0

    return run_ranks(RANKS, work, PLACES)[0]


def reduce(
    ranks: InProcessCommunicator, reducer: ShardReducer, name: str, parameters: list[torch.nn.Parameter]
) -> None:
    """Makes means of gradients, which all ranks get: the weights that FSDP gathers follow from them."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]  # all of them
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    length = -(-len(flat) // RANKS)
    rows = torch.nn.functional.pad(flat, (0, RANKS * length - len(flat))).view(RANKS, length)
    if reducer.takes(name, rows.numel()):
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
@click.option("--seeds", default=5, show_default=True, help=f"One of {', '.join(map(str, _T))}.")
@click.option("--steps", default=150, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file.")
def main(methods: tuple[str, ...], seeds: int, steps: int, output: Path | None) -> None:
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {}
    for method in (f"{DENSE},none", *methods):
        spec, _, memory = method.rpartition(",")
        found[method] = [trained(spec, memory, seed, steps) for seed in range(seeds)]
        losses = [loss for loss, _ in found[method]]
        more = [loss - dense for loss, (dense, _) in zip(losses, found[f"{DENSE},none"], strict=True)]
        interval = _T[seeds] * statistics.stdev(more) / math.sqrt(seeds)
        click.echo(
            f"{method:24} loss {statistics.mean(losses):.4f}, more than dense {statistics.mean(more):+.4f} "
            f"(95 %: +- {interval:.4f}), {found[method][0][1]:.1f} times fewer bytes between nodes"
        )
    if output is not None:
        output.write_text(json.dumps({"seeds": seeds, "steps": steps, "loss and factor": found}, indent=1))


if __name__ == "__main__":
    main()
