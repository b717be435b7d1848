"""Structured output over HTTP: completions match the schema, streamed or not, and after the death of a worker."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.process import Service, serving, wait_until
from tests.e2e.test_lifecycle import Stream, started
from tests.tiny_model import NAME

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "legs", "colours"],
    "additionalProperties": False,
}
PAGE = Path(__file__).parents[2] / "docs" / "structured.md"


class Endless(pydantic.BaseModel):
    """Object with a string of any length."""

    text: str


FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def service(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(long_checkpoint, tmp_path_factory.mktemp("structured")) as running:
        yield running


def test_the_openai_client_gets_documents_that_match_its_schema(service: Service) -> None:
    client = openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "A pet, please."}]
    answer = client.chat.completions.create(
        model=NAME,
        messages=messages,
        n=4,
        seed=1,
        max_tokens=900,
        response_format=FORMAT,  # type: ignore[call-overload]
    )
    texts = [choice.message.content for choice in answer.choices]
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert len(set(texts)) > 1
    stream = client.chat.completions.create(
        model=NAME,
        messages=messages,
        seed=1,
        max_tokens=900,
        response_format=FORMAT,
        stream=True,  # type: ignore[call-overload]
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == texts[0]


def test_the_documented_use_of_openais_parse_works(service: Service) -> None:
    """Run the example of docs/structured.md with the address and model name of this server."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for named, here in (("http://127.0.0.1:8000", service.url), ("kvasir-20m", NAME)):
        assert example.count(named) == 1
        example = example.replace(named, here)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, str(PAGE), "exec"), names)
    assert isinstance(names["pet"], names["Pet"])
    assert names["completion"].choices[0].finish_reason == "stop"


def test_a_document_cut_off_at_max_tokens_is_an_error_of_openais_parse(service: Service) -> None:
    """docs/structured.md warns of this error."""
    client = openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=NAME, messages=[{"role": "user", "content": "a"}], response_format=Endless, max_tokens=20, seed=1
        )


def test_each_kind_of_grammar_acts_on_both_routes(service: Service) -> None:
    kinds: dict[str, tuple[Any, str]] = {
        "regex": ("[a-z]{3}-[0-9]{2}", "[a-z]{3}-[0-9]{2}"),
        "choice": (["yes", "no"], "yes|no"),
        "grammar": ('root ::= "<" [a-c]{2,4} ">"', "<[a-c]{2,4}>"),
        "json": ({"enum": ["é", 12]}, '"é"|12'),
    }
    for kind, (content, pattern) in kinds.items():
        wanted = {kind: content}
        assert re.fullmatch(pattern, service.text("once", max_tokens=60, structured_outputs=wanted))
        messages = [{"role": "user", "content": "once"}]
        answer = service.post("/v1/chat/completions", messages=messages, structured_outputs=wanted).json()
        assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])
    text = service.text("once", max_tokens=400, response_format={"type": "json_object"}, temperature=0)
    assert text.startswith("{")


def test_a_document_is_the_same_after_the_death_of_the_worker(service: Service) -> None:
    long = {"type": "array", "items": SCHEMA, "minItems": 30, "maxItems": 40}
    asked: dict[str, Any] = {"prompt": "once", "max_tokens": 7000, "seed": 3, "structured_outputs": {"json": long}}
    expected = service.complete(**asked)["choices"][0]
    stream = Stream(service, **asked)
    wait_until(started([stream]), what="the stream to begin")
    service.worker.kill()
    assert stream.finish().text == expected["text"]
    jsonschema.validate(json.loads(expected["text"]), long)
    assert service.metric("llm_requests_replayed_total", outcome="resubmitted") == 1
