"""Log-probabilities in the shapes of OpenAI's completions, of its conversations, and of vLLM's prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.tokenizer.interface import Tokenizer
from model.tokenizer.stream import StreamDecoder
from service.chat_responses import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from service.messages import TokenLogprob
from service.responses import Logprobs, PromptLogprob, PromptLogprobs

# JSON has no minus infinity; clients know this number for it.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """How log-probabilities are told.

    num_top: alternatives to each token; the engine may have been asked for more.
    names_are_ids: a token is called "token_id:N", whatever its text.
    """

    tokenizer: Tokenizer
    num_top: int
    names_are_ids: bool = False

    def name(self, token_id: int) -> str:
        """What a token is called."""
        return f"token_id:{token_id}" if self.names_are_ids else token_name(self.tokenizer, token_id)

    def top(self, entry: TokenLogprob) -> Iterator[tuple[int, float]]:
        """The most likely tokens, in numbers that JSON has."""
        return ((token_id, max(value, _IMPOSSIBLE)) for token_id, value in entry.top[: self.num_top])


class LogprobWriter:
    """Writes one completion's log-probabilities piece by piece, keeping count of the characters before each token."""

    def __init__(self, wording: Wording) -> None:
        self._wording = wording
        self._decoder = StreamDecoder(wording.tokenizer)
        self._num_characters = 0

    def write(self, entries: Sequence[TokenLogprob], *, prompt: Sequence[TokenLogprob] = ()) -> Logprobs:
        """The next tokens' entries.

        Args:
            prompt: the tokens of a prompt that come before; an unfinished character at its end stays so.
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
        """Count a token's characters; returns where it begins.

        A token of whole characters settles what was unfinished before it: that is its predecessors' text.
        """
        before = self._num_characters
        self._num_characters += len(self._decoder.push([token_id]))
        text = _whole_text(self._wording.tokenizer, token_id)
        return before if text is None else self._num_characters - len(text)

    def _top(self, entry: TokenLogprob, name: str, logprob: float) -> dict[str, float]:
        """Alternatives by likelihood, and the token itself with the identical float."""
        top = {self._wording.name(token_id): value for token_id, value in self._wording.top(entry)}
        return top | {name: logprob}


def chat_logprobs(entries: Sequence[TokenLogprob], wording: Wording) -> ChatLogprobs:
    """The tokens of an answer, or of a piece of one."""
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
    """The tokens of a prompt, each with the most likely ones in its place."""
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


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone: its text, a special token's name, or `bytes:\\xNN` where it is not whole characters."""
    text = _whole_text(tokenizer, token_id)
    if text is None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))
    return text or tokenizer.token_name(token_id)


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text `echo` gives back for a prompt of ids: special tokens have none."""
    decoder = StreamDecoder(tokenizer)
    return decoder.push(token_ids) + decoder.flush()


def _ranked(top: Iterator[tuple[int, float]]) -> Iterator[tuple[int, float, int]]:
    """The most likely tokens with their ranks: one more than the number of those that are more likely."""
    rank, previous = 0, float("nan")
    for number, (token_id, value) in enumerate(top, 1):
        if value != previous:
            rank, previous = number, value
        yield token_id, value, rank


def _bytes(tokenizer: Tokenizer, token_id: int) -> list[int] | None:
    return list(tokenizer.token_bytes(token_id)) or None


def _whole_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """A token's text, none for a special one; None where it is not whole characters."""
    try:
        return tokenizer.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return None
