"""Resubmission after the death of a worker, and trials of possible poison requests."""

import asyncio

import msgspec
import pytest

from service.admission.controller import QueuePolicy
from service.ipc.messages import AttentionQuery, AttentionResult, Cancel, Command, Started, Submit, TokenLogprob
from service.protocol.errors import EngineFailed
from service.requests.inflight import InflightQuery
from tests.service.desk import Desk, run, texts
from tests.service.sequences import make_choice, make_delta, make_finish, make_hello, make_request


def test_the_first_worker_gets_no_resubmission() -> None:
    desk = Desk()
    desk.submit(make_choice("a"))
    desk.engine_client.receive([make_hello(0)])
    assert len(desk.submits()) == 1
    assert len(desk.hellos) == 1


def test_a_new_worker_gets_all_unfinished_work_in_arrival_order_with_the_tokens_so_far() -> None:
    async def test() -> None:
        desk = Desk()
        requests = [desk.submit(make_choice(f"r{i}")) for i in range(5)]
        desk.engine_client.receive(
            [make_delta("r1", ids=(7, 8), text="x"), make_delta("r3", ids=(9,), finish=make_finish())]
        )
        desk.engine_client.receive([make_hello(1)])
        again = desk.submits()[5:]
        assert [(s.uid, s.attempt, s.prior_token_ids) for s in again] == [
            ("r0", 1, ()),
            ("r1", 1, (7, 8)),
            ("r2", 1, ()),
            ("r4", 1, ()),
        ]
        assert desk.outcomes == ["resubmitted"] * 4
        # A late event of the dead worker is ignored. Tokens of the new worker continue the completion.
        desk.engine_client.receive([make_delta("r1", index=2, ids=(1,), text="old")])
        desk.engine_client.receive([make_delta("r1", index=2, ids=(1,), text="new", attempt=1)])
        assert await texts(requests[1]) == [(0, "x"), (0, "new")]

    run(test)


def test_a_resubmission_differs_only_in_attempt_and_prior_tokens() -> None:
    """Priority, cache salt, arrival time and parameters stay the same."""
    desk = Desk()
    choice = make_choice("a", frequency_penalty=1.0, bad_word_ids=((5, 6),), logprobs=0)
    choice.submit = msgspec.structs.replace(choice.submit, priority=-4, cache_salt="mine", arrival_seconds=3.0)
    request = make_request(choice)
    request.terms = QueuePolicy(tenant="key bob", cache_namespace="bob")
    desk.engine_client.submit(request)
    (first,) = desk.submits()
    assert (first.tenant, first.cache_namespace) == ("key bob", "bob")
    desk.engine_client.receive([make_delta("a", ids=(5,))])
    desk.engine_client.receive([make_hello(1)])
    assert desk.submits()[-1] == msgspec.structs.replace(first, attempt=1, prior_token_ids=(5,))


def test_the_times_of_a_resubmitted_choice_are_those_of_all_attempts() -> None:
    desk = Desk()
    choice = make_choice("a")
    choice.submit = msgspec.structs.replace(choice.submit, arrival_seconds=-1e6)
    desk.submit(choice)
    begin(desk, "a")
    tell(desk, "a")
    assert sent_after(desk, 1) == ["a"]
    assert choice.begin_seconds is not None
    assert choice.first_delta_seconds is not None
    prefill_seconds = choice.first_delta_seconds - choice.begin_seconds
    begin(desk, "a")
    finish = make_finish(queue_seconds=1e9, prefill_seconds=2.0, decode_seconds=3.0)
    desk.engine_client.receive([make_delta("a", index=1, ids=(2,), attempt=1, finish=finish)])
    assert choice.finish is not None
    assert (choice.finish.queue_seconds, choice.finish.prefill_seconds) == (choice.begin_seconds + 1e6, prefill_seconds)
    assert choice.finish.decode_seconds == pytest.approx(1e9 + 5.0 - choice.first_delta_seconds - 1e6)


def begin(desk: Desk, *uids: str) -> None:
    """Let the worker report that it has begun the last attempt of each uid."""
    attempts = {submit.uid: submit.attempt for submit in desk.submits()}
    desk.engine_client.receive([Started(uid=uid, attempt=attempts[uid]) for uid in uids])


def sent_after(desk: Desk, epoch: int) -> list[str]:
    """Let a new worker report that it is ready. Return the uids that the engine client sends to it at once."""
    before = len(desk.submits())
    desk.engine_client.receive([make_hello(epoch)])
    return [submit.uid for submit in desk.submits()[before:]]


def sent_since(desk: Desk, before: int) -> list[str]:
    """Return the commands sent after the first `before`: the uid of a submission, "cancel" and the uid of a cancel."""
    return [name_of(command) for command in desk.sent[before:]]


def name_of(command: Command) -> str:
    assert isinstance(command, Submit | Cancel | AttentionQuery)
    return f"cancel {command.uid}" if isinstance(command, Cancel) else command.uid


def tell(desk: Desk, uid: str, index: int = 0) -> None:
    attempts = {submit.uid: submit.attempt for submit in desk.submits()}
    desk.engine_client.receive([make_delta(uid, index=index, ids=(1,), attempt=attempts[uid])])


def test_a_request_that_had_not_begun_gets_no_strike() -> None:
    desk = Desk()
    request = desk.submit(make_choice("a"))
    for epoch in range(1, 9):
        assert sent_after(desk, epoch) == ["a"]
    assert not request.has_failed


def test_a_request_that_made_progress_gets_no_strike() -> None:
    desk = Desk()
    request = desk.submit(make_choice("a"))
    for epoch in range(1, 9):
        begin(desk, "a")
        tell(desk, "a", index=epoch - 1)
        assert sent_after(desk, epoch) == ["a"]
    assert not request.has_failed


def test_a_request_that_kills_three_workers_fails_alone_without_retry(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        desk = Desk()
        poison = make_request(make_choice("p"))
        poison.terms = QueuePolicy(tenant="key mallory")
        desk.engine_client.submit(poison)
        good = desk.submit(make_choice("g"))
        for epoch in (1, 2):
            begin(desk, "p", "g")
            desk.engine_client.receive([make_hello(epoch)])
        assert [s.uid for s in desk.submits()] == ["p", "g", "p", "g", "p"], "apart: one after the other"
        begin(desk, "p")
        assert sent_after(desk, 3) == ["g"]
        begin(desk, "g")
        tell(desk, "g")
        with pytest.raises(EngineFailed, match="died repeatedly on this request") as caught:
            await poison.next_deltas()
        assert caught.value.headers() == {"x-should-retry": "false"}
        assert desk.outcomes[-2:] == ["gave_up", "resubmitted"]
        assert len(await good.next_deltas()) == 1

    run(test)
    assert caplog.messages == ["poison request p (key mallory) fails: several workers died computing it"]


def test_poison_candidates_run_alone_in_turn_and_leave_the_worker_after_progress() -> None:
    desk = Desk()
    for uid in "abc":
        desk.submit(make_choice(uid))
    tell(desk, "c")
    for epoch in (1, 2):
        begin(desk, "a", "b")
        given = sent_after(desk, epoch)
    assert given == ["a"], "alone: the stream that made progress waits, too"
    begin(desk, "a")
    before = len(desk.sent)
    tell(desk, "a")
    assert sent_since(desk, before) == ["cancel a", "b"], "the worker is empty before the next trial"
    begin(desk, "b")
    before = len(desk.sent)
    tell(desk, "b")
    assert sent_since(desk, before) == ["c", "a"], "the last one cleared goes on, and the others with it"
    assert desk.submits()[-1].prior_token_ids == (1,), "a goes on after the token of its trial"


def test_the_next_poison_candidate_runs_after_a_client_disconnects() -> None:
    desk = Desk()
    first, _ = desk.submit(make_choice("a")), desk.submit(make_choice("b"))
    for epoch in (1, 2):
        begin(desk, "a", "b")
        desk.engine_client.receive([make_hello(epoch)])
    before = len(desk.sent)
    desk.engine_client.finish(first)
    assert sent_since(desk, before) == ["cancel a", "b"]


def test_no_request_fails_while_two_requests_explain_the_crash() -> None:
    desk = Desk()
    requests = [desk.submit(make_choice(uid)) for uid in "ab"]
    for epoch in (1, 2):
        begin(desk, "a", "b")
        desk.engine_client.receive([make_hello(epoch)])
    begin(desk, "a")
    attempt = desk.submits()[-1].attempt
    desk.engine_client.receive([Started(uid="b", attempt=attempt)])  # although b is held back
    desk.engine_client.receive([make_hello(3)])
    assert not any(request.has_failed for request in requests)


def test_no_other_work_runs_during_a_trial() -> None:
    desk = Desk()
    poison, waiting, leaving = (desk.submit(make_choice(uid)) for uid in ("p", "waiting", "leaving"))
    running = desk.submit(make_choice("running"))
    tell(desk, "running")
    for epoch in (1, 2):
        begin(desk, "p")
        given = sent_after(desk, epoch)
    assert given == ["p"]
    new = desk.submit(make_choice("new"))
    desk.engine_client.finish(leaving)
    assert desk.submits()[-1].uid == "p"
    begin(desk, "p")
    assert sent_after(desk, 3) == ["waiting", "running", "new"]
    assert [request.has_failed for request in (poison, waiting, running, new)] == [True, False, False, False]


def submit_query(desk: Desk, uid: str) -> InflightQuery:
    look = AttentionQuery(uid=uid, token_ids=(1, 2), layer=0, heads=(0,))
    answer = asyncio.get_running_loop().create_future()
    live = InflightQuery(submit=look, arrival_seconds=0.0, terms=QueuePolicy(), answer=answer)
    desk.engine_client.submit(live)
    return live


def begin_look(desk: Desk, live: InflightQuery) -> None:
    desk.engine_client.receive([Started(uid=live.submit.uid, attempt=live.submit.attempt)])


def test_an_attention_query_with_two_strikes_runs_alone_and_gets_its_result() -> None:
    async def test() -> None:
        desk = Desk()
        desk.submit(make_choice("s"))
        look = submit_query(desk, "look")
        tell(desk, "s")
        for epoch in (1, 2):
            begin_look(desk, look)
            before = len(desk.sent)
            desk.engine_client.receive([make_hello(epoch)])
        assert sent_since(desk, before) == ["look"], "alone, after two strikes"
        before = len(desk.sent)
        desk.submit(make_choice("new"))
        assert sent_since(desk, before) == []
        begin_look(desk, look)
        desk.engine_client.receive([AttentionResult(uid="look", weights=b"", compute_seconds=0.0)])
        assert sent_since(desk, before) == ["s", "new"]
        assert look.answer.done()
        desk.engine_client.finish(look)
        assert sent_since(desk, before) == ["s", "new"], "nothing is left to cancel"

    run(test)


def test_an_attention_query_that_crashes_its_trial_is_the_poison_request() -> None:
    async def test() -> None:
        desk = Desk()
        request, look = desk.submit(make_choice("a")), submit_query(desk, "look")
        for epoch in (1, 2):
            begin(desk, "a")
            begin_look(desk, look)
            assert not look.has_failed
            desk.engine_client.receive([make_hello(epoch)])
        begin(desk, "a")  # the first of the two suspects
        tell(desk, "a")
        begin_look(desk, look)
        before = len(desk.sent)
        desk.engine_client.receive([make_hello(3)])
        with pytest.raises(EngineFailed, match="died repeatedly"):
            await look.answer
        assert sent_since(desk, before) == ["a"]
        assert not request.has_failed
        assert desk.outcomes.count("gave_up") == 1

    run(test)


@pytest.mark.parametrize("is_told", [True, False])
def test_held_work_is_sent_after_the_trial_ends(is_told: bool) -> None:
    desk = Desk()
    suspect, _ = desk.submit(make_choice("s")), desk.submit(make_choice("a"))
    for epoch in (1, 2):
        begin(desk, "s")
        desk.engine_client.receive([make_hello(epoch)])
    desk.submit(make_choice("b"))
    assert desk.submits()[-1].uid == "s"
    if is_told:
        begin(desk, "s")
        tell(desk, "s")
    else:
        desk.engine_client.finish(suspect)
    assert [submit.uid for submit in desk.submits()][-2:] == ["a", "b"]
    desk.submit(make_choice("c"))
    assert desk.submits()[-1].uid == "c"


def test_a_start_reported_by_an_old_worker_is_ignored() -> None:
    desk = Desk()
    request = desk.submit(make_choice("a"))
    for epoch in range(1, 6):
        desk.engine_client.receive([Started(uid="a", attempt=epoch - 2), Started(uid="unknown", attempt=0)])
        assert sent_after(desk, epoch) == ["a"]
    assert not request.has_failed


def _logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=-1.0, rank=1, top=())


def test_incomplete_prompt_logprobs_are_requested_again() -> None:
    desk = Desk()
    whole, part = make_choice("w", prompt_logprobs=0), make_choice("p", prompt_logprobs=0)
    desk.submit(whole)
    desk.submit(part)
    desk.engine_client.receive([make_delta("w", prompt_logprobs=tuple(map(_logprob, (1, 2, 3))))])
    desk.engine_client.receive([make_delta("p", prompt_logprobs=(_logprob(1),))])
    desk.engine_client.receive([make_hello(1)])
    again = {submit.uid: submit for submit in desk.submits()[2:]}
    assert again["w"].params.prompt_logprobs is None
    assert again["p"].params.prompt_logprobs == 0
    assert (len(whole.prompt_logprobs), len(part.prompt_logprobs)) == (3, 0)
