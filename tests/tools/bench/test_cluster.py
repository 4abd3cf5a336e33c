"""The emulated cluster: real namespaces, real Horovod between them, and nothing left behind however a run ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.tools.bench.cluster import Cluster, ClusterError, namespaces, parse_rate, records
from hvdcomp.tools.bench.cluster.launch import cores_of
from hvdcomp.tools.bench.cluster.rates import token_bucket_bytes
from hvdcomp.tools.bench.cluster.throughput import measure
from tests.processes import runs

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[3]
MISSING = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]


def _why_not() -> str | None:
    """Why no cluster can be made here."""
    if os.geteuid() != 0:
        return "the emulated cluster needs root"
    if MISSING:
        return f"the emulated cluster needs {', '.join(MISSING)} (sudo scripts/install-system-packages)"
    try:
        with Cluster(2, "100mbit"):
            return None
    except ClusterError as error:
        return f"no emulated cluster can be made here: {error}"


@pytest.fixture(scope="module")
def machine() -> None:
    """Skips where no cluster can be made."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)


def _namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split("\n"))


def _everything() -> set[str]:
    """All that a cluster could leave behind on this machine."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    names = {line.split(":")[1] for line in links.splitlines()}
    return {*_namespaces(), *names, *map(str, records.FOLDER.glob("*.hosts")), *records.names()}


@pytest.fixture
def clean(machine: None) -> Iterator[None]:
    """Sees that a test leaves the machine as it was."""
    if records.read(records.STANDING) is not None:
        pytest.skip("a cluster is up on this machine; remove it: python -m hvdcomp.tools.bench.cluster down")
    before = _everything()
    yield
    assert _everything() == before


def _command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hvdcomp.tools.bench.cluster", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def _finished(*arguments: str, **options: Any) -> tuple[int, str]:
    with _command(*arguments, **options) as process:
        output, _ = process.communicate(timeout=120)
    return process.returncode, output


# Rates and refusals: no root needed


@given(st.integers(1, 99), st.sampled_from([("mbit", 10**6), ("gbit", 10**9)]))
def test_rates_are_read_as_tc_reads_them(number: int, unit: tuple[str, int]) -> None:
    assert parse_rate(f"{number}{unit[0]}") == number * unit[1]
    assert parse_rate(f"{number}.5{unit[0]}".upper()) == number * unit[1] + unit[1] // 2


@pytest.mark.parametrize("rate", ["", "100", "fast", "100mbps", "-1mbit", "1 gbit/s", "100kbit", "101gbit", "0mbit"])
def test_other_rates_are_refused_with_their_value(rate: str) -> None:
    with pytest.raises(ClusterError, match="rate"):
        parse_rate(rate)


def test_the_bucket_holds_a_frame_and_little_time() -> None:
    for rate in ("1mbit", "100mbit", "1gbit", "10gbit"):
        size = token_bucket_bytes(parse_rate(rate))
        assert size > 2 * 1514
        assert size <= max(3200, parse_rate(rate) / 8 * 0.00025)


def test_without_root_or_programs_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="an emulated cluster needs root if its hosts remain"):
        Cluster(2, "1gbit")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ClusterError, match=r"'ip' from the package iproute2.*install-system-packages"):
        Cluster(2, "1gbit")


AS_A_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]


@pytest.mark.cluster
def test_without_root_a_run_makes_its_hosts_in_a_user_namespace() -> None:
    """The user that the test makes has no rights beyond its own files."""
    try:
        tried = subprocess.run([*AS_A_USER, "unshare", "-Urnm", "true"], capture_output=True, text=True)
        reason = tried.stderr.strip()
    except FileNotFoundError as error:
        reason = str(error)
    if MISSING or reason:
        pytest.skip(f"no user can make hosts here: {reason or MISSING}")
    hosts = ["--hosts", "2", "--rate", "100mbit"]
    said = ["sh", "-c", "echo rank $RANK on $(hostname), beside $(getent hosts host1), by $(tc qdisc show dev eth0)"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        full = [*AS_A_USER, sys.executable, "-m", "hvdcomp.tools.bench.cluster", *words]
        return subprocess.run(full, capture_output=True, text=True, timeout=120, cwd=ROOT)

    done = run("run", *hosts, "--backend", "torch", "--", *said)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank} ")]
        assert f"on host{rank}, beside 10.77.0.2 host1" in " ".join(line.split())
        assert "tbf" in line
        assert "rate 100Mbit" in line
    up = run("up", *hosts)
    assert (up.returncode, "needs root if its hosts remain" in up.stderr) == (1, True), up.stderr


def test_a_kernel_without_user_namespaces_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("ip", "tc", "hostname", "unshare"):
        (tmp_path / program).write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        ClusterError,
        match=r"user namespaces \(unshare failed: Operation not permitted\). Run this "
        r"command with",
    ):
        namespaces.become_root()


def test_namespaces_tell_whose_they_are() -> None:
    assert records.name_in("hvdcomp-p12n1-host3") == "p12n1"
    assert records.name_in("hvdcomp-standing-switch") == "standing"
    assert records.name_in("somebody-else") is None


@pytest.mark.parametrize("hosts", [0, 1, 65])
def test_wrong_numbers_of_hosts_are_refused(hosts: int) -> None:
    with pytest.raises(ClusterError, match=f"cluster cannot have {hosts} host"):
        Cluster(hosts, "1gbit")


# On real namespaces


@pytest.mark.cluster
def test_wrong_numbers_of_ranks_and_other_backends_are_refused(clean: None) -> None:
    with Cluster(2, "1gbit") as cluster:
        with pytest.raises(ClusterError, match="3 ranks on 2 hosts"):
            cluster.run(["true"], ranks=3)
        with pytest.raises(ClusterError, match="'mpi' is not one of horovod, torch"):
            cluster.run(["true"], backend="mpi")
    with pytest.raises(ClusterError, match="within its `with` block"):
        cluster.run(["true"])


@pytest.mark.cluster
def test_up_status_run_down(clean: None) -> None:
    before = _namespaces()
    assert _finished("up", "--hosts", "2", "--rate", "1gbit")[0] == 0
    try:
        added = {line.split()[0] for line in _namespaces() - before if line}
        assert added == {f"hvdcomp-standing-{part}" for part in ("host0", "host1", "switch")}
        code, said = _finished("status")
        assert code == 0
        assert "standing" in said
        assert "1gbit" in said
        code, said = _finished("up", "--hosts", "2", "--rate", "1gbit")
        assert code == 1
        assert "is already running" in said
        code, said = _finished("run", "--", "sh", "-c", "echo $(hostname) rank $HOROVOD_RANK of $HOROVOD_SIZE")
        assert code == 0
        assert {"host0 rank 0 of 2", "host1 rank 1 of 2"} <= set(said.splitlines())
    finally:
        code, said = _finished("down")
    assert code == 0
    assert "removed 2 hosts" in said
    code, said = _finished("run", "--", "true")
    assert code == 1
    assert "no cluster is running" in said


@pytest.mark.cluster
def test_the_exit_code_is_that_of_the_rank_that_failed(clean: None) -> None:
    start = time.monotonic()
    code, _ = _finished(
        *("run", "--hosts", "2", "--rate", "1gbit", "--"),
        *("sh", "-c", 'if [ "$HOROVOD_RANK" = 1 ]; then exit 7; fi; exec sleep 100'),
    )
    assert code == 7
    assert time.monotonic() - start < 60  # the other rank was ended


@pytest.mark.cluster
def test_output_comes_line_by_line_and_a_timeout_ends_all_ranks(clean: None) -> None:
    lines: list[tuple[float, str]] = []
    with Cluster(2, "1gbit") as cluster:
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.run(
                ["sh", "-c", "echo $WORD; exec sleep 100"],
                env={"WORD": "hello"},
                output=lambda line: lines.append((time.monotonic(), line)),
                timeout=5,
            )
        ended = time.monotonic()
        assert [line for _, line in lines] == ["hello\n", "hello\n"]
        assert all(when < ended - 2 for when, _ in lines)
        assert not namespaces._processes(cluster.name)


def _running(process: subprocess.Popen[str]) -> None:
    """Waits until both ranks of a run say that they are there."""
    assert process.stdout is not None
    seen = 0
    while seen < 2:
        line = process.stdout.readline()
        assert line, "the run ended too early"
        seen += line == "ready\n"


WAIT = ("run", "--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", "echo ready; exec sleep 300")


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_cleans_up(clean: None, number: signal.Signals) -> None:
    # Where the tests run in the background of a shell, SIGINT is ignored, and that is inherited.
    with _command(*WAIT, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)) as process:
        _running(process)
        assert any("hvdcomp-p" in name for name in _namespaces())
        process.send_signal(number)
        assert process.wait(60) == 128 + number


@pytest.mark.cluster
def test_an_interrupted_set_up_cleans_up(clean: None) -> None:
    before = _namespaces()
    with _command("run", "--hosts", "40", "--rate", "1gbit", "--", "true") as process:
        while _namespaces() == before:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


@pytest.mark.cluster
def test_an_error_in_the_middle_of_set_up_cleans_up(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: Callable[..., None] = namespaces._shape
    calls: list[str] = []

    def fails_at_last(where: str, interface: str, rate: str) -> None:
        calls.append(where)
        if len(calls) == 3:
            raise ClusterError("no more")
        shape(where, interface, rate)

    monkeypatch.setattr(namespaces, "_shape", fails_at_last)
    with pytest.raises(ClusterError, match="no more"), Cluster(2, "1gbit"):
        pytest.fail("the block was entered")
    assert len(calls) == 3


@pytest.mark.cluster
@pytest.mark.parametrize("next_command", [("down",), ("run", "--hosts", "2", "--rate", "1gbit", "--", "true")])
def test_what_a_killed_run_left_is_removed(clean: None, next_command: tuple[str, ...]) -> None:
    with _command(*WAIT) as process:
        _running(process)
        process.kill()
    (name,) = (name for name in records.names() if name.startswith(f"p{process.pid}n"))
    assert namespaces.existing(name)
    ranks = namespaces._processes(name)
    assert len(ranks) >= 2
    assert all(map(runs, ranks))
    assert "left behind by a killed process" in " ".join(_finished("status")[1].replace("│", " ").split())
    assert _finished(*next_command)[0] == 0
    assert not any(map(runs, ranks))


@pytest.mark.cluster
def test_a_cluster_in_use_is_not_taken_from_its_user(clean: None) -> None:
    with Cluster(2, "1gbit", standing=True) as cluster:
        code, said = _finished("down")
        assert code == 1
        assert f"in use by process {os.getpid()}" in said
        cluster.remove()


@pytest.mark.cluster
def test_a_running_cluster_is_no_leftover(clean: None) -> None:
    with Cluster(2, "1gbit") as cluster:
        assert _finished("down")[0] == 0
        assert len(namespaces.existing(cluster.name)) == 3
        with Cluster(2, "100mbit") as other:  # a second one beside it
            assert len(namespaces.existing(other.name)) == 3


ALLREDUCE = """
import socket
import sys
import horovod.torch as hvd
import torch
hvd.init()
total = hvd.allreduce(torch.tensor([1.0, 10.0]) * (hvd.rank() + 1), op=hvd.Sum, name="x").tolist()
place = f"{hvd.rank()} {hvd.size()} {hvd.local_size()} {socket.gethostname()}"
sys.stdout.write(f"RESULT {place} {total}\\n")  # at once: both ranks write at the same time
"""


@pytest.mark.cluster
def test_horovod_runs_between_hosts(clean: None) -> None:
    pytest.importorskip("horovod.torch")
    lines: list[str] = []
    with Cluster(2, "1gbit") as cluster:
        assert cluster.run([sys.executable, "-c", ALLREDUCE], output=lines.append, timeout=120) == 0, "".join(lines)
    results = sorted(line for line in lines if line.startswith("RESULT"))
    assert results == ["RESULT 0 2 1 host0 [3.0, 30.0]\n", "RESULT 1 2 1 host1 [3.0, 30.0]\n"]


TORCH_DISTRIBUTED = """
import os
import socket
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator


def sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


dist.init_process_group("gloo")
numbers = torch.full((1_000_000,), 10.0 ** dist.get_rank())
before = sent()
dist.all_reduce(numbers)
dist.barrier()
crossed = sent() - before
place = TorchDistributedCommunicator().place()
facts = f"{dist.get_rank()} {os.environ['LOCAL_RANK']} {socket.gethostname()} {place} {numbers.unique().tolist()}"
assert dist.is_torchelastic_launched()
sys.stdout.write(f"RESULT {facts} {4_000_000 < crossed < 8_000_000}\\n")  # at once: all ranks write at the same time
dist.barrier()
dist.destroy_process_group()
sys.exit(7 if place == (1, 2) and os.environ["LOCAL_RANK"] == "1" else 0)
"""


@pytest.mark.cluster
def test_torch_distributed_runs_between_hosts_without_horovod(clean: None, tmp_path: Path) -> None:
    """Sums cross the link in the bytes that they need, and the code of the rank that fails is the run's."""
    pytest.importorskip("torch")
    (tmp_path / "horovod.py").write_text("raise ImportError('there is no Horovod here')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code, said = _finished(
        *("run", "--hosts", "2", "--rate", "1gbit", "--ranks", "4", "--backend", "torch"),
        *("--", sys.executable, "-c", TORCH_DISTRIBUTED),
        env={**os.environ, "PYTHONPATH": path},
    )
    results = sorted(line for line in said.splitlines() if line.startswith("RESULT"))
    assert results == [
        "RESULT 0 0 host0 (0, 2) [1111.0] True",
        "RESULT 1 1 host0 (0, 2) [1111.0] True",
        "RESULT 2 0 host1 (1, 2) [1111.0] True",
        "RESULT 3 1 host1 (1, 2) [1111.0] True",
    ], said
    assert code == 7


FSDP = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import hvdcomp


def sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def crossed(how):
    torch.manual_seed(0)
    # Weights are gathered before gradients are counted.
    model = fully_shard(torch.nn.Linear(1000, 1000), reshard_after_forward=False)
    if how is not None:
        hvdcomp.fsdp.register(model, how)
    for _ in range(2):  # the second step: in the first ranks meet
        loss = model(torch.randn(8, 1000)).square().sum()
        dist.barrier()
        before = sent()
        loss.backward()
        dist.barrier()
        bytes_sent = sent() - before
    return bytes_sent


dist.init_process_group("gloo")
how = hvdcomp.Compression(hvdcomp.Int4())
stock, ours = crossed(None), crossed(how)
binding = how._binding.engine
kept = sum(one.nbytes for arrays in binding.states.values() for one in arrays)
sys.stdout.write(f"RESULT {stock} {ours} {kept}\\n")  # at once: all ranks write at the same time
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.cluster
def test_shards_of_gradients_take_a_sixth_of_the_link(clean: None) -> None:
    """FSDP2 on two hosts with two ranks each, counted on the interface of each host."""
    pytest.importorskip("torch")
    _, said = _finished(
        *("run", "--hosts", "2", "--rate", "1gbit", "--ranks", "4", "--backend", "torch"),
        *("--", sys.executable, "-c", FSDP),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    results = [line.split()[1:] for line in said.splitlines() if line.startswith("RESULT")]
    assert len(results) == 4, said
    elements = 1000 * 1000 + 1000
    for stock, ours, kept in (map(int, result) for result in results):
        # A reduce-scatter has to send the sum of a host's ranks for the other host, half of the elements.
        assert stock >= 4 * elements // 2
        assert ours * 6 < 4 * elements // 2, (stock, ours)
        assert kept == 4 * elements // 4  # 4 bytes for each element of a rank's own shard


@pytest.mark.cluster
def test_links_carry_what_their_rate_says(clean: None) -> None:
    with Cluster(2, "100mbit") as cluster:
        bits = measure(cluster, seconds=2)
    assert 50e6 < bits < 102e6


@pytest.mark.cluster
def test_dense_steps_take_the_time_that_their_bytes_need(clean: None, tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch")
    file = tmp_path / "steps.json"
    methods = [word for method in ("none", "hvd.fp16", "topk:ratio=0.01") for word in ("--method", method)]
    lines: list[str] = []
    with Cluster(2, "100mbit") as cluster:
        command = [sys.executable, "-m", "benchmarks.steps.worker", "--model", "mlp", "--rounds", "3"]
        command = [*command, "--steps", "3", *methods, "--output", str(file)]
        code = cluster.run(command, output=lines.append, timeout=300)
    assert code == 0, "".join(lines)
    measured = json.loads(file.read_text())
    none, fp16, topk = measured["methods"]
    assert [one["method"] for one in measured["methods"]] == ["none", "hvd.fp16", "topk:ratio=0.01"]
    assert all([len(block) for block in one["step_ms"]] == [3, 3, 3] for one in measured["methods"])
    assert none["bytes_per_step"] == 2 * fp16["bytes_per_step"] == 4 * measured["parameters"]
    assert 0 < topk["bytes_per_step"] < none["bytes_per_step"] / 25
    assert topk["encode_ms"] > 0
    # A ring of two sends the gradient once; the link's own time cannot be undercut, whatever else the machine does.
    link_ms = 8000 * none["bytes_per_step"] / 100e6
    assert none["median_ms"] > 0.95 * link_ms
    assert fp16["median_ms"] > 0.95 * link_ms / 2
    assert topk["median_ms"] < none["median_ms"]


def test_hosts_keep_to_cores_of_their_own_while_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    assert [cores_of(host, 2) for host in range(2)] == [{2, 5}, {3, 7}]
    assert [cores_of(host, 4) for host in range(4)] == [{2}, {3}, {5}, {7}]
    assert [cores_of(host, 6) for host in range(6)] == [{2}, {3}, {5}, {7}, {2}, {3}]
