"""What must hold in trainers that shard a model on a mesh with replicas: accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import hvdcomp
from tests.multirank.cases_fsdp import weights
from tests.multirank.cases_trainers import STEPS, STOP, folder, library, loop, sgd, small_model, topk
from tests.multirank.collectives import nodes_of
from tests.multirank.training_ddp import assert_same_everywhere, raised


@contextmanager
def accelerator_in_fsdp2(replicas: int) -> Iterator[Any]:
    """An accelerator as with GPUs: on CPUs, accelerate itself does not use FSDP2."""
    accelerate = library("accelerate")
    utils = library("accelerate.utils")
    accelerator = accelerate.Accelerator(cpu=True)
    config = accelerate.ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=dist.get_world_size() // replicas)
    state, of_process = accelerator.state, accelerate.PartialState._shared_state
    before = of_process["distributed_type"]
    of_process["distributed_type"] = state.distributed_type = utils.DistributedType.FSDP
    state.fsdp_plugin = utils.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    state.parallelism_config, state.device_mesh = config, config.get_device_mesh("cpu")
    try:
        with nodes_of(1):
            yield accelerator
    finally:
        of_process["distributed_type"] = state.distributed_type = before
        state.fsdp_plugin = state.parallelism_config = state.device_mesh = None
        accelerator.free_memory()


def int8() -> hvdcomp.Compression:
    # Its random numbers depend on the step.
    return hvdcomp.Compression(hvdcomp.Int8(rounding="stochastic"), min_numel=100)


def prepared(accelerator: Any, compression: Any, shards: Any = None) -> tuple[Any, Any]:
    model = small_model()
    model, optimizer = accelerator.prepare(model, sgd(model))
    hvdcomp.accelerate.register(accelerator, model, compression, optimizer, shards=shards)
    return model, optimizer


def case_accelerate_compresses_both_dimensions_and_resumes_bit_for_bit() -> None:
    saved = folder()

    def train(begin: int, end: int) -> tuple[torch.Tensor, list[Any]]:
        with accelerator_in_fsdp2(2) as accelerator:
            compressions = [topk(), int8()]
            model, optimizer = prepared(accelerator, *compressions)
            if begin:
                accelerator.load_state(str(saved / str(begin)))
            loop(accelerator.backward, model, optimizer, begin, end)
            accelerator.save_state(str(saved / str(end)))
            return weights(model), [compression.ledger for compression in compressions]

    whole, ledgers = train(0, STEPS)
    assert_same_everywhere(whole)
    assert ledgers[0].totals.compression_factor > 5
    assert 3.5 < ledgers[1].totals.compression_factor < 4
    stopped, _ = train(0, STOP)
    assert not torch.equal(stopped, whole)
    resumed, ledgers = train(STOP, STEPS)
    assert [ledger.steps for ledger in ledgers] == [STEPS, STEPS]
    assert torch.equal(resumed, whole)


def case_accelerate_shards_over_all_ranks_and_starts_without_a_state() -> None:
    saved = folder()
    with accelerator_in_fsdp2(1) as accelerator:
        model = small_model()
        accelerator.prepare(model, sgd(model))
        accelerator.save_state(str(saved))
    with accelerator_in_fsdp2(1) as accelerator:
        model, optimizer = prepared(accelerator, compression := int8())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state(str(saved))
        said = [one for one in caught if "has no state of hvdcomp" in str(one.message)]
        assert len(said) == (1 if accelerator.is_main_process else 0)
        loop(accelerator.backward, model, optimizer, 0, 2)
        assert_same_everywhere(weights(model))
        assert 3.5 < (compression.ledger.totals.compression_factor or 0) < 4


def case_accelerate_refuses_what_register_refuses() -> None:
    def refused(accelerator: Any, shards: Any) -> str:
        return raised(hvdcomp.ConfigurationError, lambda: prepared(accelerator, topk(), shards))

    with accelerator_in_fsdp2(1) as accelerator:
        assert "was given the argument shards= for a model without replicas" in refused(accelerator, int8())
    with accelerator_in_fsdp2(2) as accelerator:
        assert "topk:ratio=0.01 does not work in FSDP's reduce-scatter" in refused(accelerator, topk())
        accelerator.scaler = torch.amp.GradScaler("cpu")
        assert 'Use Accelerator(mixed_precision="bf16")' in refused(accelerator, int8())
    accelerator = library("accelerate").Accelerator(cpu=True)
    assert "the argument shards=, but a model in DistributedDataParallel is not sharded" in refused(accelerator, int8())
