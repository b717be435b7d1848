"""Program that prints results of instructor as JSON: objects from tools and from JSON, whole and streamed.

Arguments: URL of a service, model name.
"""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

url, model = sys.argv[1:]
asked = {"model": model, "max_tokens": 100, "temperature": 0, "max_retries": 0}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]


class Report(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Paris"]
    sunny: bool


def ask(mode: instructor.Mode) -> dict[str, object]:
    """Return an object, which must be the same streamed."""
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    create = client.responses if mode == instructor.Mode.RESPONSES_TOOLS else client.chat.completions
    whole = create.create(messages=messages, response_model=Report, **asked)
    *_, last = create.create_partial(messages=messages, response_model=Report, **asked)
    assert last.model_dump() == whole.model_dump(), mode
    return whole.model_dump()


modes = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")
print(json.dumps({mode: {"report": ask(instructor.Mode[mode])} for mode in modes}))
