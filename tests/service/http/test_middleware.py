"""API keys, open routes, and CORS."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from pydantic import SecretStr
from starlette.responses import Response
from starlette.testclient import TestClient

from service.api.openapi import openapi_document
from service.config.settings import ServeSettings
from service.http.api_keys import read_api_keys
from service.http.middleware import middlewares
from service.http.request_io import install_error_handlers, json_response
from service.protocol.errors import ApiError
from tests.service.echo import EchoChannel

KEY = "sk-alice-0123456789abcdef"
PAGE = "https://page.example"


@dataclasses.dataclass
class Guarded:
    """App with API keys, and the errors that its middleware has counted."""

    client: TestClient
    counted: list[ApiError]


def guarded(**settings: Any) -> Guarded:
    app, counted = FastAPI(openapi_url=None, docs_url=None, redoc_url=None), list[ApiError]()
    asked = ServeSettings(checkpoint=Path("c"), **{"api_keys": f"alice: {KEY}, bob: {KEY}2", **settings})
    middleware: list[tuple[Any, dict[str, Any]]] = [
        *middlewares(asked, read_api_keys(asked), counted.append, frozenset(), lambda scope: None)
    ]
    for kind, arguments in middleware:
        app.add_middleware(kind, **arguments)
    install_error_handlers(app, counted.append)

    async def show_key_name(request: Request) -> Response:
        return json_response({"name": getattr(request.state, "api_key_name", None)})

    for path in ("/v1/models", "/health", "/ready", "/metrics", "/", "/playground", "/openapi.json", "/version"):
        app.add_api_route(path, show_key_name, methods=["GET", "POST"])
    return Guarded(TestClient(app, raise_server_exceptions=False), counted)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_known_key_is_accepted_and_its_name_stored() -> None:
    server = guarded()
    for header, name in ((f"Bearer {KEY}", "alice"), (f"bearer   {KEY}2 ", "bob"), (f"BEARER {KEY}", "alice")):
        answer = server.client.get("/v1/models", headers={"authorization": header})
        assert (answer.status_code, answer.json()) == (200, {"name": name})
    assert server.counted == []


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")],
        [("authorization", f"Bearer {KEY}x")],
        [("authorization", f"Bearer {KEY[:-1]}")],
        [("authorization", "Bearer é".encode())],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
        [("api-key", KEY)],
    ],
)
def test_a_request_without_a_known_key_gets_401(
    headers: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    server = guarded()
    with caplog.at_level(logging.DEBUG):
        answers = [
            server.client.request(method, path, headers=headers)
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/models"), ("GET", "/nowhere"))
        ]
    for answer in answers:
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
        assert "sk-" not in answer.text
    assert [error.status for error in server.counted] == [401, 401, 401]
    assert "sk-" not in caplog.text


def test_a_log_line_has_the_name_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="service.http.middleware"):
        for path in ("/v1/models", "/v1/models/a%0aFORGED"):
            guarded().client.get(path, headers=bearer(KEY))
    assert "GET /v1/models: API key alice" in caplog.messages
    assert "GET /v1/models/a%0aFORGED: API key alice" in caplog.messages, "one line, as it came"
    assert KEY not in caplog.text


def test_probes_and_metrics_are_open_or_closed_by_setting_and_the_page_is_open() -> None:
    probes, metrics, page = {"/health", "/ready"}, {"/metrics"}, {"/", "/playground", "/openapi.json"}
    for settings, is_open in (
        ({}, page | probes | metrics),
        ({"open_probes": False}, page | metrics),
        ({"open_metrics": False}, page | probes),
    ):
        client = guarded(**settings).client
        paths = probes | metrics | page | {"/v1/models", "/version"}
        assert {path for path in paths if client.get(path).status_code == 200} == is_open
        assert {client.get(path, headers=bearer(KEY)).status_code for path in paths} == {200}


def test_a_server_without_keys_accepts_any_request() -> None:
    assert guarded(api_keys=None).client.get("/v1/models").json() == {"name": None}


# CORS: pages of another origin.


def preflight(server: Guarded, origin: str) -> Any:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    return server.client.options("/v1/models", headers=headers)


def test_cors_is_off_without_allowed_origins() -> None:
    server = guarded()
    assert preflight(server, PAGE).status_code == 401
    answer = server.client.get("/v1/models", headers={**bearer(KEY), "origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_origin_may_send_requests_and_read_exposed_headers() -> None:
    server = guarded(cors_origins=("https://Page.example/", "http://localhost:3000"))
    answer = preflight(server, PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    for key, status in ((KEY, 200), ("wrong", 401)):
        answer = server.client.post("/v1/models", headers={**bearer(key), "origin": PAGE})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert preflight(server, "https://other.example").status_code == 400
    other = server.client.get("/v1/models", headers={**bearer(KEY), "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_any_origin_may_be_allowed_and_never_with_credentials() -> None:
    server = guarded(cors_origins=("*",))
    answer = server.client.get("/v1/models", headers={**bearer(KEY), "origin": PAGE, "cookie": "a=b"})
    assert answer.headers["access-control-allow-origin"] == "*"
    for each in (answer, preflight(server, PAGE)):
        assert "access-control-allow-credentials" not in each.headers


# The routes of the real app, and the OpenAPI document.


@pytest.fixture
def settings(tiny_checkpoint: Path) -> ServeSettings:
    return ServeSettings(
        checkpoint=tiny_checkpoint, api_keys=SecretStr(f"alice: {KEY}"), model_alias=("gpt-x",), max_prompts=2
    )


def test_every_route_that_documents_a_401_needs_a_key(client: TestClient, queue: EchoChannel) -> None:
    paths = openapi_document()["paths"]
    documented = {path for path, operations in paths.items() for o in operations.values() if "401" in o["responses"]}
    assert documented == {path for path, o in paths.items() for each in o.values() if "security" in each}
    asking = {
        path
        for path, operations in paths.items()
        if {client.request(method, path.replace("{model_id}", "m")).status_code for method in operations} == {401}
    }
    assert documented - asking == {"/health", "/ready", "/metrics"}, "open by default, and closed by settings"
    assert asking <= documented
    assert queue.submits == []
    assert client.post("/v1/completions", json={"prompt": "abc"}, headers=bearer(KEY)).status_code == 200
    assert len(queue.submits) == 1


def test_requests_may_name_the_model_by_its_alias(client: TestClient) -> None:
    client.headers.update(bearer(KEY))
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny", "gpt-x"]
    assert client.get("/v1/models/gpt-x").json()["id"] == "gpt-x"
    for model, status in (("gpt-x", 200), ("tiny", 200), ("gpt-y", 404), ("gpt", 404)):
        answer = client.post("/v1/completions", json={"prompt": "abc", "model": model})
        assert answer.status_code == status
        assert status == 404 or answer.json()["model"] == "tiny"


def test_more_prompts_than_the_setting_allows_are_rejected(client: TestClient) -> None:
    client.headers.update(bearer(KEY))
    for prompts, status in ((["a", "b"], 200), (["a", "b", "c"], 400), ([[1], [2], [3]], 400)):
        answer = client.post("/v1/completions", json={"prompt": prompts})
        assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"].startswith("prompt has 3 prompts, over the limit of 2 per request")
    assert error["param"] == "prompt"
