"""Dashboard, rules and alerts: they query only exported metrics, and every alert is documented."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitoring.generated_file import write_or_check
from service.metrics.recorder import Metrics
from tests.ops.deployment import ROOT, read_yaml
from tests.ops.observations import observe_everything
from tests.ops.questions import DASHBOARDS, MODEL_VARIABLE, RULE_FILES, Selection, panels, questions, rules, selections

PROMETHEUS = read_yaml("monitoring/prometheus.yml")
COMPOSE = read_yaml("docker-compose.yml")
ALERTS = [rule for rule in rules() if "alert" in rule]


@pytest.fixture
def series(metrics: Metrics) -> dict[str, list[dict[str, str]]]:
    """Return the labels by name of every series of a complete scrape, with those that Prometheus adds."""
    observe_everything(metrics)
    (job,) = PROMETHEUS["scrape_configs"]
    target = {"job": job["job_name"], "instance": ""}
    alert = {"model_name": "", "alertname": "", "alertstate": "firing"}
    found: dict[str, list[dict[str, str]]] = {"up": [target], "ALERTS": [alert]}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels | target)
    for rule in rules():
        if "record" in rule:
            found.setdefault(rule["record"], []).extend(_recorded(rule, found))
    return found


def _recorded(rule: dict[str, Any], known: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    """Return the series of a recording rule, from the first metric that it reads."""
    read = selections(rule["expr"])[0]
    kept = read.groupings or {label for labels in known[read.metric] for label in labels} - {"le"}
    return [
        {label: value for label, value in labels.items() if label in kept} | rule.get("labels", {})
        for labels in known[read.metric]
        if read.means(labels)
    ]


@pytest.mark.parametrize("module", ["monitoring.dashboard", "monitoring.metrics_page", "monitoring.prometheus_rule"])
def test_generated_files_are_current(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr


def test_an_outdated_generated_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert write_or_check(page, "new", command="python -m page", argv=[]) == 0
    assert write_or_check(page, "new", command="python -m page", argv=["--check"]) == 0
    assert write_or_check(page, "newer", command="python -m page", argv=["--check"]) == 1
    assert page.read_text() == "new"
    assert "`python -m page`" in capsys.readouterr().err


# Queries and the series that they select.


def test_every_query_selects_an_exported_series(series: dict[str, list[dict[str, str]]]) -> None:
    asked = questions()
    assert len(asked) > 100
    for expr in asked:
        for selection in selections(expr):
            _check(selection, series, expr)


def _check(selection: Selection, series: dict[str, list[dict[str, str]]], expr: str) -> None:
    assert selection.metric in series, f"{expr}: there is no {selection.metric}"
    candidates = series[selection.metric]
    labels = set().union(*candidates)
    assert selection.groupings <= labels, f"{expr}: {selection.metric} has the labels {labels}"
    assert any(map(selection.means, candidates)), f"{expr}: no series of {selection.metric} meets {selection.matchers}"


@pytest.mark.parametrize(
    "expr",
    [
        "llm_no_such_thing",
        "sum by (colour) (rate(llm_generation_tokens_total[5m]))",
        'llm_engine_state{state="asleep"}',
        'llm_request_failures_total{status=~"6.."}',
        'up{job="other"}',
    ],
)
def test_a_query_without_series_is_detected(series: dict[str, list[dict[str, str]]], expr: str) -> None:
    (selection,) = selections(expr)
    with pytest.raises(AssertionError):
        _check(selection, series, expr)


def test_sums_of_histograms_are_divided_by_their_counts() -> None:
    for expr in questions():
        for selection in selections(expr):
            if selection.metric.endswith("_seconds_sum"):
                count = selection.metric.removesuffix("_sum") + "_count"
                tree = promql_parser.parse(expr.replace("$__rate_interval", "1m"))
                assert isinstance(tree, promql_parser.BinaryExpr)
                assert [each.metric for each in selections(tree.lhs.prettify())] == [selection.metric]
                assert [each.metric for each in selections(tree.rhs.prettify())] == [count]


def test_queries_made_for_vllm_select_series(series: dict[str, list[dict[str, str]]]) -> None:
    # Queries of vLLM's dashboard, KEDA's vLLM example and llm-d's endpoint picker.
    for expr in (
        'histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name="tales"}[1m])))',
        'vllm:num_requests_waiting{model_name="tales"}',
        'sum by(finished_reason) (increase(vllm:request_success_total{model_name="tales"}[1m]))',
        "vllm:kv_cache_usage_perc",
        'vllm:cache_config_info{block_size="16", num_gpu_blocks="64"}',
    ):
        for selection in selections(expr):
            _check(selection, series, expr)


# Prometheus.


def test_prometheus_scrapes_both_variants_of_the_service() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    ((target,),) = [config["targets"] for config in job["static_configs"]]
    host, port = target.split(":")
    cpu, gpu = COMPOSE["services"]["kvasir"], COMPOSE["services"]["kvasir-gpu"]
    assert host == "kvasir"
    assert gpu["networks"]["default"]["aliases"] == [host]
    assert cpu["environment"]["KVASIR_PORT"] == gpu["environment"]["KVASIR_PORT"] == port
    assert "metrics_path" not in job, "the service answers at Prometheus' default, /metrics"


def test_prometheus_reads_its_rules_where_they_are_mounted() -> None:
    mounts = {mount["source"]: mount["target"] for mount in COMPOSE["services"]["prometheus"]["volumes"]}
    config = mounts["./monitoring/prometheus.yml"]
    assert f"--config.file={config}" in COMPOSE["services"]["prometheus"]["command"]
    assert PROMETHEUS["rule_files"] == ["rules/*.yml"]
    assert mounts["./monitoring/rules"] == str(Path(config).parent / "rules")
    assert len(RULE_FILES) == 2


def test_prometheus_sends_alerts_to_the_alertmanager_of_compose() -> None:
    (manager,) = PROMETHEUS["alerting"]["alertmanagers"]
    ((target,),) = [config["targets"] for config in manager["static_configs"]]
    host, port = target.split(":")
    service = COMPOSE["services"][host]
    assert service["ports"][0].endswith(f":{port}")
    mounts = {mount["source"]: mount["target"] for mount in service["volumes"]}
    assert f"--config.file={mounts['./deploy/alertmanager.yml']}" in service["command"]


def test_rule_names_are_unique_and_follow_the_convention() -> None:
    recorded = [(rule["record"], str(rule.get("labels"))) for rule in rules() if "record" in rule]
    alerting = [rule["alert"] for rule in ALERTS]
    assert len(set(recorded)) == len(recorded)
    assert len(set(alerting)) == len(alerting)
    for record, _ in recorded:
        assert re.fullmatch(r"model(_le|_slo)?:llm_[a-z0-9_]+:(rate5m|ratio(5m|30m|1h|6h)|quantile5m|max)", record)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_alerts_have_a_severity_and_a_documented_runbook(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert all(len(text) > 20 for text in alert["annotations"].values())
    page, _, anchor = alert["annotations"]["runbook"].rpartition(" ")[2].partition("#")
    assert anchor == name.lower()
    assert f"\n### {name}\n" in (ROOT / page).read_text()


def test_every_alert_fires_in_a_rule_test() -> None:
    fired = set()
    files = ("monitoring/rule_tests/alerts.yml", "monitoring/rule_tests/stalled.yml")
    for case in (case for file in files for case in read_yaml(file)["tests"]):
        for question in case["promql_expr_test"]:
            for sample in question["exp_samples"]:
                fired |= set(re.findall(r'alertname="(\w+)"', sample["labels"]))
    assert fired == {alert["alert"] for alert in ALERTS}


def test_documented_alerts_exist() -> None:
    explained = set(re.findall(r"^### (Kvasir\w+)$", (ROOT / "docs" / "monitoring.md").read_text(), re.MULTILINE))
    assert explained == {alert["alert"] for alert in ALERTS}


# Grafana.


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_have_descriptions_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = {(place["x"] + column, place["y"] + line) for column in range(place["w"]) for line in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles)
    for panel in panels(dashboard):
        assert panel["description"].endswith(".")
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["noValue"]
        assert defaults["unit"] != "none" or panel["type"] in ("stat", "state-timeline"), "numbers have a unit"
        assert panel["targets"]
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_query_the_chosen_model_and_data_source(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert set(variables) == {"DS_PROMETHEUS", "model_name"}
    for panel in panels(dashboard):
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${DS_PROMETHEUS}"
            for selection in selections(target["expr"]):
                values = [matcher.value for matcher in selection.matchers if matcher.label == "model_name"]
                assert values in ([MODEL_VARIABLE], [MODEL_VARIABLE + "|"]), "the model, or an alert of no model"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    mounts = {mount["source"]: mount["target"] for mount in COMPOSE["services"]["grafana"]["volumes"]}
    (source,) = read_yaml("monitoring/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert COMPOSE["services"]["prometheus"]["ports"][0].endswith(":9090")
    assert source["isDefault"] is True
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    (provider,) = read_yaml("monitoring/grafana/provisioning/dashboards/kvasir.yml")["providers"]
    assert provider["options"]["path"] == mounts["./monitoring/grafana/dashboards"]
    assert mounts["./monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/kvasir.json"


# Checks with a real Prometheus, which need a running service and Debian's prometheus package.


@pytest.mark.parametrize("arguments", [[], ["127.0.0.1:8000"], ["http://127.0.0.1:8000", "more"]])
def test_invalid_arguments_of_the_check_print_its_usage(arguments: list[str]) -> None:
    done = subprocess.run(
        ["bash", "monitoring/check.sh", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 2
    assert done.stderr == "usage: monitoring/check.sh http://HOST:PORT\n"
