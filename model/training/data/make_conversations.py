"""Preparation of chat training data: make JSON lines with "turns" from a corpus by fixed rules and wordings.toml.

    python -m model.training.data.make_conversations story data/tinystories/train.jsonl data/chat/tinystories.jsonl

Kinds of corpus: a `story` becomes a request and the story as the reply. An article of an `encyclopedia` becomes a
question on its title and its first sentences as the reply. A `dialogue` keeps its "turns"; of a turn with several
wordings one is chosen. Equal corpora and counts give equal output.
"""

import argparse
import json
import lzma
import random
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    return [[speaker, text if isinstance(text, str) else rng.choice(text)] for speaker, text in record["turns"]]


_KINDS = {"story": _story, "encyclopedia": _encyclopedia, "dialogue": _dialogue}


def make(kind: str, record: Mapping[str, Any], seed: int) -> list[list[str]]:
    """Return the turns [speaker, text] of the conversation made from a record; [] if the record is unsuitable.

    The seed selects the wording, and whether a system message or hurried typing is added.
    """
    rng = random.Random(f"{seed} {kind} {json.dumps(record)[:500]}")
    turns = _KINDS[kind](record, rng)
    words = re.findall(r"[a-z]+", " ".join(text for _, text in turns).lower())
    if not turns or not _UNFIT.isdisjoint(words):
        return []
    if rng.random() < 0.15:  # hurried typing: no capital at the start, no full stop
        asked = turns[0][1]
        turns[0][1] = asked[0].lower() + (asked[1:].rstrip(".!?") or asked[1:])
    # Many clients send a system message by default, so the model must know them.
    return [["system", rng.choice(_WORDINGS["system"])], *turns] if rng.random() < 0.1 else turns


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
