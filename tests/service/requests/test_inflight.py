"""Backlog of a client that reads more slowly than its response is generated."""

import asyncio

import pytest

from service.ipc.messages import Cancel, TokenLogprob
from service.protocol.errors import ClientGone
from service.requests.inflight import MAX_BACKLOG
from tests.service.desk import Desk
from tests.service.sequences import make_choice, make_delta

TOP = tuple((number, -1.0) for number in range(20))
SCORES = (TokenLogprob(token_id=1, logprob=-1.0, rank=1, top=TOP),)


def test_a_client_over_the_backlog_limit_loses_its_request() -> None:
    async def test() -> None:
        desk = Desk()
        request, other = desk.submit(make_choice("a"), make_choice("b", index=1)), desk.submit(make_choice("c"))
        news = [make_delta("a", index=index, ids=(1,), logprobs=SCORES) for index in range(10_000)]
        num_kept = MAX_BACKLOG // 2 + 1  # each delta counts twice: itself and one logprob entry
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


def test_a_client_that_keeps_up_may_receive_any_number_of_tokens() -> None:
    async def test() -> None:
        desk = Desk()
        request = desk.submit(make_choice("a"))
        desk.engine_client.receive([make_delta("a", prompt_logprobs=SCORES * 20_000)])
        assert len(await request.next_deltas()) == 1
        for index in range(MAX_BACKLOG + 2):
            desk.engine_client.receive([make_delta("a", index=index, ids=(1,))])
            assert len(await request.next_deltas()) == 1

    asyncio.run(test())
