"""Routers: which compressor a tensor gets, their spec strings, their levels, and mixtures in the engine."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import (
    ATOMO,
    FP16,
    ByDimensions,
    ByName,
    BySize,
    Compression,
    Compressor,
    ErrorFeedback,
    NoCompression,
    NoMemory,
    PowerSGD,
    RandomK,
    SpecError,
    TopK,
)
from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.routing import require_matches
from tests.harness import BACKENDS, as_numpy, assert_same_on_all_ranks, bits, infos, make, run_engines

EXAMPLE = ByName({"embed.*": TopK(0.001), "*.bias": NoCompression(), "*": PowerSGD(4)})
LARGE = (64, 64)


def routed(router: Compressor, name: str = "w", shape: tuple[int, ...] = LARGE) -> Compressor:
    return router.route(TensorInfo(name, shape))


# Choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("embed.weight", TopK(0.001)),
        ("embed.bias", TopK(0.001)),  # the first match wins
        ("layer.0.bias", NoCompression()),
        ("layer.0.weight", PowerSGD(4)),
        ("bias", PowerSGD(4)),
        ("Embed.weight", PowerSGD(4)),  # case matters
        ("my.embed.weight", PowerSGD(4)),  # the whole name must match
    ],
)
def test_the_first_pattern_that_matches_decides(name: str, chosen: Compressor) -> None:
    assert routed(EXAMPLE, name) == chosen


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("layer.?.weight", ["layer.1.weight"], ["layer.10.weight", "layer..weight"]),
        ("layer.[02].*", ["layer.0.weight", "layer.2.b"], ["layer.1.weight"]),
        ("layer.[!0]*", ["layer.1.weight"], ["layer.0.weight"]),
        ("*kernel*", ["dense/kernel:0", "kernel"], ["dense/bias:0"]),
        ("a", ["a"], ["ab", "ba", "A"]),
    ],
)
def test_patterns_are_those_of_fnmatch(pattern: str, matching: list[str], others: list[str]) -> None:
    router = ByName({pattern: TopK(0.5), "*": FP16()})
    assert [routed(router, name) for name in matching] == [TopK(0.5)] * len(matching)
    assert [routed(router, name) for name in others] == [FP16()] * len(others)


@pytest.mark.parametrize(
    ("shape", "chosen"), [((99,), FP16()), ((100,), TopK(0.1)), ((10, 10), TopK(0.1)), ((3, 33), FP16()), ((), FP16())]
)
def test_by_size(shape: tuple[int, ...], chosen: Compressor) -> None:
    assert routed(BySize(100, small=FP16(), large=TopK(0.1)), shape=shape) == chosen


@pytest.mark.parametrize(
    ("shape", "chosen"), [((), FP16()), ((5000,), FP16()), ((1, 1), TopK(0.1)), ((8, 8, 3, 3), TopK(0.1))]
)
def test_by_dimensions(shape: tuple[int, ...], chosen: Compressor) -> None:
    assert routed(ByDimensions(2, fewer=FP16(), others=TopK(0.1)), shape=shape) == chosen


def test_routers_nest_and_a_compressor_still_decides_for_itself() -> None:
    router = BySize(
        100, small=NoCompression(), large=ByName({"conv*": ByDimensions(3, TopK(0.1), PowerSGD(8)), "*": ATOMO(2)})
    )
    assert routed(router, "conv1", (2, 2)) == NoCompression()
    assert routed(router, "conv1", (64, 64)) == TopK(0.1)
    assert routed(router, "conv1", (64, 8, 3, 3)) == PowerSGD(8)
    assert routed(router, "conv1", (200, 1, 1)) == NoCompression()  # PowerSGD would send more than it is
    assert routed(router, "fc", (64, 64)) == ATOMO(2)


NAMES = ("embed.weight", "blocks.0.attn.weight", "blocks.0.attn.bias", "head.weight")


@pytest.mark.parametrize(
    "spec",
    [
        "topk:ratio=0.1",
        '{"embed.*": "none", "blocks.?.attn.*": "topk:ratio=0.1", "*": "none"}',
        '{"*": "none"}',
        '{"embed*": "none", "blocks*": "none", "head*": "none", "*": "topk:ratio=0.1"}',  # nothing is left for "*"
        '{"blocks.*": "none", "*.attn.bias": "topk:ratio=0.1", "*": "none"}',  # earlier rules take all of a pattern's
        '{"numel<100000": "none", "*": {"head.*": "topk:ratio=0.1", "*": "none"}}',  # or conditions do
        '{"ndim<2": "none", "embed.*": "topk:ratio=0.1", "*": "none"}',
        'two_level({"blocks.*": "topk:ratio=0.1", "*": "none"})',
    ],
)
def test_patterns_that_match_some_name_are_right(spec: str) -> None:
    require_matches(parse_compressor(spec), NAMES)


@pytest.mark.parametrize(
    "spec",
    [
        '{"transformer.blocks.*": "topk:ratio=0.1", "*": "none"}',
        '{"*": {"numel<10": "none", "transformer.blocks.*": "topk:ratio=0.1", "*": "none"}}',
        '{"ndim<2": "none", "transformer.blocks.*": "topk:ratio=0.1", "*": "none"}',
        'two_level({"embed.*": "none", "transformer.blocks.*": "topk:ratio=0.1", "*": "none"})',
    ],
)
def test_a_pattern_that_matches_no_name_is_refused_with_the_nearest(spec: str) -> None:
    with pytest.raises(SpecError) as caught:
        require_matches(parse_compressor(spec), NAMES)
    message = str(caught.value)
    nearest = "'transformer.blocks.*' (the nearest names are 'blocks.0.attn.bias', 'blocks.0.attn.weight', "
    assert message.startswith(f"none of the 4 tensors has a name that matches {nearest}")
    assert "embed.*" not in message


def test_of_many_wrong_patterns_some_are_told() -> None:
    rules = {f"layer{number}.*": NoCompression() for number in range(40)}
    with pytest.raises(SpecError, match=r"'layer2\.\*' \(the nearest names are [^)]*\) and 37 more\. A pattern must"):
        require_matches(ByName({**rules, "*": TopK(0.1)}), NAMES)


# Descriptions ------------------------------------------------------------------------------------------------------


def test_routers_are_frozen_hashable_values() -> None:
    same = ByName([("embed.*", TopK(0.001)), ("*.bias", NoCompression()), ("*", PowerSGD(4))])
    assert same == EXAMPLE
    assert hash(same) == hash(EXAMPLE)
    assert pickle.loads(pickle.dumps(EXAMPLE)) == EXAMPLE
    assert ByName({"*.bias": NoCompression(), "embed.*": TopK(0.001), "*": PowerSGD(4)}) != EXAMPLE  # order counts
    assert len({BySize(10, FP16(), TopK(0.1)), BySize(10, FP16(), TopK(0.1)), ByDimensions(10, FP16(), TopK(0.1))}) == 2
    with pytest.raises(FrozenInstanceError):
        EXAMPLE.patterns = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make_router", "named"),
    [
        (lambda: ByName({}), "no pattern was given"),
        (lambda: ByName({"": FP16()}), "''"),
        (lambda: ByName({3: FP16()}), "3"),
        (lambda: ByName({"a*": "topk:ratio=0.1"}), "'topk:ratio=0.1' for 'a\\*'"),
        (lambda: ByName({"*": FP16(), "a": TopK(0.1)}), "'a' comes after '\\*'"),
        (lambda: ByName([("a", FP16()), ("a", TopK(0.1))]), "'a' is given twice"),
        (lambda: ByName({" numel < 10": FP16()}), "' numel < 10' is a condition"),
        (lambda: BySize(0, FP16(), FP16()), "threshold=0"),
        (lambda: BySize(1.5, FP16(), FP16()), "threshold=1.5"),
        (lambda: BySize(10, None, FP16()), "None for 'small'"),
        (lambda: BySize(10, FP16(), TopK), "for 'large'"),
        (lambda: ByDimensions(True, FP16(), FP16()), "threshold=True"),
        (lambda: ByDimensions(2, "none", FP16()), "for 'fewer'"),
        (lambda: ByDimensions(2, FP16(), "none"), "for 'others'"),
    ],
)
def test_bad_descriptions_are_refused(make_router: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        make_router()


def test_a_router_is_not_asked_what_only_a_tensors_compressor_knows() -> None:
    for ask in (
        lambda: EXAMPLE.payload_bytes(LARGE),
        lambda: EXAMPLE.payload_floats(LARGE),
        lambda: EXAMPLE.level_for(10, LARGE),
        lambda: EXAMPLE.level_for_elements(10, LARGE),
        lambda: EXAMPLE.aggregate(numpy_arrays, np.zeros(3), (), Context("w", 0, 0, 0, 1)),
    ):
        with pytest.raises(TypeError, match="route"):
            ask()


def test_bias_is_that_of_any() -> None:
    assert EXAMPLE.biased
    assert not BySize(10, FP16(), ATOMO(2)).biased
    assert not ByName({"*": RandomK(0.1, unbiased=True)}).biased
    assert ByName({"*": BySize(10, FP16(), RandomK(0.1))}).biased


# Specs -------------------------------------------------------------------------------------------------------------

LEAVES = st.sampled_from([NoCompression(), FP16(), TopK(0.01), RandomK(0.5, unbiased=True), PowerSGD(2), ATOMO(3)])
PATTERNS = st.lists(st.text(min_size=1, max_size=5).filter(lambda text: text != "*"), max_size=3, unique=True)


def routers(choices: st.SearchStrategy[Compressor]) -> st.SearchStrategy[Compressor]:
    def by_name(patterns: list[str]) -> st.SearchStrategy[Compressor]:
        names = [*patterns, "*"] if len(patterns) != 2 else patterns
        return st.lists(choices, min_size=len(names), max_size=len(names)).map(
            lambda chosen: ByName(zip(names, chosen, strict=True))
        )

    thresholds = st.integers(1, 10**12)
    return st.one_of(
        PATTERNS.flatmap(by_name),
        st.builds(BySize, thresholds, choices, choices),
        st.builds(ByDimensions, thresholds, choices, choices),
    )


@given(st.recursive(LEAVES, routers, max_leaves=8))
def test_specs_round_trip(compressor: Compressor) -> None:
    assert parse_compressor(str(compressor)) == compressor


def test_spec_as_documented() -> None:
    spec = '{"embed.*": "topk:ratio=0.001", "*.bias": "none", "*": "powersgd:rank=4"}'
    assert parse_compressor(spec) == EXAMPLE
    assert str(EXAMPLE) == spec
    assert Compression.from_spec(spec, named_parameters=[]).settings.compressor == EXAMPLE


@pytest.mark.parametrize(
    ("spec", "router"),
    [
        ('{"numel<10000": "none", "*": "topk:ratio=0.1"}', BySize(10000, NoCompression(), TopK(0.1))),
        (' { "ndim < 2" : "fp16", "*": "topk:ratio=0.1"}', ByDimensions(2, FP16(), TopK(0.1))),
        (
            '{"embed*": "fp16", "numel<99": "none", "ndim<3": "powersgd:rank=4", '
            '"a": "topk:ratio=0.1", "*": "atomo:rank=2"}',
            ByName(
                {
                    "embed*": FP16(),
                    "*": BySize(
                        99, NoCompression(), ByDimensions(3, PowerSGD(4), ByName({"a": TopK(0.1), "*": ATOMO(2)}))
                    ),
                }
            ),
        ),
        (
            '{"a": {"numel<5": "none", "*": "fp16"}, "*": "none"}',
            ByName({"a": BySize(5, NoCompression(), FP16()), "*": NoCompression()}),
        ),
        ('{"only.this": "fp16"}', ByName({"only.this": FP16()})),
    ],
)
def test_rules_of_a_spec_are_tried_in_order(spec: str, router: Compressor) -> None:
    assert parse_compressor(spec) == router


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ('{"a": "fp16"', "is not a JSON object"),
        ("{a: fp16}", "is not a JSON object"),
        ('{"fp16"}', r'is not a JSON object.*; write a compressor for each pattern of names, such as \{"embed'),
        ('["fp16"]', "is not a JSON object; write a compressor for each pattern"),
        ('"fp16"', "is not a JSON object.*, or write one compressor without brackets and quotes"),
        ("{}", "no pattern was given"),
        ('{"a": 3}', "3 is neither"),
        ('{"a": ["fp16"]}', "neither"),
        ('{"a": null}', "None is neither"),
        ('{"a": "topq"}', "unknown compressor 'topq'"),
        ('{"a": {"b": "topk"}}', "does not set ratio"),
        ('{"a": "fp16", "a": "none"}', "'a' is given twice"),
        ('{"*": "fp16", "a": "none"}', "'a' comes after"),
        ('{"*": "fp16", "numel<5": "none", "*": "fp16"}', "comes after"),
        ('{"numel<5": "none"}', "no rule follows 'numel<5'"),
        ('{"numel<0": "none", "*": "fp16"}', "threshold=0"),
    ],
)
def test_bad_specs_are_refused(spec: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        parse_compressor(spec)


@pytest.mark.parametrize("names", [["0.0", "0.1"], ["allreduce.noname.0", "allreduce.noname.1"]])
def test_a_router_of_names_says_where_nobody_has_named_the_tensors(names: list[str]) -> None:
    router = parse_compressor('{"embed.*": "topk:ratio=0.1", "*": "none"}')
    with pytest.raises(SpecError, match=r"have only numbers as names \(such as .*=model.named_parameters"):
        require_matches(router, names)
    with pytest.raises(SpecError, match=r"nearest names are '0\.weight'"):
        require_matches(router, ["0.weight", "1.weight"])


# Levels ------------------------------------------------------------------------------------------------------------


def test_a_level_is_set_in_all_that_have_one() -> None:
    router = ByName({"a": NoCompression(), "b": BySize(9, FP16(), TopK(0.5)), "*": RandomK(0.5, unbiased=True)})
    assert router.level_name == "ratio"
    assert router.level == 0.5
    lower = ByName({"a": NoCompression(), "b": BySize(9, FP16(), TopK(0.1)), "*": RandomK(0.1, unbiased=True)})
    assert router.at_level(0.1) == lower
    assert router.at_level(None) is router
    assert ByName({"a": TopK(0.5), "*": TopK(0.1)}).level is None
    assert ByName({"a": TopK(0.5), "*": TopK(0.1)}).at_level(0.2) == ByName({"a": TopK(0.2), "*": TopK(0.2)})
    with pytest.raises(SpecError, match="ratio=7"):
        router.at_level(7)


@pytest.mark.parametrize(
    "router",
    [
        EXAMPLE,  # ratio and rank
        ByName({"*": BySize(9, TopK(0.5), PowerSGD(2))}),
        BySize(9, FP16(), NoCompression()),
    ],
)
def test_without_a_common_level_none_can_be_set(router: Compressor) -> None:
    assert router.level_name is None
    assert router.level is None
    with pytest.raises(SpecError, match="level 2 cannot be set"):
        router.at_level(2)
    compression = Compression(router, named_parameters=[])
    with pytest.raises(SpecError, match="level 2 cannot be set"):
        compression.set_level(2)
    assert compression.level is None


def test_the_engine_sets_the_level_of_each_tensor() -> None:
    router = ByName({"a": FP16(), "*": PowerSGD(4)})
    shapes = {"a": LARGE, "b": LARGE, "c": (64, 64, 2)}

    def before(engine: Any, step: int) -> None:
        if step == 1:
            engine.set_level(2)

    gradients = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    runs = run_engines(2, infos(shapes), router, lambda rank, step: gradients, 2, before=before)
    assert dict(runs[0].engine.plan) == {"a": FP16(), "b": PowerSGD(2), "c": PowerSGD(2)}


# Mixtures in the engine ----------------------------------------------------------------------------------------------

MIXTURE = ByName(
    {
        "dense.*": NoCompression(),
        "half.*": FP16(),
        "top.*": TopK(0.1),
        "unbiased.*": RandomK(0.1, unbiased=True),
        "atomo.*": ATOMO(2),
        "*": PowerSGD(2),
    }
)
KINDS = ("dense", "half", "top", "unbiased", "atomo", "power")
MIXED = {f"{kind}.{number}": (12, 10 + number) for kind in KINDS for number in (1, 2)}


def mixed_gradients(backend: str, names: list[str] | None = None) -> Any:
    def gradients(rank: int, step: int) -> dict[str, Any]:
        return {
            name: make(backend, np.random.default_rng([rank, step, place]).standard_normal(shape))
            for place, (name, shape) in enumerate(MIXED.items())
            if names is None or name in names
        }

    return gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_mixture_gives_each_tensor_what_its_compressor_alone_would(backend: str, ranks: int) -> None:
    runs = run_engines(ranks, infos(MIXED), MIXTURE, mixed_gradients(backend), 3)
    assert_same_on_all_ranks(runs)
    for name, shape in MIXED.items():
        compressor = routed(MIXTURE, name, shape)
        alone = run_engines(ranks, infos({name: shape}), compressor, mixed_gradients(backend, [name]), 3)
        for rank in range(ranks):
            for step in range(3):
                assert bits(runs[rank].results[step][name]) == bits(alone[rank].results[step][name])
            mine, theirs = runs[rank].engine.states[name], alone[rank].engine.states[name]
            assert [bits(x) for x in mine.memory] == [bits(x) for x in theirs.memory]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mixture_takes_one_set_of_collectives_a_round(backend: str) -> None:
    """Twelve tensors of six kinds: in the first round one allreduce for each element type and one allgather, in the
    second the other factor of PowerSGD."""
    runs = run_engines(2, infos(MIXED), MIXTURE, mixed_gradients(backend), 3)
    for run in runs:
        started = run.engine.communicator.started
        assert len(started) == 3 * 4
        for step in range(3):
            kinds = [(kind, dtype) for kind, dtype, _, _ in started[4 * step : 4 * step + 4]]
            assert sorted(kinds[:3]) == [
                ("allgather", "uint8"),
                ("allreduce mean", "float16"),
                ("allreduce mean", "float32"),
            ]
            assert kinds[3] == ("allreduce mean", "float32")
        assert [entry[2] for entry in started[:4]] == [entry[2] for entry in started[4:8]]  # names without a step


def test_memory_is_that_of_each_compressor() -> None:
    (run,) = run_engines(1, infos(MIXED), MIXTURE, mixed_gradients("numpy"), 2)
    kept = {name for name, state in run.engine.states.items() if state.memory}
    assert kept == {name for name in MIXED if name.startswith(("top", "power"))}
    for name, compressor in run.engine.plan.items():
        expected = ErrorFeedback() if name in kept else NoMemory()
        assert run.engine.planner.memory_for(compressor) == expected
    assert run.engine.ledger.tensors["top.1"].bytes_sent == 2 * TopK(0.1).payload_bytes(MIXED["top.1"])
    np.testing.assert_array_equal(run.results[0]["dense.1"], mixed_gradients("numpy")(0, 0)["dense.1"])
    assert as_numpy(run.results[0]["top.1"]).astype(bool).sum() == 14  # ceil(0.1 * 12 * 11)


def test_an_unmatched_tensor_stops_every_rank_before_any_exchange() -> None:
    router = ByName({"embed.*": TopK(0.001), "*.bias": NoCompression()})
    with pytest.raises(SpecError, match=r"'layer.weight' of shape \(64, 64\).*embed\.\*, \*\.bias.*'\*' at the end"):
        run_engines(2, infos({"embed.w": LARGE, "layer.weight": LARGE}), router, lambda rank, step: {})


def test_small_tensors_stay_dense_unless_the_limits_are_lifted() -> None:
    router = ByName({"*.bias": RandomK(0.5), "*": TopK(0.1)})
    shapes = {"fc.bias": (50,), "fc.weight": (64, 50)}
    gradients = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    limits: list[tuple[dict[str, int], Compressor]] = [
        ({"min_numel": 1024, "min_ndim": 2}, NoCompression()),
        ({}, RandomK(0.5)),
    ]
    for options, bias in limits:
        (run,) = run_engines(1, infos(shapes), router, lambda rank, step: gradients, **options)  # type: ignore[arg-type]
        assert dict(run.engine.plan) == {"fc.bias": bias, "fc.weight": TopK(0.1)}


def test_descriptions_are_json_for_comparing_ranks() -> None:
    facts = Compression(EXAMPLE, named_parameters=[]).settings.describe()
    assert json.loads(json.loads(json.dumps(facts))["compressor"])["*"] == "powersgd:rank=4"
