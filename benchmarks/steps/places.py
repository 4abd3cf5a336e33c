"""The settings in which steps are measured. A setting consists of hosts, ranks on each host, the rate of the links, and
a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Hosts(NamedTuple):
    """The hosts of a cluster, and the number of ranks on each host.

    Example:
        >>> parse_hosts("2x4")
        Hosts(number=2, ranks=4)
        >>> str(Hosts(2, 4)), str(Hosts(2))
        ('2x4', '2')
    """

    number: int
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.number}" if self.ranks == 1 else f"{self.number}x{self.ranks}"

    def in_words(self) -> str:
        """The hosts in words, such as "2 hosts of 4 ranks", or "2 hosts" if there is one rank on each."""
        return f"{self.number} hosts" if self.ranks == 1 else f"{self.number} hosts of {self.ranks} ranks"


def parse_hosts(text: str) -> Hosts:
    """Parses hosts as the user writes them: "2" for two hosts, or "2x4" for two hosts with four ranks on each.

    Raises:
        ValueError: for any other text.
    """
    match = re.fullmatch(r"(\d{1,4})(?:x([1-9]\d{0,3}))?", text)
    if match is None:
        raise ValueError(
            f"--hosts {text!r}: write a number of hosts, such as 2, or 2x4 for 2 hosts with 4 ranks on each"
        )
    return Hosts(int(match[1]), int(match[2] or 1))


@dataclass(frozen=True)
class Place:
    """One setting in which methods are compared."""

    hosts: int
    ranks_per_host: int
    rate: str
    model: str

    @property
    def place(self) -> Place:
        """The setting alone, without the fields of a subclass."""
        return Place(self.hosts, self.ranks_per_host, self.rate, self.model)

    @property
    def cluster(self) -> Hosts:
        """The hosts of the cluster."""
        return Hosts(self.hosts, self.ranks_per_host)

    def in_words(self) -> str:
        """The setting in words, such as "mlp, 2 hosts, 1gbit"."""
        return f"{self.model}, {self.cluster.in_words()}, {self.rate}"


def place_of(run: Mapping[str, Any]) -> Place:
    """The setting of a run, from its record. Old records without `ranks_per_host` have one rank on each host."""
    return Place(run["hosts"], run.get("ranks_per_host", 1), run["rate"], run["model"])
