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
from model.training.corpus import Turn, conversation, encode_conversation
from model.training.data import make_conversations
from model.training.data.bpe import END_OF_TEXT
from tests.chatml_model import chatml_tokenizer

TOKENIZER = chatml_tokenizer()
GREETINGS = Path(make_conversations.__file__).with_name("greetings.jsonl")
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
def test_conversations_have_the_token_ids_of_the_chat_template(turns: list[Turn]) -> None:
    ids, targets = encode_conversation(TOKENIZER, turns)
    assert ids == [*prompt(turns, add_generation_prompt=False), TOKENIZER.bos_token_id]
    assert len(targets) == len(ids)


@given(TURNS.filter(lambda turns: not has_marks(turns)), TEXTS.map(str.strip).filter(lambda text: "<|" not in text))
def test_the_tokens_before_a_reply_are_the_generation_prompt(turns: list[Turn], answer: str) -> None:
    asked = prompt(turns, add_generation_prompt=True)
    ids, targets = encode_conversation(TOKENIZER, [*turns, Turn("assistant", answer)])
    assert ids[: len(asked)] == asked
    assert targets[len(asked) - 1 : len(asked) + 1] == [False, True]
    learned = [token for token, target in zip(ids[len(asked) :], targets[len(asked) :], strict=True) if target]
    assert learned == [*TOKENIZER.encode(answer), TOKENIZER.special_tokens[END]]


@given(TURNS)
def test_only_replies_and_their_end_tokens_are_targets(turns: list[Turn]) -> None:
    ids, targets = encode_conversation(TOKENIZER, turns)
    learned = TOKENIZER.decode(token for token, target in zip(ids, targets, strict=True) if target)
    said = [turn.text for turn in turns if turn.role == "assistant"]
    if not any(text.lstrip(" \t") != text.lstrip() for text in said):  # these share a token with the text before them
        assert learned == "".join(f"{text}{END}" for text in said).encode("utf-8", "replace").decode()
    assert not targets[-1]


@given(TURNS)
def test_a_message_text_never_becomes_a_special_token(turns: list[Turn]) -> None:
    ids, _ = encode_conversation(TOKENIZER, turns)
    counts = {name: ids.count(token) for name, token in TOKENIZER.special_tokens.items()}
    assert counts == {END_OF_TEXT: 2, START: len(turns), END: len(turns)}


TURNS_OF_A_RECORD = [["S", "Welcome."], ["U", "I am "], ["U", "hungry."], ["S", " "], ["S", "Eat."], ["U", "Thanks."]]


@pytest.mark.parametrize("system", [[], [["system", "Be kind."]]])
def test_conversation_begins_with_the_user_and_alternates(system: list[list[str]]) -> None:
    turns = conversation([*system, *TURNS_OF_A_RECORD])
    assert turns[len(system) :] == (Turn("user", "I am hungry."), Turn("assistant", "Eat."))
    assert [turn.role for turn in turns[: len(system)]] == ["system"] * len(system)


def test_record_without_a_reply_yields_no_conversation() -> None:
    assert conversation([["U", "Hello?"]]) == conversation([["S", "Hello."]]) == ()


def stories() -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(STORIES.read_bytes()).decode().splitlines()]


def test_stories_become_requests_and_replies() -> None:
    made = [make_conversations.make("story", record, 3) for record in stories()]
    asked = {turns[-2][1] for turns in made if turns}
    assert sum(map(bool, made)) > 0.9 * len(made)
    assert len(asked) > 0.5 * len(made)
    for record, turns in zip(stories(), made, strict=True):
        assert not turns or "".join(turns[-1][1].split()) == "".join(record["text"].split())
    with_system = sum(turns[:1] == [["system", turns[0][1]]] for turns in made if turns)
    assert 0.02 < with_system / len(made) < 0.3


def test_equal_seeds_make_equal_conversations_and_other_seeds_other_wordings() -> None:
    record = stories()[0]
    assert make_conversations.make("story", record, 5) == make_conversations.make("story", dict(record), 5)
    assert len({str(make_conversations.make("story", record, seed)) for seed in range(50)}) > 15


ARTICLES = {
    ("Stapler", "A stapler is a machine that joins sheets. Dr. A. Smith sold a stapler."): "what is a stapler",
    ("Paul Erdős", "Paul Erdős (26 March 1913 – 20 September 1996) was a mathematician."): "who was paul erdős",
}


@pytest.mark.parametrize("article", ARTICLES, ids=lambda article: article[0])
def test_articles_become_questions_and_replies_of_their_first_sentences(article: tuple[str, str]) -> None:
    title, text = article
    made = [make_conversations.make("encyclopedia", {"title": title, "text": text}, seed) for seed in range(60)]
    assert ARTICLES[article] in {turns[-2][1].lower().rstrip("?") for turns in made}
    assert all(text.startswith(turns[-1][1]) for turns in made)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("story", {"text": "Too short."}),
        ("story", {"text": "The naked dog ran home. " * 20}),
        ("encyclopedia", {"title": "Gap", "text": "Gap is a town in , France."}),
        ("encyclopedia", {"title": "Other", "text": "A cat is an animal."}),
    ],
)
def test_unsuitable_records_are_left_out(kind: str, record: dict[str, Any]) -> None:
    assert make_conversations.make(kind, record, 1) == []


def test_greetings_are_well_formed_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "chat" / "greetings.jsonl"
    monkeypatch.setattr("sys.argv", ["make_conversations", "dialogue", str(GREETINGS), str(out), "--count", "12"])
    make_conversations.main()
    made = [conversation(json.loads(line)["turns"]) for line in out.read_text().splitlines()]
    assert len(made) > 6000
    for turns in made:
        roles = [turn.role for turn in turns if turn.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) != []
    asked = {turn.text for turns in made for turn in turns if turn.role == "user"}
    assert {"Who are you?", "What can you do?", "who are you"} <= asked
