"""`MuonWithAdamW` against PyTorch's two optimizers. On real ranks: `cases_ddp`, `cases_horovod`, `cases_local_steps`.
In trainings: `test_train_muon`."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not hasattr(torch.optim, "Muon"):
    pytest.skip("this PyTorch has no Muon: 2.9 and later have", allow_module_level=True)

from torch import nn  # noqa: E402

from hvdcomp import ConfigurationError  # noqa: E402
from hvdcomp.torch import MuonWithAdamW, hidden_matrices  # noqa: E402

RATE, STEPS = 3e-3, 6
OF_MUON = {"weight_decay": 0.2, "momentum": 0.9, "ns_steps": 4, "adjust_lr_fn": "original"}
OF_ADAMW = {"betas": (0.8, 0.9), "weight_decay": 0.3, "lr": 2e-3}


class Language(nn.Module):
    """A layer of each kind; the last one is the head, and `tied` has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.tied = nn.Linear(8, 13, bias=False)
        self.tied.weight = self.embedding.weight
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.inner = nn.ModuleDict({"first": nn.Linear(12, 20), "second": nn.Linear(20, 12)})
        self.scale = nn.Parameter(torch.ones(1, 12))  # a matrix that belongs to no layer
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        x = x + self.mix(x.mT).mT + self.tied(x).mean(-1, keepdim=True)
        x, _ = self.lstm(x)
        x = x + self.attention(x, x, x)[0]
        x = x + self.inner["second"](self.inner["first"](x).relu()) * self.scale
        return self.head(self.norm(x))


HIDDEN = [
    "lstm.weight_ih_l0", "lstm.weight_hh_l0", "attention.in_proj_weight", "attention.out_proj.weight",
    "inner.first.weight", "inner.second.weight",
]  # fmt: skip


def built() -> Language:
    torch.manual_seed(3)
    return Language()


def loss_of(model: Any, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    tokens, classes = (torch.randint(most, (4, 7), generator=generator) for most in (13, 5))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), classes.flatten())


def train(model: Any, optimizers: list[Any], steps: range, schedulers: list[Any] | None = None) -> None:
    for step in steps:
        model.zero_grad()
        loss_of(model, step).backward()
        for one in [*optimizers, *(schedulers or [])]:
            one.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected), name


def two_of_pytorch(model: nn.Module, muon: dict[str, Any], adamw: dict[str, Any]) -> list[Any]:
    others = [parameter for name, parameter in model.named_parameters() if name not in HIDDEN]
    return [
        torch.optim.Muon([model.get_parameter(name) for name in HIDDEN], **muon),
        torch.optim.AdamW(others, **adamw),
    ]


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


@pytest.mark.parametrize(("muon", "adamw"), [({}, {}), (OF_MUON, OF_ADAMW), ({}, {"fused": True, "amsgrad": True})])
def test_the_weights_are_those_of_pytorchs_two_optimizers_bit_for_bit(
    muon: dict[str, Any], adamw: dict[str, Any]
) -> None:
    ours, theirs = built(), built()
    one = MuonWithAdamW(ours, RATE, muon=muon, adamw=adamw)
    defaults = {"lr": RATE, "adjust_lr_fn": "match_rms_adamw"}
    two = two_of_pytorch(theirs, {**defaults, **muon}, {"lr": RATE, **adamw})
    train(ours, [one], range(STEPS), [scheduled(one)])
    train(theirs, two, range(STEPS), [scheduled(each) for each in two])
    assert_same(ours, theirs)
    assert one.param_groups[0]["lr"] == two[0].param_groups[0]["lr"] < RATE / 10
    assert one.param_groups[1]["lr"] == two[1].param_groups[0]["lr"] < RATE / 10
    assert not torch.equal(ours.scale, built().scale)


def test_groups_of_ones_own_have_their_own_options() -> None:
    ours, theirs = built(), built()
    matrices = list(hidden_matrices(ours).values())
    vectors = [one for one in ours.parameters() if one.ndim < 2]
    others = [one for one in ours.parameters() if one.ndim >= 2 and all(one is not matrix for matrix in matrices)]
    one = MuonWithAdamW(
        [
            {"params": matrices[:2], "use_muon": True, "lr": 1e-3},
            {"params": others, "betas": (0.5, 0.6)},
            {"params": matrices[2:], "use_muon": True},
            {"params": vectors, "weight_decay": 0.0},
        ],
        RATE,
        muon={"momentum": 0.8},
        adamw={"weight_decay": 0.5},
    )
    hidden = list(hidden_matrices(theirs).values())
    vectors = [one for one in theirs.parameters() if one.ndim < 2]
    others = [one for one in theirs.parameters() if one.ndim >= 2 and all(one is not matrix for matrix in hidden)]
    two = [
        torch.optim.Muon(
            [{"params": hidden[:2], "lr": 1e-3}, {"params": hidden[2:]}],
            RATE,
            momentum=0.8,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": others, "betas": (0.5, 0.6)}, {"params": vectors, "weight_decay": 0.0}], RATE, weight_decay=0.5
        ),
    ]
    train(ours, [one], range(3))
    train(theirs, two, range(3))
    assert_same(ours, theirs)


def test_parameters_are_sorted_by_what_their_layers_are() -> None:
    model = built()
    assert list(hidden_matrices(model)) == HIDDEN
    assert list(hidden_matrices(nn.DataParallel(model))) == HIDDEN
    assert list(hidden_matrices(torch.compile(model))) == HIDDEN
    assert [*hidden_matrices(model, head=())] == [*HIDDEN, "head.weight"]
    assert [*hidden_matrices(model, head=[model.head, model.inner["second"]])] == HIDDEN[:-1]
    assert [*hidden_matrices(model, head=model.inner)] == [*HIDDEN[:-2], "head.weight"]
    optimizer = MuonWithAdamW(model, head=model.inner)
    by_muon, by_adamw = optimizer.param_groups
    assert (by_muon["param_names"], by_muon["use_muon"]) == ([*HIDDEN[:-2], "head.weight"], True)
    every = [name for name, _ in model.named_parameters()]
    assert by_adamw["param_names"] == [name for name in every if name not in by_muon["param_names"]]
    assert not by_adamw["use_muon"]
    assert len(MuonWithAdamW(nn.Linear(3, 4, bias=False), head=()).param_groups) == 1


def saved_and_loaded(model: Any, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any]:
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (model, optimizer, scheduler)], file)
    file.seek(0)
    again = built()
    parts = (again, other := MuonWithAdamW(again, RATE, muon=OF_MUON, adamw=OF_ADAMW), scheduled(other))
    for one, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        one.load_state_dict(state)
    return parts


WAYS: dict[str, Callable[..., Any]] = {
    "state_dict": saved_and_loaded,
    "copy": lambda *parts: copy.deepcopy(parts),
    "pickle": lambda *parts: pickle.loads(pickle.dumps(parts)),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_bit_for_bit_from_what_was_saved(way: str) -> None:
    results = []
    for stops in (False, True):
        model = built()
        parts = (model, optimizer := MuonWithAdamW(model, RATE, muon=OF_MUON, adamw=OF_ADAMW), scheduled(optimizer))
        train(parts[0], [parts[1]], range(3), [parts[2]])
        if stops:
            parts = WAYS[way](*parts)
            assert parts[0] is not model
        train(parts[0], [parts[1]], range(3, STEPS), [parts[2]])
        results.append(parts)
    (whole, _, _), (resumed, optimizer, _) = results
    assert_same(whole, resumed)
    new = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("new", new)]})  # with the defaults of the first optimizer
    assert optimizer.param_groups[-1]["betas"] == OF_ADAMW["betas"]


def test_a_group_may_be_added() -> None:
    model, begun = built(), built()
    first, second = model.inner["first"], model.inner["second"]
    optimizer = MuonWithAdamW([{"params": [first.weight], "use_muon": True}], RATE)
    optimizer.add_param_group({"params": [second.weight], "use_muon": True})
    optimizer.add_param_group({"params": second.bias})
    train(model, [optimizer], range(1))
    changed = {
        name
        for (name, found), before in zip(model.named_parameters(), begun.parameters(), strict=True)
        if not torch.equal(found, before)
    }
    assert changed == {"inner.first.weight", "inner.second.weight", "inner.second.bias"}
    assert [*optimizer.state[second.weight]] == ["momentum_buffer"]
    assert "exp_avg_sq" in optimizer.state[second.bias]
    assert optimizer.param_groups[2]["lr"] == RATE


def test_a_closure_gives_the_loss() -> None:
    model = built()
    optimizer = MuonWithAdamW(model, RATE)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    first, second = (optimizer.step(closure) for _ in range(2))
    assert 0 < second < first


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_skips_a_step_that_overflows_and_changes_no_other(fused: bool) -> None:
    ours, theirs = built(), built()
    one, other = (MuonWithAdamW(model, RATE, adamw={"fused": fused}) for model in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # a power of two, which changes no bit
    for step in range(4):
        ours.zero_grad()
        loss = scaler.scale(loss_of(ours, step))
        (loss * torch.inf if step == 1 else loss).backward()
        scaler.step(one)
        scaler.update()
        if step != 1:
            train(theirs, [other], range(step, step + 1))
    assert scaler.get_scale() == 2.0**9
    assert_same(ours, theirs)


def test_a_compiled_step() -> None:
    ours, theirs = built(), built()
    one, other = MuonWithAdamW(ours, RATE), MuonWithAdamW(theirs, RATE)
    compiled = torch.compile(one.step, backend="eager")
    for step in range(3):
        ours.zero_grad()
        loss_of(ours, step).backward()
        compiled()
    train(theirs, [other], range(3))
    assert_same(ours, theirs)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()

    def refused(make: Callable[[], Any], kind: type[Exception] = ConfigurationError) -> str:
        with pytest.raises(kind) as caught:
            make()
        return str(caught.value)

    nothing = refused(lambda: MuonWithAdamW(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))))
    assert "no hidden matrix in this Sequential" in nothing
    for params in (model.parameters(), model.named_parameters(), [{"params": model.parameters(), "use_muon": False}]):
        untold = refused(lambda params=params: MuonWithAdamW(params))
        assert "which parameters are hidden matrices; give it the model itself, or parameter groups" in untold
    vector = {"params": [model.head.weight, model.head.bias], "use_muon": True}
    assert "parameter 1 of its parameter group has the shape (5,), but Muon works only on matrices" in refused(
        lambda: MuonWithAdamW([vector])
    )
    kernel = {"params": [("mix.weight", model.mix.weight)], "use_muon": True}
    assert "mix.weight has the shape (8, 8, 3)" in refused(lambda: MuonWithAdamW([kernel]))
    optimizer = MuonWithAdamW(model)
    new = {"params": [("new", nn.Parameter(torch.zeros(3)))], "use_muon": True}
    assert "new has the shape (3,)" in refused(lambda: optimizer.add_param_group(new))
    for head in (built().head, "head"):
        assert "is not a layer of this Language; give the layer" in refused(
            lambda head=head: MuonWithAdamW(model, head=head)
        )
    assert "head= works only with a model" in refused(lambda: MuonWithAdamW([{"params": []}], head=model.head))
    assert "unexpected keyword argument 'beta'" in refused(lambda: MuonWithAdamW(model, adamw={"beta": 1}), TypeError)
    assert "momentum" in refused(lambda: MuonWithAdamW(model, muon={"momentum": -1}), ValueError)

    state = torch.optim.AdamW(model.parameters()).state_dict()
    others = refused(lambda: MuonWithAdamW(model).load_state_dict(state))
    assert "the state has parameter groups with use_muon=[False]" in others
    assert "this optimizer has parameter groups with use_muon=[True, False]" in others
    monkeypatch.delattr(torch.optim, "Muon")
    said = refused(lambda: MuonWithAdamW(model))
    assert f"needs PyTorch 2.9 or later, but this is PyTorch {torch.__version__}" in said
