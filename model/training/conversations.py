"""Conversations to learn from, made of a corpus's records, and their token ids.

A record becomes the same conversation whenever the seed is the same. Half of what is trained on is the user's wording,
so there are many wordings of each request (`story_requests`, `encyclopedia_questions`); nothing is invented beyond
them: what the assistant says stands in the record.
"""

import enum
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from model.chatml import END, ROLES, START
from model.tokenizer.interface import Tokenizer
from model.training.encyclopedia_questions import answer_questions
from model.training.sentences import casually
from model.training.story_requests import tell_story

_SPEAKERS = {"U": "user", "S": "assistant"}
# Many clients send such a message unasked; a model that never saw one would be at a loss.
_SYSTEM_SHARE = 0.1
_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are Kvasir, a small language model.",
    "You are a friendly assistant.",
    "You are a helpful and honest assistant. Answer in plain English.",
    "You are a helpful AI assistant named Kvasir.",
    "Answer the user's questions.",
    "You are a kind storyteller.",
)
# Of small talk: how often the user types without capitals and full stops.
_CASUAL_SHARE = 0.2
# Of a story or an article: how often it begins with a greeting.
_GREETING_SHARE = 0.05
_GREETINGS = ("Hello!", "Hi", "Hi!", "Hello", "Hey", "Hi there!", "Good evening!", "hello", "hi")
_GREETED = ("Hello! How can I help you?", "Hello! What would you like to hear?", "Hi! What can I do for you?")


class Turn(NamedTuple):
    """What one speaker says: role (`system`, `user` or `assistant`) and text."""

    role: str
    text: str


class ConversationKind(enum.StrEnum):
    """What the records of a source are.

    DIALOGUE: `turns`, a list of `["U" | "S", text]`, user and system; of a text that is a list one is drawn.
    GREETINGS: as DIALOGUE; small talk, sometimes typed carelessly.
    STORY: `text`, and perhaps `title`.
    ENCYCLOPEDIA: `title`, and `text` that begins with a definition.
    """

    DIALOGUE = "dialogue"
    GREETINGS = "greetings"
    STORY = "story"
    ENCYCLOPEDIA = "encyclopedia"


def conversation(record: Mapping[str, Any], kind: str, seed: int) -> tuple[Turn, ...] | None:
    """The conversation of one record; None for a record that none can be made of.

    It begins with the user, perhaps after a system message, ends with the assistant, and they take turns; no text is
    empty, or begins or ends with white space.

    Args:
        kind: one of `ConversationKind`.
        seed: another one draws another wording. It is mixed with the record, so the same may serve for all of them.

    Raises:
        ValueError: there is no such kind.
        KeyError, TypeError: the record is not of that kind.
    """
    kind = ConversationKind(kind)
    text = record["turns"][0][1] if kind in (ConversationKind.DIALOGUE, ConversationKind.GREETINGS) else record["text"]
    drawn = random.Random(f"{seed} {kind} {str(text)[:500]}")
    match kind:
        case ConversationKind.DIALOGUE | ConversationKind.GREETINGS:
            pairs = [(_SPEAKERS[who], _one_of(said, drawn)) for who, said in record["turns"]]
        case ConversationKind.STORY:
            pairs = _speak(tell_story(record["text"], record.get("title"), drawn))
        case ConversationKind.ENCYCLOPEDIA:
            pairs = _speak(answer_questions(record["title"], record["text"], drawn))
    turns = _taking_turns(pairs)
    if not turns:
        return None
    if kind is ConversationKind.GREETINGS and drawn.random() < _CASUAL_SHARE:
        turns = [Turn(role, casually(text) if role == "user" else text) for role, text in turns]
    if kind in (ConversationKind.STORY, ConversationKind.ENCYCLOPEDIA) and drawn.random() < _GREETING_SHARE:
        turns = [Turn("user", drawn.choice(_GREETINGS)), Turn("assistant", drawn.choice(_GREETED)), *turns]
    if drawn.random() < _SYSTEM_SHARE:
        turns = [Turn("system", drawn.choice(_SYSTEM_TEXTS)), *turns]
    return tuple(turns)


def encode_conversation(tokenizer: Tokenizer, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and for each whether it is a target of training.

    The ids are those of the rendered chat template, so what stands before a target is what a served model will see
    there; the mark that begins a text comes once more at the end. Targets are what the assistant says and the
    `<|im_end|>` after it. Texts never become control marks.

    Raises:
        KeyError: the tokenizer has no ChatML marks.
        ValueError: it has no mark that begins a text, or a role is none of `model.chatml.ROLES`.
        TokenizerError: a text is beyond the tokenizer's means.
    """
    begin, start, end = tokenizer.bos_token_id, tokenizer.special_tokens[START], tokenizer.special_tokens[END]
    if begin is None:
        raise ValueError("the tokenizer has no mark that begins a text")
    line_break = tokenizer.encode("\n")
    ids, targets = [begin], [False]
    for role, text in turns:
        if role not in ROLES:
            raise ValueError(f"the role {role!r} is none of {', '.join(ROLES)}")
        head, said = tokenizer.encode(f"{role}\n"), tokenizer.encode(f"{role}\n{text}")
        ids += [start, *said, end, *line_break]
        if role == "assistant":
            # A text that begins with line breaks shares a token with the head, and no generation prompt ends so.
            num_head = next((i for i, (a, b) in enumerate(zip(head, said, strict=False)) if a != b), len(head))
            targets += [False] * (1 + num_head) + [True] * (len(said) - num_head + 1) + [False] * len(line_break)
        else:
            targets += [False] * (len(said) + 2 + len(line_break))
    return [*ids, begin], [*targets, False]


def _one_of(said: str | list[str], drawn: random.Random) -> str:
    return said if isinstance(said, str) else drawn.choice(said)


def _speak(texts: Sequence[str] | None) -> list[tuple[str, str]]:
    """Texts of the user and the assistant by turns; none where there are none."""
    return [] if texts is None else [(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]


def _taking_turns(pairs: Sequence[tuple[str, str]]) -> list[Turn]:
    """The user first, the assistant last; what one says twice in a row is one message."""
    spoken = [(role, text.strip()) for role, text in pairs if text.strip()]
    turns = [
        Turn(role, " ".join(text for _, text in group)) for role, group in groupby(spoken, key=lambda pair: pair[0])
    ]
    if turns and turns[0].role != "user":
        turns = turns[1:]
    if turns and turns[-1].role != "assistant":
        turns = turns[:-1]
    return turns
