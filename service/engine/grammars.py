"""Sequences that follow a grammar: it is compiled in a thread, and its masks are computed while the model computes.

A submission whose grammar is not compiled yet is held, and no other waits for it. What a grammar allows next depends on
a sequence's own tokens alone, so that batches, chunks, preemption and replay change nothing: a matcher is fed the
tokens that are there, and then each one that is drawn.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from model.grammar import GrammarError, Vocabulary, compile_grammar
from model.tokenizer.interface import Tokenizer
from service.engine.plan import StepPlan
from service.engine.sequence import Sequence
from service.messages import FinishReason, Submit

# Compiled grammars that are kept, least recently asked for first out: megabytes each.
_MAX_COMPILED = 64
# How long a step without other work waits for a compilation before new commands are looked for.
_PATIENCE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that may be drawn in some rows of a step: bool RV once they are known; a row may allow none."""

    rows: tuple[int, ...]
    _computing: Future[NDArray[np.bool_]]

    def allowed(self) -> NDArray[np.bool_]:
        """RV; waits for it."""
        return self._computing.result()


class Grammars:
    """Owner of the matchers of all sequences that have one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = list(tokenizer.eos_token_ids)
        self._mark_ids = sorted({*tokenizer.special_tokens.values()}.difference(tokenizer.eos_token_ids))
        self._vocabulary: LLTokenizer | None = None  # the compiling thread's, made at first use
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._held: dict[str, Submit] = {}
        self._asked: dict[str, Future[LLMatcher]] = {}  # uid -> its grammar, until it begins
        self._matchers: dict[str, LLMatcher] = {}
        self._compiling_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._masks_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")

    @property
    def num_held(self) -> int:
        """Submissions that wait for their grammar."""
        return len(self._held)

    @property
    def uids(self) -> set[str]:
        """The sequences that have a matcher."""
        return set(self._matchers)

    def warm_up(self) -> None:
        """Make what is made once: of a large vocabulary it takes a second in which no other thread of Python runs."""
        self._compiling_thread.submit(self._make_vocabulary).result()

    def hold(self, submit: Submit) -> bool:
        """Whether a submission has to wait for its grammar; `take_compiled` gives it back."""
        if submit.grammar is None:
            return False
        held = self._held.get(submit.uid)
        if held is not None and submit.attempt <= held.attempt:
            return True
        future = self._compiled.get(submit.grammar)
        if future is None:
            future = self._compiling_thread.submit(self._compile, submit.grammar)
            self._compiled[submit.grammar] = future
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(submit.grammar)
        self._asked[submit.uid] = future
        # Behind another that waits for the same: they begin in the order in which they came.
        if future.done() and all(self._asked[uid] is not future for uid in self._held):
            return False
        self._held[submit.uid] = submit
        return True

    def take_compiled(self, *, may_wait: bool) -> list[Submit]:
        """The held submissions that may begin. Waits a moment for one if there is nothing else to do."""
        if not self._held:
            return []
        if may_wait:
            wait([self._asked[uid] for uid in self._held], _PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
        compiled = {future for uid in self._held if (future := self._asked[uid]).done()}
        return [self._held.pop(uid) for uid in list(self._held) if self._asked[uid] in compiled]

    def begin(self, submit: Submit) -> bool:
        """Give a sequence its matcher. Returns whether its document is complete with the tokens it has already.

        Raises:
            GrammarError: the grammar cannot be compiled, or its tokens do not follow it.
        """
        future = self._asked.pop(submit.uid, None)
        if future is None:
            return False
        matcher = future.result().deep_copy()
        if not matcher.consume_tokens(list(submit.prior_token_ids)):
            raise GrammarError(matcher.get_error())
        self._matchers[submit.uid] = matcher
        return bool(submit.prior_token_ids) and matcher.is_stopped()

    def forget(self, uid: str) -> None:
        """A sequence has ended, or nobody waits for it any more. Unknown uids are passed over."""
        for known in (self._held, self._asked, self._matchers):
            known.pop(uid, None)

    def complaint(self, uid: str) -> str | None:
        """Why a sequence's grammar cannot be followed any further; None where it can."""
        matcher = self._matchers.get(uid)
        return str(GrammarError(matcher.get_error())) if matcher is not None and matcher.is_error() else None

    def masks(self, plan: StepPlan) -> Masks | None:
        """Begin to compute the masks of a step, in a thread; None if nobody needs one."""
        if not self._matchers:
            return None
        draws = (chunk.sequence for chunk in plan.chunks if chunk.draws)
        asked = [(row, sequence) for row, sequence in enumerate(draws) if sequence.uid in self._matchers]
        if not asked:
            return None
        work = [(self._matchers[sequence.uid], sequence.params.ignore_eos) for _, sequence in asked]
        return Masks(tuple(row for row, _ in asked), self._masks_thread.submit(self._allowed, work))

    def advance(self, plan: StepPlan, token_ids: Ordered[int | None]) -> Iterator[Sequence]:
        """Take up what a committed step drew: a token for each chunk that draws. Gives those that are now complete."""
        drawn = iter(token_ids)
        for chunk in plan.chunks if self._matchers else ():
            token_id, sequence = next(drawn) if chunk.draws else None, chunk.sequence
            matcher = self._matchers.get(sequence.uid)
            if token_id is None or matcher is None or sequence.finish_reason is FinishReason.STOP:
                continue
            # Over a limit in this token: the next draw has none to choose from, and its sequence ends with the reason.
            if matcher.consume_token(token_id) and (matcher.is_stopped() or self._can_only_end(sequence, matcher)):
                yield sequence

    def _can_only_end(self, sequence: Sequence, matcher: LLMatcher) -> bool:
        """Whether nothing but the end of text may follow, and it cannot be drawn."""
        params = sequence.params
        can_draw_end = self._eos_token_ids and not params.ignore_eos
        if (can_draw_end and sequence.num_completion_tokens >= params.min_tokens) or not matcher.is_accepting():
            return False
        return not self._allowed([(matcher, True)]).any()

    def _allowed(self, work: Ordered[tuple[LLMatcher, bool]]) -> NDArray[np.bool_]:
        """RV: what each matcher allows: text, and the ends of text where they are not left out."""
        allowed_RV = np.zeros((len(work), self._tokenizer.vocab_size), dtype=np.bool_)
        for row, (matcher, goes_on) in enumerate(work):
            packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error():
                continue
            allowed_RV[row] = np.unpackbits(packed, count=allowed_RV.shape[1], bitorder="little")
            if goes_on:
                allowed_RV[row, self._eos_token_ids] = False
        allowed_RV[:, self._mark_ids] = False  # Lark's notation has names for them
        return allowed_RV

    def _compile(self, grammar: str) -> LLMatcher:
        return compile_grammar(self._make_vocabulary(), grammar)

    def _make_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of(self._tokenizer).for_masks()
        return self._vocabulary
