"""Greedy tokens of every family equal those of the transformers library, in the engine and over HTTP.

Over HTTP, one family is tested for each kind of tokenizer. Token names and logprobs are compared, because two tokens
may have the same name. In these models the best token's logprob is always far above the second's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoint.conversion.import_nanogpt import convert_nanogpt
from model.checkpoint.manifest import read_manifest
from model.sampling.params import SamplingParams
from model.tokenizer.files import load_tokenizer
from service.config.settings import ModelSettings
from service.engine.engine import complete_batch, create_submit
from service.protocol.logprobs import format_token_name
from service.worker.engine_factory import build_engine
from tests.e2e.process import serving
from tests.families.models import GEMMA_ROPES, LONGROPE, TYPES, WINDOW, Case, load, read_by_library
from tests.families.nanogpt import ARGUMENTS, logits, random_state, write_checkpoint
from tests.families.test_nanogpt import CHARACTERS, meta
from tests.families.tokenizer_files import write_byte_level, write_sentence_piece
from tests.model.kernel_libraries import BACKENDS

PROMPT = "The dog did not cross the road as it was too tired. "
NUM_TOKENS = 64
CLEAR = 1e-3  # minimum difference of the two highest logprobs; rounding in float32 causes 1e-5
VOCAB_SIZE, CONTEXT = 512, 160
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Model families, each with a mechanism that it is known for and the kind of tokenizer of its checkpoints.
SERVED: dict[str, tuple[Case, Any]] = {
    "gpt2": (Case("gpt2"), write_byte_level),
    "llama": (Case("llama", {"num_key_value_heads": 2}), write_sentence_piece),
    "llama3": (Case("llama", {"num_key_value_heads": 2, "rope_parameters": _LLAMA3}), write_byte_level),
    "mistral": (Case("mistral", {"sliding_window": WINDOW}), write_sentence_piece),
    "qwen2": (
        Case("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
        write_byte_level,
    ),
    "qwen3": (Case("qwen3", {"tie_word_embeddings": True}), write_byte_level),
    "gpt_neox": (Case("gpt_neox"), write_byte_level),
    "gemma": (Case("gemma"), write_sentence_piece),
    # With norms of all outputs, a small random model whose head is tied repeats its input.
    "gemma2": (Case("gemma2", {"tie_word_embeddings": False}), write_sentence_piece),
    "gemma3": (
        Case("gemma3_text", {"tie_word_embeddings": False, "rope_parameters": GEMMA_ROPES, "layer_types": TYPES}),
        write_sentence_piece,
    ),
    "olmo2": (Case("olmo2"), write_byte_level),
    "smollm3": (Case("smollm3", {"no_rope_layer_interval": 2}), write_byte_level),
    "phi3": (Case("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}), write_sentence_piece),
    "granite": (Case("granite"), write_byte_level),
    "qwen3_moe": (Case("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}), write_byte_level),
    "mixtral": (Case("mixtral"), write_sentence_piece),
    "olmoe": (Case("olmoe"), write_byte_level),
    "granitemoe": (Case("granitemoe"), write_byte_level),
    "stablelm": (Case("stablelm"), write_byte_level),
    "starcoder2": (Case("starcoder2"), write_byte_level),
}


def expected(model: Any, prompt_ids: list[int]) -> tuple[list[int], Tensor]:
    """Return transformers' greedy tokens, and the logprobs of the best and second-best token at each position."""
    ids = torch.tensor([prompt_ids])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    with torch.no_grad():
        logprobs = model(whole, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    return whole[0, len(prompt_ids) :].tolist(), logprobs.topk(2).values


def save_decided_model(case: Case, directory: Path, prompt_ids: list[int]) -> None:
    """Save the first random model with a clear best token at each position, and with varied tokens."""
    positions = "n_positions" if case.family == "gpt2" else "max_position_embeddings"
    for seed in range(30):
        model = case.build(seed, spread=0.3, vocab_size=VOCAB_SIZE, **{positions: CONTEXT})
        tokens, best = expected(model, prompt_ids)
        if len(set(tokens)) >= 15 and float((best[:, 0] - best[:, 1]).min()) > CLEAR:
            model.save_pretrained(directory)
            return
    raise AssertionError("no random model of this family has a clear best token at each position")


def saved(directory: Path) -> list[int]:
    """Save a model and its tokenizer in a directory; return the prompt's ids, encoded by the tokenizers library."""
    case, write_tokenizer = SERVED[directory.name]
    prompt_ids: list[int] = write_tokenizer(directory, VOCAB_SIZE).encode(PROMPT).ids
    save_decided_model(case, directory, prompt_ids)
    return prompt_ids


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    prompt_ids = saved(tmp_path / name)
    tokens, _ = expected(read_by_library(tmp_path / name), prompt_ids)
    tokenizer = load_tokenizer(tmp_path / name)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert [*begin, *tokenizer.encode(PROMPT)] == prompt_ids
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for attention in BACKENDS:
        model = load(tmp_path / name, attention)
        assert complete_batch(model, tokenizer, [prompt_ids], [greedy]) == [tokens], attention


def test_the_served_context_selects_the_factors_of_longrope(tmp_path: Path) -> None:
    """Within the original context of 16 tokens, tokens equal those of transformers only if no more are served."""
    prompt_ids = write_sentence_piece(tmp_path, VOCAB_SIZE).encode(PROMPT).ids[:8]
    SERVED["phi3"][0].build(vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT).save_pretrained(tmp_path)
    library: Any = read_by_library(tmp_path)
    whole = library.generate(torch.tensor([prompt_ids]), max_new_tokens=8, do_sample=False)
    manifest, threads = read_manifest(tmp_path), torch.get_num_threads()
    found: dict[int, list[int]] = {}
    for context in (16, CONTEXT):
        settings = ModelSettings(checkpoint=tmp_path, device="cpu", threads=threads, max_context_length=context)
        engine, _ = build_engine(settings, manifest)
        engine.submit(create_submit("a", prompt_ids, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
        found[context] = []
        while engine.has_work:
            found[context] += [token for event in engine.step().events for token in event.token_ids]
    assert found[16] == whole[0, 8:].tolist() != found[CONTEXT]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3_moe"])
def test_greedy_tokens_over_http_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    prompt_ids = saved(directory)
    tokens, best = expected(read_by_library(directory), prompt_ids)
    tokenizer = load_tokenizer(directory)
    with serving(directory, tmp_path, "--dtype", "float32") as service:
        body = service.complete(PROMPT, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
        assert service.get("/v1/models").json()["data"][0]["id"] == name
    assert body["usage"]["prompt_tokens"] == len(prompt_ids)
    (choice,) = body["choices"]
    assert choice["logprobs"]["tokens"] == [format_token_name(tokenizer, token) for token in tokens]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(best[:, 0].tolist(), abs=1e-4)


@pytest.mark.slow
def test_a_converted_nanogpt_is_served_over_http(tmp_path: Path) -> None:
    arguments = ARGUMENTS | {"vocab_size": len(CHARACTERS), "block_size": CONTEXT, "bias": False}
    state = random_state(arguments, seed=4)
    path = write_checkpoint(tmp_path / "ckpt.pt", arguments, state)
    convert_nanogpt(path, meta(tmp_path / "meta.pkl"), tmp_path / "bard")
    prompt = "First Citizen:\nBefore we proceed"
    ids = [CHARACTERS.index(character) for character in prompt]
    leads = []
    for _ in range(NUM_TOKENS):
        best = logits(arguments, state, torch.tensor(ids))[-1].log_softmax(-1).topk(2)
        leads.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    assert min(leads) > CLEAR
    text = "".join(CHARACTERS[token] for token in ids[len(prompt) :])
    assert len(set(text)) >= 15
    with serving(tmp_path / "bard", tmp_path, "--dtype", "float32") as service:
        assert service.text(prompt, temperature=0, max_tokens=NUM_TOKENS) == text
        refused = service.post(prompt="\u00e9", max_tokens=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
