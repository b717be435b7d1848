"""Dockerfile and docker-compose.yml: they match their schema, the repository, the settings and each other."""

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema.validators import validator_for
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from model.kernels.build import LEVELS, library_name
from service.cli import healthcheck
from service.config.flags import PREFIX
from service.config.settings import ServeSettings, read_settings
from service.supervisor.supervisor import API_CLOSE_SECONDS
from tests.ops.deployment import ROOT, compose_variables, dockerfile, read_yaml, seconds, with_defaults

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE = read_yaml("docker-compose.yml")
SERVICES: dict[str, Any] = COMPOSE["services"]
KVASIR = {"kvasir", "kvasir-gpu"}
DOCKERFILE = dockerfile()


def instructions(name: str, stage: str) -> list[Any]:
    return [instruction for instruction in DOCKERFILE if (instruction.name, instruction.stage) == (name, stage)]


def environment(stage: str) -> dict[str, str]:
    return {name: value for each in instructions("ENV", stage) for name, value in each.pairs().items()}


# Compose.


def test_compose_file_conforms_to_the_compose_specification() -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    validator = validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []


def test_compose_up_without_a_profile_starts_the_cpu_service() -> None:
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text().splitlines()
    profiles = {name: service["profiles"] for name, service in SERVICES.items()}
    assert profiles == {
        "kvasir": ["cpu"],
        "kvasir-gpu": ["gpu"],
        "prometheus": ["monitoring"],
        "alertmanager": ["monitoring"],
        "grafana": ["monitoring"],
        "loadtest": ["loadtest"],
    }


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_minimal_privileges_and_limits(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["restart"] == ("no" if name == "loadtest" else "unless-stopped")
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert "privileged" not in service
    for port in service.get("ports", []):
        assert with_defaults(port).startswith("127.0.0.1:"), "published beyond this machine"
    for volume in service["volumes"]:
        assert volume["type"] == "volume" or volume["read_only"] is True


@pytest.mark.parametrize("name", sorted(KVASIR | {"loadtest"}))
def test_kvasir_containers_run_as_an_unprivileged_user(name: str) -> None:
    assert SERVICES[name]["user"] == "10001:10001"
    assert [tmpfs.partition(":")[0] for tmpfs in SERVICES[name]["tmpfs"]] == ["/tmp"]


@pytest.mark.parametrize("name", sorted(KVASIR))
def test_compose_kills_only_after_the_drain(name: str) -> None:
    service = SERVICES[name]
    drain = float(service["environment"]["KVASIR_DRAIN_SECONDS"])
    assert drain == ServeSettings.model_fields["drain_seconds"].default
    assert seconds(service["stop_grace_period"]) >= drain + API_CLOSE_SECONDS + 5
    assert service["shm_size"]


@pytest.mark.parametrize("name", sorted(KVASIR))
def test_the_checkpoint_is_mounted_where_the_service_looks(name: str) -> None:
    service = SERVICES[name]
    (mount,) = [volume for volume in service["volumes"] if volume["type"] == "bind"]
    assert mount["read_only"] is True
    assert mount["bind"] == {"create_host_path": False}
    assert mount["target"] == service["environment"]["KVASIR_CHECKPOINT"]
    assert mount["target"] == environment("service")["KVASIR_CHECKPOINT"]


def test_only_the_gpu_service_reserves_a_gpu() -> None:
    reservations = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in SERVICES.items()
        if "reservations" in service["deploy"]["resources"]
    }
    assert reservations == {"kvasir-gpu": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
    assert {name: SERVICES[name]["environment"]["KVASIR_DEVICE"] for name in KVASIR} == {
        "kvasir": "cpu",
        "kvasir-gpu": "cuda",
    }
    assert SERVICES["kvasir-gpu"]["networks"]["default"]["aliases"] == ["kvasir"]


def test_every_setting_reaches_the_container() -> None:
    """Except for two paths: a file of keys is a secret (deploy/compose.api-keys.yml), and the image has its cache."""
    known = {PREFIX + name.upper() for name in ServeSettings.model_fields}
    passed = {name for service in KVASIR for name in SERVICES[service]["environment"]}
    baked = {name for name in environment("service") if name.startswith(PREFIX)}
    assert known - passed == {"KVASIR_API_KEYS_FILE", "KVASIR_CACHE_DIR"}
    assert passed | baked <= known


def test_the_containers_environment_gives_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**environment("service"), **SERVICES["kvasir"]["environment"]}.items():
        if value is not None:
            monkeypatch.setenv(name, str(value))
    settings = read_settings(ServeSettings, [], command="serve", summary="")
    assert (settings.host, settings.port, str(settings.checkpoint)) == ("0.0.0.0", 8000, "/checkpoint")


def test_third_party_images_are_pinned() -> None:
    for service in SERVICES.values():
        if "build" not in service:
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]


def test_volumes_that_are_used_are_declared() -> None:
    used = {volume["source"] for service in SERVICES.values() for volume in service["volumes"]}
    named = {source for source in used if not source.startswith((".", "$"))}
    assert named == set(COMPOSE["volumes"])


def test_every_path_that_compose_names_exists() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            if volume["type"] == "bind":
                path = ROOT / with_defaults(volume["source"])
                assert path.exists(), f"{path} does not exist"
        if "build" in service:
            assert (ROOT / service["build"]["context"] / "Dockerfile").is_file()
            assert service["build"]["target"] in {instruction.stage for instruction in DOCKERFILE}


def test_the_files_work_with_the_documented_docker_versions() -> None:
    """docs/operations.md requires Docker Engine 20.10, Podman 4.3 and Compose 2.20."""
    text = (ROOT / "Dockerfile").read_text()
    assert "# syntax" not in text, "names an image of Docker's registry"
    assert "--start-interval" not in text, "Docker Engine 25"
    assert not [each for each in DOCKERFILE if each.name == "FROM" and "TORCH" in each.value], (
        "Podman 4.3 skips stages that are named by an argument"
    )
    assert "start_interval" not in (ROOT / "docker-compose.yml").read_text(), "Docker Engine 25"
    page = (ROOT / "docs" / "operations.md").read_text()
    for version in ("Docker Engine 20.10", "Podman 4.3", "Compose 2.20"):
        assert version in page


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for name, default in compose_variables().items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert default is None or f"`{default}`" in row


# Dockerfile.


def test_the_service_starts_without_a_shell_as_an_unprivileged_user() -> None:
    (command,) = instructions("CMD", "service")
    assert command.exec_form() == ["kvasir", "serve"]
    assert "kvasir" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for stage in ("service", "loadtest"):
        assert instructions("USER", stage)[-1].value == "10001:10001"


def test_only_the_build_and_service_stages_install_debian_packages() -> None:
    for instruction in DOCKERFILE:
        # Except for the native kernels, where the wheel is built, and for GPUs: Triton needs a compiler at
        # the first launch.
        assert "apt-get" not in instruction.value or instruction.stage in ("build", "service")
        if "pip install" in instruction.value and "--no-deps" not in instruction.value:
            assert instruction.value.count("pip install") == instruction.value.count("--only-binary=:all:")


def test_dependencies_are_installed_before_sources_are_copied() -> None:
    order = [f"{each.name} {each.value}" for each in DOCKERFILE if each.stage == "build"]
    installed = next(i for i, text in enumerate(order) if "requirements/serve.txt" in text)
    first_source = next(i for i, text in enumerate(order) if text.startswith("COPY model"))
    assert installed < first_source
    assert "COPY requirements requirements" in order[:installed]
    assert order.index("RUN python -m model.kernels.build") < order.index("COPY service service"), "compiled once"


def test_the_wheel_contains_the_native_kernels() -> None:
    """The native kernels are built before the wheel, and listed as its package data."""
    build = [each.value for each in DOCKERFILE if each.stage == "build"]
    built = next(i for i, text in enumerate(build) if text == "python -m model.kernels.build")
    assert any("pip wheel" in text for text in build[built:])
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert sent.index("model/kernels/built") > sent.index("!model"), "kernels built on this machine are not copied"
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["model.kernels"]
    assert {f"built/*{Path(library_name(LEVELS[0])).suffix}", "src/*.cpp", "src/*.h"} == set(data)


def test_copied_paths_exist_and_are_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    for instruction in DOCKERFILE:
        if instruction.name == "COPY" and "--from" not in instruction.value:
            for source in instruction.value.split()[:-1]:
                assert source.split("/")[0] in sent, f"{source} is kept from the build by .dockerignore"
                assert (ROOT / source).exists(), f"{source} does not exist"


def test_the_base_image_is_pinned_and_its_python_supported() -> None:
    arguments = {name: value for each in instructions("ARG", "") for name, value in each.pairs().items()}
    pinned = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+@sha256:[0-9a-f]{64}", arguments["BASE_IMAGE"])
    assert pinned is not None
    assert Version(pinned[1]) in SpecifierSet(PROJECT["requires-python"])


def test_labels_have_the_version_of_the_package() -> None:
    arguments = [each.value for each in instructions("ARG", "service")]
    (labels,) = instructions("LABEL", "service")
    assert f"VERSION={PROJECT['version']}" in arguments
    assert labels.pairs()["org.opencontainers.image.licenses"] == PROJECT["license"]
    assert {value[1:] for value in labels.pairs().values() if value.startswith("$")} <= {
        name.partition("=")[0] for name in arguments
    }


def test_pip_checks_the_hashes_of_all_packages_but_torch() -> None:
    for each in DOCKERFILE:
        for part in re.findall(r"pip install [^&]*", each.value):
            assert "--require-hashes --no-deps" in part or part.split()[-1] in (
                "requirements/torch.txt",
                "/wheels/*.whl",
            )


def test_torch_is_installed_from_an_explicit_index() -> None:
    """PyPI's Linux wheel would bring CUDA into the CPU image."""
    (install,) = [each.value for each in DOCKERFILE if "download.pytorch.org" in each.value]
    builds = dict(re.findall(r"(\w+)\) build=(\w+) ;;", install))
    assert builds.keys() == {SERVICES[name]["build"]["args"]["TORCH_VARIANT"] for name in KVASIR}
    assert builds["cpu"] == "cpu"
    assert re.fullmatch(r"cu\d+", builds["cuda"])
    assert (
        '--index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/$build}" --requirement requirements/t' in install
    )
    assert {"ARG TORCH_VARIANT=cpu", "ARG TORCH_INDEX"} <= {
        f"ARG {each.value}" for each in instructions("ARG", "build")
    }
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "requirements/torch.txt").read_text(), re.M)


def test_the_default_target_is_the_service() -> None:
    assert DOCKERFILE[-1].stage == "service"


def test_bytecode_is_compiled_only_for_modules_imported_at_start() -> None:
    """All bytecode would be 115 MB. Without any, every start would compile, since the root file system is read-only."""
    build = [each.value for each in DOCKERFILE if each.stage == "build" and each.name == "RUN"]
    installs = [part for value in build for part in value.split("&&") if "pip install" in part]
    assert all("--no-compile" in part for part in installs)
    (step,) = (each for each in build if "compileall" in each)
    (imported,) = re.findall(r'python -c "import ([\w., ]+)"$', step)
    modules = imported.split(", ")
    assert {"service.cli.serve", "service.worker.worker", "service.worker.engine_factory"} <= set(modules)
    assert "python -m compileall -q model service" in step


# The load test's image.


def locust_options(*commands: Sequence[str]) -> list[dict[str, Any]]:
    """Return what locust and the locustfile parse for each command, in a process that locust may monkey-patch."""
    code = (
        "import json, sys; from locust.argument_parser import get_parser; import loadtest.locustfile; "
        "print(json.dumps([vars(get_parser().parse_args(c)) for c in json.loads(sys.argv[1])], default=str))"
    )
    variables = {name: value for name, value in environment("loadtest").items() if name.startswith("LOCUST_")}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        env={"PATH": "", "PYTHONPATH": str(ROOT)} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    options: list[dict[str, Any]] = json.loads(done.stdout)
    return options


def test_an_argument_of_the_load_test_replaces_one_default() -> None:
    (entrypoint,) = instructions("ENTRYPOINT", "loadtest")
    assert entrypoint.exec_form() == ["python", "-m", "loadtest"]
    assert instructions("CMD", "loadtest") == [], "arguments of `docker run` would replace the whole command"
    changes: list[tuple[str, tuple[str, str], object]] = [
        ("num_users", ("--users", "64"), 64),
        ("run_time", ("--run-time", "2m"), 120),
        ("spawn_rate", ("--spawn-rate", "2"), 2.0),
        ("host", ("--host", "http://127.0.0.1:9"), "http://127.0.0.1:9"),
        ("results", ("--results", "elsewhere"), "elsewhere"),
    ]
    defaults, *changed = locust_options((), *(arguments for _, arguments, _ in changes))
    expected = {
        "host": "http://kvasir:8000",
        "num_users": 16,
        "spawn_rate": 16.0,
        "run_time": 60,
        "headless": True,
        "results": "/results",
    }
    assert {name: defaults[name] for name in expected} == expected
    assert changed == [defaults | {name: value} for name, _, value in changes]


def test_the_load_test_runs_without_serving_packages() -> None:
    """The image of the load test does not contain the packages that only serving needs."""
    code = "import sys; sys.modules.update(dict.fromkeys(('litserve', 'pydantic', 'service', 'model'))); "
    code += "import loadtest.locustfile, loadtest.sweep.command, loadtest.sweep.page; "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    copied = [each.value for each in instructions("COPY", "loadtest")]
    assert "loadtest /srv/loadtest" in copied


def test_compose_up_runs_the_sweep_and_keeps_its_report_in_the_volume() -> None:
    loadtest = SERVICES["loadtest"]
    assert loadtest["command"] == ["sweep", "--url", "http://kvasir:8000", "--out", "/results"]
    assert [(volume["source"], volume["target"]) for volume in loadtest["volumes"]] == [("results", "/results")]


@pytest.mark.parametrize("name", [*sorted(KVASIR), "loadtest"])
def test_the_api_key_reaches_the_health_check_and_the_load_test(name: str) -> None:
    assert SERVICES[name]["environment"]["KVASIR_API_KEY"] is None, "taken from the environment of compose"


# The health check.


def check_health(**variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the image's HEALTHCHECK with these environment variables."""
    (instruction,) = instructions("HEALTHCHECK", "service")
    program, *arguments = instruction.exec_form()
    assert program == "python"
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@contextmanager
def answering(status: int, *, key: str | None = None) -> Iterator[int]:
    """Run a server whose /ready returns this status, or 401 without the key; yield its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = key is None or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response((status if is_known else 401) if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_succeeds_if_the_service_is_ready(host: str, status: int, healthy: bool) -> None:
    """The check uses the port of the settings, and an address that accepts connections."""
    with answering(status) as port:
        done = check_health(KVASIR_HOST=host, KVASIR_PORT=str(port))
    assert (done.returncode == 0) is healthy
    assert done.stdout == ("" if healthy else "GET /ready: status 503, the service is not ready\n")


def test_the_health_check_sends_the_api_key() -> None:
    with answering(200, key="sk-Secret") as port:
        done = check_health(KVASIR_PORT=str(port), KVASIR_API_KEY="sk-Secret")
        without = check_health(KVASIR_PORT=str(port))
    assert done.returncode == 0
    assert without.returncode == 1
    assert "401; with --no-open-probes" in without.stdout


def test_a_closed_port_is_unhealthy() -> None:
    with answering(200) as port:
        pass
    done = check_health(KVASIR_PORT=str(port))
    assert done.returncode == 1
    assert "Connection refused" in done.stdout
    assert done.stderr == ""


def test_the_health_check_has_the_defaults_of_the_settings() -> None:
    defaults = ServeSettings.model_fields
    assert defaults["host"].default == healthcheck.DEFAULT_HOST
    assert defaults["port"].default == int(healthcheck.DEFAULT_PORT)


def test_the_health_check_imports_no_slow_modules() -> None:
    code = "import sys, service.cli.healthcheck; print(*{name.partition('.')[0] for name in sys.modules})"
    # -S: the finder of an editable installation imports many modules.
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"http", "email", "ssl", "urllib", "pydantic", "torch"} & set(done.stdout.split())


@pytest.mark.parametrize("name", sorted(KVASIR))
def test_only_the_image_defines_a_health_check(name: str) -> None:
    """A second health check in docker-compose.yml could differ."""
    assert "healthcheck" not in SERVICES[name]
    (instruction,) = instructions("HEALTHCHECK", "service")
    timeout = re.search(r"--timeout=(\d+)s", instruction.value)
    assert timeout
    assert float(timeout[1]) > healthcheck.TIMEOUT_SECONDS
