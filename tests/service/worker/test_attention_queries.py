"""Looks in the worker's loop: between steps, one at a time, and nobody's completion changes."""

import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.inspect.attention_weights import weights_of_layer
from model.sampling.params import SamplingParams
from model.tokenizer.files import load_tokenizer
from service.engine.engine import Engine
from service.engine.scheduling.config import EngineConfig
from service.ipc.messages import AttentionQuery, AttentionResult, Cancel, Submit, TokenDelta
from tests.service.sequences import make_submit
from tests.service.worker.test_worker import Bench


class LookingBench(Bench):
    """The scripted engine, which also looks, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.now = 0.0
        self.step_seconds, self.look_seconds = 3.0, 1.0
        engine: Any = self.engine
        engine.attention_weights = self._attention_weights
        engine.before_step = lambda: self._spend(self.step_seconds)
        self.engine_loop = self.make_engine_loop(clock=lambda: self.now)

    def _spend(self, seconds: float) -> None:
        self.now += seconds

    def _attention_weights(self, token_ids: tuple[int, ...], *, layer: int, heads: tuple[int, ...]) -> bytes:
        self.engine.calls.append(("look", token_ids, layer, heads))
        self._spend(self.look_seconds)
        if self.fails:
            raise RuntimeError("out of memory")
        return b"weights"

    def looked(self) -> list[tuple[str, bytes | None]]:
        events = [event for events in self.sent for event in events]
        return [(event.uid, event.weights) for event in events if isinstance(event, AttentionResult)]


@pytest.fixture
def bench() -> LookingBench:
    return LookingBench()


def look(uid: str) -> AttentionQuery:
    return AttentionQuery(uid=uid, token_ids=(1, 2), layer=1, heads=(0, 3))


def test_a_look_alone(bench: LookingBench) -> None:
    bench.put(look("a"))
    bench.engine_loop.run_once()
    assert bench.engine.calls == [("look", (1, 2), 1, (0, 3))]
    assert bench.looked() == [("a", b"weights")]


def test_a_look_is_told_before_it_is_computed(bench: LookingBench) -> None:
    bench.put(msgspec.structs.replace(look("a"), attempt=2))
    bench.engine_loop.run_once()
    assert bench.started() == [("a", 2)]


def test_streams_get_a_step_between_two_looks(bench: LookingBench) -> None:
    bench.put(make_submit("s"), look("a"), look("b"))
    for _ in range(3):
        bench.engine_loop.run_once()
    did = [call if isinstance(call, str) else call[0] for call in bench.engine.calls]
    assert did == ["submit", "step", "look", "step", "look", "step"]
    assert [uid for uid, _ in bench.looked()] == ["a", "b"]


def test_looks_get_a_quarter_of_the_time_beside_streams(bench: LookingBench) -> None:
    bench.step_seconds, bench.look_seconds = 0.5, 2.0
    bench.put(make_submit("s", max_tokens=100), *(look(uid) for uid in "abc"))
    for _ in range(30):
        bench.engine_loop.run_once()
    did = [call if isinstance(call, str) else call[0] for call in bench.engine.calls]
    looks = [place for place, call in enumerate(did) if call == "look"]
    assert did[looks[0] + 1 : looks[1]] == did[looks[1] + 1 : looks[2]] == ["step"] * 12


def test_looks_have_all_the_time_when_nothing_streams(bench: LookingBench) -> None:
    bench.look_seconds = 5.0
    bench.put(*(look(uid) for uid in "abc"))
    for _ in range(3):
        bench.engine_loop.run_once()
    assert [uid for uid, _ in bench.looked()] == ["a", "b", "c"]


def test_waiting_looks_need_no_further_command(bench: LookingBench) -> None:
    bench.put(look("a"), look("b"))
    bench.engine_loop.run_once()
    bench.engine_loop.run_once()
    assert [uid for uid, _ in bench.looked()] == ["a", "b"]


def test_a_cancelled_look_is_not_computed(bench: LookingBench) -> None:
    bench.put(look("a"), look("b"), Cancel(uid="a"))
    bench.engine_loop.run_once()
    assert [uid for uid, _ in bench.looked()] == ["b"]


def test_a_look_that_fails_is_answered_and_streams_go_on(bench: LookingBench) -> None:
    bench.fails = True
    bench.put(make_submit("s"), look("a"))
    bench.engine_loop.run_once()
    bench.engine_loop.run_once()
    assert bench.looked() == [("a", None)]
    assert bench.uids() == [["s"], [], ["s"]]


def run(engine: Engine, *, looks: bool) -> list[int]:
    """A completion's tokens, with a look after every step or none."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    engine.submit(
        Submit(
            uid="a",
            attempt=0,
            prompt_token_ids=(5, 6, 7),
            prior_token_ids=(),
            params=params,
            arrival_seconds=time.monotonic(),
            deadline_seconds=None,
        )
    )
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step().events:
            assert isinstance(event, TokenDelta)
            tokens += event.token_ids
        if looks:
            engine.attention_weights((9, 8, 7, 6), layer=1, heads=(0,))
    engine.check_integrity()
    return tokens


def test_looking_changes_no_completion_and_tells_the_models_weights(tiny_checkpoint: Path) -> None:
    manifest = read_manifest(tiny_checkpoint)
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    config = EngineConfig(block_size=4, num_blocks=64, max_num_running=2, max_batched_tokens=8)
    tokens = [run(Engine(model, load_tokenizer(tiny_checkpoint), config), looks=looks) for looks in (False, True)]
    assert tokens[0] == tokens[1]
    engine = Engine(model, load_tokenizer(tiny_checkpoint), config)
    told = array("f", engine.attention_weights((9, 8, 7), layer=1, heads=(3, 1)))
    wanted = weights_of_layer(model, (9, 8, 7), layer=1)
    assert list(told) == [float(wanted[head, t, s]) for head in (3, 1) for t in range(3) for s in range(t + 1)]
