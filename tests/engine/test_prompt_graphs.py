"""Piecewise CUDA graphs of steps with prompts, on a CPU: sizes, padding, and unchanged completions."""

import itertools
import logging
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from model.attention.kernel_selection import fits, gathered, one_by_one
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.paged import PagedAttention
from model.gpu.quantization import FORMATS, PLAIN, Quantization
from model.nn.linear import replace_linears_by
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from service.engine.engine import Engine
from service.engine.execution import prefill_graphs
from service.engine.execution.cuda_graphs import call_again
from service.engine.execution.gpu_setup import create_graphed_runner
from service.engine.execution.prefill_graphs import (
    Between,
    CudaPieces,
    GraphedTransformer,
    capture_prompts,
    prompt_rows,
    uncut,
)
from service.engine.scheduling.config import EngineConfig
from tests.engine.test_parity import EOS, TOKENIZER, submissions
from tests.model.configs import VARIANTS, build

CONFIG = EngineConfig(block_size=4, num_blocks=120, max_num_running=8, max_batched_tokens=40, max_context_length=64)
FITTING = [name for name, config in VARIANTS.items() if fits(config)]


def paged(variant: str) -> Transformer:
    model = build(VARIANTS[variant])
    for layer in model.layers:
        layer.attention.backend = PagedAttention(gathered, one_by_one)
    return model


def counted(calls: list[int]) -> Callable[[Callable[[Between], Tensor]], Callable[[Between], Tensor]]:
    """Wrap `uncut`, and record the rows of each replay."""

    def pieces(compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
        replay = uncut(compute)

        def replay_counted(between: Between) -> Tensor:
            found = replay(between)
            calls.append(len(found))
            return found

        return replay_counted

    return pieces


def test_a_third_at_most_is_padding() -> None:
    assert prompt_rows(512) == (512, 384, 256, 192, 128, 96, 64)
    assert prompt_rows(500)[:2] == (500, 384)
    assert prompt_rows(40) == (40,)
    assert prompt_rows(1 << 20)[0] == prefill_graphs.MAX_ROWS
    sizes = prompt_rows(2048)
    assert all(after / before >= 2 / 3 - 0.01 for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize("variant", FITTING)
def test_a_recorded_engine_gives_the_tokens_of_the_slow_twin(
    variant: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.engine.execution.gpu_setup")
    monkeypatch.setattr(prefill_graphs, "_MIN_ROWS", 8)
    calls: list[int] = []
    model = paged(variant)
    runner = create_graphed_runner(model, CONFIG, TOKENIZER.vocab_size, call_again, counted(calls))
    assert "CUDA graphs captured for prefill steps of up to 40 tokens (6 sizes)" in caplog.text
    assert type(model) is GraphedTransformer
    calls.clear()
    engine = Engine(model, TOKENIZER, CONFIG, runner=runner)
    submits = submissions(8, seed=4)
    found: dict[str, list[int]] = {submit.uid: [] for submit in submits}
    for submit in submits:
        engine.submit(submit)
    while engine.has_work:
        for delta in engine.step().events:
            found[delta.uid].extend(delta.token_ids)
    assert len(set(calls)) > 1
    twin = build(VARIANTS[variant])
    for submit in submits:
        assert found[submit.uid] == generate(twin, submit.prompt_token_ids, submit.params, eos_token_ids=(EOS,))


@torch.inference_mode()
def test_padding_changes_no_number_and_larger_steps_are_computed_as_ever() -> None:
    model, calls = paged("qwen2"), list[int]()
    replace_linears_by(model, Quantization(form=FORMATS["int8"], kernels=PLAIN, left_out=None).make)
    capture_prompts(model, counted(calls), 70)
    assert isinstance(model, GraphedTransformer)
    for lengths in ((3,), (20, 9), (60, 4), (60, 11)):
        ids, metadata = torch.arange(sum(lengths)), AttentionMetadata.uncached(lengths)
        expected = Transformer.hidden(model, ids, metadata, None)
        calls.clear()
        found = model.prompt_graphs.hidden(ids, metadata, None)
        if sum(lengths) > 70:
            assert found is None
        else:
            assert found is not None
            torch.testing.assert_close(found, expected)
            assert calls == [64]


class FakeGraph:
    """A CUDA graph with a name, which logs its calls."""

    def __init__(self, told: list[str]) -> None:
        self.told, self.name = told, f"graph {sum(line.startswith('begin') for line in told)}"

    def capture_begin(self, **given: Any) -> None:
        self.told.append(f"begin {self.name}")

    def capture_end(self) -> None:
        self.told.append(f"end {self.name}")

    def replay(self) -> None:
        self.told.append(self.name)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the log of calls to graphs, with a fake device."""
    lines: list[str] = []
    monkeypatch.setattr(torch, "cuda", MagicMock(CUDAGraph=lambda: FakeGraph(lines)))
    return lines


def test_pieces_are_recorded_one_after_the_other_and_replayed_around_attention(told: list[str]) -> None:
    forms = [AttentionForm(layer=layer, scale=1.0, window=None, bias=None) for layer in range(2)]

    def compute(between: Between) -> Tensor:
        for form in forms:
            between(form)
        return torch.ones(1)

    replay = CudaPieces()(compute)
    begun = [f"{what} graph {number}" for number in range(3) for what in ("begin", "end")]
    assert told == begun
    told.clear()
    assert replay(lambda form: told.append(f"attention {form.layer}")).item() == 1
    assert told == ["graph 0", "attention 0", "graph 1", "attention 1", "graph 2"]


def test_a_recording_that_fails_is_ended(told: list[str]) -> None:
    def compute(between: Between) -> Tensor:
        if told:
            raise ValueError("not while recording")
        return torch.ones(1)

    with pytest.raises(ValueError, match="not while recording"):
        CudaPieces()(compute)
    assert told == ["begin graph 0", "end graph 0"]


def failing(compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
    uncut(compute)

    def replay(between: Between) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    return replay


def forgetful(compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
    """A backend that never attends."""

    def nothing(form: AttentionForm) -> None:
        """Leaves the output buffer unchanged."""

    compute(nothing)
    return lambda between: compute(nothing)


@pytest.mark.parametrize(
    ("pieces", "reason"), [(failing, "operation not permitted"), (forgetful, "40 rows differ by .* of the largest")]
)
def test_what_fails_or_differs_leaves_the_model_as_it_was(
    pieces: Callable[[Callable[[Between], Tensor]], Callable[[Between], Tensor]],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = paged("rotary-gqa")
    before = [layer.attention.backend for layer in model.layers]
    runner = create_graphed_runner(model, CONFIG, TOKENIZER.vocab_size, call_again, pieces)
    assert runner._graphs is not None
    (message,) = [record.getMessage() for record in caplog.records if "prefill steps" in record.getMessage()]
    assert re.match(f"CUDA graphs of prefill steps disabled: {reason}", message)
    assert type(model) is Transformer
    assert [layer.attention.backend for layer in model.layers] == before
