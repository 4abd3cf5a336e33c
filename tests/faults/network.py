"""Links that lose packets, stand still or are cut, between two hosts of an emulated cluster."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdcomp.tools.bench.cluster import Cluster, ClusterError
from hvdcomp.tools.bench.cluster.launch import ranks_command
from tests.faults import links
from tests.faults.table import Fault
from tests.faults.world import STEPS, WAIT, NotHere, Planted, World

GROUP = "network"
_BACKENDS = {"gloo": "horovod", "ddp": "torch"}
_RATE = "1gbit"
# TCP sends a lost packet again after 0.2 s, and doubles that each time: after a stall of 30 s, within another 30 s.
_PATIENCE = 120


class NetworkWorld(World):
    """A world of two hosts with a rank on each.

    Raises:
        NotHere: no hosts can be made.
    """

    def __init__(self, transport: str, folder: Path, within: float) -> None:
        super().__init__(transport, folder, within)
        if shutil.which("iptables") is None:
            raise NotHere("packets are lost by iptables, which is not installed")
        try:
            self._cluster = Cluster(2, _RATE).__enter__()
        except ClusterError as error:
            raise NotHere(str(error)) from None

    def mend(self) -> None:
        """Undoes a cut of rank 1's link."""
        links.mend(self._cluster.name, 1)

    def command(self, arguments: Sequence[str]) -> list[str]:
        words = ["env", f"{links.CLUSTER}={self._cluster.name}", sys.executable, *arguments]
        return ranks_command(_BACKENDS[self.transport], self._cluster.name, 2, self.ranks, words)

    def end(self) -> None:
        super().end()
        self._cluster.__exit__(None, None, None)


def _survived(act: str, name: str, documented: str, short: bool = False) -> Fault:
    def run(world: World) -> str:
        patient = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(_PATIENCE), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}
        planted = Planted(act, "collective", rank=1, step=6)
        ended = world.train(planted=planted, environment=patient, timeout=_PATIENCE)
        assert ended.code == 0, f"it ended with exit code {ended.code}: {ended.output[-2000:]}"
        weights = world.weights()
        assert weights == world.undisturbed.weights(), "the weights are not those of an undisturbed training"
        return f"it went on, to step {STEPS} and the same weights"

    return Fault(name, GROUP, documented, _PATIENCE, run, tuple(_BACKENDS), short, NetworkWorld)


def _cut(world: World) -> str:
    assert isinstance(world, NetworkWorld)
    ended = world.train(planted=Planted("cut", "collective", rank=1, step=6)).failed()
    world.weights()
    world.mend()
    return f"all ended with exit code {ended.code}; the link was mended; {world.goes_on(4)}"


FAULTS = [
    _survived(
        "lose-packets",
        f"a link loses {links.LOSS:.0%} of the packets",
        "TCP sends the lost packets again, and training continues.",
    ),
    _survived(
        "stall",
        f"a link stalls for {links.STALL_SECONDS} s",
        "If the stall is shorter than the timeout, nothing is lost, and training continues.",
        short=True,
    ),
    Fault(
        "a link is cut",
        GROUP,
        "After the timeout, both ranks end with an error. After a restart, training continues.",
        WAIT + 30,
        _cut,
        tuple(_BACKENDS),
        world=NetworkWorld,
    ),
]
