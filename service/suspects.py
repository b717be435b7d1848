"""Who may have killed a worker: what it had begun to compute, and had told nothing of.

A death is a strike against each of these, and against nobody else. Anything told clears a suspect. Whoever has been
there twice comes back alone, so that the next death has one explanation: until all of these have been tried, one after
the other, nothing begins that has not begun before.
"""

from collections import deque

# With so many strikes a suspect is given to the next worker apart from the others.
APART = 2
# A suspect that has so many, the last of them as the only one, is what kills.
GUILTY = 3


class Suspects:
    """The strikes against all that is unfinished, by uid, and who waits because of them."""

    def __init__(self) -> None:
        self._started: dict[str, None] = {}  # in this order, and nothing told since
        self._strikes: dict[str, int] = {}
        self._apart: deque[str] = deque()  # have to be tried
        self._tried: str | None = None  # the one that was let back last
        self._held: dict[str, None] = {}  # what has not begun, in order of arrival

    @property
    def are_none(self) -> bool:
        """Whether there is nobody to clear, and nobody waits."""
        return not (self._started or self._strikes or self._held or self._apart or self._tried)

    def start(self, uid: str) -> None:
        """The worker begins with it."""
        self._started[uid] = None

    def clear(self, uid: str) -> None:
        """Something of it was told, or nobody waits for it any more."""
        self._started.pop(uid, None)
        self._strikes.pop(uid, None)
        self._held.pop(uid, None)
        if uid in self._apart:
            self._apart.remove(uid)
        if self._tried == uid:
            self._tried = None

    def strike(self) -> dict[str, int]:
        """A worker died. Returns the suspects and the strikes against each."""
        suspects = {uid: self._strikes.get(uid, 0) + 1 for uid in self._started}
        self._strikes.update(suspects)
        self._started.clear()
        self._held.clear()
        self._tried = None
        self._apart = deque(uid for uid, number in self._strikes.items() if number >= APART)
        return suspects

    def keeps_back(self, uid: str, *, has_begun: bool = False) -> bool:
        """Whether it has to wait until `released` names it."""
        if uid in self._apart:
            return True
        if has_begun or not (self._apart or self._tried):
            return False
        self._held[uid] = None
        return True

    def released(self) -> list[str]:
        """Who may be given to the worker now: the next suspect while nobody is suspected; after the last one, all."""
        if self._tried or (self._apart and self._started) or not (self._apart or self._held):
            return []
        if self._apart:
            self._tried = self._apart.popleft()
            return [self._tried]
        held, self._held = self._held, {}
        return list(held)
