"""Program that prints results of openai's tools as JSON: a loop with a function, streamed calls, and parsed objects.

Arguments: URL of a service, model name.
"""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
sampling = {"model": model, "max_tokens": 100, "temperature": 0}
question = {"role": "user", "content": "What is the weather in Paris?"}
cities: list[str] = []


class Weather(BaseModel):
    """Return the weather of a city."""

    city: Literal["Oslo", "Paris"]


class Report(BaseModel):
    city: Literal["Oslo", "Paris"]
    sunny: bool


def weather(city: str) -> str:
    cities.append(city)
    return f"It is sunny in {city}."


tools = [openai.pydantic_function_tool(Weather, name="weather")]
NAMED = {"type": "function", "function": {"name": "weather"}}


def whole() -> str:
    messages = [question]
    called = client.chat.completions.create(messages=messages, tools=tools, tool_choice="required", **sampling)
    messages.append(called.choices[0].message)
    for call in called.choices[0].message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(messages=messages, tools=tools, tool_choice="auto", **sampling)
    return last.choices[0].message.content


def streamed() -> str:
    messages = [question]
    with client.chat.completions.stream(messages=messages, tools=tools, tool_choice=NAMED, **sampling) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments for call in message.tool_calls]
    messages.append(message)
    for call in message.tool_calls:
        result = weather(call.function.parsed_arguments.city)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    with client.chat.completions.stream(messages=messages, tools=tools, tool_choice="auto", **sampling) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.get_final_completion().choices[0].message.content
    return text


answers = [whole(), streamed()]
parsed = client.chat.completions.parse(messages=[question], tools=tools, tool_choice="required", **sampling)
(call,) = parsed.choices[0].message.tool_calls
weather(call.function.parsed_arguments.city)
report = client.chat.completions.parse(messages=[question], response_format=Report, **sampling)
parsed_report = report.choices[0].message.parsed.model_dump()
print(json.dumps({"chat": {"cities": cities, "answers": answers, "report": parsed_report}}))
