"""The compressors, by name. A new one is a class in a family's file, with its examples, and a line in `COMPRESSORS`."""

from __future__ import annotations

from hvdcomp.compressors.atomo import ATOMO
from hvdcomp.compressors.base import Compressor, Level
from hvdcomp.compressors.casts import BF16, FP16, NoCompression
from hvdcomp.compressors.low_rank import PowerSGD
from hvdcomp.compressors.quantization import QSGD, GlobalQSGD, Natural, TernGrad
from hvdcomp.compressors.routing import ByDimensions, ByName, BySize
from hvdcomp.compressors.signs import EFSignSGD, OneBit, SignSGD
from hvdcomp.compressors.sparsification import RandomK, TopK
from hvdcomp.compressors.thresholds import DGC, MSTopK, RedSync, SIDCo

COMPRESSORS: dict[str, type[Compressor]] = {
    kind.name: kind
    for kind in (
        NoCompression,
        FP16,
        BF16,
        TopK,
        RandomK,
        MSTopK,
        RedSync,
        DGC,
        SIDCo,
        PowerSGD,
        ATOMO,
        SignSGD,
        OneBit,
        EFSignSGD,
        QSGD,
        TernGrad,
        Natural,
        GlobalQSGD,
    )
}

# Specs of all of them, in each of their forms.
EXAMPLES: tuple[str, ...] = tuple(spec for kind in COMPRESSORS.values() for spec in kind.examples)

__all__ = [
    "ATOMO",
    "BF16",
    "COMPRESSORS",
    "DGC",
    "EXAMPLES",
    "FP16",
    "QSGD",
    "ByDimensions",
    "ByName",
    "BySize",
    "Compressor",
    "EFSignSGD",
    "GlobalQSGD",
    "Level",
    "MSTopK",
    "Natural",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "RedSync",
    "SIDCo",
    "SignSGD",
    "TernGrad",
    "TopK",
]
