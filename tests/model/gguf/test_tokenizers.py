"""Tokenizers of GGUF files give the ids of the tokenizers from which the files were made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from model.chat.template import load_chat_template
from model.io.files import CheckpointError
from model.tokenizer.bos_eos import read_tokenizer_config
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer
from tests.model.gguf.files import write_with_package
from tests.model.gguf.tokenizers import byte_level, merged_by_hand, sentencepiece, with_all_merges
from tests.model.tokenizer import makers
from tests.model.tokenizer.texts import all_texts, stories

BYTE_LEVEL = {
    "gpt-2": makers.gpt2,
    "llama-bpe": makers.llama3,
    "smaug-bpe": makers.smollm3,
    "qwen2": makers.qwen,
    "smollm": makers.digits,
    "gpt-4o": makers.o200k_pattern,
    "falcon": makers.falcon,
    "bloom": makers.bloom,
}
SENTENCEPIECE: dict[str, tuple[Callable[[], Library], dict[str, Any]]] = {
    "llama": (makers.llama2, {}),
    "gemma": (makers.gemma, {"add_space_prefix": False}),
}


def write(path: Path, metadata: dict[str, Any]) -> Path:
    return write_with_package(path, metadata, {"token_embd.weight": np.ones((2, 2), np.float32)})


def assert_same(ours: Tokenizer, library: Library) -> None:
    for text in all_texts():
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for parse_special in (False, True):
            library.encode_special_tokens = not parse_special
            ids = library.encode(clean, add_special_tokens=False).ids
            assert ours.encode(text, parse_special=parse_special) == ids
    story = stories()[0]
    assert ours.decode(ours.encode(story)) == story


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_texts_have_the_ids_of_the_original(tmp_path: Path, pre: str) -> None:
    library = BYTE_LEVEL[pre]()
    assert_same(load_tokenizer(write(tmp_path / "t.gguf", byte_level(library, pre))), library)


def test_sentencepiece_texts_with_stored_merges_have_the_ids_of_the_original(tmp_path: Path) -> None:
    library = makers.gemma()
    merges = [" ".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    metadata = sentencepiece(library, model="gemma4", merges=merges, add_space_prefix=False, add_bos_token=True)
    ours = load_tokenizer(write(tmp_path / "t.gguf", metadata))
    assert_same(ours, library)
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_texts_have_the_ids_of_the_original(tmp_path: Path, name: str) -> None:
    make, more = SENTENCEPIECE[name]
    library = with_all_merges(make())
    ours = load_tokenizer(write(tmp_path / "t.gguf", sentencepiece(library, **more)))
    assert_same(ours, library)
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


def test_sentencepiece_joins_the_neighbours_of_highest_score(tmp_path: Path) -> None:
    library = makers.llama2()
    ours = load_tokenizer(write(tmp_path / "t.gguf", sentencepiece(library)))
    vocabulary = {name: i for name, i in library.get_vocab().items() if i > 258}
    for story in stories()[:20]:
        words = story.split()  # whose pieces have no repeated letters that could join in two ways
        pieces = [merged_by_hand("▁" + word, vocabulary) for word in words]
        for word, expected in zip(words, pieces, strict=True):
            if set("".join(expected)) <= vocabulary.keys():
                assert ours.encode(word) == [vocabulary[piece] for piece in expected]


def test_a_space_prefix_that_the_file_does_not_ask_for_is_left_out(tmp_path: Path) -> None:
    library = makers.llama2()
    with_prefix = load_tokenizer(write(tmp_path / "a.gguf", sentencepiece(library)))
    without = load_tokenizer(write(tmp_path / "b.gguf", sentencepiece(library, add_space_prefix=False)))
    assert with_prefix.encode("the") == without.encode(" the") != without.encode("the")
    assert without.decode(without.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("more", "bos"),
    [({}, None), ({"add_bos_token": True}, 700), ({"add_bos_token": False}, None), ({"pre": "llama-bpe"}, 700)],
)
def test_the_bos_token_is_added_as_the_file_says(tmp_path: Path, more: dict[str, Any], bos: int | None) -> None:
    metadata = byte_level(makers.llama3(), **{"pre": "dbrx", **more}, bos_token_id=700, eos_token_id=701)
    assert load_tokenizer(write(tmp_path / "t.gguf", metadata)).bos_token_id == bos


def test_all_tokens_that_end_a_turn_are_eos_tokens(tmp_path: Path) -> None:
    metadata = byte_level(makers.llama3(), "llama-bpe", eos_token_id=5, eot_token_id=6)
    ours = load_tokenizer(write(tmp_path / "t.gguf", metadata))
    assert ours.eos_token_ids == (5, 6, 701, 702)
    assert ours.special_tokens.keys() >= {"<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"}


def test_the_chat_template_is_read(tmp_path: Path) -> None:
    metadata = byte_level(makers.llama3(), "llama-bpe", bos_token_id=700, eos_token_id=702)
    path = write(
        tmp_path / "t.gguf", {**metadata, "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    )
    template = load_chat_template(path)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|begin_of_text|>hi"
    assert template.origin == str(path)
    assert read_tokenizer_config(path).roles == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def test_files_beside_the_gguf_file_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    makers.write(tmp_path, makers.gpt2(), chat_template="other")
    path = write(tmp_path / "t.gguf", byte_level(makers.llama3(), "llama-bpe"))
    assert load_tokenizer(path).eos_token_ids == (701, 702)
    assert load_chat_template(path) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "t5"}, "the tokenizer model 't5' is not supported; supported are gpt2, llama and gemma4"),
        ({"model": 3}, "tokenizer.ggml.model must be a string"),
        ({"pre": "unheard"}, "tokenizer.ggml.pre: 'unheard' is not supported; supported are gpt-2, default"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "2 tokens, 1 of them distinct, and 2 types"),
        ({"token_type": [1]}, "and 1 types"),
        ({"merges": []}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b c"]}, "expected two tokens in a merge, not 'a b c'"),
        ({"merges": ["a 北"]}, "the tokenizers library reports an error"),
        ({"add_eos_token": True, "eos_token_id": 3}, "supported are at most one before and none after"),
        ({"model": "llama", "tokens": ["a" * 513], "token_type": [1], "scores": [0.5]}, "has over 512 characters"),
        ({"model": "llama"}, "0 scores for 703 tokens"),
        ({"add_bos_token": "no"}, "tokenizer.ggml.add_bos_token must be true or false, not 'no'"),
        ({"eos_token_id": "1"}, "tokenizer.ggml.eos_token_id must be an integer, not '1'"),
    ],
)
def test_malformed_tokenizers_are_rejected(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    metadata = byte_level(makers.llama3(), "llama-bpe")
    changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(write(tmp_path / "t.gguf", changed))


def test_a_file_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the vocabulary has 0 tokens"):
        load_tokenizer(write(tmp_path / "t.gguf", {}))
