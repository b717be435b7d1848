"""Resident memory of an engine's matrices on a CPU: their packed size, and no second copy."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import save_checkpoint
from model.nn.transformer import Transformer
from tests.tiny_model import tiny_config, tiny_tokenizer

ROOT = Path(__file__).parents[3]
NUM_LAYERS = (2, 14)  # of two models; the rest of their processes' memory is equal
BITS = {"none": 16.0, "int8": 8.0, "int4": 4.75}  # of a weight; the first layer, which is int8 in int4, is in both
_BUILD = """
import sys
from pathlib import Path
from model.checkpoint.manifest import read_manifest
from model.system.limits import own_anonymous_bytes
from service.config.settings import ModelSettings
from service.worker.engine_factory import build_engine

settings = ModelSettings(
    checkpoint=Path(sys.argv[1]), quantize=sys.argv[2], device="cpu", kv_cache_memory="1MiB", max_num_running=1,
    threads=1,
)
manifest = read_manifest(settings.checkpoint)
before = own_anonymous_bytes()
engine, facts = build_engine(settings, manifest)
print(own_anonymous_bytes() - before)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Yield two checkpoints in bfloat16 that differ in their number of layers, of 5.5 million parameters each."""
    tokenizer = tiny_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 768, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "mlp_size": 1792}
    directories = []
    for num_layers in NUM_LAYERS:
        tiny = tiny_config(tokenizer.vocab_size, max_context_length=16)
        config = dataclasses.replace(tiny, num_layers=num_layers, **sizes)
        model = Transformer(config, ATTENTION_BACKENDS["eager"])
        directory = tmp_path_factory.mktemp("checkpoints") / str(num_layers)
        save_checkpoint(
            directory,
            config=config,
            tensors=model.state_dict(),
            tokenizer=tokenizer,
            name=directory.name,
            training={"steps": 0},
            dtype=torch.bfloat16,
        )
        directories.append(directory)
    yield directories
    for directory in directories:
        shutil.rmtree(directory)  # pytest would keep the directories of three runs


@pytest.mark.slow
@pytest.mark.parametrize("quantize", BITS)
def test_weights_take_at_most_a_twentieth_more_than_packed(checkpoints: list[Path], quantize: str) -> None:
    fewer, more = (grown_bytes(directory, quantize) for directory in checkpoints)
    num_weights = (NUM_LAYERS[1] - NUM_LAYERS[0]) * 768 * (64 * (12 + 2 * 4) + 64 * 12 + 3 * 1792)
    packed_bytes = num_weights * BITS[quantize] / 8
    assert 0.95 * packed_bytes < more - fewer < 1.05 * packed_bytes


def grown_bytes(checkpoint: Path, quantize: str) -> int:
    """Return the anonymous memory that a new process takes to build an engine."""
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, str(checkpoint), quantize]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
