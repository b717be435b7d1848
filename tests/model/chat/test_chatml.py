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
from model.chat.template_sandbox import TemplateFailure, compile_template, render
from model.chat.tool_formats.table import DEFAULT_FORMAT, find_tool_format
from model.chat.tool_prompt import write_calls
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
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": 'Adds "numbers".',
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}},
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
CALLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "arguments": {"a": 'é"\n<b>', "b": -1.5}}},
    {"type": "function", "function": {"name": "stop", "arguments": {}}},
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
    with pytest.raises(TemplateFailure, match="the role critic is none of system, user, assistant and tool") as caught:
        template.render([{"role": "critic", "content": "x"}])
    assert caught.value.by_template


def test_the_chatml_template_writes_tools_in_a_line_each_and_calls_in_the_default_format() -> None:
    asked = [{"role": "user", "content": "Sum?"}, {"role": "assistant", "tool_calls": CALLS}]
    variables = {"bos_token": "", "messages": asked, "tools": TOOLS, "add_generation_prompt": False}

    def written(**changed: Any) -> str:
        return render(compile_template(TEMPLATE), variables | changed, max_characters=1000)

    described = 'Tools:\nf(a, b): Adds "numbers".\nstop()'
    talk = f"{START}user\nSum?{END}\n{START}assistant\n{write_calls(CALLS, DEFAULT_FORMAT)}{END}\n"
    assert written() == f"{START}system\n{described}{END}\n{talk}"
    system = {"role": "system", "content": "Be brief."}
    assert written(messages=[system, *asked]) == f"{START}system\nBe brief.\n\n{described}{END}\n{talk}"
    assert written(tools=None) == talk
    assert find_tool_format(TEMPLATE) is DEFAULT_FORMAT


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
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(exported)
    for turns in (TALK, TALK[1:2], TALK[1:3]):
        ids, _ = encode_conversation(chatml_tokenizer(), turns)
        assert tokenizer.apply_chat_template(messages(turns), return_dict=False) == ids[:-1]
    asked = tokenizer.apply_chat_template(messages(TALK), return_dict=False, add_generation_prompt=True)
    called = [*messages(TALK), {"role": "assistant", "content": "", "tool_calls": CALLS}]
    text = tokenizer.apply_chat_template(called, tools=TOOLS, tokenize=False)
    variables = {"bos_token": END_OF_TEXT, "messages": called, "tools": TOOLS}
    assert text == render(compile_template(TEMPLATE), variables, max_characters=1000)
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
