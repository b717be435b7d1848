"""Recipes that extend others: replaced values, inherited values, and errors."""

import dataclasses
from pathlib import Path

import pytest

from model.training.config import load_train_config
from model.training.corpus import check_sources

CONFIGS = Path(__file__).parents[3] / "model" / "training" / "configs"
ROOT = CONFIGS.parents[2]
BASELINE = CONFIGS / "attention" / "multi-head.toml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_overrides_its_own_keys_and_inherits_the_others(tmp_path: Path) -> None:
    write(tmp_path / "a" / "parent.toml", BASELINE.read_text())
    child = write(
        tmp_path / "b" / "child.toml",
        'extends = "../a/parent.toml"\nname = "child"\nsteps = 5000\n[model]\nnum_kv_heads = 2\n',
    )
    parent, made = load_train_config(tmp_path / "a" / "parent.toml"), load_train_config(child)
    assert (made.name, made.steps, made.model.num_kv_heads) == ("child", 5000, 2)
    assert (made.seed, made.model.num_heads, made.sample_prompts) == (parent.seed, 4, parent.sample_prompts)
    # The path of a source is relative to its own file, not to the file that extends it.
    assert [s.path.resolve() for s in made.sources] == [s.path.resolve() for s in parent.sources]


def test_a_list_of_sources_replaces_the_inherited_list(tmp_path: Path) -> None:
    write(tmp_path / "parent.toml", BASELINE.read_text())
    source = '[[sources]]\nname = "own"\npath = "own.txt"\nrepeats = 1\nheld_out = 0.1\nlicence = "mine"\n'
    child = write(tmp_path / "sub" / "child.toml", f'extends = "../parent.toml"\n{source}')
    made = load_train_config(child)
    assert [(source.name, source.path) for source in made.sources] == [("own", tmp_path / "sub" / "own.txt")]
    # The description and prompts of the other recipe do not fit these texts.
    assert (made.description, made.sample_prompts) == ("", ())
    said = write(tmp_path / "sub" / "said.toml", f'extends = "child.toml"\nsample_prompts = ["A"]\n{source}')
    assert load_train_config(said).sample_prompts == ("A",)


def test_a_recipe_sets_the_repeats_of_inherited_sources_and_leaves_out_unused_ones(tmp_path: Path) -> None:
    write(tmp_path / "parent.toml", (CONFIGS / "kvasir-base.toml").read_text())
    tables = "[repeats]\ntinystories = 5\nstorybooks = 0\n[chat_repeats]\ntools = 0.5\ngreetings = 0\n"
    parent = {s.name: s for s in load_train_config(tmp_path / "parent.toml").sources}
    made = {
        s.name: s
        for s in load_train_config(write(tmp_path / "child.toml", f'extends = "parent.toml"\n{tables}')).sources
    }
    assert (parent["tinystories"].repeats, made["tinystories"].repeats, made["tools"].chat_repeats) == (2, 5, 0.5)
    assert made["simplewiki"] == parent["simplewiki"]
    # The picture books still have held-out documents. The greetings have none.
    assert made["storybooks"].repeats == 0
    assert ("tools" in parent, "greetings" in parent, "greetings" in made) == (False, True, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "parent.toml"\nrepeats = "2"', "child.toml: .* repeats and chat_repeats tables"),
        ('extends = "parent.toml"\n[repeats]\nwiki = 2', "child.toml: repeats names 'wiki', but no source has this"),
        ('extends = "parent.toml"\n[chat_repeats]\ntinystories = -1', "child.toml: chat_repeats: "),
        ('extends = "child.toml"', "this recipe extends itself"),
        ('extends = "other.toml"', "child.toml: this recipe extends itself"),
        ('extends = "none.toml"', r"none.toml: No such file or directory; .*child.toml extends it, by a path"),
        ('extends = "parent.toml"\nstart_from = ""', "child.toml: extends and start_from must be paths, model, "),
        ('extends = "parent.toml"\nstart_from = {a = "b"}', "child.toml: extends and start_from must be paths"),
        ("extends = 3", "child.toml: extends and start_from must be paths, model, "),
        ('extends = "parent.toml"\nmodel = 3', "child.toml: extends and start_from must be paths, model, "),
        ('extends = "parent.toml"\n[model]\ncolour = 3', "child.toml: unknown model config keys: colour"),
        (
            'extends = "parent.toml"\n[[sources]]\nname = "x"',
            "child.toml: .* sources a list of tables with a path each",
        ),
        ('extends = "parent.toml"\nsources = [3]', "child.toml: .* sources a list of tables with a path each"),
        ('extends = "parent.toml"\ncolour = 3', "child.toml: unknown recipe keys: colour"),
    ],
)
def test_an_unusable_extends_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "parent.toml", BASELINE.read_text())
    write(tmp_path / "other.toml", 'extends = "child.toml"')
    with pytest.raises(ValueError, match=message):
        load_train_config(write(tmp_path / "child.toml", text))


SHIPPED = sorted(CONFIGS.rglob("*.toml"))


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_find_their_corpora_or_name_the_page_that_lists_them(recipe: Path) -> None:
    """Covers a checkout without the corpora, which are not part of the repository."""
    sources = load_train_config(recipe).sources
    away = [s for s in sources if (ROOT / "data").resolve() in s.path.resolve().parents]
    present = [s for s in sources if s not in away]
    check_sources(present)
    assert bool(away) == (recipe.stem != "tales")
    missing = dataclasses.replace(sources[0], path=recipe.parent / ".." / "none" / "corpus.txt")
    message = rf"^{CONFIGS.parent}/[a-z/]+corpus.txt: No such file or directory; correct the path of source "
    with pytest.raises(ValueError, match=message):
        check_sources([*present, missing])
    for source in away:
        elsewhere = dataclasses.replace(source, path=source.path.with_name("gone.jsonl"))
        with pytest.raises(ValueError, match=r"gone.jsonl: No such file .*; docs/training.md lists the corpora of"):
            check_sources([elsewhere])


def test_a_directory_as_source_is_rejected(tmp_path: Path) -> None:
    source = dataclasses.replace(load_train_config(BASELINE).sources[0], path=tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: Is a directory; correct the path of source tinystories"):
        check_sources([source])
