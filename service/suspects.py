"""Who may have killed a worker: what it had begun to compute, and had told nothing of.

A death is a strike against each of these, and against nobody else. Anything told clears a suspect. Whoever has been
there twice comes back alone, so that the next death has one explanation.
"""

from collections import deque

# With so many strikes a suspect is given to the next worker apart from the others.
APART = 2
# A suspect that has so many, the last of them as the only one, is what kills.
GUILTY = 3


class Suspects:
    """The strikes against all that is unfinished, by uid."""

    def __init__(self) -> None:
        self._started: set[str] = set()  # and nothing told since
        self._strikes: dict[str, int] = {}
        self._apart: deque[str] = deque()

    def start(self, uid: str) -> None:
        """The worker begins with it."""
        self._started.add(uid)

    def clear(self, uid: str) -> None:
        """Something of it was told, or nobody waits for it any more."""
        self._started.discard(uid)
        self._strikes.pop(uid, None)
        if uid in self._apart:
            self._apart.remove(uid)

    def strike(self) -> dict[str, int]:
        """A worker died. Returns the suspects and the strikes against each."""
        suspects = {uid: self._strikes.get(uid, 0) + 1 for uid in self._started}
        self._strikes.update(suspects)
        self._started.clear()
        self._apart.clear()
        return suspects

    def keep_apart(self, uid: str) -> bool:
        """Whether it has to wait until `next_apart` names it."""
        if self._strikes.get(uid, 0) < APART:
            return False
        self._apart.append(uid)
        return True

    def next_apart(self) -> str | None:
        """Who may come back now: the first of those kept apart, while nobody is under suspicion."""
        return self._apart.popleft() if self._apart and not self._started else None
