"""Requests that repeat a trace on a model: their times, their lengths fitted into its context, and their texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from loadtest.client.requests import ConversationRequest, LaterTurn, LoadRequest
from loadtest.client.workload import Turns, Workload, WorkloadKind
from loadtest.traces.formats import BLOCK_TOKENS, RecordedConversation, RecordedRequest, Trace

_TEMPLATE_TOKENS = 32  # of a chat template, for each turn of a conversation


class Fit(StrEnum):
    """Treatment of recorded requests that are longer than the model's context."""

    CUT = "cut"  # shorten the completion to half of the context, and the prompt to the rest
    DROP = "drop"
    SCALE = "scale"  # shorten all lengths by one factor, so that the longest request fits


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests to send, in order.

    offsets: seconds from the start; None: the trace has no times. notes: clauses on what differs from the trace.
    """

    requests: Iterator[LoadRequest]
    offsets: Sequence[float] | None
    notes: Sequence[str]


def replay_of(trace: Trace, workload: Workload, fit: Fit | None = None) -> Replay:
    """Return the requests that repeat a trace, with a workload's clients, sampling and texts.

    fit: by default, a trace with hash ids is scaled, so that its prompts share as much, and other traces are cut.
    """
    notes = [f"{trace.num_unusable} without a prompt or an answer left out"] if trace.num_unusable else []
    if trace.conversations:
        chats = [_conversation(index, each, workload) for index, each in enumerate(trace.conversations)]
        short = sum(
            len(each.texts) > 2 * (1 + len(chat.later)) for each, chat in zip(trace.conversations, chats, strict=True)
        )
        notes += [f"{short} conversations ended early, at the context of the model"] if short else []
        return Replay(Turns(iter(chats)), None, notes)
    records = list(trace.requests)
    longer = [each for each in records if _fitted(each, workload) != each]
    fit = fit or (Fit.SCALE if any(each.hash_ids for each in records) else Fit.CUT)
    block = BLOCK_TOKENS
    if longer and fit is Fit.SCALE:
        need = max(each.prompt_tokens * workload.passages.overshoot + each.output_tokens for each in longer)
        block = max(1, int(BLOCK_TOKENS * workload.spec.max_context_tokens / need))
        records = [_scaled(each, block / BLOCK_TOKENS) for each in records]
        notes.append(
            f"all lengths multiplied by {block / BLOCK_TOKENS:.3g}, a block of {BLOCK_TOKENS} tokens is {block}"
        )
    elif longer:
        done = "dropped" if fit is Fit.DROP else "cut"
        notes.append(f"{len(longer)} longer than the context of {workload.spec.max_context_tokens} tokens {done}")
        records = [each for each in records if fit is not Fit.DROP or _fitted(each, workload) == each]
    fitted = [_fitted(each, workload) for each in records]
    requests = (_request(index, each, workload, block) for index, each in enumerate(fitted))
    return Replay(requests, [each.seconds for each in records], notes)


def _scaled(record: RecordedRequest, factor: float) -> RecordedRequest:
    prompt, output = (max(1, round(length * factor)) for length in (record.prompt_tokens, record.output_tokens))
    return replace(record, prompt_tokens=prompt, output_tokens=output)


def _fitted(record: RecordedRequest, workload: Workload) -> RecordedRequest:
    """Return a record that fits into the model's context: the same, or cut."""
    if record.prompt_tokens <= workload.room(record.output_tokens):
        return record
    output = min(record.output_tokens, workload.spec.max_context_tokens // 2)
    return replace(record, output_tokens=output, prompt_tokens=min(record.prompt_tokens, workload.room(output)))


def _request(index: int, record: RecordedRequest, workload: Workload, block_tokens: int) -> LoadRequest:
    """Return the request that repeats a record. Its client and its sampling are those of the workload's request."""
    plain, output = workload.request(index, WorkloadKind.FIXED), record.output_tokens
    cancel_after = None if plain.cancel_after is None else min(plain.cancel_after, max(1, output // 2))
    words, used = list[str](), 0
    for number, hash_id in enumerate(record.hash_ids, 1):
        # Words are whole, so a block's text is shorter than the block, and the next block makes up for it.
        if (rest := min(block_tokens * number, record.prompt_tokens) - used) > 0:
            text, count = workload.passages.cut_counted(hash_id, rest)
            words.append(text)
            used += count
    if record.prompt_tokens - used > (block_tokens if words else 0):
        words.append(workload.passage(index, record.prompt_tokens - used))
    return replace(plain, prompt=" ".join(words), max_tokens=output, cancel_after=cancel_after)


def _conversation(index: int, record: RecordedConversation, workload: Workload) -> ConversationRequest:
    """Return the first turn of a recorded conversation, with the later turns that fit into the model's context.

    The server's answers replace the recorded ones, with as many tokens as those have, by their number of bytes.
    """
    plain, turns, used = workload.request(index, WorkloadKind.FIXED), list[LaterTurn](), 0
    per_token = workload.passages.chars_per_token
    for text, answer in zip(record.texts[::2], record.texts[1::2], strict=True):
        prompt, output = (max(1, round(len(each.encode()) / per_token)) for each in (text, answer))
        room = workload.room(output) - used - _TEMPLATE_TOKENS
        if prompt > room:
            if turns:
                break
            output = min(output, workload.spec.max_context_tokens // 2)
            prompt = min(prompt, max(1, workload.room(output) - _TEMPLATE_TOKENS))
            text = text.encode()[: int(prompt * per_token)].decode(errors="ignore")
        turns.append(LaterTurn(text, output, workload.spec.think_seconds if turns else 0.0))
        used += prompt + output + _TEMPLATE_TOKENS
    first, *later = turns
    same = ("index", "client", "cancel_after", "bytes_per_second", "temperature", "ignore_eos", "seed")
    kept: dict[str, Any] = {name: getattr(plain, name) for name in same}
    return ConversationRequest(prompt=[first.text], max_tokens=first.max_tokens, later=later, **kept)
