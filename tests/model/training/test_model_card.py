"""Model cards are correct for any recipe."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from model.evaluation.evaluation import Evaluation
from model.evaluation.likelihood import HeldOut, Score
from model.evaluation.prompts import Diversity, PromptKind, Sample
from model.training.model_card import write_model_card
from tests.model.training.test_train import config

TRAINING: dict[str, Any] = {
    "steps": 30,
    "tokens": 3840,
    "epoch_tokens": 100_000,
    "seconds": 61.0,
    "precision": "float32",
    "hardware": "an abacus",
    "commit": "0123456789abcdef",
    "final_loss": 3.25,
    "final_loss_steps": 30,
    "sources": [
        {
            "name": "aesop",
            "licence": "public domain",
            "sha256": "ab" * 32,
            "repeats": 1,
            "documents": 90,
            "held_out_documents": 10,
        }
    ],
}


def card(tmp_path: Path, training: dict[str, Any] | None = None, **changes: object) -> str:
    samples = [Sample(prompt="The fox", completion=" ran.\nIt ran.")]
    evaluation = Evaluation(samples=samples)
    write_model_card(tmp_path / "card.md", config(**changes), TRAINING | (training or {}), evaluation)
    return (tmp_path / "card.md").read_text()


def test_the_card_has_the_description_and_figures_of_the_run(tmp_path: Path) -> None:
    assert "stories" not in card(tmp_path)
    text = card(tmp_path, description="It knows fables.")
    assert "`kvasir train` in this repository. It knows fables." in " ".join(text.split())
    assert "| tokens | 3,840 (0.038 epochs) |" in text
    assert "| duration of the steps | 1:01 on an abacus |" in text
    assert "| final training loss | 3.2500 nats per token, mean of the last 30 steps |" in text
    assert "| matrix_lr | 0.01 |" in text
    assert "> **The fox** ran.\n> It ran." in text


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"seconds": 4448.1}, "| duration of the steps | 1:14:08 on an abacus |"),
        ({"tokens": 15_600_000, "epoch_tokens": 4_100_000}, "| tokens | 15,600,000 (3.8 epochs) |"),
        ({"final_loss": None, "final_loss_steps": 0}, "| steps | 30 |"),
    ],
)
def test_measurements_of_the_run_are_rows(tmp_path: Path, change: dict[str, Any], row: str) -> None:
    assert row in card(tmp_path, change)


def test_the_card_names_recipe_values_that_differ_from_defaults(tmp_path: Path) -> None:
    talked = dataclasses.replace(config().sources[0], name="talk", repeats=0, chat_repeats=0.5)
    sources = [
        TRAINING["sources"][0] | {"chat_repeats": 0.0},
        TRAINING["sources"][0] | {"name": "talk", "repeats": 0, "chat_repeats": 0.5},
    ]
    text = card(
        tmp_path,
        {"sources": sources, "epoch_tokens": 1280, "final_loss_steps": 10},
        **{"sources": (*config().sources, talked), "chat_steps": 10, "dropout": 0.1, "mask_documents": True},
    )
    assert "| tokens | 3,840 (2 epochs) |" in text, "20 of the 30 steps train on texts"
    for row in ("| mask_documents | True |", "| dropout | 0.1 |", "| chat_steps | 10 |"):
        assert row in text
    assert "| aesop | 90 | 1 | 10 |" in text
    assert "| talk | 90 | 0, 0.5 in the chat phase | 10 |" in text
    assert "equals a held-out text or shares 20 words in a row" in " ".join(text.split())
    plain = card(tmp_path)
    for absent in ("mask_documents", "dropout", "chat_steps", "chat phase"):
        assert absent not in plain


def test_measured_metrics_are_rows_of_tables(tmp_path: Path) -> None:
    held_out = HeldOut((Score(-4.0, 3, 1), Score(-5.0, 5, 2)), num_bytes=20)
    distinct = (0.1, 0.25, None)
    diversity = [
        Diversity(temperature=0.5, num_samples=80, num_words=1234, distinct=distinct, repetition=repeated)
        for repeated in (0.0625, None)
    ]
    samples = [
        Sample(prompt="The fox", completion=" ran.", kind=PromptKind.STORY),
        Sample(prompt="Who\nare you?", completion="A fox.\n", kind=PromptKind.CHAT),
    ]
    measured = Evaluation(held_out={"aesop": held_out}, diversity=diversity, samples=samples)
    source = TRAINING["sources"][0] | {"attribution": "Æsop | told by\nJacobs"}
    write_model_card(tmp_path / "card.md", config(), TRAINING | {"sources": [source]}, measured)
    text = (tmp_path / "card.md").read_text()
    assert "| aesop | 2 | 0.6492 | 1.1250 | 37.5% |" in text
    assert "| 0.5 | 1,234 | 0.100 | 0.250 | – | 0.062 |" in text
    assert "| 0.5 | 1,234 | 0.100 | 0.250 | – | – |" in text
    assert "| public domain | Æsop \\| told by Jacobs |" in text
    assert "### Kind of prompt: story\n\n> **The fox** ran.\n\n### Kind of prompt: chat" in text
    assert "> **Who\n> are you?** A fox.\n" in text
    assert "every model card has these prompts" in text
    assert "every model card" not in card(tmp_path)
    assert "###" not in card(tmp_path)


def test_the_card_names_the_runs_that_the_weights_come_from_and_their_sources(tmp_path: Path) -> None:
    first = {"name": "first", "steps": 1, "tokens": 1_500_000, "sources": []}
    own, other = TRAINING["sources"][0], {"name": "tales", "attribution": "Told by Grimm", "chat_repeats": 2}
    started = {
        **{"name": "second", "steps": 4400, "tokens": 36_044_800, "seconds": 10160.3, "commit": "140b0b19df25ef"},
        **{"sources": [own | other], "started_from": first},
    }
    text = " ".join(card(tmp_path, {"started_from": started}).split())
    assert (
        "Starts from the weights of a run of 4,400 steps (36.0 million tokens, 2:49:20 of steps, commit "
        "`140b0b19df25`). That one started from the weights of a run of 1 step (1.5 million tokens). 37.5 million "
        "tokens in all."
    ) in text
    assert "| tales | 90 | 1, 2 in the chat phase, in an earlier run | 10 | public domain | Told by Grimm |" in text
    assert "No training document of this run equals" in text
    unknown = " ".join(card(tmp_path, {"started_from": {"name": "theirs", "sources": []}}).split())
    assert "Starts from the weights of a checkpoint named theirs. ##" in unknown
    mean = config(start_from=(Path("second"), Path("first")))
    write_model_card(tmp_path / "mean.md", mean, TRAINING | {"started_from": started}, Evaluation())
    text = " ".join((tmp_path / "mean.md").read_text().split())
    assert "| start_from | second, first |" in text
    assert "Starts from a mean of weights, first those of a run of 4,400 steps (36.0" in text
    assert "weights of" not in card(tmp_path)


SUITE: dict[str, Any] = {
    "pairs": {"accuracy": 0.875, "pairs": 1399},
    "cloze": {"aesop": {"questions": 10, "accuracy": 0.5}, "tales": {"questions": 3, "accuracy": 1 / 3}},
    "looping_share": 0.25,
    "diversity": [{"temperature": 0.5, "num_samples": 160, "repetition": 0.1234}],
}


def test_figures_of_the_suite_and_of_held_out_texts_are_beside_those_of_the_start(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    held_out = {"aesop": HeldOut((Score(-4.0, 3, 1),), num_bytes=20), "new": HeldOut((Score(-2.0, 3, 1),), 20)}
    measured = Evaluation(held_out=held_out)
    write_model_card(path, config(), TRAINING | {"suite": SUITE}, measured)
    text = path.read_text()
    for row in (
        "| minimal pairs, 1,399: right | 87.5% |",
        "| last word among five, 3 of tales: right | 33.3% |",
        "| greedy completions that loop | 25.0% |",
        "| repetition at temperature 0.5, 160 samples | 0.123 |",
        "| aesop | 1 | 0.2885 | 1.3333 | 33.3% |",
    ):
        assert row in text
    assert "Before" not in text
    earlier = SUITE | {"cloze": {"aesop": {"questions": 9, "accuracy": 0.4}}, "looping_share": 0.5}
    started = {"name": "a", "sources": [], "held_out_bits_per_byte": {"aesop": 0.75}, "suite": earlier}
    write_model_card(path, config(), TRAINING | {"suite": SUITE, "started_from": started}, measured)
    text = path.read_text()
    for row in (
        "| measurement | before | this model |",
        "| minimal pairs, 1,399: right | 87.5% | 87.5% |",
        "| last word among five, 10 of aesop: right | – | 50.0% |",  # the earlier figure is of other texts
        "| greedy completions that loop | 50.0% | 25.0% |",
        "| aesop | 1 | 0.7500 | 0.2885 | 1.3333 | 33.3% |",
        "| new | 1 | – | 0.1443 | 0.6667 | 33.3% |",
    ):
        assert row in text
    write_model_card(path, config(), TRAINING | {"suite": SUITE | {"pairs": None, "looping_share": None}}, measured)
    assert "minimal pairs" not in path.read_text()


def test_the_card_has_no_sections_without_data(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    sources = [TRAINING["sources"][0] | {"held_out_documents": 0}]
    write_model_card(path, config(), TRAINING | {"sources": sources}, Evaluation())
    text = path.read_text()
    assert "## Data" in text
    assert "## Recipe" in text
    for absent in ("Held-out", "held-out", "## Samples", "Temperature"):
        assert absent not in text


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"num_kv_heads": 2}, "| num_kv_heads | 2 |"),
        ({"attention": "average", "position": "none", "qk_norm": False}, "| attention | average |"),
        ({"position": "alibi"}, "| position | alibi |"),
        ({"rotary_dim": 4}, "| rotary_dim | 4 |"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0}}, "| rope_scaling |"),
        ({"sliding_window": 16, "global_layers": [1]}, "| sliding_window | 16 |"),
        ({"qk_norm": True}, "| qk_norm | True |"),
        ({"norm_placement": "post"}, "| norm_placement | post |"),
    ],
)
def test_each_architecture_option_is_a_row(tmp_path: Path, change: dict[str, Any], row: str) -> None:
    assert row in card(tmp_path, model=ModelConfig.from_dict({**config().model.to_dict(), **change}))


def test_a_description_that_is_no_text_is_rejected() -> None:
    with pytest.raises(ValueError, match="description: Expected `str`"):
        dataclasses.replace(config(), description=3)  # type: ignore[arg-type]
