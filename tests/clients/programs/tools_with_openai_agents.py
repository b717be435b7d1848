"""Program that prints results of openai-agents as JSON: an agent with a function, whole and streamed, and an object.

Arguments: URL of a service, model name.
"""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
cities: list[str] = []


class Report(BaseModel):
    city: Literal["Oslo", "Paris"]
    sunny: bool


@function_tool
def weather(city: Literal["Oslo", "Paris"]) -> str:
    """Return the weather of a city."""
    cities.append(city)
    return f"It is sunny in {city}."


async def talk(llm: Model) -> dict[str, object]:
    cities.clear()
    must_call = ModelSettings(tool_choice="required", max_tokens=100, temperature=0, include_usage=True)
    guide = Agent(name="guide", instructions="Be short.", tools=[weather], model=llm, model_settings=must_call)
    whole = await Runner.run(guide, QUESTION)
    stream = Runner.run_streamed(guide, QUESTION)
    text = ""
    async for event in stream.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert text == stream.final_output
    settings = ModelSettings(max_tokens=100, temperature=0)
    reporter = Agent(name="reporter", model=llm, model_settings=settings, output_type=Report)
    manager = Agent(name="manager", model=llm, model_settings=must_call, handoffs=[reporter])
    report = await Runner.run(manager, QUESTION)
    assert report.last_agent is reporter
    answers = [whole.final_output, text]
    return {"cities": [*cities], "answers": answers, "report": report.final_output.model_dump()}


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    apis = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    print(json.dumps({api: await talk(kind(model=model, openai_client=client)) for api, kind in apis.items()}))


set_tracing_disabled(True)
asyncio.run(main())
