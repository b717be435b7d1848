"""Program that prints results of langchain's tools as JSON: an agent, whole and streamed, calls, and an object.

Arguments: URL of a service, model name.
"""

import json
import sys
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
OPTIONS = {
    "base_url": f"{url}/v1",
    "api_key": "none",
    "model": model,
    "max_tokens": 100,
    "temperature": 0,
    "max_retries": 0,
}
cities: list[str] = []


class Report(BaseModel):
    """Report about the weather of a city."""

    city: Literal["Oslo", "Paris"]
    sunny: bool


@tool
def weather(city: Literal["Oslo", "Paris"]) -> str:
    """Return the weather of a city."""
    cities.append(city)
    return f"It is sunny in {city}."


@wrap_model_call
def call_first(request, handler):
    has_result = any(message.type == "tool" for message in request.messages)
    return handler(request.override(tool_choice="auto" if has_result else "required"))


def talk(chat: ChatOpenAI) -> dict[str, object]:
    cities.clear()
    agent = create_agent(chat, [weather], system_prompt="Be short.", middleware=[call_first])
    asked = {"messages": [("user", QUESTION)]}
    whole = agent.invoke(asked)["messages"][-1].text
    parts = [message for message, _ in agent.stream(asked, stream_mode="messages")]
    calls_end = max(number for number, message in enumerate(parts) if message.type == "tool")
    streamed = "".join(message.text for message in parts[calls_end + 1 :])
    bound = chat.bind_tools([weather], tool_choice="weather", strict=True)
    pieces = list(bound.stream(QUESTION))
    joined = sum(pieces[1:], pieces[0])
    assert [call["args"] for call in joined.tool_calls] == [call["args"] for call in bound.invoke(QUESTION).tool_calls]
    assert joined.usage_metadata["output_tokens"] > 0
    by_tool, by_schema = (
        chat.with_structured_output(Report, method=method).invoke(QUESTION).model_dump()
        for method in ("function_calling", "json_schema")
    )
    assert by_schema.keys() == by_tool.keys()
    return {"cities": [*cities], "answers": [whole, streamed], "report": by_tool}


print(
    json.dumps(
        {
            "chat": talk(ChatOpenAI(**OPTIONS, stream_usage=True)),
            "responses": talk(ChatOpenAI(**OPTIONS, use_responses_api=True)),
        }
    )
)
