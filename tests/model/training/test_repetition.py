"""Training against loops: which tokens count as repeated, and that the finished model repeats fewer."""

import dataclasses
from pathlib import Path

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig
from model.sampling.params import SamplingParams
from model.tokenizer.byte_level import load_native
from model.training.data.batches import UNTRAINED
from model.training.repetition import OwnCompletions, repeated_targets, unlikelihood
from model.training.train import train
from service.engine.engine import complete_batch
from tests.model.configs import ROTARY
from tests.model.training.test_train import config, no_completions, settings

_ = UNTRAINED


def test_the_tokens_of_repeated_runs_are_targets_but_not_those_of_the_prompt() -> None:
    assert repeated_targets([1, 2, 3], [4, 5, 1, 2, 3, 4, 9]) == [_, _, _, _, 1, 2, 3, 4, _]
    assert repeated_targets([1, 2, 3, 4, 1, 2, 3], [4, 5, 6]) == [_] * 6 + [4, _, _]
    assert repeated_targets([7, 8], [7, 8, 7, 8, 5]) == [_, 7, 8, 7, 8, _]


def test_unlikelihood_is_the_mean_over_all_positions() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]))
    expected = -(torch.log(torch.tensor(0.5)) + torch.log(torch.tensor(0.2))) / 3
    assert float(unlikelihood(logits, torch.tensor([0, _, 1]))) == pytest.approx(float(expected))


def test_a_model_trained_against_loops_repeats_less(tmp_path: Path) -> None:
    model = ModelConfig.from_dict({**ROTARY, "vocab_size": 320, "max_context_length": 128})
    plain = config(model=model, mask_documents=True, sequence_length=128, steps=40, decay_steps=10)
    shares = {}
    for run, chosen in {"plain": plain, "trained": dataclasses.replace(plain, repetition_steps=38)}.items():
        complete = complete_batch if run == "trained" else no_completions
        train(chosen, settings(tmp_path, run), lambda text: None, complete=complete)
        directory = tmp_path / f"{run}-checkpoint"
        served = load_model(
            read_manifest(directory), device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"]
        )
        tokenizer = load_native(directory)
        prompts = [tokenizer.encode(text) for text in ("The fox", "A lion", "One day", "He said")]
        greedy = [SamplingParams(max_tokens=80, temperature=0.0)] * len(prompts)
        said = complete_batch(served, tokenizer, prompts, greedy)
        targets = [t for ids, new in zip(prompts, said, strict=True) for t in repeated_targets(ids, new)]
        shares[run] = sum(target != UNTRAINED for target in targets) / len(targets)
    assert shares["trained"] < 0.95 * shares["plain"]


def test_only_every_few_steps_train_against_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(OwnCompletions, "batch", lambda own, batch, step: seen.append(step))
    chosen = config(mask_documents=True, steps=10, decay_steps=2, repetition_steps=7, repetition_interval=3)
    train(chosen, settings(tmp_path), lambda text: None, complete=no_completions)
    assert seen == [3, 6, 9]
