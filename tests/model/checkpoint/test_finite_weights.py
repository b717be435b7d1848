"""Weights with NaN or infinity are rejected when they are read, in any tensor and on any way of loading."""

import bisect
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.conversion.export_hugging_face import export_checkpoint
from model.checkpoint.loading import EMBEDDING, MATRICES, load_model, write_weights
from model.checkpoint.manifest import read_manifest, write_manifest
from model.io.files import CheckpointError
from model.io.safetensors_header import read_headers
from model.tokenizer.byte_level import save_native
from model.training.data.bpe import train_bpe
from tests.families.models import CASES
from tests.model.configs import VARIANTS, build

CONFIG = VARIANTS["gpt2"]
STORED = (torch.float32, torch.bfloat16, torch.float16)
SHARD = "model.safetensors"
MATRIX = "layers.1.mlp.down.weight"


def saved(directory: Path, name: str, place: int, value: float, stored: torch.dtype) -> Path:
    """Write a checkpoint in which the number at index `place` of the tensor `name` is `value`; return its directory."""
    directory.mkdir(exist_ok=True)
    tensors = {key: tensor.detach().to(stored) for key, tensor in build(CONFIG).state_dict().items()}
    tensors[name].view(-1)[place] = value
    write_weights(directory, CONFIG, tensors)
    save_native(train_bpe(["a b c"], 260), directory)
    write_manifest(directory, name="test", training={})
    return directory


def load_ours(directory: Path, dtype: torch.dtype = torch.float32, *, is_packed_next: bool = False) -> None:
    manifest = read_manifest(directory)
    manifest.verify()
    packed = (*MATRICES, EMBEDDING) if is_packed_next else ()
    load_model(
        manifest, device="cpu", dtype=dtype, attention=ATTENTION_BACKENDS["sdpa"], packed_next=packed
    ).token_embedding(torch.tensor([0]))


@pytest.mark.parametrize("is_packed_next", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stored", STORED)
def test_one_nan_or_infinity_is_rejected(
    tmp_path: Path, stored: torch.dtype, value: float, is_packed_next: bool
) -> None:
    """The number is first or last in a matrix (copied, or mapped until packed), in a vector, or in a tied embedding."""
    for name, place in ((MATRIX, 0), (MATRIX, -1), ("final_norm.bias", 7), ("token_embedding.weight", 1000)):
        saved(tmp_path, name, place, value, stored)
        for dtype in (torch.float32, torch.bfloat16, stored):
            with pytest.raises(CheckpointError) as caught:
                load_ours(tmp_path, dtype, is_packed_next=is_packed_next)
            assert str(caught.value) == (
                f"{tmp_path / SHARD}: tensor {name} holds NaN or infinity; "
                "copy the file again, or take a checkpoint from before its training diverged"
            )


def test_every_bit_pattern_of_nan_is_rejected(tmp_path: Path) -> None:
    for bits in (0x7F80_0001, 0x7FC0_0000, -1, -0x007F_FFFF):
        saved(tmp_path, MATRIX, 5, 0.0, torch.float32)
        tensors = load_file(tmp_path / SHARD)
        tensors[MATRIX].view(torch.int32).view(-1)[5] = bits
        save_file(tensors, tmp_path / SHARD)
        write_manifest(tmp_path, name="test", training={})
        with pytest.raises(CheckpointError, match=f"{MATRIX} holds NaN or infinity"):
            load_ours(tmp_path)


@pytest.mark.parametrize("is_packed_next", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_the_largest_finite_numbers_are_accepted(tmp_path: Path, stored: torch.dtype, is_packed_next: bool) -> None:
    for sign in (-1, 1):
        saved(tmp_path, MATRIX, 3, sign * torch.finfo(stored).max, stored)
        for dtype in {torch.float32, stored}:
            load_ours(tmp_path, dtype, is_packed_next=is_packed_next)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_numbers_that_become_infinite_in_the_served_dtype_are_rejected(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    """The threshold is exact: of two adjacent numbers, the smaller converts to a finite number, the larger does not."""
    integers = torch.int32 if stored is torch.float32 else torch.int16
    infinity = torch.tensor(math.inf, dtype=stored).view(integers).item()
    first = bisect.bisect_left(
        range(int(infinity)),
        True,
        key=lambda bits: bool(torch.tensor(bits, dtype=integers).view(stored).to(dtype).isinf()),
    )
    least, most = (torch.tensor(bits, dtype=integers).view(stored) for bits in (first - 1, first))
    for sign in (-1, 1):
        saved(tmp_path, MATRIX, 3, sign * least.item(), stored)
        load_ours(tmp_path, dtype)
        if most.isfinite():
            saved(tmp_path, MATRIX, 3, sign * most.item(), stored)
            with pytest.raises(CheckpointError, match=f"too large for {str(dtype)[6:]}; choose the dtype"):
                load_ours(tmp_path, dtype)


@pytest.mark.parametrize("packed_next", [(), (*MATRICES, EMBEDDING)])
@pytest.mark.parametrize("case", ["gpt2", "llama gqa tied", "gpt_neox", "olmo2"])
def test_nan_in_any_tensor_of_a_hugging_face_directory_is_rejected(
    tmp_path: Path, case: str, packed_next: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are stored transposed, concatenated, interleaved or tied, and are read in many slices."""
    monkeypatch.setattr("model.checkpoint.weights.SLICE_BYTES", 700)
    CASES[case].build().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for number, name in enumerate(whole):
        tensors = {key: tensor.clone() for key, tensor in whole.items()}
        tensors[name].view(-1)[number % tensors[name].numel()] = math.nan
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinity"):
            load_model(
                read_manifest(tmp_path),
                device="cpu",
                dtype=torch.float32,
                attention=ATTENTION_BACKENDS["sdpa"],
                packed_next=packed_next,
            )
    assert read_headers(path).keys() == whole.keys()


def test_exporting_weights_that_are_not_finite_is_rejected(tmp_path: Path) -> None:
    saved(tmp_path / "from", MATRIX, 3, math.inf, torch.float32)
    with pytest.raises(CheckpointError, match=f"tensor {MATRIX} holds NaN or infinity"):
        export_checkpoint(tmp_path / "from", tmp_path / "to")
    assert not (tmp_path / "to").exists()
