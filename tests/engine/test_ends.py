"""Endings of sequences by end-of-text tokens, of which a checkpoint may have several or none."""

from typing import Any

import pytest

from service.engine.scheduling.scheduler import EngineConfig, Scheduler
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import FinishReason
from tests.engine.fakes import make_submit

ENDS = (7, 9)
CONFIG = EngineConfig(block_size=2, num_blocks=16, max_num_running=2, max_batched_tokens=16)


def run(scheduler: Scheduler, sequence: SequenceState, sampled: list[int]) -> None:
    """Commit the sampled tokens to a sequence one by one. Assert that exactly the last token ends the sequence."""
    scheduler.add(sequence)
    for index, token_id in enumerate(sampled):
        (update,) = scheduler.commit(scheduler.schedule(), [token_id])
        assert update.sequence is sequence
        assert (sequence.finish_reason is not None) == (index == len(sampled) - 1)
    scheduler.check_integrity()


def make(ends: tuple[int, ...], **params: Any) -> tuple[Scheduler, SequenceState]:
    submit = make_submit("a", [1, 2], **{"max_tokens": 6, **params})
    sequence = SequenceState(submit, arrival_number=1, max_context_length=24, eos_token_ids=ends)
    return Scheduler(CONFIG, max_context_length=24), sequence


@pytest.mark.parametrize("end", ENDS)
def test_any_end_of_text_token_ends_a_sequence_with_stop_reason_none(end: int) -> None:
    scheduler, sequence = make(ENDS)
    run(scheduler, sequence, [3, 4, end])
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, None)


def test_all_end_of_text_tokens_are_forbidden_before_min_tokens() -> None:
    _, sequence = make(ENDS, min_tokens=2, stop_token_ids=(5,))
    assert sequence.forbidden_token_ids == (5, *ENDS)
    _, sequence = make(ENDS, min_tokens=2, stop_token_ids=(5,), ignore_eos=True)
    assert sequence.forbidden_token_ids == (5,)


def test_no_end_of_text_token_ends_a_sequence_with_ignore_eos() -> None:
    for scheduler, sequence in (make(ENDS, ignore_eos=True), make(())):
        run(scheduler, sequence, [7, 9, 7, 9, 7, 9])
        assert sequence.finish_reason is FinishReason.LENGTH
