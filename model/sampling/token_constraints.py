"""State of a completion's token rules (penalties, forbidden words), updated with each sampled token. Torch-free."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from model.sampling.params import SamplingParams

Ids = NDArray[np.int64]


class TokenRules:
    """Token rules of one completion at its current length. Appending a token takes the same time at any length."""

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], completion_token_ids: Iterable[int] = ()
    ) -> None:
        self.params = params
        self.bias_ids: Ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        allowed_ids: Ids = np.array(params.allowed_token_ids, dtype=np.int64)
        self.allowed_ids = allowed_ids if len(allowed_ids) else None  # None: all tokens
        # Only the repetition penalty applies to the tokens of the prompt.
        self._counts = _Counts(prompt_token_ids if params.repetition_penalty != 1.0 else ())
        self._words = _Words(params.bad_word_ids)
        for token_id in completion_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Update the token rules with the next token of the completion."""
        if self.params.has_penalties:
            self._counts.add(token_id)
        self._words.recent.append(token_id)

    @property
    def counted(self) -> tuple[Ids, NDArray[np.float32]]:
        """Return the ids of tokens with penalties, and each token's count in the completion (0: only in the prompt)."""
        return self._counts.known

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Return the ids of tokens that would complete a forbidden word."""
        return self._words.last_tokens()


class _Counts:
    """Number of times that each token occurs in a completion, updated in place. Tokens of `known` begin with 0."""

    def __init__(self, known: Sequence[int]) -> None:
        listed = np.unique(np.array(known, dtype=np.int64))
        self._size = len(listed)
        self._ids = np.concatenate([listed, np.zeros(16, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._place = {token_id: place for place, token_id in enumerate(listed.tolist())}

    @property
    def known(self) -> tuple[Ids, NDArray[np.float32]]:
        return self._ids[: self._size], self._counts[: self._size]

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1


class _Words:
    """Forbidden words of a completion, as token sequences indexed by their second-to-last token."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._alone = tuple(word[0] for word in words if len(word) == 1)
        self._by_last_but_one: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_last_but_one.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))
        self.recent: deque[int] = deque(maxlen=max((len(word) - 1 for word in words), default=0))

    def last_tokens(self) -> tuple[int, ...]:
        candidates = self._by_last_but_one.get(self.recent[-1]) if self.recent else None
        if candidates is None:
            return self._alone
        recent = tuple(self.recent)
        return (*self._alone, *(last for begun, last in candidates if recent[-len(begun) :] == begun))
