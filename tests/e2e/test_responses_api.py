"""OpenAI's SDK on `/v1/responses` of a server with the shipped model: text, streams, tools, JSON, and the store."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from service.config.settings import find_default_checkpoint
from tests.e2e.process import Service, serving, wait_until

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {"model": "story", "input": "Tell me a story.", "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    checkpoint = find_default_checkpoint()
    assert checkpoint is not None
    with serving(checkpoint, tmp_path_factory.mktemp("service"), "--model-alias", "story") as running:
        yield running


def test_the_sdk_gets_the_same_text_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, max_output_tokens=40)
    events = list(client.responses.create(**ASKED, max_output_tokens=40, stream=True))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    assert deltas == final.output_text == whole.output_text != ""
    assert whole.usage is not None
    assert final.usage is not None
    assert whole.usage.output_tokens == final.usage.output_tokens > 0


def test_a_response_equals_the_chat_completion_of_the_same_conversation(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Tell me a story."},
    ]
    chat = client.chat.completions.create(model="story", messages=messages, max_tokens=40, seed=3)
    response = client.responses.create(**ASKED, instructions="You tell stories.", max_output_tokens=40)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


class Animal(pydantic.BaseModel):
    """Answer that the SDK parses."""

    kind: Literal["cat", "dog"]
    is_old: bool


def test_the_sdk_parses_an_answer_into_a_pydantic_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="story", input="Describe the animal.", text_format=Animal)
    assert isinstance(response.output_parsed, Animal)
    assert json.loads(response.output_text) == response.output_parsed.model_dump()


def add(a: int, b: int) -> int:
    """Return the sum, as the tool of the test."""
    return a + b


ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5, 6]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": False,
}


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_tool_loop_calls_a_function_and_continues_with_its_result(client: openai.OpenAI, is_stored: bool) -> None:
    given: list[Any] = [{"role": "user", "content": "Add two numbers."}]
    first = client.responses.create(
        model="story", input=given, tools=[ADD], tool_choice="required", parallel_tool_calls=False, store=is_stored
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    arguments = json.loads(call.arguments)
    assert (call.name, call.status, set(arguments)) == ("add", "completed", {"a", "b"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": str(add(**arguments))}
    if is_stored:
        again: dict[str, Any] = {"input": [result], "previous_response_id": first.id}
    else:
        again = {"input": [*given, *first.output, result]}
    last = client.responses.create(
        model="story", **again, tools=[ADD], tool_choice="none", max_output_tokens=20, store=is_stored
    )
    assert last.output_text


def test_a_background_response_is_polled_streamed_and_deleted(client: openai.OpenAI) -> None:
    begun = client.responses.create(**ASKED, max_output_tokens=40, background=True)
    assert begun.status in ("queued", "in_progress")
    wait_until(lambda: client.responses.retrieve(begun.id).status not in ("queued", "in_progress"), what="the response")
    ended = client.responses.retrieve(begun.id)
    assert ended.output_text == client.responses.create(**ASKED, max_output_tokens=40).output_text
    events = list(client.responses.retrieve(begun.id, stream=True, starting_after=1))
    assert [event.sequence_number for event in events] == list(range(2, 2 + len(events)))
    (item,) = client.responses.input_items.list(begun.id).data
    assert item.type == "message"
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.retrieve(begun.id)
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.create(**ASKED, previous_response_id=begun.id)


def test_a_stream_survives_the_death_of_the_worker(client: openai.OpenAI, service: Service) -> None:
    asked = {**ASKED, "extra_body": {"seed": 3, "ignore_eos": True}}
    whole = client.responses.create(**asked, max_output_tokens=200)
    text = ""
    for event in client.responses.create(**asked, max_output_tokens=200, stream=True):
        if event.type == "response.output_text.delta":
            if not text:
                service.worker.kill()
            text += event.delta
    assert text == whole.output_text
