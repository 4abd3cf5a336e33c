"""What must hold in trainers: accelerate, Lightning, Fabric, Transformers; and with torchrec and torchtitan."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import SkipTest, mock
from weakref import ref

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule

import hvdcomp
from tests.multirank.models import weights
from tests.multirank.training_ddp import assert_same_everywhere, gathered, raised
from tests.multirank.worker import thorough

STEPS = 20
STOP = 10  # the step of the checkpoint
BATCH = 8


def library(name: str) -> Any:
    """A library; without it every rank skips the case."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise SkipTest(f"{error.name} is not installed; docs/recipes.md says how to install {name}") from None


def folder() -> Path:
    """A new folder, the same for all ranks."""
    return Path(gathered(mkdtemp(prefix="hvdcomp-trainers-") if dist.get_rank() == 0 else None)[0])


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(BATCH, 64, generator=generator), torch.randint(10, (BATCH,), generator=generator)


def topk() -> hvdcomp.Compression:
    return hvdcomp.Compression(hvdcomp.TopK(ratio=0.01), min_numel=100)


def assert_resumes(train: Callable[[int, int], tuple[torch.Tensor, hvdcomp.Compression]]) -> None:
    """Asserts that ranks are equal after 20 steps, and after 10 and 10 from the checkpoint, bit for bit.

    Args:
        train: function that trains from a step, which has a checkpoint unless it is 0, to another, and saves there; it
            returns the weights.
    """
    whole, compression = train(0, STEPS)
    assert_same_everywhere(whole)
    assert compression.ledger.steps == STEPS
    assert compression.ledger.totals.compression_factor > 7
    stopped, _ = train(0, STOP)
    assert not torch.equal(stopped, whole)
    resumed, compression = train(STOP, STEPS)
    assert compression.ledger.steps == STEPS
    assert torch.equal(resumed, whole)


def prepared(accelerator: Any, compression: hvdcomp.Compression) -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer in accelerate."""
    model = small_model()
    model, optimizer = accelerator.prepare(model, sgd(model))
    hvdcomp.accelerate.register(accelerator, model, compression, optimizer)
    return model, optimizer


def loop(backward: Callable[[torch.Tensor], None], model: Any, optimizer: Any, begin: int, end: int) -> None:
    """Trains from a step to another."""
    for step in range(begin, end):
        inputs, classes = batch_of(step)
        optimizer.zero_grad()
        backward(torch.nn.functional.cross_entropy(model(inputs), classes))
        optimizer.step()


def assert_follows(scaler: torch.amp.GradScaler, compression: hvdcomp.Compression) -> None:
    """Asserts that residuals have the scale of the loss."""
    assert compression.state_dict()["own"]["loss_scale"] == scaler.get_scale() > 1


@contextmanager
def pauses(now: Callable[[], int]) -> Iterator[list[tuple[int, str]]]:
    """The steps at which the clock of a compression stops ("from") and starts again ("to")."""
    found: list[tuple[int, str]] = []

    @contextmanager
    def paused() -> Iterator[None]:
        found.append((now(), "from"))
        yield
        found.append((now(), "to"))

    with mock.patch.object(hvdcomp.Compression, "paused", side_effect=paused):
        yield found


def case_accelerate_resumes_bit_for_bit() -> None:
    accelerate = library("accelerate")
    saved = folder()

    def train(begin: int, end: int) -> tuple[torch.Tensor, hvdcomp.Compression]:
        accelerator, compression = accelerate.Accelerator(cpu=True), topk()
        model, optimizer = prepared(accelerator, compression)
        if begin:
            accelerator.load_state(str(saved / str(begin)))
        loop(accelerator.backward, model, optimizer, begin, end)
        accelerator.save_state(str(saved / str(end)))
        return weights(model), compression

    assert_resumes(train)


def case_accelerate_keeps_two_models_apart_and_frees_them() -> None:
    accelerate = library("accelerate")
    saved = folder()
    accelerator, compressions = accelerate.Accelerator(cpu=True), [topk(), topk()]
    models, optimizers = zip(*(prepared(accelerator, compression) for compression in compressions), strict=True)
    for number in (0, 1):
        loop(accelerator.backward, models[number], optimizers[number], 0, 3 + number)
    accelerator.save_state(str(saved))
    accelerator.wait_for_everyone()
    names = {f"compression{of_model}{rank}.pt" for of_model in ("", "_1_") for rank in (0, 1)}
    assert {file.name for file in saved.glob("compression*")} == names
    freed = [ref(one) for one in (*models, *compressions)]
    accelerator.free_memory()
    accelerator.save_state(str(saved / "of no model"))
    assert not list((saved / "of no model").glob("compression*"))
    del models, optimizers, compressions
    gc.collect()
    assert [one() for one in freed] == [None] * 4
    resumed = [topk(), topk()]
    kept = [prepared(accelerator, compression) for compression in resumed]
    accelerator.load_state(str(saved))
    assert [compression.ledger.steps for compression in resumed] == [3, 4]
    del kept


def case_accelerate_gives_its_scaler() -> None:
    accelerator, compression = library("accelerate").Accelerator(cpu=True), topk()
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as it makes one itself, on a GPU
    model, optimizer = prepared(accelerator, compression)
    loop(accelerator.backward, model, optimizer, 0, STOP)
    assert_follows(accelerator.scaler, compression)
    assert_same_everywhere(model)


def case_accelerate_goes_on_with_other_ranks() -> None:
    """With the mean of what all old ranks had left to send; and from a checkpoint without compression."""
    accelerate = library("accelerate")
    saved = folder()
    accelerator, compression = accelerate.Accelerator(cpu=True), topk()
    model, optimizer = prepared(accelerator, compression)
    loop(accelerator.backward, model, optimizer, 0, STOP)
    accelerator.save_state(str(saved))
    states = gathered(compression.state_dict())
    if accelerator.is_main_process:
        for rank in range(5):
            torch.save(hvdcomp.state_for(states, rank, 5), saved / f"compression{rank}.pt")
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    resumed = topk()
    model, optimizer = prepared(accelerator, resumed)
    accelerator.load_state(str(saved))
    for name, left in pending(states).items():
        torch.testing.assert_close(pending(gathered(resumed.state_dict()))[name], left, rtol=1e-5, atol=1e-7)
        assert left.any()
    loop(accelerator.backward, model, optimizer, STOP, STEPS)
    assert_same_everywhere(model)

    for file in saved.glob("compression*") if accelerator.is_main_process else ():
        file.unlink()
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = prepared(accelerator, topk())
        accelerator.load_state(str(saved))
    said = [str(warning.message) for warning in caught if "has no state of hvdcomp" in str(warning.message)]
    assert len(said) == (1 if accelerator.is_main_process else 0)
    loop(accelerator.backward, model, optimizer, STOP, STEPS)
    assert_same_everywhere(model)


def pending(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The mean over the ranks of what they have left to send."""
    kept = [state["own"]["residuals"] for state in states]
    return {name: torch.stack([of_rank[name]["arrays"][0] for of_rank in kept]).mean(0) for name in kept[0]}


def fabric_of(compression: hvdcomp.Compression) -> Any:
    lightning = library("lightning")
    strategy = hvdcomp.lightning.CompressedFabricStrategy(compression)
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def case_fabric_resumes_bit_for_bit() -> None:
    library("lightning")
    saved = folder()

    def train(begin: int, end: int) -> tuple[torch.Tensor, hvdcomp.Compression]:
        compression = topk()
        fabric = fabric_of(compression)
        model = small_model()
        model, optimizer = fabric.setup(model, sgd(model))
        state = {"model": model, "optimizer": optimizer}
        if begin:
            fabric.load(saved / f"{begin}.ckpt", state)
        loop(fabric.backward, model, optimizer, begin, end)
        fabric.save(saved / f"{end}.ckpt", state)
        fabric.save(saved / "weights.ckpt", {"model": model})
        assert not list(saved.glob("weights.ckpt.rank*"))
        return weights(model), compression

    assert_resumes(train)


def case_fabric_refuses_what_would_lose_residuals() -> None:
    library("lightning")
    compression = topk()
    fabric = fabric_of(compression)
    model, optimizer = fabric.setup(small_model(), sgd(small_model()))
    state = {"model": model, "optimizer": optimizer, "exchange": compression}
    for work in (lambda: fabric.save("never.ckpt", state), lambda: fabric.load("never.ckpt", state)):
        wrong = "contains the hvdcomp.Compression as 'exchange'. Leave 'exchange' out"
        assert wrong in raised(hvdcomp.ConfigurationError, work)
    said = raised(hvdcomp.ConfigurationError, lambda: fabric.setup(small_model(), sgd(small_model())))
    assert "make a separate Compression for each model" in said


def lightning_module() -> Any:
    lightning = library("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = small_model()

        def training_step(self, item: int, number: int) -> torch.Tensor:
            inputs, classes = batch_of(STOP * self.trainer.current_epoch + number)
            return torch.nn.functional.cross_entropy(self.layers(inputs), classes)

        def validation_step(self, item: int, number: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    return Module()


def lightning_trainer(compression: hvdcomp.Compression, **options: Any) -> Any:
    """A trainer that saves checkpoints only if it is given a callback for them."""
    return library("lightning").Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=hvdcomp.lightning.CompressedStrategy(compression),
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing="callbacks" in options,
        **options,
    )


def checkpoints(place: Path, **options: Any) -> Any:
    return import_module("lightning.pytorch.callbacks").ModelCheckpoint(place, filename="{step}", **options)


def case_lightning_resumes_bit_for_bit() -> None:
    library("lightning")
    saved = folder()

    def train(begin: int, end: int) -> tuple[torch.Tensor, hvdcomp.Compression]:
        model, compression = lightning_module(), topk()
        trainer = lightning_trainer(compression, max_epochs=end // STOP, callbacks=[checkpoints(saved / str(end))])
        trainer.fit(model, range(STOP), ckpt_path=saved / str(begin) / f"step={begin}.ckpt" if begin else None)
        return weights(model), compression

    assert_resumes(train)


def case_lightning_removes_states_with_checkpoints_and_follows_links() -> None:
    library("lightning")
    saved = folder()
    keeps_one = checkpoints(saved, every_n_train_steps=5, save_top_k=1, save_last="link")
    trainer = lightning_trainer(topk(), max_epochs=1, callbacks=[keeps_one])
    trainer.fit(lightning_module(), range(STOP))
    trainer.save_checkpoint(saved / "weights.ckpt", weights_only=True)
    names = {"last.ckpt", "step=10.ckpt", "weights.ckpt", "step=10.ckpt.rank0", "step=10.ckpt.rank1"}
    assert {file.name for file in saved.iterdir()} == names
    compression = topk()
    trainer = lightning_trainer(compression, max_epochs=2)
    trainer.fit(lightning_module(), range(STOP), ckpt_path=saved / "last.ckpt")
    assert compression.ledger.steps == STEPS


def case_lightning_validates_without_a_training_and_after_it() -> None:
    library("lightning")
    saved, compression, model = folder(), topk(), lightning_module()
    trainer = lightning_trainer(compression, max_epochs=1, callbacks=[checkpoints(saved)])
    trainer.validate(model, range(2))
    assert not compression.plan
    trainer.fit(model, range(STOP), range(2))  # validates before the first step, too
    assert compression.ledger.steps == STOP
    trainer.validate(model, range(2), ckpt_path=saved / "step=10.ckpt")


def case_lightning_gives_its_scaler() -> None:
    library("lightning")
    precision = import_module("lightning.pytorch.plugins").MixedPrecision("16-mixed", "cpu")
    compression = topk()
    lightning_trainer(compression, max_epochs=1, plugins=[precision]).fit(lightning_module(), range(STOP))
    assert_follows(precision.scaler, compression)


def case_lightning_does_not_count_validations() -> None:
    library("lightning")
    trainer = lightning_trainer(topk(), max_epochs=2, num_sanity_val_steps=0)
    with pauses(lambda: trainer.global_step) as paused:
        trainer.fit(lightning_module(), range(STOP), range(2))
    assert paused == [(STOP, "from"), (STOP, "to"), (STEPS, "from"), (STEPS, "to")]


class WithLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.layers(inputs), labels)}


def huggingface_trainer(saved: Path, end: int, compression: hvdcomp.Compression, **options: Any) -> Any:
    transformers = library("transformers")
    generator = torch.Generator().manual_seed(0)
    data = [
        {"inputs": torch.randn(64, generator=generator), "labels": number % 10}
        for number in range(STEPS * BATCH * dist.get_world_size())
    ]
    arguments = transformers.TrainingArguments(
        str(saved),
        max_steps=end,
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="constant",
        save_steps=end,
        ddp_find_unused_parameters=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    model = WithLoss()
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:BATCH],
        optimizers=(sgd(model), None),
        callbacks=[hvdcomp.transformers.CompressionCallback(compression)],
    )


def case_transformers_resumes_bit_for_bit() -> None:
    library("transformers")
    saved = folder()

    def train(begin: int, end: int) -> tuple[torch.Tensor, hvdcomp.Compression]:
        compression = topk()
        trainer = huggingface_trainer(saved / str(end), end, compression)
        # The checkpoint is not in the folder of this run.
        trainer.train(resume_from_checkpoint=str(saved / str(begin) / f"checkpoint-{begin}") if begin else None)
        return weights(trainer.model), compression

    assert_resumes(train)


def case_transformers_trains_once_more_and_keeps_no_states_of_models_only() -> None:
    library("transformers")
    saved, compression = folder(), topk()
    trainer = huggingface_trainer(saved, STOP, compression, save_only_model=True)
    trainer.train()
    trainer.train()
    assert_same_everywhere(trainer.model)
    assert compression.ledger.steps == STEPS
    assert [file.parent.name for file in saved.glob("*/model.safetensors")] == ["checkpoint-10"]
    assert not list(saved.glob("*/compression*"))


def case_transformers_does_not_count_evaluations() -> None:
    """Nor checkpoints, nor anything else between such a step and the next."""
    library("transformers")
    trainer = huggingface_trainer(folder(), STOP, topk(), eval_strategy="steps", eval_steps=4)
    with pauses(lambda: trainer.state.global_step) as paused:
        trainer.train()
    assert paused == [(4, "from"), (4, "to"), (8, "from"), (8, "to"), (10, "from")]


def case_transformers_gives_its_scaler() -> None:
    library("transformers")
    compression = topk()
    trainer = huggingface_trainer(folder(), STOP, compression)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # as it makes one itself, on a GPU
    trainer.train()
    assert_follows(trainer.accelerator.scaler, compression)
    assert_same_everywhere(trainer.model)


@thorough
def case_torchrec_exchanges_its_dense_part_and_resumes_bit_for_bit() -> None:
    torchrec = library("torchrec")
    model_parallel = import_module("torchrec.distributed.model_parallel")
    in_backward = import_module("torchrec.optim.apply_optimizer_in_backward")
    saved = folder()
    device = torch.device("cpu")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = {"embedding_dim": 16, "num_embeddings": 100, "init_fn": torch.nn.init.ones_}
            tables = [
                torchrec.EmbeddingBagConfig(name=name, feature_names=[name], **config) for name in ("user", "item")
            ]
            self.tables = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
            torch.manual_seed(3)
            self.dense = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

        def forward(self, features: Any) -> torch.Tensor:
            return self.dense(self.tables(features).values())

    def train(begin: int, end: int) -> tuple[torch.Tensor, hvdcomp.Compression]:
        model, compression = Model(), topk()
        in_backward.apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
        sharded = model_parallel.DistributedModelParallel(model, device=device)
        optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.05)
        hvdcomp.ddp.register(sharded._dmp_wrapped_module, compression, optimizer)
        if begin:
            state = {"model": sharded.state_dict()}
            dcp.load(state, checkpoint_id=saved / str(begin))
            sharded.load_state_dict(state["model"])
            hvdcomp.dcp.load(compression, saved / str(begin))
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
            features = torchrec.KeyedJaggedTensor.from_lengths_sync(
                keys=["user", "item"],
                values=torch.randint(100, (16,), generator=generator),
                lengths=torch.ones(16, dtype=torch.int64),
            )
            optimizer.zero_grad()
            sharded(features).square().mean().backward()
            optimizer.step()
        state = {"model": sharded.state_dict(), "compression": hvdcomp.dcp.by_rank(compression)}
        dcp.save(state, checkpoint_id=saved / str(end))
        tables = [value for name, value in sharded.state_dict().items() if name.startswith("tables")]
        shards = [shard.tensor for table in tables for shard in table.local_shards()]
        rows = [table.ravel() for of_rank in gathered(shards) for table in of_rank]
        return torch.cat([weights(model.dense), *rows]), compression

    assert_resumes(train)


@thorough
def case_torchtitan_parallelizes_and_resumes_bit_for_bit() -> None:
    """In the order of its trainer, which itself needs an accelerator."""
    library("torchtitan")
    utils = import_module("torchtitan.tools.utils")
    utils.device_type = "cpu"  # before other modules take it
    config, llama3 = import_module("torchtitan.config"), import_module("torchtitan.models.llama3")
    attention = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    parallel_dims = import_module("torchtitan.distributed").ParallelDims(
        dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1,
        world_size=dist.get_world_size(), spmd_backend="partial_dtensor",
    )  # fmt: skip
    parallel_dims.build_mesh()
    saved = folder()

    def train(begin: int, end: int) -> tuple[torch.Tensor, hvdcomp.Compression]:
        small = llama3._debugmodel("varlen")
        small.layers = small.layers[:2]
        for layer in small.layers:
            layer.attention.inner_attention = attention.Config()  # others need a GPU
        with torch.device("meta"):
            model = small.build()
        model = llama3.parallelize_llama(
            model,
            parallel_dims=parallel_dims,
            training=config.TrainingConfig(mixed_precision_param="float32"),
            parallelism=config.ParallelismConfig(spmd_backend="partial_dtensor"),
            compile_config=config.CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device("cpu"))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot divide before the sum
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compression = hvdcomp.Compression(hvdcomp.Int4(), memory=hvdcomp.ErrorFeedback())
        hvdcomp.fsdp.register(model, compression, optimizer=optimizer)
        if begin:
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=saved / str(begin))
            model.load_state_dict(state["model"])
            hvdcomp.dcp.load(compression, saved / str(begin))
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
            tokens = torch.randint(2048, (2, 17), generator=generator)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
            (loss / (32 * dist.get_world_size())).backward()  # torchtitan divides by the tokens of all ranks
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": model.state_dict(), "compression": hvdcomp.dcp.by_rank(compression)}
        dcp.save(state, checkpoint_id=saved / str(end))
        return torch.cat([parameter.full_tensor().ravel() for parameter in model.parameters()]).detach(), compression

    with mock.patch.dict(os.environ, {"HVDCOMP_RANKS_PER_NODE": "1"}):
        assert_resumes(train)
