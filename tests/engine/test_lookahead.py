"""Lookahead of the engine: launching the next step before the host reads the tokens of the previous step.

The fake runner computes a launched step as late as possible: see `tests.engine.fake_runner`.
"""

import dataclasses
from typing import Any

import msgspec
import pytest

from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig, Scheduler
from service.engine.scheduling.sequence import SequenceState, SequenceStatus
from service.engine.scheduling.step_plan import Chunk, StepPlan
from service.ipc.messages import FinishReason, Pooling, Submit, TokenDelta
from tests.engine.fakes import CONTEXT, FakeRunner, expected_tokens, make_engine, make_submit


def ahead(**config: Any) -> tuple[Engine, FakeRunner]:
    return make_engine(looks_ahead=True, **config)


def drive(engine: Engine) -> list[TokenDelta]:
    """Step until no work is left, and return all events."""
    events: list[TokenDelta] = []
    while engine.has_work:
        events += engine.step().events
        engine.check_integrity()
    return events


def tokens_of(uid: str, events: list[TokenDelta]) -> list[int]:
    return [token_id for event in events if event.uid == uid for token_id in event.token_ids]


def unending(uid: str, prompt: list[int], **params: Any) -> Submit:
    """Make a submission that ends only at `max_tokens`."""
    return make_submit(uid, prompt, ignore_eos=True, **params)


def stopping(uid: str, prompt: list[int], *, at: int) -> Submit:
    """Make a submission whose completion ends at token number `at` (from 1), because it is a stop token."""
    free = unending(uid, prompt, max_tokens=CONTEXT)
    sampled = expected_tokens(free, CONTEXT)
    assert sampled[at - 1] not in sampled[: at - 1]
    params = dataclasses.replace(free.params, stop_token_ids=(sampled[at - 1],))
    return msgspec.structs.replace(free, params=params)


def test_the_next_step_is_launched_before_the_previous_step_is_read() -> None:
    """No further step is launched after the step in which all sequences reach `max_tokens`."""
    engine, runner = ahead()
    submits = [unending("a", [1, 2], max_tokens=4), unending("b", [3], max_tokens=4)]
    for submit in submits:
        engine.submit(submit)
    events = drive(engine)
    assert runner.order == [1, 2, -1, 3, -2, 4, -3, -4]
    for submit in submits:
        assert tokens_of(submit.uid, events) == expected_tokens(submit, CONTEXT)
        assert [event.index for event in events if event.uid == submit.uid] == [0, 1, 2, 3]


def test_without_lookahead_nothing_is_launched() -> None:
    engine, runner = make_engine()
    engine.submit(unending("a", [1, 2], max_tokens=4))
    drive(engine)
    assert runner.order == [0, 0, 0, 0]


def test_sequences_at_their_maximum_length_are_not_launched() -> None:
    engine, runner = ahead(min_rows=1)
    for number, max_tokens in enumerate([2, 3, 5]):
        engine.submit(unending(str(number), [number, 9], max_tokens=max_tokens))
    drive(engine)
    assert runner.batches == [(2, 2, 2), (1, 1, 1), (1, 1), (1,), (1,)]
    assert runner.num_launched == 5


def test_the_row_of_an_ended_sequence_is_ignored() -> None:
    """A stop token ends a sequence after its next step was launched. The sequence's blocks are freed and reused."""
    engine, runner = ahead()
    stops, may_continue = stopping("stops", [5, 6], at=3), unending("goes on", [7], max_tokens=12)
    engine.submit(stops)
    engine.submit(may_continue)
    events: list[TokenDelta] = []
    while not any(event.finish for event in events):
        events += engine.step().events
    assert runner.order == [
        1,
        2,
        -1,
        3,
        -2,
        4,
        -3,
    ]  # the fourth step has a row of the sequence that ended in the third step
    assert engine.step().stats.batch_size == 1
    later = unending("later", [8, 9, 10, 11], max_tokens=12)
    engine.submit(later)
    events += drive(engine)
    ends = {event.uid: event.finish for event in events if event.finish}
    assert ends["stops"].reason is FinishReason.STOP
    assert ends["stops"].num_completion_tokens == 3
    assert tokens_of("stops", events) == expected_tokens(stops, CONTEXT)
    assert tokens_of("later", events) == expected_tokens(later, CONTEXT)
    assert len([event for event in events if event.uid == "stops"]) == 3
    assert engine.step().stats.kv_usage == 0


def test_a_stop_string_ends_a_sequence_whose_next_step_is_launched() -> None:
    tokens = expected_tokens(unending("s", [1, 2], max_tokens=8), CONTEXT)
    at = next(n for n, token in enumerate(tokens) if 32 <= token < 127)
    engine, runner = ahead()
    engine.submit(unending("s", [1, 2], max_tokens=8, stop=(chr(tokens[at]),)))
    events = drive(engine)
    assert tokens_of("s", events) == tokens[: at + 1]
    assert events[-1].finish is not None
    assert events[-1].finish.stop_reason == chr(tokens[at])
    assert runner.num_launched == at + 2  # one row is wasted


@pytest.mark.parametrize("again", [False, True])
def test_a_sequence_cancelled_after_its_step_was_launched_gets_no_event(again: bool) -> None:
    """A newer attempt of the same uid gets no event of the cancelled attempt."""
    engine, runner = ahead()
    other, cancelled = unending("a", [1, 2], max_tokens=9), unending("b", [3], max_tokens=9)
    for submit in (other, cancelled):
        engine.submit(submit)
    events = engine.step().events + engine.step().events
    assert runner.order[-2:] == [3, -2]
    engine.cancel("b")
    engine.check_integrity()
    if again:
        engine.submit(msgspec.structs.replace(cancelled, attempt=1))
    result = engine.step()
    assert [event.uid for event in result.events] == ["a"]
    after = drive(engine)
    assert tokens_of("a", events + result.events + after) == expected_tokens(other, CONTEXT)
    assert tokens_of("b", after) == (expected_tokens(cancelled, CONTEXT) if again else [])


def test_a_launched_step_without_running_sequences_is_dropped() -> None:
    engine, runner = ahead()
    engine.submit(unending("a", [1, 2], max_tokens=9))
    engine.step()
    engine.cancel("a")
    assert not engine.has_work
    assert engine.step().events == []
    submit = unending("b", [3], max_tokens=3)
    engine.submit(submit)
    assert tokens_of("b", drive(engine)) == expected_tokens(submit, CONTEXT)
    assert -2 not in runner.order


def test_a_failure_is_reported_once_and_drops_the_launched_step() -> None:
    engine, runner = ahead(fail_at=2)
    engine.submit(unending("a", [1, 2], max_tokens=9))
    engine.step()
    with pytest.raises(RuntimeError, match="fails at this step"):
        engine.step()
    (event,) = engine.abort_all("it broke")
    assert event.finish is not None
    assert event.finish.reason is FinishReason.ERROR
    engine.check_integrity()
    runner.fail_at = None
    submit = unending("b", [1, 2], max_tokens=3)
    engine.submit(submit)
    assert tokens_of("b", drive(engine)) == expected_tokens(submit, CONTEXT)


def test_a_new_prompt_waits_only_for_the_launched_step() -> None:
    """A prompt that arrives while a step is in flight is computed in the next step."""
    engine, runner = ahead()
    engine.submit(unending("a", [1, 2], max_tokens=12))
    engine.step()
    engine.submit(unending("b", [3, 4, 5], max_tokens=4))
    num_launched = runner.num_launched
    assert [event.uid for event in engine.step().events] == ["a"]
    assert runner.num_launched == num_launched
    assert {event.uid for event in engine.step().events} == {"a", "b"}


def test_waiting_sequences_do_not_stop_lookahead_when_all_slots_are_used() -> None:
    """A waiting sequence starts in the first step after a running sequence has reached `max_tokens`."""
    engine, runner = ahead(max_num_running=2, fakes_time=True)
    engine.submit(unending("a", [1], max_tokens=6))
    engine.submit(unending("b", [2], max_tokens=12))
    engine.submit(unending("waits", [3], max_tokens=3))
    events = [engine.step().events for _ in range(7)]
    assert runner.order[:11] == [1, 2, -1, 3, -2, 4, -3, 5, -4, 6, -5]
    assert [tokens_of("a", step) != [] for step in events] == [True] * 6 + [False]
    assert [tokens_of("waits", step) != [] for step in events] == [False] * 6 + [True]


def test_tokens_of_steps_launched_ahead_are_charged_to_their_tenant() -> None:
    """Tenant x decodes two sequences, y one with a longer prompt. Then x has more tokens, so y is served next."""
    engine, runner = ahead(max_num_running=3, num_blocks=40, max_batched_tokens=20)
    for tenant, uid, length, max_tokens in (
        ("x", "x1", 1, 13),
        ("x", "x2", 1, 16),
        ("y", "y1", 8, 16),
        ("x", "x3", 1, 2),
        ("y", "y2", 1, 2),
    ):
        engine.submit(msgspec.structs.replace(unending(uid, [7] * length, max_tokens=max_tokens), tenant=tenant))
    began = list(dict.fromkeys(event.uid for event in drive(engine)))
    assert set(began[:3]) == {"x1", "x2", "y1"}
    assert began[3:] == ["y2", "x3"]
    assert runner.num_launched > 12


@pytest.mark.parametrize(("num_blocks", "num_running", "is_planned"), [(2, 1, True), (1, 1, False), (2, 2, False)])
def test_no_step_is_planned_ahead_without_free_blocks_or_beside_another_running_sequence(
    num_blocks: int, num_running: int, is_planned: bool
) -> None:
    """Sequence a needs one more block than it has, in a pool of one or two. Sequence b may run, but not in the plan."""
    config = EngineConfig(block_size=2, num_blocks=num_blocks, max_num_running=2, max_batched_tokens=4)
    scheduler = Scheduler(config, max_context_length=CONTEXT)
    sequences = [
        SequenceState(
            unending(uid, prompt, max_tokens=num_blocks * 2 - len(prompt)), arrival_number=1, max_context_length=CONTEXT
        )
        for uid, prompt in (("a", [1, 2]), ("b", [3]))
    ]
    for sequence in sequences[:num_running]:
        sequence.status, sequence.block_table = SequenceStatus.RUNNING, scheduler._pool.allocate(1) or []
        scheduler._sequences[sequence.uid] = sequence
        scheduler._running.append(sequence)
    first = sequences[0]
    first.max_length = 8
    plan = StepPlan(chunks=(Chunk("a", 0, 0, 2, True, [1, 2], first.block_table, first.params),))
    assert (scheduler.schedule_ahead(plan) is not None) == is_planned
    assert first.block_table == ([0, 1] if is_planned else [0])
    scheduler._pool.check_integrity([sequence.block_table for sequence in sequences[:num_running]])


def test_a_passed_deadline_ends_a_waiting_sequence_while_steps_are_launched_ahead() -> None:
    """A deadline passes in the fifth step, and the next call of `step` ends the sequence."""
    engine, runner = ahead(max_num_running=1, fakes_time=True)
    engine.submit(unending("a", [1], max_tokens=20))
    engine.submit(make_submit("late", [2], deadline=4.5))
    ends = []
    for number in range(8):
        ends += [(number, event.finish.reason) for event in engine.step().events if event.finish]
    assert ends == [(5, FinishReason.ABORT)]
    assert runner.num_launched > 5


def test_lookahead_preempts_no_sequence() -> None:
    """Two sequences of 16 tokens share ten blocks of two tokens, so one is preempted. Both completions are correct."""
    engine, runner = ahead(num_blocks=10, enable_prefix_cache=False)
    submits = [unending("a", [1, 2], max_tokens=14), unending("b", [3, 4], max_tokens=14)]
    for submit in submits:
        engine.submit(submit)
    events, num_preemptions = [], 0
    while engine.has_work:
        result = engine.step()
        engine.check_integrity()
        events += result.events
        num_preemptions += result.stats.num_preemptions
    assert num_preemptions > 0
    assert runner.num_launched > 10
    for submit in submits:
        assert tokens_of(submit.uid, events) == expected_tokens(submit, CONTEXT)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_the_prefix_cache_holds_all_computed_blocks(looks_ahead: bool) -> None:
    """Of 2 + 9 tokens, the last is not computed: a prompt that continues the text finds five blocks of two tokens."""
    engine, _ = make_engine(looks_ahead=looks_ahead)
    first = unending("first", [1, 2], max_tokens=9)
    engine.submit(first)
    sampled = tokens_of("first", drive(engine))
    engine.submit(unending("next", [1, 2, *sampled, 5], max_tokens=2))
    (end,) = [event.finish for event in drive(engine) if event.finish]
    assert end.num_cached_tokens == 10


def test_a_new_sequence_is_reported_once_and_before_its_first_step() -> None:
    engine, runner = ahead()
    engine.submit(unending("a", [1], max_tokens=4))
    reported: list[tuple[int, list[tuple[str, int]]]] = []
    while engine.has_work:
        engine.step(before=lambda admitted: reported.append((runner.num_launched, admitted)))
    assert reported == [(0, [("a", 0)])]


NEEDS_THE_HOST: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 0},
    "penalties": {"frequency_penalty": 1.0},
    "bad words": {"bad_word_ids": ((1, 2),)},
    "min_tokens": {"min_tokens": 8, "ignore_eos": False},
}


@pytest.mark.parametrize("name", NEEDS_THE_HOST)
def test_steps_that_need_the_host_are_never_launched(name: str) -> None:
    """As long as a running sequence needs the host for sampling, no step is launched, of any sequence."""
    engine, runner = ahead()
    engine.submit(unending("a", [1, 2], max_tokens=16))
    engine.submit(make_submit("b", [3, 4], **{"max_tokens": 8, "ignore_eos": True, **NEEDS_THE_HOST[name]}))
    ended = False
    while not ended:
        assert runner.num_launched == 0
        ended = any(event.uid == "b" and event.finish for event in engine.step().events)
    drive(engine)
    assert runner.order.count(0) == 8
    assert runner.num_launched == 8


def test_sampling_with_filters_is_launched_ahead() -> None:
    engine, runner = ahead()
    engine.submit(unending("a", [1, 2], max_tokens=8, temperature=1.0, top_p=0.9, min_p=0.01))
    drive(engine)
    assert runner.num_launched == 8


def test_embeddings_prompt_logprobs_drafts_and_partial_prompts_are_not_launched() -> None:
    pooled, runner = ahead()
    pooled.submit(msgspec.structs.replace(make_submit("p", [1, 2], max_tokens=0), pooling=Pooling.LAST))
    pooled.step()
    assert runner.order == [0]
    scored, runner = ahead()
    scored.submit(unending("s", [1, 2], max_tokens=3, prompt_logprobs=0))
    drive(scored)
    assert runner.order == [0, 1, 2, -1, -2]  # the prompt is scored by then
    drafting, runner = ahead(max_draft_tokens=3)
    drafting.submit(unending("d", [1, 2], max_tokens=5))
    drive(drafting)
    assert runner.num_launched == 0
    chunked, runner = ahead(max_num_running=2)
    chunked.submit(unending("c", list(range(20)), max_tokens=3))
    drive(chunked)
    assert runner.order == [0, 0, 1, 2, -1, 3, -2, -3]  # chunks of 7, 7 and 6 tokens; the last one samples


def test_a_step_launched_ahead_is_timed_from_the_end_of_the_previous_step() -> None:
    """Step durations set the size of prompt chunks. Each step is measured as one second, launched ahead or not."""
    for looks_ahead in (False, True):
        engine, _ = make_engine(looks_ahead=looks_ahead, fakes_time=True, prompt_slowdown=2.0)
        engine.submit(unending("a", [1], max_tokens=9))
        drive(engine)
        pace = engine._scheduler._prefill_budget
        assert pace._row_seconds == pytest.approx(1.0 / 17, rel=1e-6)
