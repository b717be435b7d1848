"""Program that prints results of litellm's tools as JSON: a loop with a function, streamed calls, and an object.

Arguments: URL of a service, model name.
"""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel

url, model = sys.argv[1:]
asked = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
sampling = {"max_tokens": 100, "temperature": 0}
question = {"role": "user", "content": "What is the weather in Paris?"}
parameters = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
    "required": ["city"],
}
function = {"name": "weather", "description": "Return the weather of a city.", "parameters": parameters}
tools = [{"type": "function", "function": function}]
cities: list[str] = []


class Report(BaseModel):
    city: Literal["Oslo", "Paris"]
    sunny: bool


def weather(city: str) -> str:
    cities.append(city)
    return f"It is sunny in {city}."


def complete(messages: list[object], choice: str, *, stream: bool) -> litellm.Message:
    more = {"tools": tools, "tool_choice": choice, "stream": stream, **sampling, **asked}
    got = litellm.completion(messages=messages, **more)
    return (litellm.stream_chunk_builder(list(got), messages=messages) if stream else got).choices[0].message


def talk(*, stream: bool) -> str:
    called = complete([question], "required", stream=stream)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        for call in called.tool_calls
    ]
    return complete([question, called.model_dump(), *results], "auto", stream=stream).content


def respond(messages: list[object], choice: str) -> litellm.ResponsesAPIResponse:
    own = [{"type": "function", **function}]
    more = {"tools": own, "tool_choice": choice, "max_output_tokens": 100, "temperature": 0, **asked}
    return litellm.responses(input=messages, **more)


def talk_by_responses() -> str:
    (call,) = respond([question], "required").output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": weather(**json.loads(call.arguments))}
    return respond([question, call.model_dump(exclude_none=True), result], "auto").output[0].content[0].text


answers = [talk(stream=False), talk(stream=True)]
written = litellm.completion(messages=[question], response_format=Report, **sampling, **asked)
report = Report.model_validate_json(written.choices[0].message.content).model_dump()
chat = {"cities": [*cities], "answers": answers, "report": report}
cities.clear()
print(json.dumps({"chat": chat, "responses": {"answers": [talk_by_responses()], "cities": cities}}))
