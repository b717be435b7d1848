"""Client libraries: snippets of docs/clients.md, streams, usage, embeddings, and the exceptions of each library."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.environments import KEY, MODEL, PROGRAMS, URL, executable, node, run, snippet
from tests.e2e.process import Service

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
SAMPLING = {"max_tokens": 20, "temperature": 0}


class Library(NamedTuple):
    """Section of docs/clients.md, environment and test program of a library, and its names of three exceptions."""

    section: str
    environment: str
    program: str
    bad_request: str = "BadRequestError"
    rate_limit: str = "RateLimitError"
    authentication: str = "AuthenticationError"


LANGCHAIN_ERRORS = ("OpenAIInvalidRequestError", "OpenAIRateLimitError", "OpenAIAuthenticationError")
LIBRARIES = [
    Library("openai for Python", "own", "with_openai.py"),
    Library("openai for Node", "node", "with_openai.mjs"),
    Library("langchain-openai", "langchain", "with_langchain.py", *LANGCHAIN_ERRORS),
    Library("llama-index", "llama-index", "with_llama_index.py"),
    Library("litellm", "litellm", "with_litellm.py"),
]


def interpreter(library: Library, directory: Path) -> str:
    return node(directory) if library.environment == "node" else executable(library.environment, "python")


def talk(service: Service) -> tuple[str, list[int]]:
    body = service.post("/v1/chat/completions", messages=MESSAGES, **SAMPLING).json()
    usage = body["usage"]
    return body["choices"][0]["message"]["content"], [usage["prompt_tokens"], usage["completion_tokens"]]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.section)
def test_the_snippet_on_the_page_runs(service: Service, library: Library, tmp_path: Path) -> None:
    """The snippet prints a completion, then a streamed chat completion."""
    language, suffix = ("js", "mjs") if library.environment == "node" else ("python", "py")
    path = tmp_path / f"snippet.{suffix}"
    path.write_text(snippet(library.section, language).replace(URL, service.url))
    printed = run([interpreter(library, tmp_path), path], tmp_path)
    assert printed == f"{service.text(PROMPT, **SAMPLING)}\n{talk(service)[0]}"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.section)
def test_streams_usage_and_errors(service: Service, full: Service, library: Library, tmp_path: Path) -> None:
    path = tmp_path / library.program
    path.write_text((PROGRAMS / library.program).read_text())
    printed = run([interpreter(library, tmp_path), path, service.url, full.url, MODEL, KEY], tmp_path)
    said = json.loads(printed.splitlines()[-1])
    assert said["text"] == service.text(PROMPT, **SAMPLING)
    assert (said["chat"], said["usage"]) == talk(service)
    if library.environment != "llama-index":  # embeddings are in another package of llama-index
        (vector,) = service.post("/v1/embeddings", input=[PROMPT]).json()["data"]
        assert said["vector"] == pytest.approx(vector["embedding"], abs=1e-6)
    bad, busy = library.bad_request, library.rate_limit
    assert said["errors"] == [["NotFoundError", 404], [bad, 400], [busy, 429], [library.authentication, 401]]
    if library.section.startswith("openai"):
        assert said["models"] == [MODEL], "with the key"


def test_anthropic_streams_usage_and_errors(service: Service, full: Service, tmp_path: Path) -> None:
    path = tmp_path / "with_anthropic.py"
    path.write_text((PROGRAMS / path.name).read_text())
    printed = run([executable("anthropic", "python"), path, service.url, full.url, MODEL, KEY], tmp_path)
    said = json.loads(printed.splitlines()[-1])
    assert (said["chat"], said["usage"]) == talk(service), "a message is the chat completion of its conversation"
    assert said["text"] == said["chat"]
    assert said["num_input_tokens"] == said["usage"][0]
    assert said["models"] == [MODEL]
    errors = [["NotFoundError", 404], ["BadRequestError", 400], ["RateLimitError", 429], ["AuthenticationError", 401]]
    assert said["errors"] == errors


def test_the_snippet_for_anthropic_prints_a_message_whole_and_streamed(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(snippet("anthropic", "python").replace(URL, service.url))
    text, _ = talk(service)
    assert run([executable("anthropic", "python"), path], tmp_path) == f"{text}\n{text}"
