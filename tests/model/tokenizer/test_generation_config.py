"""generation_config.json: values that are used, ignored with a message, or rejected."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GenerationConfig as TheirConfig

from model.io.files import CheckpointError
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE, GenerationConfig, read_generation_config


def read(directory: Path, values: object) -> GenerationConfig:
    (directory / GENERATION_CONFIG_FILE).write_text(json.dumps(values))
    return read_generation_config(directory)


def test_without_a_file_there_are_no_defaults(tmp_path: Path) -> None:
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
    )


def test_values_of_a_gguf_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "temp": 0.7,
        "top_p": 0.95,
        "min_p": 0.05,
        "penalty_repeat": 1.1,
        "xtc_probability": 0.0,
    }.items():
        writer.add_float32(f"general.sampling.{name}", value)
    for name, count in {"top_k": 20, "penalty_last_n": 64, "mirostat": 2}.items():
        writer.add_int32(f"general.sampling.{name}", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = read_generation_config(path)
    assert config == GenerationConfig(
        temperature=0.7, top_p=0.95, min_p=0.05, repetition_penalty=1.1, top_k=20, ignored=("mirostat",)
    )


def test_do_sample_false_is_temperature_zero(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.9}).temperature == 0.0
    assert read(tmp_path, {"temperature": 0.9}).temperature == 0.9


def test_an_eos_token_id_may_be_one_id_or_null(tmp_path: Path) -> None:
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
        ({"temperature": -1}, r"temperature: Expected `float` >= 0\.0; correct the file"),
        ({"temperature": "hot"}, "temperature: Expected `float`, got `str`"),
        ({"top_p": 0}, r"top_p: Expected `float` > 0\.0"),
        ({"top_k": True}, "top_k: Expected `int`, got `bool`"),
        ({"min_p": 1.5}, r"min_p: Expected `float` <= 1\.0"),
        ({"max_new_tokens": 0}, "max_new_tokens: Expected `int` >= 1"),
        ({"do_sample": "no"}, "do_sample: Expected `bool`"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be null, a token id or a list"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be"),
        ({"temperature": 10**400}, "temperature: .*; correct the file"),
        ({"temperature": float("inf")}, "temperature: "),
        ({"top_p": 10**400}, "top_p: "),
        ({"min_p": -(10**400)}, "min_p: "),
        ({"top_k": 10**400}, "top_k: "),
        ({"max_new_tokens": 2**31}, "max_new_tokens: Expected `int` <= 2147483647"),
        ({"eos_token_id": ["x" * 10_000]}, "eos_token_id must be"),
    ],
)
def test_an_invalid_value_is_a_one_line_error(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert GENERATION_CONFIG_FILE in str(caught.value)


def test_a_damaged_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / GENERATION_CONFIG_FILE).write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_generation_config(tmp_path)
