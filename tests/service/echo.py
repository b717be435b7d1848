"""Fake worker that completes each prompt at once with the prompt itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.ipc.messages import Cancel, FinishReason, Submit, decode_commands, encode_events
from tests.service.sequences import make_delta, make_finish

WIDTH = 32  # of the tiny model's hidden states


class EchoChannel:
    """Channel to a fake worker that completes each prompt at once with the prompt itself.

    The embedding of a prompt is `vector` of its token ids.
    """

    def __init__(self) -> None:
        self.frontend: Any = None
        self.submits: list[Submit] = []
        self.cancelled: list[str] = []
        self.epochs: list[int] = []
        self.answers = True
        self.failure: str | None = None

    def discard_unsent(self) -> None:
        """Do nothing: no message is ever unsent."""

    def submit(self, message: bytes) -> None:
        batch = decode_commands(message)
        self.epochs += [batch.epoch] if batch.epoch not in self.epochs else []
        for command in batch.commands:
            if isinstance(command, Submit):
                self.submits.append(command)
                ids = command.prompt_token_ids
                text = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
                event = make_delta(command.uid, ids=ids, text=text, finish=make_finish())
                if command.pooling is not None:
                    event = make_delta(
                        command.uid, attempt=command.attempt, finish=make_finish(), embedding=vector(ids).tobytes()
                    )
                if self.failure is not None:
                    failed = make_finish(FinishReason.ERROR, error=self.failure)
                    event = make_delta(command.uid, finish=failed)
                if self.answers:
                    self.frontend.receive(encode_events([event]))
            elif isinstance(command, Cancel):
                self.cancelled.append(command.uid)


def vector(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return a random vector of Euclidean norm 1, with the token ids as its seed."""
    vector_E = np.random.default_rng(list(token_ids)).normal(size=WIDTH).astype(np.float32)
    return vector_E / np.linalg.norm(vector_E)
