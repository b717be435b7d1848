"""Fair queue: the tenant with the fewest computed tokens is served next, however many requests it sends."""

from collections import Counter
from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from service.engine.engine import Engine
from service.engine.scheduling.fair_queue import FairQueue
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import Submit
from tests.engine.fakes import make_engine, make_submit


def make_sequence(number: int, tenant: str, *, priority: int = 0, deadline: float | None = None) -> SequenceState:
    submit = make_submit(str(number), [1], arrival=float(number), priority=priority, deadline=deadline)
    submit = msgspec.structs.replace(submit, tenant=tenant)
    return SequenceState(submit, arrival_number=number, max_context_length=16)


def take(queue: FairQueue, *, num_tokens: int = 10) -> str:
    """Remove the next sequence from the fair queue, charge `num_tokens` to its tenant, and return its uid."""
    sequence = queue.first()
    queue.remove(sequence.tenant, sequence.rank)
    queue.charge(sequence.tenant, num_tokens)
    queue.check_integrity()
    return sequence.uid


def fill(queue: FairQueue, *tenants: str, start: int = 0) -> None:
    for number, tenant in enumerate(tenants, start):
        queue.add(make_sequence(number, tenant))


def test_sequences_of_one_tenant_are_ordered_by_rank() -> None:
    queue = FairQueue()
    for number, priority in enumerate([0, 0, -1, 5]):
        queue.add(make_sequence(number, "a", priority=priority))
    assert [take(queue) for _ in range(4)] == ["2", "0", "1", "3"]


def test_tenants_alternate_and_the_first_arrival_begins() -> None:
    queue = FairQueue()
    fill(queue, *"aaaa", *"bb", "c")
    assert [take(queue) for _ in range(7)] == ["0", "4", "6", "1", "5", "2", "3"]


def test_fairness_counts_tokens_and_not_requests() -> None:
    queue = FairQueue()
    fill(queue, *"aaa", *"bbbbbb")
    order = []
    while queue:
        tenant = queue.first().tenant
        take(queue, num_tokens=30 if tenant == "a" else 10)
        order.append(tenant)
    assert "".join(order) == "abbbabbba"


def test_running_sequences_are_charged() -> None:
    queue = FairQueue()
    fill(queue, "a", "b", "a")
    assert take(queue) == "0"
    queue.charge("b", 100)
    assert [take(queue) for _ in range(2)] == ["2", "1"]


def test_idle_tenants_earn_no_credit() -> None:
    queue = FairQueue()
    fill(queue, *"aaaaaa")
    for _ in range(3):
        take(queue)
    fill(queue, *"bbbb", start=10)
    assert [take(queue) for _ in range(6)] == ["3", "10", "4", "11", "5", "12"]


def test_tokens_computed_while_no_tenant_waits_do_not_count() -> None:
    queue = FairQueue()
    fill(queue, "a")
    take(queue, num_tokens=1000)
    fill(queue, "a", "b", start=1)
    assert [take(queue), take(queue)] == ["1", "2"]


def test_a_priority_orders_sequences_of_one_tenant_only() -> None:
    queue = FairQueue()
    fill(queue, "polite", "polite")
    for number in range(2, 6):
        queue.add(make_sequence(number, "flood", priority=-1000))
    assert Counter(uid in "01" for uid in (take(queue) for _ in range(4))) == {True: 2, False: 2}


class WatchedQueue(FairQueue):
    """Fair queue that counts the sequences that are looked at one by one."""

    num_looks = 0

    def __iter__(self) -> Iterator[SequenceState]:
        self.num_looks += len(self)
        return super().__iter__()


def test_waiting_sequences_are_not_looked_at_before_a_deadline_has_passed() -> None:
    queue = WatchedQueue()
    for number in range(200):
        queue.add(make_sequence(number, "a", deadline=60.0 + number))
    assert not any(queue.expired(float(now)) for now in range(61))
    assert queue.num_looks == 0
    for _ in range(3):
        take(queue)
    queue.num_looks = 0
    assert not any(queue.expired(now) for now in (60.5, 61.5, 62.5, 63.0))
    assert queue.num_looks == len(queue)  # once, after the deadline of a sequence that has left
    assert [sequence.uid for sequence in queue.expired(64.5)] == ["3", "4"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=30),
    st.lists(st.one_of(st.none(), st.integers(0, 29), st.integers(1, 50)), max_size=60),
)
def test_each_sequence_leaves_the_queue_once_in_any_order_of_calls(
    arrivals: list[tuple[str, int]], moves: list[int | None]
) -> None:
    queue, left = FairQueue(), []
    waiting = {str(i): make_sequence(i, tenant, priority=priority) for i, (tenant, priority) in enumerate(arrivals)}
    for sequence in waiting.values():
        queue.add(sequence)
    for move in moves:
        if move is not None and str(move) in waiting:
            sequence = waiting.pop(str(move))
            queue.remove(sequence.tenant, sequence.rank)
        elif waiting:
            left.append(take(queue))
            del waiting[left[-1]]
        assert sorted(sequence.uid for sequence in queue) == sorted(waiting)
        assert len(queue) == len(waiting)
    assert len(set(left)) == len(left)


def owned(submit: Submit, tenant: str) -> Submit:
    return msgspec.structs.replace(submit, tenant=tenant)


def run(engine: Engine) -> list[str]:
    """Step until no work is left. Return the uids in the order in which the sequences ended."""
    ended = []
    while engine.has_work:
        ended += [event.uid for event in engine.step().events if event.finish is not None]
        engine.check_integrity()
    return ended


def flooded() -> list[str]:
    """Return the order of endings if one tenant sends twenty sequences before another tenant sends three."""
    engine, _ = make_engine(max_num_running=2)
    for number in range(20):
        engine.submit(owned(make_submit(f"flood-{number}", [1, 2, 3], max_tokens=4, ignore_eos=True), "flood"))
    engine.step()
    for number in range(3):
        polite = make_submit(f"polite-{number}", [1, 2, 3], arrival=1.0, max_tokens=4, ignore_eos=True)
        engine.submit(owned(polite, "polite"))
    return run(engine)


def test_other_tenants_are_served_during_a_flood() -> None:
    ended = flooded()
    assert len(ended) == 23
    assert max(ended.index(f"polite-{number}") for number in range(3)) < 8, ended
    assert flooded() == ended
