"""The engine's GPU path on the simulated device: the CPU's tokens, and the host's waits and copies in each step."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from model.attention import paged
from model.attention.paged import KernelContext
from model.checkpoint.lora_adapter import Adapter, Addition
from model.checkpoint.manifest import read_manifest
from model.gpu.fused_modules import fuse
from model.gpu.quantization import Quantization
from model.nn.linear import replace_linears
from model.nn.transformer import Transformer
from model.system.triton_modules import import_with_triton
from service.config.settings import ModelSettings
from service.engine.engine import Engine
from service.engine.execution import model_runner
from service.engine.execution.gpu_setup import capture_for, choose_attention
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import LoadAdapter, StepStats, Submit, TokenDelta
from service.worker.engine_factory import build_engine
from tests.engine.fakes import make_submit
from tests.engine.test_parity import EOS, TOKENIZER, reference_completion, submissions
from tests.gpu.simulated_device import SimulatedDevice
from tests.model.configs import VARIANTS, attention_layers, build

pytestmark = pytest.mark.triton

# One of each mechanism. The last four have attention that no paged kernel computes: sdpa replaces it, without graphs.
PAGED = (
    *("rotary-gqa", "rotary-mha-wide-heads", "gpt2", "neox", "olmo2"),
    *("gemma3", "gemma4", "ministral3"),
)
NOT_CAPTURED = ("experts", "gemma2", "alibi", "average", "disentangled")


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice() as simulated:
        yield simulated


class Run:
    """Engine on the simulated device, with the tokens of each uid, and the statistics and counts of each step."""

    def __init__(self, device: SimulatedDevice, model: Transformer, **config: Any) -> None:
        values = {"block_size": 4, "num_blocks": 200, "max_num_running": 8, "max_batched_tokens": 64, **config}
        self.model = model.to("cuda")
        dtype = model.token_embedding.weight.dtype
        place = KernelContext(config=model.config, device=torch.device("cuda"), dtype=dtype, block_size=4)
        chosen = choose_attention("auto", place, None)
        for attention in attention_layers(model):
            attention.backend = chosen.backend
        fuse(model)
        self.engine = Engine(
            model,
            TOKENIZER,
            EngineConfig(**values),
            capture=capture_for(torch.device("cuda")) if chosen.can_capture else None,
            read_adapter=read_adapter,
        )
        self.is_captured = chosen.can_capture
        self.device = device
        device.counts.clear()
        self.tokens: dict[str, list[int]] = {}
        self.stats: list[StepStats] = []
        self.counts: list[Counter[str]] = []

    def drive(self, submits: Sequence[Submit], every: int = 0, canceled: str = "") -> None:
        """Complete all submissions: all at once, or one every `every` steps. Cancel one after three of its tokens."""
        waiting = list(submits)
        while waiting or self.engine.has_work:
            while waiting and (not every or len(self.stats) % every == 0):
                self.engine.submit(waiting.pop(0))
                if every:
                    break
            before = Counter(self.device.counts)
            result = self.engine.step()
            self.engine.check_integrity()
            self.stats.append(result.stats)
            self.counts.append(self.device.counts - before)
            for delta in result.events:
                assert delta.finish is None or delta.finish.error is None
                self.tokens.setdefault(delta.uid, []).extend(delta.token_ids)
            if len(self.tokens.get(canceled, ())) >= 3:
                self.engine.cancel(canceled)

    def total(self, name: str) -> int:
        return sum(int(getattr(stats, name)) for stats in self.stats)


def read_adapter(directory: Path) -> Adapter:
    """Return an adapter of random numbers for the model "rotary-gqa"; its seed is the directory's name."""
    rng = np.random.default_rng(int(directory.name))
    down, up = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 32), (32, 2)))
    return Adapter(key=directory.name, matrices={"layers.0.attention.out": Addition(down, up)})


def mixed(count: int, seed: int) -> list[Submit]:
    """Make submissions greedy and seeded, some with a common prefix, some with penalties or other token rules."""
    rng = random.Random(seed)
    shared = [rng.randrange(EOS) for _ in range(13)]
    rules: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.3},
        {"logit_bias": ((5, 4.0), (9, -3.0))},
        {"allowed_token_ids": tuple(range(3, 60))},
        {"stop_token_ids": tuple(range(40)), "min_tokens": 6},
    ]
    made = []
    for number, submit in enumerate(submissions(count, seed=seed, max_prompt=20)):
        changes: dict[str, Any] = {"max_tokens": min(submit.params.max_tokens, 12)}
        prompt = submit.prompt_token_ids
        if number % 3 == 0:
            changes |= rules[number // 3 % len(rules)]
        elif number % 3 == 1:
            prompt = (*shared, number)
        params = dataclasses.replace(submit.params, **changes)
        made.append(msgspec.structs.replace(submit, params=params, prompt_token_ids=prompt))
    return made


def on_cpu(model: Transformer, submits: Sequence[Submit], **config: Any) -> dict[str, list[int]]:
    """Return the tokens of an engine on the CPU without lookahead."""
    values = {"block_size": 4, "num_blocks": 400, "max_batched_tokens": 64, **config}
    engine = Engine(model, TOKENIZER, EngineConfig(**values), read_adapter=read_adapter)
    tokens: dict[str, list[int]] = {}
    for key in {submit.adapter for submit in submits} - {""}:
        engine.load_adapter(LoadAdapter(key=key, directory=key))
    for submit in submits:
        engine.submit(submit)
    while engine.has_work:
        for delta in engine.step().events:
            tokens.setdefault(delta.uid, []).extend(delta.token_ids)
    return tokens


@pytest.mark.parametrize("name", PAGED + NOT_CAPTURED)
def test_tokens_equal_the_cpu_with_preemption_prefix_hits_and_cancellation(name: str, device: SimulatedDevice) -> None:
    run = Run(device, build(VARIANTS[name]), num_blocks=20)
    assert run.is_captured == (name in PAGED)
    submits = mixed(10, seed=3)
    greedy = make_submit("canceled", [5, 6, 7], max_tokens=40, temperature=0.0, ignore_eos=True)
    run.drive([greedy, *submits], every=1, canceled="canceled")
    reference = build(VARIANTS[name])
    for submit in submits:
        assert run.tokens[submit.uid] == reference_completion(reference, submit, run.tokens[submit.uid])
    assert 3 <= len(run.tokens["canceled"]) < 40
    assert run.total("num_preemptions") > 0
    assert run.total("num_prefix_hits") > 0
    assert device.counts["replays"] > 10 or not run.is_captured
    assert device.counts["pageable copy"] == 0 or not run.is_captured


@pytest.mark.parametrize("name", sorted({*VARIANTS} - {*PAGED, *NOT_CAPTURED}))
def test_tokens_of_all_other_variants_equal_the_cpu(name: str, device: SimulatedDevice) -> None:
    run = Run(device, build(VARIANTS[name]))
    submits = mixed(3, seed=4)
    run.drive(submits)
    reference = build(VARIANTS[name])
    for submit in submits:
        assert run.tokens[submit.uid] == reference_completion(reference, submit, run.tokens[submit.uid])


def test_bfloat16_tokens_equal_the_cpus(device: SimulatedDevice) -> None:
    """Both round at the same steps: only sums in another order may differ, in the last bit."""
    run = Run(device, build(VARIANTS["rotary-gqa"]).bfloat16())
    submits = mixed(8, seed=8)
    run.drive(submits)
    assert run.tokens == on_cpu(build(VARIANTS["rotary-gqa"], "eager").bfloat16(), submits)


def test_drafts_change_no_token(device: SimulatedDevice) -> None:
    """Speculation: draft tokens are rows of captured decode steps."""
    run = Run(device, build(VARIANTS["rotary-gqa"]), max_draft_tokens=4)
    submits = [
        make_submit(str(seed), [7, 8, 9, seed] * 3, max_tokens=24, temperature=0.0, ignore_eos=True)
        for seed in range(4)
    ]
    run.drive(submits)
    reference = build(VARIANTS["rotary-gqa"])
    for submit in submits:
        assert run.tokens[submit.uid] == reference_completion(reference, submit, run.tokens[submit.uid])
    assert run.total("num_accepted_tokens") > 0
    assert device.counts["copy in"] == device.counts["copy out"]  # one of each in a step, drafts or not


@pytest.mark.parametrize("cache_dtype", ["int8", "float16"])
def test_a_cache_of_fewer_bits_gives_the_tokens_of_the_cpu(
    cache_dtype: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "GATHERED_POSITIONS", 16)  # the prompts of a step are several groups
    run = Run(device, build(VARIANTS["window-one-layer"]), kv_cache_dtype=cache_dtype)
    submits = mixed(8, seed=5)
    run.drive(submits)
    assert run.tokens == on_cpu(build(VARIANTS["window-one-layer"]), submits, kv_cache_dtype=cache_dtype)


def test_int8_matrices_give_the_tokens_of_pytorchs_products(device: SimulatedDevice) -> None:
    expected_model = build(VARIANTS["rotary-gqa"])
    replace_linears(expected_model, Quantization("int8").make)
    model = build(VARIANTS["rotary-gqa"]).to("cuda")
    replace_linears(model, Quantization("int8", import_with_triton("model.gpu.quantized_kernels")).make)
    run = Run(device, model)
    submits = mixed(8, seed=6)
    run.drive(submits)
    assert run.tokens == on_cpu(expected_model, submits)


class InlineExecutor:
    """Executor that runs a call in the thread of its submission, since the simulated device is known there only."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*arguments))
        return future


def test_adapters_give_the_tokens_of_the_cpu(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with LoRA adapters are not captured. Their tokens' rows are part of the step."""
    monkeypatch.setattr("service.engine.execution.adapter_loader.ThreadPoolExecutor", InlineExecutor)
    submits = [
        msgspec.structs.replace(submit, adapter=["", "1", "2"][number % 3])
        for number, submit in enumerate(mixed(9, seed=7))
    ]
    run = Run(device, build(VARIANTS["rotary-gqa"]))
    for key in "12":
        run.engine.load_adapter(LoadAdapter(key=key, directory=key))
    run.drive(submits)
    assert run.tokens == on_cpu(build(VARIANTS["rotary-gqa"]), submits)
    loaded = 2 * 2  # the adapters' matrices
    assert device.counts["pageable copy"] == loaded
    assert device.counts["copy in"] == device.counts["copy out"] + loaded  # else one of each in a step


def test_grammars_bind_the_tokens_that_they_bind_on_the_cpu(device: SimulatedDevice) -> None:
    grammar = LLMatcher.grammar_from_regex(r"[a-z]{3,5}-[0-9]{2}")
    submits = [
        msgspec.structs.replace(
            make_submit(str(seed), [7, 8, seed], max_tokens=10, seed=seed), grammar=grammar if seed % 2 else None
        )
        for seed in range(4)
    ]
    run = Run(device, build(VARIANTS["rotary-gqa"]))
    run.drive(submits)
    assert run.tokens == on_cpu(build(VARIANTS["rotary-gqa"]), submits)
    assert device.counts["pageable copy"] == 0
    # The masks are computed while the device computes the layers: a kernel behind these reads them from the host.
    step = run.counts[2]
    waits = sum(count for what, count in step.items() if what.startswith("wait"))
    assert (step["copy in"], step["copy out"], waits, step["pinned read"]) == (1, 1, 1, 1)


# Sampling parameters with which a decode step takes one copy in each direction, and one wait.
STEADY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top_k and top_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "top_p": {"temperature": 0.8, "top_p": 0.95},  # of the model's 300 tokens, more than 256 are in the nucleus
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": ((3, 1.0),)},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
}


def test_a_decode_step_copies_once_in_each_direction(device: SimulatedDevice) -> None:
    run = Run(device, build(VARIANTS["rotary-gqa"]))
    for kind, params in STEADY.items():
        run.counts.clear()
        its = {"max_tokens": 8, "ignore_eos": True, **params}
        run.drive([make_submit(f"{kind} {n}", [n, 7, 9], seed=n, **its) for n in range(3)])
        steady = run.counts[len(run.counts) // 2]
        waits = sum(count for what, count in steady.items() if what.startswith("wait"))
        assert (steady["copy in"], steady["copy out"], waits, steady["replays"]) == (1, 1, 1, 1), kind
    assert device.counts["pageable copy"] == 0


@pytest.mark.parametrize(("num_cpus", "wait"), [(3, "wait event, asleep"), (4, "wait event")])
def test_the_host_sleeps_while_it_waits_on_a_machine_with_few_cpus(
    num_cpus: int, wait: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "usable_cpus", lambda: num_cpus)
    model_runner._sleeps.cache_clear()
    run = Run(device, build(VARIANTS["rotary-gqa"]))
    run.drive([make_submit("a", [1, 2], max_tokens=3, temperature=0.0)])
    model_runner._sleeps.cache_clear()
    assert {what for what in device.counts if what.startswith("wait")} == {wait}


@pytest.mark.parametrize("name", ["rotary-gqa", "gemma3"])
def test_a_step_with_prompts_copies_once_in_each_direction(name: str, device: SimulatedDevice) -> None:
    """A step with two prompts, and with a decode of a third sequence after the first step."""
    run = Run(device, build(VARIANTS[name]))
    run.engine.submit(make_submit("first", [1, 2, 3], max_tokens=9, temperature=0.0, logprobs=0, ignore_eos=True))
    run.engine.step()
    params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}
    prompts = [make_submit(str(n), range(n, n + 9), **params) for n in range(2)]
    for submit in prompts:
        run.engine.submit(submit)
    device.counts.clear()
    device.lines.clear()
    result = run.engine.step()
    stats = result.stats
    assert (stats.num_prompt_tokens, stats.num_completion_tokens) == (18, 3)
    assert (device.counts["copy in"], device.counts["copy out"], device.counts["pageable copy"]) == (1, 1, 0)
    on_cpu = Engine(build(VARIANTS[name]), TOKENIZER, EngineConfig(block_size=4, num_blocks=200))
    for submit in prompts:
        on_cpu.submit(submit)
    expected = {delta.uid: ranks(delta) for delta in on_cpu.step().events}
    found = {delta.uid: ranks(delta) for delta in result.events}
    assert {uid: found[uid] for uid in expected} == expected


def ranks(delta: TokenDelta) -> list[tuple[int, int | None, list[int]]]:
    """Return the token id, the rank and the most likely token ids of each logprob of a delta."""
    entries = (*(delta.logprobs or ()), *(delta.prompt_logprobs or ()))
    return [(entry.token_id, entry.rank, [token_id for token_id, _ in entry.top]) for entry in entries]


@pytest.mark.triton
def test_an_engine_in_bfloat16_uses_every_gpu_feature(tiny_checkpoint: Path, device: SimulatedDevice) -> None:
    settings = ModelSettings(checkpoint=tiny_checkpoint, max_num_running=4, max_batched_tokens=64)
    engine, facts = build_engine(settings, read_manifest(tiny_checkpoint))
    assert (facts.device, facts.dtype) == ("cuda", "bfloat16")
    assert facts.attention == "paged (decode: triton, prompts: varlen)"
    engine.warm_up()
    assert device.counts["captures"] == 2  # a trial, and one shape
    submits = [make_submit(str(n), [n, 7, 9, 11], max_tokens=8, temperature=0.0, ignore_eos=True) for n in range(3)]
    tokens: dict[str, list[int]] = {}
    for submit in submits:
        engine.submit(submit)
    while engine.has_work:
        for delta in engine.step().events:
            tokens.setdefault(delta.uid, []).extend(delta.token_ids)
    assert [len(ids) for ids in tokens.values()] == [8] * 3
    assert device.counts["replays"] >= 7
