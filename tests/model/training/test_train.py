"""Complete small runs: exact resume, a servable checkpoint, and falling losses."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig
from model.evaluation.likelihood import evaluate
from model.evaluation.minimal_pairs import shipped_pairs
from model.evaluation.prompts import TEMPERATURES
from model.io.files import CheckpointError
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.byte_level import load_native
from model.tokenizer.interface import Tokenizer
from model.training.config import SourceConfig, TrainConfig, load_train_config
from model.training.optimizer import rate_factor
from model.training.state import STATE_FILE, config_facts, locked, read_log
from model.training.train import SUITE_CONTEXT, RunSettings, train
from tests.model.configs import ROTARY

SAMPLE = Path(__file__).parents[2] / "data" / "aesop.txt"
TALES = Path(__file__).parents[3] / "loadtest" / "client" / "tales.txt"


def config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "name": "aesop",
        "seed": 3,
        "vocab_size": 320,
        "model": ModelConfig.from_dict({**ROTARY, "vocab_size": 320}),
        "sources": (SourceConfig(name="aesop", path=SAMPLE, repeats=1, held_out=0.1, licence="public domain"),),
        "sequence_length": 32,
        "batch_size": 4,
        "steps": 30,
        "warmup_steps": 3,
        "decay_steps": 10,
        "matrix_lr": 1e-2,
        "adam_lr": 1e-2,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "checkpoint_minutes": 1000.0,
        "evaluate_every": 10,
        "sample_prompts": ("The fox",),
    }
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]


def settings(
    tmp_path: Path, run: str = "run", stop_after: int | None = None, precision: str = "float32"
) -> RunSettings:
    return RunSettings(
        run_directory=tmp_path / run,
        checkpoint=tmp_path / f"{run}-checkpoint",
        device="cpu",
        precision=precision,
        compile=False,
        stop_after=stop_after,
    )


def dialogues(tmp_path: Path, name: str = "dialogues") -> SourceConfig:
    """Return a source of short conversations, for the chat phase alone."""
    path = tmp_path / f"{name}.jsonl"
    fables = [text for text in SAMPLE.read_text().split("\n\n") if 100 < len(text) < 400]
    turns = [[["U", "Tell me a fable."], ["S", text]] for text in fables]
    path.write_text("".join(json.dumps({"turns": told}) + "\n" for told in turns))
    return SourceConfig(name=name, path=path, repeats=0, held_out=0.0, licence="public domain", chat_repeats=1.0)


def no_completions(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Return empty completions, for runs whose model card is not read: sampling would take longer than the run."""
    return [[] for _ in prompts]


def saved_step(run_directory: Path) -> int:
    with safe_open(run_directory / "state.safetensors", framework="pt") as file:
        return int(json.loads(file.metadata()["run"])["step"])


def losses(tmp_path: Path, run: str) -> list[float]:
    log = read_log(tmp_path / run / "log.jsonl")
    assert [line["step"] for line in log] == list(range(len(log)))
    return [line["loss"] for line in log]


def test_an_interrupted_run_has_the_losses_and_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    said: list[str] = []
    assert train(config(), settings(tmp_path, "whole"), said.append, complete=no_completions)
    for stop in (7, 8, 21):
        assert not train(config(), settings(tmp_path, "parts", stop_after=stop), said.append)
    # Effects of a crash: a step that was logged but not saved, and a truncated line.
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 21, "loss": 99.0}) + "\n" + '{"step": 22, "lo')
    assert train(config(), settings(tmp_path, "parts"), said.append, complete=no_completions)
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    assert losses(tmp_path, "whole")[-1] < 0.85 * losses(tmp_path, "whole")[0]
    whole, parts = (load_file(tmp_path / run / "state.safetensors") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert "resuming at step 21 of 30" in said


@pytest.mark.parametrize("stop", [4, 12, 24])
def test_a_run_with_a_chat_phase_resumes_exactly(tmp_path: Path, stop: int) -> None:
    """Packed documents, dropout and conversations: interrupted in either phase, and at the boundary."""
    both = config(
        mask_documents=True,
        dropout=0.1,
        chat_steps=10,
        sample_prompts=(),
        sources=(*config().sources, dialogues(tmp_path)),
        steps=22,
        vocab_size=322,
        model=ModelConfig.from_dict({**ROTARY, "vocab_size": 322, "max_context_length": 48}),
    )
    if stop < both.steps:
        assert not train(both, settings(tmp_path, "parts", stop_after=stop), lambda text: None)
    assert train(both, settings(tmp_path, "parts"), lambda text: None, complete=no_completions)
    assert train(both, settings(tmp_path, "whole"), lambda text: None, complete=no_completions)
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    tokenizer = load_native(tmp_path / "whole-checkpoint")
    assert len(tokenizer.eos_token_ids) == 2
    assert (tmp_path / "whole-checkpoint" / "chat_template.jinja").is_file()
    assert "suite" not in read_manifest(tmp_path / "whole-checkpoint").training, "the context is too short"


def test_the_checkpoint_has_the_mean_of_the_weights_of_the_last_steps(tmp_path: Path) -> None:
    averaged = config(average_steps=3)
    weights = []
    for step in (28, 29, 30):
        train(averaged, settings(tmp_path, stop_after=step), lambda text: None, complete=no_completions)
        saved = load_file(tmp_path / "run" / STATE_FILE).items()
        weights.append({name.removeprefix("model/"): tensor for name, tensor in saved if name.startswith("model/")})
    written = load_file(tmp_path / "run-checkpoint" / "model.safetensors")
    for name, tensor in written.items():
        mean = torch.stack([each[name] for each in weights]).mean(dim=0)
        torch.testing.assert_close(tensor, mean.to(tensor.dtype))
    assert any(not torch.equal(tensor, weights[-1][name].to(tensor.dtype)) for name, tensor in written.items())
    with pytest.raises(ValueError, match="the mean of the weights have begun"):
        train(config(average_steps=4), settings(tmp_path), lambda text: None)


def test_a_run_may_consist_of_conversations_and_resumes_within_its_mean(tmp_path: Path) -> None:
    talks = config(
        mask_documents=True,
        steps=6,
        chat_steps=6,
        warmup_steps=1,
        decay_steps=0,
        average_steps=4,
        sources=(dialogues(tmp_path),),
        vocab_size=322,
        model=ModelConfig.from_dict({**ROTARY, "vocab_size": 322}),
    )
    said: list[str] = []
    assert not train(talks, settings(tmp_path, "parts", stop_after=4), said.append)
    for run in ("parts", "whole"):
        assert train(talks, settings(tmp_path, run), said.append, complete=no_completions)
    parts, whole = (load_file(tmp_path / f"{run}-checkpoint/model.safetensors") for run in ("parts", "whole"))
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    epoch = read_manifest(tmp_path / "whole-checkpoint").training["epoch_tokens"]
    assert any(line.startswith(f"{epoch:,} tokens per epoch, {6 * talks.tokens_per_step / epoch:.1f}") for line in said)
    silent = dataclasses.replace(talks.sources[0], chat_repeats=0.0)
    with pytest.raises(ValueError, match="chat_steps needs a chat source"):
        dataclasses.replace(talks, sources=(silent,))


def test_the_sentences_of_the_suite_fit_the_context_that_it_needs() -> None:
    """A token has at least one byte, and the begin-of-text token comes first."""
    assert max(len(text.encode()) + 1 for pair in shipped_pairs() for text in (pair.good, pair.bad)) <= SUITE_CONTEXT


def test_the_finished_checkpoint_loads_and_has_manifest_and_model_card(tmp_path: Path) -> None:
    run = settings(tmp_path)
    assert train(config(), run, lambda text: None)
    manifest = read_manifest(run.checkpoint)
    manifest.verify()
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["eager"])
    tokenizer = load_native(run.checkpoint)
    source = manifest.training["sources"][0]
    assert source["documents"] > 0
    assert source["held_out_documents"] > 0
    assert len(source["sha256"]) == 64
    assert manifest.training["steps"] == 30
    assert "suite" not in manifest.training, "the recipe has its own prompts"
    assert manifest.training["tokens"] == 30 * 4 * 32
    bits = manifest.training["held_out_bits_per_byte"]["aesop"]
    assert 1.0 < bits < math.log2(256)
    card = (run.checkpoint / "MODEL_CARD.md").read_text()
    assert f"{bits:.4f}" in card
    assert "**The fox**" in card
    assert (run.checkpoint / "loss.png").read_bytes().startswith(b"\x89PNG")
    # One text by hand: -log2 of its tokens' probabilities over its bytes.
    text = "The fox and the grapes."
    (end,) = tokenizer.eos_token_ids
    ids = [end, *tokenizer.encode(text), end]
    assert evaluate(model, tokenizer, [text]).bits_per_byte == pytest.approx(_bits(model, ids) / len(text), rel=1e-5)


def _bits(model: torch.nn.Module, ids: list[int], until: int | None = None) -> float:
    logprobs = model(torch.tensor(ids[:-1]), AttentionMetadata.uncached((len(ids) - 1,)), None).log_softmax(-1)
    predicted = range(len(ids) - 1 if until is None else until)
    return -sum(float(logprobs[i, ids[i + 1]]) for i in predicted) / math.log(2)


def test_losses_fall_in_bfloat16_autocast(tmp_path: Path) -> None:
    run = settings(tmp_path, precision="bfloat16")
    train(config(), dataclasses.replace(run, stop_after=29), lambda text: None)
    assert losses(tmp_path, "run")[-1] < 0.8 * losses(tmp_path, "run")[0]


def test_only_the_number_of_steps_may_change_and_only_on_the_plateau(tmp_path: Path) -> None:
    train(config(), settings(tmp_path, stop_after=5), lambda text: None)
    train(config(steps=40), settings(tmp_path, "grown"), lambda text: None, complete=no_completions)
    assert train(config(steps=40), settings(tmp_path), lambda text: None, complete=no_completions)
    assert losses(tmp_path, "run") == losses(tmp_path, "grown")
    with pytest.raises(ValueError, match="the learning rate decays"):
        train(config(steps=50), settings(tmp_path), lambda text: None)
    with pytest.raises(ValueError, match="began with different values of seed, matrix_lr"):
        train(config(seed=4, matrix_lr=1.0), settings(tmp_path), lambda text: None)


def test_chat_sources_may_change_until_the_learning_rate_decays(tmp_path: Path) -> None:
    marked = {"vocab_size": 322, "model": ModelConfig.from_dict({**ROTARY, "vocab_size": 322}), "chat_steps": 5}
    fables, talk, more = config().sources[0], dialogues(tmp_path), dialogues(tmp_path, "more")
    train(config(**marked, sources=(fables, talk)), settings(tmp_path, stop_after=20), lambda text: None)
    both = config(**marked, sources=(fables, talk, more))
    assert not train(both, settings(tmp_path, stop_after=21), lambda text: None)
    with pytest.raises(ValueError, match="began with different values of chat_sources"):
        train(config(**marked, sources=(fables, talk)), settings(tmp_path), lambda text: None)


def test_a_run_killed_before_its_first_save_of_steps_starts_over(tmp_path: Path) -> None:
    assert not train(config(), settings(tmp_path, stop_after=3), lambda text: None)
    whole = losses(tmp_path, "run")
    killed = settings(tmp_path, "killed", stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        train(config(), killed, lambda text: None, _interrupt)
    assert not train(config(), killed, lambda text: None)
    assert losses(tmp_path, "killed") == whole


def _interrupt() -> bool:
    raise KeyboardInterrupt


def test_a_chat_source_without_a_reply_is_rejected_before_training(tmp_path: Path) -> None:
    source = dialogues(tmp_path)
    source.path.write_text(json.dumps({"turns": [["S", "Welcome."], ["U", "Hello?"]]}) + "\n")
    with pytest.raises(ValueError, match=r"dialogues\.jsonl: no conversation has an answer; set chat_repeats = 0"):
        train(config(sources=(*config().sources, source), chat_steps=3), settings(tmp_path), lambda said: None)


def test_a_changed_corpus_file_is_rejected_on_resume(tmp_path: Path) -> None:
    def source(text: str) -> SourceConfig:
        (tmp_path / "corpus.txt").write_text(text)
        return SourceConfig(name="c", path=tmp_path / "corpus.txt", repeats=1, held_out=0.0, licence="none")

    text = SAMPLE.read_text()
    train(config(sources=(source(text),)), settings(tmp_path, stop_after=2), lambda said: None)
    with pytest.raises(ValueError, match="began with different values of corpora"):
        train(config(sources=(source(text + " More."),)), settings(tmp_path), lambda said: None)


def test_a_run_directory_holds_one_run_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="another run is using it"):
        train(config(), settings(tmp_path), lambda text: None)


def test_a_checkpoint_directory_with_other_files_is_rejected(tmp_path: Path) -> None:
    """The error comes before the training, not after."""
    run = settings(tmp_path)
    run.checkpoint.mkdir()
    (run.checkpoint / "precious.safetensors").write_text("theirs")
    with pytest.raises(CheckpointError, match="contains files but no manifest"):
        train(config(), run, lambda text: None)
    assert (run.checkpoint / "precious.safetensors").read_text() == "theirs"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another directory"):
        train(config(), dataclasses.replace(run, checkpoint=tmp_path / "file"), lambda text: None)


def test_a_run_killed_while_it_moved_its_checkpoint_writes_it_again(tmp_path: Path) -> None:
    short = config(steps=2, decay_steps=1, warmup_steps=0)
    train(short, settings(tmp_path), lambda text: None, complete=no_completions)
    finished = settings(tmp_path).checkpoint
    (finished / ".partial").mkdir()
    for name in ("manifest.json", "config.json"):
        (finished / name).replace(finished / ".partial" / name)
    train(short, settings(tmp_path), lambda text: None, complete=no_completions)
    assert read_manifest(finished).training["steps"] == 2
    assert not (finished / ".partial").exists()


def test_a_damaged_save_is_rejected(tmp_path: Path) -> None:
    train(config(), settings(tmp_path, stop_after=2), lambda text: None)
    path = tmp_path / "run" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        train(config(), settings(tmp_path), lambda text: None)


def test_an_incomplete_save_leaves_the_previous_save(tmp_path: Path) -> None:
    train(config(), settings(tmp_path, stop_after=2), lambda text: None)
    run = tmp_path / "run"
    (run / "state.partial").write_bytes((run / "state.safetensors").read_bytes()[:100])
    said: list[str] = []
    train(config(), settings(tmp_path, stop_after=3), said.append)
    assert "resuming at step 2 of 30" in said
    assert not (run / "state.partial").exists()


def test_a_diverging_run_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower matrix_lr and adam_lr"):
        train(config(adam_lr=1e9, matrix_lr=1e9), settings(tmp_path), lambda text: None)


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [rate_factor(step, config()) for step in range(31)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[3:21] == [1.0] * 18
    assert rates[25] == pytest.approx(0.5)
    assert rates[30] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: Expected `int` >= 1"),
        ({"decay_steps": 29}, "must fit into steps"),
        ({"average_steps": 31}, "chat_steps and average_steps must be at most steps"),
        ({"sequence_length": 65}, "at most the model's max_context_length"),
        ({"sources": ()}, "no source is trained on"),
        ({"steps": 20.5}, "steps: Expected `int`"),
        ({"batch_size": True}, "batch_size: Expected `int`"),
        ({"matrix_lr": "fast"}, "matrix_lr: Expected `float`"),
        ({"adam_lr": math.nan}, "adam_lr: Expected `float`"),
        ({"grad_clip": 0.0}, "grad_clip: Expected `float` > 0"),
        ({"name": "../../x"}, "name must consist of letters"),
        ({"sample_prompts": (1,)}, "Expected `str`, got `int`"),
    ],
)
def test_unusable_configs_are_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config(), **change)  # type: ignore[arg-type]


def test_the_shipped_recipe_is_valid(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "model" / "training" / "configs" / "kvasir-base.toml"
    recipe = load_train_config(path)
    assert 8e6 < recipe.model.num_parameters < 10e6
    (tmp_path / "a.toml").write_text(path.read_text() + "\n[colour]\nred = 1\n")
    with pytest.raises(ValueError, match="unknown recipe keys: colour"):
        load_train_config(tmp_path / "a.toml")
    for text, message in (("a = ", "a.toml"), ("steps = 1", "missing 'model'")):
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_train_config(tmp_path / "a.toml")
    with pytest.raises(ValueError, match="No such file"):
        load_train_config(tmp_path / "b.toml")


def test_a_run_starts_from_the_weights_and_the_tokenizer_of_a_checkpoint_of_its_architecture(tmp_path: Path) -> None:
    train(config(), settings(tmp_path, "first"), lambda text: None, complete=no_completions)
    first = tmp_path / "first-checkpoint"
    sources = (dialogues(tmp_path), *config().sources)
    again = config(start_from=(first,), sources=sources, steps=4, decay_steps=1, sample_prompts=())
    train(again, settings(tmp_path, "again"), lambda text: None, complete=no_completions)
    losses = {run: [line["loss"] for line in read_log(tmp_path / run / "log.jsonl")] for run in ("first", "again")}
    assert losses["again"][0] < min(losses["first"][:10])
    assert (tmp_path / "again-checkpoint/tokenizer.tiktoken").read_bytes() == (
        first / "tokenizer.tiktoken"
    ).read_bytes()
    card = (tmp_path / "again-checkpoint/MODEL_CARD.md").read_text()
    assert "| start_from | first-checkpoint |" in card
    earlier, later = (read_manifest(tmp_path / f"{run}-checkpoint").training for run in ("first", "again"))
    started = later["started_from"]
    assert started["name"] == "aesop"
    assert started["sources"] == [], "this run has the source too"
    assert started["held_out_bits_per_byte"] == earlier["held_out_bits_per_byte"]
    for fact in ("steps", "tokens", "seconds", "commit"):
        assert started[fact] == earlier[fact]
    assert f"{30 * 4 * 32 + 4 * 4 * 32:,} tokens in all." in card
    bits = (training["held_out_bits_per_byte"]["aesop"] for training in (earlier, later))
    assert " | {:.4f} | {:.4f} | ".format(*bits) in card
    other = SourceConfig(name="tales", path=TALES, repeats=1, held_out=0.1, licence="public domain")
    suite = later["suite"]
    assert suite["pairs"].keys() == {"accuracy", "pairs"}
    assert suite["cloze"]["aesop"]["questions"] > 0
    assert [measured["temperature"] for measured in suite["diversity"]] == list(TEMPERATURES)
    assert "## Suite" in card
    third = config(start_from=(tmp_path / "again-checkpoint",), steps=4, decay_steps=1, sources=(other,))
    train(third, settings(tmp_path, "third"), lambda text: None, complete=no_completions)
    started = read_manifest(tmp_path / "third-checkpoint").training["started_from"]
    assert [source["name"] for source in started["sources"]] == ["dialogues", "aesop"]
    assert started["held_out_bits_per_byte"] == {}, "of texts that are not held out of this run"
    assert started["suite"] == suite
    assert started["started_from"]["steps"] == 30
    wider = ModelConfig.from_dict({**ROTARY, "vocab_size": 320, "hidden_size": 40})
    with pytest.raises(ValueError, match=r"start_from .*first-checkpoint: its hidden_size is \d+, the recipe's 40"):
        train(config(start_from=(first,), model=wider), settings(tmp_path, "wider"), lambda text: None)


def test_a_larger_model_starts_with_the_losses_of_the_checkpoint(tmp_path: Path) -> None:
    train(config(), settings(tmp_path, "first"), lambda text: None, complete=no_completions)
    first = tmp_path / "first-checkpoint"
    larger = ModelConfig.from_dict({**ROTARY, "vocab_size": 320, "num_layers": 3, "mlp_size": 64})
    runs = {"same": config(start_from=(first,)), "larger": config(start_from=(first, first), model=larger)}
    for name, run in runs.items():
        train(run, settings(tmp_path, name, stop_after=2), lambda text: None, complete=no_completions)
    losses = {name: [line["loss"] for line in read_log(tmp_path / name / "log.jsonl")] for name in runs}
    assert losses["larger"][0] == pytest.approx(losses["same"][0], abs=1e-5)
    assert losses["larger"][1] != losses["same"][1]


def test_a_run_starts_from_the_mean_of_the_weights_of_checkpoints_with_one_tokenizer(tmp_path: Path) -> None:
    for name, change in (("first", {}), ("second", {"seed": 2}), ("other", {"vocab_size": 300})):
        model = ModelConfig.from_dict({**ROTARY, "vocab_size": 300}) if name == "other" else config().model
        run = config(steps=2, decay_steps=1, warmup_steps=0, model=model, **change)
        train(run, settings(tmp_path, name), lambda text: None, complete=no_completions)
    first, second, other = (tmp_path / f"{name}-checkpoint" for name in ("first", "second", "other"))
    weights = [load_file(path / "model.safetensors") for path in (first, second)]
    facts = [config_facts(config(start_from=starts), [""])["start_from"] for starts in ((), (first,), (first, second))]
    assert facts == [None, "first-checkpoint", ["first-checkpoint", "second-checkpoint"]], "saves of old runs resume"
    mean = config(start_from=(first, second, second))
    assert not train(mean, settings(tmp_path, "mean"), lambda text: None, should_stop=lambda: True)
    saved = load_file(tmp_path / "mean" / STATE_FILE)
    assert len(saved) == len(weights[0])
    for name, tensor in weights[0].items():
        torch.testing.assert_close(saved[f"model/{name}"], (tensor.float() + 2 * weights[1][name].float()) / 3)
    with pytest.raises(ValueError, match=r"other-checkpoint: its tokenizer is not that of .*first-checkpoint"):
        train(config(start_from=(first, other)), settings(tmp_path, "mixed"), lambda text: None)
    with pytest.raises(ValueError, match=r"start_from .*other-checkpoint: its tokenizer has 300 tokens, not 320"):
        train(config(start_from=(other,)), settings(tmp_path, "mixed"), lambda text: None)
    mixed = (tmp_path / "mixed" / "tokenizer.tiktoken").read_bytes()
    assert mixed == (other / "tokenizer.tiktoken").read_bytes(), "not that of the failed attempt"
    with pytest.raises(
        ValueError, match="its tokenizer has no ChatML tokens; set chat_steps = 0, or start from another"
    ):
        train(
            config(start_from=(first,), chat_steps=2, sources=(*config().sources, dialogues(tmp_path))),
            settings(tmp_path, "chat"),
            lambda text: None,
        )
