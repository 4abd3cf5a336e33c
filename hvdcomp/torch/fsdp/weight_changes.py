"""Replaces FSDP's all-gather of weights. The replacement sends only the quantized change of the weights since the last
all-gather.

Every rank keeps the result of the last all-gather. The owner of a row quantizes the difference between its weights and
this result. All ranks, including the owner, add the decoded difference to this result. So all ranks compute with the
same weights, bit for bit. The rounding error of one gather is part of the next difference, so errors do not accumulate.
The owner's shard, which the optimizer updates, is not rounded. SDP4Bit describes this method as quantization of weight
differences (Jia et al. 2024, arXiv:2410.15526, section 3.1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hvdcomp.arrays import arrays_for
from hvdcomp.communicators.torch_distributed import all_gather
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.protocol import AllGather, Context
from hvdcomp.exchange.fusion import Round
from hvdcomp.exchange.ledger import Sent
from hvdcomp.exchange.shards import ShardReducer
from hvdcomp.torch.training import refuse_capture


class WeightChanges:
    """The all-gather of one module. FSDP calls this object instead of its own all-gather.

    Args:
        reducer: the `ShardReducer` of the same ranks. The reducer provides the seed, the step and the ledger.
        compressor: the compressor of the changes of weights, which is either a `Gathering` or a lossless compressor.
        name: name of the module.
        min_numel: modules with fewer elements are gathered uncompressed.
    """

    def __init__(self, reducer: ShardReducer, compressor: Compressor, name: str, min_numel: int) -> None:
        self._reducer, self._compressor, self._name, self._min_numel = reducer, compressor, name, min_numel
        self._gathered: list[torch.Tensor] = []  # the rows of all ranks at the last gather; they are equal on all ranks
        self._last = torch.empty(0)  # this rank's weights at the last gather

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.compiler.disable  # in case the whole training step is compiled
    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        dense_bytes = input_tensor.numel() * input_tensor.element_size()
        # After the forward pass, FSDP may reshard weights among some of the ranks, which then gather them again.
        in_part = group.size() != self._reducer.communicator.world_size
        small = output_tensor.numel() < self._min_numel
        if in_part or small or self._compressor.lossless or not input_tensor.is_floating_point():
            self._reducer.enter(self._name, dense_bytes, Sent(dense_bytes), input_tensor.numel())
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        refuse_capture()
        # A backward pass needs the weights of its forward pass, which each rank still has.
        rows, sent = self.gather(input_tensor, changed=torch._C._current_graph_task_id() == -1)
        self._reducer.enter(self._name, dense_bytes, sent, sent.bytes / 4)
        torch.cat(rows, out=output_tensor)
        return None

    def forget_where_loaded(self, module: torch.nn.Module) -> None:
        """Makes the first gather after each `load_state_dict` exact, if the module, or a module inside it, was loaded.
        Loading may change the weights a lot. A quantized gather would send this change with a large error, and no later
        gather would correct the error before the next update."""

        def forget(*_: Any) -> None:
            self._gathered = []

        for inside in module.modules():
            inside.register_load_state_dict_post_hook(forget)

    def gather(self, row: torch.Tensor, changed: bool = True) -> tuple[list[torch.Tensor], Sent]:
        """Gathers the rows of all ranks, each of shape (length,). Also returns the number of bytes that this rank
        passed to the collective.

        Args:
            row: this rank's weights, of shape (length,) and of a floating-point type.
            changed: whether the weights of any rank may have changed since the last gather. The value must be the same
                on all ranks.
        """
        own = self._reducer.communicator.rank
        if not self._gathered or (self._last.shape, self._last.dtype) != (row.shape, row.dtype):
            answers, sent = self._answers((row,))
            self._gathered = [answer.clone() for (answer,) in answers]
        elif changed:
            xp, method = arrays_for(row), self._compressor
            assert isinstance(method, Gathering)
            context = Context(
                f"{self._name} weights", self._reducer.step_number, self._reducer.seed, own, len(self._gathered)
            )
            wide = torch.promote_types(row.dtype, torch.float32)
            change = (row.to(wide) - finite(self._gathered[own], wide)).float()
            # The change is zero if this rank's weights have not changed, because all passes between two updates must
            # use the same weights.
            change *= (row != self._last).any()
            payload: Any = method.encode(xp, change, context)
            answers, sent = self._answers(payload)
            for place, parts in enumerate(answers):
                decoded: Any = method.decoded(xp, parts, tuple(row.shape), context)
                self._gathered[place] = (finite(self._gathered[place], wide) + decoded).to(row.dtype)
        else:
            return self._gathered, Sent()
        self._last = row.clone()
        return self._gathered, sent

    def _answers(self, parts: tuple[torch.Tensor, ...]) -> tuple[list[Any], Sent]:
        like = parts[0]
        name = f"hvdcomp.{self._name}.weights"
        made = Round(arrays_for(like), self._reducer.communicator, [AllGather(parts)], name, like)
        (answers,) = made.wait()
        return answers, made.sent


def finite(gathered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gathered weights, with zeros in place of inf and NaN. Without these zeros, weights could never become finite
    again after an inf or NaN."""
    return torch.nan_to_num(gathered, nan=0.0, posinf=0.0, neginf=0.0).to(dtype)
