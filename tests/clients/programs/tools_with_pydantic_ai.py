"""Program that prints results of pydantic-ai as JSON: an agent with a function, whole and streamed, and an object.

Arguments: URL of a service, model name.
"""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

url, model = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
cities: list[str] = []


class Report(BaseModel):
    city: Literal["Oslo", "Paris"]
    sunny: bool


def weather(city: Literal["Oslo", "Paris"]) -> str:
    """Return the weather of a city."""
    cities.append(city)
    return f"It is sunny in {city}."


def call_first(context: RunContext[None]) -> ModelSettings:
    return ModelSettings(max_tokens=100, temperature=0, tool_choice="required" if context.run_step == 1 else "auto")


async def talk(llm: OpenAIChatModel | OpenAIResponsesModel) -> dict[str, object]:
    cities.clear()
    guide = Agent(llm, instructions="Be short.", tools=[weather], model_settings=call_first)
    whole = await guide.run(QUESTION)
    async with guide.run_stream(QUESTION) as stream:
        text = "".join([piece async for piece in stream.stream_text(delta=True)])
    settings = ModelSettings(max_tokens=100, temperature=0)
    reports = [
        (await Agent(llm, output_type=output, model_settings=settings).run(QUESTION)).output.model_dump()
        for output in (ToolOutput(Report), NativeOutput(Report))
    ]
    assert whole.usage.output_tokens > 0
    assert reports[1].keys() == reports[0].keys()
    return {"cities": [*cities], "answers": [whole.output, text], "report": reports[0]}


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    apis = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
    print(json.dumps({api: await talk(kind(model, provider=provider)) for api, kind in apis.items()}))


asyncio.run(main())
