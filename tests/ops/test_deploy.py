"""Files of deploy/: they match the schemas of Kubernetes and its extensions, the settings and the metrics."""

import ast
import json
import lzma
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from service.config.flags import PREFIX
from service.config.settings import ServeSettings
from service.metrics.definitions import FAMILIES
from service.metrics.definitions import PREFIX as METRIC_PREFIX
from service.protocol.completions import CompletionRequest
from service.supervisor.supervisor import API_CLOSE_SECONDS
from tests.ops.deployment import ROOT, read_yaml
from tests.ops.questions import rules, selections

KUBERNETES = ROOT / "deploy/kubernetes"
PAGE = (ROOT / "docs/kubernetes.md").read_text()
SETTINGS = {PREFIX + name.upper() for name in ServeSettings.model_fields}
LABELS = {"app.kubernetes.io/name": "kvasir"}


def manifests(path: Path) -> list[Path]:
    return sorted(
        each for each in path.rglob("*.yaml") if each.name not in ("kustomization.yaml", "adapter-values.yaml")
    )


def load(name: str) -> Any:
    return read_yaml(f"deploy/kubernetes/{name}")


@cache
def schemas() -> dict[str, Any]:
    """Return `kinds`, a JSON schema for each "apiVersion kind", the `$defs` that they share, and their `sources`.

    Unknown fields are errors. The texts and Kubernetes' own keywords, which validate nothing here, are left out.
    """
    schemas: dict[str, Any] = json.loads(lzma.decompress((ROOT / "tests/data/kubernetes_schemas.json.xz").read_bytes()))
    return schemas


def violations(manifest: dict[str, Any]) -> list[str]:
    schema = schemas()["kinds"][f"{manifest['apiVersion']} {manifest['kind']}"]
    validator = Draft202012Validator({"$defs": schemas()["$defs"], "allOf": [schema]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@pytest.mark.parametrize("path", manifests(KUBERNETES), ids=lambda path: path.stem)
def test_manifests_conform_to_the_schemas_of_kubernetes_and_its_extensions(path: Path) -> None:
    assert violations(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("base/deployment.yaml", ("spec", "template", "spec", "containers", 0, "readiness"), {}),
        ("base/deployment.yaml", ("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "http"),
        ("base/network-policy.yaml", ("spec", "egres"), []),
        ("inference-pool/pool.yaml", ("spec", "targetPorts", 0, "number"), 0),
        ("autoscaling-keda/scaled-object.yaml", ("spec", "triggers", 0, "metadata", "threshold"), 4),
        ("monitoring/service-monitor.yaml", ("spec", "endpoints", 0, "scrapeTimeout"), "soon"),
        ("kserve/llm-inference-service.yaml", ("spec", "template", "container"), []),
    ],
)
def test_the_schemas_refuse_a_wrong_field(name: str, keys: tuple[str | int, ...], value: object) -> None:
    manifest = parent = load(name)
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = value
    assert violations(manifest)


def test_every_kustomization_lists_the_files_beside_it() -> None:
    kustomizations = sorted(KUBERNETES.rglob("kustomization.yaml"))
    assert len(kustomizations) == 6
    for path in kustomizations:
        kustomization = yaml.safe_load(path.read_text())
        listed = {path.parent / name for name in kustomization["resources"] + kustomization.get("components", [])}
        assert all(each.exists() for each in listed)
        assert set(manifests(path.parent)) <= listed


def containers() -> Iterator[dict[str, Any]]:
    yield from load("base/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    yield from load("kserve/llm-inference-service.yaml")["spec"]["template"]["containers"]


def pods() -> Iterator[dict[str, Any]]:
    yield load("base/deployment.yaml")["spec"]["template"]["spec"]
    yield load("kserve/llm-inference-service.yaml")["spec"]["template"]


def test_the_pod_that_copies_a_checkpoint_fits_the_example() -> None:
    (text,) = re.findall(r"<<'END'\n(.*?)^END$", PAGE, re.M | re.S)
    pod = yaml.safe_load(text)["spec"]
    deployment = load("base/deployment.yaml")
    deployment["spec"]["template"]["spec"] = pod
    assert violations(deployment) == []
    (container,) = pod["containers"]
    (image,) = load("example/kustomization.yaml")["images"]
    assert container["image"] == f"{image['newName']}:{image['newTag']}"
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == load("example/checkpoint.yaml")["metadata"]["name"]


def test_the_patch_for_a_gpu_changes_the_deployment() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    (patch,) = yaml.safe_load(text)["patches"]
    deployment = load(f"base/{patch['target']['kind'].lower()}.yaml")
    assert deployment["metadata"]["name"] == patch["target"]["name"]
    for step in yaml.safe_load(patch["patch"]):
        *keys, last = (key.replace("~1", "/") for key in step["path"].split("/")[1:])
        parent = deployment
        for key in keys:
            parent = parent[int(key)] if key.isdigit() else parent[key]
        assert (last in parent) == (step["op"] == "replace")
        parent[last] = step["value"]
    assert violations(deployment) == []
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] | {"nvidia.com/gpu": 1} == resources["limits"]


def test_kubernetes_kills_only_after_the_drain() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        drain = float({each["name"]: each.get("value") for each in container["env"]}["KVASIR_DRAIN_SECONDS"])
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= before + drain + API_CLOSE_SECONDS + 5


def test_pods_have_minimal_privileges_and_write_only_to_volumes() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        context = pod.get("securityContext", {}) | container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        for name, mount in mounts.items():
            assert mount.get("readOnly") is True or volumes[name]["emptyDir"]["sizeLimit"], name
        assert container["resources"]["limits"] == container["resources"]["requests"]


def test_only_liveness_accepts_a_service_that_is_not_ready() -> None:
    for container in containers():
        paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}


def test_variables_of_the_containers_are_settings() -> None:
    for container in containers():
        assert {each["name"] for each in container["env"]} <= SETTINGS
        for argument in container.get("args", []):
            name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
            assert name in ServeSettings.model_fields


def test_selectors_find_the_pods_and_the_service() -> None:
    template = load("base/deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    assert template.items() >= LABELS.items()
    assert template["llm-d.ai/engine-type"] == "vllm"
    port = load("base/service.yaml")["spec"]["ports"][0]
    for selector in (
        load("base/deployment.yaml")["spec"]["selector"]["matchLabels"],
        load("base/service.yaml")["spec"]["selector"],
        load("base/disruption-budget.yaml")["spec"]["selector"]["matchLabels"],
        load("base/network-policy.yaml")["spec"]["podSelector"]["matchLabels"],
        load("inference-pool/pool.yaml")["spec"]["selector"]["matchLabels"],
        load("monitoring/service-monitor.yaml")["spec"]["selector"]["matchLabels"],
    ):
        assert selector == LABELS
    monitor = load("monitoring/service-monitor.yaml")["spec"]
    assert load("base/service.yaml")["metadata"]["labels"][monitor["jobLabel"]] == "kvasir"
    assert monitor["endpoints"][0]["port"] == port["name"]
    assert load("inference-pool/pool.yaml")["spec"]["targetPorts"] == [{"number": port["port"]}]


def test_the_operator_gets_all_rules() -> None:
    groups = load("monitoring/prometheus-rule.yaml")["spec"]["groups"]
    assert [rule for group in groups for rule in group["rules"]] == list(rules())


def autoscaling_queries() -> list[str]:
    triggers = load("autoscaling-keda/scaled-object.yaml")["spec"]["triggers"]
    adapter = load("autoscaling-hpa/adapter-values.yaml")["rules"]["custom"]
    asked = [rule["metricsQuery"].replace("<<.LabelMatchers>>", 'job="kvasir"') for rule in adapter]
    return [
        *(trigger["metadata"]["query"] for trigger in triggers),
        *(query.replace("<<.GroupBy>>", "pod") for query in asked),
    ]


@pytest.mark.parametrize("query", autoscaling_queries())
def test_autoscalers_query_exported_series(query: str) -> None:
    (selection,) = selections(query)
    assert selection.metric.removeprefix(METRIC_PREFIX).removesuffix("_total") in FAMILIES


def test_the_autoscaler_reads_the_metrics_of_the_adapter() -> None:
    adapter = load("autoscaling-hpa/adapter-values.yaml")["rules"]["custom"]
    served = {rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0] for rule in adapter}
    metrics = load("autoscaling-hpa/autoscaler.yaml")["spec"]["metrics"]
    assert {metric["pods"]["metric"]["name"] for metric in metrics} == served


# Without Kubernetes.


def test_api_keys_reach_compose_as_a_secret() -> None:
    override = read_yaml("deploy/compose.api-keys.yml")
    schema = get_builtin_schema("vendor.compose-spec")
    assert [error.message for error in validator_for(schema)(schema).iter_errors(override)] == []
    assert override["services"].keys() == {"kvasir", "kvasir-gpu"}
    for service in override["services"].values():
        (secret,) = service["secrets"]
        assert service["environment"] == {"KVASIR_API_KEYS_FILE": f"/run/secrets/{secret}"}
        assert secret in override["secrets"]
        assert service["environment"].keys() <= SETTINGS


def test_a_plain_docker_run_has_the_protections_of_compose() -> None:
    script = (ROOT / "deploy/docker-run.sh").read_text()
    service = read_yaml("docker-compose.yml")["services"]["kvasir"]
    limits = service["deploy"]["resources"]["limits"]
    for option in (
        "--init",
        "--read-only",
        "--cap-drop ALL",
        f"--security-opt {service['security_opt'][0]}",
        f"--user {service['user']}",
        f"--tmpfs {service['tmpfs'][0]}",
        f"--shm-size {service['shm_size']}",
        f"--stop-timeout {service['stop_grace_period'].removesuffix('s')}",
        f"--pids-limit {limits['pids']}",
        '--publish "127.0.0.1:${PUBLISH_PORT:-8000}:8000"',
        ":/checkpoint:ro",
    ):
        assert option in script
    done = subprocess.run(["bash", "deploy/docker-run.sh"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


def test_systemd_stops_after_the_drain_and_does_not_restart_a_wrong_setting() -> None:
    unit = (ROOT / "deploy/systemd/kvasir.service").read_text()
    options = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w+=", line))
    drain = ServeSettings.model_fields["drain_seconds"].default
    assert all((ROOT / name).exists() for name in re.findall(r"docs/[a-z-]+\.md", unit))
    assert float(options["TimeoutStopSec"]) >= drain + API_CLOSE_SECONDS + 5
    assert options["RestartPreventExitStatus"] == "2"
    assert set(re.findall(rf"{PREFIX}\w+", unit)) <= SETTINGS


def test_alertmanager_routes_the_severities_that_the_alerts_have() -> None:
    config = read_yaml("deploy/alertmanager.yml")
    receivers = {receiver["name"] for receiver in config["receivers"]}
    routes = [config["route"], *config["route"]["routes"]]
    assert {route["receiver"] for route in routes} == receivers
    matched = set(re.findall(r'severity = "(\w+)"', json.dumps(config).replace('\\"', '"')))
    assert matched == {rule["labels"]["severity"] for rule in rules() if "alert" in rule}


def test_ray_serve_builds_the_application_with_settings_of_the_service() -> None:
    (application,) = read_yaml("deploy/ray/serve.yaml")["applications"]
    module, builder = application["import_path"].split(":")
    program = ast.parse((ROOT / f"deploy/ray/{module}.py").read_text())
    function = next(each for each in program.body if isinstance(each, ast.FunctionDef) and each.name == builder)
    keys = set(re.findall(r'arguments\.get\("(\w+)"', ast.unparse(function).replace("'", '"')))
    assert set(application["args"]) == keys
    flags = application["args"]["flags"].split()
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")} <= set(
        ServeSettings.model_fields
    )


def test_dynamos_engine_sends_flags_and_fields_of_the_service() -> None:
    text = (ROOT / "deploy/dynamo/kvasir_engine.py").read_text()
    flags = set(re.findall(r'"--([a-z-]+)"', text)) - {"pdeathsig"}
    assert flags == {"checkpoint", "port", "kv-events-endpoint"}
    assert {flag.replace("-", "_") for flag in flags} <= ServeSettings.model_fields.keys()
    fields = {name for names in re.findall(r"^_[A-Z]+ = (\(.*\))$", text, re.M) for name in ast.literal_eval(names)}
    assert len(fields) == 11
    assert fields | {"prompt", "stream", "return_token_ids"} <= CompletionRequest.model_fields.keys()
