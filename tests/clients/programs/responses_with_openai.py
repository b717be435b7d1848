"""Program that prints results of openai's Responses API as JSON: a loop with a function, streams, and parsed objects.

Arguments: URL of a service, model name.
"""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
sampling = {"model": model, "max_output_tokens": 100, "temperature": 0}
QUESTION = "What is the weather in Paris?"
cities: list[str] = []


class Weather(BaseModel):
    """Return the weather of a city."""

    city: Literal["Oslo", "Paris"]


class Report(BaseModel):
    city: Literal["Oslo", "Paris"]
    sunny: bool


parsed_tools = [openai.pydantic_function_tool(Weather, name="weather")]  # for `parse` and `stream`
tools = [{"type": "function", "name": "weather", "parameters": Weather.model_json_schema()}]


def weather(city: str) -> str:
    cities.append(city)
    return f"It is sunny in {city}."


def outputs(response) -> list[dict[str, str]]:
    """Return the results of all calls, as items of the next request."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": weather(**json.loads(item.arguments))}
        for item in response.output
        if item.type == "function_call"
    ]


def stored() -> str:
    """Refer to the earlier response by its id."""
    called = client.responses.create(input=QUESTION, tools=tools, tool_choice="required", **sampling)
    last = client.responses.create(
        input=outputs(called), previous_response_id=called.id, tools=tools, tool_choice="auto", **sampling
    )
    assert client.responses.retrieve(last.id).output_text == last.output_text
    return last.output_text


def sent() -> str:
    """Send the parsed items of the earlier response."""
    called = client.responses.parse(input=QUESTION, tools=parsed_tools, tool_choice="required", **sampling)
    assert called.output[0].parsed_arguments.city in ("Oslo", "Paris")
    items = [{"role": "user", "content": QUESTION}, *called.output, *outputs(called)]
    return client.responses.create(input=items, tools=tools, tool_choice="auto", **sampling).output_text


def streamed() -> str:
    with client.responses.stream(input=QUESTION, tools=parsed_tools, tool_choice="required", **sampling) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        called = stream.get_final_response()
    assert "".join(deltas) == called.output[0].arguments
    items = [{"role": "user", "content": QUESTION}, *called.output, *outputs(called)]
    with client.responses.stream(input=items, tools=parsed_tools, tool_choice="auto", **sampling) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text
    return text


answers = [stored(), sent(), streamed()]
report = client.responses.parse(input=QUESTION, text_format=Report, **sampling).output_parsed
print(json.dumps({"responses": {"cities": cities, "answers": answers, "report": report.model_dump()}}))
