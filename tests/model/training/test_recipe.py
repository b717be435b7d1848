"""A config that is written as a recipe is read back as an equal config."""

import dataclasses
from pathlib import Path

import pytest

from model.training.config import SourceConfig, TrainConfig, load_train_config, write_recipe

RECIPES = sorted((Path(__file__).parents[3] / "model" / "training" / "configs").rglob("*.toml"))


def resolved(config: TrainConfig) -> TrainConfig:
    sources = tuple(dataclasses.replace(source, path=source.path.resolve()) for source in config.sources)
    return dataclasses.replace(config, sources=sources)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_read_back_equal(path: Path, tmp_path: Path) -> None:
    config = load_train_config(path)
    write_recipe(tmp_path / "recipe.toml", config)
    assert resolved(load_train_config(tmp_path / "recipe.toml")) == resolved(config)


def test_special_characters_are_read_back_and_a_source_moves_with_the_recipe(tmp_path: Path) -> None:
    odd = 'a "quoted" \\ back\nslash\ttab \x7f \x01 ünï 猫 😀'
    config = load_train_config(RECIPES[0])
    beside = SourceConfig(name="text", path=tmp_path / "here" / "text.jsonl", repeats=1, held_out=0.0, licence=odd)
    config = dataclasses.replace(config, description=odd, sample_prompts=(odd, "b"), sources=(beside,))
    (tmp_path / "here").mkdir()
    write_recipe(tmp_path / "here" / "recipe.toml", config)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = load_train_config(tmp_path / "there" / "recipe.toml")
    assert moved.sources[0].path == tmp_path / "there" / "text.jsonl"
    assert (moved.description, moved.sample_prompts, moved.sources[0].licence) == (odd, (odd, "b"), odd)
