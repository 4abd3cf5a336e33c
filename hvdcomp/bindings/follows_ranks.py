"""The part of `hvdcomp.Compression` that elastic Horovod asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdcomp.bindings import frameworks
from hvdcomp.bindings.setup import Setup
from hvdcomp.errors import ConfigurationError
from hvdcomp.policies import changes_batch_size
from hvdcomp.settings import Settings


class FollowsRanks:
    """What elastic Horovod, whose ranks change while a training runs, asks of a `hvdcomp.Compression`."""

    settings: Settings
    _framework: str | None
    _parameters: Any
    _optimizer: Any
    _restored: dict[str, Any] | None
    _binding: Any

    def serve(self, make_binding: Callable[[Setup], Any], optimizer: Any = None) -> Any:
        """`Compression.serve`."""
        raise NotImplementedError

    def _bind(self, optimizer: Any) -> bool:
        """Makes the binding before the first gradient, if what is known is enough for it; says whether it did.

        Args:
            optimizer: as for `load_state_dict`.
        """
        if self._framework is None and optimizer is not None:
            self._framework = frameworks.of_optimizer(optimizer)
        if not self._framework or not frameworks.framework_named(self._framework).can_bind(self._parameters, optimizer):
            return False
        self.serve(frameworks.maker(self._framework), self._optimizer if optimizer is None else optimizer)
        return True

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` returned at an earlier time; to be called on every rank.

        `hvd.elastic.TorchState(..., compression=compression)` calls it after a failure. The next step is then as the
        first of a training: all ranks wait for each other, and have of what they share what rank 0 has.
        """
        if self._binding is None:
            self._restored = dict(state) or None
        else:
            self._binding.roll_back(state)

    def meet_ranks_early(self, optimizer: Any = None) -> None:
        """Makes all ranks agree now, if the first step would be too late: a training loop reads `accumulation` before
        it. To be called on every rank.

        Args:
            optimizer: what hvd.DistributedOptimizer returned, if that is known.

        Raises:
            ConfigurationError: if the optimizer is needed and not known, or the ranks cannot go on together.
        """
        if not changes_batch_size(self.settings.policy):
            return
        if self._binding is None:
            optimizer = self._optimizer if optimizer is None else optimizer
            if optimizer is None or not self._bind(optimizer):
                raise ConfigurationError(
                    f"the policy {self.settings.policy} changes the batch size: give the elastic state the optimizer "
                    "too, hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
                )
        elif self._binding.is_stale:
            self._binding.follow_ranks()
        self._binding.meet_elastic_ranks()
