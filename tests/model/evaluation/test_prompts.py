"""Fixed prompts as token ids of a checkpoint, and the samples of their completions."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from model.chat.template_sandbox import TemplateFailure
from model.config import ModelConfig
from model.evaluation.evaluation import Evaluation, evaluate_checkpoint
from model.evaluation.likelihood import evaluate
from model.evaluation.minimal_pairs import Pair, score_pairs
from model.evaluation.prompts import (
    PROMPTS,
    TEMPERATURES,
    Prompt,
    PromptKind,
    Sampler,
    complete_one_by_one,
    measure_diversity,
    prompt_ids,
    read_template,
)
from model.io.files import CheckpointError
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.interface import Tokenizer
from tests.model.configs import ROTARY, build
from tests.tiny_model import EOS, tiny_tokenizer

MESSAGE = Prompt(PromptKind.CHAT, "an inn")
STORY = Prompt(PromptKind.STORY, "an inn")
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> ByteLevelTokenizer:
    marks = {EOS: 256, "<|start|>": 257, "<|end|>": 258}
    return ByteLevelTokenizer(
        pattern=r"\s+|\S+",
        ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens=marks,
        eos_token_ids=(256, 258),
        bos_token_id=256,
    )


class Recorder:
    """A `Complete` that responds to each prompt with a distinct word, and records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[SamplingParams]]] = []

    def __call__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
    ) -> list[list[int]]:
        self.asked.append(([list(ids) for ids in prompts], list(params)))
        end = tokenizer.eos_token_ids[0]
        return [[*tokenizer.encode(f"word{wanted.seed} {index}"), end] for index, wanted in enumerate(params)]


def test_there_are_forty_prompts_of_four_kinds() -> None:
    assert len(PROMPTS) == len({prompt.text for prompt in PROMPTS}) == 40
    assert [kind for kind, _ in itertools.groupby(prompt.kind for prompt in PROMPTS)] == list(PromptKind)


def test_a_chat_prompt_is_rendered_by_the_checkpoints_template(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    template = read_template(tmp_path, tokenizer)
    text = tokenizer.encode
    expected = [257, *text("user\nan inn"), 258, *text("\n"), 257, *text("assistant\n")]
    assert prompt_ids(MESSAGE, tokenizer, template) == expected
    assert prompt_ids(STORY, tokenizer, template) == [256, *text("an inn")]


def test_without_a_template_a_chat_prompt_is_its_plain_text(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    template = read_template(tmp_path, tokenizer)
    assert prompt_ids(MESSAGE, tokenizer, template) == [256, *tokenizer.encode("an inn")]
    no_begin = tiny_tokenizer()
    assert prompt_ids(STORY, no_begin, read_template(tmp_path, no_begin)) == no_begin.encode("an inn")


def test_a_failing_template_raises_an_error(tmp_path: Path) -> None:
    model, tokenizer = build(ModelConfig.from_dict(ROTARY)), chat_tokenizer()
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(TemplateFailure, match="no"):
        Sampler(model, tokenizer, tmp_path, complete_one_by_one)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Sampler(model, tokenizer, tmp_path, complete_one_by_one)


def test_parameters_of_shown_samples_and_of_diversity_samples(tmp_path: Path) -> None:
    model, recorder = build(ModelConfig.from_dict({**ROTARY, "max_context_length": 256})), Recorder()
    sampler = Sampler(model, chat_tokenizer(), tmp_path, recorder, draws=3)
    shown = sampler.shown()
    assert [(sample.prompt, sample.kind) for sample in shown] == [(prompt.text, prompt.kind) for prompt in PROMPTS]
    assert [sample.completion for sample in shown] == [f"word0 {index}" for index in range(40)]
    prompts, params = recorder.asked[0]
    assert {(p.temperature, p.top_p, p.seed) for p in params} == {(0.8, 0.95, 0)}
    assert all(len(ids) + p.max_tokens <= 256 for ids, p in zip(prompts, params, strict=True))
    measured = sampler.diversity(0.5)
    prompts, params = recorder.asked[1]
    assert prompts == recorder.asked[0][0] * 3
    assert [p.seed for p in params] == list(range(120)), "no two draws share a seed"
    assert {(p.temperature, p.top_p) for p in params} == {(0.5, 1.0)}
    assert measured == measure_diversity(0.5, [f"word{index} {index}" for index in range(120)])


def test_prompts_longer_than_the_context_are_skipped(tmp_path: Path) -> None:
    model, recorder = build(ModelConfig.from_dict({**ROTARY, "max_context_length": 24})), Recorder()
    shown = Sampler(model, chat_tokenizer(), tmp_path, recorder).shown()
    assert [sample.prompt for sample in shown] == [p.text for p in PROMPTS if len(p.text.encode()) + 1 < 24]
    assert 0 < len(shown) < len(PROMPTS)


def test_the_reference_implementation_completes_one_prompt_at_a_time() -> None:
    model, tokenizer = build(ModelConfig.from_dict(ROTARY)), tiny_tokenizer()
    params = [SamplingParams(max_tokens=5, seed=seed) for seed in (1, 2)]
    eos = tokenizer.eos_token_ids
    alone = [generate(model, [1, 2], wanted, eos_token_ids=eos) for wanted in params]
    assert complete_one_by_one(model, tokenizer, [[1, 2], [1, 2]], params) == alone


def test_evaluate_checkpoint_measures_every_metric(tmp_path: Path) -> None:
    model, tokenizer, said = build(ModelConfig.from_dict(ROTARY)), chat_tokenizer(), list[str]()
    splits = {"a": ["the inn", "an inn"], "none": [], "b": ["once"]}
    pairs = [Pair(good="a b", bad="b a", group="order"), Pair(good="b", bad="a")]
    sampler = Sampler(model, tokenizer, tmp_path, Recorder(), draws=1)
    found = evaluate_checkpoint(model, tokenizer, splits=splits, pairs=pairs, sampler=sampler, report=said.append)
    assert found.held_out == {name: evaluate(model, tokenizer, splits[name]) for name in ("a", "b")}
    assert found.pairs == score_pairs(model, tokenizer, pairs)
    assert [measured.temperature for measured in found.diversity] == list(TEMPERATURES)
    assert len(found.samples) == len(sampler.shown())
    assert len(said) == 4 + len(TEMPERATURES)
    facts = found.to_dict()
    assert facts["held_out"]["a"]["documents"] == 2
    assert facts["held_out"]["b"]["bits_per_byte"] == found.held_out["b"].bits_per_byte
    assert set(facts["pairs"]["groups"]) == {"", "order"}
    assert facts["samples"][0]["kind"] == "story"


def test_greedy_completions_that_repeat_themselves_are_loops(tmp_path: Path) -> None:
    model, tokenizer = build(ModelConfig.from_dict(ROTARY)), chat_tokenizer()
    texts = ["a b c d e f", "round and round and round and round and round", "short"]

    def complete(model: Transformer, tokenizer: Tokenizer, *asked: Sequence[object]) -> list[list[int]]:
        assert {params.temperature for params in asked[1] if isinstance(params, SamplingParams)} == {0.0}
        return [list(text.encode()) for text in texts]

    prompts = [Prompt(PromptKind.STORY, "once")] * len(texts)
    assert Sampler(model, tokenizer, tmp_path, complete, prompts=prompts).looping_share() == 0.5


def test_metrics_that_are_not_requested_are_not_measured() -> None:
    model, tokenizer = build(ModelConfig.from_dict(ROTARY)), tiny_tokenizer()
    assert evaluate_checkpoint(model, tokenizer, splits={}) == Evaluation(pairs=[], diversity=[], samples=[])
    assert Evaluation().to_dict() == {
        "held_out": {},
        "cloze": {},
        "pairs": None,
        "diversity": [],
        "looping_share": None,
        "samples": [],
    }
