"""Agreement of `/openapi.json` with the routes."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from service.api.openapi import openapi_document
from service.protocol import errors, responses
from service.protocol.completions import CompletionRequest


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of every documented operation, as "POST /v1/completions", and the operation."""
    for path, methods in openapi_document()["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def contents(bodies: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the status, media type and schema of every documented response body."""
    for status, answer in bodies.items():
        for media_type, content in answer.get("content", {}).items():
            yield status, media_type, content


def check(content: dict[str, Any]) -> None:
    """Validate the examples against the schema. Raises ValidationError."""
    schema = {**content["schema"], "components": openapi_document()["components"]}
    for example in content["examples"].values():
        Draft202012Validator(schema).validate(example["value"])


def test_every_schema_reference_exists() -> None:
    document = openapi_document()
    text = json.dumps(document)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]


def test_openapi_documents_exactly_the_request_fields() -> None:
    schema = openapi_document()["components"]["schemas"]["CompletionRequest"]
    assert set(schema["properties"]) == set(CompletionRequest.model_fields)
    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is False


def test_openapi_documents_the_encoded_response_structs() -> None:
    schema = openapi_document()["components"]["schemas"]["Completion"]
    assert set(schema["properties"]) == set(responses.Completion.__struct_fields__)
    assert msgspec.json.schema_components([responses.Completion])[1]["Completion"]["required"] == schema["required"]


def test_openapi_documents_each_status_and_media_type_of_completions() -> None:
    operation = openapi_document()["paths"]["/v1/completions"]["post"]
    assert set(operation["responses"]) == {"200", "400", "401", "404", "408", "413", "415", "429", "431", "500", "503"}
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    statuses = {str(kind.status) for kind in (errors.Overloaded, errors.Draining, errors.EngineFailed)}
    assert statuses <= set(operation["responses"])


def test_every_request_in_openapi_has_valid_examples() -> None:
    bodies = {name: operation["requestBody"] for name, operation in operations() if "requestBody" in operation}
    without_body = {"POST /v1/responses/{response_id}/cancel"}
    assert {name for name, _ in operations() if name.startswith("POST ")} - without_body == set(bodies)
    for name, body in bodies.items():
        content = body["content"]["application/json"]
        assert content["examples"], name
        check(content)


def test_openapi_documents_the_code_and_headers_of_every_error() -> None:
    for name, operation in operations():
        for status, media_type, content in contents(operation["responses"]):
            if int(status) < 400 or "ErrorBody" not in str(content["schema"]):
                continue
            assert media_type == "application/json", name
            assert operation["responses"][status]["description"].startswith("`")
        for status, answer in operation["responses"].items():
            assert "x-request-id" in answer["headers"]
            assert ("retry-after" in answer["headers"]) == (
                status in ("429", "503") or "`queue_timeout`" in answer["description"]
            ), f"{name} {status}"
            assert ("www-authenticate" in answer["headers"]) == (status == "401"), f"{name} {status}"


def test_openapi_documents_exactly_the_registered_routes(client: TestClient) -> None:
    paths = openapi_document()["paths"]
    for path, methods in paths.items():
        refused = client.request("PATCH", path)
        assert refused.status_code == 405, path
        assert refused.headers["allow"].split(", ") == sorted(map(str.upper, methods)), path
    there = {str(getattr(route, "path", "")).replace(":path}", "}") for route in client.app.routes}  # type: ignore[attr-defined]
    assert there - {"/docs", "/docs/oauth2-redirect", "/redoc"} == set(paths)
