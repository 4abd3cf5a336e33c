"""The compressors, by name. A new one is a class in a family's file and a line in `COMPRESSORS`."""

from __future__ import annotations

from hvdcomp.compressors.base import Compressor, Level
from hvdcomp.compressors.casts import BF16, FP16, NoCompression
from hvdcomp.compressors.low_rank import PowerSGD
from hvdcomp.compressors.sparsification import RandomK, TopK

COMPRESSORS: dict[str, type[Compressor]] = {
    kind.name: kind for kind in (NoCompression, FP16, BF16, TopK, RandomK, PowerSGD)
}

__all__ = ["BF16", "COMPRESSORS", "FP16", "Compressor", "Level", "NoCompression", "PowerSGD", "RandomK", "TopK"]
