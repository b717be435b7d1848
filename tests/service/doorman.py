"""Admission control with a clock that the test moves."""

from service.admission.controller import Admission, QueuePolicy
from service.protocol.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Service:
    """Admission control, and the fake clock that it reads."""

    def __init__(self, *, running: int = 2, waiting: int = 2, tokens: int = 1000, workers: int = 1) -> None:
        self.clock = Clock()
        self.errors: list[float] = []
        self.draw = 0.0
        self.admission = Admission(
            max_num_running=running,
            max_waiting_requests=waiting,
            max_waiting_tokens=tokens,
            num_workers=workers,
            observe_error=self.errors.append,
            clock=self.clock,
            draw=lambda: self.draw,
        )

    def refused(self, token_counts: list[int], terms: QueuePolicy | None = None) -> Overloaded | None:
        """Try to admit a request. Return the error if it is rejected, None if it is admitted."""
        try:
            self.admission.admit(token_counts, terms)
        except Overloaded as refusal:
            return refusal
        return None

    def seconds_refused(self, token_counts: list[int], terms: QueuePolicy | None = None) -> float:
        refusal = self.refused(token_counts, terms)
        assert refusal is not None
        return refusal.retry_after_seconds

    def begin_and_end(self, num_tokens: int, tenant: str = "") -> None:
        self.admission.started(num_tokens, tenant)
        self.admission.ended(tenant)

    def work(self, num: int, *, seconds: float, num_tokens: int = 10) -> None:
        """Repeat `num` times: after `seconds`, a running choice ends, the next begins, and a new one is queued."""
        for _ in range(num):
            self.clock.now += seconds
            self.begin_and_end(num_tokens)
            self.admission.admit([num_tokens])
