"""Priorities of requests: lower numbers run first, without starvation."""

from typing import Any

import pytest

from service.engine.engine import Engine
from service.engine.scheduling.sequence import AGEING_SECONDS
from tests.engine.fakes import CONTEXT, expected_tokens, make_engine, make_submit


def run(engine: Engine) -> list[str]:
    """Step until no work is left. Return the uids in the order in which the sequences ended."""
    ended = []
    while engine.has_work:
        result = engine.step()
        ended += [event.uid for event in result.events if event.finish is not None]
        engine.check_integrity()
    return ended


def order(*submits: Any, **config: Any) -> list[str]:
    """Run submissions in an engine that runs one sequence at a time. Return the uids in the order of their endings."""
    engine, _ = make_engine(max_num_running=1, **config)
    for submit in submits:
        engine.submit(submit)
    return run(engine)


def make(uid: str, arrival: float, priority: int) -> Any:
    return make_submit(uid, [1, 2, 3], arrival=arrival, priority=priority, max_tokens=4, ignore_eos=True)


def test_the_lowest_priority_value_runs_first_and_equal_values_by_arrival() -> None:
    given = [make("usual", 0.0, 0), make("later", 1.0, 0), make("urgent", 2.0, -1), make("whenever", 0.0, 5)]
    assert order(*given) == ["urgent", "usual", "later", "whenever"]
    assert order(*[make(submit.uid, submit.arrival_seconds, 0) for submit in given]) == [
        "usual",
        "whenever",
        "later",
        "urgent",
    ]


def test_a_priority_level_equals_ten_seconds_of_waiting() -> None:
    waited = AGEING_SECONDS
    assert order(make("low", 0.0, 1), make("high", waited - 0.5, 0)) == ["high", "low"]
    assert order(make("low", 0.0, 1), make("high", waited + 0.5, 0)) == ["low", "high"]


@pytest.mark.parametrize("priority", [0, 3])
def test_urgent_requests_overtake_a_sequence_only_for_a_bounded_time(priority: int) -> None:
    """An urgent request arrives every second, and runs alone for four steps, so the queue of them grows."""
    engine, _ = make_engine(max_num_running=1)
    engine.submit(make("patient", 0.0, priority))
    ended: list[str] = []
    for second in range(1, 200):
        engine.submit(make(f"urgent-{second}", float(second), 0))
        ended += [event.uid for event in engine.step().events if event.finish is not None]
        if "patient" in ended:
            break
    # Only requests that arrive within priority * AGEING_SECONDS overtake the patient sequence.
    assert ended == [*(f"urgent-{second}" for second in range(1, int(priority * AGEING_SECONDS))), "patient"]


def test_the_sequence_of_highest_rank_is_preempted_only_if_blocks_are_short() -> None:
    engine, _ = make_engine(num_blocks=12, max_batched_tokens=30)
    submits = [make_submit(str(i), [i] * 6, max_tokens=18, ignore_eos=True, seed=i, priority=-i) for i in range(4)]
    for submit in submits[:2]:
        engine.submit(submit)
    engine.step()
    for submit in submits[2:]:
        engine.submit(submit)
    events = []
    while engine.has_work:
        events += engine.step().events
        engine.check_integrity()
    finishes = {event.uid: event.finish for event in events if event.finish is not None}
    assert list(finishes)[-1] == "0"
    assert finishes["3"].num_preemptions == 0
    assert finishes["0"].num_preemptions > 0
    for submit in submits[2:]:
        sampled = [token_id for event in events if event.uid == submit.uid for token_id in event.token_ids]
        assert sampled == expected_tokens(submit, CONTEXT)


def test_sequences_share_prefixes_only_with_equal_salts() -> None:
    engine, _ = make_engine(max_batched_tokens=30)
    hits = []
    for number, salt in enumerate(["", "mine", "mine", "yours", ""]):
        engine.submit(make_submit(str(number), range(10), max_tokens=1, ignore_eos=True, salt=salt))
        hits.append(engine.step().stats.num_prefix_hits)
    assert hits == [0, 0, 8, 0, 8]


def test_sequences_share_prefixes_only_with_equal_namespaces_and_salts() -> None:
    engine, _ = make_engine(max_batched_tokens=30)
    hits = []
    for number, (namespace, salt) in enumerate([("ann", ""), ("bob", ""), ("ann", ""), ("", ""), ("bob", "mine")]):
        submit = make_submit(str(number), range(10), max_tokens=1, ignore_eos=True, salt=salt, namespace=namespace)
        engine.submit(submit)
        hits.append(engine.step().stats.num_prefix_hits)
    assert hits == [0, 0, 8, 0, 0]
