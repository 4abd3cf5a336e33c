"""The folder k8s/monitoring: dashboard and alerts name metrics that hvdcomp serves, and scraping and network policy
choose the pods of the trainings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import hvdcomp
from hvdcomp import ByName, PowerSGD, TopK
from hvdcomp.bindings.prometheus import Collector
from tests import k8s_schemas, kustomize
from tests.bindings.test_prometheus import at_work
from tests.tools.launch.test_k8s_operators import pod
from tests.tools.launch.test_launch_k8s_manifests import JOBS

FOLDER = Path(__file__).parents[3] / "k8s" / "monitoring"
BUILT = kustomize.build(FOLDER)
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
(ALERTS,) = (one for one in BUILT if one["kind"] == "PrometheusRule")
RULES = {rule["alert"]: rule for group in ALERTS["spec"]["groups"] for rule in group["rules"]}
QUERIES = {
    **{f"alert {name}": rule["expr"] for name, rule in RULES.items()},
    **{
        f"panel {title} {target['refId']}": target["expr"]
        for title, panel in PANELS.items()
        for target in panel["targets"]
    },
}
PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (as root: scripts/install-system-packages --prometheus)"
)


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, set[str]]]:
    """The metrics that a training serves: of each the values of its labels, as far as one training has them."""
    router = ByName({"s": TopK(0.01), "*": PowerSGD(rank=4)})  # and what has one dimension is sent dense
    compression = hvdcomp.Compression(router)
    at_work(compression, router, 2)
    found: dict[str, dict[str, set[str]]] = {}
    for family in Collector(compression).collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def named(query: str) -> list[tuple[str, str]]:
    """The metrics of a query, each with what is between the braces behind it."""
    return re.findall(r"\b(hvdcomp_\w+)(?:\{([^}]*)\})?", query)


@pytest.mark.parametrize("name", QUERIES)
def test_what_is_asked_for_is_served(name: str, served: dict[str, dict[str, set[str]]]) -> None:
    query = QUERIES[name]
    assert named(query), "a query of nothing"
    known = {"instance"}
    for metric, braces in named(query):
        assert metric in served, f"hvdcomp serves no {metric}"
        known |= set(served[metric])
        for label, how, value in re.findall(r'(\w+)(=~|=|!=|!~)"([^"]*)"', braces):
            if label == "instance":
                continue
            values = served[metric][label]
            chosen = value.split("|") if "~" in how else [value]
            assert set(chosen) <= values, f"{metric} has no {label}={value}, but {values}"
    for labels in re.findall(r"\b(?:by|without|on|ignoring|group_left) \(([^)]*)\)", query):
        assert set(re.findall(r"\w+", labels)) <= known


def test_every_metric_is_on_the_dashboard(served: dict[str, dict[str, set[str]]]) -> None:
    shown = {metric for name in QUERIES if name.startswith("panel") for metric, _ in named(QUERIES[name])}
    assert shown == set(served)


@pytest.mark.parametrize("title", PANELS)
def test_a_panel_says_what_it_shows_and_where_from(title: str, served: dict[str, dict[str, set[str]]]) -> None:
    panel = PANELS[title]
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["description"].endswith(".")
    assert panel["datasource"] == source
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == source
        known = {"instance"}.union(*(served[metric] for metric, _ in named(target["expr"])))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known
        assert all('instance=~"$instance"' in braces for _, braces in named(target["expr"]))


def test_the_dashboard_imports_as_it_is() -> None:
    """It asks for no input but its variables, its panels have numbers of their own, and none lies upon another."""
    assert "__inputs" not in DASHBOARD
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert {name for name in used if not name.startswith("__")} == set(variables)
    panels = DASHBOARD["panels"]
    assert len(PANELS) == len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_alerts_say_how_bad_it_is_what_happens_and_what_to_do() -> None:
    k8s_schemas.check(ALERTS)
    assert len(RULES) == sum(len(group["rules"]) for group in ALERTS["spec"]["groups"])
    for name, rule in RULES.items():
        assert name.startswith("Hvdcomp")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["for"]
    with pytest.raises(jsonschema.ValidationError, match="forr"):
        k8s_schemas.check({**ALERTS, "spec": {"groups": [{"name": "a", "rules": [{"expr": "up", "forr": "5m"}]}]}})


def test_the_line_of_the_manual_makes_a_file_of_rules() -> None:
    page = (FOLDER.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ *(sed .* k8s/monitoring/alerts\.yaml)", page, re.MULTILINE)
    done = subprocess.run(command, shell=True, cwd=FOLDER.parents[1], capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout) == ALERTS["spec"]


@PROMTOOL
def test_prometheus_reads_all_queries(tmp_path: Path) -> None:
    variables = {"$__rate_interval": "5m", "$instance": ".*"}
    rules = []
    for index, query in enumerate(QUERIES.values()):
        for name, value in variables.items():
            query = query.replace(name, value)
        rules.append({"record": f"query:{index}", "expr": query})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


CASES = yaml.safe_load((FOLDER.parents[1] / "tests" / "data" / "alerts.yaml").read_text())


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == set(RULES)


@PROMTOOL
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(ALERTS["spec"]))
    tests = []
    for name, case in CASES.items():
        series = [
            {"series": f'{metric}{{instance="a",{labels or "}"}', "values": values}
            for one, values in case["series"].items()
            for metric, _, labels in [one.partition("{")]
        ]
        rule = RULES[name]
        fired = {
            "exp_labels": {"instance": "a", **rule["labels"]},
            "exp_annotations": {
                key: text.replace("{{ $labels.instance }}", "a") for key, text in rule["annotations"].items()
            },
        }
        checks = [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [fired] if fires else []}
            for minute, fires in case["when"].items()
        ]
        tests.append({"interval": "1m", "input_series": series, "alert_rule_test": checks})
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Pods of trainings, with the labels that operators and Kubernetes give them.
LABELS = {
    "worker 0": {"training.kubeflow.org/job-name": "a", "training.kubeflow.org/job-role": "worker"}
    | {"training.kubeflow.org/replica-index": "0"},
    "worker 1": {"training.kubeflow.org/job-name": "a", "training.kubeflow.org/job-role": "worker"}
    | {"training.kubeflow.org/replica-index": "1"},
    "launcher": {"training.kubeflow.org/job-name": "a", "training.kubeflow.org/job-role": "launcher"},
    "node 0": {"jobset.sigs.k8s.io/jobset-name": "a", "batch.kubernetes.io/job-completion-index": "0"},
    "node 1": {"jobset.sigs.k8s.io/jobset-name": "a", "batch.kubernetes.io/job-completion-index": "1"},
    "other": {"app": "web", "batch.kubernetes.io/job-completion-index": "0"},
}


def chosen(selector: dict[str, Any]) -> set[str]:
    """The pods of LABELS that a selector chooses."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(one["operator"] == "Exists" for one in selector.get("matchExpressions", ()))
    keys = [one["key"] for one in selector.get("matchExpressions", ())]
    wanted = selector.get("matchLabels", {})
    return {
        name
        for name, labels in LABELS.items()
        if wanted.items() <= labels.items() and all(key in labels for key in keys)
    }


def test_rank_0_alone_is_scraped() -> None:
    monitors = {one["metadata"]["name"]: one for one in BUILT if one["kind"] == "PodMonitor"}
    for one in monitors.values():
        k8s_schemas.check(one)
        assert one["spec"]["podMetricsEndpoints"] == [{"port": "metrics"}]
    assert {name: chosen(one["spec"]["selector"]) for name, one in monitors.items()} == {
        "hvdcomp-mpijob": {"worker 0"},
        "hvdcomp-jobset": {"node 0"},
    }


def test_ranks_reach_each_other_and_the_monitoring_the_metrics_alone() -> None:
    policies = {one["metadata"]["name"]: one for one in BUILT if one["kind"] == "NetworkPolicy"}
    of = {"hvdcomp-mpijob": {"worker 0", "worker 1", "launcher"}, "hvdcomp-jobset": {"node 0", "node 1"}}
    assert set(policies) == set(of)
    for name, policy in policies.items():
        k8s_schemas.check_with_client("V1NetworkPolicy", policy)
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        assert chosen(spec["podSelector"]) == of[name]
        ranks, monitoring = spec["ingress"]
        assert "ports" not in ranks
        (own,), (other,) = ranks["from"], monitoring["from"]
        assert set(own) == {"podSelector"}
        assert chosen(own["podSelector"]) == of[name]
        assert set(other) == {"namespaceSelector"}
        assert monitoring["ports"] == [{"port": "metrics", "protocol": "TCP"}]


def test_the_pods_have_the_port_of_that_name() -> None:
    worker = JOBS["metrics"]["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    for one in (worker, pod("jobset"), pod("trainer")):
        assert "metrics" in [port["name"] for port in one["containers"][0]["ports"]]


def test_grafana_s_sidecar_finds_the_dashboard() -> None:
    (config,) = (one for one in BUILT if one["kind"] == "ConfigMap")
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(config["data"]["dashboard.json"]) == DASHBOARD
