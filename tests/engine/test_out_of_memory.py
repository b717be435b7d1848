"""Steps that need more memory than the device has: repeated in smaller steps, with the same tokens."""

import pytest
import torch

from tests.engine.fakes import CONTEXT, expected_tokens, make_engine, make_submit
from tests.engine.test_lookahead import drive, tokens_of


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_step_without_memory_is_repeated_in_smaller_steps(looks_ahead: bool, max_rows: int) -> None:
    engine, runner = make_engine(looks_ahead=looks_ahead, min_rows=1)
    runner.max_rows = max_rows
    submits = [make_submit(uid, [1, 2, 3, 4, 5, number], seed=number) for number, uid in enumerate("abc")]
    for submit in submits:
        engine.submit(submit)
    events = drive(engine)
    assert max(map(sum, runner.batches)) == max_rows
    for submit in submits:
        assert tokens_of(submit.uid, events) == expected_tokens(submit, CONTEXT)
    finishes = [event.finish for event in events if event.finish]
    assert [finish.error for finish in finishes] == [None] * 3
    assert any(finish.num_preemptions for finish in finishes)


def test_an_idle_engine_has_its_usual_limit_again() -> None:
    engine, runner = make_engine(min_rows=1)
    runner.max_rows = 3
    engine.submit(make_submit("a", range(1, 8), max_tokens=CONTEXT - 7, ignore_eos=True))
    engine.step()
    assert engine.step().stats.num_preemptions == 0
    assert runner.batches == [(3,)], "the step of 7 tokens becomes a step of 3"
    runner.max_rows = None
    drive(engine)
    engine.submit(make_submit("b", range(11, 18)))
    drive(engine)
    assert (7,) in runner.batches


def test_a_single_token_without_memory_fails() -> None:
    engine, runner = make_engine(min_rows=1)
    runner.max_rows = 0
    engine.submit(make_submit("a", [1]))
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
