"""Engine client: delivery of the worker's events, and the ends of requests."""

import asyncio
from typing import Any

import pytest

from service.admission.controller import QueuePolicy
from service.ipc.messages import ADAPTER_LOST, Cancel, FinishReason, Started, Submit, TokenDelta
from service.protocol.errors import (
    ApiError,
    ClientGone,
    Draining,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
)
from tests.service.desk import Desk, run, texts
from tests.service.sequences import make_choice, make_delta, make_finish, make_hello, make_request, make_stats


def test_events_reach_their_request_in_order() -> None:
    async def test() -> None:
        desk = Desk()
        first = desk.submit(make_choice("a"), make_choice("b", index=1))
        second = desk.submit(make_choice("c"))
        desk.engine_client.receive([make_delta("b", ids=(1,), text="B"), make_delta("a", ids=(1,), text="A")])
        desk.engine_client.receive([make_delta("c", ids=(1,), text="C"), make_delta("a", index=1, ids=(2,), text="AA")])
        assert await texts(first) == [(1, "B"), (0, "A"), (0, "AA")]
        assert await texts(second) == [(0, "C")]

    run(test)


def test_admission_sees_each_sequence_wait_run_and_end() -> None:
    desk = Desk()
    request = desk.submit(make_choice("a"), make_choice("b", index=1))
    assert (desk.admission.num_sequences, desk.admission.num_waiting_tokens) == (2, 26)
    desk.engine_client.receive([make_delta("a", ids=(1,))])
    assert (desk.admission.num_sequences, desk.admission.num_waiting_tokens) == (2, 13)
    desk.engine_client.receive([make_delta("a", index=1, finish=make_finish())])
    assert (desk.admission.num_sequences, desk.admission.num_waiting_tokens) == (1, 13)
    desk.engine_client.finish(request)
    assert (desk.admission.num_sequences, desk.admission.num_waiting_tokens) == (0, 0)
    assert desk.sent[-1] == Cancel(uid="b")


def test_admission_uses_the_engines_running_limit_until_a_new_worker_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    limits: list[int | None] = []
    monkeypatch.setattr(desk.admission, "limit_running", lambda limit, worker: limits.append(limit))
    desk.engine_client.receive([make_stats(max_num_running=1)])
    desk.engine_client.receive([make_hello(1)])
    assert limits == [1, None]


def test_a_rejected_request_leaves_no_state() -> None:
    desk = Desk(waiting=0)
    with pytest.raises(Overloaded):
        desk.submit(*(make_choice(uid, index=i) for i, uid in enumerate("abc")))
    assert (desk.engine_client.num_requests, desk.admission.num_sequences, desk.sent) == (0, 0, [])


def test_a_request_that_cannot_be_sent_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()

    def send(commands: object) -> None:
        raise Draining("the queue is gone", retry_after_seconds=1.0)

    monkeypatch.setattr(desk.engine_client.workers[0], "send", send)
    with pytest.raises(Draining):
        desk.submit(make_choice("a"), make_choice("b", index=1))
    assert desk.engine_client.num_requests == 0
    assert (desk.admission.num_sequences, desk.admission.num_waiting_tokens) == (0, 0)


def test_closing_a_request_cancels_only_its_unfinished_choices() -> None:
    desk = Desk()
    request = desk.submit(make_choice("a"))
    desk.engine_client.receive([make_delta("a", ids=(1,), finish=make_finish())])
    assert desk.engine_client.finish(request) == 0
    assert [type(command) for command in desk.sent] == [Submit]
    desk.engine_client.receive([make_delta("a", index=1, ids=(2, 3))])
    assert desk.late == [2], "nobody is there any more"


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_failed_sequence_fails_the_request_after_its_earlier_deltas(reason: FinishReason) -> None:
    async def test() -> None:
        desk = Desk()
        request = desk.submit(make_choice("a"))
        desk.engine_client.receive([make_delta("a", ids=(1,), text="x")])
        desk.engine_client.receive([make_delta("a", index=1, finish=make_finish(reason, error="/secret/path"))])
        assert await texts(request) == [(0, "x")]
        with pytest.raises(EngineFailed) as caught:
            await request.next_deltas()
        assert "secret" not in caught.value.message

    run(test)


def test_a_request_whose_adapter_is_lost_gets_the_remedy_and_no_advice_to_retry() -> None:
    async def test() -> None:
        desk = Desk()
        request = desk.submit(make_choice("a"))
        desk.engine_client.receive([make_delta("a", finish=make_finish(FinishReason.ERROR, error=ADAPTER_LOST))])
        with pytest.raises(EngineFailed, match="restore them, or load the adapter again") as caught:
            await request.next_deltas()
        assert not caught.value.retry

    run(test)


def test_a_delta_out_of_order_fails_the_request() -> None:
    async def test() -> None:
        desk = Desk()
        request = desk.submit(make_choice("a"))
        desk.engine_client.receive([make_delta("a", index=1, ids=(2,), text="lost its beginning")])
        with pytest.raises(EngineFailed):
            await request.next_deltas()

    run(test)


def test_a_failure_after_unsent_tokens_is_reported_as_an_engine_failure() -> None:
    async def test() -> None:
        desk = Desk()
        request = desk.submit(make_choice("a"))
        desk.engine_client.receive([make_delta("a", index=1, finish=make_finish(FinishReason.ERROR))])
        with pytest.raises(EngineFailed, match="the engine failed on this request"):
            await request.next_deltas()
        assert request.choices[0].finish is not None
        assert desk.admission.num_sequences == 0

    run(test)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": (5,), "bad_word_ids": ((5, 5),)}, "allowed_token_ids"),
        ({"bad_word_ids": ((5,),)}, "bad_words"),
        ({}, "structured_outputs.grammar"),
    ],
)
def test_a_request_whose_rules_allow_no_token_gets_400_with_the_parameter(params: Any, param: str) -> None:
    async def test() -> None:
        desk = Desk()
        choice = make_choice("a", **params)
        choice.grammar_param = "structured_outputs.grammar"
        request = desk.submit(choice)
        desk.engine_client.receive(
            [make_delta("a", finish=make_finish(FinishReason.REFUSED, error="no token may follow"))]
        )
        with pytest.raises(InvalidRequest, match="no token may follow") as caught:
            await request.next_deltas()
        assert (caught.value.status, caught.value.param) == (400, param)
        assert desk.admission.num_sequences == 0

    run(test)


def test_a_disconnected_client_gets_no_more_deltas() -> None:
    async def test() -> None:
        desk = Desk()
        request = desk.submit(make_choice("a"))
        desk.engine_client.receive([make_delta("a", ids=(1,), text="x")])
        request.fail(ClientGone("gone"))
        with pytest.raises(ClientGone):
            await request.next_deltas()

    run(test)


def test_only_silent_requests_are_woken() -> None:
    async def test() -> None:
        desk = Desk()
        silent, lively = desk.submit(make_choice("a")), desk.submit(make_choice("b"))
        silent.last_sent_seconds = 1.0
        lively.last_sent_seconds = 5.0
        desk.engine_client.wake_silent_requests(since_seconds=3.0)
        assert await silent.next_deltas() == []
        waiting = asyncio.create_task(lively.next_deltas())
        await asyncio.sleep(0)
        assert not waiting.done()
        desk.engine_client.receive([make_delta("b", ids=(1,))])
        assert len(await waiting) == 1

    run(test)


def test_fail_all_ends_every_request_with_the_first_error_it_had() -> None:
    async def test() -> None:
        desk = Desk()
        requests = [desk.submit(make_choice(f"r{i}")) for i in range(3)]
        requests[0].fail(ClientGone("gone"))
        desk.engine_client.fail_all(ApiError("the end"))
        for request, kind in zip(requests, (ClientGone, ApiError, ApiError), strict=True):
            with pytest.raises(ApiError) as caught:
                await request.next_deltas()
            assert type(caught.value) is kind

    run(test)


def test_a_waiting_request_expires_and_a_begun_request_expires_only_if_the_worker_hangs() -> None:
    async def test() -> None:
        desk = Desk()
        terms = QueuePolicy(timeout_seconds=5.0)
        waits, begun, streams, patient = (make_request(make_choice(uid)) for uid in ("w", "b", "s", "p"))
        waits.terms = begun.terms = streams.terms = terms
        for request in (waits, begun, streams, patient):
            desk.engine_client.submit(request)
        desk.engine_client.receive([Started(uid=uid, attempt=0) for uid in "bs"])
        desk.engine_client.receive([make_delta("s", ids=(1,))])
        desk.engine_client.expire(5.0)
        assert not any(request.has_failed for request in (waits, begun, streams, patient))
        desk.engine_client.expire(5.1)
        assert [request.has_failed for request in (waits, begun, streams, patient)] == [True, False, False, False]
        desk.engine_client.workers[0].is_stalled = True
        desk.engine_client.expire(5.2)
        assert [request.has_failed for request in (waits, begun, streams, patient)] == [True, True, False, False]
        with pytest.raises(QueueTimeout, match="did not start within its timeout of 5 s; try again later"):
            await waits.next_deltas()
        with pytest.raises(QueueTimeout, match="did not finish within its timeout of 5 s; try again later"):
            await begun.next_deltas()

    run(test)


def test_a_replayed_request_expires_in_the_queue_of_the_new_worker() -> None:
    desk = Desk()
    request = make_request(make_choice("a"))
    request.terms = QueuePolicy(timeout_seconds=5.0)
    desk.engine_client.submit(request)
    desk.engine_client.receive([Started(uid="a", attempt=0), make_hello(1)])
    desk.engine_client.expire(6.0)
    assert request.has_failed


def test_unknown_uids_are_ignored() -> None:
    delta: TokenDelta = make_delta("nobody", ids=(1,))
    Desk().engine_client.receive([delta])
