"""Files of a checkpoint: an unusable file gives one short error line with the remedy, and its reading never blocks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model.chat.template import load_chat_template
from model.io.files import CheckpointError, OneLineError, error_line, read_json
from model.tokenizer.files import load_tokenizer
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE, read_generation_config
from tests.model.tokenizer import makers

READERS: dict[str, Callable[[Path], object]] = {
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
    "special_tokens_map.json": load_tokenizer,
    "config.json": load_tokenizer,
    GENERATION_CONFIG_FILE: read_generation_config,
    "chat_template.jinja": load_chat_template,
    "additional_chat_templates/default.jinja": load_chat_template,
    "chat_template.json": load_chat_template,
}
PUTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "a link to a file that is not there"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a directory": (Path.mkdir, "not a regular file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "symbolic link"),
}


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_a_path_that_is_not_a_regular_file(name: str, put: str, tmp_path: Path) -> None:
    makers.write(tmp_path, makers.gpt2())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    make, message = PUTS[put]
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        READERS[name](tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.model", "x.tiktoken", "added_tokens.json"])
def test_an_error_names_a_broken_link_to_an_older_tokenizer_file(name: str, tmp_path: Path) -> None:
    if name in ("merges.txt", "added_tokens.json"):
        (tmp_path / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("nothing")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == f"{tmp_path}/{name}: a link to a file that is not there; download the file again"


def test_a_link_is_read_as_its_target_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "a.json").symlink_to("blob")
    assert read_json(tmp_path / "a.json") == {"a": 1}
    assert read_json(tmp_path / "b.json", optional=True) == {}
    with pytest.raises(CheckpointError, match="missing"):
        read_json(tmp_path / "b.json")


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


def test_errors_have_one_printable_line() -> None:
    error = OneLineError("x\n" * 10**5 + "; copy the file again")
    assert str(error) == error_line("x\n" * 10**5 + "; copy the file again")
    assert str(error).isprintable()


def test_a_json_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(
        CheckpointError, match="is 1048576 MiB long, but a JSON file must be under 64 MiB; it is probably damaged: copy"
    ):
        read_json(path)
