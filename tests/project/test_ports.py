"""The ports for servers of tests."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ports


def test_nobody_gets_such_a_port_who_asks_for_any() -> None:
    low, high = map(int, ports.LOCAL_RANGE.read_text().split())
    found = ports.free_ports(20)
    assert len(set(found)) == 20
    assert not [port for port in found if low <= port <= high]
    for port in found:
        socket.create_server(("", port)).close()


def test_a_taken_port_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = ports.free_ports(1)
    with socket.create_server(("", taken)):
        tried_first = SimpleNamespace(shuffle=lambda candidates: candidates.append(taken))
        monkeypatch.setattr(ports.random, "SystemRandom", lambda: tried_first)
        assert ports.free_ports(1) != [taken]


def test_where_the_kernel_gives_all_ports_it_is_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "LOCAL_RANGE", tmp_path / "range")
    assert len(ports.free_ports(1)) == 1
