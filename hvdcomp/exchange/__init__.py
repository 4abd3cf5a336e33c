"""One step: the engine, what it fuses, what it counts, and how ranks learn that something is wrong."""

from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import compression_factor

__all__ = ["Engine", "compression_factor"]
