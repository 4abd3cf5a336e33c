"""FSDP2 without replicas: its reduce-scatter, exact within nodes and quantized between them."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.debug import CommDebugMode

import hvdcomp
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.exchange.shards import ShardReducer
from hvdcomp.tools.train.models import TransformerSize
from hvdcomp.tools.train.models_torch import GPT
from tests.captured import REFUSED, as_captured
from tests.multirank import cases_fsdp
from tests.multirank.cases_fsdp import weights
from tests.multirank.collectives import nodes_of
from tests.multirank.training_ddp import assert_same_everywhere, large_model, raised
from tests.multirank.worker import thorough
from tests.two_hops import stated

TOKENS = 61  # rows that no number of ranks divides: FSDP pads


@contextmanager
def two_nodes() -> Iterator[None]:
    with nodes_of(dist.get_world_size() // 2):
        yield


def sharded(**options: Any) -> Any:
    """A small GPT, each block sharded by itself, and the whole; the same on all ranks."""
    torch.manual_seed(1)
    model = GPT(TOKENS, 16, TransformerSize(2, 36, 4))
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def made(spec: str, **options: Any) -> hvdcomp.Compression:
    return hvdcomp.Compression.from_spec(spec, **options)


def distribute(
    how: hvdcomp.Compression | None, sgd: bool = False, weights: Any = None, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """With AdamW; or SGD, which does not hide a gradient's scale."""
    model = sharded(**options)
    if how is not None:
        hvdcomp.fsdp.register(model, how, weights=weights)
    kind, rate = (torch.optim.SGD, 0.1) if sgd else (torch.optim.AdamW, 3e-3)
    return model, kind(model.parameters(), lr=rate)


def batch(generator: torch.Generator) -> torch.Tensor:
    """Sequences in which each token follows from the one before."""
    tokens = torch.randint(TOKENS, (8, 1), generator=generator)
    for _ in range(16):
        tokens = torch.cat([tokens, (7 * tokens[:, -1:] + 3) % TOKENS], 1)
    return tokens


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: range, passes: int = 1, clip: float | None = None
) -> list[float]:
    """On this rank's own data, of several passes with one exchange; the ranks' mean losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        for number in range(1, passes + 1):
            tokens = batch(generator)
            model.set_requires_gradient_sync(number == passes)
            logits = model(tokens[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, TOKENS), tokens[:, 1:].reshape(-1))
            (loss / passes).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def trained(how: hvdcomp.Compression | None, steps: int = 5, **options: Any) -> tuple[torch.Tensor, list[float]]:
    asked = {name: options.pop(name) for name in ("passes", "clip") if name in options}
    model, optimizer = distribute(how, **options)
    losses = train(model, optimizer, range(steps), **asked)
    assert_same_everywhere(weights(model))
    return weights(model), losses


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def case_none_is_fsdp_bit_for_bit() -> None:
    theirs, _ = trained(None)
    with two_nodes():
        ours, _ = trained(how := made("none"))
    assert torch.equal(ours, theirs)
    assert how.ledger.steps == 5
    assert how.ledger.last is not None
    assert how.ledger.last.bytes_sent == how.ledger.last.dense_bytes > 0


def case_on_one_node_all_is_left_as_it_is_with_a_warning() -> None:
    with nodes_of(dist.get_world_size()), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours, _ = trained(made("int4"), steps=2)
    assert torch.equal(ours, trained(None, steps=2)[0])
    assert any("HVDCOMP_RANKS_PER_NODE=1" in str(one.message) for one in told) == (dist.get_rank() == 0)


def case_ranks_get_what_numpy_states() -> None:
    ranks, length = dist.get_world_size(), 1234
    for places in (1, ranks // 2):
        with nodes_of(places):
            for spec in ("int8", "int4", "fp8", "bf16"):
                method, memory = parse_compressor(spec), hvdcomp.ErrorFeedback()
                assert isinstance(method, Gathering)
                communicator, like = TorchDistributedCommunicator(), torch.empty(0)
                reducer = ShardReducer(communicator, method, memory, 0, 0, Ledger(), like)
                nodes = ranks // places
                residuals = np.zeros((nodes, places, nodes, length), np.float32)
                for step in range(3):
                    every = [np.random.default_rng([step, one]).normal(size=(ranks, length)) for one in range(ranks)]
                    given = [one.astype(np.float32) for one in every]
                    mine = torch.from_numpy(given[dist.get_rank()])
                    row = reducer.reduce("w", mine, mine.nbytes)
                    reducer.end_step()
                    rows, residuals = stated(method, given, residuals, step)
                    np.testing.assert_array_equal(row.numpy(), rows[dist.get_rank()])
                (kept,) = reducer.states["w"]
                node, place = divmod(dist.get_rank(), places)
                np.testing.assert_array_equal(kept.numpy(), np.delete(residuals[node, place], node, 0))


def case_int8_trains_as_fsdp_does() -> None:
    start, (theirs, their_losses) = weights(sharded()), trained(None, steps=20)
    for places in (1, dist.get_world_size() // 2):
        with nodes_of(places):
            ours, losses = trained(made("int8"), steps=20)
        assert their_losses[-1] < their_losses[0] - 0.3
        assert abs(losses[-1] - their_losses[-1]) < 0.02, (losses[-1], their_losses[-1])
        assert not torch.equal(ours, theirs)
        assert off(ours - start, theirs - start) < 0.1, off(ours - start, theirs - start)


def case_int4_sends_a_sixth_between_nodes() -> None:
    ranks = dist.get_world_size()
    for places in (1, ranks // 2):
        with nodes_of(places):
            _, losses = trained(how := made("int4"), steps=20)
        assert losses[-1] < losses[0] - 0.3
        last = how.ledger.last
        assert last is not None
        # What FSDP itself would hand to its reduce-scatter: all parameters, with rows for padding, as float32.
        shapes = [one.shape for one in sharded().parameters()]
        padded = [-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in shapes]
        assert last.dense_bytes == 4 * sum(padded)
        assert last.bytes_in_node == (last.dense_bytes if places > 1 else 0)
        assert 6 * (last.bytes_sent - last.bytes_in_node) < last.dense_bytes
        assert how.metrics()["hvdcomp/compression_factor"] > 6
        assert sum(one.bytes_sent for one in last.tensors.values()) == last.bytes_sent
        assert last.tensors.keys() == {"model", "blocks.0", "blocks.1"} == how.plan.keys()
        kept = sum(array.numel() for arrays in how._binding.engine.states.values() for array in arrays)
        assert kept == (sum(padded) // ranks if places > 1 else 0)  # 4 bytes for each parameter of this rank's shard


def case_what_fsdp_offers_works() -> None:
    half = {dtype: MixedPrecisionPolicy(reduce_dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    settings: dict[str, dict[str, Any]] = {
        "two passes, clipped": {"passes": 2, "clip": 0.5},
        "sums of bfloat16": {"mp_policy": half[torch.bfloat16], "clip": 0.5},
        "sums of float16": {"mp_policy": half[torch.float16]},
        "parameters in bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "not resharded": {"reshard_after_forward": False},
    }
    start = weights(sharded())
    for name, options in settings.items():
        theirs, _ = trained(None, sgd=True, **options)
        with two_nodes():
            ours, _ = trained(how := made("int8"), sgd=True, **options)
        assert off(ours - start, theirs - start) < 0.1, (name, off(ours - start, theirs - start))
        assert how.ledger.steps == 5, name


def case_changes_of_weights_are_sent_and_all_ranks_compute_with_the_same() -> None:
    ranks, start = dist.get_world_size(), weights(sharded())
    stock, stock_losses = trained(None, steps=12)
    with two_nodes():
        exact, _ = trained(without := made("none"), steps=12, weights=hvdcomp.NoCompression())
        assert torch.equal(exact, stock)
        for method in (hvdcomp.Int8(), hvdcomp.Int4()):
            model, optimizer = distribute(how := made("none"), weights=method)
            seen: list[torch.Tensor] = []
            layer = next(one for one in model.blocks[0].modules() if isinstance(one, torch.nn.Linear))
            layer.register_forward_pre_hook(lambda layer, _, seen=seen: seen.append(layer.weight.detach().clone()))
            losses = train(model, optimizer, range(12))
            for theirs in everywhere(seen):
                assert all(torch.equal(*pair) for pair in zip(theirs, seen, strict=True))
            lacking = layer.weight.full_tensor() - seen[-1]
            assert 0 < lacking.abs().max() < 5e-3, lacking.abs().max()  # no more than of a step or two of AdamW
            assert abs(losses[-1] - stock_losses[-1]) < 0.02, (method, losses[-1], stock_losses[-1])
            assert (far := off(weights(model) - start, stock - start)) < 0.25, (method, far)
            last, dense = how.ledger.last, without.ledger.last
            assert last is not None
            assert dense is not None
            # Weights take, in place of a gather of each module and a second of blocks, one payload of each.
            lengths = {name: sum(array.numel() for array in of) for name, of in shards_of(model).items()}
            stock_bytes = sum(4 * length * (1 if name == "model" else 2) for name, length in lengths.items())
            ours = sum(-(-method.payload_bytes((length,)) // 8) * 8 for length in lengths.values())
            assert dense.bytes_sent - last.bytes_sent == stock_bytes - ours, (ranks, lengths)
            assert last.dense_bytes == dense.dense_bytes


def shards_of(model: Any) -> dict[str, list[torch.Tensor]]:
    """A rank's shards with padding, by FSDP module."""
    shards: dict[str, list[torch.Tensor]] = {}
    ranks = dist.get_world_size()
    for name, parameter in model.named_parameters():
        module = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "model"
        first, *inner = parameter.shape
        shards.setdefault(module, []).append(torch.empty(-(-first // ranks), *inner))
    return shards


def case_weights_stay_as_they_are_gathered_until_an_update_to_exact_ones() -> None:
    """However FSDP reshards, backward passes have the weights of forward passes, and so have passes until an update."""
    results = []
    with two_nodes():
        for reshard in (True, False, 2) if dist.get_world_size() == 4 else (True, False):
            how = made("int8")
            model, optimizer = distribute(how, sgd=True, weights=hvdcomp.Int4(), reshard_after_forward=reshard)
            for step in range(3):
                before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
                train(model, optimizer, range(step, step + 1), passes=2)
                for old, parameter in zip(before, model.parameters(), strict=True):
                    assert torch.equal(parameter.to_local(), old.add(parameter.grad.to_local(), alpha=-0.1))
            results.append(weights(model))
    assert all(torch.equal(results[0], one) for one in results[1:])


def prefetching(model: Any) -> None:
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


@thorough
def case_what_fsdp_does_with_weights_stays_as_it_is() -> None:
    """Settings of FSDP's communication that torch tests of itself: with each, steps are stock's but for rounding."""
    settings: dict[str, Callable[[Any], Any]] = {
        "asked for by name": prefetching,
        "gathered ahead": lambda model: model.unshard(async_op=True).wait(),
        "kept after the backward pass": lambda model: model.set_reshard_after_backward(False),
        "kept after the forward pass": lambda model: model.set_reshard_after_forward(False),
        "not gathered in the backward pass": lambda model: model.set_unshard_in_backward(True),
        "a frozen block": lambda model: model.blocks[0].requires_grad_(False),
        "a frozen parameter": lambda model: next(model.parameters()).requires_grad_(False),
        "several inputs in flight": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    }
    with two_nodes():
        for name, change in settings.items():
            results = []
            for how in (None, made("int8")):
                model, optimizer = distribute(how, sgd=True)
                start = weights(model)
                change(model)
                train(model, optimizer, range(2))
                for module in (model, *model.blocks):
                    module.reshard()
                assert_same_everywhere(weights(model))
                results.append(weights(model) - start)
            assert off(*reversed(results)) < 0.1, (name, off(*reversed(results)))


def case_collectives_are_those_of_fsdp_but_for_sums() -> None:
    counts = []
    with two_nodes():
        for how in (None, made("int8")):
            model, optimizer = distribute(how)
            train(model, optimizer, range(1))
            with CommDebugMode() as seen:
                train(model, optimizer, range(1, 2))
            counts.append({str(one).partition(".")[2]: count for one, count in seen.get_comm_counts().items()})
    stock, ours = counts
    gathers = [sum(count for name, count in one.items() if "allgather" in name.replace("_", "")) for one in counts]
    assert gathers[0] == gathers[1] > 0, counts
    sums = [name for name in stock if "reduce_scatter" in name]
    assert sum(stock[name] for name in sums) == 3, stock  # two blocks, and the rest
    assert not any(ours.get(name) for name in sums), ours
    levels = 1 if dist.get_world_size() == 2 else 2  # in a node too, as Gloo has no reduce-scatter of its own
    assert sum(count for name, count in ours.items() if "alltoall" in name) == 3 * levels, ours


def case_a_checkpoint_goes_on_as_if_nobody_had_stopped() -> None:
    with two_nodes():
        how = made("int4", memory="error_feedback")
        model, optimizer = distribute(how)
        train(model, optimizer, range(3))
        folder = common_folder()
        state = {"model": model.state_dict(), "compression": hvdcomp.dcp.by_rank(how)}
        dcp.save(state, checkpoint_id=folder)
        saved = everywhere(how.state_dict())
        of_optimizer = optimizer.state_dict()
        of_optimizer = torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), of_optimizer)
        train(model, optimizer, range(3, 6))

        again = made("int4", memory="error_feedback")
        fresh, other = distribute(again)
        dcp.load({"model": (loaded := fresh.state_dict())}, checkpoint_id=folder)
        fresh.load_state_dict(loaded)
        other.load_state_dict(of_optimizer)
        hvdcomp.dcp.load(again, folder)
        train(fresh, other, range(3, 6))
        assert torch.equal(weights(fresh), weights(model))
        assert again.ledger.steps == how.ledger.steps == 6
        assert again.ledger.totals.bytes_sent == how.ledger.totals.bytes_sent

        states = everywhere(how.state_dict())
        wrong = made("int4", memory="error_feedback")
        hvdcomp.fsdp.register(sharded(), wrong)
        of_other = states[dist.get_rank() - 1]
        said = raised(hvdcomp.ConfigurationError, lambda: wrong.load_state_dict(of_other))
        assert "fits only the same rank, with the same number" in said
        other_method = made("int8")
        hvdcomp.fsdp.register(sharded(), other_method)
        mine = states[dist.get_rank()]
        assert "compressor int4" in raised(hvdcomp.ConfigurationError, lambda: other_method.load_state_dict(mine))
    with nodes_of(1):
        if dist.get_world_size() > 2:
            hvdcomp.fsdp.register(sharded(), other_nodes := made("int4", memory="error_feedback"))
            assert "on 2 nodes" in raised(hvdcomp.ConfigurationError, lambda: other_nodes.load_state_dict(mine))
            model, optimizer = distribute(cut_anew := made("int4", memory="error_feedback"))
            hvdcomp.dcp.load(cut_anew, folder)
            before, after = (lacking_anywhere(one) for one in (saved, everywhere(cut_anew.state_dict())))
            assert abs(before - after) < 1e-5 * abs(before), (before, after)
            train(model, optimizer, range(3, 6))
            assert_same_everywhere(weights(model))
            assert cut_anew.ledger.steps == 6
    with nodes_of(dist.get_world_size()):
        hvdcomp.fsdp.register(sharded(), one_node := made("int4", memory="error_feedback"))
        told = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.dcp.load(one_node, folder))
        assert "If there are several nodes" in told, told
        lost = functools.partial(hvdcomp.dcp.load, one_node, folder, residuals="lose")
        assert '"drop"' in raised(hvdcomp.ConfigurationError, lost)
        hvdcomp.dcp.load(one_node, folder, residuals="drop")
        assert one_node.ledger.steps == 3
        assert not one_node.state_dict()["own"]["residuals"]


def common_folder() -> str:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return str(name[0])


def case_another_default_memory_is_taken_over_without_residuals() -> None:
    with nodes_of(2):
        model, optimizer = distribute(how := made("int4"))
        train(model, optimizer, range(2))
        dcp.save({"compression": hvdcomp.dcp.by_rank(how)}, checkpoint_id=(folder := common_folder()))
    with nodes_of(1):  # where none is kept by default
        model, optimizer = distribute(other := made("int4"))
        if dist.get_world_size() > 2:
            told = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.dcp.load(other, folder))
            assert "memory=" in told, told
            assert 'residuals="drop"' in told, told
        hvdcomp.dcp.load(other, folder, residuals="drop")
        train(model, optimizer, range(2, 3))
        assert other.ledger.steps == 3
        hvdcomp.fsdp.register(sharded(), of_other_method := made("int8"))
        drop = functools.partial(hvdcomp.dcp.load, of_other_method, folder, residuals="drop")
        assert "compressor int4" in raised(hvdcomp.ConfigurationError, drop)


def case_ranks_placed_otherwise_take_over_the_residuals_of_their_rows() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 2:
        raise SkipTest("two ranks on two nodes have one order")

    def pending(how: hvdcomp.Compression) -> torch.Tensor:
        """By flat gradient and row, what all ranks are still to send."""
        engine = how._binding.engine
        rows = [torch.zeros(ranks, array.shape[1]) for (array,) in engine.states.values()]
        for row, (array,) in zip(rows, engine.states.values(), strict=True):
            row[engine.owners] = array
        every = torch.cat(rows, 1)
        dist.all_reduce(every)
        return every

    before = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK")}
    try:
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks // 2), "GROUP_RANK": str(rank // (ranks // 2))}
        model, optimizer = distribute(how := made("int4"))
        train(model, optimizer, range(2))
        dcp.save({"compression": hvdcomp.dcp.by_rank(how)}, checkpoint_id=(folder := common_folder()))
        os.environ["GROUP_RANK"] = str(rank % 2)
        hvdcomp.fsdp.register(sharded(), placed := made("int4"))
        hvdcomp.dcp.load(placed, folder)
        assert placed._binding.engine.owners != how._binding.engine.owners or rank in (0, ranks - 1)
        assert torch.equal(pending(placed), pending(how))
        assert pending(how).any()
    finally:
        os.environ |= {name: value for name, value in before.items() if value is not None}


def case_weights_that_were_loaded_are_gathered_exactly() -> None:
    with two_nodes():
        model, _ = distribute(made("none"), weights=hvdcomp.Int4())
        layer = next(one for one in model.blocks[0].modules() if isinstance(one, torch.nn.Linear))
        seen: list[torch.Tensor] = []
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.detach().clone()))
        tokens = batch(torch.Generator().manual_seed(1))
        for loaded in (model, model.blocks[0]):
            with torch.no_grad():
                model(tokens[:, :-1])
                model.reshard()
                loaded.load_state_dict({name: value * 3 for name, value in loaded.state_dict().items()})
                model(tokens[:, :-1])
                model.reshard()
            assert torch.equal(seen[-1], layer.weight.full_tensor())
            assert not torch.equal(seen[-1], seen[-2])


def everywhere(mine: Any) -> list[Any]:
    """What all ranks have."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def lacking_anywhere(states: list[Any]) -> float:
    """The sum of all that means lack."""
    kept = [one for state in states for one in state["own"]["residuals"].values()]
    return sum(float(one["arrays"][0].double().sum()) for one in kept) / states[0]["shared"]["nodes"]


class Nested(torch.nn.Module):
    """Parameters of its own beside those of modules inside, of which one is frozen."""

    def __init__(self, width: int, inside: torch.nn.Module) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.rand(width, 3))
        self.first = torch.nn.Linear(width, width + 1)
        self.inside = inside
        self.last = torch.nn.Linear(width + 1, width)
        self.last.bias.requires_grad_(False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inside(self.last(self.first(given).sin()) * self.own.mean(1))


def case_flat_gradients_lie_as_is_assumed() -> None:
    """What residuals are cut anew by: FSDP says nowhere in what order it has parameters."""
    for together in (False, True):
        with nodes_of(1):
            torch.manual_seed(3)
            model: Any = Nested(5, Nested(5, torch.nn.LayerNorm(5)))
            fully_shard(model.inside)
            if together:
                fully_shard([model.last, model.first])
            fully_shard(model)
            hvdcomp.fsdp.register(model, how := made("int8", min_numel=0, memory="error_feedback"))
            engine, rows = how._binding.engine, {}
            reduce = engine.reduce

            def seen(name: str, *arguments: Any, reduce: Any = reduce, rows: Any = rows) -> Any:
                rows[name] = reduce(name, *arguments)
                return rows[name]

            engine.reduce = seen
            model(torch.rand(4, 5)).square().sum().backward()
            layouts = how.state_dict()["shared"]["layouts"]
            assert layouts.keys() == rows.keys() == {"model", "inside", *["last"] * together}
            for module, row in rows.items():
                start = 0
                for name, (first, *others) in layouts[module]:
                    gradient = model.get_parameter(f"inside.{name}" if module == "inside" else name).grad.to_local()
                    assert torch.equal(row[start : start + gradient.numel()], gradient.reshape(-1)), (module, name)
                    start += -(-first // dist.get_world_size()) * math.prod(others)
                assert start == len(row), module
            if together:
                assert [name for name, _ in layouts["last"]] == ["last.weight", "first.weight", "first.bias"]


def compiled(backend: str) -> None:
    def register(model: Any) -> hvdcomp.Compression:
        how = made("int4", memory="error_feedback")
        hvdcomp.fsdp.register(model, how)
        return how

    with two_nodes():
        cases_fsdp.compiled_trainings(register, backend)


@thorough
def case_compiled_trainings_are_the_same() -> None:
    compiled("eager")


@thorough
def case_trainings_compiled_by_inductor_are_the_same_but_for_rounding() -> None:
    compiled("inductor")


class Experts(torch.nn.Module):
    """Two of the same shape, and a head that is not always trained; a batch says what of these it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 33, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 5, bias=False).requires_grad_(False)

    def forward(self, inputs: torch.Tensor, used: str) -> torch.Tensor:
        layers = {"0": self.experts[0], "1": self.experts[1], "h": self.head}
        return sum(layers[one](inputs).sum() for one in used)  # type: ignore[return-value]


WIDTH = 64
NAMES = {"0": "experts.0.weight", "1": "experts.1.weight", "h": "head.weight"}


def experts(how: hvdcomp.Compression) -> Any:
    model = fully_shard(Experts())
    hvdcomp.fsdp.register(model, how)
    return model


def case_a_residual_stays_with_its_parameter() -> None:
    """Whatever parameters of a module have gradients in a step, also through a checkpoint in the middle."""
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    options = {"memory": "error_feedback", "min_numel": 0}
    there, sent = ({name: torch.zeros(WIDTH) for name in NAMES.values()} for _ in range(2))
    with nodes_of(ranks // 2), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = experts(how := made("int4", **options))
        for step, used in enumerate(("0", "1", "0", "01", "1", "save", "unfreeze", "1h", "01h", "h", "save", "0", "1")):
            if used == "unfreeze":
                model.head.requires_grad_(True)
                continue
            if used == "save":
                state = how.state_dict()
                trains = model.head.weight.requires_grad
                model = experts(how := made("int4", **options))
                model.head.requires_grad_(trains)
                how.load_state_dict(state)
                continue
            model.zero_grad()
            inputs = torch.randn(8, WIDTH, generator=generator) * (step != 1)
            for number in range(2):  # passes, of which the second exchanges
                model.set_requires_gradient_sync(number == 1)
                model(inputs, used[: number + 1] if step % 2 else used).backward()
            for name in NAMES.values():
                gradient = model.get_parameter(name).grad
                assert (gradient is not None) == (name in {NAMES[one] for one in used}), (step, name)
                if gradient is not None:
                    passes = 2 if not step % 2 or name == NAMES[used[0]] else 1
                    there[name] += passes * inputs.sum(0) / ranks
                    sent[name] += gradient.full_tensor().sum(0) / len(gradient)
                    if step == 1:
                        assert not gradient.full_tensor().any(), "what was left of the other expert"
        left = {name: torch.zeros(WIDTH) for name in NAMES.values()}
        (kept,), start = how.state_dict()["own"]["residuals"]["model"]["arrays"], 0
        for name in NAMES.values():
            shape = model.get_parameter(name).shape
            part = -(-shape[0] // ranks) * shape[1]
            rows = kept[:, start : start + part].reshape(-1, shape[1])
            left[name] += rows.sum(0) / shape[0] / how._binding.engine.levels.across.size
            start += part
        assert start == kept.shape[1]
    for name in NAMES.values():
        for one in (there[name], left[name]):
            dist.all_reduce(one)
        assert left[name].abs().max() > 1e-3, name
        torch.testing.assert_close(sent[name] + left[name], there[name], rtol=1e-4, atol=1e-3)
    state["shared"]["layouts"]["model"][0] = ("experts.0.other", [33, WIDTH])
    with nodes_of(ranks // 2):
        experts(how := made("int4", **options))
        told = raised(hvdcomp.ConfigurationError, lambda: how.load_state_dict(state))
        assert "of module model belongs to parameters" in told, told


def case_nothing_is_added_to_a_parameter_that_is_not_known() -> None:
    """Where a module's forward() is not called, nobody tells which of its parameters have gradients."""
    with nodes_of(dist.get_world_size() // 2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = experts(made("int4", memory="error_feedback", min_numel=0))
        model.apart = lambda inputs, used: Experts.forward(model, inputs, used)
        register_fsdp_forward_method(model, "apart")
        for used, factor, warned in (("01", 1, False), ("0", 1, True), ("1", 0, True), ("01", 0, True)):
            model.zero_grad()
            model.apart(torch.rand(8, WIDTH) * factor, used).backward()
            assert bool(told) == warned, used
            if not factor:  # what was left of the first step is sent with the first that has both
                assert bool(model.experts[1].weight.grad.full_tensor().any()) == (used == "01")
        assert "model: forward() of this module was not called" in str(told[0].message)


def case_what_cannot_be_is_refused_on_every_rank() -> None:
    def refused(model: Any, how: hvdcomp.Compression, optimizer: Any = None) -> str:
        return raised(hvdcomp.ConfigurationError, lambda: hvdcomp.fsdp.register(model, how, optimizer=optimizer))

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    assert "fully_shard(model)" in refused(large_model(), made("int4"))
    assert "mesh['replicate']" in refused(sharded(mesh=mesh["shard"]), made("int4"))
    model = large_model()
    fully_shard(model, ignored_params={model[0].bias})
    assert "ignored_params" in refused(model, made("int4"))
    model = sharded()
    for spec in ("topk:ratio=0.1", "powersgd:rank=2", "two_level(int4)", "onebit:per_row=True", "dgc:ratio=0.1"):
        assert "Use int8, int4, fp8, bf16" in refused(model, made(spec)), spec
    momentum = "momentum_correction:momentum=0.9"
    assert "whole gradients" in refused(model, made("int4", memory=momentum))
    schedule = hvdcomp.WarmUp(levels=(8, 4), epochs=1)
    assert "the policy" in refused(model, made("qsgd:bits=4", policy=schedule, steps_per_epoch=4))
    assert "overlap" in refused(model, made("int4", overlap=True))
    assert "process_set" in refused(model, made("int4", process_set=object()))
    assert "GradScaler" in refused(model, made("int4", grad_scaler=torch.amp.GradScaler("cpu")))
    adam = hvdcomp.torch.CompressedAdam(model.parameters(), freeze_after=4)
    assert "CompressedAdam does not work with FSDP" in refused(model, made("int4"), adam)
    for of_weights, said in ((hvdcomp.TopK(ratio=0.1), "quantizer"), ("int8", "hvdcomp.Int8()")):
        register = functools.partial(hvdcomp.fsdp.register, model, made("int4"), weights=of_weights)
        assert said in raised(hvdcomp.ConfigurationError, register)
    register = functools.partial(register, mesh=mesh["replicate"])
    assert "Omit weights=" in raised(hvdcomp.ConfigurationError, register)
    on_others = hvdcomp.Int8() if dist.get_rank() else None
    register = functools.partial(hvdcomp.fsdp.register, model, made("int4"), weights=on_others)
    assert "weights" in raised(hvdcomp.RankMismatchError, register)
    spec = "int4" if dist.get_rank() else "int8"
    assert "do not agree" in raised(hvdcomp.RankMismatchError, lambda: hvdcomp.fsdp.register(model, made(spec)))
    if dist.get_world_size() == 4:
        with nodes_of(3):
            assert "HVDCOMP_RANKS_PER_NODE=1" in refused(model, made("int4"))


def case_nothing_is_exchanged_while_a_graph_is_captured() -> None:
    tokens = batch(torch.Generator())[:, :-1]
    with two_nodes():
        model, _ = distribute(made("int4"))
        loss = model(tokens).sum()
        with as_captured():
            assert REFUSED in raised(hvdcomp.ConfigurationError, loss.backward)
        model, _ = distribute(made("int4"), weights=hvdcomp.Int8())
        with as_captured():
            assert REFUSED in raised(hvdcomp.ConfigurationError, lambda: model(tokens))


def case_a_backward_pass_that_raises_changes_nothing_without_a_residual() -> None:
    results = []
    with nodes_of(1):
        for fails in (False, True):
            model = cases_fsdp.sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
            hvdcomp.fsdp.register(model, how := made("int4:rounding=stochastic"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
            for _ in range(2):
                cases_fsdp.train(model, optimizer, steps=2)
                if fails:
                    cases_fsdp.fail(model)
            assert how.ledger.steps == 4
            results.append(weights(model))
    assert torch.equal(*results)


def case_the_users_divisor_gives_what_fsdp_gives() -> None:
    """With `force`, after the reduce-scatter; without, FSDP asks for a sum of products, which Gloo lacks."""

    def divided(how: hvdcomp.Compression | None, factor: float | None, forced: bool = True, **options: Any) -> Any:
        model, _ = distribute(how, **options)
        for module in (model, *model.blocks):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(forced)
        tokens = batch(torch.Generator().manual_seed(dist.get_rank()))
        logits = model(tokens[:, :-1]).float()
        torch.nn.functional.cross_entropy(logits.reshape(-1, TOKENS), tokens[:, 1:].reshape(-1)).backward()
        return torch.cat([one.grad.full_tensor().reshape(-1).double() for one in model.parameters()])

    half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
    with two_nodes():
        for factor in (None, 1.0, 7.0):
            theirs = divided(None, factor)
            assert torch.equal(divided(made("none"), factor), theirs)
            for forced in (True, False):
                assert off(divided(made("int8", min_numel=0), factor, forced), theirs) < 0.02, (factor, forced)
            assert off(divided(made("int8", min_numel=0), factor, **half), theirs) < 0.02, factor


def case_residuals_do_not_depend_on_the_users_divisor() -> None:
    options = {"memory": "error_feedback", "min_numel": 0}
    with nodes_of(1):
        kept = []
        for factor in (None, 7.0):
            model, optimizer = distribute(how := made("int4", **options))
            for module in (model, *model.blocks):
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
            train(model, optimizer, range(1))
            kept.append(how.state_dict()["own"]["residuals"]["model"]["arrays"][0])
        assert torch.equal(*kept)
        assert kept[0].any()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)  # FSDP divides some of it before
        model, optimizer = distribute(how := made("int4", **options), mp_policy=policy)
        train(model, optimizer, range(1))
        state = how.state_dict()
        for again in (False, True):
            if again:
                model, optimizer = distribute(how := made("int4", **options), mp_policy=policy)
                how.load_state_dict(state)
            model.set_gradient_divide_factor(7.0)
            step = functools.partial(train, model, optimizer, range(1, 2))
            told = raised(hvdcomp.ConfigurationError, step)
            assert "module model: set_gradient_divide_factor changed its factor from none to 7.0" in told, told
