"""Downloaded files: dangling links and non-regular files give one error line, and never block."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model.chat.template import ChatTemplateError, load_chat_template
from model.io.json_file import FileError, read_object
from model.sampling.generation_config import GENERATION_CONFIG_FILE, GenerationConfigError, read_generation_config
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import TokenizerError
from tests.model.tokenizer import makers

READERS: dict[str, tuple[Callable[[Path], object], type[ValueError]]] = {
    "tokenizer.json": (load_tokenizer, TokenizerError),
    "tokenizer_config.json": (load_tokenizer, TokenizerError),
    "special_tokens_map.json": (load_tokenizer, TokenizerError),
    "config.json": (load_tokenizer, TokenizerError),
    GENERATION_CONFIG_FILE: (read_generation_config, GenerationConfigError),
    "chat_template.jinja": (load_chat_template, ChatTemplateError),
    "additional_chat_templates/default.jinja": (load_chat_template, ChatTemplateError),
    "chat_template.json": (load_chat_template, ChatTemplateError),
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
    read, error = READERS[name]
    make, message = PUTS[put]
    make(tmp_path / name)
    with pytest.raises(error, match=message) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.model", "x.tiktoken", "added_tokens.json"])
def test_an_error_names_a_broken_link_to_an_older_tokenizer_file(name: str, tmp_path: Path) -> None:
    if name in ("merges.txt", "added_tokens.json"):
        (tmp_path / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("nothing")
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == f"{tmp_path}/{name}: a link to a file that is not there; download it again"


def test_a_link_is_read_as_its_target_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "a.json").symlink_to("blob")
    assert read_object(tmp_path / "a.json") == {"a": 1}
    assert read_object(tmp_path / "b.json", optional=True) == {}
    with pytest.raises(FileError, match="missing"):
        read_object(tmp_path / "b.json")
