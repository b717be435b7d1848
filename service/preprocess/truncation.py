"""Truncation of prompts by `truncate_prompt_tokens` and `truncation_side`, as in vLLM."""

from dataclasses import dataclass

from service.protocol.completions import GenerationRequest
from service.protocol.errors import InvalidRequest

_AS_MANY_AS_FIT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Truncation that a request asks for.

    num_kept: number of tokens to keep; None: as many as fit.
    keeps_end: keep the last tokens (`truncation_side` "left" names the side that is cut), else the first tokens.
    """

    num_kept: int | None
    keeps_end: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> "Truncation | None":
        """Return the truncation that a request asks for; None without truncation."""
        asked = request.truncate_prompt_tokens
        if asked is None:
            return None
        return cls(num_kept=None if asked == _AS_MANY_AS_FIT else asked, keeps_end=request.truncation_side != "right")

    def cut(self, token_ids: list[int], *, room: int, num_special_tokens: int = 0) -> list[int]:
        """Return the kept tokens of a prompt. A prompt that is short enough is returned unchanged.

        Args:
            room: maximum tokens of a prompt. If under 1, nothing is cut, since no length would fit.
            num_special_tokens: number of leading special tokens that the server added. They are kept first.

        Raises:
            InvalidRequest: `num_kept` is over `room`.
        """
        if room < 1:
            return token_ids
        kept = room if self.num_kept is None else self.num_kept
        if kept > room:
            raise InvalidRequest(
                f"truncate_prompt_tokens={kept} is over the {room} tokens that the context leaves for a prompt; "
                f"use {_AS_MANY_AS_FIT} to keep as many as fit",
                param="truncate_prompt_tokens",
            )
        if kept >= len(token_ids):
            return token_ids
        if not self.keeps_end or kept <= num_special_tokens:
            return token_ids[:kept]
        return token_ids[:num_special_tokens] + token_ids[len(token_ids) - kept + num_special_tokens :]
