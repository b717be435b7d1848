"""GGUF files are served: greedy tokens equal those of the transformers library, in the engine and over HTTP."""

from pathlib import Path
from typing import Any

import pytest

from model.chat.template import load_chat_template
from model.sampling.params import SamplingParams
from model.tokenizer.files import load_tokenizer
from service.cli.main import main
from service.engine.engine import complete_batch
from tests.e2e.process import serving
from tests.families.models import Case, load
from tests.families.test_serving import CLEAR, CONTEXT, NUM_TOKENS, PROMPT, VOCAB_SIZE, expected
from tests.families.tokenizer_files import write_byte_level, write_sentence_piece
from tests.model.gguf.models import as_file, write_model
from tests.model.gguf.tokenizers import byte_level, sentencepiece, with_all_merges

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def save(path: Path, family: str, type_name: str = "F32") -> tuple[list[int], list[int]]:
    """Save a model with a clear best token at each position; return ids of the prompt and of transformers' tokens."""
    is_llama = family == "llama"
    library = (write_sentence_piece if is_llama else write_byte_level)(path.parent / "original", VOCAB_SIZE)
    metadata: dict[str, Any] = sentencepiece(library) if is_llama else byte_level(library, "gpt-2", eos_token_id=0)
    if is_llama:
        library.model = with_all_merges(library).model
    prompt_ids = library.encode(PROMPT).ids
    for seed in range(30):
        model = Case(family, {"num_key_value_heads": 2, "hidden_size": 64}).build(
            seed, spread=0.3, vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT
        )
        write_model(path, model, type_name=type_name, changes={**metadata, "tokenizer.chat_template": TEMPLATE})
        tokens, best = expected(as_file(path, model), prompt_ids)
        if len(set(tokens)) >= 15 and float((best[:, 0] - best[:, 1]).min()) > CLEAR:
            return prompt_ids, tokens
    raise AssertionError("no random model of this family has a clear best token at each position")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    prompt_ids, tokens = save(path := tmp_path / "m.gguf", family)
    tokenizer = load_tokenizer(path)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert [*begin, *tokenizer.encode(PROMPT)] == prompt_ids
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    assert complete_batch(load(path), tokenizer, [prompt_ids], [greedy]) == [tokens]
    template = load_chat_template(path)
    assert template is not None
    assert template.source == TEMPLATE


@pytest.mark.slow
def test_greedy_tokens_over_http_equal_those_of_transformers(tmp_path: Path) -> None:
    _, tokens = save(path := tmp_path / "m.gguf", "llama")
    with serving(path, tmp_path) as service:
        text = service.text(PROMPT, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert service.get("/v1/models").json()["data"][0]["id"] == "tiny"
        chat = service.post("/v1/chat/completions", messages=[{"role": "user", "content": "Who?"}], max_tokens=4)
    tokenizer = load_tokenizer(path)
    assert text == b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
    assert chat.json()["usage"]["completion_tokens"] <= 4


@pytest.mark.slow
def test_a_quantized_file_is_served_in_its_own_precision(tmp_path: Path) -> None:
    save(path := tmp_path / "m.gguf", "qwen3", "Q4_0")
    with serving(path, tmp_path) as service:
        first, second = (service.text(PROMPT, temperature=0, max_tokens=16, ignore_eos=True) for _ in range(2))
        assert first == second
        assert "int4 (in groups of 32, from GGUF's Q4_0)" in service.log.read_text()


@pytest.mark.parametrize("command", ["inspect", "tokenize"])
def test_commands_read_the_file(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(path := tmp_path / "m.gguf", "qwen3")
    text = ["--text", "The dog"] if command == "tokenize" else []
    assert main([command, "--checkpoint", str(path), *text]) == 0
    assert ("m.gguf" if command == "inspect" else "3 tokens") in capsys.readouterr().out
