"""Hostile request bodies get a response with a status below 500, and their memory is freed."""

import json
from typing import Any

import pytest

from service.http.request_io import MAX_CONTAINERS
from tests.e2e.process import Service
from tests.hostile.raw import is_well, post

pytestmark = pytest.mark.slow

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
DIGITS = b"9" * 5000
MANY_DIGITS = b"9" * 1_000_000
NUMBERS = (
    *(b"1e400", b"-1e400", b"1e-400", b"NaN", b"-NaN", b"Infinity", b"-Infinity", b"-0", b"-0.0", b"1.", b".5", b"+1"),
    *(b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616"),
    *(b"-9223372036854775809", b"0x10", b"1_0", b"007", b"1e9", b"null", b"true", b'"1"', DIGITS, b"-" + DIGITS),
)
NUMERIC = ("temperature", "top_p", "seed", "max_tokens", "n", "presence_penalty", "priority", "logprobs", "min_p")


def asked(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields}).encode()


def talked(content: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}).encode()


@pytest.mark.parametrize("field", NUMERIC)
def test_any_number_in_any_field_gets_a_status_below_500(service: Service, field: str) -> None:
    for number in NUMBERS:
        body = b'{"prompt": "a", "%s": %s%s}' % (
            field.encode(),
            number,
            b"" if field == "max_tokens" else b', "max_tokens": 2',
        )
        response = post(service, body)
        assert response.status_code in (200, 400), (number[:20], response.text[:300])
        if response.status_code == 400:
            assert len(response.json()["error"]["message"]) < 300


def nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return opening * depth + b"1" + closing * depth


# fmt: off
WILD: dict[str, tuple[str, bytes, int]] = {
    "digits for ids": (TEXT, b'{"prompt": [' + MANY_DIGITS + b"]}", 400),
    "digits for an unknown field": (TEXT, b'{"prompt": "a", "x": ' + MANY_DIGITS + b"}", 400),
    "digits where the prompt is missing": (TEXT, b'{"x": ' + MANY_DIGITS + b"}", 400),
    "digits where the input is missing": ("/v1/embeddings", b'{"x": ' + DIGITS + b"}", 400),
    "digits in a schema": (TEXT, asked(structured_outputs={"json": {"a": 0}})[:-3] + DIGITS + b"}}}", 400),
    "digits for a template": (CHAT, talked("a", chat_template_kwargs={"a": 0})[:-2] + DIGITS + b"}}", 400),
    "digits for tokens": ("/detokenize", b'{"tokens": [' + DIGITS + b"]}", 400),
    "digits for a layer": ("/inspect/attention", b'{"prompt": "a", "layer": ' + DIGITS + b"}", 400),
    "digits for a bias": (TEXT, asked(logit_bias={"9" * 1_000_000: 1}), 400),
    "no number for a bias": (TEXT, b'{"prompt": "a", "logit_bias": {"1": NaN}}', 400),
    "lists in lists": (TEXT, b'{"prompt": ' + nested(MAX_CONTAINERS - 1, b"[", b"]") + b"}", 400),
    "objects in objects": (TEXT, b'{"x": ' + nested(MAX_CONTAINERS - 1, b'{"a": ', b"}") + b"}", 400),
    "too many lists": (TEXT, b'{"prompt": [' + b"[1]," * 300_000 + b"[1]]}", 400),
    "100,000 keys": (TEXT, asked(**{f"k{number}": number for number in range(100_000)}), 400),
    "a key of a megabyte": (TEXT, asked(**{"k" * 1_000_000: 1}), 400),
    "690,000 ids": (TEXT, json.dumps({"prompt": [1] * 690_000}).encode(), 400),
    "100,000 stop strings": (TEXT, asked(stop=[f"s{number}" for number in range(100_000)]), 400),
    "long stop strings": (TEXT, asked(stop=["a" * 1000] * 16), 200),
    "a key twice": (TEXT, b'{"prompt": "a", "prompt": "b", "max_tokens": 2, "max_tokens": 3}', 200),
    "Python's names": (TEXT, asked(__class__=1, model_fields_set=[], model_extra={}), 400),
    "a first surrogate": (TEXT, b'{"prompt": "\\ud800"}', 400),
    "a second surrogate": (TEXT, b'{"prompt": "\\udc00"}', 400),
    "surrogates the wrong way round": (TEXT, b'{"prompt": "\\udc00\\ud800"}', 400),
    "half a surrogate in a key": (TEXT, b'{"prompt": "a", "\\ud83d": 1}', 400),
    "surrogates in UTF-8": (TEXT, b'{"prompt": "\xed\xa0\xbd\xed\xb8\x80"}', 400),
    "an overlong NUL": (TEXT, b'{"prompt": "\xc0\x80"}', 400),
    "UTF-16": (TEXT, '{"prompt": "a"}'.encode("utf-16"), 400),
    "a byte order mark": (TEXT, b'\xef\xbb\xbf{"prompt": "a"}', 400),
    "a pair of surrogates": (TEXT, b'{"prompt": "\\ud83d\\ude00", "max_tokens": 2}', 200),
    "NUL, right to left, line ends": (TEXT, asked(prompt="\0\u202e\u2028\r\n\ufeff\uffff"), 200),
    "the same in a conversation": (CHAT, talked("\0\u202e\u2028{{ 7 * 7 }}<|im_end|>"), 200),
    "a role of 100 kB": (CHAT, b'{"messages": [{"role": "' + b"r" * 100_000 + b'", "content": ""}]}', 400),
    "a template that fails": (CHAT, talked("boom"), 500),
    "spaces": ("/tokenize", json.dumps({"prompt": " " * 1_900_000}).encode(), 200),
    "one letter": ("/tokenize", json.dumps({"prompt": "a" * 1_900_000}).encode(), 200),
    "one letter with many accents": ("/tokenize", ('{"prompt": "a' + "\u0301" * 900_000 + '"}').encode(), 200),
    "an expression that backtracks": (TEXT, asked(structured_outputs={"regex": "(a+)+$"}), 200),
    "an expression that multiplies": (TEXT, asked(structured_outputs={"regex": "(a{1000}){1000}"}), 400),
    "brackets": (TEXT, asked(structured_outputs={"regex": "(" * 5000}), 400),
    "a grammar of itself": (TEXT, asked(structured_outputs={"grammar": "start: start"}), 400),
    "a grammar of brackets": (TEXT, asked(structured_outputs={"grammar": "start: " + "(" * 3000}), 400),
    "a schema of itself": (TEXT, asked(structured_outputs={"json": {"$ref": "#"}}), 400),
    "a schema from elsewhere": (TEXT, asked(structured_outputs={"json": {"$ref": "http://127.0.0.1/"}}), 400),
    "a schema from a file": (TEXT, asked(structured_outputs={"json": {"$ref": "file:///etc/passwd"}}), 400),
    "a schema that multiplies": (
        TEXT,
        asked(
            structured_outputs={
                "json": {
                    "allOf": [
                        {"anyOf": [{"type": "string", "pattern": f"a{number}"}, {"type": "integer"}]}
                        for number in range(60)
                    ]
                }
            }
        ),
        400,
    ),
}
# fmt: on


@pytest.mark.parametrize("name", WILD)
def test_malformed_bodies_get_a_client_error(service: Service, name: str) -> None:
    path, body, status = WILD[name]
    response = post(service, body, path)
    assert response.status_code == status, response.text[:300]
    if status == 400:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"]
        assert len(response.content) < 2000
    assert is_well(service)


def test_memory_of_large_bodies_is_freed(service: Service) -> None:
    """Python keeps memory of the first rounds. Six more rounds add less than the size of two bodies."""
    heavy = [body for path, body, status in WILD.values() if len(body) > 500_000 and path != "/tokenize"]
    assert len(heavy) >= 5
    processes = (service.api, service.worker)

    def round_of_all() -> int:
        for body in heavy * 2:
            assert post(service, body).status_code == 400
        return sum(process.memory_info().rss for process in processes)

    before = max(round_of_all() for _ in range(2))
    after = min(round_of_all() for _ in range(6))
    assert after - before < 3 * 2**20
    assert "Traceback" not in service.log.read_text()
