"""Which tokens may come next, by a grammar: llguidance's token masks over any of our vocabularies. Torch-free.

A grammar is what llguidance takes: Lark's notation, or JSON around a schema (`{"grammars": [{"json_schema": …}]}`). It
speaks of bytes, and a vocabulary is to it a list of what each token adds to a text, so that it serves every tokenizer
we have. Control marks have no text and are never allowed, but for the ends of text where the grammar is complete.

Limits keep a grammar, and each mask, from taking the machine: `LIMITS`. They do not bound everything (a
`multipleOf` of a million compiles for over 10 s), so a stranger's grammar is first compiled where it can be ended; see
`service.structured`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from model.tokenizer.interface import Tokenizer, TokenizerError

_LONGEST_REASON = 300
_INDENTATION = 4  # of a regular expression in a message

# The library's measure of work, and about what it comes to (its documentation): 20 ms for the lexer of a grammar, 15 ms
# a mask, 100 MB of states a grammar.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar cannot be used. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message)[:_LONGEST_REASON])


def _one_line(message: str) -> str:
    """The library draws an arrow under a line of the grammar; of a regular expression it names the place only so."""
    if message.startswith("panic"):
        return "the library cannot compile it; it is too large, most likely"
    if "coerce_one_of" in message:
        return "oneOf whose branches may overlap cannot be enforced; anyOf can"
    if message.startswith("NoExtension"):
        return "this model's vocabulary cannot spell it"
    lines = [line for line in message.splitlines() if line.strip()] or ["it cannot be used"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if reason is None:
        return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", lines[0].strip())
    arrow = next((line for line in lines if set(line.strip()) == {"^"}), None)
    place = "" if arrow is None else f" at character {len(arrow) - len(arrow.lstrip()) - _INDENTATION}"
    return f"not a regular expression: {reason}{place}"


class Vocabulary:
    """A vocabulary in llguidance's terms.

    Args:
        token_bytes: what each token adds to a text; nothing for marks.
        mark_ids: the control marks.
        eos_token_ids: those of them that end a text. Where there are none, an id beyond the vocabulary stands for the
            end, which cannot be drawn.
        tokenizer: tells how it would write a text that the grammar leaves no choice about; None writes the longest
            token that fits, again and again.
    """

    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        mark_ids: Iterable[int],
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.size = len(token_bytes)
        self.eos_token_ids = tuple(eos_token_ids) or (self.size,)
        self.eos_token_id = self.eos_token_ids[0]
        self.tokens = [*token_bytes, *([] if eos_token_ids else [b""])]
        self.special_token_ids = sorted({*mark_ids, *self.eos_token_ids})
        self._tokenizer = tokenizer
        marks = set(self.special_token_ids)
        self._id_of = {token: number for number, token in enumerate(self.tokens) if token and number not in marks}
        self._longest = max(map(len, self._id_of), default=1)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """A tokenizer's."""
        token_bytes = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        return cls(token_bytes, tokenizer.special_tokens.values(), tokenizer.eos_token_ids, tokenizer)

    def for_masks(self) -> LLTokenizer:
        """The library's form of it, which takes about a second for 200,000 tokens."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=list(self.eos_token_ids))

    def __call__(self, text: bytes) -> list[int]:
        """Ids whose bytes are this text, as far as there are such."""
        if self._tokenizer is not None:
            try:
                ids = self._tokenizer.encode(text.decode())
            except (UnicodeDecodeError, TokenizerError):
                return self._longest_first(text)
            # Some tokenizers put a space before a text, or write it in normal form.
            if b"".join(map(self._tokenizer.token_bytes, ids)) == text:
                return ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token_id := self._id_of.get(text[start:end])) is not None:
                    ids.append(token_id)
                    start = end
                    break
            else:
                break  # no token has this byte, so that no document gets here
        return ids


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a document. Copies of it (`deep_copy`) share what was compiled.

    Raises:
        GrammarError: it is no grammar, uses what is not supported, or is over a limit.
    """
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


def json_grammar(schema: Mapping[str, object] | bool, *, lenient: bool = False) -> str:
    r"""The grammar of JSON documents by a schema.

    Between two marks of a document only what a printer would put there is allowed, a space or a line end with its
    indentation: a model could otherwise go on with them for ever. A text is written in one way only, with no
    `\u0061` for `a`: as a key it would pass for one that the schema does not name.

    Args:
        lenient: pass over keywords that cannot be enforced, instead of refusing them.

    Raises:
        GrammarError: the schema nests too deeply, or has too large a number.
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
# The letters that may follow a backslash in a text.
ESCAPES = 'nrbtf"\\'
