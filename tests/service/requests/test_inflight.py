"""Backlog of a client that reads more slowly than its response is generated."""

import asyncio

import pytest

from service.ipc.messages import Cancel, TokenLogprob
from service.protocol.errors import ClientGone
from service.requests.inflight import MAX_BACKLOG_BYTES, delta_bytes
from tests.service.desk import Desk
from tests.service.sequences import make_choice, make_delta

TOP = tuple((number, -1.0) for number in range(20))
SCORES = (TokenLogprob(token_id=1, logprob=-1.0, rank=1, top=TOP),)


def test_delta_bytes_grow_with_text_and_logprobs() -> None:
    plain, long = make_delta(ids=(1,), text="a"), make_delta(ids=(1,), text="a" * 1000)
    scored, scores = make_delta(ids=(1,), logprobs=SCORES), make_delta(ids=(1,), prompt_logprobs=SCORES * 100)
    assert 0 < delta_bytes(plain) < delta_bytes(scored) < delta_bytes(long) < delta_bytes(scores)


def test_a_client_over_the_backlog_limit_loses_its_request() -> None:
    async def test() -> None:
        desk = Desk()
        request, other = desk.open(make_choice("a"), make_choice("b", index=1)), desk.open(make_choice("c"))
        news = [make_delta("a", index=index, ids=(1,), logprobs=SCORES) for index in range(10_000)]
        num_kept = MAX_BACKLOG_BYTES // delta_bytes(news[0]) + 1
        assert num_kept < len(news) // 1.5
        desk.engine_client.receive(news[:num_kept])
        assert desk.engine_client.num_requests == 2
        desk.engine_client.receive(news[num_kept:])
        assert desk.engine_client.num_requests == 1
        assert [command.uid for command in desk.sent if isinstance(command, Cancel)] == ["a", "b"]
        with pytest.raises(ClientGone):
            await request.next_deltas()
        desk.engine_client.receive([make_delta("c", ids=(1,), text="C")])
        assert len(await other.next_deltas()) == 1

    asyncio.run(test())


def test_a_client_that_keeps_up_may_get_any_amount() -> None:
    async def test() -> None:
        desk = Desk()
        request = desk.open(make_choice("a"))
        desk.engine_client.receive([make_delta("a", prompt_logprobs=SCORES * 20_000)])
        assert delta_bytes((await request.next_deltas())[0][1]) > MAX_BACKLOG_BYTES
        for index in range(20):
            desk.engine_client.receive([make_delta("a", index=index, ids=(1,), text="x" * 1_000_000)])
            assert len(await request.next_deltas()) == 1

    asyncio.run(test())
