"""docs/gpu.md: its tables belong to the kernels and the model of today."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loadtest.measurement.model_shapes import shape_config
from model.system.triton_modules import import_with_triton
from tests.gpu.step_model import FUSED, INT8, INT8_APART, PROMPT, UNFUSED, Layer, decode_step, llama_8b

pytestmark = pytest.mark.triton

compiled_kernels: Any = import_with_triton("tests.gpu.compiled_kernels")
page: Any = import_with_triton("tests.gpu.page")
# Operations that launch no kernel: views, and the inputs that the test makes.
_FREE = re.compile(
    "alias|as_strided|detach|empty.*|expand|flatten|new_empty|permute|reshape|select|slice|split.*|squeeze|t|transpose|"
    "unbind|unflatten|unfold|unsqueeze|view|_unsafe_view|zeros"
)


class _Operations(TorchDispatchMode):
    """Counter of PyTorch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def kernels_of(num_layers: int, extra: str) -> int:
    """Count the kernels of a step of Qwen2 1.5B's shape with fewer layers, on the meta device."""
    launched: list[Any] = []
    model, cache = compiled_kernels._make(compiled_kernels._config(num_layers=num_layers), torch.bfloat16, extra)
    with compiled_kernels._recorded(["a step"], launched), _Operations() as operations:
        compiled_kernels._run_steps(model, cache)
    return len(launched) + sum(count for name, count in operations.counts.items() if not _FREE.fullmatch(name))


@pytest.mark.parametrize(
    ("layer", "extra", "rows", "prompts"),
    [(FUSED, "", (64,), ()), (INT8, "int8", (64,), ()), (PROMPT, "", (), (512,))],
)
def test_a_layer_has_the_kernels_of_the_model(
    layer: Layer, extra: str, rows: tuple[int, ...], prompts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_kernels, "_ROWS", rows)
    monkeypatch.setattr(compiled_kernels, "_PROMPTS", prompts)
    flash_attention = len(prompts)  # replaced on the meta device
    assert kernels_of(2, extra) - kernels_of(1, extra) + flash_attention == layer.num_kernels


def test_the_page_has_the_tables_of_today() -> None:
    text = page.PAGE.read_text()
    assert page.replace_part(text, "model", page.model_part()) == text
    rows = [line for line in text.splitlines() if line.startswith("| `") and not line.startswith("| `--")]
    kernels = {launch.name for launch in compiled_kernels.launches()}
    assert kernels == {row.split(" | ")[0].removeprefix("| ") for row in rows}
    assert all(row.endswith(" | 0 |") for row in rows), "a variant spills registers"


def test_the_paper_model_supports_what_the_page_says() -> None:
    small, large = shape_config("qwen2-1.5b"), llama_8b()
    assert small.num_parameters == pytest.approx(1.54e9, rel=0.01)
    assert large.num_parameters == pytest.approx(8.03e9, rel=0.01)
    for card in ("H100", "H200"):
        for batch in (1, 64):
            step, plain = (decode_step(small, card, batch, layer) for layer in (FUSED, UNFUSED))
            assert step.graph_gain >= 1.1, "graphs pay 10 % at 1.5B"
            assert plain.device_us >= 1.1 * step.device_us, "fused kernels pay 10 %"
            assert decode_step(large, card, batch).graph_gain == 1.0
            assert step.bound_us <= 0.73 * step.device_us
    together, apart = (decode_step(small, "H200", 1, layer) for layer in (INT8, INT8_APART))
    assert apart.device_us >= 1.1 * together.device_us, "quantization in the kernels before a product pays 10 %"
