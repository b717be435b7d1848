"""Program that prints results of anthropic's tools as JSON: loops with a function, streamed calls, and an object.

Arguments: URL of a service, model name.
"""

import json
import sys
from typing import Literal

import anthropic
from pydantic import BaseModel

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
sampling = {"model": model, "max_tokens": 100, "extra_body": {"temperature": 0}}
question = {"role": "user", "content": "What is the weather in Paris?"}
cities: list[str] = []


class Report(BaseModel):
    city: Literal["Oslo", "Paris"]
    sunny: bool


@anthropic.beta_tool
def weather(city: Literal["Oslo", "Paris"]) -> str:
    """Return the weather of a city."""
    cities.append(city)
    return f"It is sunny in {city}."


tools = [weather.to_dict()]
NAMED = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


def results(message: anthropic.types.Message) -> list[dict[str, object]]:
    """Call the function. Return the conversation with its results."""
    blocks = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    return [question, {"role": "assistant", "content": message.content}, {"role": "user", "content": blocks}]


def whole() -> str:
    called = client.messages.create(messages=[question], tools=tools, tool_choice={"type": "any"}, **sampling)
    assert called.stop_reason == "tool_use"
    return client.messages.create(messages=results(called), tools=tools, **sampling).content[0].text


def streamed() -> str:
    with client.messages.stream(messages=[question], tools=tools, tool_choice=NAMED, **sampling) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        called = stream.get_final_message()
    assert json.loads("".join(pieces)) == called.content[0].input
    with client.messages.stream(messages=results(called), tools=tools, **sampling) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_text()
    return text


answers = [whole(), streamed()]
# The SDK runs this loop, in which every turn calls the function.
runner = client.beta.messages.tool_runner(
    messages=[question], tools=[weather], tool_choice={"type": "any"}, max_iterations=2, **sampling
)
assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
assert len(cities) == 4
report = client.messages.parse(messages=[question], output_format=Report, **sampling).parsed_output.model_dump()
print(json.dumps({"messages": {"cities": cities, "answers": answers, "report": report}}))
