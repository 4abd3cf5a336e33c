"""Names of PyTorch's parameters."""

from __future__ import annotations

import re

import pytest

import hvdcomp
from hvdcomp import ConfigurationError
from hvdcomp.bindings.setup import require_compression
from hvdcomp.torch.parameters import plain_names, unique, with_plain_names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["head.weight", "bias"], ["head.weight", "bias"]),
        (["_orig_mod.head.weight", "_orig_mod.bias"], ["head.weight", "bias"]),
        (["0._checkpoint_wrapped_module.weight", "1._fsdp_wrapped_module.bias"], ["0.weight", "1.bias"]),
        (["_orig_mod.module.a._checkpoint_wrapped_module._orig_mod.w", "_orig_mod.module.b"], ["a.w", "b"]),
        (["module.module.a", "module.module.b"], ["a", "b"]),
        # A part of the user's own, which may be called so.
        (["module.weight", "weight"], ["module.weight", "weight"]),
        (["encoder.module.weight"], ["encoder.module.weight"]),
        (["my_orig_mod.weight", "module_0.weight"], ["my_orig_mod.weight", "module_0.weight"]),
        ([], []),
    ],
)
def test_what_wrappers_put_into_names_is_taken_off(names: list[str], expected: list[str]) -> None:
    assert plain_names(names) == expected


def test_parameters_are_known_by_these_names() -> None:
    assert unique([("_orig_mod.a", 1), ("_orig_mod.b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ConfigurationError, match="given twice: a"):
        unique([("a", 1), ("_orig_mod.a", 2)])


def test_a_state_with_names_of_a_wrapper_is_read() -> None:
    def state(prefix: str) -> dict[str, object]:
        name = f"{prefix}a.weight"
        shared = {"format": 2, "tensors": {name: [2, 3]}, "warm_starts": {name: {"method": "powersgd"}}, "step": 3}
        shared["coordinator"] = {"policy": "adaqs", "state": {"levels": [[name, 4]]}}
        return {"shared": shared, "own": {"residuals": {name: {"memory": "dgc", "arrays": [1.5]}}}}

    assert with_plain_names(state("_orig_mod.")) == state("") == with_plain_names(state("module."))
    plain = state("")
    assert with_plain_names(plain) is plain


def test_a_compression_in_the_place_of_named_parameters_is_refused() -> None:
    """Horovod makes a list of its second argument."""
    with pytest.raises(ConfigurationError, match=r"Pass it by name: .*compression=compression\)"):
        list(hvdcomp.Compression(hvdcomp.FP16()))


@pytest.mark.parametrize(("given", "said"), [("fp16", "'fp16'"), (hvdcomp.FP16(), "FP16("), (print, "<built-in f")])
def test_what_is_no_compression_is_refused_in_one_line(given: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match="was given " + re.escape(said)) as caught:
        require_compression(given, "register")
    assert "hvdcomp.Compression.from_spec(" in str(caught.value)
