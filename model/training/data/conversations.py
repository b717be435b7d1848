"""Chat conversations made from corpus records, and their token ids.

Equal records and seeds give equal conversations. User messages come from many templates (`story_requests`,
`encyclopedia_questions`), so that the model does not depend on one wording. Assistant messages are taken from the
record, apart from short set phrases.
"""

import enum
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from model.chat.chatml import END, ROLES, START
from model.tokenizer.interface import Tokenizer
from model.training.data.encyclopedia_questions import answer_questions
from model.training.data.sentences import casually
from model.training.data.story_requests import tell_story

_SPEAKERS = {"U": "user", "S": "assistant"}
# Share of conversations with a system message. Many clients send one by default, so the model must know them.
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
# Share of small talk in which the user writes without capitals and full stops.
_CASUAL_SHARE = 0.2
# Share of story and article conversations that begin with a greeting.
_GREETING_SHARE = 0.05
_GREETINGS = ("Hello!", "Hi", "Hi!", "Hello", "Hey", "Hi there!", "Good evening!", "hello", "hi")
_GREETED = ("Hello! How can I help you?", "Hello! What would you like to hear?", "Hi! What can I do for you?")


class Turn(NamedTuple):
    """One message: role (`system`, `user` or `assistant`) and text."""

    role: str
    text: str


class ConversationKind(enum.StrEnum):
    """Kind of the records of a source.

    DIALOGUE: `turns`, a list of `["U" | "S", text]`, user and assistant. If text is a list, one element is sampled.
    GREETINGS: as DIALOGUE; small talk, sometimes written carelessly.
    STORY: `text`, and optionally `title`.
    ENCYCLOPEDIA: `title`, and `text` that begins with a definition.
    """

    DIALOGUE = "dialogue"
    GREETINGS = "greetings"
    STORY = "story"
    ENCYCLOPEDIA = "encyclopedia"


def conversation(record: Mapping[str, Any], kind: str, seed: int) -> tuple[Turn, ...] | None:
    """Make a conversation from a record, or return None if the record is unsuitable.

    User and assistant alternate. The user is first, optionally after a system message, and the assistant is last. No
    text is empty, or starts or ends with white space.

    Args:
        kind: a value of `ConversationKind`.
        seed: selects the wording, together with the record, so one seed can serve for all records.

    Raises:
        ValueError: `kind` is unknown.
        KeyError, TypeError: the record lacks what `kind` requires.
    """
    kind = ConversationKind(kind)
    text = record["turns"][0][1] if kind in (ConversationKind.DIALOGUE, ConversationKind.GREETINGS) else record["text"]
    rng = random.Random(f"{seed} {kind} {str(text)[:500]}")
    match kind:
        case ConversationKind.DIALOGUE | ConversationKind.GREETINGS:
            pairs = [(_SPEAKERS[speaker], _one_of(said, rng)) for speaker, said in record["turns"]]
        case ConversationKind.STORY:
            pairs = _speak(tell_story(record["text"], record.get("title"), rng))
        case ConversationKind.ENCYCLOPEDIA:
            pairs = _speak(answer_questions(record["title"], record["text"], rng))
    turns = _taking_turns(pairs)
    if not turns:
        return None
    if kind is ConversationKind.GREETINGS and rng.random() < _CASUAL_SHARE:
        turns = [Turn(role, casually(text) if role == "user" else text) for role, text in turns]
    if kind in (ConversationKind.STORY, ConversationKind.ENCYCLOPEDIA) and rng.random() < _GREETING_SHARE:
        turns = [Turn("user", rng.choice(_GREETINGS)), Turn("assistant", rng.choice(_GREETED)), *turns]
    if rng.random() < _SYSTEM_SHARE:
        turns = [Turn("system", rng.choice(_SYSTEM_TEXTS)), *turns]
    return tuple(turns)


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


def _one_of(said: str | list[str], rng: random.Random) -> str:
    return said if isinstance(said, str) else rng.choice(said)


def _speak(texts: Sequence[str] | None) -> list[tuple[str, str]]:
    """Assign alternating texts to user and assistant; empty for None."""
    return [] if texts is None else [(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]


def _taking_turns(pairs: Sequence[tuple[str, str]]) -> list[Turn]:
    """Make the user first and the assistant last, and join consecutive messages of one role."""
    spoken = [(role, text.strip()) for role, text in pairs if text.strip()]
    turns = [
        Turn(role, " ".join(text for _, text in group)) for role, group in groupby(spoken, key=lambda pair: pair[0])
    ]
    if turns and turns[0].role != "user":
        turns = turns[1:]
    if turns and turns[-1].role != "assistant":
        turns = turns[:-1]
    return turns
