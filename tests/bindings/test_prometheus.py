"""What Prometheus is told: the counters of a process, a real port that two real ranks are scraped from, and the list in
the manual."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hvdcomp
from hvdcomp import FP16, ByName, PowerSGD, SignSGD, TopK
from hvdcomp.bindings.prometheus import Collector
from hvdcomp.exchange.ledger import Cost, Ledger, StepCost
from tests.harness import infos, make, run_engines
from tests.launched import run_ranks
from tests.ports import free_ports

client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

Samples = dict[tuple[str, ...], float]
ROOT = Path(__file__).parents[2]

# Trains as `hvdcomp train` once for each list of options. Rank 0 scrapes itself before a step, and keeps the text.
_RUNS = """
import json, os, socket, sys, urllib.request
from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train.torch_learner import TorchLearner

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
port, before, runs = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
made, real_step = 0, TorchLearner.step

def step(self, *batch):
    global made
    made += 1
    if (rank, made) == (0, before):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            open(sys.argv[4], "wb").write(answer.read())
    return real_step(self, *batch)

TorchLearner.step = step
for options in runs:
    hidden = options[0] == "hidden" and rank == 0
    if hidden:
        there = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("prometheus_client")}
        sys.modules["prometheus_client"] = None
    code = command.main(options[1:], "train", standalone_mode=False)
    if hidden:
        del sys.modules["prometheus_client"]
        sys.modules.update(there)
    print(f"rank {rank} ends with {code if isinstance(code, int) else 0}", flush=True)
if rank == 0:
    socket.create_server(("0.0.0.0", port)).close()
    print("the port is free again", flush=True)
"""


def samples(text: str) -> Samples:
    """The values of all samples, by name and then the values of labels by the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return samples(answer.read().decode())


def at_work(compression: hvdcomp.Compression, router: hvdcomp.Compressor, steps: int) -> None:
    """Lets a compression have made so many steps, of one process."""
    shapes = {"b": (64,), "s": (64, 64), "t": (64, 64), "v": (64, 64), "w": (64, 64), "x": (64, 64)}
    gradients = {name: make("numpy", np.ones(shape)) for name, shape in shapes.items()}
    (run,) = run_engines(1, infos(shapes), router, lambda rank, step: gradients, steps, min_ndim=2)
    compression.ledger = run.engine.ledger
    compression._binding = SimpleNamespace(engine=run.engine)


def test_what_is_scraped_is_what_the_ledger_has() -> None:
    high, low = PowerSGD(rank=4), PowerSGD(rank=1)
    router = ByName({"s": SignSGD(), "t": TopK(0.01), "v": high, "w": low, "x": TopK(0.25), "*": FP16()})
    compression = hvdcomp.Compression(router)
    with hvdcomp.serve_metrics(compression, 0, "127.0.0.1") as server:
        before = scraped(server.port)
        at_work(compression, router, 3)
        after = scraped(server.port)
        assert scraped(server.port) == after
    info = ("hvdcomp_info", str(router), "")
    counters = [f"hvdcomp_{name}_total" for name in ("steps", "sent_bytes", "sent_in_node_bytes", "dense_bytes")]
    phases = [("hvdcomp_step_seconds_total", phase) for phase in ("encode", "communicate", "decode")]
    assert before == {info: 1, **{(name,): 0 for name in counters}, **dict.fromkeys(phases, 0)}
    totals, last = compression.ledger.totals, compression.ledger.last
    assert last is not None
    assert [after.pop((name,)) for name in counters] == [3, totals.bytes_sent, 0, totals.dense_bytes]
    assert totals.bytes_sent == 3 * last.bytes_sent > 0
    seconds = [totals.encode_seconds, totals.communicate_seconds, totals.decode_seconds]
    assert [after.pop(phase) for phase in phases] == seconds
    assert after == {
        info: 1,
        ("hvdcomp_compression_factor",): last.compression_factor,
        ("hvdcomp_mean_level", "rank"): 2.5,
        ("hvdcomp_mean_level", "ratio"): 0.13,
        ("hvdcomp_tensors", "", "fp16"): 1,
        ("hvdcomp_tensors", "", "signsgd"): 1,
        ("hvdcomp_tensors", "0.01", "topk"): 1,
        ("hvdcomp_tensors", "0.25", "topk"): 1,
        ("hvdcomp_tensors", "1", "powersgd"): 1,
        ("hvdcomp_tensors", "4", "powersgd"): 1,
    }


def test_tensors_that_are_sent_alike_are_one_series() -> None:
    compression = hvdcomp.Compression(TopK(0.01))
    at_work(compression, TopK(0.01), 1)
    (tensors,) = (family for family in Collector(compression).collect() if family.name == "hvdcomp_tensors")
    assert {tuple(one.labels.values()): one.value for one in tensors.samples} == {("none", ""): 1, ("topk", "0.01"): 5}


def test_a_scrape_settles_no_times_and_asks_no_device() -> None:
    """It happens in another thread, and the training's own may be about to do so."""
    compression = hvdcomp.Compression(TopK(0.1))
    asked = []
    compression.ledger.record(StepCost(bytes_sent=10, dense_bytes=100), lambda: bool(asked.append(1)))
    before = len(asked)
    list(Collector(compression).collect())
    assert len(asked) == before > 0


def test_counters_are_of_this_process_and_never_go_back() -> None:
    """Prometheus takes a counter that goes back for one that began at zero, and adds all of it."""
    ledger = Ledger()

    def make_step() -> None:
        ledger.record(step := StepCost(bytes_sent=10, dense_bytes=100, bytes_in_node=3))
        ledger.enter_times(step, [(0.1, 0.2)], 0.3)

    make_step()
    saved = (Cost(1000, 9000, 5.0, 0.7, 0.8, 0.9), 50)
    for _ in range(3):  # a restart, and later the same checkpoint again
        made, steps = ledger.of_this_process()
        ledger.continue_from(Cost(**vars(saved[0])), saved[1])
        assert ledger.of_this_process() == (made, steps)
        make_step()
        assert (ledger.totals.bytes_sent, ledger.steps) == (1010, 51)
    made, steps = ledger.of_this_process()
    assert (made.bytes_sent, made.dense_bytes, made.bytes_in_node, steps) == (40, 400, 12, 4)
    assert (made.encode_seconds, made.communicate_seconds) == (pytest.approx(0.4), pytest.approx(1.2))


def test_a_port_that_cannot_be_had_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compression = hvdcomp.Compression(TopK(0.1))
    for port in (-1, 65536, "9400", True):
        said = f"port {port!r} is not allowed; give a whole number from 0 to 65535"
        with pytest.raises(hvdcomp.ConfigurationError, match=said):
            hvdcomp.serve_metrics(compression, port)  # type: ignore[arg-type]
    with pytest.raises(hvdcomp.ConfigurationError, match=r"hvdcomp\.serve_metrics was given 'topk' as compression"):
        hvdcomp.serve_metrics("topk", 0)  # type: ignore[arg-type]
    with hvdcomp.serve_metrics(compression, 0, "127.0.0.1") as server:
        said = rf"cannot listen on port {server.port} of 127\.0\.0\.1: Address already in use\. Give another port"
        with pytest.raises(hvdcomp.ConfigurationError, match=said):
            hvdcomp.serve_metrics(compression, server.port, "127.0.0.1")
    hvdcomp.serve_metrics(compression, server.port, "127.0.0.1").close()
    for address, listens in (({}, "127.0.0.1"), ({"address": "0.0.0.0"}, "0.0.0.0")):
        with hvdcomp.serve_metrics(compression, 0, **address) as server:
            assert server._server.server_address[0] == listens
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(hvdcomp.ConfigurationError, match=r"pip install 'hvdcomp\[metrics\]'"):
        hvdcomp.serve_metrics(compression, 0)


def test_the_manual_lists_all_metrics_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(hvdcomp_\w+)` \| (\w+) \|", page, re.MULTILINE))
    registry = client.CollectorRegistry()
    registry.register(Collector(hvdcomp.Compression(TopK(0.1))))
    text = client.generate_latest(registry).decode()
    assert listed == dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"\bhvdcomp_\w+", page)) == set(listed), "what is queried is listed"


@pytest.mark.alone
def test_two_ranks_are_scraped_and_what_is_wrong_is_said_on_both(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    (port,) = free_ports(1)
    train = ["--model", "mlp", "--samples", "320", "--epochs", "1", "--no-progress", "--compression", "topk:ratio=0.02"]
    taken = socket.create_server(("0.0.0.0", 0))
    runs = [
        ["hidden", *train, "--metrics-port", str(port)],
        ["", *train, "--metrics-port", str(taken.getsockname()[1])],
        ["", *train, "--metrics-port", str(port), "--output", str(tmp_path / "run")],
    ]
    program, text = tmp_path / "program.py", tmp_path / "scraped.txt"
    program.write_text(_RUNS)
    with taken:
        done = run_ranks(2, "mpi", [str(program), str(port), "8", json.dumps(runs), str(text)], {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout[-4000:]
    for rank in (0, 1):
        ends = re.findall(rf"rank {rank} ends with (\d)", done.stdout)
        assert ends == ["2", "2", "0"], done.stdout[-4000:]
    assert done.stdout.count("pip install 'hvdcomp[metrics]'") == 1
    assert done.stdout.count("Address already in use. Give another port") == 1
    assert "Traceback" not in done.stdout
    assert "the port is free again" in done.stdout
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    found = samples(text.read_text())
    assert found["hvdcomp_steps_total",] == 7
    fields = {"sent_bytes": "bytes_sent", "sent_in_node_bytes": "bytes_in_node", "dense_bytes": "dense_bytes"}
    for name, field in fields.items():
        assert found[f"hvdcomp_{name}_total",] == sum(line[field] for line in steps[:7])
    for phase in ("encode", "communicate", "decode"):
        told = sum(line[f"{phase}_ms"] for line in steps[:7]) / 1000
        assert found["hvdcomp_step_seconds_total", phase] == pytest.approx(told)
    assert found["hvdcomp_compression_factor",] == steps[6]["dense_bytes"] / steps[6]["bytes_sent"]
    assert found["hvdcomp_mean_level", "ratio"] == 0.02
    assert found["hvdcomp_tensors", "0.02", "topk"] >= 1
    assert found["hvdcomp_info", "topk:ratio=0.02", ""] == 1
