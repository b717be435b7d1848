"""With native kernels, completions are batch-invariant: bitwise identical alone and in a batch."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.backends import AttentionBackend
from model.attention.native import NativeAttention
from model.attention.sdpa import SdpaAttention
from model.native.native_transformer import NativeTransformer
from model.nn.linear import can_pack, replace_linears
from model.nn.transformer import Block, Transformer
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig
from service.engine.scheduling.step_plan import MIN_ROWS
from service.ipc.messages import StepStats, Submit, TokenDelta, TokenLogprob
from tests.engine.fakes import make_submit
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE, library_of

TOKENIZER = train_bpe([], 300)
CONFIG = EngineConfig(block_size=4, num_blocks=200, max_num_running=16, max_batched_tokens=64)
# Prompts in chunks, a pool that holds few sequences, prefix-cache hits.
CROWDED = dataclasses.replace(CONFIG, num_blocks=40, max_batched_tokens=16)
ROOM = 64
BEST, OTHERS = list(BUILDABLE)[:1], list(BUILDABLE)[1:]
# oneDNN packs bfloat16 only on CPUs with bfloat16 instructions.
PACKED = "packed" if can_pack("cpu", torch.bfloat16) else "plain"
KINDS = [(torch.float32, "plain"), (torch.bfloat16, PACKED), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")]
CASES = [(level, *kind, "rotary-gqa") for level in BEST for kind in KINDS]
CASES += [(level, *KINDS[1], "rotary-gqa") for level in OTHERS]
# Position biases, soft caps, norms of outputs, two rotary embeddings, unrotated layers, scaled cosines, divided logits.
FAMILIES = ("alibi", "gemma2", "gemma3", "smollm3", "phi3", "granite")
CASES += [(level, *kind, variant) for level in BEST for kind in KINDS[::2] for variant in FAMILIES]


def native_model(
    variant: str, backend: AttentionBackend, dtype: torch.dtype = torch.float32, kind: str = "plain"
) -> Transformer:
    model = build(VARIANTS[variant]).to(dtype)
    if kind != "plain":
        replace_linears(model, kind)
    for block in model.layers:
        assert isinstance(block, Block)
        block.attention.backend = backend
    return model


def native(level: str) -> NativeAttention:
    return NativeAttention(library_of(level))


def submissions(count: int) -> list[Submit]:
    """Make greedy and seeded submissions of mixed lengths, some with a shared prefix."""
    rng = random.Random(count)
    common = [rng.randrange(256) for _ in range(9)]
    made = []
    for number in range(count):
        prompt = common * (number % 2) + [rng.randrange(256) for _ in range(rng.randint(1, 25))]
        params: dict[str, Any] = {
            "temperature": 0.0 if number % 3 else 1.0,
            "seed": number,
            "logprobs": 2,
            "ignore_eos": True,
        }
        made.append(make_submit(f"s{number}", prompt, max_tokens=rng.randint(2, ROOM - len(prompt)), **params))
    return made


def drive(engine: Engine, submits: list[Submit]) -> tuple[dict[str, list[TokenDelta]], list[StepStats]]:
    """Run submissions, of which one arrives per step. Return the events of each uid, and each step's statistics."""
    waiting = list(submits)
    reported: dict[str, list[TokenDelta]] = {}
    stats = []
    while waiting or engine.has_work:
        if waiting:
            engine.submit(waiting.pop(0))
        result = engine.step()
        stats.append(result.stats)
        for delta in result.events:
            reported.setdefault(delta.uid, []).append(delta)
    return reported, stats


def counting(rows: list[int], hidden: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward pass so that it appends its number of packed tokens to `rows`."""

    def counted(model: Any, token_ids_T: Tensor, *rest: Any, **options: Any) -> Any:
        rows.append(len(token_ids_T))
        return hidden(model, token_ids_T, *rest, **options)

    return counted


def answer(deltas: list[TokenDelta]) -> tuple[list[int], list[TokenLogprob], str]:
    """Return the token ids, exact logprobs and text of a completion."""
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return [i for delta in deltas for i in delta.token_ids], logprobs, "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(("level", "dtype", "kind", "variant"), CASES)
def test_a_completion_is_batch_invariant(level: str, dtype: torch.dtype, kind: str, variant: str) -> None:
    submits = submissions(12)
    crowd, stats = drive(Engine(native_model(variant, native(level), dtype, kind), TOKENIZER, CROWDED), submits)
    assert max(step.batch_size for step in stats) > 4
    assert sum(step.num_preemptions for step in stats) > 0
    assert sum(step.num_prefix_hits for step in stats) > 0
    alone = Engine(native_model(variant, native(level), dtype, kind), TOKENIZER, CONFIG)
    for submit in submits:
        reported, _ = drive(alone, [submit])
        assert answer(reported[submit.uid]) == answer(crowd[submit.uid])


@pytest.mark.parametrize("level", BEST)
@pytest.mark.parametrize("variant", ["gpt2", "rotary-gqa"])
def test_an_attention_query_does_not_change_later_steps(level: str, variant: str) -> None:
    """An attention query with more tokens than any step allocates buffers that later steps use too."""
    answers = []
    for looks in (False, True):
        engine = Engine(native_model(variant, native(level)), TOKENIZER, CONFIG)
        engine.submit(make_submit("a", [1, 2, 3], max_tokens=8, ignore_eos=True))
        deltas = []
        while engine.has_work:
            deltas += engine.step().events
            if looks:
                engine.attention_weights(tuple(range(1, 20)), layer=0, heads=(0,))
        answers.append(answer(deltas)[0])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("level", BEST)
def test_a_single_sequence_is_padded_only_for_pytorch_kernels(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels are batch-invariant without padding. PyTorch's kernels round small steps differently."""
    rows: list[int] = []
    monkeypatch.setattr(NativeTransformer, "hidden", counting(rows, NativeTransformer.hidden))
    monkeypatch.setattr(NativeTransformer, "decode", counting(rows, NativeTransformer.decode))
    monkeypatch.setattr(Transformer, "hidden", counting(rows, Transformer.hidden))
    counted = []
    for backend in (SdpaAttention(), native(level)):
        engine = Engine(native_model("rotary-gqa", backend), TOKENIZER, CONFIG)
        engine.submit(make_submit("a", [1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True))
        while engine.has_work:
            engine.step()
        counted.append(list(rows))
        rows.clear()
    assert counted == [[5, MIN_ROWS, MIN_ROWS], [5, 1, 1]]


@pytest.mark.parametrize("level", BEST)
def test_matrices_are_freed_when_native_kernels_have_packed_them(level: str) -> None:
    model = native_model("rotary-gqa", native(level))
    Engine(model, TOKENIZER, CONFIG)
    assert not hasattr(model.layers[0], "mlp")


@pytest.mark.parametrize("level", BEST)
def test_prompt_logprobs_equal_those_of_pytorch(level: str) -> None:
    engines = (
        Engine(build(VARIANTS["gpt2"]), TOKENIZER, CONFIG),
        Engine(native_model("gpt2", native(level)), TOKENIZER, CONFIG),
    )
    scores = []
    for engine in engines:
        reported, _ = drive(engine, [make_submit("a", [5, 6, 7, 8], max_tokens=2, prompt_logprobs=1, ignore_eos=True)])
        scores.append([entry.logprob for delta in reported["a"] for entry in delta.prompt_logprobs or ()][1:])
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
