"""Attention queries in the engine loop: one at a time, between steps, without a change of any completion."""

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
from service.engine.engine import Engine, create_submit
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import AttentionQuery, AttentionResult, Cancel, TokenDelta
from tests.service.sequences import make_submit
from tests.service.worker.test_worker import Bench


class LookingBench(Bench):
    """Scripted engine that records each attention query."""

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


def test_an_idle_engine_answers_an_attention_query(bench: LookingBench) -> None:
    bench.put(look("a"))
    bench.engine_loop.run_once()
    assert bench.engine.calls == [("look", (1, 2), 1, (0, 3))]
    assert bench.looked() == [("a", b"weights")]


def test_an_attention_query_is_reported_before_its_computation(bench: LookingBench) -> None:
    bench.put(msgspec.structs.replace(look("a"), attempt=2))
    bench.engine_loop.run_once()
    assert bench.started() == [("a", 2)]


def test_a_step_runs_between_two_attention_queries(bench: LookingBench) -> None:
    bench.put(make_submit("s"), look("a"), look("b"))
    for _ in range(3):
        bench.engine_loop.run_once()
    did = [call if isinstance(call, str) else call[0] for call in bench.engine.calls]
    assert did == ["submit", "step", "look", "step", "look", "step"]
    assert [uid for uid, _ in bench.looked()] == ["a", "b"]


def test_attention_queries_get_a_quarter_of_the_time_beside_streams(bench: LookingBench) -> None:
    bench.step_seconds, bench.look_seconds = 0.5, 2.0
    bench.put(make_submit("s", max_tokens=100), *(look(uid) for uid in "abc"))
    for _ in range(30):
        bench.engine_loop.run_once()
    did = [call if isinstance(call, str) else call[0] for call in bench.engine.calls]
    looks = [place for place, call in enumerate(did) if call == "look"]
    assert did[looks[0] + 1 : looks[1]] == did[looks[1] + 1 : looks[2]] == ["step"] * 12


def test_attention_queries_get_all_the_time_of_an_idle_engine(bench: LookingBench) -> None:
    bench.look_seconds = 5.0
    bench.put(*(look(uid) for uid in "abc"))
    for _ in range(3):
        bench.engine_loop.run_once()
    assert [uid for uid, _ in bench.looked()] == ["a", "b", "c"]


def test_queued_attention_queries_run_without_another_command(bench: LookingBench) -> None:
    bench.put(look("a"), look("b"))
    bench.engine_loop.run_once()
    bench.engine_loop.run_once()
    assert [uid for uid, _ in bench.looked()] == ["a", "b"]


def test_a_cancelled_attention_query_is_not_computed(bench: LookingBench) -> None:
    bench.put(look("a"), look("b"), Cancel(uid="a"))
    bench.engine_loop.run_once()
    assert [uid for uid, _ in bench.looked()] == ["b"]


def test_a_failed_attention_query_is_answered_and_streams_continue(bench: LookingBench) -> None:
    bench.fails = True
    bench.put(make_submit("s"), look("a"))
    bench.engine_loop.run_once()
    bench.engine_loop.run_once()
    assert bench.looked() == [("a", None)]
    assert bench.uids() == [["s"], [], ["s"]]


def run(engine: Engine, *, looks: bool) -> list[int]:
    """Return the tokens of a completion, with or without an attention query after every step."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    engine.submit(create_submit("a", (5, 6, 7), params))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step().events:
            assert isinstance(event, TokenDelta)
            tokens += event.token_ids
        if looks:
            engine.attention_weights((9, 8, 7, 6), layer=1, heads=(0,))
    engine.check_integrity()
    return tokens


def test_attention_queries_change_no_completion_and_return_the_weights_of_the_model(tiny_checkpoint: Path) -> None:
    manifest = read_manifest(tiny_checkpoint)
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    config = EngineConfig(block_size=4, num_blocks=64, max_num_running=2, max_batched_tokens=8)
    tokens = [run(Engine(model, load_tokenizer(tiny_checkpoint), config), looks=looks) for looks in (False, True)]
    assert tokens[0] == tokens[1]
    engine = Engine(model, load_tokenizer(tiny_checkpoint), config)
    told = array("f", engine.attention_weights((9, 8, 7), layer=1, heads=(3, 1)))
    wanted = weights_of_layer(model, (9, 8, 7), layer=1)
    assert list(told) == [float(wanted[head, t, s]) for head in (3, 1) for t in range(3) for s in range(t + 1)]
