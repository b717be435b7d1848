"""Composition root of the engine: schedule, execute, commit, detokenize.

Single-threaded: the thread that calls `step` must make all other calls too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from model.native.native_transformer import NativeTransformer
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer
from service.engine.detokenizer import Detokenizer
from service.engine.execution.cuda_graphs import Capture
from service.engine.execution.embedding_pooling import Pool
from service.engine.execution.grammar_masks import Grammars
from service.engine.execution.model_runner import ModelRunner, Runner, StepOutputs
from service.engine.execution.step_executor import StepExecutor
from service.engine.final_messages import create_finish, ending, no_token
from service.engine.scheduling.config import EngineConfig
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_plan import Chunk, StepPlan
from service.ipc.messages import NON_FINITE, FinishReason, StepStats, Submit, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step: events for the clients, and statistics for the metrics."""

    events: list[TokenDelta]
    stats: StepStats


@dataclass(frozen=True, slots=True)
class _Text:
    """Output state of a sequence: detokenizer, prompt logprobs not yet reported, and the pool of its embedding."""

    sequence: SequenceState
    detokenizer: Detokenizer
    prompt_logprobs: list[TokenLogprob] | None
    pool: Pool = field(default_factory=Pool)


class Engine:
    """Inference engine of one model: takes submissions and produces text step by step.

    Args:
        model: the served model.
        tokenizer: the model's tokenizer.
        config: sizes and budgets.
        runner: computes the steps; None for a `ModelRunner` of the model.
        capture: captures the decode steps of a new `ModelRunner` as CUDA graphs; None for no graphs.
        looks_ahead: launch a step before the previous step's tokens are read, see
            `service.engine.scheduling.lookahead`; None: if the runner is asynchronous.
        clock: time in seconds for sequences and steps; tests replace `time.monotonic`.
    """

    def __init__(
        self,
        model: Transformer | NativeTransformer,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        capture: Capture | None = None,
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
                cache_dtype=torch.float16 if config.kv_cache_dtype == "float16" else None,
            )
            if capture is not None:
                runner.capture_decodes(
                    capture, max_rows=config.max_num_running, max_context_length=self._max_context_length
                )
        self._runner = runner
        if looks_ahead is None:
            looks_ahead = runner.is_asynchronous
        self._executor = StepExecutor(runner, self._scheduler, config, looks_ahead=looks_ahead)
        self._grammars = Grammars(tokenizer)
        self._texts: dict[str, _Text] = {}  # by uid, until the sequence's ending is reported
        self._rejections: list[TokenDelta] = []
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        """True if `step` has something to compute, report or wait for."""
        return self._scheduler.has_work or bool(self._rejections) or bool(self._grammars.num_held)

    @property
    def max_num_running(self) -> int:
        """Limit on running sequences: the configured limit, or less to keep the target inter-token latency."""
        return self._scheduler.max_num_running

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Compute a dummy prompt of the maximum step size and sample two tokens from it.

        This creates everything that is created at first use: CUDA context, kernels, memory pools, packed matrices. The
        first request does not wait for it, and a device that runs out of memory fails before it serves.

        Args:
            max_tokens: maximum length of the dummy prompt; None for no other limit than the step size.
        """
        assert not self.has_work, "warm-up needs an idle engine"
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
        self._scheduler.reset_prefix_cache()

    def submit(self, submit: Submit) -> None:
        """Accept a submission. If it cannot be computed, the next step ends it with an error.

        A newer attempt of the same uid replaces an older one. An attempt that is not newer is ignored.
        """
        known = self._scheduler.get(submit.uid)
        if known is not None:
            if submit.attempt <= known.attempt:
                return
            self.cancel(submit.uid)
        if not self._grammars.hold(submit):
            self._enqueue(submit)

    def _enqueue(self, submit: Submit) -> None:
        """Add a submission, whose grammar is compiled, to the waiting sequences."""
        self._num_submitted += 1
        sequence = SequenceState.from_submit(
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
            self._rejections.append(ending(sequence, finish=create_finish(sequence, str(error))))
            return
        wanted = submit.params.prompt_logprobs
        first = TokenLogprob(token_id=submit.prompt_token_ids[0], logprob=None, rank=None, top=())
        text = _Text(sequence, Detokenizer(self._tokenizer, submit.params), None if wanted is None else [first])
        self._texts[submit.uid] = text
        for token_id in submit.prior_token_ids:
            # The client already has the text of the prior tokens: only the detokenizer's state is needed.
            if (stop := text.detokenizer.push(token_id).stop) is not None:
                self._scheduler.end(sequence, FinishReason.STOP, stop)
                break
        if is_complete:
            self._scheduler.end(sequence, FinishReason.STOP)

    def cancel(self, uid: str) -> None:
        """Cancel a sequence: its blocks are freed, and no further events follow. Unknown uids are ignored."""
        self._grammars.forget(uid)
        if self._scheduler.cancel(uid):
            del self._texts[uid]

    def step(self, *, before: Callable[[list[str]], None] | None = None) -> StepResult:
        """Compute one step and return its events.

        If a step has been launched ahead, this call finishes that step.

        Args:
            before: called with the uids of the step's sequences before the step is computed. Not called for a step
                launched ahead, whose sequences are among those of the previous step.
        """
        began = time.perf_counter()
        for submit in self._grammars.take_compiled(may_wait=not (self._scheduler.has_work or self._rejections)):
            self._enqueue(submit)
        if not self._executor.is_under_way:
            plan = self._scheduler.schedule()
            if before is not None:
                before([chunk.sequence.uid for chunk in plan.chunks])
            self._executor.begin(plan, self._grammars.masks(plan))
        plan, outputs, failed = self._executor.finish()
        for sequence in failed:
            self._rejections.append(ending(sequence, finish=create_finish(sequence, NON_FINITE)))
            del self._texts[sequence.uid]
            self._grammars.forget(sequence.uid)
        self._scheduler.commit(plan, outputs.token_ids)
        for sequence in self._grammars.advance(plan, outputs.token_ids):
            self._scheduler.finish(sequence, FinishReason.STOP)
        events = self._events(plan, outputs)
        return StepResult(events, self._stats(plan, events, len(failed), time.perf_counter() - began))

    def attention_weights(self, token_ids: tuple[int, ...], *, layer: int, heads: tuple[int, ...]) -> bytes:
        """Return the attention weights of a text, as in `service.ipc.messages.AttentionResult`.

        The computation does not touch sequences or the KV-cache.

        Raises:
            ValueError: the layer does not exist, or the token ids are empty, too long or outside the vocabulary.
        """
        return self._runner.attention_weights(token_ids, layer=layer, heads=heads)

    def abort_all(self, error: str) -> list[TokenDelta]:
        """End all sequences with an error and free their blocks, after a step has failed.

        This includes sequences that ended in the failed step, because their endings have not been reported.
        """
        events = list(self._rejections)
        for text in self._texts.values():
            self._scheduler.finish(text.sequence, FinishReason.ERROR)
            events.append(ending(text.sequence, finish=create_finish(text.sequence, error)))
        self._scheduler.reset_prefix_cache()
        for uid in self._grammars.uids:
            self._grammars.forget(uid)
        self._rejections.clear()
        self._texts.clear()
        return events

    def check_integrity(self) -> None:
        """Check that no block leaked and that all tables of sequences agree.

        Raises:
            AssertionError: the engine's state is inconsistent.
        """
        self._scheduler.check_integrity()
        assert self._texts.keys() == {sequence.uid for sequence in self._scheduler.sequences()}
        assert self._grammars.uids <= self._texts.keys()

    def _check_ids(self, submit: Submit) -> None:
        """Check that all token ids of a submission are in the vocabulary.

        An id without an embedding would fail the step of all sequences.

        Raises:
            ValueError: a token id is outside the vocabulary.
        """
        params, size = submit.params, self._tokenizer.vocab_size
        biased = (token_id for token_id, _ in params.logit_bias)
        words = (token_id for word in params.bad_word_ids for token_id in word)
        rules = (*params.allowed_token_ids, *biased, *words)
        for ids in (submit.prompt_token_ids, submit.prior_token_ids, params.stop_token_ids, rules):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                raise ValueError(f"token ids range from {min(ids)} to {max(ids)}; the vocabulary has 0 to {size - 1}")

    def _events(self, plan: StepPlan, outputs: StepOutputs) -> list[TokenDelta]:
        """Return the events of a committed step."""
        events = list(self._rejections)
        for sequence in plan.ended:
            text = self._texts[sequence.uid].detokenizer.flush().text
            events.append(ending(sequence, text=text, finish=create_finish(sequence)))
        for uid, logprobs in outputs.prompt_logprobs.items():
            scored = self._texts[uid].prompt_logprobs
            assert scored is not None
            scored += logprobs
        for chunk in plan.chunks if outputs.pooled else ():
            if (sum_E := outputs.pooled.get(chunk.sequence.uid)) is not None:
                self._texts[chunk.sequence.uid].pool.add(chunk, sum_E)
        for chunk, rows in zip(plan.chunks, plan.sampled_rows, strict=True):
            if rows:
                events.append(self._token_event(chunk, rows, outputs))
            elif chunk.sequence.finish_reason is not None:  # prefill only: the sequence ends without a sampled token
                output, finish = self._texts[chunk.sequence.uid], create_finish(chunk.sequence)
                embedding = None if chunk.sequence.pooling is None else output.pool.embedding()
                scores = output.prompt_logprobs
                events.append(ending(chunk.sequence, prompt_logprobs=scores, embedding=embedding, finish=finish))
        # Last: if anything above fails, `abort_all` still finds the sequences without a reported ending.
        self._rejections.clear()
        for event in events:
            if event.finish is not None:
                self._texts.pop(event.uid, None)
                self._grammars.forget(event.uid)
        return events

    def _token_event(self, chunk: Chunk, rows: tuple[int, ...], outputs: StepOutputs) -> TokenDelta:
        """Return the event with the tokens that a step added to a sequence: the sampled and the accepted draft tokens.

        A stop string ends the sequence, and the tokens after it are removed.
        """
        sequence = chunk.sequence
        num_known = chunk.num_known_tokens
        new_ids = sequence.token_ids[num_known:]
        if not new_ids:
            reason = self._grammars.complaint(sequence.uid) or no_token(sequence)
            return ending(sequence, finish=create_finish(sequence, reason))
        text = self._texts[sequence.uid]
        shown, stop = "", None
        for number, token_id in enumerate(new_ids, 1):
            pushed = text.detokenizer.push(token_id)
            shown, stop = shown + pushed.text, pushed.stop
            if stop is not None:
                del new_ids[number:], sequence.token_ids[num_known + number :]
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
            entries = (outputs.logprobs[row] for row in rows[: len(new_ids)])
            logprobs = tuple(entry for entry in entries if entry is not None) or None
        return TokenDelta(
            uid=sequence.uid,
            attempt=sequence.attempt,
            index=index,
            token_ids=tuple(new_ids),
            text=shown,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=None if sequence.finish_reason is None else create_finish(sequence),
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
