"""Peak memory of loading a checkpoint of 300 MB: the model, and at most a fifth of the files.

The peak is the kernel's maximum of resident memory (VmHWM), less the resident memory after all imports. It includes
mapped pages of files.
"""

import shutil
from pathlib import Path

import pytest
import torch

from model.checkpoint.weights import DTYPES
from model.io.safetensors_header import WEIGHT_DTYPES
from tests.families.large_checkpoint import MEGABYTE, measure, write_large
from tests.families.models import CASES, load

LIMIT = 1.2
# Family, dtype of the files, number of shards, and for each dtype of the model: its size / size of the files.
LOADS: dict[str, tuple[str, torch.dtype, int, dict[str, float]]] = {
    "one file": ("llama", torch.float32, 1, {"float32": 1.0, "bfloat16": 0.5}),
    "transposed, shards": ("gpt2", torch.float32, 3, {"float32": 1.0}),
    "bfloat16, one file": ("llama", torch.bfloat16, 1, {"bfloat16": 1.0, "float32": 2.0}),
    "interleaved heads in bfloat16, shards": ("gpt_neox", torch.bfloat16, 3, {"bfloat16": 1.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_peak_memory_is_the_model_and_a_fifth_of_the_files(tmp_path: Path, name: str) -> None:
    family, stored, num_shards, dtypes = LOADS[name]
    directory = tmp_path / "model"
    write_large(directory, family, stored, num_shards=num_shards, num_bytes=300 * MEGABYTE)
    try:
        for dtype, growth in dtypes.items():
            file_bytes, baseline, peak, after = measure(directory, dtype)
            print(
                f"{name}, loaded as {dtype}: files {file_bytes / MEGABYTE:.0f} MB, memory before loading "
                f"{baseline / MEGABYTE:.0f} MB; growth {(peak - baseline) / file_bytes:.3f} of the files' size at the "
                f"peak, {(after - baseline) / file_bytes:.3f} after loading"
            )
            assert file_bytes > 299 * MEGABYTE
            assert after - baseline > 0.95 * growth * file_bytes  # the model is in memory, and counted
            assert peak - baseline <= (growth + LIMIT - 1) * file_bytes
    finally:
        shutil.rmtree(directory)  # pytest would keep the directories of three runs


@pytest.mark.parametrize("case", ["gpt2", "llama gqa tied", "gpt_neox", "olmo2"])
def test_tensors_read_in_slices_equal_whole_tensors(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice size is so small that every tensor has many slices, and every file is opened many times."""
    CASES[case].build().save_pretrained(tmp_path, max_shard_size=20_000)
    whole = load(tmp_path).state_dict()
    monkeypatch.setattr("model.checkpoint.weights.SLICE_BYTES", 700)
    monkeypatch.setattr("model.checkpoint.weights.MAPPED_BYTES", 2_000)
    sliced = load(tmp_path).state_dict()
    assert list(sliced) == list(whole)
    for name, tensor in whole.items():
        assert torch.equal(sliced[name], tensor), name


def test_every_dtype_that_the_checks_accept_can_be_read() -> None:
    assert set(DTYPES) == set(WEIGHT_DTYPES)
