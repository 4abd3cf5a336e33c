"""The options of `hvdcomp train`: what is chosen, what is refused, the learning rate over time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.tools.cli import main
from hvdcomp.tools.launch.promise import EXPECTED_SIZE, LAUNCHERS
from hvdcomp.tools.options import may_change
from hvdcomp.tools.train import beforehand, environment
from hvdcomp.tools.train.options import (
    CLICK_DATA,
    CLICK_MODELS,
    DATA,
    FAMILIES,
    FOLDER_DATA,
    IMAGE_DATA,
    IMAGE_MODELS,
    MODELS,
    SIGNAL_DATA,
    SIGNAL_MODELS,
    TEXT_DATA,
    TEXT_MODELS,
    SetupError,
    TrainingOptions,
)
from hvdcomp.tools.train.outputs import check_output, strict
from hvdcomp.tools.train.target import Target


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", DATA)
def test_every_model_has_defaults_for_the_data_that_suit_it(model: str, data: str) -> None:
    settings = TrainingOptions(model=model, data=data, data_dir=Path() if data in FOLDER_DATA else None)
    families = [(IMAGE_MODELS, IMAGE_DATA), (TEXT_MODELS, TEXT_DATA), (SIGNAL_MODELS, SIGNAL_DATA)]
    families += [(CLICK_MODELS, CLICK_DATA), (("mlp",), ("heavy-tails",)), (("encoder",), ("sorting",))]
    if any(model in models and data in suited for models, suited in families):
        options = settings.resolved().as_json()
        open_options = {key for key, value in options.items() if value is None}
        assert open_options <= {
            "data_dir", "memory", "policy", "bucket_bytes", "output", "samples",
            "checkpoint_folder", "checkpoint_every", "metrics_port", "timeout", "steps", "until", "evaluate_every",
            "simulate_ranks", "link", "freeze_after", "refreshes_per_gap", "outer_lr", "outer_momentum",
            "fsdp_weights", "shard_ranks",
        }  # fmt: skip
    else:
        with pytest.raises(SetupError, match=f"--model {model} does not work with --data {data}; choose"):
            settings.resolved()


def test_the_manual_says_which_data_suit_a_model_and_how_they_are_measured() -> None:
    page = (Path(__file__).parents[3] / "docs/commands.md").read_text()
    table = page.partition("| `--model` |")[2].partition("\n\n")[0].splitlines()[2:]
    said = set()
    for line in table:
        models, data, _, metric = (cell.strip() for cell in line.strip("|").split("|"))
        pairs = ((model, name) for model in re.findall("`(.+?)`", models) for name in re.findall("`(.+?)`", data))
        said |= {(*pair, metric.lower()) for pair in pairs}
    known = {
        (model, name, TrainingOptions(data=name).metric)
        for models, data in FAMILIES
        for model in models
        for name in data
    }
    assert said == known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "alexnet"}, "--model 'alexnet' is unknown; choose one of mlp, cnn"),
        ({"data": "mnist"}, "--data 'mnist' is unknown; choose one of digits"),
        ({"data": "cifar10"}, "--data cifar10 is read from a folder"),
        ({"model": "dlrm", "data": "criteo"}, "--data criteo is read from a folder"),
        ({"model": "dlrm", "data": "clicks", "table_rows": 1}, "--table-rows 1 must be from 2 to 16777216"),
        ({"data_dir": Path("x")}, "--data digits needs no --data-dir"),
        ({"overlap": "yes"}, "--overlap 'yes' is unknown; choose one of auto, on, off"),
        ({"residuals": "sum"}, "--residuals 'sum' is unknown; choose one of keep, drop"),
        ({"framework": "tensorflow", "overlap": "on"}, "--overlap on is not possible, because --framework ten"),
        ({"bucket_bytes": 0}, "--bucket-bytes 0 must be at least 1"),
        ({"framework": "tensorflow", "bucket_bytes": 5}, "--bucket-bytes 5 is not possible, because --framework"),
        ({"epochs": 0}, "--epochs 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"momentum": 1.0}, "--momentum 1.0"),
        ({"nesterov": True, "momentum": 0.0}, "--nesterov needs"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0"),
        ({"gamma": 0.0}, "--gamma 0.0"),
        ({"milestones": (4.0, 3.0)}, "--milestones 4,3 .* later"),
        ({"milestones": (3.0, 3.0)}, "--milestones 3,3 .* later"),
        ({"milestones": (3.0, 10.0)}, "--milestones 3,10 .* --epochs 10"),
        ({"milestones": (2.0,), "warm_up": 3.0}, "--warm-up 3.0 must end before"),
        ({"warm_up": -1.0}, "--warm-up -1.0"),
        ({"clip_norm": -1.0}, "--clip-norm -1.0"),
        ({"backward_passes_per_step": 0}, "--backward-passes-per-step 0"),
        ({"seed": -1}, "--seed -1"),
        ({"samples": 0}, "--samples 0"),
        ({"label_noise": 1.5}, "--label-noise 1.5"),
        (
            {"model": "lstm", "data": "stdlib-text", "label_noise": 0.5},
            "--label-noise needs labels, and --data stdlib-text has none",
        ),
        ({"model": "mlp", "data": "heavy-tails", "label_noise": 0.5}, "needs labels, and --data heavy-tails has none"),
        ({"model": "mlp", "data": "heavy-tails", "until": "accuracy=1"}, "of --data heavy-tails are loss, rmse"),
        ({"model": "encoder", "data": "sorting", "until": "perplexity=2"}, "of --data sorting are loss, accuracy"),
        (
            {"model": "mlp", "data": "sorting"},
            "choose one of digits, synthetic, shapes, cifar10, cifar100, heavy-tails",
        ),
        ({"data": "synthetic", "image_size": 2}, "--image-size 2"),
        ({"text_size": 10}, "--text-size 10"),
        ({"text_unit": "line"}, "--text-unit 'line'"),
        ({"sequence_length": 0}, "--sequence-length 0"),
        ({"metrics_port": 0}, "--metrics-port 0 must be from 1 to 65535"),
        ({"metrics_port": 65536}, "--metrics-port 65536 must be from 1 to 65535"),
        ({"metrics_address": ""}, "--metrics-address is empty; give an address of rank 0's host"),
        ({"tensorboard": True}, "--tensorboard needs --output"),
        ({"optimizer": "lamb"}, "--optimizer 'lamb' is unknown; choose one of sgd, adamw, compressed-adam"),
        ({"freeze_after": 5}, "--freeze-after 5 works only with --optimizer compressed-adam; leave --freeze-after out"),
        ({"optimizer": "compressed-adam", "freeze_after": 0}, "--freeze-after 0 must be at least 1"),
        ({"refreshes_per_gap": 16}, "--refreshes-per-gap 16 works only with --optimizer compressed-adam; leave"),
        ({"optimizer": "compressed-adam", "refreshes_per_gap": 0}, "--refreshes-per-gap 0 must be at least 1"),
        (
            {"optimizer": "compressed-adam", "refreshes_per_gap": 16, "local_steps": 2, "steps": 4},
            "--refreshes-per-gap 16 does not work with --local-steps 2",
        ),
        ({"local_steps": 0}, "--local-steps 0 must be at least 1"),
        ({"local_steps": "often", "steps": 4}, "--local-steps often must be a number, auto, or a rule such as auto:sh"),
        ({"local_steps": "auto"}, "--local-steps auto also needs --steps N: after step N, the ranks exchange"),
        (
            {"local_steps": "auto", "steps": 4, "optimizer": "compressed-adam"},
            "--local-steps auto does not work with --optimizer compressed-adam; give a number",
        ),
        ({"local_steps": 4, "fragments": 2}, "--local-steps 4 also needs --steps N: after step N"),
        ({"fragments": 2}, "--fragments 2 needs --local-steps N with a number above 1"),
        ({"local_steps": "auto", "steps": 4, "delay": 2}, "--delay 2 needs --local-steps N"),
        ({"local_steps": 4, "steps": 9, "fragments": 5}, "--fragments 5 must be from 1 to --local-steps 4"),
        ({"local_steps": 4, "steps": 9, "fragments": 2, "delay": 2}, "--delay 2 must be from 0 to 1 steps"),
        ({"local_steps": 4, "steps": 9, "local_share": 1.0}, "--local-share 1.0 must be at least 0 and less than 1"),
        ({"outer_lr": 0.5, "optimizer": "compressed-adam"}, "--outer-lr 0.5 does not work with compressed-adam"),
        ({"outer_lr": 0.5, "framework": "tensorflow"}, "--local-steps 1 works only with --framework torch"),
        ({"local_steps": 2, "steps": 4, "outer_momentum": 1.5}, "--outer-momentum 1.5 must be from 0 to 1"),
        ({"local_steps": 2}, "--local-steps 2 also needs --steps N, where N is a multiple of 2"),
        (
            {"optimizer": "compressed-adam", "local_steps": 2},
            "--local-steps 2 also needs --steps N, where N is a multiple of 2",
        ),
        (
            {"optimizer": "compressed-adam", "local_steps": 2, "steps": 4, "framework": "tensorflow"},
            "--local-steps 2 works only with --framework torch",
        ),
        (
            {
                **{"optimizer": "compressed-adam", "local_steps": 2, "steps": 4},
                **{"evaluate_every": 3, "validation_samples": 9},
            },
            "--evaluate-every 3 must be a multiple of 2",
        ),
        (
            {
                **{"optimizer": "compressed-adam", "local_steps": 2, "steps": 4, "evaluate_every": 2},
                **{"validation_samples": 9, "checkpoint_folder": Path("saved")},
            },
            "--local-steps 2 with compressed-adam cannot save checkpoints; leave out --checkpoint-folder saved",
        ),
        ({"optimizer": "adamw", "nesterov": True}, "--nesterov is a form of SGD's momentum"),
        ({"model": "vit", "framework": "tensorflow"}, "--model vit works only with --framework torch"),
        (
            {"optimizer": "muon", "framework": "tensorflow"},
            "--optimizer muon works only with --framework torch; use --optimizer adamw with --framework tensorflow",
        ),
        (
            {"optimizer": "muon", "model": "resnet20"},
            "--optimizer muon is for hidden matrices, and --model resnet20 has none; use --optimizer sgd or",
        ),
        ({"optimizer": "muon", "nesterov": True}, "leave --nesterov out with --optimizer muon"),
        ({"optimizer": "adamw", "momentum": 0.5}, "--momentum 0.5 is SGD's momentum; leave --momentum out with"),
        ({"optimizer": "sgd", "betas": (0.9, 0.99)}, "leave --betas out with --optimizer sgd"),
        ({"optimizer": "torch.optim.Adam", "betas": (0.9, 0.99)}, "leave --betas out with --optimizer torch.optim"),
        ({"optimizer": "muon", "freeze_after": 5}, "leave --freeze-after out with --optimizer muon"),
        ({"betas": (0.9,)}, "--betas 0.9 must be two numbers"),
        ({"betas": (0.9, 1.0)}, "--betas 0.9,1 must be two numbers"),
        ({"schedule": "linear"}, "--schedule 'linear' is unknown; choose one of step, cosine"),
        ({"schedule": "cosine", "milestones": (3.0,)}, "--milestones 3 work only with --schedule step"),
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"until": "accuracy=0.9"}, "--until accuracy=0.9 needs validation data, but --data digits has no"),
        ({"evaluate_every": 5}, "--evaluate-every 5 needs validation data, but --data digits has no"),
        ({"evaluate_every": 0, "validation_samples": 9}, "--evaluate-every 0 must be at least 1"),
        ({"model": "gpt", "data": "text", "validation_samples": 9}, "--data text has a validation part of its own"),
        ({"until": "accuracy", "validation_samples": 9}, "--until 'accuracy' is not a target; give one of accuracy"),
        ({"until": "perplexity=9", "validation_samples": 9}, "the metrics of --data digits are loss, accuracy"),
        ({"until": "accuracy=93", "validation_samples": 9}, "--until 'accuracy=93' cannot be reached"),
        ({"simulate_ranks": 0}, "--simulate-ranks 0 must be at least 1"),
        ({"link": "1gbit"}, "--link 1gbit needs simulated ranks; add --simulate-ranks"),
        ({"simulate_ranks": 2, "link": "1 gig"}, "--link '1 gig' is not a rate"),
        ({"simulate_ranks": 2, "link": "1gbit,"}, "--link '' is not a rate"),
        ({"simulate_ranks": 2, "link": "1gbit, 1gbit"}, "--link 1gbit, 1gbit contains a rate twice"),
        ({"simulate_ranks": 2, "backend": "ddp"}, "--backend 'ddp' is unknown; choose one of auto"),
        ({"simulate_ranks": 2, "checkpoint_folder": Path("x")}, "--simulate-ranks 2 cannot save checkpoints"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TrainingOptions(**options).resolved()  # type: ignore[arg-type]


def test_learning_rate_over_time() -> None:
    settings = TrainingOptions(lr=0.8, warm_up=2.0, milestones=(3.0, 5.0), gamma=0.5).resolved()
    rates = {0: 0.0, 0.5: 0.2, 1.5: 0.6, 2: 0.8, 2.99: 0.8, 3: 0.4, 4.9: 0.4, 5: 0.2, 9: 0.2}
    assert {done: pytest.approx(settings.learning_rate(done, 10)) for done in rates} == rates
    assert TrainingOptions(lr=0.8).resolved().learning_rate(0, 10) == 0.8


def test_a_cosine_falls_from_the_end_of_the_warm_up_to_the_end_of_the_run() -> None:
    settings = TrainingOptions(lr=0.8, warm_up=2.0, schedule="cosine", gamma=0.1).resolved()
    rates = {1: 0.4, 2: 0.8, 4: 0.44 + 0.36 * 2**-0.5, 6: 0.44, 10: 0.08, 11: 0.08}
    assert {done: pytest.approx(settings.learning_rate(done, 10)) for done in rates} == rates


def test_a_target_is_reached_from_its_side() -> None:
    quality = {"loss": 0.5, "accuracy": 0.9}
    reached = ("accuracy=0.9", "accuracy=0.8", "loss=0.5", "loss=1")
    assert all(Target.parse(text).is_reached(quality) for text in reached)
    assert not any(Target.parse(text).is_reached(quality) for text in ("accuracy=0.91", "loss=0.4"))


def test_only_compressed_adam_needs_equal_weights_at_the_ends_of_epochs() -> None:
    """It has no outer weights to be evaluated with, also where --evaluate-every names other steps than these."""
    common = {"model": "gpt", "data": "text", "local_steps": 4, "steps": 600}
    adam, outer = ({"optimizer": name, **common} for name in ("compressed-adam", "adamw"))
    evaluated = {"evaluate_every": 24}
    for options, steps, way in (
        (adam, 487, "an epoch of 487 steps .*; give --samples N, so that the steps of an epoch are a multiple of 4"),
        ({**adam, **evaluated}, 487, "give --samples N, so that the steps of an epoch are a multiple of 4"),
        (outer, 487, "give --evaluate-every N, a multiple of 4"),
    ):
        with pytest.raises(SetupError, match=f"--local-steps 4: .*{way}"):
            TrainingOptions(**options).resolved().for_steps(steps)
    for options, steps in (({**outer, **evaluated}, 487), ({**adam, **evaluated}, 488), (adam, 601)):
        TrainingOptions(**options).resolved().for_steps(steps)


def test_the_second_moment_is_not_frozen_before_the_warm_up_ends() -> None:
    common = {"model": "gpt", "data": "text", "optimizer": "compressed-adam", "steps": 600}
    for warm_up, expected in ((0.0, 90), (0.1, 90), (0.25, 122)):
        assert TrainingOptions(**common, warm_up=warm_up).resolved().for_steps(487).freeze_after == expected
    assert TrainingOptions(**common, warm_up=0.25, freeze_after=60).resolved().for_steps(487).freeze_after == 60


def test_milestones_may_lie_beyond_epochs_that_are_not_trained() -> None:
    milestones = (12.0, 16.0)
    with pytest.raises(SetupError, match="--milestones 12,16 must all be before the end of the run, --epochs 10"):
        TrainingOptions(milestones=milestones).resolved()
    assert TrainingOptions(milestones=milestones, steps=5000).resolved().milestones == milestones


def test_what_is_given_is_kept() -> None:
    settings = TrainingOptions(
        batch_size=3, optimizer="sgd", lr=0.5, weight_decay=0.0, clip_norm=0.0, text_size=10_000, sequence_length=7
    )
    assert settings.resolved() == settings


def test_output_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "deep", overwrite=False)
    assert not (tmp_path / "new").exists()
    (tmp_path / "steps.jsonl").touch()
    with pytest.raises(SetupError, match=r"already contains a run \(steps.jsonl\).*--overwrite"):
        check_output(tmp_path, overwrite=False)
    check_output(tmp_path, overwrite=True)
    with pytest.raises(SetupError, match="is a file"):
        check_output(tmp_path / "steps.jsonl", overwrite=True)


def test_json_holds_finite_numbers_only() -> None:
    record = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (-float("inf"), 2)}, "e": "nan", "f": True}
    assert strict(record) == {"a": None, "b": [1.5, None], "c": {"d": [None, 2]}, "e": "nan", "f": True}


@pytest.mark.parametrize("variable", ["HOROVOD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_separate_runs_of_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in (*LAUNCHERS, EXPECTED_SIZE):
        monkeypatch.delenv(name, raising=False)
    environment.check_world_size(1)
    monkeypatch.setenv(variable, "4")
    environment.check_world_size(4)
    with pytest.raises(SetupError, match=f"{variable}=4, but the training found 1 rank"):
        environment.check_world_size(1)


def test_help_needs_no_framework_and_names_every_option() -> None:
    shown = CliRunner().invoke(main, ["train", "--help"]).output
    for name in TrainingOptions().as_json():
        assert f"--{name.replace('_', '-')}" in shown


def test_milestones_that_are_no_numbers() -> None:
    result = CliRunner().invoke(main, ["train", "--milestones", "3,x"])
    assert result.exit_code == 2
    assert "'3,x' is not a list of epochs, such as 3,4" in result.output


def test_a_checkpoint_is_of_the_options_by_which_it_was_made() -> None:
    """Any other option may change when a run goes on. A new one among these would refuse all earlier checkpoints."""
    assert set(TrainingOptions().as_json()) - may_change(TrainingOptions) == {
        "backend", "backward_passes_per_step", "batch_size", "betas", "checkpoint_folder", "clip_norm", "compression",
        "data", "data_dir", "delay", "fragments", "framework", "freeze_after", "freeze_compression", "fsdp",
        "fsdp_weights", "gamma",
        "image_size", "label_noise", "local_share", "local_steps", "lr", "memory", "milestones", "model",
        "momentum", "nesterov", "optimizer", "outer_lr", "outer_momentum", "output", "policy",
        "refreshes_per_gap", "samples", "schedule", "seed",
        "sequence_length", "shard_compression", "shard_ranks", "small_tensors",
        "table_rows", "text_size", "text_unit", "validation_samples", "warm_up", "weight_decay",
    }  # fmt: skip


_REFUSED = """
import json, sys
from click.testing import CliRunner
from hvdcomp.tools.cli import main

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2, done.output
    print(done.output.splitlines()[-1])
for name in ("torch", "tensorflow", "horovod"):
    assert name not in sys.modules, name
"""


def test_what_is_wrong_is_said_before_a_framework_is_imported(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").touch()
    missing = str(tmp_path / "missing" / "file.json")
    refused = {
        "unknown compressor 'zip'": ["train", "--compression", "zip"],
        "unknown memory 'diary'": ["train", "--memory", "diary"],
        "'accordion' does not set low, high": ["train", "--compression", "topk:ratio=0.1", "--policy", "accordion"],
        "cannot be used: nope.json cannot be read": ["train", "--policy", "auto:calibration=nope.json"],
        "overlap=True does not work with the memory": [
            *("train", "--compression", "topk:ratio=0.01", "--overlap", "on", "--memory", "momentum_correction:clip=1"),
        ],
        "--output": ["train", "--output", str(tmp_path)],
        "--elastic needs --checkpoint-folder": ["train", "--elastic"],
        "--model lstm does not work with --data digits": ["train", "--model", "lstm"],
        "--backend ddp works only with PyTorch": ["train", "--framework", "tensorflow", "--backend", "ddp"],
        "unknown compressor 'zap'": ["calibrate", "--compressor", "zap"],
        f"--output {missing} cannot be written": ["calibrate", "--output", missing],
    }
    mine = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    words = [sys.executable, "-c", _REFUSED, json.dumps(list(refused.values()))]
    done = subprocess.run(words, capture_output=True, text=True, env=mine, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert all(message in line for message, line in zip(refused, said, strict=True)), said


@pytest.mark.parametrize(
    ("variables", "early"),
    [
        ({}, True),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, True),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0", "HOROVOD_ELASTIC": "1"}, False),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, False),
    ],
)
def test_a_file_is_refused_early_where_the_launcher_then_ends_all_ranks(
    variables: dict[str, str], early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*LAUNCHERS, "HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "steps.jsonl").touch()
    for options, words in (
        (TrainingOptions(output=tmp_path), "already contains a run"),
        (TrainingOptions(policy="auto:calibration=nope.json"), "nope.json cannot be read"),
    ):
        with pytest.raises((SetupError, ConfigurationError), match=words) if early else nullcontext():
            beforehand.check(options)
    beforehand.check(TrainingOptions(output=tmp_path, checkpoint_folder=tmp_path))  # the checkpoint says more
    beforehand.check(TrainingOptions(policy="increase_batch_size:low=32,high=64", milestones=(1.0,)))  # nor do data
    with pytest.raises(SpecError, match="unknown compressor"):
        beforehand.check(TrainingOptions(compression="zip"))


def test_rank_0_speaks_first_and_another_if_nothing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(beforehand.time, "sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        done = CliRunner().invoke(main, ["train", "--compression", "zip"])
        assert (done.exit_code, "unknown compressor 'zip'" in done.output, len(waited)) == (2, True, int(rank))
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    done = CliRunner().invoke(main, ["train", "--compression", "zip"])
    assert (done.exit_code, done.output, len(waited)) == (2, "", 1)
