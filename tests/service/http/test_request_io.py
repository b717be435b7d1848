"""Request ids, body limits, and the error format."""

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from service.http.middleware import RequestId
from service.http.request_io import install_error_handlers, json_response, read_body
from service.protocol.errors import ApiError, InvalidRequest


@pytest.fixture
def counted() -> list[ApiError]:
    return []


@pytest.fixture
def client(counted: list[ApiError]) -> TestClient:
    app = FastAPI()
    app.add_middleware(RequestId)
    install_error_handlers(app, counted.append)

    @app.post("/size")
    async def size(request: Request) -> Response:
        return json_response({"size": len(await read_body(request, max_bytes=1000))})

    @app.get("/refuse")
    async def refuse() -> Response:
        raise InvalidRequest("no", param="x")

    @app.get("/bug")
    async def bug() -> Response:
        raise ZeroDivisionError("secret")

    return TestClient(app, raise_server_exceptions=False)


def test_a_body_within_the_limit_is_read(client: TestClient) -> None:
    assert client.post("/size", content=b"x" * 1000).json() == {"size": 1000}


def test_a_body_over_the_limit_is_rejected_with_or_without_content_length(
    client: TestClient, counted: list[ApiError]
) -> None:
    def chunks() -> object:
        yield from [b"x" * 400] * 3

    for content in (b"x" * 1001, chunks()):
        response = client.post("/size", content=content)  # type: ignore[arg-type]
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
    assert [error.status for error in counted] == [413, 413]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/refuse", 400, "invalid_request"),
        ("GET", "/nowhere", 404, "route_not_found"),
        ("GET", "/size", 405, "method_not_allowed"),
        ("GET", "/bug", 500, "internal_error"),
    ],
)
def test_every_error_has_openais_shape(client: TestClient, method: str, path: str, status: int, code: str) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "secret" not in response.text
    assert response.headers.get("connection") == ("close" if status == 500 else None)
    if status == 405:
        assert response.headers["allow"] == "POST"


def test_a_request_id_is_echoed_or_generated(client: TestClient) -> None:
    assert client.get("/refuse", headers={"x-request-id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"
    made = {client.get("/nowhere").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "ü", "<script>"])
def test_an_unsafe_request_id_is_replaced(client: TestClient, bad: str) -> None:
    given = client.get("/refuse", headers={b"x-request-id": bad.encode()}).headers["x-request-id"]
    assert given.startswith("req-")
