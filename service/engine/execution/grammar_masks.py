"""Grammar-constrained decoding: grammars are compiled, and token masks computed, in background threads."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from model.chat.reasoning import all_marks, mark_ids
from model.io.files import first_line
from model.structured_output.grammar import GrammarError, Vocabulary, compile_grammar
from model.tokenizer.interface import Tokenizer
from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_plan import StepPlan
from service.ipc.messages import Submit

# Maximum number of cached grammars, megabytes each. The least recently used grammar is evicted.
_MAX_COMPILED = 64
# Maximum wait of an idle step for a compilation: the engine loop must read new commands in between.
_PATIENCE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Masks:
    """Token masks of the logit rows of a step that have a grammar, still being computed. A mask may allow no token."""

    rows: tuple[int, ...]
    words: Future[NDArray[np.int32]]  # RW, one row for each entry of `rows`, with a bit for each token that is allowed


class Grammars:
    """Compiler and cache of grammars, with the matcher of each grammar-constrained sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = list(tokenizer.eos_token_ids)
        special_ids = {*tokenizer.special_tokens.values()}.difference(tokenizer.eos_token_ids)
        self._eos_W = self._words(self._eos_token_ids)
        self._ordinary_W = self._words(range(tokenizer.vocab_size)) & ~self._words(sorted(special_ids))
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._held: dict[str, Submit] = {}
        self._futures: dict[str, Future[LLMatcher]] = {}  # uid to its grammar, until `begin`
        self._matchers: dict[str, LLMatcher] = {}
        self._sources: dict[str, str] = {}  # uid to the text of its grammar
        self._compiling_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._masks_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def uids(self) -> list[str]:
        """Uids of the sequences that have a grammar matcher."""
        return list(self._matchers)

    def warm_up(self) -> None:
        """Prepare the tokenizer's vocabulary for grammars, which may hold the GIL for about a second.

        An error, such as of a tokenizer's file that is missing now, is reported by each sequence with a grammar.
        """
        wait([self._compiling_thread.submit(getattr, self, "_vocabulary")])

    def hold(self, submit: Submit) -> bool:
        """Hold a submission until its grammar is compiled, and return True; False if the submission need not wait.

        If an equal or newer attempt of its uid is held already, drop the submission, and return True.
        """
        assert submit.grammar is not None
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
        self._futures[submit.uid] = future
        self._sources[submit.uid] = submit.grammar
        # A submission also waits behind held submissions with the same grammar, to keep the order of arrival.
        if future.done() and all(self._futures[uid] is not future for uid in self._held):
            return False
        self._held[submit.uid] = submit
        return True

    def take_compiled(self, *, may_wait: bool) -> list[Submit]:
        """Remove and return the held submissions whose compilation has ended. `may_wait`: wait up to 10 ms for one."""
        if not self._held:
            return []
        if may_wait:
            wait([self._futures[uid] for uid in self._held], _PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
        compiled = {future for uid in self._held if (future := self._futures[uid]).done()}
        return [self._held.pop(uid) for uid in list(self._held) if self._futures[uid] in compiled]

    def begin(self, uid: str, prior_token_ids: Sequence[int]) -> bool:
        """Create the grammar matcher of a sequence. Return True if the prior tokens complete the grammar.

        prior_token_ids: completion tokens of earlier attempts.
        Raises `GrammarError` if the grammar does not allow these tokens, or could not be compiled.
        """
        try:
            matcher = self._futures.pop(uid).result().deep_copy()
        except GrammarError:
            raise
        except Exception as error:
            # The next sequence with this grammar compiles it again: a file may be back, or memory free.
            self._compiled.pop(self._sources[uid], None)
            raise GrammarError(f"the grammar could not be compiled: {first_line(error)}") from error
        if not matcher.consume_tokens(list(prior_token_ids)):
            raise GrammarError(matcher.get_error())
        self._matchers[uid] = matcher
        return bool(prior_token_ids) and matcher.is_stopped()

    def forget(self, uid: str) -> None:
        """Drop all grammar state of an ended or cancelled sequence. Unknown uids are ignored."""
        for known in (self._held, self._futures, self._matchers, self._sources):
            known.pop(uid, None)

    def error(self, uid: str) -> str | None:
        """Return the error message of a sequence's grammar matcher, such as an exceeded limit; None without error.

        After an error, the grammar is also removed from the cache of compiled grammars.
        """
        matcher = self._matchers.get(uid)
        if matcher is None or not matcher.is_error():
            return None
        # A grammar that exceeds a limit holds up to 100 MB of lexer states, which all its matchers share.
        self._compiled.pop(self._sources[uid], None)
        return str(GrammarError(matcher.get_error()))

    def masks(self, plan: StepPlan) -> Masks | None:
        """Start computing a step's token masks in a background thread; None if no sampling sequence has a grammar."""
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        rows = [row for row, chunk in enumerate(sampling) if chunk.uid in self._matchers]
        if not rows:
            return None
        params = [sampling[row].params for row in rows]
        work = [
            (self._matchers[sampling[row].uid], its.ignore_eos, its.visible_token_ids)
            for row, its in zip(rows, params, strict=True)
        ]
        return Masks(tuple(rows), self._masks_thread.submit(self._allowed, work))

    def advance(self, sequence: SequenceState, token_id: int) -> bool:
        """Feed a sampled token to the sequence's grammar matcher. Return True if the grammar is now complete."""
        matcher = self._matchers.get(sequence.uid)
        # If this token exceeds a matcher limit, the next mask is empty, and the sequence ends with the error.
        if matcher is None or not matcher.consume_token(token_id):
            return False
        return matcher.is_stopped() or self._can_only_end(sequence, matcher)

    def _can_only_end(self, sequence: SequenceState, matcher: LLMatcher) -> bool:
        """Return True if the grammar allows only end-of-text tokens, which the sequence may not sample now."""
        params = sequence.params
        can_sample_eos = self._eos_token_ids and not params.ignore_eos
        if (can_sample_eos and sequence.num_completion_tokens >= params.min_tokens) or not matcher.is_accepting():
            return False
        return not self._allowed([(matcher, True, params.visible_token_ids)]).any()

    def _allowed(self, work: Sequence[tuple[LLMatcher, bool, tuple[int, ...]]]) -> NDArray[np.int32]:
        """Return the token mask of each matcher: `Masks.words`.

        work: matchers, each with True to forbid end-of-text, and the special tokens that the grammar may produce.
        """
        allowed_RW = np.zeros((len(work), len(self._ordinary_W)), dtype=np.int32)
        for allowed_W, (matcher, excludes_eos, visible_token_ids) in zip(allowed_RW, work, strict=True):
            words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: len(allowed_W)]
            if matcher.is_error():
                continue
            allowed_W[: len(words)] = words
            # Lark grammars can name special tokens.
            allowed_W &= self._ordinary_W | self._words(visible_token_ids) if visible_token_ids else self._ordinary_W
            if excludes_eos:
                allowed_W &= ~self._eos_W
        return allowed_RW

    def _words(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the words of a mask in which the bits of these tokens are 1."""
        bits = np.zeros(-(-self._tokenizer.vocab_size // 32) * 32, dtype=np.bool_)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _compile(self, grammar: str) -> LLMatcher:
        return compile_grammar(self._vocabulary, grammar)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The tokenizer's vocabulary in llguidance's format, used only by the thread that compiles grammars."""
        marks = mark_ids(self._tokenizer, all_marks())
        return Vocabulary.of(self._tokenizer, marks.values()).for_masks()
