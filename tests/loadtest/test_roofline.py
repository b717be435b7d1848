"""Roofline: probes of every weight type, and bytes and FLOPs of a step compared with sums computed by hand."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from loadtest.measurement import roofline
from loadtest.measurement.roofline import Machine, Roofline, Work, WorkFormula
from model.config import ModelConfig
from tests.tiny_model import tiny_config


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_READ_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_SIDES", (64,))


@pytest.mark.parametrize("weight_type", ["float32", "bfloat16", "float64", "int8", "int4", "fp8"])
def test_a_probe_measures_both_limits(weight_type: str) -> None:
    machine = Roofline(weight_type, "cpu").probe()
    assert machine.bytes_per_second > 0
    assert machine.flops_per_second > 0


@pytest.mark.parametrize(
    ("weight_type", "dtypes"),
    [
        ("float32", {torch.float32}),
        ("float64", {torch.float64}),
        ("bfloat16", {torch.bfloat16, torch.float32}),
        ("int8", {torch.float32}),
    ],
)
def test_the_peak_is_measured_in_the_requested_type_and_in_float32(
    monkeypatch: pytest.MonkeyPatch, weight_type: str, dtypes: set[torch.dtype]
) -> None:
    seen: list[torch.dtype] = []
    linear = torch.nn.functional.linear

    def spy(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        seen.append(weight_NK.dtype)
        return linear(x_MK, weight_NK)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    Roofline(weight_type, "cpu").probe()
    assert set(seen) == dtypes


def test_ways_that_are_much_slower_are_tried_only_on_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SIDES", (32, 64))
    slow: list[int] = []  # sizes of the products by torch._int_mm

    def multiply(x_MK: torch.Tensor, weight_KN: torch.Tensor) -> torch.Tensor:
        slow.append(len(x_MK))
        return x_MK

    def seconds(work: Callable[[], object]) -> float:
        before = len(slow)
        work()
        return 1.0 if len(slow) == before else 3.0

    monkeypatch.setattr(torch, "_int_mm", multiply)
    monkeypatch.setattr(roofline, "_best_seconds", seconds)
    assert Roofline("int8", "cpu").probe().flops_per_second == 2 * 64**3
    assert slow == [32]


# Two layers of 32, 4 query and 2 key/value heads of 8, MLP 64, and a vocabulary of 100 that is tied.
CONFIG = tiny_config(100)
A_LAYER = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 32 * 2 * 64 + 64 * 32  # qkv, out, gate and up, down
HEAD = 100 * 32
WEIGHTS = 2 * A_LAYER + HEAD


def formula(config: ModelConfig = CONFIG, weight_type: str = "float32") -> WorkFormula:
    return WorkFormula(config, weight_type, 4)


def test_bytes_and_flops_of_a_decode_step() -> None:
    work = formula().decode(batch_size=3, context_length=10)
    kv_of_a_token = 2 * 2 * (8 + 8) * 4  # layers, heads, a key and a value, bytes
    assert work.bytes == WEIGHTS * 4 + 3 * 10 * kv_of_a_token
    # Two layers, four query heads, 8 multiplications and additions for q·k and as many for the values.
    assert work.flops == 3 * (2 * WEIGHTS + 2 * 4 * 10 * (2 * 8 + 2 * 8))


def test_bytes_and_flops_of_a_prompt() -> None:
    work = formula().prompt(num_tokens=5, tokens_per_step=2)
    assert work.bytes == 3 * WEIGHTS * 4
    pairs = 1 + 2 + 3 + 4 + 5
    assert work.flops == 5 * 2 * 2 * A_LAYER + 2 * HEAD + 2 * 4 * pairs * (2 * 8 + 2 * 8)


@pytest.mark.parametrize(("weight_type", "size"), [("int8", 1), ("fp8", 1), ("bfloat16", 2), ("float64", 8)])
def test_bytes_of_a_weight_follow_its_type(weight_type: str, size: int) -> None:
    assert formula(weight_type=weight_type).prompt(num_tokens=1, tokens_per_step=1).bytes == WEIGHTS * size


def test_an_untied_head_needs_the_same_work() -> None:
    untied = formula(dataclasses.replace(CONFIG, tie_embeddings=False))
    assert untied.num_multiplied == formula().num_multiplied == WEIGHTS


def test_a_sliding_window_limits_bytes_and_flops_of_its_layer() -> None:
    windowed = formula(dataclasses.replace(CONFIG, sliding_window=4, global_layers=(1,)))
    whole = formula()
    kv_of_a_layer = 2 * (8 + 8) * 4
    fewer = whole.decode(batch_size=2, context_length=10).bytes - windowed.decode(batch_size=2, context_length=10).bytes
    assert fewer == 2 * (10 - 4) * kv_of_a_layer
    # Of 5 tokens, the last does not see the first: a pair of 15, in one layer.
    prompt = (
        whole.prompt(num_tokens=5, tokens_per_step=8).flops - windowed.prompt(num_tokens=5, tokens_per_step=8).flops
    )
    assert prompt == 4 * (2 * 8 + 2 * 8)


def test_the_bound_is_the_larger_of_reading_and_multiplying_time() -> None:
    machine = Machine(bytes_per_second=10.0, flops_per_second=100.0)
    assert Work(bytes=20, flops=100).bound_seconds(machine) == 2.0
    assert Work(bytes=20, flops=500).bound_seconds(machine) == 5.0
