"""Prompts that are cut to a length where they would be refused, as vLLM does it."""

from dataclasses import dataclass

from service.errors import InvalidRequest
from service.schemas import GenerationRequest

_AS_MANY_AS_FIT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """How many tokens of a prompt are kept, and of which end.

    num_kept: None for as many as there is room for.
    keeps_end: the last tokens are kept ("left" is the side that is cut), else the first.
    """

    num_kept: int | None
    keeps_end: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> "Truncation | None":
        """What a request asks for; None where it wants its prompts whole."""
        asked = request.truncate_prompt_tokens
        if asked is None:
            return None
        return cls(num_kept=None if asked == _AS_MANY_AS_FIT else asked, keeps_end=request.truncation_side != "right")

    def cut(self, token_ids: list[int], *, room: int, num_marks: int = 0) -> list[int]:
        """The tokens of a prompt that are kept: itself where it is no longer than that.

        Args:
            room: the most tokens a prompt may have. Where that is none, nothing is cut: no length would fit.
            num_marks: leading tokens that are not the client's, and are kept first.

        Raises:
            InvalidRequest: more tokens are to be kept than there is room for.
        """
        if room < 1:
            return token_ids
        kept = room if self.num_kept is None else self.num_kept
        if kept > room:
            raise InvalidRequest(
                f"truncate_prompt_tokens={kept} is over the {room} tokens that the context leaves for a prompt; "
                f"{_AS_MANY_AS_FIT} keeps as many as fit",
                param="truncate_prompt_tokens",
            )
        if kept >= len(token_ids):
            return token_ids
        if not self.keeps_end or kept <= num_marks:
            return token_ids[:kept]
        return token_ids[:num_marks] + token_ids[len(token_ids) - kept + num_marks :]
