"""Requests of the fault suite: the kinds in turn, each request with its own prompt, length and seed."""

import random
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

TEXT, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_TALES = Path(__file__).parents[2] / "loadtest" / "client" / "tales.txt"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 60}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}
_GREEDY = {"temperature": 0}
_DRAWN = {"temperature": 1.0, "top_p": 0.95}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, _GREEDY),
    "sampled": (TEXT, {**_DRAWN, "ignore_eos": True, "stop": ["never to be seen"]}),
    "three samples": (TEXT, {**_DRAWN, "n": 3}),
    "logprobs": (TEXT, {**_DRAWN, "ignore_eos": True, "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
    "penalties": (TEXT, {**_GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"7": 3}}),
    "chat": (CHAT, {**_DRAWN, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}),
    "schema": (CHAT, {**_DRAWN, "response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
    "best of three": (TEXT, {**_DRAWN, "best_of": 3, "n": 2}),
    "embeddings": (EMBEDDINGS, {}),
}


@dataclass(frozen=True, slots=True)
class Question:
    """Request without the fields that choose streaming. Equal requests have equal responses."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def may_stream(self) -> bool:
        return self.kind not in ("best of three", "embeddings")


def questions(seed: int, number: int) -> list[Question]:
    """Return `number` requests, which depend on the seed only."""
    return [
        _question(kind, random.Random(f"{seed} {place}")) for place, kind in enumerate(islice(cycle(_KINDS), number))
    ]


def _question(kind: str, choose: random.Random) -> Question:
    path, fields = _KINDS[kind]
    prompt = _passage(choose)
    if path == EMBEDDINGS:
        return Question(kind, path, {"input": [prompt, _passage(choose)]})
    length = {"max_tokens": choose.randint(20, 120), "seed": choose.randrange(2**32), "return_token_ids": True}
    if path == TEXT:
        return Question(kind, path, {"prompt": prompt, **length, **fields})
    if kind == "schema":
        # One of 1,000 schemas, so that most requests compile a grammar that is not cached.
        schema = {**_SCHEMA, "description": f"number {choose.randrange(1000)}"}
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        fields = {**fields, "response_format": asked, "max_tokens": 200}
    return Question(kind, path, {"messages": [{"role": "user", "content": prompt}], **length, **fields})


def _passage(choose: random.Random) -> str:
    """Return 20 to 300 characters of a tale. A third of the passages begin at the same place, as a shared prefix."""
    text = _TALES.read_text(encoding="utf-8")
    begin = 0 if choose.random() < 1 / 3 else choose.randrange(len(text) - 300)
    return text[begin : begin + choose.randint(20, 300)]
