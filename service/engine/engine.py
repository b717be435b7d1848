"""The composition root: decide, execute, commit, and text for whoever waits.

Single-threaded: whoever calls `step` calls everything else too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from model.native_transformer import NativeTransformer
from model.sampling_params import SamplingParams
from model.tokenizer.interface import Tokenizer
from model.transformer import Transformer
from service.engine.config import EngineConfig
from service.engine.deltas import ending, finish_of, no_token
from service.engine.detokenizer import Detokenizer
from service.engine.grammars import Grammars
from service.engine.plan import Chunk, StepPlan
from service.engine.pooling import Pool
from service.engine.runner import ModelRunner, Runner, StepOutputs
from service.engine.scheduler import Scheduler
from service.engine.sequence import Sequence
from service.engine.steps import Steps
from service.messages import NON_FINITE, FinishReason, StepStats, Submit, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step has for those who wait, and for the metrics."""

    events: list[TokenDelta]
    stats: StepStats


@dataclass(frozen=True, slots=True)
class _Text:
    """What is told of a sequence: its text, its prompt's scores until they are told, and what is pooled of it."""

    sequence: Sequence
    detokenizer: Detokenizer
    prompt_logprobs: list[TokenLogprob] | None
    pool: Pool = field(default_factory=Pool)


class Engine:
    """Sequences in, text out.

    Args:
        model: what is served.
        tokenizer: its tokenizer.
        config: sizes and budgets.
        runner: computes the steps; a `ModelRunner` of the model where none is given.
        looks_ahead: launch steps before the last one's tokens are read, see `service.engine.lookahead`; None: where the
            host is free while the runner computes.
        clock: seconds, by which sequences and steps are timed; `time.monotonic` but in tests.
    """

    def __init__(
        self,
        model: Transformer | NativeTransformer,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        looks_ahead: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        positions, asked = model.config.max_context_length, config.max_context_length
        self._max_context_length = positions if asked is None else min(asked, positions)
        self._scheduler = Scheduler(
            config, max_context_length=self._max_context_length, eos_token_ids=tokenizer.eos_token_ids, clock=clock
        )
        if runner is None:
            runner = ModelRunner(
                model,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                vocab_size=tokenizer.vocab_size,
                held_as=torch.float16 if config.kv_cache_dtype == "float16" else None,
            )
        self._runner = runner
        if looks_ahead is None:
            looks_ahead = runner.is_asynchronous
        self._steps = Steps(runner, self._scheduler, config, looks_ahead=looks_ahead)
        self._grammars = Grammars(tokenizer)
        self._texts: dict[str, _Text] = {}  # of every sequence whose ending has not been told
        self._refusals: list[TokenDelta] = []
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._scheduler.has_work or bool(self._refusals) or bool(self._grammars.num_held)

    @property
    def max_num_running(self) -> int:
        """Limit on running sequences: the configured one, or less to keep the inter-token target."""
        return self._scheduler.max_num_running

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Compute a step as long as any, or of `max_tokens` where that will do, and a draw, for nobody.

        What is made at first use (a CUDA context, kernels, memory pools, packed matrices) is made now and not at the
        first request's expense, and a device that cannot hold such a step says so now.
        """
        assert not self.has_work, "sequences are waiting"
        self._grammars.warm_up()
        capacity = self._config.num_blocks * self._config.block_size
        longest = max(1, min(self._config.max_batched_tokens, self._max_context_length - 2, capacity - 2))
        num_tokens = longest if max_tokens is None else min(max_tokens, longest)
        self.submit(
            Submit(
                uid="warm-up",
                attempt=0,
                prompt_token_ids=(0,) * num_tokens,
                prior_token_ids=(),
                params=SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True),
                arrival_seconds=time.monotonic(),
                deadline_seconds=None,
            )
        )
        while self.has_work:
            self.step()
        self._scheduler.forget_prefixes()

    def submit(self, submit: Submit) -> None:
        """Take on a completion. One that can't be computed gets its ending, with the reason, from the next step.

        A newer attempt takes the place of an older one; an older one is passed over.
        """
        known = self._scheduler.get(submit.uid)
        if known is not None:
            if submit.attempt <= known.attempt:
                return
            self.cancel(submit.uid)
        if not self._grammars.hold(submit):
            self._take_on(submit)

    def _take_on(self, submit: Submit) -> None:
        """Let a submission wait for its turn, its grammar compiled."""
        self._num_submitted += 1
        sequence = Sequence.from_submit(
            submit,
            arrival_number=self._num_submitted,
            max_context_length=self._max_context_length,
            max_draft_tokens=self._config.max_draft_tokens,
        )
        try:
            self._check_ids(submit)
            is_complete = self._grammars.begin(submit)
            self._scheduler.add(sequence)
        except ValueError as error:
            self._grammars.forget(submit.uid)
            sequence.finish_reason = FinishReason.ERROR
            self._refusals.append(ending(sequence, finish=finish_of(sequence, str(error))))
            return
        wanted = submit.params.prompt_logprobs
        first = TokenLogprob(token_id=submit.prompt_token_ids[0], logprob=None, rank=None, top=())
        text = _Text(sequence, Detokenizer(self._tokenizer, submit.params), None if wanted is None else [first])
        self._texts[submit.uid] = text
        for token_id in submit.prior_token_ids:
            # Whoever has these tokens has their text as well: it is a function of them.
            if (stop := text.detokenizer.push(token_id).stop) is not None:
                self._scheduler.end(sequence, FinishReason.STOP, stop)
                break
        if is_complete:
            self._scheduler.end(sequence, FinishReason.STOP)

    def cancel(self, uid: str) -> None:
        """Forget a sequence: its blocks are free now, and it has no further events. Unknown uids are passed over."""
        self._grammars.forget(uid)
        if self._scheduler.cancel(uid):
            del self._texts[uid]

    def step(self, *, before: Callable[[list[str]], None] | None = None) -> StepResult:
        """Compute one step of everything that is running. `before` is told whose, and that ahead of anything.

        A step that was launched ahead is the next one; whose it is has been told of the step before it.
        """
        began = time.perf_counter()
        for submit in self._grammars.take_compiled(may_wait=not (self._scheduler.has_work or self._refusals)):
            self._take_on(submit)
        if not self._steps.is_under_way:
            plan = self._scheduler.schedule()
            if before is not None:
                before([chunk.sequence.uid for chunk in plan.chunks])
            self._steps.begin(plan, self._grammars.masks(plan))
        plan, outputs, failed = self._steps.finish()
        for sequence in failed:
            self._refusals.append(ending(sequence, finish=finish_of(sequence, NON_FINITE)))
            del self._texts[sequence.uid]
            self._grammars.forget(sequence.uid)
        self._scheduler.commit(plan, outputs.token_ids)
        for sequence in self._grammars.advance(plan, outputs.token_ids):
            self._scheduler.finish(sequence, FinishReason.STOP)
        events = self._tell(plan, outputs)
        return StepResult(events, self._stats(plan, events, len(failed), time.perf_counter() - began))

    def attention_weights(self, token_ids: tuple[int, ...], *, layer: int, heads: tuple[int, ...]) -> bytes:
        """What a text's tokens attend to, see `service.messages.Looked`. Sequences and their cache are not touched.

        Raises:
            ValueError: there is no such layer, or the tokens are none, too many, or not of the vocabulary.
        """
        return self._runner.attention_weights(token_ids, layer=layer, heads=heads)

    def abort_all(self, error: str) -> list[TokenDelta]:
        """End everything with an error, free everything. For when a step failed.

        What had ended in that step is among it: nobody has been told.
        """
        events = list(self._refusals)
        for text in self._texts.values():
            self._scheduler.finish(text.sequence, FinishReason.ERROR)
            events.append(ending(text.sequence, finish=finish_of(text.sequence, error)))
        self._scheduler.forget_prefixes()
        for uid in self._grammars.uids:
            self._grammars.forget(uid)
        self._refusals.clear()
        self._texts.clear()
        return events

    def check_integrity(self) -> None:
        """Nothing leaked, nothing owned twice.

        Raises:
            AssertionError: a bug of ours.
        """
        self._scheduler.check_integrity()
        assert self._texts.keys() == {sequence.uid for sequence in self._scheduler.sequences()}
        assert self._grammars.uids <= self._texts.keys()

    def _check_ids(self, submit: Submit) -> None:
        """One id that no embedding has would end everybody's step."""
        params, size = submit.params, self._tokenizer.vocab_size
        told = (token_id for token_id, _ in params.logit_bias)
        words = (token_id for word in params.bad_word_ids for token_id in word)
        rules = (*params.allowed_token_ids, *told, *words)
        for ids in (submit.prompt_token_ids, submit.prior_token_ids, params.stop_token_ids, rules):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                raise ValueError(f"token ids from {min(ids)} to {max(ids)}; the vocabulary's are 0 to {size - 1}")

    def _tell(self, plan: StepPlan, outputs: StepOutputs) -> list[TokenDelta]:
        """The events of a step that has been committed."""
        events = list(self._refusals)
        for sequence in plan.ended:
            text = self._texts[sequence.uid].detokenizer.flush().text
            events.append(ending(sequence, text=text, finish=finish_of(sequence)))
        for uid, logprobs in outputs.prompt_logprobs.items():
            scored = self._texts[uid].prompt_logprobs
            assert scored is not None
            scored += logprobs
        for chunk in plan.chunks if outputs.pooled else ():
            if (sum_E := outputs.pooled.get(chunk.sequence.uid)) is not None:
                self._texts[chunk.sequence.uid].pool.add(chunk, sum_E)
        for chunk, rows in zip(plan.chunks, plan.drawn_rows, strict=True):
            if rows:
                events.append(self._told_tokens(chunk, rows, outputs))
            elif chunk.sequence.finish_reason is not None:  # only a prompt to be computed
                told, finish = self._texts[chunk.sequence.uid], finish_of(chunk.sequence)
                embedding = None if chunk.sequence.pooling is None else told.pool.embedding()
                scores = told.prompt_logprobs
                events.append(ending(chunk.sequence, prompt_logprobs=scores, embedding=embedding, finish=finish))
        # Last, so that `abort_all` finds whoever is owed an ending when something above failed.
        self._refusals.clear()
        for event in events:
            if event.finish is not None:
                self._texts.pop(event.uid, None)
                self._grammars.forget(event.uid)
        return events

    def _told_tokens(self, chunk: Chunk, rows: tuple[int, ...], outputs: StepOutputs) -> TokenDelta:
        """The event of what a sequence drew: a token, and those of its draft that were right. Ends the sequence where a
        stop string does, and takes back what came after."""
        sequence = chunk.sequence
        num_known = chunk.num_known_tokens
        told = sequence.token_ids[num_known:]
        if not told:
            reason = self._grammars.complaint(sequence.uid) or no_token(sequence)
            return ending(sequence, finish=finish_of(sequence, reason))
        text = self._texts[sequence.uid]
        shown, stop = "", None
        for number, token_id in enumerate(told, 1):
            pushed = text.detokenizer.push(token_id)
            shown, stop = shown + pushed.text, pushed.stop
            if stop is not None:
                del told[number:], sequence.token_ids[num_known + number :]
                break
        if stop is None and sequence.finish_reason is not None:
            flushed = text.detokenizer.flush()
            shown, stop = shown + flushed.text, flushed.stop
        if stop is not None:
            self._scheduler.finish(sequence, FinishReason.STOP, stop)
        index = num_known - sequence.num_prompt_tokens
        prompt_logprobs = None
        if text.prompt_logprobs is not None and index == sequence.num_prior_tokens:
            prompt_logprobs = tuple(text.prompt_logprobs)
        logprobs: tuple[TokenLogprob, ...] | None = None
        if outputs.logprobs:
            entries = (outputs.logprobs[row] for row in rows[: len(told)])
            logprobs = tuple(entry for entry in entries if entry is not None) or None
        return TokenDelta(
            uid=sequence.uid,
            attempt=sequence.attempt,
            index=index,
            token_ids=tuple(told),
            text=shown,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=None if sequence.finish_reason is None else finish_of(sequence),
        )

    def _stats(self, plan: StepPlan, events: list[TokenDelta], num_non_finite: int, seconds: float) -> StepStats:
        num_blocks, num_free = self._config.num_blocks, self._scheduler.num_free_blocks
        num_prompt_tokens = num_drafts = num_draft_tokens = num_drawn = num_first = 0
        for chunk in plan.chunks:
            if chunk.start < chunk.sequence.num_prompt_tokens:
                num_prompt_tokens += min(chunk.num_tokens, chunk.sequence.num_prompt_tokens - chunk.start)
            if chunk.draft:
                num_drafts, num_draft_tokens = num_drafts + 1, num_draft_tokens + len(chunk.draft)
        for event in events:
            if event.token_ids:
                num_drawn, num_first = num_drawn + len(event.token_ids), num_first + 1
        return StepStats(
            num_running=self._scheduler.num_running,
            max_num_running=self._scheduler.max_num_running,
            num_waiting=self._scheduler.num_waiting + self._grammars.num_held,
            num_blocks=num_blocks,
            num_free_blocks=num_free,
            kv_usage=1 - num_free / num_blocks,
            batch_size=len(plan.chunks),
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=num_drawn,
            num_cached_prompt_tokens=plan.num_cached_prompt_tokens,
            num_prefix_queries=plan.num_prefix_queries,
            num_prefix_hits=plan.num_prefix_hits,
            num_preemptions=plan.num_preemptions,
            num_drafts=num_drafts,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_drawn - num_first,
            step_seconds=seconds,
            num_non_finite=num_non_finite,
        )
