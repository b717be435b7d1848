"""Greedy tokens of every family equal those of the transformers library, in the engine and over HTTP.

Over HTTP, one family is tested for each kind of tokenizer. Token names and logprobs are compared, because two tokens
may have the same name. In these models the best token's logprob is always far above the second's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.checkpoint.conversion.import_nanogpt import convert_nanogpt
from model.checkpoint.manifest import read_manifest
from model.native.native_transformer import to_native
from model.sampling.params import SamplingParams
from model.tokenizer.files import load_tokenizer
from service.config.settings import ModelSettings
from service.engine.engine import Engine, complete_batch, create_submit
from service.engine.scheduling.scheduler import EngineConfig
from service.protocol.logprobs import format_token_name
from service.worker.engine_factory import build_engine, prepare_matrices
from tests.e2e.process import serving
from tests.families.models import DYNAMIC, GEMMA_ROPES, LONGROPE, TYPES, WINDOW, YARN, Case, load, read_by_library
from tests.families.nanogpt import ARGUMENTS, logits, random_state, write_checkpoint
from tests.families.parity_table import Record, prove
from tests.families.test_nanogpt import CHARACTERS, meta
from tests.families.tokenizer_files import write_byte_level, write_sentence_piece
from tests.model.kernel_libraries import BACKENDS

PROMPT = "The dog did not cross the road as it was too tired. "
NUM_TOKENS = 40
IN_EVERY_RUN = ("gpt2", "mistral")  # a model of each kind of tokenizer; `make families` serves all models
ROUNDING = 0.1  # of int8 matrices and inputs, in models as small as these, as a share of the largest logit
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
    "gemma4": (
        Case("gemma4_text", {"tie_word_embeddings": False, "vocab_size_per_layer_input": VOCAB_SIZE}),
        write_sentence_piece,
    ),
    "opt": (Case("opt"), write_byte_level),
    "bloom": (Case("bloom", {"tie_word_embeddings": False}), write_byte_level),
    "falcon": (Case("falcon", {"tie_word_embeddings": False}), write_byte_level),
    "olmo2": (Case("olmo2"), write_byte_level),
    "olmo3": (Case("olmo3", {"layer_types": TYPES}), write_byte_level),
    "exaone4": (Case("exaone4", {"sliding_window_pattern": 2}), write_byte_level),
    "ernie4_5": (Case("ernie4_5", {"tie_word_embeddings": False}), write_sentence_piece),
    "smollm3": (Case("smollm3", {"no_rope_layer_interval": 2}), write_byte_level),
    "hunyuan": (Case("hunyuan_v1_dense"), write_byte_level),
    "ministral3": (Case("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}}), write_byte_level),
    "cohere": (Case("cohere", {"tie_word_embeddings": False}), write_byte_level),
    "cohere2": (Case("cohere2", {"tie_word_embeddings": False, "layer_types": TYPES}), write_byte_level),
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
    positions = POSITIONS.get(case.family, "max_position_embeddings")
    for seed in range(30):
        model = case.build(seed, spread=0.3, vocab_size=VOCAB_SIZE, **{positions: CONTEXT})
        tokens, best = expected(model, prompt_ids)
        if len(set(tokens)) >= 10 and float((best[:, 0] - best[:, 1]).min()) > CLEAR:
            model.save_pretrained(directory)
            return
    raise AssertionError("no random model of this family has a clear best token at each position")


def saved(directory: Path) -> list[int]:
    """Save a model and its tokenizer in a directory; return the prompt's ids, encoded by the tokenizers library."""
    case, write_tokenizer = SERVED[directory.name]
    prompt_ids: list[int] = write_tokenizer(directory, VOCAB_SIZE).encode(PROMPT).ids
    save_decided_model(case, directory, prompt_ids)
    return prompt_ids


GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)

POSITIONS = {"gpt2": "n_positions", "bloom": "seq_length"}  # other names of max_position_embeddings


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, name: str, record_property: Record) -> None:
    """They are equal alone, in a batch with other prompts, and after a hit in the prefix cache."""
    prove(record_property, SERVED[name][0].family, "greedy", "batched", "prefix")
    prompt_ids = saved(tmp_path / name)
    tokens, _ = expected(read_by_library(tmp_path / name), prompt_ids)
    tokenizer = load_tokenizer(tmp_path / name)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert [*begin, *tokenizer.encode(PROMPT)] == prompt_ids
    for attention in BACKENDS:
        model = load(tmp_path / name, attention)
        assert complete_batch(model, tokenizer, [prompt_ids], [GREEDY]) == [tokens], attention
    blocks = EngineConfig(block_size=4, num_blocks=4 * CONTEXT // 4, max_num_running=4)
    engine = Engine(load(tmp_path / name, attention), tokenizer, blocks)
    for number, other in enumerate((prompt_ids[1:6], prompt_ids[::-1], prompt_ids[3:])):
        engine.submit(create_submit(str(number), other, GREEDY))
    for is_hit in (False, True):
        engine.submit(create_submit("a", prompt_ids, GREEDY))
        found: list[int] = []
        while engine.has_work:
            for event in engine.step().events:
                if event.uid == "a":
                    found += event.token_ids
                    assert event.finish is None or (event.finish.num_cached_tokens > 0) == is_hit
        assert found == tokens


@pytest.mark.parametrize("name", SERVED)
def test_int8_tokens_do_not_depend_on_the_batch(tmp_path: Path, name: str, record_property: Record) -> None:
    """With int8 matrices, logits stay near those of transformers, and greedy tokens are the same alone and batched."""
    prove(record_property, SERVED[name][0].family, "int8")
    case, write_tokenizer = SERVED[name]
    prompt_ids: list[int] = write_tokenizer(tmp_path, VOCAB_SIZE).encode(PROMPT).ids
    positions = POSITIONS.get(case.family, "max_position_embeddings")
    library: Any = case.build(vocab_size=VOCAB_SIZE, **{positions: CONTEXT})
    library.save_pretrained(tmp_path)
    tokenizer, model = load_tokenizer(tmp_path), load(tmp_path)
    prepare_matrices(model, "int8", None)
    native: Any = to_native(model)
    ours = native(torch.tensor(prompt_ids), AttentionMetadata.uncached((len(prompt_ids),)), None)
    with torch.no_grad():
        theirs = library(torch.tensor([prompt_ids]), use_cache=False).logits[0]
    # By rounding, a few tokens can get other experts of a mixture, and then other logits.
    differences_T = (ours - theirs).abs().amax(dim=1) / theirs.abs().max()
    is_mixture = native.config.experts is not None
    assert 0 < float(differences_T.median() if is_mixture else differences_T.max()) < ROUNDING
    few = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    (alone,) = complete_batch(native, tokenizer, [prompt_ids], [few])
    assert complete_batch(native, tokenizer, [prompt_ids[:5], prompt_ids], [few] * 2)[1] == alone


@pytest.mark.parametrize("case", [SERVED["phi3"][0], Case("llama", {"rope_parameters": DYNAMIC | {"factor": 10.0}})])
def test_the_served_context_selects_the_frequencies(tmp_path: Path, case: Case) -> None:
    """Within the original context of 16 tokens, tokens equal those of transformers only if no more are served."""
    prompt_ids = write_sentence_piece(tmp_path, VOCAB_SIZE).encode(PROMPT).ids[:8]
    positions = CONTEXT if case.family == "phi3" else 16
    case.build(vocab_size=VOCAB_SIZE, max_position_embeddings=positions).save_pretrained(tmp_path)
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
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.families) for name in SERVED]
)
def test_greedy_tokens_over_http_equal_those_of_transformers(
    tmp_path: Path, name: str, record_property: Record
) -> None:
    prove(record_property, SERVED[name][0].family, "HTTP")
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
    assert len(set(text)) >= 10
    with serving(tmp_path / "bard", tmp_path, "--dtype", "float32") as service:
        assert service.text(prompt, temperature=0, max_tokens=NUM_TOKENS) == text
        refused = service.post(prompt="\u00e9", max_tokens=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
