"""Training conversations have the token ids of the served chat template, and only assistant messages are targets."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.chat.chatml import END, ROLES, START, TEMPLATE
from model.chat.template import ChatTemplate
from model.training.data import conversations
from model.training.data.bpe import END_OF_TEXT
from model.training.data.conversations import ConversationKind, Turn, conversation, encode_conversation
from tests.chatml_model import chatml_tokenizer

TOKENIZER = chatml_tokenizer()
GREETINGS = Path(conversations.__file__).with_name("greetings.jsonl")
STORIES = Path(__file__).parents[2] / "data" / "tinystories_valid.jsonl.xz"
TEXTS = st.text() | st.text(st.sampled_from(" \n\r\ta.<|im_end|>😀é"))
TURNS = st.lists(st.builds(Turn, st.sampled_from(ROLES), TEXTS), min_size=1, max_size=4)


def messages(turns: list[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def prompt(turns: list[Turn], *, add_generation_prompt: bool) -> list[int]:
    template = ChatTemplate(source=TEMPLATE, origin="", special_tokens={"bos_token": END_OF_TEXT})
    text = template.render(messages(turns), add_generation_prompt=add_generation_prompt)
    return TOKENIZER.encode(text, parse_special=True)


def has_marks(turns: list[Turn]) -> bool:
    return any(mark in turn.text for turn in turns for mark in TOKENIZER.special_tokens)


@given(TURNS.filter(lambda turns: not has_marks(turns)))
def test_the_ids_are_those_of_the_template(turns: list[Turn]) -> None:
    ids, targets = encode_conversation(TOKENIZER, turns)
    assert ids == [*prompt(turns, add_generation_prompt=False), TOKENIZER.bos_token_id]
    assert len(targets) == len(ids)


@given(TURNS.filter(lambda turns: not has_marks(turns)), TEXTS.map(str.strip).filter(lambda text: "<|" not in text))
def test_what_stands_before_an_answer_is_the_generation_prompt(turns: list[Turn], answer: str) -> None:
    asked = prompt(turns, add_generation_prompt=True)
    ids, targets = encode_conversation(TOKENIZER, [*turns, Turn("assistant", answer)])
    assert ids[: len(asked)] == asked
    assert targets[len(asked) - 1 : len(asked) + 1] == [False, True]
    learned = [token for token, target in zip(ids[len(asked) :], targets[len(asked) :], strict=True) if target]
    assert learned == [*TOKENIZER.encode(answer), TOKENIZER.special_tokens[END]]


@given(TURNS)
def test_only_answers_and_their_ends_are_learned(turns: list[Turn]) -> None:
    ids, targets = encode_conversation(TOKENIZER, turns)
    learned = TOKENIZER.decode(token for token, target in zip(ids, targets, strict=True) if target)
    said = [turn.text for turn in turns if turn.role == "assistant"]
    if not any(text.lstrip(" \t") != text.lstrip() for text in said):  # these share a token with the text before them
        assert learned == "".join(f"{text}{END}" for text in said).encode("utf-8", "replace").decode()
    assert not targets[-1]


@given(TURNS)
def test_a_text_never_becomes_a_mark(turns: list[Turn]) -> None:
    ids, _ = encode_conversation(TOKENIZER, turns)
    counts = {name: ids.count(token) for name, token in TOKENIZER.special_tokens.items()}
    assert counts == {END_OF_TEXT: 2, START: len(turns), END: len(turns)}


def test_a_conversation_needs_its_marks_and_known_roles() -> None:
    with pytest.raises(ValueError, match="role 'tool' is not one of system, user, assistant"):
        encode_conversation(TOKENIZER, [Turn("tool", "x")])


DIALOGUE = {"turns": [["S", "Welcome."], ["U", "I am "], ["U", "hungry."], ["S", " "], ["S", "Eat."], ["U", "Thanks."]]}


def talk(record: dict[str, Any], kind: str, seed: int = 0) -> list[tuple[str, str]]:
    """Make a conversation without a system message, which some conversations have."""
    turns = conversation(record, kind, seed)
    assert turns is not None
    return [(turn.role, turn.text) for turn in turns if turn.role != "system"]


def test_a_dialogue_begins_with_the_user_and_alternates() -> None:
    assert talk(DIALOGUE, "dialogue") == [("user", "I am hungry."), ("assistant", "Eat.")]


def test_a_dialogue_without_an_answer_is_none() -> None:
    assert conversation({"turns": [["U", "Hello?"]]}, "dialogue", 0) is None
    assert conversation({"turns": [["S", "Hello."]]}, "dialogue", 0) is None


def test_some_conversations_have_a_system_message_and_it_comes_first() -> None:
    made = [conversation(DIALOGUE, "dialogue", seed) for seed in range(200)]
    roles = [[turn.role for turn in turns] for turns in made if turns is not None]
    with_system = [row for row in roles if "system" in row]
    assert 5 < len(with_system) < 60
    assert all(row[0] == "system" and row.count("system") == 1 for row in with_system)


def test_the_same_seed_makes_the_same_conversation_and_others_make_others() -> None:
    record = {"text": lzma.decompress(STORIES.read_bytes()).decode().splitlines()[0]}
    record = json.loads(record["text"])
    assert conversation(record, "story", 5) == conversation(dict(record), "story", 5)
    assert len({conversation(record, "story", seed) for seed in range(50)}) > 25


def test_the_small_talk_of_the_repository_can_be_learned() -> None:
    """Every line makes a well-formed conversation, and all wordings of a line differ."""
    records = [json.loads(line) for line in GREETINGS.read_text().splitlines()]
    assert len(records) > 500
    for record in records:
        turns = conversation(record, ConversationKind.GREETINGS, 1)
        assert turns is not None
        spoken = [turn for turn in turns if turn.role != "system"]
        assert [turn.role for turn in spoken] == ["user", "assistant"] * (len(spoken) // 2)
        assert len(spoken) == len(record["turns"])
        assert all(turn.text == turn.text.strip() != "" for turn in turns)
    asked = {talk(record, "greetings", seed)[0][1] for record in records[:100] for seed in range(20)}
    assert {"Who are you?", "What can you do?", "who are you"} <= asked


def test_stories_become_requests_and_answers() -> None:
    records = [json.loads(line) for line in lzma.decompress(STORIES.read_bytes()).decode().splitlines()]
    made = [conversation(record, "story", 3) for record in records]
    asked = {turn.text for turns in made if turns is not None for turn in turns if turn.role == "user"}
    assert sum(turns is not None for turns in made) > 0.9 * len(records)
    assert len(asked) > 0.7 * len(records)
    for record, turns in zip(records, made, strict=True):
        if turns is not None:
            answers = [turn.text for turn in turns if turn.role == "assistant"]
            assert any(answer in record["text"] for answer in answers)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'poem' is not a valid ConversationKind"):
        conversation({"text": "Roses are red."}, "poem", 0)
