"""Rules of the scheduler, with a runner that stores token ids in place of keys and values."""

import pytest

from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig, Scheduler
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import FinishReason, Submit
from tests.engine.fakes import CONTEXT, EOS, expected_tokens, make_engine, make_submit


def run_all(engine: Engine) -> dict[str, list[int]]:
    sampled: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step().events:
            sampled.setdefault(event.uid, []).extend(event.token_ids)
    engine.check_integrity()
    return sampled


def test_decodes_are_served_before_prompts() -> None:
    engine, runner = make_engine(max_num_running=3, max_batched_tokens=5)
    engine.submit(make_submit("short", [1], ignore_eos=True))
    engine.step()
    engine.submit(make_submit("long", range(12), ignore_eos=True))
    for _ in range(3):
        engine.step()
    # 4 of the 5 tokens of a step belong to the long prompt, the first to the running sequence.
    assert [sorted(batch) for batch in runner.batches[1:4]] == [[1, 4]] * 3


def test_free_blocks_limit_admission_and_the_oldest_sequence_is_never_preempted() -> None:
    engine, _ = make_engine(num_blocks=12, max_batched_tokens=30)
    submits = [make_submit(str(i), [i] * 6, max_tokens=18, ignore_eos=True, seed=i) for i in range(4)]
    for submit in submits:
        engine.submit(submit)
    finishes, preemptions, cached = [], 0, 0
    while engine.has_work:
        result = engine.step()
        preemptions += result.stats.num_preemptions
        cached += result.stats.num_cached_prompt_tokens
        finishes += [(event.uid, event.finish) for event in result.events if event.finish is not None]
        engine.check_integrity()
    assert preemptions > 0
    assert finishes[0][0] == "0"
    assert finishes[0][1].num_preemptions == 0
    assert sum(finish.num_cached_tokens for _, finish in finishes) == cached
    assert sum(finish.num_preemptions for _, finish in finishes) == preemptions


def test_equal_prefixes_are_computed_once() -> None:
    engine, runner = make_engine(max_batched_tokens=30)
    prompt = list(range(10))
    engine.submit(make_submit("first", prompt, max_tokens=2, ignore_eos=True))
    first = run_all(engine)
    engine.submit(make_submit("again", prompt, max_tokens=2, ignore_eos=True))
    result = engine.step()
    assert runner.batches[-1][0] == 2  # 10 tokens: four full blocks are cached, the last token is always computed
    assert (result.stats.num_prefix_queries, result.stats.num_prefix_hits) == (10, 8)
    assert result.stats.num_cached_prompt_tokens == 8
    tokens = [*result.events[0].token_ids, *run_all(engine)["again"]]
    assert tokens == first["first"]


def test_equal_prompts_of_one_step_share_their_blocks() -> None:
    """Further samples of a prompt read blocks that the first sample writes in the same forward pass."""
    engine, runner = make_engine(max_batched_tokens=30)
    submits = [make_submit(str(seed), range(10), max_tokens=3, seed=seed, ignore_eos=True) for seed in range(3)]
    for submit in submits:
        engine.submit(submit)
    result = engine.step()
    assert runner.batches[0][:3] == (10, 2, 2)
    assert result.stats.kv_usage == pytest.approx((5 + 2) / 14)  # four blocks are shared, the fifth is private
    sampled = {event.uid: list(event.token_ids) for event in result.events}
    rest = run_all(engine)
    assert all(sampled[s.uid] + rest[s.uid] == expected_tokens(s, CONTEXT) for s in submits)


def test_the_prefix_cache_forgets_the_blocks_of_a_failed_step() -> None:
    engine, runner = make_engine(max_batched_tokens=30, fail_at=1)
    submit = make_submit("a", range(10), max_tokens=3)
    engine.submit(submit)
    with pytest.raises(RuntimeError, match="fails at this step"):
        engine.step()
    engine.abort_all("it broke")
    engine.submit(submit)
    assert run_all(engine)["a"] == expected_tokens(submit, CONTEXT)
    assert runner.batches[1][0] == 10


def test_the_prefix_cache_can_be_switched_off() -> None:
    engine, runner = make_engine(max_batched_tokens=30, enable_prefix_cache=False)
    for uid in ("a", "b"):
        engine.submit(make_submit(uid, range(10), max_tokens=1))
        assert engine.step().stats.num_prefix_hits == 0
    assert [batch[0] for batch in runner.batches] == [10, 10]


def test_a_passed_deadline_ends_a_waiting_sequence_without_computing_it() -> None:
    engine, runner = make_engine()
    engine.submit(make_submit("late", [1, 2], deadline=0.0))
    (event,) = engine.step().events
    assert event.finish is not None
    assert event.finish.reason is FinishReason.ABORT
    assert runner.batches == []
    engine.check_integrity()


def test_deadlines_apply_to_waiting_sequences_only() -> None:
    now = [0.0]
    config = EngineConfig(block_size=2, num_blocks=8, max_num_running=1, max_batched_tokens=8)
    scheduler = Scheduler(config, max_context_length=16, clock=lambda: now[0])
    begun, waiting = (
        SequenceState(make_submit(uid, [1, 2], deadline=5.0), arrival_number=number, max_context_length=16)
        for number, uid in enumerate("ab")
    )
    scheduler.add(begun)
    scheduler.add(waiting)
    scheduler.commit(scheduler.schedule(), [3])
    now[0] = 6.0
    assert scheduler.take_ended() == [waiting]
    plan = scheduler.schedule()
    assert [chunk.uid for chunk in plan.chunks] == ["a"]
    scheduler.commit(plan, [4])
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (make_submit("a", []), "the prompt has 0 tokens"),
        (make_submit("a", [1] * 25), "the prompt has 25 tokens; send a prompt of 1 to 24 tokens"),
        (make_submit("a", [1] * 10, max_tokens=14), "together may reach 24 tokens, but the KV-cache holds 20"),
        (make_submit("a", [1, 257]), "range from 1 to 257, beyond this model's vocabulary; use ids from 0 to 256"),
        (
            make_submit("a", [1], prior=[-1]),
            "range from -1 to -1, beyond this model's vocabulary; use ids from 0 to 256",
        ),
        (make_submit("a", [1], stop_token_ids=(999,)), "prompt or parameters range from 999 to 999, beyond"),
    ],
)
def test_an_invalid_submission_ends_with_the_reason(submit: Submit, message: str) -> None:
    engine, _ = make_engine(num_blocks=10)
    engine.submit(submit)
    assert engine.has_work
    (event,) = engine.step().events
    assert event.finish is not None
    assert event.finish.reason is FinishReason.ERROR
    assert message in (event.finish.error or "")
    assert not engine.has_work


def test_blocks_of_a_cancelled_sequence_are_free_at_the_next_step() -> None:
    engine, _ = make_engine()
    engine.submit(make_submit("a", [1] * 8))
    assert engine.step().stats.kv_usage > 0
    engine.cancel("a")
    engine.cancel("nobody")
    assert engine.step().stats.kv_usage == 0


def test_a_failing_step_ends_all_sequences_and_the_engine_continues() -> None:
    engine, _ = make_engine(fail_at=3)
    submits = [make_submit(str(i), [i] * 5, ignore_eos=True) for i in range(6)]
    for submit in submits:
        engine.submit(submit)
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="fails at this step"):
        engine.step()
    events = engine.abort_all("it broke")
    assert {event.uid for event in events} == {submit.uid for submit in submits}
    assert {event.finish.reason for event in events if event.finish} == {FinishReason.ERROR}
    assert {event.finish.error for event in events if event.finish} == {"it broke"}
    engine.check_integrity()
    assert not engine.has_work
    engine.submit(submits[0])
    assert run_all(engine)["0"] == expected_tokens(submits[0], CONTEXT)


def test_endings_in_a_failed_step_are_reported() -> None:
    """Sequences that the failed step would end (deadline, prior end token, rejection) are reported by `abort_all`."""
    engine, _ = make_engine(fail_at=1)
    engine.submit(make_submit("late", [1, 2], deadline=0.0))
    engine.submit(make_submit("done", [1, 2], prior=[EOS]))
    engine.submit(make_submit("refused", []))
    engine.submit(make_submit("going", [1, 2]))
    with pytest.raises(RuntimeError, match="fails at this step"):
        engine.step()
    events = engine.abort_all("it broke")
    assert sorted(event.uid for event in events) == ["done", "going", "late", "refused"]
    assert {event.finish.reason for event in events if event.finish} == {FinishReason.ERROR}
    assert not engine.has_work
    engine.check_integrity()


def test_warm_up_computes_a_full_step_and_leaves_no_cached_block() -> None:
    engine, runner = make_engine()
    engine.warm_up()
    assert runner.batches[0][0] == 7  # max_batched_tokens
    assert len(runner.batches) == 2
    assert not engine.has_work
    engine.check_integrity()
    engine.submit(make_submit("zeros", [0] * 7, max_tokens=1))
    stats = engine.step().stats
    assert (stats.num_prefix_hits, stats.kv_usage) == (0, 0)
    short, runner = make_engine()
    short.warm_up(3)
    assert runner.batches[0][0] == 3
    one_slot, runner = make_engine(num_blocks=1, block_size=1, max_num_running=1)
    one_slot.warm_up()
    assert not one_slot.has_work


def test_queue_prefill_and_decode_times_are_reported() -> None:
    engine, _ = make_engine()
    engine.submit(make_submit("a", [1] * 10, max_tokens=3, ignore_eos=True))
    finish = None
    while finish is None:
        for event in engine.step().events:
            finish = event.finish
    assert finish.queue_seconds > 0  # it arrived at time 0 of a clock that starts at boot
    assert finish.prefill_seconds > 0
    assert finish.decode_seconds > 0
    assert (finish.num_prompt_tokens, finish.num_completion_tokens) == (10, 3)
    engine.submit(make_submit("b", [2], max_tokens=0))
    (event,) = engine.step().events
    assert event.finish is not None
    assert event.finish.prefill_seconds > 0.0 == event.finish.decode_seconds


def test_engine_config_rejects_unusable_values() -> None:
    with pytest.raises(ValueError, match="num_blocks must be positive"):
        EngineConfig(num_blocks=0)
    with pytest.raises(ValueError, match="must be at least max_num_running"):
        EngineConfig(num_blocks=1, max_num_running=8, max_batched_tokens=7)
