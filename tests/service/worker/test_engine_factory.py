"""Values of "auto" settings, and engines that cannot be built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from model.checkpoint.manifest import Manifest, read_manifest
from model.gpu.quantization import Quantization, QuantizedLinear
from model.kernels.build import CACHE, BuildError
from model.kernels.kernel_library import KernelLibrary, load_kernels
from service.config.settings import ModelSettings, SettingsError
from service.engine.execution.model_runner import ModelRunner
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import Finish
from service.worker import engine_factory, memory_plan
from service.worker.engine_factory import EngineFacts, build_engine
from service.worker.memory_plan import LoadedModel, ServerNeeds, plan_memory
from tests.service.sequences import make_submit
from tests.tiny_model import save_tiny_checkpoint

BYTES_PER_TOKEN = 256  # float32 keys and values of the tiny model
CONTEXT = 256


@pytest.fixture
def manifest(tiny_checkpoint: Path) -> Manifest:
    return read_manifest(tiny_checkpoint)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settings(checkpoint: Path, **values: Any) -> ModelSettings:
    return ModelSettings(checkpoint=checkpoint, **{"device": "cpu", "threads": 1, **values})


def test_auto_on_a_cpu_is_float32_and_room_for_every_running_sequence(
    manifest: Manifest, tiny_checkpoint: Path
) -> None:
    engine, facts = build_engine(settings(tiny_checkpoint, max_num_running=4, threads=2), manifest)
    assert (facts.device, facts.dtype, facts.threads) == ("cpu", "float32", 2)
    assert torch.get_num_threads() == 2
    assert facts.num_blocks == 4 * CONTEXT / 16 * 1.5
    assert facts.kv_cache_bytes == facts.num_blocks * 16 * BYTES_PER_TOKEN
    assert not engine.has_work


@pytest.mark.parametrize(("cpus", "native", "pytorch"), [(1, 1, 1), (2, 2, 1), (8, 8, 7)])
def test_auto_threads_are_all_cpus_for_native_kernels_only(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, native: int, pytorch: int
) -> None:
    monkeypatch.setattr(engine_factory, "usable_cpus", lambda: cpus)
    for attention, threads in (("native", native), ("sdpa", pytorch)):
        _, facts = build_engine(settings(tiny_checkpoint, threads="auto", attention=attention), manifest)
        assert facts.threads == torch.get_num_threads() == threads


def test_auto_dtype_is_that_of_the_checkpoint_with_native_kernels(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bfloat16 checkpoint is computed in bfloat16 by the native kernels, and in float32 by PyTorch's."""
    stored = read_manifest(save_tiny_checkpoint(tmp_path / "bfloat16", dtype=torch.bfloat16))
    found = {}
    for name, manifest, given in (
        ("bfloat16", stored, {}),
        ("float32", read_manifest(tiny_checkpoint), {}),
        ("sdpa", stored, {"attention": "sdpa"}),
        ("set", stored, {"dtype": "float32"}),
    ):
        _, facts = build_engine(settings(manifest.directory, **given), manifest)
        found[name] = (facts.dtype, facts.kv_cache_dtype, facts.kernel_level is not None)
    assert found == {
        "bfloat16": ("bfloat16", "bfloat16", True),
        "float32": ("float32", "float32", True),
        "sdpa": ("float32", "float32", False),
        "set": ("float32", "float32", True),
    }
    monkeypatch.setattr(engine_factory, "load_kernels", Mock(side_effect=BuildError("no C++ compiler")))
    _, facts = build_engine(settings(stored.directory), stored)
    assert facts.dtype == "float32", "no kernels could be had"
    (record,) = caplog.records
    assert facts.fallbacks == ("native kernels: no C++ compiler",)
    assert record.getMessage() == (
        "a slower path is used, because a faster one is not available: native kernels: no C++ compiler"
    )
    with pytest.raises(SettingsError, match="--require-fast-path: not available: native kernels: no C"):
        build_engine(settings(stored.directory, require_fast_path=True), stored)


def test_float16_beside_quantized_matrices_is_computed_in_bfloat16(tmp_path: Path) -> None:
    """Float16 alone is computed in float32, which holds its numbers."""
    stored = read_manifest(save_tiny_checkpoint(tmp_path / "float16", dtype=torch.float16))
    for quantize, expected in (
        ("none", "float32 (auto: the checkpoint is float16)"),
        ("int8", "bfloat16 (auto: the weights are quantized)"),
    ):
        _, facts = build_engine(settings(stored.directory, quantize=quantize), stored)
        assert facts.setting_values()["dtype"] == expected


def test_effective_values_give_the_reason_of_a_choice(manifest: Manifest, tiny_checkpoint: Path) -> None:
    _, facts = build_engine(settings(tiny_checkpoint, threads=2), manifest)
    assert facts.setting_values()["dtype"] == "float32 (auto: the checkpoint is float32)"
    assert str(facts.setting_values()["threads"]).startswith("2 (as set; usable CPUs: ")
    assert facts.setting_values()["attention"] == f"native ({facts.kernel_level})"


def test_auto_attention_is_sdpa_without_vector_instructions(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor is reported as ARM, for which there are no native kernels."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    _, facts = build_engine(settings(tiny_checkpoint), manifest)
    assert (facts.attention, facts.kernel_level) == ("sdpa", None)


def test_native_kernels_are_loaded_only_if_the_attention_setting_uses_native_kernels(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Path] = []

    def load(cache: Path) -> KernelLibrary:
        prepared.append(cache)
        return load_kernels(CACHE)

    monkeypatch.setattr(engine_factory, "load_kernels", load)
    for wanted, found in (("auto", "native"), ("native", "native"), ("sdpa", "sdpa"), ("eager", "eager")):
        _, facts = build_engine(settings(tiny_checkpoint, attention=wanted, cache_dir=tiny_checkpoint), manifest)
        assert facts.attention == found
    assert prepared == [tiny_checkpoint, tiny_checkpoint]


def test_auto_takes_at_most_half_of_free_memory_and_at_least_one_context(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free_contexts, contexts in ((10, 5), (2, 1), (1.25, 1)):
        has_free(monkeypatch, round(free_contexts * CONTEXT * BYTES_PER_TOKEN))
        _, facts = build_engine(settings(tiny_checkpoint), manifest)
        assert facts.num_blocks == contexts * CONTEXT / 16


@pytest.mark.parametrize(
    ("context", "running", "tokens"),
    [(8192, 2, 2 * 8192 * 1.5), (131_072, 64, 64 * 8192 * 1.5), (131_072, 2, 131_072), (131_072, 11, 11 * 8192 * 1.5)],
)
def test_auto_cache_of_a_long_context_is_limited_to_useful_blocks(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, context: int, running: int, tokens: float
) -> None:
    has_free(monkeypatch, 2**40)
    asked = settings(tiny_checkpoint, max_num_running=running)
    resolved: Any = SimpleNamespace(
        block_bytes=16 * BYTES_PER_TOKEN,
        max_context_length=context,
        context=SimpleNamespace(device=torch.device("cpu")),
    )
    num_blocks = engine_factory._num_blocks(asked, resolved, 0, None)
    assert num_blocks * 16 == tokens


def has_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(engine_factory, "free_bytes", lambda device: num_bytes)


def test_a_context_that_does_not_fit_is_rejected_with_the_length_that_fits(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "_MIB", 1024)
    has_free(monkeypatch, CONTEXT * BYTES_PER_TOKEN)
    remedy = "needs 64 MiB of KV-cache, but at most 51 MiB of memory can be used for it: set --max-context-length 192"
    with pytest.raises(ValueError, match=f"a context of 256 tokens {remedy}"):
        build_engine(settings(tiny_checkpoint), manifest)
    _, facts = build_engine(settings(tiny_checkpoint, max_context_length=192), manifest)
    assert (facts.num_blocks, facts.max_context_length) == (12, 192)
    has_free(monkeypatch, 0)
    with pytest.raises(
        ValueError, match="at most 0 MiB of memory can be used for it: use a smaller model or --block-size"
    ):
        build_engine(settings(tiny_checkpoint), manifest)


def server_with(
    monkeypatch: pytest.MonkeyPatch, manifest: Manifest, *, contexts: int, standby_bytes: int, **server: Any
) -> EngineFacts:
    """Build an engine of a server whose memory plan leaves room for twice the contexts of the KV-cache."""
    for module in (engine_factory, memory_plan):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(memory_plan, "memory_limit_bytes", lambda: 2**30)
    monkeypatch.setattr(memory_plan, "own_anonymous_bytes", lambda: standby_bytes)
    asked = settings(manifest.directory, attention="sdpa", max_num_running=1024, max_batched_tokens=1024)
    plan = plan_memory(LoadedModel(manifest.config, 4, 4, 1, CONTEXT), asked, ServerNeeds(**server))
    room = plan.reserved_bytes + contexts * CONTEXT * BYTES_PER_TOKEN
    monkeypatch.setattr(engine_factory, "available_memory_bytes", lambda: room)
    return build_engine(asked, manifest, server=ServerNeeds(**server))[1]


def test_the_cache_of_a_server_leaves_room_for_its_plan(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = server_with(monkeypatch, manifest, contexts=20, standby_bytes=100 * 2**20, standby=True, num_blocks=0)
    assert (fits.num_blocks, fits.has_standby) == (10 * CONTEXT / 16, True)
    fits_not = server_with(monkeypatch, manifest, contexts=20, standby_bytes=2**30, standby=True, num_blocks=0)
    assert (fits_not.num_blocks, fits_not.has_standby) == (10 * CONTEXT / 16, False)


def test_a_replacement_worker_has_the_cache_size_of_the_first_worker(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size does not depend on the free memory at the replacement, because the API process uses memory by then."""
    monkeypatch.setattr(engine_factory, "free_bytes", lambda device: 0)
    asked = settings(manifest.directory)
    _, facts = build_engine(asked, manifest, server=ServerNeeds(standby=True, num_blocks=17))
    assert facts.num_blocks == 17


def test_a_shorter_context_sizes_the_cache_and_ends_sequences(manifest: Manifest, tiny_checkpoint: Path) -> None:
    engine, facts = build_engine(settings(tiny_checkpoint, max_context_length=40, max_num_running=2), manifest)
    assert facts.num_blocks == 2 * 3 * 1.5
    engine.submit(make_submit("a", prompt=(1,) * 30, max_tokens=50, ignore_eos=True))
    engine.submit(make_submit("b", prompt=(1,) * 41, max_tokens=1))
    finishes: dict[str, Finish] = {}
    while engine.has_work:
        finishes |= {event.uid: event.finish for event in engine.step().events if event.finish}
    assert finishes["a"].num_completion_tokens == 10
    assert "send a prompt of 1 to 40 tokens" in str(finishes["b"].error)


def test_a_context_over_the_positions_of_the_model_is_rejected_with_both_numbers(
    manifest: Manifest, tiny_checkpoint: Path
) -> None:
    with pytest.raises(SettingsError, match="--max-context-length 257 is over the 256 positions of the model"):
        build_engine(settings(tiny_checkpoint, max_context_length=257), manifest)


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("float64", torch.float64)])
def test_the_dtype_setting_applies_to_weights_and_kv_cache(
    name: str, dtype: torch.dtype, manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    monkeypatch.setattr(engine_factory, "Engine", lambda model, tokenizer, config, **given: models.append(model))
    _, facts = build_engine(settings(tiny_checkpoint, kv_cache_memory=2, dtype=name), manifest)
    assert models[0].token_embedding.weight.dtype == dtype
    assert facts.num_blocks == 2 * 2**20 // (16 * BYTES_PER_TOKEN * dtype.itemsize // 4)


def test_explicit_settings_are_those_of_the_engine(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []
    monkeypatch.setattr(engine_factory, "Engine", lambda model, tokenizer, config, **given: configs.append(config))
    asked = settings(
        tiny_checkpoint,
        kv_cache_memory=2,
        block_size=32,
        dtype="bfloat16",
        max_num_running=3,
        max_batched_tokens=99,
        prompt_slowdown=3.0,
        target_itl_ms=40,
        enable_prefix_cache=False,
        attention="eager",
    )
    _, facts = build_engine(asked, manifest)
    assert (facts.dtype, facts.block_size) == ("bfloat16", 32)
    assert facts.num_blocks == 2 * 2**20 // (32 * BYTES_PER_TOKEN // 2)
    assert configs == [
        EngineConfig(
            block_size=32,
            num_blocks=facts.num_blocks,
            max_num_running=3,
            max_batched_tokens=99,
            prompt_slowdown=3.0,
            target_itl_seconds=0.04,
            enable_prefix_cache=False,
            max_context_length=CONTEXT,
        )
    ]
    assert "2 MiB" in str(facts)
    assert "1 thread," in str(facts)


def test_a_cache_too_small_for_one_context_is_rejected_with_the_needed_size(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = r"63.0KiB holds 240 tokens.*: set it to 1MiB, or set --max-context-length 240"
    with pytest.raises(SettingsError, match=remedy):
        build_engine(settings(tiny_checkpoint, kv_cache_memory="63KiB"), manifest)
    assert build_engine(settings(tiny_checkpoint, kv_cache_memory="64KiB"), manifest)[1].num_blocks == 16


def test_a_cache_larger_than_memory_is_rejected_before_its_allocation(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_free(monkeypatch, 100 * 2**20)
    with pytest.raises(ValueError, match=r"--kv-cache-memory 101.0MiB: only 100 MiB are free; choose a smaller size"):
        build_engine(settings(tiny_checkpoint, kv_cache_memory=101), manifest)


def test_a_missing_device_is_rejected(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="--device cuda: no CUDA device is available"):
        build_engine(settings(tiny_checkpoint, device="cuda"), manifest)


def test_matrices_are_packed_or_quantized(manifest: Manifest, tiny_checkpoint: Path) -> None:
    kinds = {}
    for flags in ({}, {"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "float64"}):
        _, facts = build_engine(settings(tiny_checkpoint, **flags), manifest)
        assert f"{facts.matrices} matrices" in str(facts)
        kinds[str(flags)] = facts.matrices
    assert list(kinds.values()) == ["packed", "int8", "int4", "plain"]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_matrices_serve_with_every_dtype(manifest: Manifest, tiny_checkpoint: Path, quantize: str) -> None:
    told = {}
    for dtype in ("float32", "float64", "bfloat16"):
        engine, facts = build_engine(settings(tiny_checkpoint, quantize=quantize, dtype=dtype), manifest)
        assert (facts.dtype, facts.matrices) == (dtype, quantize)
        engine.submit(make_submit(prompt=(1, 2, 3, 4), max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True))
        tokens: list[float] = []
        while engine.has_work:
            infos = [info for event in engine.step().events for info in event.logprobs or ()]
            tokens += [info.logprob for info in infos if info.logprob is not None]
        told[dtype] = tokens
    assert len(told["float64"]) == 12
    assert told["float64"] == pytest.approx(told["float32"], abs=0.01 if quantize == "int8" else 0.03)
    assert told["float64"] != told["float32"]
    assert told["bfloat16"][0] == pytest.approx(told["float32"][0], abs=0.1)


def test_attention_that_the_device_does_not_support_is_rejected(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingsError, match="--attention native works only on a CPU"):
        build_engine(settings(tiny_checkpoint, device="auto", attention="native"), manifest)


def test_quantization_that_the_device_does_not_support_is_rejected(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="--quantize fp8 works only on a GPU; choose --quantize int8, or omit it"):
        build_engine(settings(tiny_checkpoint, quantize="fp8"), manifest)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingsError, match="fp8 needs --dtype bfloat16; add it, or choose --quantize int8"):
        build_engine(settings(tiny_checkpoint, device="auto", dtype="float32", quantize="fp8"), manifest)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_gpu_quantization_serves(
    manifest: Manifest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The engine runs on a CPU with the quantization of a GPU."""
    quantization = Quantization(name)
    monkeypatch.setattr(engine_factory, "choose_quantization", lambda *given: quantization)
    flags = {"quantize": name, "dtype": "bfloat16", "attention": "sdpa"}
    engine, facts = build_engine(settings(tiny_checkpoint, **flags), manifest)
    assert facts.matrices == facts.setting_values()["matrices"] == name
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner._model, nn.Module)
    assert {type(m) for m in runner._model.modules()} & {QuantizedLinear, nn.Linear} == {QuantizedLinear}
    engine.warm_up()
    assert not engine.has_work
