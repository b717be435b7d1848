"""generation_config.json: values that are used, ignored with a message, or rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig as TheirConfig

from model.io.files import CheckpointError
from model.sampling.generation_config import (
    GENERATION_CONFIG_FILE,
    GenerationConfig,
    read_generation_config,
)


def read(directory: Path, values: object) -> GenerationConfig:
    (directory / GENERATION_CONFIG_FILE).write_text(json.dumps(values))
    return read_generation_config(directory)


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationConfig()


def test_values_of_the_file_are_read(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.1,
            "repetition_penalty": 1.05,
            "max_new_tokens": 2048,
            "eos_token_id": [128001, 128009, 128001],
            "bos_token_id": 128000,
            "pad_token_id": 0,
            "transformers_version": "4.40.0",
        },
    )
    assert config == GenerationConfig(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.05,
        max_new_tokens=2048,
        eos_token_ids=(128001, 128009),
        bos_token_id=128000,
        pad_token_id=0,
    )


def test_no_sampling_is_temperature_zero(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.9}).temperature == 0.0
    assert read(tmp_path, {"temperature": 0.9}).temperature == 0.9


def test_one_end_or_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert read(tmp_path, {"eos_token_id": None}).eos_token_ids == ()


def test_unsupported_keys_are_reported(tmp_path: Path) -> None:
    values = {"length_penalty": 1.05, "no_repeat_ngram_size": 0, "num_beams": 4, "from_the_future": 1, "top_p": 1}
    assert read(tmp_path, values).ignored == ("from_the_future", "length_penalty", "num_beams")


def test_the_defaults_of_transformers_are_harmless(tmp_path: Path) -> None:
    TheirConfig(eos_token_id=[1, 2], do_sample=True, temperature=0.5, top_k=7).save_pretrained(tmp_path)
    config = read_generation_config(tmp_path)
    assert (config.ignored, config.eos_token_ids, config.temperature, config.top_k) == ((), (1, 2), 0.5, 7)
    (tmp_path / GENERATION_CONFIG_FILE).write_text(TheirConfig().to_json_string(use_diff=False))
    assert read_generation_config(tmp_path).ignored == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "a JSON object expected"),
        ({"temperature": -1}, "temperature must be a number of at least 0, not -1"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"top_p": 0}, "top_p must be a number over 0"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"min_p": 1.5}, "min_p must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"do_sample": "no"}, "do_sample must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id: a token id or a list of token ids expected"),
        ({"eos_token_id": [1, -1]}, "eos_token_id: a token id"),
        ({"temperature": 10**400}, "temperature must be a number of at least 0, not 1000.*…; correct"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"top_p": 10**400}, "top_p must be"),
        ({"min_p": -(10**400)}, "min_p must be"),
        ({"top_k": 10**400}, "top_k must be a whole number from 0 to 2147483647"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be a whole number from 1 to 2147483647, not 2147483648"),
        ({"eos_token_id": ["x" * 10_000]}, "eos_token_id: a token id"),
        ({"bos_token_id": -3}, "bos_token_id must be a token id"),
    ],
)
def test_an_invalid_value_is_a_one_line_error(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert GENERATION_CONFIG_FILE in str(caught.value)


def test_damage_is_one_line(tmp_path: Path) -> None:
    (tmp_path / GENERATION_CONFIG_FILE).write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_generation_config(tmp_path)
