"""Grammars in the engine: constrained sequences match their grammar, and other sequences are unaffected."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLParserLimits

from model.attention.backends import ATTENTION_BACKENDS
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from model.structured_output.grammar import GrammarError, Vocabulary, compile_grammar, json_grammar
from model.tokenizer.byte_level import ByteLevelTokenizer
from service.engine.engine import Engine
from service.engine.execution import grammar_masks
from service.engine.execution.grammar_masks import Grammars
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import FinishReason, StepStats, TokenDelta
from tests.engine.grammar_runs import TOKENIZER, ask, drive, make_engine, model
from tests.tiny_model import tiny_config

(EOS,) = TOKENIZER.eos_token_ids
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = json_grammar(SCHEMA)
REGEX = LLMatcher.grammar_from_regex(r"[a-z]{3,5}-[0-9]{2}")
CHOICE = LLMatcher.grammar_from_lark('start: "red" | "green" | "blue"')
SUMS = LLMatcher.grammar_from_lark('start: sum\nsum: number ("+" number){1,3}\nnumber: /[1-9][0-9]?/')


def test_completions_match_a_regex_a_choice_and_a_context_free_grammar() -> None:
    kinds = {"regex": REGEX, "choice": CHOICE, "sums": SUMS}
    outcomes = drive(make_engine(), [ask(f"{kind}{i}", kinds[kind], seed=i) for kind in kinds for i in range(20)])
    patterns = {"regex": r"[a-z]{3,5}-[0-9]{2}", "choice": "red|green|blue", "sums": r"[1-9]\d?(\+[1-9]\d?){1,3}"}
    for uid, outcome in outcomes.items():
        assert re.fullmatch(patterns[uid.rstrip("0123456789")], outcome.text), f"{uid}: {outcome.text!r}"
        assert outcome.reason is FinishReason.STOP
    assert len({outcome.text for outcome in outcomes.values()}) > 15


def test_masks_leave_unconstrained_sequences_unchanged() -> None:
    free = [ask(f"free{i}", None, seed=i, max_tokens=40, temperature=0.0 if i % 3 else 1.0) for i in range(8)]
    bound = [ask(f"bound{i}", [JSON, REGEX, CHOICE][i % 3], seed=i) for i in range(8)]
    together = drive(make_engine(), [submit for pair in zip(free, bound, strict=True) for submit in pair])
    for submit in free:
        expected = generate(model(), submit.prompt_token_ids, submit.params, eos_token_ids=(EOS,))
        assert together[submit.uid].token_ids == expected
    alone = {uid: outcome for submit in bound for uid, outcome in drive(make_engine(), [submit]).items()}
    for submit in bound:
        assert together[submit.uid].token_ids == alone[submit.uid].token_ids


def test_preemption_does_not_change_a_grammar_constrained_completion() -> None:
    submits = [ask(f"s{i}", JSON, seed=i, max_tokens=150) for i in range(12)]
    stats: list[StepStats] = []
    tight = drive(make_engine(num_blocks=20, block_size=8, max_num_running=12, max_batched_tokens=32), submits, stats)
    assert sum(step.num_preemptions for step in stats) > 0
    roomy = drive(make_engine(), submits)
    assert [outcome.text for outcome in tight.values()] == [outcome.text for outcome in roomy.values()]
    assert all(json.loads(outcome.text) for outcome in roomy.values())


@pytest.mark.parametrize("grammar", [JSON, CHOICE, SUMS])
def test_a_completion_resumed_after_any_token_gives_the_same_document(grammar: str) -> None:
    """After a worker crash, another worker resumes a completion from any prefix of its tokens."""
    whole = drive(make_engine(), [ask("s", grammar, seed=5)])["s"]
    engine = make_engine()
    for length in range(1, len(whole.token_ids) + 1):
        prior = whole.token_ids[:length]
        again = drive(engine, [ask(f"s{length}", grammar, seed=5, prior=prior, attempt=1)])[f"s{length}"]
        assert prior + again.token_ids == whole.token_ids
        assert whole.text.endswith(again.text)
        assert again.reason is FinishReason.STOP


def test_a_document_of_exactly_max_tokens_is_complete_and_a_longer_one_is_not() -> None:
    whole = drive(make_engine(), [ask("s", JSON, seed=1)])["s"]
    length = len(whole.token_ids)
    ends = [ask("exact", JSON, seed=1, max_tokens=length), ask("short", JSON, seed=1, max_tokens=length - 1)]
    replayed = ask("replayed", JSON, seed=1, max_tokens=length, prior=whole.token_ids, attempt=1)
    outcomes = drive(make_engine(), [*ends, replayed])
    assert (outcomes["exact"].reason, outcomes["exact"].text) == (FinishReason.STOP, whole.text)
    assert outcomes["replayed"].reason is FinishReason.STOP
    assert outcomes["short"].reason is FinishReason.LENGTH
    with pytest.raises(json.JSONDecodeError):
        json.loads(outcomes["short"].text)


def test_end_of_text_is_sampled_only_where_the_grammar_allows() -> None:
    """A completion of `[0-9]{3,}` may end after three digits: by an end-of-text token, or at `max_tokens`."""
    open_end = LLMatcher.grammar_from_regex("[0-9]{3,}")
    likely = ((EOS, 100.0),)
    outcomes = drive(
        make_engine(),
        [
            ask("ends", open_end, logit_bias=likely),
            ask("later", open_end, logit_bias=likely, min_tokens=7),
            ask("never", open_end, logit_bias=likely, ignore_eos=True, max_tokens=20),
        ],
    )
    assert re.fullmatch("[0-9]{3}", outcomes["ends"].text)
    assert outcomes["ends"].reason is FinishReason.STOP
    assert re.fullmatch("[0-9]{7}", outcomes["later"].text)
    assert re.fullmatch("[0-9]{20}", outcomes["never"].text)
    assert outcomes["never"].reason is FinishReason.LENGTH


def test_a_stop_string_cuts_a_document_and_min_tokens_does_not_extend_it() -> None:
    """A stop string ends a completion within its document. A complete document ends even before `min_tokens`."""
    outcomes = drive(
        make_engine(), [ask("stop", JSON, seed=1, stop=('"age"',)), ask("short", CHOICE, min_tokens=50, max_tokens=60)]
    )
    assert outcomes["stop"].finish is not None
    assert outcomes["stop"].finish.stop_reason == '"age"'
    assert '"name"' in outcomes["stop"].text
    assert '"age"' not in outcomes["stop"].text
    assert outcomes["short"].text in ("red", "green", "blue")
    assert outcomes["short"].reason is FinishReason.STOP


def test_grammar_and_rules_that_forbid_every_token_end_the_request() -> None:
    letters = tuple(TOKENIZER.encode("xyz"))
    outcomes = drive(make_engine(), [ask("s", CHOICE, allowed_token_ids=letters), ask("other", CHOICE, seed=3)])
    assert outcomes["s"].finish is not None
    assert outcomes["s"].reason is FinishReason.REFUSED
    assert "the grammar" in (outcomes["s"].finish.error or "")
    assert outcomes["other"].text in ("red", "green", "blue")


def test_logprobs_ignore_the_grammar() -> None:
    """Logprobs are of the distribution without masks, so a token that the grammar forces may be unlikely."""
    outcome = drive(make_engine(), [ask("s", CHOICE, logprobs=3)])["s"]
    (first, *_) = [entry for delta in outcome.deltas for entry in delta.logprobs or ()]
    assert first.token_id == outcome.token_ids[0]
    assert first.token_id not in [token_id for token_id, _ in first.top]
    free = drive(make_engine(), [ask("s", None, logprobs=3, max_tokens=1)])["s"]
    assert free.deltas[0].logprobs is not None
    assert first.top == free.deltas[0].logprobs[0].top


def test_special_tokens_are_never_sampled_under_any_grammar() -> None:
    """The API process rejects a grammar that names special tokens; the token mask is a second safeguard."""
    end = TOKENIZER.vocab_size - 1
    pairs = [bytes([first, first]) for first in range(end - 257)]
    tokenizer = ByteLevelTokenizer(
        pattern=".",
        ranks={token: rank for rank, token in enumerate([*map(bytes, zip(range(256), strict=True)), *pairs])},
        special_tokens={"<|mark|>": end - 1, "<|end|>": end},
        eos_token_ids=(end,),
        bos_token_id=None,
    )
    engine = Engine(model(), tokenizer, EngineConfig(num_blocks=200))
    either = LLMatcher.grammar_from_lark(f'start: <[{end - 1}]> | "red"')
    outcomes = drive(engine, [ask(f"s{i}", either, seed=i, logit_bias=((end - 1, 100.0),)) for i in range(5)])
    assert all(end - 1 not in outcome.token_ids for outcome in outcomes.values())
    assert "red" in {outcome.text for outcome in outcomes.values()}
    mark = LLMatcher.grammar_from_lark(f"start: <[{end - 1}]>")
    alone = drive(engine, [ask("s", mark, allowed_token_ids=(end - 1,))])["s"]
    assert alone.reason is FinishReason.REFUSED


def test_a_grammar_produces_the_visible_special_tokens_that_it_names_and_no_others() -> None:
    names = ("<|call|>", "<|done|>", "<|other|>", "<|end|>")
    ranks = {bytes([byte]): byte for byte in range(256)}
    call, done, other, end = ids = range(256, 260)
    tokenizer = ByteLevelTokenizer(
        pattern=".",
        ranks=ranks,
        special_tokens=dict(zip(names, ids, strict=True)),
        eos_token_ids=(end,),
        bos_token_id=None,
    )
    tiny = Transformer(tiny_config(tokenizer.vocab_size), ATTENTION_BACKENDS["eager"]).eval()
    engine = Engine(tiny, tokenizer, EngineConfig(num_blocks=200))
    rules: dict[str, Any] = {
        "logit_bias": ((call, 80.0), (done, 80.0), (other, 100.0)),
        "visible_token_ids": (call, done),
    }
    by_id = LLMatcher.grammar_from_lark(f'start: (<[{call}]> | <[{other}]> | "x") /[ab]/ (<[{done}]> | "y") "c"')
    by_name = LLMatcher.grammar_from_lark('start: (<|call|> | <|other|> | "x") /[ab]/ (<|done|> | "y") "c"')
    outcomes = drive(
        engine,
        [
            ask("both", by_id, **rules),
            ask("name", by_name, **rules),
            ask("call", by_id, **{**rules, "visible_token_ids": (call,)}),
            ask("none", by_id, **{**rules, "visible_token_ids": ()}),
            ask("text", LLMatcher.grammar_from_regex("(?s:.{4})"), **{**rules, "visible_token_ids": tuple(ids)}),
        ],
    )
    assert re.fullmatch(r"<\|call\|>[ab]<\|done\|>c", outcomes["both"].text)
    assert re.fullmatch(r"<\|call\|>[ab]<\|done\|>c", outcomes["name"].text)
    assert re.fullmatch(r"<\|call\|>[ab]yc", outcomes["call"].text)
    assert re.fullmatch("x[ab]yc", outcomes["none"].text)
    assert max(outcomes["text"].token_ids[:-1]) < call


@contextmanager
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Replace the compilation of grammars by a function that first waits until the yielded event is set."""
    may_go = threading.Event()

    def compile_later(vocabulary: object, grammar: str) -> LLMatcher:
        may_go.wait()
        return compile_grammar(vocabulary, grammar)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(grammar_masks, "compile_grammar", compile_later)
        try:
            yield may_go
        finally:
            may_go.set()


def until_idle(engine: Engine) -> Iterator[TokenDelta]:
    while engine.has_work:
        yield from engine.step().events


def test_other_sequences_do_not_wait_for_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with slow_compiler(monkeypatch) as may_go:
        engine.submit(ask("held", CHOICE))
        engine.submit(ask("left", CHOICE))
        engine.submit(ask("free", None, max_tokens=5))
        engine.cancel("left")
        events = [event for _ in range(8) for event in engine.step().events]
        assert {event.uid for event in events} == {"free"}
        assert events[-1].finish is not None
        assert engine.has_work
        assert engine.step().stats.num_waiting == 1
        may_go.set()
        texts = [event.text for event in until_idle(engine) if event.uid == "held"]
    assert "".join(texts) in ("red", "green", "blue")


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def count(vocabulary: object, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return compile_grammar(vocabulary, grammar)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_masks, "compile_grammar", count)
    drive(make_engine(), [ask(f"s{i}", [CHOICE, REGEX][i % 2], seed=i) for i in range(10)])
    assert sorted(compiled) == sorted([CHOICE, REGEX])


def test_a_grammar_that_exceeds_a_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matchers of a grammar share its lexer states, of which an exceeded limit leaves 100 MB."""
    compiled: list[str] = []

    def limit(vocabulary: Any, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=60))

    monkeypatch.setattr(grammar_masks, "compile_grammar", limit)
    engine, growing = make_engine(), LLMatcher.grammar_from_regex(r"(.*[a-m].{30}|.*[n-z].{25})0")
    for uid in ("first", "second"):
        outcome = drive(engine, [ask(uid, growing, max_tokens=60)])[uid]
        assert outcome.reason is FinishReason.REFUSED
        assert outcome.finish is not None
        assert "too many states" in (outcome.finish.error or "")
    assert compiled == [growing, growing]


def test_a_compilation_without_memory_fails_its_sequence_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_once(vocabulary: Any, grammar: str) -> LLMatcher:
        monkeypatch.setattr(grammar_masks, "compile_grammar", compile_grammar)
        raise MemoryError("out of memory")

    monkeypatch.setattr(grammar_masks, "compile_grammar", fail_once)
    engine = make_engine()
    failed = drive(engine, [ask("first", CHOICE), ask("free", None, max_tokens=5)])
    assert failed["first"].finish is not None
    assert failed["first"].finish.error == "the grammar could not be compiled: out of memory"
    assert failed["free"].reason is FinishReason.LENGTH
    assert drive(engine, [ask("second", CHOICE)])["second"].reason is FinishReason.STOP


def test_a_grammar_that_cannot_be_compiled_ends_its_sequence_alone() -> None:
    outcomes = drive(make_engine(), [ask("bad", LLMatcher.grammar_from_regex("(a")), ask("good", CHOICE)])
    assert outcomes["bad"].finish is not None
    assert outcomes["bad"].reason is FinishReason.ERROR
    assert "unclosed group" in (outcomes["bad"].finish.error or "")
    assert outcomes["good"].reason is FinishReason.STOP


def test_prior_tokens_that_violate_the_grammar_are_rejected() -> None:
    matchers = Grammars(TOKENIZER)
    submit = ask("s", CHOICE, prior=TOKENIZER.encode("x"), attempt=1)
    ready = [] if matchers.hold(submit) else [submit]
    while not ready:
        ready = matchers.take_compiled(may_wait=True)
    assert ready == [submit]
    with pytest.raises(GrammarError):
        matchers.begin(submit.uid, submit.prior_token_ids)
    assert list(matchers.uids) == []


def test_a_matcher_without_end_of_text_tokens_stops_when_its_grammar_is_complete() -> None:
    tokens = [TOKENIZER.token_bytes(token_id) for token_id in range(TOKENIZER.vocab_size - 1)]
    vocabulary = Vocabulary(tokens, [], [])
    matcher = compile_grammar(vocabulary.for_masks(), CHOICE)
    for character in b"red":
        assert not matcher.is_stopped()
        assert matcher.consume_token(character)
    assert matcher.is_stopped()


def test_a_submission_carries_its_grammar_between_processes() -> None:
    submit = ask("s", CHOICE)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=type(submit)).grammar == CHOICE
