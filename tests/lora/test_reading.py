"""Adapters that cannot be served are rejected in one line that names the key or the tensor."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint.lora_adapter import read_adapter
from model.checkpoint.manifest import read_manifest
from model.io.files import CheckpointError
from tests.families.models import Case
from tests.lora.adapter_files import write_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    Case("llama", {"num_key_value_heads": 2}).build().save_pretrained(directory)
    return directory


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base, ["q_proj", "v_proj"])


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_tensors(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return rewrite


def set_tensor(name: str, value: Tensor) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.update({name: value}))


def remove_tensor(name: str) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.__delitem__(name))


def to_pickle(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / "adapter_model.bin").write_bytes(b"\x80\x04.")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing A": (remove_tensor(Q_A), f"tensor {Q_A} is missing"),
    "missing B": (remove_tensor(Q_B), f"tensor {Q_B} is missing"),
    "another base": (set_tensor(Q_A, torch.zeros(4, 64)), f"tensor {Q_A} has shape (4, 64), but rank 4"),
    "another rank": (change_config(r=8), "has shape (4, 32), but rank 8"),
    "rank of one module": (change_config(rank_pattern={"q_proj": 2}), f"tensor {Q_A} has shape (4, 32), but rank 2"),
    "NaN": (set_tensor(Q_B, torch.full((32, 4), torch.nan)), f"tensor {Q_B} holds NaN"),
    "integers": (set_tensor(Q_B, torch.zeros(32, 4, dtype=torch.int32)), f"tensor {Q_B} has dtype I32"),
    "an extra tensor": (set_tensor("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 32)), "lm_head.lora_A"),
    "targets without tensors": (
        change_config(target_modules=["q_proj", "k_proj", "v_proj"]),
        "k_proj.lora_A.weight is",
    ),
    "unknown targets": (change_config(target_modules=["query"]), f"tensor {Q_A} belongs to no target module"),
    "no targets": (change_config(target_modules=None), "target_modules is null"),
    "rank 0": (change_config(r=0), "r is 0, not an integer from 1 to 1024"),
    "rank as text": (change_config(r="4"), 'r is "4", not an integer'),
    "no alpha": (change_config(lora_alpha=None), "lora_alpha is null, not a number"),
    "biases": (change_config(bias="lora_only"), 'bias is "lora_only", not "none"'),
    "DoRA": (change_config(use_dora=True), "use_dora is not supported"),
    "saved modules": (change_config(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
    "another method": (change_config(peft_type="IA3"), 'peft_type is "IA3", not "LORA"'),
    "a changed base": (change_config(init_lora_weights="pissa"), 'init_lora_weights is "pissa"'),
    "several keys": (
        change_config(r=0, bias="all", use_dora=True, new_trick=3),
        'r is 0, not an integer from 1 to 1024; correct it; bias is "all", not "none", the only supported value; '
        "correct it; use_dora, new_trick are not supported; train the adapter without them",
    ),
    "an unknown key": (change_config(new_trick=3), "new_trick is not supported"),
    "a bad pattern": (change_config(target_modules="(q_proj"), "the pattern '(q_proj' is not a regular expression"),
    "a slow pattern": (change_config(target_modules=r"(.|\w|\S)*[^\w.]"), "takes too long"),
    "a repeated pattern": (change_config(target_modules="q{1000000}"), "is too long or repeats too often"),
    "nested repetitions": (change_config(rank_pattern={"((q{99}){99}){99}": 4}), "is too long or repeats too often"),
    "a long pattern": (change_config(target_modules="q|" * 5001), "is too long or repeats too often"),
    "no JSON": (lambda directory: (directory / CONFIG).write_text("{"), "adapter_config.json: not JSON"),
    "no config": (lambda directory: (directory / CONFIG).unlink(), "adapter_config.json: missing"),
    "no weights": (lambda directory: (directory / WEIGHTS).unlink(), "adapter_model.safetensors: missing"),
    "truncated weights": (lambda directory: (directory / WEIGHTS).write_bytes(b"\0" * 9), "not a valid safe"),
    "a pickle": (to_pickle, "adapter_model.bin: a pickle can run code, and is not read; convert it"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_is_rejected_in_one_line(adapter: Path, base: Path, name: str) -> None:
    change, message = BAD[name]
    change(adapter)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(adapter, read_manifest(base))
    assert message in str(caught.value)
    assert str(adapter) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("values", [{"use_dora": False, "layer_replication": None, "new_trick": 0, "loftq_config": {}}])
def test_keys_that_are_off_change_nothing(adapter: Path, base: Path, values: dict[str, Any]) -> None:
    manifest = read_manifest(base)
    before = read_adapter(adapter, manifest)
    change_config(**values)(adapter)
    after = read_adapter(adapter, manifest)
    assert after.key != before.key
    assert after.matrices.keys() == before.matrices.keys()
    for name, addition in after.matrices.items():
        assert (addition.up_FR == before.matrices[name].up_FR).all()


def test_a_wrong_file_larger_than_memory_is_rejected_by_its_header(adapter: Path, base: Path) -> None:
    size = 2**40
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    (adapter / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(adapter / WEIGHTS, 8 + len(header) + size)  # a sparse file
    with pytest.raises(CheckpointError, match="is missing, though target_modules names its module"):
        read_adapter(adapter, read_manifest(base))


def test_a_file_is_no_directory(adapter: Path, base: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory; give one"):
        read_adapter(adapter / CONFIG, read_manifest(base))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    "r",
    "lora_alpha",
    "target_modules",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "bias",
    "peft_type",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from([*KEYS, "use_rslora", "exclude_modules", "x"]), JSON, max_size=3))
def test_any_config_is_read_or_rejected_in_one_line(adapter: Path, base: Path, values: dict[str, Any]) -> None:
    path = adapter / CONFIG
    before = path.read_text()
    try:
        change_config(**values)(adapter)
        assert len(outcome(adapter, base).splitlines()) <= 1
    finally:
        path.write_text(before)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_of_the_weights_is_read_or_rejected_in_one_line(adapter: Path, base: Path, data: Any) -> None:
    path = adapter / WEIGHTS
    before = path.read_bytes()
    damaged = bytearray(before)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(before) - 1))] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged)
        assert len(outcome(adapter, base).splitlines()) <= 1
    finally:
        path.write_bytes(before)


def outcome(adapter: Path, base: Path) -> str:
    """Return the error of reading an adapter; empty if it can be served."""
    try:
        assert read_adapter(adapter, read_manifest(base)).matrices
    except CheckpointError as error:
        return str(error)
    return ""
