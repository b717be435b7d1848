"""Malformed and ambiguous HTTP: a status below 500, and no effect on the next client."""

import json

import httpx
import pytest

from tests.e2e.process import Service
from tests.hostile.raw import BEARER, exchange, is_well, post, request

pytestmark = pytest.mark.slow

BODY = b'{"prompt": "a", "max_tokens": 2}'
LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"
CHUNKS = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1"

# Sent bytes, and the statuses of the responses.
CASES: dict[str, tuple[bytes, list[int]]] = {
    "length and chunks": (request(LENGTH, CHUNKED, body=CHUNKS), [400]),
    "chunks and length": (request(CHUNKED, LENGTH, body=CHUNKS), [400]),
    "two lengths": (request(LENGTH, b"content-length: 5", body=BODY), [400]),
    "a length twice": (request(LENGTH, LENGTH, body=BODY), [400]),
    "a list of lengths": (request(b"content-length: 5, 5", body=BODY), [400]),
    "a negative length": (request(b"content-length: -1", body=BODY), [400]),
    "a signed length": (request(b"content-length: +5", body=BODY), [400]),
    "a length in hexadecimal": (request(b"content-length: 0x5", body=BODY), [400]),
    "no length": (request(b"content-length: ", body=BODY), [400]),
    "a length before a space": (request(b"content-length : 5", body=BODY), [400]),
    "a huge length": (request(b"content-length: 1" + b"0" * 18, body=BODY), [413]),
    "a length over 64 bits": (request(b"content-length: 18446744073709551616", body=BODY), [400]),
    "a length of many digits": (request(b"content-length: " + b"9" * 5000, body=BODY), [400]),
    "another transfer encoding": (request(b"transfer-encoding: xchunked", body=CHUNKS), [415]),
    "chunks not last": (request(b"transfer-encoding: chunked, identity", body=CHUNKS), [400]),
    "compressed chunks": (request(b"transfer-encoding: gzip, chunked", body=CHUNKS), [415]),
    "chunks": (request(CHUNKED, body=CHUNKS), [200]),
    "a chunk of letters": (request(CHUNKED, body=b"zz\r\n"), [400]),
    "a negative chunk": (request(CHUNKED, body=b"-1\r\n"), [400]),
    "a huge chunk": (request(CHUNKED, body=b"f" * 17 + b"\r\n"), [400]),
    "a chunk that is longer than it says": (request(CHUNKED, body=b"5\r\nabcdefg\r\n0\r\n\r\n"), [400]),
    "fields that never end after the chunks": (request(CHUNKED, body=CHUNKS[:-2] + b"a: " + b"b" * 2_000_000), [400]),
    "a folded field": (request(b"a: b\r\n c", LENGTH, body=BODY), [400]),
    "bare line feeds": (b"GET /health HTTP/1.1\nhost: a\n\n", [400]),
    "bare carriage returns": (b"GET /health HTTP/1.1\rhost: a\r\r", [400]),
    "a NUL in a value": (request(b"a: b\0c", line=GET), [400]),
    "a NUL in a name": (request(b"a\0b: c", line=GET), [400]),
    "an id with a line end": (request(b"x-request-id: a\r\n b: c", line=GET), [400]),
    "an absolute target": (request(line=b"GET http://evil/v1/models HTTP/1.1"), [200]),
    "a target without a path": (request(line=b"GET http://evil HTTP/1.1"), [400]),
    "a target for proxies": (request(line=b"CONNECT a:443 HTTP/1.1"), [400]),
    "a target of all": (request(line=b"OPTIONS * HTTP/1.1"), [404]),
    "a target beside ASCII": (request(line=b"GET /\xff HTTP/1.1"), [400]),
    "a target with control codes": (request(line=b"GET /v1/models/%00%0d%0ax:%20y HTTP/1.1"), [404]),
    "a target with half an escape": (request(line=b"GET /v1/models/%zz%ff%c0%80 HTTP/1.1"), [404]),
    "a target elsewhere": (request(line=b"GET /../../etc/passwd HTTP/1.1"), [404]),
    "a long target": (request(line=b"GET /v1/models/" + b"a" * 60_000 + b" HTTP/1.1"), [404]),
    "a long query": (request(line=b"GET /v1/models?" + b"a=b&" * 10_000 + b" HTTP/1.1"), [200]),
    "HTTP/1.0": (request(line=b"GET /v1/models HTTP/1.0"), [200]),
    "HTTP/1.2": (request(line=b"GET /v1/models HTTP/1.2"), [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "an offer of HTTP/2": (request(LENGTH, b"connection: upgrade", b"upgrade: h2c", body=BODY), [200]),
    "a web socket": (request(b"connection: upgrade", b"upgrade: websocket", line=GET), [200]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500, [400]),
    "noise": (bytes(range(256)) * 10, [400]),
    "a method in small letters": (request(line=b"get /v1/models HTTP/1.1"), [400]),
    "a method of nobody": (request(line=b"BREW /v1/models HTTP/1.1"), [400]),
    "a wrong method": (request(line=b"TRACE /v1/models HTTP/1.1"), [405]),
    "expecting to go on": (request(LENGTH, b"expect: 100-continue", body=BODY), [100, 200]),
    "expecting something else": (request(LENGTH, b"expect: 200-ok", body=BODY), [200]),
    "many ranges": (request(b"range: bytes=" + b"0-1," * 1000, line=GET), [200]),
    "XML that is JSON": (request(LENGTH, b"content-type: text/xml", body=BODY), [200]),
    "a form of many parts": (request(LENGTH, b"content-type: multipart/form-data; boundary=", body=BODY), [200]),
    "requests ahead": (request(line=GET, is_last=False) * 19 + request(line=GET), [200] * 20),
    "hundreds of requests ahead": (request(line=GET, is_last=False) * 300 + request(line=GET), [200] * 301),
    "noise after a request": (request(LENGTH, body=BODY, is_last=False) + b"GARBAGE\r\n\r\n", [200, 400]),
    "a request after the last": (request(line=GET) + request(line=GET), [200]),
    "empty lines": (b"\r\n" * 1000 + request(line=GET), [200]),
}


@pytest.mark.parametrize("name", CASES)
def test_malformed_http_gets_a_client_error(service: Service, name: str) -> None:
    sent, statuses = CASES[name]
    answer = exchange(service, sent)
    assert answer.statuses == statuses
    if statuses == [400]:
        assert answer.is_closed
        assert answer.error["code"] == "invalid_request"
    assert is_well(service)


def test_a_smuggled_request_gets_no_response(service: Service) -> None:
    """Bytes that a proxy takes for a body are never parsed as a request."""
    inner = request(line=b"GET /version HTTP/1.1")
    for fields in ((LENGTH, CHUNKED), (CHUNKED, LENGTH), (LENGTH, b"content-length: 0"), (CHUNKED, CHUNKED)):
        answer = exchange(service, request(*fields, body=b"0\r\n\r\n" + inner, is_last=False))
        assert answer.statuses == [400]
        assert b'"version"' not in answer.text


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x" * 1000, "GZIP"])
def test_a_compressed_body_is_rejected_in_one_line(service: Service, encoding: str) -> None:
    response = post(service, b"\x1f\x8b" + b"\0" * 1000, **{"content-encoding": encoding})
    assert response.status_code == 415
    error = response.json()["error"]
    assert error["code"] == "unsupported_encoding"
    assert "uncompressed" in error["message"]
    assert len(error["message"]) < 200
    assert post(service, BODY, **{"content-encoding": "identity"}).status_code == 200


def test_names_in_errors_are_clipped_and_never_in_headers(service: Service) -> None:
    wild = "a\r\nset-cookie: b\u2028\u202e\0" + "😀" * 100_000
    for body in ({"prompt": "a", "model": wild}, {"prompt": "a", "user": wild}, {"prompt": "a", wild: 1}):
        response = post(service, json.dumps(body).encode())
        assert response.status_code in (200, 400, 404)
        assert "set-cookie" not in response.headers
        assert len(response.content) < 2000
    response = httpx.get(f"{service.url}/v1/models/{'m' * 50_000}", headers=BEARER, timeout=60)
    assert response.status_code == 404
    assert len(response.content) < 1000
