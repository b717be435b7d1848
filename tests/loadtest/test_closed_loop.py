"""Closed loop over an engine in this process: sequences, errors, and figures of a run."""

from dataclasses import dataclass, field

import pytest

from loadtest.inprocess.engine import EngineRun, run_closed
from model.sampling.params import SamplingParams
from service.engine.engine import create_submit
from service.ipc.messages import Finish, FinishReason, Submit, TokenDelta


def submit(number: int, max_tokens: int = 3) -> Submit:
    return create_submit(f"s{number}", (1, 2, 3, 4), SamplingParams(max_tokens=max_tokens))


def finish(reason: FinishReason) -> Finish:
    return Finish(
        reason=reason,
        stop_reason=None,
        error="broke" if reason is FinishReason.ERROR else None,
        num_prompt_tokens=4,
        num_completion_tokens=3,
        num_cached_tokens=0,
        num_preemptions=0,
        queue_seconds=0.0,
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )


@dataclass
class Result:
    events: list[TokenDelta]


@dataclass
class OneTokenEach:
    """Engine that generates one token per step for each sequence."""

    reason: FinishReason = FinishReason.LENGTH
    stops_after: int = 1 << 30
    left: dict[str, int] = field(default_factory=dict)
    most_at_once: int = 0
    num_steps: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.left) and self.num_steps < self.stops_after

    def submit(self, command: Submit) -> None:
        self.left[command.uid] = command.params.max_tokens
        self.most_at_once = max(self.most_at_once, len(self.left))

    def step(self) -> Result:
        self.num_steps += 1
        events = []
        for uid in list(self.left):
            self.left[uid] -= 1
            end = None if self.left[uid] else finish(self.reason)
            if end is not None:
                del self.left[uid]
            events.append(
                TokenDelta(
                    uid=uid,
                    attempt=0,
                    index=0,
                    token_ids=(7,),
                    text="x",
                    logprobs=None,
                    prompt_logprobs=None,
                    finish=end,
                )
            )
        return Result(events)


def test_num_streams_sequences_run_until_all_are_finished() -> None:
    engine = OneTokenEach()
    run = run_closed(engine, (submit(number, 2 + number % 3) for number in range(20)), num_streams=4)
    assert engine.most_at_once == 4
    assert [len(times) for times in run.token_seconds] == [2 + number % 3 for number in range(20)]
    assert [len(times) for times in run.token_seconds] == [2 + number % 3 for number in range(20)]
    assert run.num_completion_tokens == sum(2 + number % 3 for number in range(20))
    assert run.began_seconds <= min(run.submitted_seconds)
    assert all(seconds >= 0 for seconds in run.ttft_seconds)
    assert run.ended_seconds >= max(times[-1] for times in run.token_seconds)


def test_fewer_sequences_than_streams_all_run() -> None:
    engine = OneTokenEach()
    assert run_closed(engine, [submit(0)], num_streams=8).num_completion_tokens == 3
    assert engine.most_at_once == 1


def test_throughput_and_ttft_of_a_run() -> None:
    run = EngineRun(
        began_seconds=10.0,
        ended_seconds=12.0,
        submitted_seconds=[10.0, 10.1],
        token_seconds=[[10.4, 10.5, 11.0, 12.0], [10.5, 11.0, 12.0]],
    )
    assert run.tokens_per_second == pytest.approx(3.5)
    assert run.ttft_seconds == pytest.approx((0.4, 0.4))


def test_a_failed_sequence_and_a_stuck_engine_are_errors() -> None:
    with pytest.raises(RuntimeError, match="ended with error: broke"):
        run_closed(OneTokenEach(reason=FinishReason.ERROR), [submit(0)], num_streams=1)
    with pytest.raises(RuntimeError, match="idle with 2 sequences unfinished"):
        run_closed(OneTokenEach(stops_after=1), [submit(0), submit(1)], num_streams=2)


def test_a_full_step_has_a_token_of_every_sequence() -> None:
    run = EngineRun(
        began_seconds=0.0,
        ended_seconds=9.0,
        submitted_seconds=[0.0, 0.0],
        token_seconds=[[1.0, 3.0, 4.0, 6.0], [3.0, 4.0, 6.0, 9.0]],
    )
    assert run.full_step_seconds == pytest.approx((6.0 - 3.0) / 2)


def test_sequences_that_never_ran_together_have_no_step() -> None:
    run = EngineRun(
        began_seconds=0.0,
        ended_seconds=4.0,
        submitted_seconds=[0.0, 0.0],
        token_seconds=[[1.0, 2.0], [2.0, 3.0]],
    )
    with pytest.raises(ValueError, match="fewer than two steps computed a token of each of the 2 sequences"):
        run.full_step_seconds  # noqa: B018
