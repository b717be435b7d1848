"""BOS and EOS tokens: precedence of the files, and agreement with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from model.io.files import CheckpointError
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer
from tests.model.tokenizer import makers


def load(directory: Path, files: dict[str, Any], **config: object) -> Tokenizer:
    """Load a tokenizer with the special tokens <s>, </s> and <pad>, and additional files."""
    library = makers.gpt2()
    library.add_special_tokens(["<s>", "</s>", "<pad>"])
    makers.write(directory, library, **config)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return load_tokenizer(directory)


def ids(tokenizer: Tokenizer, *names: str) -> tuple[int, ...]:
    return tuple(tokenizer.special_tokens[name] for name in names)


def test_eos_precedence_is_generation_config_config_tokenizer_config(tmp_path: Path) -> None:
    marks = dict(load(tmp_path, {}).special_tokens)
    begin, end, pad = (marks[name] for name in ("<s>", "</s>", "<pad>"))
    files = {"generation_config.json": {"eos_token_id": [end, pad]}, "config.json": {"eos_token_id": begin}}
    assert load(tmp_path, files, eos_token="<pad>").eos_token_ids == (end, pad)
    files["generation_config.json"] = {"eos_token_id": None}
    assert load(tmp_path, files, eos_token="<pad>").eos_token_ids == (begin,)
    files["config.json"] = {}
    assert load(tmp_path, files, eos_token="<pad>").eos_token_ids == (pad,)
    assert load(tmp_path, files, eos_token={"content": "</s>", "lstrip": False}).eos_token_ids == (end,)


def test_a_tokenizer_without_eos_token_loads(tmp_path: Path) -> None:
    assert load(tmp_path, {}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("name", "adds_bos"),
    [("llama3", None), ("llama3", True), ("llama3", False), ("llama2", None), ("gpt2", None), ("gpt2", False)],
)
def test_bos_token_equals_that_of_transformers(name: str, adds_bos: bool | None, tmp_path: Path) -> None:
    library = makers.MAKERS[name]()
    begin = {"llama3": "<|begin_of_text|>", "gpt2": "<|endoftext|>", "llama2": "<s>"}[name]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin}
    config |= {} if adds_bos is None else {"add_bos_token": adds_bos}
    ours = load_tokenizer(makers.write(tmp_path, library, **config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs("A dog.")["input_ids"]
    assert [*([] if ours.bos_token_id is None else [ours.bos_token_id]), *ours.encode("A dog.")] == expected
    assert (ours.bos_token_id is not None) == (name != "gpt2")


def test_bos_token_requested_only_by_tokenizer_config_is_added(tmp_path: Path) -> None:
    """transformers 4 does so for Llama's tokenizer classes, with which such models were trained."""
    ours = load(tmp_path, {}, bos_token="<s>", add_bos_token=True)
    assert ours.bos_token_id == ours.special_tokens["<s>"]
    assert load(tmp_path, {}, bos_token="<s>").bos_token_id is None


def test_added_tokens_only_in_tokenizer_config_are_read(tmp_path: Path) -> None:
    size = load(tmp_path, {}).vocab_size
    added = {str(size): {"content": "<|tool|>", "special": True}, str(size + 1): {"content": "::", "special": False}}
    ours = load(tmp_path, {}, added_tokens_decoder=added)
    assert ours.special_tokens["<|tool|>"] == size
    assert ours.encode("a::b")[1] == size + 1
    assert (ours.token_bytes(size + 1), ours.vocab_size) == (b"::", size + 2)


def test_a_token_named_special_in_tokenizer_config_is_special(tmp_path: Path) -> None:
    """The transformers library does so, although tokenizer.json lists the token as an ordinary added token."""
    library = makers.gpt2()
    library.add_tokens(["<end>"])
    ours = load_tokenizer(makers.write(tmp_path, library, eos_token="<end>"))
    (end,) = ours.eos_token_ids
    assert ours.special_tokens["<end>"] == end
    assert end not in ours.encode("a<end>")
    assert ours.token_bytes(end) == b""


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        ({"generation_config.json": {"eos_token_id": 99999}}, {}, "generation_config.json: eos_token_id: 99999 is not"),
        (
            {"config.json": {"eos_token_id": 9999}},
            {},
            "/config.json: eos_token_id: 9999 is not in the tokenizer's vocabulary",
        ),
        ({"generation_config.json": {"eos_token_id": "</s>"}}, {}, "generation_config.json: eos_token_id must be"),
        ({"config.json": {"eos_token_id": -1}}, {}, "config.json: eos_token_id must be"),
        ({"config.json": []}, {}, "config.json: a JSON object expected"),
        ({}, {"eos_token": "<nowhere>"}, "eos_token '<nowhere>' is not in the tokenizer's vocabulary"),
        (
            {},
            {"bos_token": "<nowhere>", "add_bos_token": True},
            "bos_token '<nowhere>' is not in the tokenizer's vocabulary",
        ),
        ({}, {"add_eos_token": True, "eos_token": "</s>"}, "supported are at most one before and none after"),
        ({}, {"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ({}, {"added_tokens_decoder": {"x": {}}}, "tokenizer_config.json: malformed: ValueError"),
        ({}, {"added_tokens_decoder": {"900": {}}}, "an added token needs an id and a content"),
    ],
)
def test_invalid_bos_and_eos_tokens_give_one_error_line(
    files: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, files, **config)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/")
