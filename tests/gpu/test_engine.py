"""The whole engine on a CUDA device: CUDA graphs, memory, and the tokens of the reference implementation."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from model.attention.paged import KernelContext, choose, fits
from model.checkpoint.manifest import read_manifest
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from service.config.settings import ModelSettings
from service.engine.engine import Engine
from service.engine.execution.cuda_graphs import CudaCapture
from service.engine.execution.gpu_setup import LargestStep, measure
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner, StepOutputs
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import Submit
from service.worker.engine_factory import build_engine
from tests.engine.fakes import make_submit
from tests.engine.test_graphs import replayed, step
from tests.engine.test_parity import EOS, TOKENIZER, submissions
from tests.model.configs import VARIANTS, attention_layers, build

pytestmark = pytest.mark.gpu

FITTING = [name for name, config in VARIANTS.items() if fits(config)]
CONFIG = EngineConfig(block_size=4, num_blocks=120, max_num_running=16, max_batched_tokens=64, max_context_length=64)


def accelerated(variant: str, dtype: torch.dtype) -> tuple[Engine, ModelRunner]:
    model = build(VARIANTS[variant]).to("cuda", dtype)
    place = KernelContext(config=model.config, device=torch.device("cuda"), dtype=dtype, block_size=CONFIG.block_size)
    backend = choose(place).backend
    for attention in attention_layers(model):
        attention.backend = backend
    runner = graphed(model)
    return Engine(model, TOKENIZER, CONFIG, runner=runner), runner


def graphed(model: Transformer) -> ModelRunner:
    """Return a runner with captured decode steps."""
    sizes: dict[str, Any] = {
        "num_blocks": CONFIG.num_blocks,
        "block_size": CONFIG.block_size,
        "vocab_size": TOKENIZER.vocab_size,
    }
    runner = ModelRunner(model, **sizes)
    runner.capture_decodes(CudaCapture(), max_rows=CONFIG.max_num_running, max_context_length=64)
    return runner


def answers(engine: Engine, submits: list[Submit]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {submit.uid: [] for submit in submits}
    for submit in submits:
        engine.submit(submit)
    while engine.has_work:
        for delta in engine.step().events:
            found[delta.uid].extend(delta.token_ids)
    engine.check_integrity()
    return found


@pytest.mark.parametrize("variant", FITTING)
def test_captured_steps_give_the_tokens_of_the_reference(variant: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service.engine.execution.model_runner")
    engine, _ = accelerated(variant, torch.float32)
    assert "CUDA graphs captured for decode steps of up to 16 sequences (3 shapes)" in caplog.text
    submits = submissions(20, seed=4)
    found = answers(engine, submits)
    twin = build(VARIANTS[variant])
    for submit in submits:
        assert found[submit.uid] == generate(twin, submit.prompt_token_ids, submit.params, eos_token_ids=(EOS,))


def test_steps_launched_ahead_give_the_tokens_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run batches of up to 16 sequences by captured steps; some sequences end early."""
    ahead: list[bool] = []
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, inputs: ModelInputs) -> Callable[[], StepOutputs]:
        ahead.append(bool(inputs.previous_rows))
        return launch(runner, inputs)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    engine, _ = accelerated("rotary-gqa", torch.float32)
    submits = [
        make_submit(
            str(number), [number, 7, 9], max_tokens=10 + number, seed=number, temperature=float(number % 2),
            ignore_eos=True, stop_token_ids=tuple(range(number, 250, 40)),
        )
        for number in range(24)
    ]  # fmt: skip
    found = answers(engine, submits)
    twin = build(VARIANTS["rotary-gqa"])
    for submit in submits:
        assert found[submit.uid] == generate(twin, submit.prompt_token_ids, submit.params, eos_token_ids=(EOS,))
    assert sum(ahead) > 10


def test_a_captured_step_equals_a_plain_step_bitwise() -> None:
    _, recorded = accelerated("rotary-gqa", torch.bfloat16)
    plain = ModelRunner(
        recorded._model, num_blocks=CONFIG.num_blocks, block_size=CONFIG.block_size, vocab_size=TOKENIZER.vocab_size
    )
    assert recorded._graphs is not None
    for position in range(9):
        block, offset = divmod(position, CONFIG.block_size)
        rows = [row * 4 + block for row in range(8)]
        inputs = step(
            [7] * 8,
            [position] * 8,
            [row * 4 + offset for row in rows],
            [[r - block + n for n in range(4)] for r in rows],
        )
        with torch.inference_mode():
            found = replayed(recorded._graphs, inputs)
            metadata = inputs.metadata.to(torch.device("cuda"))
            expected = Transformer.hidden(
                cast(Transformer, plain._model), inputs.token_ids_T.cuda(), metadata, plain._cache
            )
        assert found is not None
        assert torch.equal(found, expected)


def test_graphs_share_their_memory() -> None:
    torch.cuda.empty_cache()
    model = build(VARIANTS["rotary-gqa"]).to("cuda")
    before = torch.cuda.memory_reserved()
    graphed(model)
    assert torch.cuda.memory_reserved() - before < 256 * 2**20


def test_the_memory_of_the_largest_step_is_measured() -> None:
    model = build(VARIANTS["rotary-gqa"]).to("cuda")
    small, large = (
        measure(model, LargestStep(block_size=4, num_tokens=tokens, num_sampled=8, max_context_length=64))
        for tokens in (64, 16_384)
    )
    assert large.peak > small.peak + 16_384 * 300 * 4  # the logits alone
    assert 0 < large.for_cache(0.9) < small.for_cache(0.9) < small.for_cache(0.95) < small.total


def test_an_engine_uses_every_gpu_feature(tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service.engine.execution.model_runner")
    settings = ModelSettings(checkpoint=tiny_checkpoint, max_num_running=4)
    engine, facts = build_engine(settings, read_manifest(tiny_checkpoint))
    assert (facts.device, facts.dtype) == ("cuda", "bfloat16")
    assert facts.attention == "paged (decode: triton, prompts: varlen)"
    assert "CUDA graphs captured for decode steps" in caplog.text
    engine.warm_up()
    assert not engine.has_work
