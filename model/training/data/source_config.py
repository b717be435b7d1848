"""Configuration of one corpus in a recipe, and the type checks of recipes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Integers: the largest seed of a generator. Other numbers: far above any useful value, and safe in float32.
_LARGEST: Mapping[object, int] = {int: 2**63 - 1, (int, float): 10**9}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One corpus: a .txt file (documents separated by blank lines) or .jsonl file, optionally .xz.

    path: the file; relative paths start at the directory of the config file.
    repeats: number of times each document occurs in an epoch of the mixture, possibly a fraction; 0 for never.
    held_out: share of the documents kept for validation, chosen by hash; 1 keeps all.
    held_out_ids: documents kept for validation by their "id", such as whole books.
    licence, attribution: for the model card.
    chat: the `ConversationKind` into which the chat phase turns a document; "" uses the plain text.
    chat_repeats: as `repeats`, for the chat phase.
    chat_draws: number of conversations, with different wordings, made from each document.
    """

    name: str
    path: Path
    repeats: float
    held_out: float
    licence: str
    held_out_ids: tuple[str, ...] = ()
    attribution: str = ""
    chat: str = ""
    chat_repeats: float = 0.0
    chat_draws: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "held_out_ids", check_texts("held_out_ids", self.held_out_ids))
        check_types(
            self,
            integers=("chat_draws",),
            numbers=("repeats", "held_out", "chat_repeats"),
            texts=("name", "licence", "attribution", "chat"),
        )
        if not 1 <= self.chat_draws <= 1000:
            raise ValueError(f"source {self.name}: chat_draws must be 1 to 1,000")
        if not 0.0 <= self.held_out <= 1.0 or not all(0 <= n <= 10_000 for n in (self.repeats, self.chat_repeats)):
            raise ValueError(
                f"source {self.name}: repeats and chat_repeats must be 0 to 10,000, held_out between 0 and 1"
            )

    @property
    def is_trained_on(self) -> bool:
        """True if the run trains on this source."""
        return self.repeats > 0 or self.chat_repeats > 0


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """Return a TOML list of strings as a tuple.

    Raises:
        ValueError: `value` is not a list of non-empty strings.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name} must be a list of non-empty strings")
    return tuple(value)


def check_types(config: object, *, integers: Sequence[str], numbers: Sequence[str], texts: Sequence[str]) -> None:
    """Reject values of a wrong type, non-finite numbers and too large numbers, with the name of the field."""
    for names, kinds, what in (
        (integers, int, "an integer"),
        (numbers, (int, float), "a number"),
        (texts, str, "a string"),
    ):
        for name in names:
            value = getattr(config, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"{name} must be {what}, not {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, not {value!r}")
            if isinstance(value, (int, float)) and abs(value) > (largest := _LARGEST[kinds]):
                raise ValueError(f"{name} must be at most {largest:,}")
