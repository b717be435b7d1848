"""Servers shared by the tests of a module, because a start takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from model.chat.reasoning import all_marks
from tests.chatml_model import save_chatml_checkpoint
from tests.e2e.process import Service, serving
from tests.tiny_model import save_tiny_checkpoint


@pytest.fixture(scope="module")
def service(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service with the tiny model and default limits."""
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny model with a context of 8,192 tokens, so that a test can act during a completion."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "long", max_context_length=8192)


@pytest.fixture(scope="session")
def marked_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny chat model with a context of 8,192 tokens, whose tokenizer has the marks of all formats."""
    directory = tmp_path_factory.mktemp("checkpoints") / "marked"
    return save_chatml_checkpoint(directory, *all_marks(), generation=None, max_context_length=8192)


@pytest.fixture(scope="session")
def unmarked_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny chat model with a context of 8,192 tokens, whose tokenizer has no marks."""
    directory = tmp_path_factory.mktemp("checkpoints") / "unmarked"
    return save_chatml_checkpoint(directory, generation=None, max_context_length=8192)
