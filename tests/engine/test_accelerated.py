"""Engine settings for a GPU, tested on a CPU: KV-cache memory, attention, quantization, CUDA graphs and lookahead."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.attention.backends import EagerAttention
from model.attention.native import NativeAttention
from model.attention.paged import KernelContext, PagedAttention, SelectedKernels, choose
from model.attention.sdpa import SdpaAttention
from model.checkpoint.manifest import read_manifest
from model.gpu.quantization import Quantization
from service.config.settings import ModelSettings
from service.engine.execution import gpu_setup
from service.engine.execution.gpu_setup import (
    DeviceMemory,
    LargestStep,
    cache_bytes,
    capture_for,
    choose_attention,
    choose_quantization,
)
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner, StepOutputs
from service.worker import engine_factory
from service.worker.engine_factory import build_engine
from tests.engine.fakes import call_again, make_submit
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE, library_of

GIB = 2**30
CPU = KernelContext(config=VARIANTS["rotary-gqa"], device=torch.device("cpu"), dtype=torch.float32, block_size=4)
CUDA = replace(CPU, device=torch.device("cuda"))


def test_the_kv_cache_gets_the_gpu_memory_that_the_largest_step_leaves() -> None:
    memory = DeviceMemory(total=100 * GIB, free=60 * GIB, reserved=30 * GIB, peak=25 * GIB)
    # 10 GiB belong to other processes. The allocator's memory beyond its peak can be used again.
    assert memory.for_cache(0.9) == 55 * GIB
    assert memory.for_cache(1.0) == 65 * GIB
    assert replace(memory, peak=40 * GIB).for_cache(0.9) == 40 * GIB
    assert replace(memory, free=40 * GIB).for_cache(0.9) == 35 * GIB
    assert replace(memory, reserved=50 * GIB, free=40 * GIB).for_cache(0.9) == 55 * GIB
    assert memory.for_cache(0.3) == 0
    assert replace(memory, graphs=2 * GIB).for_cache(0.9) == 53 * GIB


def test_the_largest_step_has_prompts_of_maximum_length() -> None:
    step = LargestStep(block_size=16, num_tokens=512, num_sampled=64, max_context_length=2048)
    assert step.lengths == (512,)
    assert replace(step, max_context_length=200).lengths == (200, 200, 112)
    assert replace(step, max_context_length=256).lengths == (256, 256)


def test_a_cpu_measures_no_gpu_memory_and_captures_no_cuda_graphs() -> None:
    step = LargestStep(block_size=4, num_tokens=8, num_sampled=2, max_context_length=64)
    assert cache_bytes(build(VARIANTS["rotary-gqa"]), step, 0.9, call_again) is None
    assert capture_for(torch.device("cpu")) is None


def test_auto_attention_is_paged_on_a_gpu_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KernelContext] = []
    chosen = choose(CPU)

    def record(place: KernelContext) -> SelectedKernels:
        asked.append(place)
        return chosen

    monkeypatch.setattr(gpu_setup, "choose", record)
    attending = choose_attention("auto", CUDA, None)
    assert (attending.backend, attending.can_capture, asked) == (chosen.backend, True, [CUDA])
    assert attending.name == "paged (decode: gathered, prompts: one by one)"
    for wanted, place in (("auto", replace(CUDA, config=VARIANTS["alibi"])), ("sdpa", CUDA)):
        attending = choose_attention(wanted, place, None)
        assert isinstance(attending.backend, SdpaAttention)
        assert (attending.name, attending.can_capture) == ("sdpa", False)
    assert isinstance(choose_attention("eager", CUDA, None).backend, EagerAttention)
    for name in list(BUILDABLE)[:1]:
        assert isinstance(choose_attention("auto", CPU, library_of(name)).backend, NativeAttention)
    assert choose_attention("auto", CPU, None).name == choose_attention("native", CPU, None).name == "sdpa"
    with pytest.raises(ValueError, match="--attention native works only on a CPU; omit it, or choose --device cpu"):
        choose_attention("native", CUDA, None)
    assert len(asked) == 1
    with pytest.raises(ValueError, match=r"--attention paged does not support .*choose --attention sdpa"):
        choose_attention("paged", replace(CPU, config=VARIANTS["alibi"]), None)


def test_kernels_that_are_not_supported_are_named() -> None:
    chosen = choose_attention("paged", CPU, None)
    assert isinstance(chosen.backend, PagedAttention)
    assert chosen.left_out == ("triton: the kernel needs a CUDA device", "varlen: the kernel needs a CUDA device")


def test_gpu_quantization_is_chosen_only_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.engine.execution.gpu_setup")
    chosen = Quantization("int8")
    monkeypatch.setattr(gpu_setup, "select_quantization", lambda *given: chosen)
    assert choose_quantization("int8", CUDA.device, torch.bfloat16) is chosen
    assert "int8 matrices by torch._int_mm" in caplog.text
    for quantize, device in (("none", CUDA.device), ("int8", CPU.device), ("int4", CPU.device)):
        assert choose_quantization(quantize, device, torch.bfloat16) is None
    with pytest.raises(ValueError, match="--quantize fp8 works only on a GPU; choose --quantize int8, or omit it"):
        choose_quantization("fp8", CPU.device, torch.bfloat16)
    with pytest.raises(ValueError, match="--quantize int4 works only on a CPU; choose --quantize int8, or omit it"):
        choose_quantization("int4", CUDA.device, torch.bfloat16)


@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_graphs_are_captured_only_if_the_setting_is_on(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graphs: bool
) -> None:
    """With a CPU stand-in for CUDA graphs, completions equal those of an engine without graphs (sdpa attention)."""
    caplog.set_level(logging.INFO, "service.engine.execution.model_runner")
    monkeypatch.setattr(engine_factory, "capture_for", lambda device: call_again)
    answers = []
    threads = torch.get_num_threads()
    for attention in ("paged", "sdpa"):
        settings = ModelSettings(
            checkpoint=tiny_checkpoint, device="cpu", threads=threads, attention=attention, max_num_running=3,
            cuda_graphs=graphs,
        )  # fmt: skip
        engine, facts = build_engine(settings, read_manifest(tiny_checkpoint))
        assert facts.attention.partition(" ")[0] == attention
        assert facts.setting_values()["attention"] == facts.attention
        engine.warm_up()
        engine.submit(make_submit("a", [1, 2, 3], max_tokens=12, temperature=0.0, ignore_eos=True))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for event in engine.step().events for token in event.token_ids]
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12
    assert ("CUDA graphs captured for decode steps of up to 4 sequences (1 shapes)" in caplog.text) == graphs


@pytest.mark.parametrize("lookahead", [True, False])
def test_steps_are_launched_ahead_only_on_an_asynchronous_device(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, lookahead: bool
) -> None:
    """A CPU that claims to be asynchronous stands for a GPU."""
    launched: list[tuple[int, ...]] = []
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, inputs: ModelInputs) -> Callable[[], StepOutputs]:
        launched.append(inputs.previous_rows)
        return launch(runner, inputs)

    monkeypatch.setattr(ModelRunner, "is_asynchronous", True)
    monkeypatch.setattr(ModelRunner, "launch", noted)
    settings = ModelSettings(
        checkpoint=tiny_checkpoint, device="cpu", threads=torch.get_num_threads(), attention="sdpa", lookahead=lookahead
    )
    engine, _ = build_engine(settings, read_manifest(tiny_checkpoint))
    engine.submit(make_submit("a", [1, 2, 3], max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert launched == ([(), (0,), (0,), (0,)] if lookahead else [])


def test_on_a_cpu_nothing_is_launched_ahead() -> None:
    runner = ModelRunner(build(VARIANTS["rotary-gqa"]), num_blocks=4, block_size=4, vocab_size=257)
    assert not runner.is_asynchronous


def test_the_gpu_memory_share_limits_the_kv_cache(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV-cache gets all bytes that `cache_bytes` returns. A token takes 256 bytes, a context has 256 tokens."""
    shares: list[float] = []

    def usable(model: object, largest: LargestStep, share: float, capture: object) -> int:
        shares.append(share)
        assert capture is None, "a CPU has no CUDA graphs"
        assert (largest.num_tokens, largest.num_sampled, largest.max_context_length) == (512, 64, 256)
        return round(10 * share * 256 * 256)

    monkeypatch.setattr(engine_factory, "cache_bytes", usable)
    settings = ModelSettings(checkpoint=tiny_checkpoint, device="cpu", threads=torch.get_num_threads())
    for share, contexts in ((0.9, 9), (0.5, 5)):
        changed = settings.model_copy(update={"gpu_memory_share": share})
        _, facts = build_engine(changed, read_manifest(tiny_checkpoint))
        assert facts.num_blocks == contexts * 16
    assert shares == [0.9, 0.5]
    too_small = settings.model_copy(update={"gpu_memory_share": 0.05})
    with pytest.raises(ValueError, match="set --max-context-length 128"):
        build_engine(too_small, read_manifest(tiny_checkpoint))
