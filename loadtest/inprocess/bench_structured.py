"""Benchmark of libraries that compute token masks: llguidance, which Kvasir uses, and xgrammar if it is installed.

python -m loadtest.inprocess.bench_structured

Times are CPU time, which other load on the machine affects little. A document is made by sampling each token
uniformly from the tokens that the mask allows. This reaches rarer grammar states than a trained model does.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import lzma
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from model.structured_output.grammar import Vocabulary, compile_grammar, json_grammar
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer
from model.tokenizer.openai_files import load_published_ranks

_ROOT = Path(__file__).resolve().parent.parent.parent
_SMALL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_REGEX = r"[A-Z][a-z]{2,12}( [a-z]{1,12}){3,9}\."
_MAX_TOKENS = 256


class Library(Protocol):
    """Token-mask library, prepared for one vocabulary."""

    def compile(self, kind: str, text: str) -> Any:
        """Compile a grammar. `kind` is schema or regex."""

    def begin(self, grammar: Any) -> Any:
        """Return a matcher at the start of a document."""

    def fill(self, matcher: Any) -> NDArray[np.uint8]:
        """Return the mask: eight tokens per byte, the first in the lowest bit."""

    def take(self, matcher: Any, token_id: int) -> bool:
        """Advance the matcher by a token. Return True if the document may continue."""


class LLGuidance:
    """Adapter of https://github.com/guidance-ai/llguidance."""

    def __init__(self, tokens: list[bytes], eos: int) -> None:
        self._vocabulary = Vocabulary(tokens, [], [eos]).for_masks()

    def compile(self, kind: str, text: str) -> Any:
        if kind == "schema":
            return compile_grammar(self._vocabulary, json_grammar(json.loads(text)))
        return compile_grammar(self._vocabulary, LLMatcher.grammar_from_regex(text))

    def begin(self, grammar: Any) -> Any:
        return grammar.deep_copy()

    def fill(self, matcher: Any) -> NDArray[np.uint8]:
        return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)

    def take(self, matcher: Any, token_id: int) -> bool:
        assert matcher.consume_token(token_id)
        return not matcher.is_stopped()


class XGrammar:
    """Adapter of https://github.com/mlc-ai/xgrammar."""

    def __init__(self, tokens: list[bytes], eos: int) -> None:
        self._module = module = importlib.import_module("xgrammar")
        info = module.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[eos])
        self._compiler = module.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._size = len(tokens)

    def compile(self, kind: str, text: str) -> Any:
        return self._compiler.compile_json_schema(text) if kind == "schema" else self._compiler.compile_regex(text)

    def begin(self, grammar: Any) -> Any:
        matcher = self._module.GrammarMatcher(grammar, terminate_without_stop_token=True)
        return matcher, self._module.allocate_token_bitmask(1, self._size)

    def fill(self, matcher: Any) -> NDArray[np.uint8]:
        matcher[0].fill_next_token_bitmask(matcher[1])
        mask: NDArray[np.uint8] = matcher[1].numpy().view(np.uint8)[0]
        return mask

    def take(self, matcher: Any, token_id: int) -> bool:
        assert matcher[0].accept_token(token_id)
        return not matcher[0].is_terminated()


LIBRARIES: dict[str, Callable[[list[bytes], int], Library]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


@dataclass(frozen=True, kw_only=True, slots=True)
class Masks:
    """Microseconds per mask, and the number of completed documents."""

    median: float
    p99: float
    largest: float
    num_complete: int


def large_schema(num_objects: int = 40, num_fields: int = 10) -> dict[str, Any]:
    """Return an object of objects with fields of several types: about 40 KB of JSON Schema."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 20},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "boolean"},
        {"enum": ["north", "east", "south", "west"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{1,8}$"}]},
    ]
    objects = {
        f"part_{i}": {
            "type": "object",
            "properties": {f"field_{i}_{j}": kinds[(i + j) % len(kinds)] for j in range(num_fields)},
            "required": [f"field_{i}_{j}" for j in range(0, num_fields, 2)],
            "additionalProperties": False,
        }
        for i in range(num_objects)
    }
    return {"type": "object", "properties": objects, "required": [*objects], "additionalProperties": False}


def measure_masks(library: Library, grammar: Any, *, eos: int, num_documents: int, seed: int = 0) -> Masks:
    """Sample random documents and time each mask."""
    rng = random.Random(seed)
    times: list[float] = []
    num_complete = 0
    for _ in range(num_documents):
        matcher = library.begin(grammar)
        for _ in range(_MAX_TOKENS):
            began = time.process_time()
            mask = library.fill(matcher)
            times.append(1e6 * (time.process_time() - began))
            token_id = int(rng.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little"))))
            if token_id == eos or not library.take(matcher, token_id):
                num_complete += 1
                break
    return Masks(
        median=statistics.median(times),
        p99=float(np.quantile(times, 0.99)),
        largest=max(times),
        num_complete=num_complete,
    )


def import_cost(name: str) -> str:
    """Return CPU seconds and MiB of a fresh process that imports the library, and whether torch was imported too."""
    code = (
        "import resource, sys, time\n"
        f"import {name}\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(f'{time.process_time():.2f} s, {usage.ru_maxrss / 1024:.0f} MiB' "
        "+ (', torch with it' if 'torch' in sys.modules else ''))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def vocabularies() -> list[Tokenizer]:
    """Return the shipped model's tokenizer and OpenAI's largest."""
    packed = (_ROOT / "tests/data/tokenizers/o200k_base.tiktoken.xz").read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "o200k_base.tiktoken"
        path.write_bytes(lzma.decompress(packed))
        largest = load_published_ranks(path)
    return [load_tokenizer(_ROOT / "checkpoints/kvasir-9m"), largest]


def _processor_ms(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def _rows(name: str, tokens: list[bytes], eos: int, arguments: argparse.Namespace) -> list[str]:
    library = LIBRARIES[name](tokens, eos)
    grammars = {
        "any object": ("schema", json.dumps({"type": "object"})),
        "small schema": ("schema", json.dumps(_SMALL)),
        "large schema": ("schema", json.dumps(large_schema())),
        "regex": ("regex", _REGEX),
    }
    rows = []
    for title, (kind, text) in grammars.items():
        compile_ms = _processor_ms(lambda: library.compile(kind, text), arguments.repeats)  # noqa: B023
        grammar = library.compile(kind, text)
        masks = measure_masks(library, grammar, eos=eos, num_documents=arguments.documents)
        cells = [
            f"{compile_ms:.2f}",
            f"{masks.median:.0f}",
            f"{masks.p99:.0f}",
            f"{masks.largest:.0f}",
            f"{masks.num_complete}/{arguments.documents}",
        ]
        rows.append(f"| {name} | {len(tokens):,} | {title} | " + " | ".join(cells) + " |")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.inprocess.bench_structured", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="compilations per grammar (default: 7)")
    parser.add_argument("--documents", type=int, default=20, metavar="N", help="documents per grammar (default: 20)")
    arguments = parser.parse_args(argv)
    found = [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    for name in found:
        print(f"{name} {importlib.metadata.version(name)}: import {import_cost(name)}")
    print("\n| library | vocabulary | grammar | compile, ms | mask, µs: median | p99 | max | complete |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for tokenizer in vocabularies():
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        for name in found:
            for row in _rows(name, tokens, tokenizer.eos_token_ids[0], arguments):
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
