"""Preparation of chat training data: make JSON lines with "turns" from a corpus by fixed rules and wordings.toml.

    python -m model.training.data.make_conversations story data/tinystories/train.jsonl data/chat/tinystories.jsonl

Kinds of corpus: a `story` becomes a request and the story as the reply. An article of an `encyclopedia` becomes a
question on its title and its first sentences as the reply. A `dialogue` keeps its "turns"; of a turn with several
wordings one is chosen, and placeholders such as {a} are filled. Its turns "C" are calls of tools, such as
["C", "calculator: {a} * {b}"], with the result in a turn "T". Equal corpora and counts give equal output.
"""

import argparse
import json
import lzma
import operator
import random
import re
import tomllib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from model.chat.chatml import END, START, TEMPLATE
from model.chat.template_sandbox import MAX_CHARACTERS, compile_template, render

_WORDINGS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text())
_UNFIT = frozenset(_WORDINGS["unfit"].split())
_STORY_CHARACTERS = range(150, 3600)  # the upper bound is about 900 tokens: story and request must fit 1,024 tokens
_ANSWER_CHARACTERS = 520
_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " "})
# Initials, titles and other abbreviations do not end a sentence.
_SENTENCE_END = re.compile(r"(?<!\b[A-Z].)(?<!\b(?:Dr|Mr|Ms|St|vs)\.)(?<!\bMrs\.)(?<=[.!?])\s+(?=[\"'(]?[A-Z0-9])")
_SUBJECTS = (
    re.compile(r"\b(an? (?:[a-z-]+,? (?:and )?){0,3}?[a-z-]+ (?:named|called) [A-Z][a-z]+)\b"),
    re.compile(
        r"\b[Tt]here (?:once )?(?:was|lived|were) ((?:an?|two|three|some) (?:[a-z-]+ ){0,3}?[a-z-]+)(?=[.,]| who)"
    ),
)
_DEFINES = re.compile(r"\b(is|are|was|were)\b")
_PERSON = re.compile(r"\(born\b|\bwas born\b|\([^()]*\b\d{3,4}\s?[-–]\s?[^()]*\d{3,4}\b[^()]*\)")
# Traces of removed templates and markup in a wiki dump, and letters that are not Latin.
_HOLES = re.compile(
    r'""|[\[\]{}|<>=*#_^\\]|\(\s|\s\)|\s[,.;:?!]|,[,.]|\.\.|\b(?:of|is|was|are|in|at|by|from|to|and|or|the|an?|with)[,.;:]'
    r"|[^\x20-\x7e\u00a0-\u024f\u2013\u2014\u20ac\u00a3\u00b0]"
)

_ROLES = {"U": "user", "S": "assistant", "T": "tool", "system": "system"}
_TEMPLATE = compile_template(TEMPLATE)
_MESSAGE = re.compile(rf"{re.escape(START)}(\w+)\n(.*?){re.escape(END)}\n", re.DOTALL)
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
# A user message with these may need a calculator or a clock, so a dialogue without calls does not offer them.
_MAY_NEED_TOOL = re.compile(
    r"\d|\b(time|date|days?|today|years?|hours?|clock|late|many|much|sums?|math|calculate|weather)\b"
)


def _story(record: Mapping[str, Any], rng: random.Random) -> list[list[str]]:
    """Return two turns [speaker, text]: a request for a record's story, and the story; [] if it is unsuitable."""
    lines = (" ".join(line.split()) for line in record["text"].translate(_QUOTES).splitlines())
    text = "\n".join(line for line in lines if line)
    if len(text) not in _STORY_CHARACTERS or not text[0].isupper() or text[-1] not in ".!?\"'":
        return []
    subject = next((found.group(1) for pattern in _SUBJECTS if (found := pattern.search(text[:300]))), "")
    known = {"any_story": "any", "about_story": subject, "titled_story": record.get("title")}
    weights = {"any_story": 1, "about_story": 5, "titled_story": 5}
    kinds = [kind for kind, it in known.items() if it]
    (kind,) = rng.choices(kinds, [weights[kind] for kind in kinds])
    return [["U", rng.choice(_WORDINGS[kind]).format(it=known[kind])], ["S", text]]


def _encyclopedia(record: Mapping[str, Any], rng: random.Random) -> list[list[str]]:
    """Return two turns: a question on an article's title, and its first sentences; [] if the article is unsuitable."""
    title = re.sub(r"\s*\([^)]*\)$", "", record["title"]).strip()
    lead = " ".join(record["text"].partition("\n")[0].translate(_QUOTES).split())
    clean: list[str] = []
    for sentence in _SENTENCE_END.split(lead)[: rng.choice((1, 1, 2, 3))]:
        if _HOLES.search(sentence) or sentence[-1:] not in (".", "!", "?"):
            break
        clean.append(sentence)
    answer = " ".join(clean)
    verb = _DEFINES.search(answer)
    if verb is None or len(answer) > _ANSWER_CHARACTERS or title.lower() not in answer[: len(title) + 40].lower():
        return []
    kind = "who" if _PERSON.search(answer) else "what"
    # Within a sentence a common noun has its article and no capital: "a stapler".
    article = re.match(rf"(An?|The) {re.escape(title)}", answer, re.IGNORECASE)
    lowered = title[0].lower() + title[1:]
    it = lowered if kind == "what" and f" {lowered}" in record["text"] else title
    it = f"{article.group(1).lower()} {it}" if article else it
    return [["U", rng.choice(_WORDINGS[kind]).format(it=it, is_=verb.group())], ["S", answer]]


def _dialogue(record: Mapping[str, Any], rng: random.Random) -> list[list[str]]:
    values = _values(rng)
    turns = []
    for speaker, text in record["turns"]:
        wording = text if isinstance(text, str) else rng.choice(text)
        filled = re.sub(r"\{(\w+)\}", lambda found: values[found[1]], wording)
        if speaker == "C" and filled.startswith("calculator:"):
            values["value"] = _value(filled.partition(":")[2])
        turns.append([speaker, filled])
    return turns


def _values(rng: random.Random) -> dict[str, str]:
    """Return the values of a dialogue's placeholders; {value}, the result of a sum, is not among them.

    a to d: numbers, of two digits mostly. m, n, small, part: 2 to 99. big: small + m. whole: part * n.
    """
    sizes = ((2, 10), (2, 10), (10, 100), (10, 100), (10, 100), (10, 100), (100, 1000), (100, 1000), (1000, 10_000))
    numbers = {name: rng.randrange(*rng.choice(sizes)) for name in "abcd"}
    numbers |= {name: rng.randrange(2, rng.choice((10, 30, 100))) for name in ("m", "n", "small", "part")}
    numbers["big"] = numbers["small"] + numbers["m"]
    numbers["whole"] = numbers["part"] * numbers["n"]
    hour, minute = rng.randrange(24), rng.randrange(60)
    return {name: str(number) for name, number in numbers.items()} | {
        "time": f"{hour:02d}:{minute:02d}",
        "time12": f"{hour % 12 or 12}:{minute:02d} {'AM' if hour < 12 else 'PM'}",
        "date": f"20{rng.randrange(20, 40)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}",
        **{name: rng.choice(words.split()) for name, words in _WORDINGS["fillings"].items()},
    }


def _value(expression: str) -> str:
    """Return the value of an expression such as "12 * 7", computed from left to right."""
    first, *others = expression.split()
    value: float = int(first)
    for sign, number in zip(others[::2], others[1::2], strict=True):
        value = _OPERATORS[sign](value, int(number))
    return str(int(value) if value == int(value) else round(value, 4))


def _offer_tools(turns: Sequence[Sequence[str]], kinds: Sequence[str], rng: random.Random) -> list[list[str]]:
    """Return a conversation in which tools are offered and the turns "C" are calls, as the chat template writes them.

    kinds: tools to offer, keys of the table `tools` of wordings.toml.
    """
    tools: list[dict[str, Any]] = []
    names, arguments = {}, {}
    for kind in kinds:
        known = _WORDINGS["tools"][kind]
        needs_argument = any(speaker == "C" and re.match(rf"{kind}: *\S", text) for speaker, text in turns)
        arguments[kind] = rng.choice([each for each in known["arguments"] if each or not needs_argument])
        names[kind] = rng.choice(known["names"])
        properties = {arguments[kind]: {"type": "string"}} if arguments[kind] else {}
        function = {"name": names[kind], "description": rng.choice(known["descriptions"])}
        tools.append({"function": {**function, "parameters": {"type": "object", "properties": properties}}})
    messages: list[dict[str, Any]] = []
    for speaker, text in turns:
        if speaker == "C":
            kind, _, argument = (part.strip() for part in text.partition(":"))
            call = {"name": names[kind], "arguments": {arguments[kind]: argument} if argument else {}}
            messages.append({"role": "assistant", "tool_calls": [{"function": call}]})
        else:
            messages.append({"role": _ROLES[speaker], "content": text})
    variables = {"messages": messages, "tools": tools, "add_generation_prompt": False}
    text = render(_TEMPLATE, variables, max_characters=MAX_CHARACTERS)
    speakers = {role: speaker for speaker, role in _ROLES.items()}
    return [[speakers[role], content] for role, content in _MESSAGE.findall(text)]


_KINDS = {"story": _story, "encyclopedia": _encyclopedia, "dialogue": _dialogue}


def make(kind: str, record: Mapping[str, Any], seed: int) -> list[list[str]]:
    """Return the turns [speaker, text] of the conversation made from a record; [] if the record is unsuitable.

    The seed selects the wording, and whether a system message, hurried typing or tools without use are added.
    """
    rng = random.Random(f"{seed} {kind} {json.dumps(record)[:500]}")
    turns = _KINDS[kind](record, rng)
    words = re.findall(r"[a-z]+", " ".join(text for _, text in turns).lower())
    if not turns or not _UNFIT.isdisjoint(words):
        return []
    if rng.random() < 0.15:  # hurried typing: no capital at the start, no full stop
        asked = turns[0][1]
        turns[0][1] = asked[0].lower() + (asked[1:].rstrip(".!?") or asked[1:])
    # Many clients send a system message or tools by default, so the model must know them.
    if rng.random() < 0.1:
        turns = [["system", rng.choice(_WORDINGS["system"])], *turns]
    called = {text.partition(":")[0] for speaker, text in turns if speaker == "C"}
    asked = " ".join(text for speaker, text in turns if speaker == "U").lower()
    if kinds := record.get("tools"):
        return _offer_tools(turns, kinds, rng)
    if called or (rng.random() < 0.05 and not _MAY_NEED_TOOL.search(asked)):
        return _offer_tools(turns, _offered(called, rng), rng)
    return turns


def _offered(called: Set[str], rng: random.Random) -> list[str]:
    """Return the kinds of tools that a conversation offers, in any order, at least those that are called."""
    known = _WORDINGS["tools"]
    kinds = [kind for kind in known if kind in called or rng.random() < known[kind]["share"]]
    rng.shuffle(kinds)
    return kinds or ["calculator"]


def main() -> None:
    """Read the command line, and write the conversations of a corpus file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=_KINDS, help="kind of the records in the corpus file")
    parser.add_argument("corpus", type=Path, help="corpus file of JSON lines, plain or .xz")
    parser.add_argument("out", type=Path, help="file of conversations to write")
    parser.add_argument(
        "--count", type=int, default=1, help="number of conversations made from each record, in different wordings"
    )
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    opener = lzma.open if flags.corpus.suffix == ".xz" else open
    with opener(flags.corpus, "rt", encoding="utf-8") as file, flags.out.open("w", encoding="utf-8") as out:
        for record in map(json.loads, file):
            for seed in range(1, flags.count + 1):
                if turns := make(flags.kind, record, seed):
                    out.write(json.dumps({"turns": turns}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
