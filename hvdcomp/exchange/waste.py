"""Warns once if compression makes payloads larger instead of smaller, or if no tensor is compressed."""

from __future__ import annotations

from hvdcomp.compressors import NoCompression
from hvdcomp.compressors.choice import Plan
from hvdcomp.errors import listed, warn_alone
from hvdcomp.exchange.engine import Engine

_NOTICEABLE = 0.01  # a difference is noticeable if it exceeds this fraction of the uncompressed bytes of all tensors


class WasteWarning:
    """Warns once on rank 0, if a plan has one of these faults:

    - Some tensors need more bytes than without compression, and the difference is noticeable.
    - All tensors together need more bytes than without compression.
    - No tensor is compressed.

    Only the bytes that one rank sends are counted. If payloads are gathered, the bytes that a rank receives also grow
    with the number of ranks, but received bytes are not counted.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: Plan | None = None
        self._done = engine.communicator.rank != 0

    def look(self) -> None:
        """Call this when a step begins. It takes no time unless the plan has changed."""
        plan = self._engine.plan
        if self._done or plan is self._seen:
            return
        self._seen = plan
        said = what_is_not_compressed(self._engine, plan) or what_is_wasted(self._engine, plan)
        if said is not None:
            self._done = True
            warn_alone(said)


def what_is_not_compressed(engine: Engine, plan: Plan) -> str | None:
    """A warning that no tensor is compressed. None if a tensor is or will be compressed, or if the user wants no
    compression."""
    planner, own = engine.planner, engine.compressor
    # A rank may have no elements of any shard.
    if not engine.tensors or all(isinstance(leaf, NoCompression) for leaf in own.leaves()):
        return None
    used = (*plan.values(), *planner.plan_for(own).values())
    if any(not isinstance(compressor, NoCompression) for compressor in used):
        return None
    largest = max(engine.tensors.values(), key=lambda tensor: tensor.size)
    return (
        f"{own} compresses no tensor of this model, so all {len(plan)} tensors are sent uncompressed. Each tensor has "
        f"fewer than {planner.min_numel} elements (min_numel), has fewer than {planner.min_ndim} dimensions "
        "(min_ndim), is left uncompressed by a rule, or would not become smaller. The largest tensor is "
        f"{largest.name} {largest.own_shape}. Change the settings, or train without hvdcomp: for this model, hvdcomp "
        "only costs time"
    )


def what_is_wasted(engine: Engine, plan: Plan) -> str | None:
    """A warning that names the tensors that need more bytes than without compression; None if the difference is
    small."""
    dense = NoCompression()
    total = everything = more = less = 0
    larger = []
    for name, compressor in plan.items():
        tensor = engine.tensors[name]
        plain = dense.payload_bytes(tensor.shape, dtype=tensor.dtype)
        sent = compressor.payload_bytes(tensor.shape, dtype=tensor.dtype)
        total += plain
        everything += sent
        if sent > plain:
            larger.append(f"{name} {tensor.own_shape} with {compressor}")
            more, less = more + sent, less + plain
    if more - less <= _NOTICEABLE * total:
        everything += engine.bytes_beside(len(plan))
        if everything <= total or engine.planner.casts(plan):
            return None
        return (
            f"with compression, a rank sends {everything:.0f} bytes per step, but the uncompressed gradients have only "
            f"{total} bytes. Compression saves nothing, because ranks also exchange data other than gradients. "
            "Compress harder (a lower level), or train without hvdcomp"
        )
    return (
        f"compression makes {len(larger)} of {len(plan)} tensors larger: a rank sends {more} bytes per step for these "
        f"tensors instead of {less} ({listed(larger)}). Compress these tensors harder (a lower level), or send them "
        'uncompressed: raise min_numel or min_ndim, or add a rule with "none" for them'
    )
