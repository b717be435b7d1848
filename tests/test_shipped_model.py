"""The shipped model: complete files, matching manifest, English text, chat completions, and attributions."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.chat.chatml import END
from model.chat.template_sandbox import compile_template, render
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.evaluation.likelihood import evaluate
from model.evaluation.prompts import PROMPTS, Prompt, PromptKind, prompt_ids, read_template
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.byte_level import ByteLevelTokenizer, load_native
from model.tokenizer.generation_config import read_generation_config
from model.training.config import load_train_config
from service.cli.main import main
from tests.model.tokenizer.texts import stories

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "kvasir-20m"
CONFIGS = ROOT / "model" / "training" / "configs"
AESOP = (ROOT / "tests" / "data" / "aesop.txt").read_text()
CARD = (CHECKPOINT / "MODEL_CARD.md").read_text()
NOTICE = (ROOT / "NOTICE").read_text()
README = (ROOT / "README.md").read_text()
MB = 1_000_000
# Runs before the last step, the latest first.
RUNS = ("twelfth", "tenth", "eighth", "seventh", "sixth", "mean", "fifth", "fourth", "third", "second", "base")


@dataclass(frozen=True, slots=True)
class Shipped:
    """The model and its tokenizer, as `kvasir serve` loads them on a CPU."""

    model: Transformer
    tokenizer: ByteLevelTokenizer

    def says(self, prompt: Prompt, params: SamplingParams) -> tuple[str, list[int]]:
        """Return the completion, as text and as token ids."""
        ids = prompt_ids(prompt, self.tokenizer, read_template(CHECKPOINT, self.tokenizer))
        said = generate(self.model, ids, params, eos_token_ids=self.tokenizer.eos_token_ids)
        return self.tokenizer.decode(said), said


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    manifest = read_manifest(CHECKPOINT)
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    return Shipped(model, load_native(CHECKPOINT))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_the_checkpoint_is_complete_and_matches_the_recipe() -> None:
    manifest = read_manifest(CHECKPOINT)
    manifest.verify()
    recipe = load_train_config(CONFIGS / "kvasir.toml")
    assert (manifest.name, manifest.config) == (recipe.name, recipe.model)
    for name in ("steps", "chat_steps", "seed"):
        assert manifest.training[name] == getattr(recipe, name)
    assert manifest.training["tokens"] == recipe.steps * recipe.tokens_per_step
    named = ("name", "licence", "attribution", "repeats", "chat_repeats")
    wanted = sorted([getattr(source, name) for name in named] for source in recipe.sources)
    assert sorted([source[name] for name in named] for source in manifest.training["sources"]) == wanted
    assert all(re.fullmatch(r"[0-9a-f]{64}", source["sha256"]) for source in manifest.training["sources"])
    assert re.fullmatch(r"[0-9a-f]{40}", manifest.training["commit"])


def test_the_manifest_and_the_card_name_the_runs_that_the_weights_come_from() -> None:
    card, run = " ".join(CARD.split()), read_manifest(CHECKPOINT).training
    tokens = run["tokens"]
    for recipe in RUNS:
        config, run = load_train_config(CONFIGS / f"kvasir-{recipe}.toml"), run["started_from"]
        assert (run["name"], run["steps"], run["tokens"]) == (
            config.name,
            config.steps,
            config.steps * config.tokens_per_step,
        )
        read = f"{run['tokens'] / 1e6:.1f} million" if run["tokens"] >= 1e5 else f"{run['tokens']:,}"
        steps = "1 step" if run["steps"] == 1 else f"{run['steps']:,} steps"
        assert f"a run of {steps} ({read} tokens" in card
        assert f"commit `{run['commit'][:12]}`). " in card
        tokens += run["tokens"]
    assert f"{tokens / 1e6:.1f} million tokens in all." in card


def test_the_checkpoint_files_are_below_the_size_limits() -> None:
    assert all(path.stat().st_size <= 15 * MB for path in read_manifest(CHECKPOINT).weight_files)
    assert sum(path.stat().st_size for path in CHECKPOINT.parent.rglob("*") if path.is_file()) <= 48 * MB


def test_the_model_card_has_the_measured_figures() -> None:
    training = read_manifest(CHECKPOINT).training
    documents = {source["name"]: source["held_out_documents"] for source in training["sources"]}
    assert set(training["held_out_bits_per_byte"]) == {name for name, number in documents.items() if number}
    for name, bits in training["held_out_bits_per_byte"].items():
        nats, accuracy = training["held_out_nats_per_token"][name], training["held_out_accuracy"][name]
        before = training["started_from"]["held_out_bits_per_byte"][name]
        figures = f"{before:.4f} | {bits:.4f} | {nats:.4f} | {accuracy:.1%}"
        assert f"| {name} | {documents[name]:,} | {figures} |" in CARD
    assert f"right | {training['started_from']['suite']['pairs']['accuracy']:.1%} | " in CARD
    assert f" | {training['suite']['pairs']['accuracy']:.1%} |" in CARD
    assert f"| seed | {training['seed']} |" in CARD
    assert f"| commit | `{training['commit'][:12]}` |" in CARD
    for source in training["sources"]:
        assert f"| {source['licence']} | {source['attribution']} | `{source['sha256'][:16]}` |" in CARD
    assert (CHECKPOINT / "loss.png").exists() == ("loss.png" in CARD) == (training["steps"] > 1)


def test_the_model_card_has_a_completion_of_every_fixed_prompt() -> None:
    num_long = 0
    for prompt in PROMPTS:
        quoted = prompt.text.replace("\n", "\n> ")
        (completion,) = re.findall(rf"^> \*\*{re.escape(quoted)}\*\*(.*(?:\n> .*)*)", CARD, re.M)
        num_long += len(words(completion)) >= 3
    assert num_long >= 0.9 * len(PROMPTS), "a few may end at once"


def test_notice_has_the_attribution_of_every_training_source() -> None:
    """For each source with an attribution, one entry of NOTICE has the attribution and the licence."""
    entries = [set(re.findall(r"\w+", entry.lower())) for entry in re.split(r"\n(?=  \S)|\n\n", NOTICE)]
    named = 0
    for source in read_manifest(CHECKPOINT).training["sources"]:
        if source["attribution"]:
            asked = set(re.findall(r"\w+", f"{source['attribution']} {source['licence']}".lower()))
            assert any(asked <= entry for entry in entries), source["attribution"]
            named += 1
    assert named >= 5


def test_the_readme_has_the_measured_losses() -> None:
    measured = read_manifest(CHECKPOINT).training["held_out_bits_per_byte"]
    words_apart = re.sub(r"\s+", " ", README)
    shown = re.search(r"([\d.]+) bits per byte on held-out TinyStories, ([\d.]+) on the Simple English", words_apart)
    assert shown is not None
    assert shown.groups() == tuple(f"{measured[name]:.2f}" for name in ("tinystories-valid", "simplewiki"))


def test_the_model_writes_english_words(shipped: Shipped) -> None:
    """Nearly every word of a greedy story is a common word of stories; random letters would form none."""
    known = set(words(AESOP)) | {word for story in stories() for word in words(story)}
    greedy = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    text, _ = shipped.says(Prompt(PromptKind.STORY, "Once upon a time, there was a"), greedy)
    assert len(words(text)) > 40
    assert sum(word in known for word in words(text)) > 0.9 * len(words(text))


def test_the_model_has_a_low_loss_on_english(shipped: Shipped) -> None:
    """Bits per byte of held-out stories and fables: random bytes have 8, independent letters over 4."""
    for texts, limit in ((stories()[::8], 1.0), (AESOP.split("\n\n")[:20], 1.9)):
        assert evaluate(shipped.model, shipped.tokenizer, texts).bits_per_byte < limit


def test_a_kv_cache_in_int8_costs_at_most_half_a_percent(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    text = ("--texts", f"aesop={ROOT / 'tests' / 'data' / 'aesop.txt'}", "--max-documents", "20", "--samples", "0")
    options = (
        "--device",
        "cpu",
        "--threads",
        str(torch.get_num_threads()),
        "--kv-cache-dtype",
        "int8",
        "--out",
        str(out),
    )
    assert main(["eval", "--checkpoint", str(CHECKPOINT), *text, *options]) == 0
    result = json.loads(out.read_text())
    rounded, plain = (result[key]["aesop"]["bits_per_byte"] for key in ("held_out", "without_rounding"))
    assert 0 < abs(rounded / plain - 1) < 0.005


@pytest.mark.parametrize("greeting", ["Hello!", "Hi there!", "Good morning!"])
def test_the_model_replies_to_a_greeting_and_stops(shipped: Shipped, greeting: str) -> None:
    text, ids = shipped.says(Prompt(PromptKind.CHAT, greeting), SamplingParams(max_tokens=80, temperature=0.0))
    assert ids[-1] == shipped.tokenizer.special_tokens[END]
    assert set(words(text)) & {"hello", "hi", "good", "morning", "hey", "help", "nice", "kvasir"}, text


def test_the_model_writes_a_story_on_request(shipped: Shipped) -> None:
    params = SamplingParams(max_tokens=600, temperature=0.7, top_p=0.95, seed=1)
    text, ids = shipped.says(Prompt(PromptKind.CHAT, "Tell me a story about a little dog."), params)
    assert ids[-1] == shipped.tokenizer.special_tokens[END]
    assert len(words(text)) > 30
    assert "dog" in words(text)


def test_the_default_temperature_is_below_one() -> None:
    """Requests without a temperature get a lower temperature than OpenAI's default of 1, which suits a small model."""
    defaults = read_generation_config(CHECKPOINT)
    assert defaults.temperature is not None
    assert 0 < defaults.temperature < 1
    assert set(load_native(CHECKPOINT).eos_token_ids) >= {load_native(CHECKPOINT).special_tokens[END]}


CALCULATOR = {
    "name": "calculator",
    "description": "Calculate an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def reply(shipped: Shipped, messages: list[dict[str, Any]], *functions: dict[str, Any]) -> str:
    """Return the greedy reply to a conversation with tools, without a grammar that would enforce calls."""
    template = read_template(CHECKPOINT, shipped.tokenizer)
    tools = [{"type": "function", "function": function} for function in functions] or None
    variables = template.variables(messages, add_generation_prompt=True, tools=tools)
    text = render(compile_template(template.source), variables, max_characters=10_000)
    ids = shipped.tokenizer.encode(text, parse_special=True)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    said = generate(shipped.model, ids, params, eos_token_ids=shipped.tokenizer.eos_token_ids)
    return shipped.tokenizer.decode(said).removesuffix(END)


@pytest.mark.parametrize(
    ("question", "expression"), [("What is 12 times 7?", "12 * 7"), ("What is 345 + 82?", "345 + 82")]
)
def test_the_model_calls_a_calculator(shipped: Shipped, question: str, expression: str) -> None:
    called = json.loads(
        reply(shipped, [{"role": "user", "content": question}], CALCULATOR)
        .removeprefix("<tool_call>\n")
        .removesuffix("\n</tool_call>")
    )
    assert called == {"name": "calculator", "arguments": {"expression": expression}}


def test_the_model_answers_with_the_result_of_a_call(shipped: Shipped) -> None:
    call = {"function": {"name": "calculator", "arguments": {"expression": "12 * 7"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 12 times 7?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "84"},
    ]
    assert re.search(r"\b84\b", reply(shipped, messages, CALCULATOR))


def test_the_model_says_that_it_does_not_know(shipped: Shipped) -> None:
    for question in ("What is the weather today?", "What time is it?"):
        assert {"know", "cannot", "sorry"} & set(words(reply(shipped, [{"role": "user", "content": question}]))), (
            question
        )
