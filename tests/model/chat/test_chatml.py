"""A Kvasir checkpoint trained on conversations has a chat template, and so has its export to Hugging Face's format."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.chat.chatml import END, START, TEMPLATE, supports_chatml
from model.chat.template import load_chat_template
from model.chat.template_sandbox import TemplateFailure
from model.checkpoint.conversion.export_hugging_face import export_checkpoint
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.io.files import CheckpointError
from model.tokenizer.bos_eos import TEMPLATE_FILE
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE, read_generation_config
from model.training.corpus import Turn, encode_conversation
from model.training.data.bpe import END_OF_TEXT
from tests.chatml_model import GENERATION, chatml_tokenizer, save_chatml_checkpoint
from tests.tiny_model import save_tiny_checkpoint

TALK = [
    Turn("system", "Be brief. "),
    Turn("user", "  Who are you? 😀\n\n"),
    Turn("assistant", "A teller of tales."),
    Turn("user", "Tell one."),
]


def messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in turns]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_chatml_checkpoint(tmp_path / "model")


def test_the_chatml_template_keeps_message_contents_unchanged(checkpoint: Path) -> None:
    template = load_chat_template(checkpoint)
    assert template is not None
    assert template.source == TEMPLATE
    told = [{**message, "name": None} for message in messages(TALK[1:2])]
    assert template.render(told) == f"{START}user\n  Who are you? 😀\n\n{END}\n{START}assistant\n"
    assert template.render(messages(TALK), add_generation_prompt=False).endswith(f"Tell one.{END}\n")
    with pytest.raises(TemplateFailure, match="the role tool is none of system, user and assistant") as caught:
        template.render([{"role": "tool", "content": "x"}])
    assert caught.value.by_template


def test_the_manifest_hashes_chat_template_and_generation_config(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert {TEMPLATE_FILE, GENERATION_CONFIG_FILE} <= manifest.files.keys()
    assert manifest.verify().eos_token_ids == chatml_tokenizer().eos_token_ids
    defaults = read_generation_config(checkpoint)
    assert (defaults.temperature, defaults.top_p, defaults.ignored) == (0.7, 0.95, ())
    (checkpoint / TEMPLATE_FILE).write_text(TEMPLATE.replace("user", "uzer"))
    with pytest.raises(CheckpointError, match=f"{TEMPLATE_FILE}: SHA-256 differs"):
        manifest.verify()
    (checkpoint / TEMPLATE_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"{TEMPLATE_FILE}: missing"):
        manifest.verify()


def test_a_base_model_is_saved_without_a_chat_template(checkpoint: Path) -> None:
    """The chat template of an earlier save to the directory is removed."""
    save_tiny_checkpoint(checkpoint)
    assert load_chat_template(checkpoint) is None
    assert not (checkpoint / GENERATION_CONFIG_FILE).exists()
    assert {TEMPLATE_FILE, GENERATION_CONFIG_FILE}.isdisjoint(read_manifest(checkpoint).files)
    read_manifest(checkpoint).verify()
    assert not supports_chatml({START: 1})


def test_an_exported_chatml_template_gives_the_same_ids_in_transformers(checkpoint: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    export_checkpoint(checkpoint, exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for turns in (TALK, TALK[1:2], TALK[1:3]):
        ids, _ = encode_conversation(chatml_tokenizer(), turns)
        assert tokenizer.apply_chat_template(messages(turns), return_dict=False) == ids[:-1]
    asked = tokenizer.apply_chat_template(messages(TALK), return_dict=False, add_generation_prompt=True)
    answered, _ = encode_conversation(chatml_tokenizer(), [*TALK, Turn("assistant", "Once.")])
    assert asked == answered[: len(asked)]
    ours = chatml_tokenizer()
    assert json.loads((exported / GENERATION_CONFIG_FILE).read_text()) == {
        **GENERATION,
        "bos_token_id": ours.bos_token_id,
        "eos_token_id": list(ours.eos_token_ids),
    }
    assert read_manifest(exported).verify().eos_token_ids == ours.eos_token_ids
    marks = (START, END, END_OF_TEXT)
    assert [tokenizer.convert_tokens_to_ids(mark) for mark in marks] == [ours.special_tokens[mark] for mark in marks]
    assert tokenizer.decode(answered, skip_special_tokens=True).count("<|") == 0
    library: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    model = load_model(
        read_manifest(checkpoint), device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["eager"]
    )
    with torch.no_grad():
        logits_TV = model(torch.tensor(asked), AttentionMetadata.uncached((len(asked),)), None)
        torch.testing.assert_close(logits_TV, library.eval()(torch.tensor([asked])).logits[0], rtol=1e-4, atol=1e-4)
    assert library.generation_config.eos_token_id == list(ours.eos_token_ids)
