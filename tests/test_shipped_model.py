"""The model that ships is whole, is what its manifest says, and writes English."""

import re
from pathlib import Path

import torch

from model.attention.interface import ATTENTION_BACKENDS
from model.checkpoint import load_model
from model.evaluation.held_out import evaluate
from model.generate import generate
from model.manifest import read_manifest
from model.sampling_params import SamplingParams
from model.tokenizer.native import load_native
from model.training.config import load_train_config

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "stories-7m"
AESOP = (ROOT / "tests" / "data" / "aesop.txt").read_text()


def test_it_is_whole_and_was_made_by_the_recipe() -> None:
    manifest = read_manifest(CHECKPOINT)
    manifest.verify()
    recipe = load_train_config(ROOT / "model" / "training" / "configs" / "stories.toml")
    assert manifest.config == recipe.model
    assert manifest.training["steps"] == recipe.steps
    assert manifest.training["seed"] == recipe.seed
    assert {source["name"] for source in manifest.training["sources"]} == {source.name for source in recipe.sources}
    assert all(path.stat().st_size <= 15 * 2**20 + 2**16 for path in manifest.weight_files)


def test_its_card_says_what_was_measured() -> None:
    card = (CHECKPOINT / "MODEL_CARD.md").read_text()
    for name, bits in read_manifest(CHECKPOINT).training["held_out_bits_per_byte"].items():
        assert f"| {name} | {bits:.4f} |" in card
    assert (CHECKPOINT / "loss.png").is_file()


def test_it_writes_english() -> None:
    """Nearly every word of a greedy story is one that storytellers use; random letters would have none."""
    manifest = read_manifest(CHECKPOINT)
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    tokenizer = load_native(CHECKPOINT)
    assert tokenizer.bos_token_id is not None
    prompt = [tokenizer.bos_token_id, *tokenizer.encode("Once upon a time, there was a")]
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    text = tokenizer.decode(generate(model, prompt, params, eos_token_ids=tokenizer.eos_token_ids))
    words = re.findall(r"[a-z]+", text.lower())
    known = set(re.findall(r"[a-z]+", AESOP.lower()))
    assert len(words) > 40
    assert sum(word in known for word in words) > 0.7 * len(words)
    assert evaluate(model, tokenizer, AESOP.split("\n\n")[:20]).bits_per_byte < 1.6
