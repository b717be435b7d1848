"""Program that prints results of llama-index's tools as JSON: an agent, whole and streamed, and an object.

Arguments: URL of a service, model name.
"""

import asyncio
import json
import sys
from typing import Literal

from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, model = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
llm = OpenAILike(
    api_base=f"{url}/v1",
    api_key="none",
    model=model,
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=100,
    temperature=0,
    max_retries=0,
)
cities: list[str] = []


class Report(BaseModel):
    """Report about the weather of a city."""

    city: Literal["Oslo", "Paris"]
    sunny: bool


def weather(city: Literal["Oslo", "Paris"]) -> str:
    """Return the weather of a city."""
    cities.append(city)
    return f"It is sunny in {city}."


async def talk() -> list[str]:
    whole, streamed = (
        FunctionAgent(tools=[weather], llm=llm, initial_tool_choice="required", streaming=streams)
        for streams in (False, True)
    )
    run = streamed.run(QUESTION)
    async for event in run.stream_events():
        assert not isinstance(event, AgentStream) or event.current_agent_name == streamed.name
    return [str(await whole.run(QUESTION)), str(await run)]


answers = asyncio.run(talk())
report = llm.as_structured_llm(Report).complete(QUESTION).raw.model_dump()
print(json.dumps({"chat": {"cities": cities, "answers": answers, "report": report}}))
