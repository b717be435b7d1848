"""Facts about the served model from the checkpoint's files and the settings."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from model.chat.template import PLAIN_SOURCE
from model.checkpoint.manifest import read_manifest
from model.io.files import CheckpointError
from model.tokenizer.files import load_tokenizer
from service.cli.main import main
from service.config.settings import ServeSettings, SettingsError
from service.preprocess.served_model import RequestDefaults, ServedModel, read_defaults, read_served_model
from tests.e2e.process import free_port
from tests.tiny_model import EOS


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def served(checkpoint: Path, **settings: Any) -> ServedModel:
    return read_served_model(
        ServeSettings(checkpoint=checkpoint, threads=1, **settings),
        read_manifest(checkpoint),
        load_tokenizer(checkpoint),
    )


def write(path: Path, value: Any) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def test_without_extra_files_the_plain_template_is_served(checkpoint: Path) -> None:
    found = served(checkpoint)
    assert found.model_name == "tiny"
    assert found.max_context_length == 256
    assert found.defaults == RequestDefaults()
    assert found.special_tokens == {"eos_token": EOS}
    assert found.template is not None
    assert found.template.source == PLAIN_SOURCE
    assert found.warnings() == []


def test_ignored_keys_of_config_json_are_warnings_or_with_strict_config_errors(checkpoint: Path) -> None:
    manifest = dataclasses.replace(
        read_manifest(checkpoint), config_warnings=("config.json: x=0: unknown key, ignored",)
    )
    settings, tokenizer = ServeSettings(checkpoint=checkpoint), load_tokenizer(checkpoint)
    assert read_served_model(settings, manifest, tokenizer).warnings() == [*manifest.config_warnings]
    strict = ServeSettings(checkpoint=checkpoint, strict_config=True)
    with pytest.raises(
        SettingsError, match="x=0: unknown key, ignored; --strict-config rejects such keys; remove them, or"
    ):
        read_served_model(strict, manifest, tokenizer)
    assert read_served_model(strict, read_manifest(checkpoint), tokenizer).warnings() == []


def test_template_and_special_tokens_of_the_checkpoints_files_take_precedence(checkpoint: Path) -> None:
    config = {"chat_template": "{{ eos_token }}", "eos_token": "</s>", "bos_token": {"content": "<s>"}}
    write(checkpoint / "tokenizer_config.json", config)
    found = served(checkpoint)
    assert found.special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}
    assert found.template is not None
    assert found.template.render([]) == "</s>"
    plain = served(checkpoint, chat_template="plain")
    assert plain.template is not None
    assert plain.template.source == PLAIN_SOURCE
    assert served(checkpoint, chat_template="none").template is None


def test_the_chat_template_setting_may_name_a_file(checkpoint: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine.jinja", "mine{{ eos_token }}")
    found = served(checkpoint, chat_template=str(tmp_path / "mine.jinja"))
    assert found.template is not None
    assert found.template.render([]) == "mine" + EOS


def test_unused_contents_of_the_checkpoint_are_warned_about(checkpoint: Path) -> None:
    write(checkpoint / "generation_config.json", {"length_penalty": 1.3, "num_beams": 4, "temperature": 0.5})
    write(checkpoint / "chat_template.jinja", "a")
    (checkpoint / "additional_chat_templates").mkdir()
    write(checkpoint / "additional_chat_templates" / "rag.jinja", "b")
    found = served(checkpoint)
    generation, templates = found.warnings()
    assert generation == f"{checkpoint}/generation_config.json: unsupported keys, ignored: length_penalty, num_beams"
    assert templates == f"{checkpoint}/chat_template.jinja: the templates rag are not used"
    assert served(checkpoint, generation_config=False, chat_template="none").warnings() == []


@pytest.mark.parametrize(
    ("values", "sampling", "told"),
    [
        ({}, {}, "none"),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}, "temperature 0.6, top_p 0.9"),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}, "temperature 0"),
        ({"do_sample": True, "top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}, "top_k 20, min_p 0.1"),
        ({"top_k": 2**31 - 1, "top_p": 1}, {"top_k": 2**31 - 1, "top_p": 1}, "top_k 2147483647, top_p 1"),
        ({"top_k": None}, {}, "none"),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
    ],
)
def test_request_defaults_come_from_generation_config(checkpoint: Path, values: Any, sampling: Any, told: str) -> None:
    write(checkpoint / "generation_config.json", values)
    found = served(checkpoint).defaults
    assert found.sampling == sampling
    assert str(found) == told
    assert served(checkpoint, generation_config=False).defaults == RequestDefaults()


def test_the_default_max_tokens_comes_from_generation_config(checkpoint: Path) -> None:
    write(checkpoint / "generation_config.json", {"max_new_tokens": 30})
    found = served(checkpoint).defaults
    assert (found.max_new_tokens, str(found)) == (30, "max_new_tokens 30")


def test_the_start_up_listing_shows_the_checkpoints_facts(checkpoint: Path) -> None:
    write(checkpoint / "generation_config.json", {"temperature": 0.5})
    settings = ServeSettings(checkpoint=checkpoint, threads=3, max_context_length=100)
    found = read_served_model(settings, read_manifest(checkpoint), load_tokenizer(checkpoint)).setting_values(settings)
    assert found == {
        "model_name": "tiny",
        "max_context_length": 100,
        "chat_template": "plain: the checkpoint has none",
        "tool_format": "hermes, described in the system message",
        "reasoning_format": "none",
        "score_method": "embedding",
        "generation_config": "temperature 0.5",
        "begin_of_text": "none",
        "end_of_text": f"{EOS} (273)",
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("chat_template.jinja", "\n{% if %}", CheckpointError, "chat_template.jinja: line 2: Expected an expression"),
        ("chat_template.jinja", "{{ a | no }}", CheckpointError, "or set --chat-template to plain, none or a file"),
        ("tokenizer_config.json", "{", CheckpointError, "tokenizer_config.json: not JSON"),
        ("generation_config.json", "{", CheckpointError, "generation_config.json: not JSON"),
        ("generation_config.json", {"temperature": 1e9}, CheckpointError, "temperature must be between 0 and 100"),
    ],
)
def test_an_unusable_checkpoint_file_is_a_one_line_error(
    checkpoint: Path, name: str, value: Any, error: type[Exception], said: str
) -> None:
    write(checkpoint / name, value)
    with pytest.raises(error) as caught:
        served(checkpoint)
    assert said in str(caught.value)
    assert str(checkpoint) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_context_length_over_the_models_positions_is_rejected(checkpoint: Path) -> None:
    with pytest.raises(SettingsError, match="257 is over the 256 positions"):
        served(checkpoint, max_context_length=257)


def test_the_error_names_a_missing_template_file(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="--chat-template nowhere: no such file; give"):
        served(checkpoint, chat_template="nowhere")


def test_request_defaults_are_read_without_a_tokenizer(checkpoint: Path) -> None:
    write(checkpoint / "generation_config.json", {"top_p": 0.5})
    assert read_defaults(ServeSettings(checkpoint=checkpoint), checkpoint).sampling == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("flags", "files", "code", "said"),
    [
        (("--max-context-length", "257"), {}, 2, "257 is over the 256 positions of the model; set at most 256"),
        (("--chat-template", "nowhere"), {}, 1, "nowhere: no such file; give auto, plain, none or a Jinja file"),
        ((), {"chat_template.jinja": "{% if %}"}, 1, "chat_template.jinja: line 1"),
        ((), {"generation_config.json": {"top_p": 7}}, 1, "generation_config.json: top_p: Expected `float` <= 1.0"),
    ],
)
def test_an_unusable_checkpoint_ends_the_start_with_a_one_line_error(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    files: dict[str, Any],
    code: int,
    said: str,
) -> None:
    for name, value in files.items():
        write(checkpoint / name, value)
    assert main(["serve", "--checkpoint", str(checkpoint), "--port", str(free_port()), *flags]) == code
    told = capsys.readouterr().err
    assert told.startswith("kvasir serve: ")
    assert said in told
    assert told.count("\n") == 1
