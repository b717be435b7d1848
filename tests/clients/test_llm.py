"""Command `llm`: the commands of docs/clients.md, with and without streaming, and its error messages."""

import re
import shlex
from pathlib import Path

import pytest

from tests.clients.environments import MODEL, URL, executable, run, snippet
from tests.clients.test_libraries import PROMPT, SAMPLING, talk
from tests.e2e.process import Service

COMMANDS = re.findall(r"^\$ (llm .*)", snippet("llm", "console"), re.M)


@pytest.fixture
def home(service: Service, tmp_path: Path) -> Path:
    """Home directory with the models of docs/clients.md for `llm`, and a model that the service does not have."""
    models = snippet("llm", "yaml").replace(URL, service.url)
    unknown = f"- model_id: no-such-model\n  model_name: no-such-model\n  api_base: {service.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models + unknown)
    return tmp_path


def say(command: str, home: Path, *more: str) -> str:
    words = shlex.split(command)
    return run([executable("llm", "llm"), *words[1:], *more], home, LLM_USER_PATH=str(home))


@pytest.mark.parametrize("more", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_the_commands_on_the_page_run(service: Service, home: Path, more: tuple[str, ...]) -> None:
    text, chat = (say(command, home, *more) for command in COMMANDS)
    assert text == service.text(PROMPT, **SAMPLING) + "\n"
    assert chat == talk(service)[0] + "\n"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [(("-m", "no-such-model"), 404, "does not exist"), (("-m", MODEL, "-o", "max_tokens", "100000"), 400, "context")],
)
def test_llm_prints_the_error_message_of_the_service(
    home: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    with pytest.raises(AssertionError, match=rf"Error: Error code: {status} .*{said}"):
        say("llm", home, *words, "--key", "none", "Once")
