"""Conversations of a corpus: turns of a record, and their token ids with a loss mask."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from model.chat.chatml import END, ROLES, START
from model.tokenizer.interface import Tokenizer

_SPEAKERS = {"U": "user", "S": "assistant", "system": "system"}  # of corpus records


class Turn(NamedTuple):
    """One message: role (`system`, `user` or `assistant`) and text."""

    role: str
    text: str


def transcript(turns: Sequence[Sequence[str]]) -> str:
    """Return the turns of a record as text: a line per turn, after the speaker's role."""
    return "\n".join(f"{_SPEAKERS[speaker].capitalize()}: {text.strip()}" for speaker, text in turns)


def conversation(turns: Sequence[Sequence[str]]) -> tuple[Turn, ...]:
    """Return a record's turns as a conversation; empty if it has no question with an answer.

    The user is first, optionally after a system message, and the assistant is last. Consecutive messages of one role
    are joined. No text is empty, or starts or ends with white space.
    """
    spoken = [(_SPEAKERS[speaker], text.strip()) for speaker, text in turns if text.strip()]
    joined = [Turn(role, " ".join(text for _, text in said)) for role, said in groupby(spoken, lambda pair: pair[0])]
    first = 1 if joined and joined[0].role == "system" else 0
    if len(joined) > first and joined[first].role == "assistant":
        del joined[first]
    while joined and joined[-1].role != "assistant":
        joined.pop()
    return tuple(joined)


def encode_conversation(tokenizer: Tokenizer, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and its loss mask.

    The ids are those of the rendered chat template, so that training and serving see the same context. The BOS token is
    appended at the end. Targets are the assistant's messages and the `<|im_end|>` after each. Message texts never
    become special tokens.

    Raises:
        KeyError: the tokenizer has no ChatML tokens.
        ValueError: the tokenizer has no BOS token, or a role is not in `model.chat.chatml.ROLES`.
        TokenizerError: a text cannot be encoded.
    """
    begin, start, end = tokenizer.bos_token_id, tokenizer.special_tokens[START], tokenizer.special_tokens[END]
    if begin is None:
        raise ValueError("the tokenizer has no BOS token")
    line_break = tokenizer.encode("\n")
    ids, targets = [begin], [False]
    for role, text in turns:
        if role not in ROLES:
            raise ValueError(f"the role {role!r} is not one of {', '.join(ROLES)}")
        head, said = tokenizer.encode(f"{role}\n"), tokenizer.encode(f"{role}\n{text}")
        ids += [start, *said, end, *line_break]
        if role == "assistant":
            # A text that starts with line breaks may share a token with the head. A generation prompt never ends with
            # this token, so it is a target.
            num_head = next((i for i, (a, b) in enumerate(zip(head, said, strict=False)) if a != b), len(head))
            targets += [False] * (1 + num_head) + [True] * (len(said) - num_head + 1) + [False] * len(line_break)
        else:
            targets += [False] * (len(said) + 2 + len(line_break))
    return [*ids, begin], [*targets, False]
