"""The compressors and the memories, by name. Each class in this folder that has a `name` is listed automatically."""

from __future__ import annotations

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import BUCKET_BYTES, LEAST_BYTES, least_early_bytes
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.evidence import FIRST, OPTIMIZERS, RECOMMENDED, first_to_try, lost_with, steps_in_words
from hvdcomp.compressors.evidence import in_words as evidence_in_words
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.compressors.routing import Router, with_small
from hvdcomp.compressors.two_level import TwoLevel, needs_nodes
from hvdcomp.specs.registry import classes_by_name

COMPRESSORS: dict[str, type[Compressor]] = {}
MEMORIES: dict[str, type[Memory]] = {}
# Both dictionaries must exist before `classes_by_name` searches this folder, because the module `parsing` in this
# folder imports them. So they are created empty above and filled here. Routers and `TwoLevel` are not included, because
# they have their own notation in specs.
COMPRESSORS.update(
    {
        name: kind
        for name, kind in classes_by_name(__name__, Compressor).items()
        if not issubclass(kind, Router | TwoLevel)
    }
)
MEMORIES.update(classes_by_name(__name__, Memory))

# The example specs of all compressors.
EXAMPLES: tuple[str, ...] = tuple(spec for kind in COMPRESSORS.values() for spec in kind.examples)

__all__ = [
    "BUCKET_BYTES",
    "COMPRESSORS",
    "EXAMPLES",
    "FIRST",
    "LEAST_BYTES",
    "MEMORIES",
    "OPTIMIZERS",
    "RECOMMENDED",
    "Compressor",
    "NoCompression",
    "TensorInfo",
    "evidence_in_words",
    "first_to_try",
    "least_early_bytes",
    "lost_with",
    "needs_nodes",
    "steps_in_words",
    "with_small",
]
