"""Clients that call tools: a real function in a loop, the same whole and streamed, and objects that follow a schema."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.environments import MODEL, PROGRAMS, URL, executable, node, run, snippet
from tests.e2e.process import Service

CITIES = {"Oslo", "Paris"}


class ToolClient(NamedTuple):
    """Section of docs/clients.md, environment and test program of a client, and the parts of the program's results."""

    section: str
    environment: str
    program: str
    parts: tuple[str, ...] = ("chat", "responses")


CLIENTS = [
    ToolClient("Tools with openai", "own", "tools_with_openai.py", ("chat",)),
    ToolClient("Responses with openai", "own", "responses_with_openai.py", ("responses",)),
    ToolClient("openai-agents", "openai-agents", "tools_with_openai_agents.py"),
    ToolClient("Tools with anthropic", "anthropic", "tools_with_anthropic.py", ("messages",)),
    ToolClient("langchain agents", "langchain", "tools_with_langchain.py"),
    ToolClient("pydantic-ai", "pydantic-ai", "tools_with_pydantic_ai.py"),
    ToolClient(
        "instructor",
        "instructor",
        "tools_with_instructor.py",
        ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"),
    ),
    ToolClient("Tools with litellm", "litellm", "tools_with_litellm.py"),
    ToolClient("llama-index agents", "llama-index", "tools_with_llama_index.py", ("chat",)),
    ToolClient("Vercel AI SDK", "node", "tools_with_ai_sdk.mjs", ("chat", "responses", "messages")),
]
all_clients = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.section)


def interpreter(client: ToolClient, directory: Path) -> str:
    return node(directory) if client.environment == "node" else executable(client.environment, "python")


@all_clients
def test_the_snippet_on_the_page_calls_its_function(service: Service, client: ToolClient, tmp_path: Path) -> None:
    """The function prints the city it is called with. Then the snippet prints an answer; instructor only an object."""
    language, suffix = ("js", "mjs") if client.environment == "node" else ("python", "py")
    path = tmp_path / f"snippet.{suffix}"
    path.write_text(snippet(client.section, language).replace(URL, service.url))
    first, *rest = run([interpreter(client, tmp_path), path], tmp_path).splitlines()
    assert first in {f"called with {city}" for city in CITIES}
    assert rest


@all_clients
def test_calls_streams_and_objects(service: Service, client: ToolClient, tmp_path: Path) -> None:
    path = tmp_path / client.program
    path.write_text((PROGRAMS / client.program).read_text())
    printed = run([interpreter(client, tmp_path), path, service.url, MODEL], tmp_path)
    said = json.loads(printed.splitlines()[-1])
    assert tuple(said) == client.parts
    for part in said.values():
        assert "answers" in part or "report" in part
        if "answers" in part:
            assert len(set(part["answers"])) == 1, "the answer is the same whole and streamed"
            assert part["answers"][0]
            assert len(part["cities"]) >= len(part["answers"])
            assert set(part["cities"]) <= CITIES
        if "report" in part:
            assert part["report"]["city"] in CITIES
            assert type(part["report"]["sunny"]) is bool
