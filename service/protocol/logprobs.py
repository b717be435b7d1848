"""Logprobs in the formats of OpenAI's completions, OpenAI's chat completions, and vLLM's prompt logprobs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.tokenizer.interface import Tokenizer
from model.tokenizer.stream import StreamDecoder
from service.ipc.messages import TokenLogprob
from service.protocol.chat_responses import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from service.protocol.responses import Logprobs, PromptLogprob, PromptLogprobs

# JSON has no minus infinity. This is the value that OpenAI's API uses instead.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """Format options of logprobs.

    num_top: number of alternatives per token. The engine may have returned more.
    names_are_ids: name each token "token_id:N" instead of by its text.
    """

    tokenizer: Tokenizer
    num_top: int
    names_are_ids: bool = False

    def name(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}" if self.names_are_ids else format_token_name(self.tokenizer, token_id)

    def top(self, entry: TokenLogprob) -> Iterator[tuple[int, float]]:
        """Return the most likely tokens with their logprobs; minus infinity becomes a number for JSON."""
        return ((token_id, max(value, _IMPOSSIBLE)) for token_id, value in entry.top[: self.num_top])


class LogprobWriter:
    """Incremental writer of one completion's logprobs. Counts the characters before each token (`text_offset`)."""

    def __init__(self, wording: Wording) -> None:
        self._wording = wording
        self._decoder = StreamDecoder(wording.tokenizer)
        self._num_characters = 0

    def write(self, entries: Sequence[TokenLogprob], *, prompt: Sequence[TokenLogprob] = ()) -> Logprobs:
        """Return the logprobs of the next tokens.

        Args:
            prompt: entries of the prompt's tokens, which come first. The completion does not continue an incomplete
                character at the end of the prompt.
        """
        written = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if prompt:
            self._append(written, prompt)
            self._num_characters += len(self._decoder.flush())
            self._decoder = StreamDecoder(self._wording.tokenizer)
        self._append(written, entries)
        return written

    def _append(self, written: Logprobs, entries: Sequence[TokenLogprob]) -> None:
        for entry in entries:
            name = self._wording.name(entry.token_id)
            logprob = None if entry.logprob is None else max(entry.logprob, _IMPOSSIBLE)
            written.tokens.append(name)
            written.token_logprobs.append(logprob)
            written.top_logprobs.append(None if logprob is None else self._top(entry, name, logprob))
            written.text_offset.append(self._advance(entry.token_id))

    def _advance(self, token_id: int) -> int:
        """Count a token's characters; return the character offset of its beginning.

        A token of whole characters also flushes an incomplete character before it. That character belongs to the
        earlier tokens.
        """
        before = self._num_characters
        self._num_characters += len(self._decoder.push([token_id]))
        text = _whole_text(self._wording.tokenizer, token_id)
        return before if text is None else self._num_characters - len(text)

    def _top(self, entry: TokenLogprob, name: str, logprob: float) -> dict[str, float]:
        """Return the most likely tokens, and the token itself with exactly its reported logprob."""
        top = {self._wording.name(token_id): value for token_id, value in self._wording.top(entry)}
        return top | {name: logprob}


def chat_logprobs(entries: Sequence[TokenLogprob], wording: Wording) -> ChatLogprobs:
    """Return the logprobs of a chat completion, or of one chunk of it."""
    content = [
        ChatTokenLogprob(
            token=wording.name(entry.token_id),
            logprob=_IMPOSSIBLE if entry.logprob is None else max(entry.logprob, _IMPOSSIBLE),
            bytes=_bytes(wording.tokenizer, entry.token_id),
            top_logprobs=[
                ChatTopLogprob(token=wording.name(i), logprob=value, bytes=_bytes(wording.tokenizer, i))
                for i, value in wording.top(entry)
            ],
        )
        for entry in entries
    ]
    return ChatLogprobs(content=content)


def prompt_logprobs(entries: Sequence[TokenLogprob], wording: Wording) -> PromptLogprobs:
    """Return the logprobs of a prompt's tokens, each with the most likely tokens at its position."""
    written: PromptLogprobs = []
    for entry in entries:
        if entry.logprob is None or entry.rank is None:
            written.append(None)
            continue
        own = PromptLogprob(
            logprob=max(entry.logprob, _IMPOSSIBLE), rank=entry.rank, decoded_token=wording.name(entry.token_id)
        )
        others = {
            token_id: PromptLogprob(logprob=value, rank=rank, decoded_token=wording.name(token_id))
            for token_id, value, rank in _ranked(wording.top(entry))
        }
        written.append({entry.token_id: own, **others})
    return written


def format_token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, a special token's name, or `bytes:\\xNN` if its bytes are not whole characters."""
    text = _whole_text(tokenizer, token_id)
    if text is None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))
    return text or tokenizer.format_token_name(token_id)


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text that `echo` returns for a prompt of token ids. Special tokens have no text."""
    decoder = StreamDecoder(tokenizer)
    return decoder.push(token_ids) + decoder.flush()


def _ranked(top: Iterator[tuple[int, float]]) -> Iterator[tuple[int, float, int]]:
    """Yield (token id, logprob, rank). A rank is one more than the number of more likely tokens."""
    rank, previous = 0, float("nan")
    for number, (token_id, value) in enumerate(top, 1):
        if value != previous:
            rank, previous = number, value
        yield token_id, value, rank


def _bytes(tokenizer: Tokenizer, token_id: int) -> list[int] | None:
    return list(tokenizer.token_bytes(token_id)) or None


def _whole_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """Return a token's text, empty for a special token; None if its bytes are not whole characters."""
    try:
        return tokenizer.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return None
