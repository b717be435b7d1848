"""Background streams during a measurement, and the arrival times of their tokens."""

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

from loadtest.client.sse_client import COMPLETIONS_PATH, RECEIVE_BYTES, SseParser, Target
from loadtest.scenarios.service_process import ServiceFailed

_HEAD_END = b"\r\n\r\n"


class Stream:
    """One completion of random tokens. It ends with its connection.

    `seconds` has the `time.perf_counter` of each event; each event is one token.
    """

    def __init__(self, target: Target, prompt: Sequence[int], max_tokens: int, *, seed: int) -> None:
        self.seconds: list[float] = []
        self.sent_seconds = 0.0
        self._target = target
        # Token ids make every token an event, even one that ends within a character.
        self._body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "return_token_ids": True,
        }
        self._has_begun = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def begin(self) -> float:
        """Wait for the first token. Return its time.

        Raises:
            ServiceFailed: the stream ended without a token.
        """
        waiting = asyncio.create_task(self._has_begun.wait())
        await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self.seconds:
            await self._task
            raise ServiceFailed("a stream ended without a token")
        return self.seconds[0]

    async def leave(self) -> None:
        """Close the connection, if the stream has not ended."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _read(self) -> None:
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            self.sent_seconds = time.perf_counter()
            writer.write(self._target.request_bytes("POST", COMPLETIONS_PATH, self._body, keep_alive=False))
            head = await reader.readuntil(_HEAD_END)
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise ServiceFailed((head + await reader.read(RECEIVE_BYTES)).decode("utf-8", "replace"))
            parser = SseParser()
            while data := await reader.read(RECEIVE_BYTES):
                now = time.perf_counter()
                # Chunk sizes of HTTP are lines without a known SSE field, which the parser skips.
                for event in parser.feed(data):
                    if event != b"[DONE]":
                        self.seconds.append(now)
                        self._has_begun.set()
        finally:
            writer.close()


def random_prompt(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Return random token ids, which no cache holds. The vocabulary's last id is left out: it may end a text."""
    return [rng.randrange(vocab_size - 1) for _ in range(num_tokens)]
