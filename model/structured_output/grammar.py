"""Grammar-constrained decoding: llguidance's token masks over any tokenizer's vocabulary. Torch-free.

Special tokens are allowed only where a grammar names them, except end-of-text tokens where the grammar is complete.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from model.tokenizer.interface import Tokenizer, TokenizerError

_LONGEST_REASON = 300
_INDENTATION = 4  # columns before a regular expression in llguidance's messages

# In llguidance's units of work: about 20 ms for a grammar's lexer, 15 ms per mask, and 100 MB of states per grammar.
# Not all work is bounded: a `multipleOf` of a million compiles for over 10 s. So `service.structured_output` first
# compiles an untrusted grammar in a child process with a CPU time limit.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """Error of a grammar, regular expression or JSON Schema that cannot be used; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message)[:_LONGEST_REASON])


def _one_line(message: str) -> str:
    """Convert an error message of llguidance to one line for clients."""
    if message.startswith("panic"):
        return "llguidance cannot compile the grammar, probably because of its size; simplify the grammar"
    if "coerce_one_of" in message:
        return "oneOf with branches that may overlap cannot be enforced; use anyOf"
    if message.startswith("NoExtension"):
        return "this model's vocabulary lacks a token that the grammar needs"
    lines = [line for line in message.splitlines() if line.strip()] or ["the grammar cannot be used"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if reason is None:
        return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", lines[0].strip())
    # llguidance points to the position in a regular expression with an arrow below the expression.
    arrow = next((line for line in lines if set(line.strip()) == {"^"}), None)
    place = "" if arrow is None else f" at character {len(arrow) - len(arrow.lstrip()) - _INDENTATION}"
    return f"not a regular expression: {reason}{place}"


class Vocabulary:
    """Vocabulary of a tokenizer in the form that llguidance reads.

    token_bytes: bytes that each token adds to a text; for special tokens, the names by which grammars refer to them.
    eos_token_ids: ids of end-of-text tokens. If empty, an id beyond the vocabulary, which is never sampled, is used.
    tokenizer: encodes text that the grammar requires. With None, such text is split into the longest tokens.
    """

    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_token_ids: Iterable[int],
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.size = len(token_bytes)
        self.eos_token_ids = tuple(eos_token_ids) or (self.size,)
        self.eos_token_id = self.eos_token_ids[0]
        self.tokens = [*token_bytes, *([] if eos_token_ids else [b""])]
        self.special_token_ids = sorted({*special_token_ids, *self.eos_token_ids})
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, mark_ids: Iterable[int] = ()) -> "Vocabulary":
        """Return the vocabulary of a tokenizer. `mark_ids`: ordinary tokens to treat as special, such as `<think>`."""
        # llguidance does not distinguish special tokens of equal bytes.
        token_bytes = [
            tokenizer.token_bytes(i) or tokenizer.format_token_name(i).encode() for i in range(tokenizer.vocab_size)
        ]
        special = {*tokenizer.special_tokens.values(), *mark_ids}
        return cls(token_bytes, special, tokenizer.eos_token_ids, tokenizer)

    def for_masks(self) -> LLTokenizer:
        """Return llguidance's tokenizer, from which masks are computed; takes about 1 s for 200,000 tokens."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=list(self.eos_token_ids))

    def __call__(self, text: bytes) -> list[int]:
        """Return token ids whose joined bytes are this text. The ids stop before a byte that no token has."""
        if self._tokenizer is not None:
            try:
                ids = self._tokenizer.encode(text.decode())
            except (UnicodeDecodeError, TokenizerError):
                return self._longest_first(text)
            # Some tokenizers prepend a space, or normalize the text.
            if b"".join(map(self._tokenizer.token_bytes, ids)) == text:
                return ids
        return self._longest_first(text)

    @cached_property
    def _ids_by_token(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: number for number, token in enumerate(self.tokens) if token and number not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids_by_token), default=1)

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token_id := self._ids_by_token.get(text[start:end])) is not None:
                    ids.append(token_id)
                    start = end
                    break
            else:
                break  # no token has this byte, so sampled text never contains it
        return ids


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Return an llguidance matcher of a grammar, before the first token. Copies of the matcher share the grammar.

    vocabulary: result of `Vocabulary.for_masks`.

    Raises:
        GrammarError: the grammar is malformed, uses unsupported features, or exceeds a limit.
    """
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


def json_grammar(schema: Mapping[str, object] | bool, *, lenient: bool = False) -> str:
    r"""Return the grammar of the JSON documents that a schema allows, in llguidance's form.

    Whitespace is bounded, because a model could generate whitespace for ever. A string has only one spelling, without
    escapes such as `\u0061` for `a`. Otherwise an escaped spelling of a key would count as a key that the schema does
    not name.

    Args:
        lenient: ignore keywords that cannot be enforced, instead of raising an error.

    Raises:
        GrammarError: the schema nests too deeply, or contains too large a number.
    """
    try:
        return LLMatcher.grammar_from_json_schema(
            dict(schema) if isinstance(schema, Mapping) else schema,  # type: ignore[arg-type]
            overrides={"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES, "lenient": lenient},
        )
    except ValueError as error:
        message = str(error)
        raise GrammarError(
            re.sub("^Value is not JSON serializable: (.*)", r"\1 is too large a number", message)
        ) from None


# A space, or a line end and eight levels of indentation by two spaces.
WHITESPACE = r"( |\n {0,16})?"
# Characters that may follow a backslash in a JSON string.
ESCAPES = 'nrbtf"\\'
