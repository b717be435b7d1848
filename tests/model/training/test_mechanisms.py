"""Every attention mechanism of docs/attention.md trains reproducibly, and the engine serves its checkpoint."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig
from model.nn.reference_generate import generate
from model.tokenizer.byte_level import load_native
from model.training.config import TrainConfig, load_train_config
from model.training.state import read_log
from model.training.train import RunSettings, train
from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import TokenDelta
from tests.engine.fakes import make_submit
from tests.model.training.test_train import config as fables
from tests.model.training.test_train import no_completions

RECIPES = {
    path.stem: path for path in sorted((Path(__file__).parents[3] / "model/training/configs/attention").glob("*.toml"))
}
# The recipes at a small size, with their model options.
SMALL = {"vocab_size": 320, "max_context_length": 64, "num_layers": 2, "hidden_size": 32, "mlp_size": 48}
FEWER = {"sliding_window": 8, "rotary_dim": 4, "max_relative_distance": 20, "num_relative_buckets": 8}


def small(recipe: TrainConfig) -> TrainConfig:
    """Return a recipe with the mechanism of `recipe` at a size that trains in a second, on fables."""
    model = recipe.model
    fewer = {name: value for name, value in FEWER.items() if getattr(model, name) is not None}
    layers = {"global_layers": (1,)} if model.global_layers else {}
    shrunk = dataclasses.replace(model, **SMALL, head_dim=model.head_dim // 4, **fewer, **layers)  # type: ignore[arg-type]
    return fables(name=recipe.name, model=shrunk, steps=16, warmup_steps=2, decay_steps=4)


def run(config: TrainConfig, directory: Path, **changes: object) -> list[float]:
    settings = RunSettings(
        run_directory=directory,
        checkpoint=directory / "checkpoint",
        device="cpu",
        precision="float32",
        compile=False,
        stop_after=None,
    )
    changed = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
    train(config, changed, lambda text: None, complete=no_completions)
    return [line["loss"] for line in read_log(directory / "log.jsonl")]


@pytest.fixture(scope="module", params=list(RECIPES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """Return the small recipe of a mechanism, and the directory of its run."""
    config = small(load_train_config(RECIPES[request.param]))
    directory = tmp_path_factory.mktemp(request.param)
    run(config, directory)
    return config, directory


def test_losses_fall_and_are_reproducible(trained: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    config, directory = trained
    losses = [line["loss"] for line in read_log(directory / "log.jsonl")]
    assert sum(losses[-3:]) / 3 < 0.85 * losses[0]
    assert run(config, tmp_path, stop_after=3) == losses[:3]


def test_eager_attention_has_the_same_losses(trained: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    """Covers gradients: all losses but the first depend on the gradients of earlier steps."""
    config, directory = trained
    losses = [line["loss"] for line in read_log(directory / "log.jsonl")]
    assert run(config, tmp_path, stop_after=4, attention="eager") == pytest.approx(losses[:4], rel=1e-4)


def test_the_engine_generates_as_the_reference_implementation_from_the_checkpoint(
    trained: tuple[TrainConfig, Path],
) -> None:
    config, directory = trained
    manifest = read_manifest(directory / "checkpoint")
    assert manifest.config == config.model
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    tokenizer = load_native(manifest.directory)
    engine = Engine(
        model, tokenizer, EngineConfig(block_size=4, num_blocks=60, max_num_running=8, max_batched_tokens=9)
    )
    prompts = [tokenizer.encode(text) for text in ("The fox and the grapes", "A", "One winter day the ants were")]
    # After a few steps the likeliest token is nearly always the same, so samples reveal more than greedy text.
    submits = [
        make_submit(f"{i}-{temperature}", ids, max_tokens=24, temperature=temperature, seed=i, ignore_eos=True)
        for i, ids in enumerate(prompts)
        for temperature in (0.0, 0.8)
    ]
    made: dict[str, list[int]] = {submit.uid: [] for submit in submits}
    for submit in submits:
        engine.submit(submit)
    while engine.has_work:
        for event in engine.step().events:
            assert isinstance(event, TokenDelta)
            made[event.uid] += event.token_ids
    for submit in submits:
        expected = generate(model, submit.prompt_token_ids, submit.params, eos_token_ids=tokenizer.eos_token_ids)
        assert made[submit.uid] == expected
        assert submit.params.greedy or len(set(expected)) > 8


def test_each_recipe_differs_from_its_baseline_in_one_mechanism() -> None:
    """Each recipe differs from the one that it extends in model options alone, and in one mechanism."""
    recipes = {name: load_train_config(path) for name, path in RECIPES.items()}
    together = ({"num_heads", "num_kv_heads", "head_dim"}, {"sliding_window", "global_layers"})
    of_a_position = {"position", "num_relative_buckets", "max_relative_distance"}
    for name, own in recipes.items():
        other = recipes[Path(tomllib.loads(RECIPES[name].read_text()).get("extends", name)).stem]
        assert dataclasses.replace(own, name=other.name, model=other.model) == other
        before = other.model.to_dict()
        keys = {key for key, value in own.model.to_dict().items() if value != before[key]}
        assert len(keys) <= 1 or any(keys <= group for group in (*together, of_a_position)), name
        assert bool(keys) == (own is not other)
    assert len({str(recipe.model) for recipe in recipes.values()}) == len(RECIPES)
    assert all(isinstance(recipe.model, ModelConfig) for recipe in recipes.values())
