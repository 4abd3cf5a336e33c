"""One step: the engine, and its parts. README.md explains how they work together."""

from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import compression_factor

__all__ = ["Engine", "compression_factor"]
