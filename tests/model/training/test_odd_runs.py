"""Unusual runs: unexpected texts, damaged logs, incompatible options."""

import dataclasses
import json
import math
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.training.config import SourceConfig, TrainConfig
from model.training.corpus import leave_out_held_out, read_corpus, read_source
from model.training.data.batches import ROUND_BATCHES, TokenizedSource
from model.training.state import read_log
from model.training.train import _commit, train
from tests.model.training.test_train import config, losses, saved_step, settings


def source(path: Path, records: Iterable[dict[str, object]], **changes: object) -> SourceConfig:
    """Write these records to a .jsonl file, and return the file as a source."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {"name": path.stem, "path": path, "repeats": 1, "held_out": 0.0, "licence": "none"}
    return SourceConfig(**{**values, **changes})  # type: ignore[arg-type]


def with_dialogues(path: Path, question: str, **changes: object) -> TrainConfig:
    """Return a config whose sources are fables and, for the chat phase, dialogues with this question."""
    turns = [["U", question], ["S", "Yes."]]
    told = source(path, ({"turns": turns} for _ in range(8)), repeats=0, chat_repeats=1.0)
    return config(sources=(*config().sources, told), **changes)


def test_a_batch_without_a_target_has_a_loss_of_zero(tmp_path: Path) -> None:
    """The batch lies in the middle of a question that is longer than a batch."""
    recipe = with_dialogues(tmp_path / "dialogues.jsonl", "why " * 400, chat_steps=10, batch_size=2)
    assert train(recipe, settings(tmp_path), lambda said: None)
    assert 0.0 in losses(tmp_path, "run")[-10:]
    assert all(map(math.isfinite, losses(tmp_path, "run")))


def test_a_chat_phase_is_rejected_if_the_tokenizer_lacks_chatml_tokens(tmp_path: Path) -> None:
    """The error comes at the start, not hours later when the chat phase begins."""
    train(config(), settings(tmp_path, stop_after=2), lambda said: None)
    with pytest.raises(ValueError, match="its tokenizer has no ChatML tokens; set chat_steps = 0"):
        train(with_dialogues(tmp_path / "d.jsonl", "Why?", chat_steps=5), settings(tmp_path), lambda said: None)


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1])
def test_dropout_works_with_the_largest_seeds(tmp_path: Path, seed: int) -> None:
    assert not train(config(seed=seed, dropout=0.1), settings(tmp_path, stop_after=2), lambda said: None)
    assert len(losses(tmp_path, "run")) == 2


def test_a_step_with_an_infinite_gradient_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient can overflow although the loss is finite."""
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    run = settings(tmp_path)
    with pytest.raises(ValueError, match="at step 0; lower matrix_lr"):
        train(config(checkpoint_minutes=1e-9), run, lambda said: None)
    assert saved_step(run.run_directory) == 0


def test_a_run_resumes_with_a_damaged_log(tmp_path: Path) -> None:
    train(config(), settings(tmp_path, stop_after=3), lambda said: None)
    log = tmp_path / "run" / "log.jsonl"
    log.write_bytes(log.read_bytes() + b'\0\0\0\0}\n[]\n{"st\xff')
    assert [line["step"] for line in read_log(log)] == [0, 1, 2]
    assert not train(config(), settings(tmp_path, stop_after=4), lambda said: None)
    assert len(losses(tmp_path, "run")) == 4


def test_a_run_without_its_log_has_no_final_loss(tmp_path: Path) -> None:
    run = settings(tmp_path)
    assert train(config(), run, lambda said: None)
    (run.run_directory / "log.jsonl").unlink()
    assert train(config(), run, lambda said: None)
    facts = json.loads((run.checkpoint / "manifest.json").read_text())["training"]
    assert (facts["final_loss"], facts["final_loss_steps"]) == (None, 0)
    assert "final training loss" not in (run.checkpoint / "MODEL_CARD.md").read_text()


def test_the_commit_is_unknown_in_a_repository_that_does_not_track_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may be installed inside a repository of the user, which does not contain it."""
    shutil.copy(_commit.__globals__["__file__"], tmp_path / "train.py")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setitem(_commit.__globals__, "__file__", str(tmp_path / "train.py"))
    assert _commit() == "unknown"
    subprocess.run([*git, "add", "train.py"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert _commit() == head.strip()


def test_a_corpus_with_lone_surrogates_is_trained_on(tmp_path: Path) -> None:
    """JSON can express a lone surrogate, UTF-8 cannot."""
    records: Iterable[dict[str, object]] = ({"text": f"{number} hens \ud83d " * 30} for number in range(20))
    told = source(tmp_path / "halves.jsonl", records, held_out=0.2)
    recipe = config(sources=(told,), vocab_size=262, model=dataclasses.replace(config().model, vocab_size=262))
    assert not train(recipe, settings(tmp_path, stop_after=1), lambda said: None)


def test_deeply_nested_json_is_rejected(tmp_path: Path) -> None:
    told = source(tmp_path / "deep.jsonl", ())
    told.path.write_text('{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="line 1: expected a JSON object"):
        read_source(told)


def test_texts_without_letters_are_compared_as_a_whole(tmp_path: Path) -> None:
    records: Iterable[dict[str, object]] = ({"text": "☃♪"[number % 2] * (1 + number)} for number in range(100))
    read = read_source(source(tmp_path / "signs.jsonl", records, held_out=0.1))
    assert read.held_out
    assert leave_out_held_out([read])[0].left_out == 0
    same = dataclasses.replace(read, train=[*read.train, dataclasses.replace(read.train[0], text=read.held_out[0])])
    assert leave_out_held_out([same])[0].left_out == 1


def test_a_dialogue_is_held_out_as_a_whole(tmp_path: Path) -> None:
    """Conversations use all turns, so no part of a held-out dialogue may be trained on."""
    turns = [["US"[number % 2], f"{number} is a number. " * 40] for number in range(200)]
    read = read_source(source(tmp_path / "long.jsonl", [{"turns": turns}], held_out=0.5))
    assert len(read.train) + len(read.held_out) == 1


def test_a_document_longer_than_a_round_is_used_up_over_several_rounds(tmp_path: Path) -> None:
    recipe = config()
    length = 3 * ROUND_BATCHES * recipe.tokens_per_step
    whole = TokenizedSource(
        token_ids=np.arange(length, dtype=np.uint16),
        starts=np.array([0, length]),
        trained=np.ones(length, dtype=np.bool_),
        repeats=1.0,
    )
    batches = read_corpus(recipe, tmp_path, lambda said: None).batches([whole])
    seen = {int(token) for number in range(8 * ROUND_BATCHES) for token in batches.batch(number).inputs_T}
    assert len(seen) > 0.9 * length


def test_a_vocabulary_of_over_65536_tokens_is_rejected() -> None:
    with pytest.raises(ValueError, match="vocab_size: Expected `int` <= 65536"):
        config(vocab_size=65_537)


@pytest.mark.parametrize(
    "model",
    [
        {"position": "alibi"},
        {"position": "relative_bias", "num_relative_buckets": 8, "max_relative_distance": 16},
        {"attention": "average", "position": "learned", "qk_norm": False},
        {"sliding_window": 8},
    ],
)
def test_mask_documents_is_rejected_with_unsupported_attention_mechanisms(model: dict[str, Any]) -> None:
    recipe = config()
    shape = type(recipe.model).from_dict({**recipe.model.to_dict(), **model})
    changed = dataclasses.replace(recipe, model=shape, mask_documents=False)
    with pytest.raises(ValueError, match="mask_documents does not support a sliding_window, attention = "):
        dataclasses.replace(changed, mask_documents=True)
