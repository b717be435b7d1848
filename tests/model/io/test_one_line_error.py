"""Error lines: one short line with the remedy, for any file content."""

import pytest

from model.io.checkpoint_files import CheckpointError
from model.io.one_line_error import error_line
from model.tokenizer.interface import TokenizerError


def test_ordinary_messages_are_unchanged() -> None:
    text = "a/b/config.json: größe='…': supported are a, b; use a checkpoint with one of these"
    assert error_line(text) == text
    assert error_line("x" * 480) == "x" * 480


def test_a_shortened_message_keeps_its_fact_and_its_remedy() -> None:
    line = error_line(f"x.safetensors: tensor {'t' * 10**6} is not part of the model; use its config")
    assert line.startswith("x.safetensors: tensor ttt")
    assert line.endswith("ttt is not part of the model; use its config")
    assert len(line) == 483


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\u2028", "\x00", "\u202e", "\ud800"])
def test_unprintable_characters_are_replaced(letter: str) -> None:
    assert error_line(f"a{letter}b") == "a\ufffdb"


@pytest.mark.parametrize("kind", [CheckpointError, TokenizerError])
def test_file_errors_have_one_printable_line(kind: type[ValueError]) -> None:
    error = kind("x\n" * 10**5 + "; copy it again")
    assert str(error) == error_line("x\n" * 10**5 + "; copy it again")
    assert str(error).isprintable()
