"""A worker that answers at once."""

from typing import Any

from service.frontend import Sink
from service.messages import Submit, decode_command, encode_events
from tests.service.sequences import make_delta, make_finish


class EchoQueue:
    """LitServe's queue with a worker behind it that completes every prompt with itself, at once."""

    def __init__(self) -> None:
        self.frontend: Any = None
        self.submits: list[Submit] = []
        self.answers = True

    def put(self, item: Any) -> None:
        api_id, _, _, payload = item
        assert api_id == 0
        for command in map(decode_command, payload):
            if isinstance(command, Submit):
                self.submits.append(command)
                ids = command.prompt_token_ids
                text = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
                event = make_delta(command.uid, ids=ids, text=text, finish=make_finish())
                if self.answers:
                    Sink(self.frontend).append((encode_events([event]), "OK"))
