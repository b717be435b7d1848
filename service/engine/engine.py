"""Engine: plans each step, computes it, appends the sampled tokens to their sequences and decodes them to text.

One thread does all of this. Only grammars are compiled, their token masks computed, and LoRA adapters read, in
background threads.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from model.checkpoint.lora_adapter import Adapter
from model.io.files import first_line
from model.native.native_transformer import NativeTransformer
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer
from service.engine.execution.adapter_loader import AdapterLoader
from service.engine.execution.cuda_graphs import Capture
from service.engine.execution.grammar_masks import Grammars
from service.engine.execution.model_inputs import InputBuilder, ModelInputs
from service.engine.execution.model_runner import ModelRunner, StepOutputs
from service.engine.output_processor import SequenceOutput, create_delta
from service.engine.scheduling.cache_events import CacheLog
from service.engine.scheduling.scheduler import EngineConfig, Scheduler, SequenceUpdate
from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_plan import StepPlan
from service.ipc.messages import ADAPTER_LOST, NON_FINITE, FinishReason, LoadAdapter, StepStats, Submit, TokenDelta

logger = logging.getLogger(__name__)

# Running sequences and tokens per KV block of `complete_batch`.
_MAX_NUM_RUNNING, _BLOCK_SIZE = 32, 16
_NO_OUTPUTS = StepOutputs(token_ids=[])
# Error message of a request whose rules forbid every next token.
_NO_TOKEN = (
    "no token may follow the {} tokens of this completion: allowed_token_ids, bad_words, min_tokens and the grammar "
    "together forbid every token; allow more tokens, or lower min_tokens"
)


class StepResult(msgspec.Struct, frozen=True):
    """Result of one engine step: its sequences' events (new tokens, text, endings), and statistics for the metrics."""

    events: list[TokenDelta]
    stats: StepStats


class Engine:
    """Inference engine of one model: accepts submissions (`Submit`), and returns new tokens and text after each step.

    runner: executes the forward pass and the sampling of each step; None: the engine creates a `ModelRunner`.
    capture: captures decode steps as CUDA graphs for a `ModelRunner` that the engine creates; None: no CUDA graphs.
    looks_ahead: launch a step, if possible, before the host has read the tokens that the previous step sampled.
        None: True if the runner is asynchronous, as on a GPU.
    read_adapter: reads the LoRA adapter of a directory for `load_adapter`; None: the engine has no adapters.
    """

    def __init__(
        self,
        model: Transformer | NativeTransformer,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        runner: ModelRunner | None = None,
        capture: Capture | None = None,
        looks_ahead: bool | None = None,
        read_adapter: Callable[[Path], Adapter] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        positions, asked = model.config.max_context_length, config.max_context_length
        self._max_context_length = positions if asked is None else min(asked, positions)
        self._scheduler = Scheduler(config, max_context_length=self._max_context_length, clock=clock)
        if runner is None:
            runner = ModelRunner(
                model,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                vocab_size=tokenizer.vocab_size,
                cache_dtype=None if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype),
            )
            if capture is not None:
                runner.capture_decodes(
                    capture, max_rows=config.max_num_running, max_context_length=self._max_context_length
                )
        self._runner = runner
        if looks_ahead is None:
            looks_ahead = runner.is_asynchronous
        self._looks_ahead = looks_ahead and not config.max_draft_tokens  # the host must verify drafts
        self._inputs = InputBuilder(
            block_size=config.block_size, scratch_block=config.num_blocks, min_rows=runner.min_rows
        )
        self._plan: StepPlan | None = None  # of the step that is launched ahead
        self._launched: Callable[[], StepOutputs] | None = None  # waits for the outputs of the step of `_plan`
        self._grammars = Grammars(tokenizer)
        self._outputs: dict[str, SequenceOutput] = {}  # by uid, until the sequence's ending is reported
        self._rejections: list[TokenDelta] = []
        self._num_submitted = 0
        self._loader = None if read_adapter is None else AdapterLoader(read_adapter, runner)

    @property
    def has_work(self) -> bool:
        """True if a sequence is unfinished, an ending is not reported, or a grammar or adapter is still awaited."""
        return self._scheduler.has_work or bool(self._rejections) or bool(self._num_held)

    @property
    def _num_held(self) -> int:
        return self._grammars.num_held + (0 if self._loader is None else self._loader.num_held)

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Complete a dummy prompt, so that kernels are compiled and memory is allocated before the first request.

        max_tokens: maximum length of the prompt; None: as long as one step and the context length allow.
        """
        assert not self.has_work, "warm-up needs an idle engine"
        capacity = self._config.num_blocks * self._config.block_size
        longest = max(1, min(self._config.max_batched_tokens, self._max_context_length - 2, capacity - 2))
        num_tokens = longest if max_tokens is None else min(max_tokens, longest)
        params = SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True)
        self.submit(create_submit("warm-up", (0,) * num_tokens, params))
        while self.has_work:
            self.step()
        self._scheduler.reset_prefix_cache()

    def log_prefix_cache(self) -> CacheLog:
        """Begin to record the changes of the prefix cache; return the `CacheLog` that collects them."""
        return self._scheduler.log_prefix_cache()

    def prepare_grammars(self) -> None:
        """Prepare the vocabulary for grammars, so that the first grammar delays no running sequence."""
        self._grammars.warm_up()

    def submit(self, submit: Submit) -> None:
        """Accept a submission: replace an older attempt of its uid, but ignore it if an equal or newer one exists.

        An invalid submission raises no exception: an event of a later step reports its error.
        """
        known = self._outputs.get(submit.uid)
        if known is not None:
            if submit.attempt <= known.sequence.attempt:
                return
            self.cancel(submit.uid)
        if self._loader is None or not self._loader.hold(submit):
            self._compile(submit)

    def _compile(self, submit: Submit) -> None:
        if submit.grammar is None or not self._grammars.hold(submit):
            self._enqueue(submit)

    def _enqueue(self, submit: Submit) -> None:
        """Add the sequence of a submission to the waiting queue. If it is invalid, the next step reports an error."""
        self._num_submitted += 1
        sequence = SequenceState(
            submit,
            arrival_number=self._num_submitted,
            max_context_length=self._max_context_length,
            max_draft_tokens=self._config.max_draft_tokens,
            eos_token_ids=self._tokenizer.eos_token_ids,
        )
        params, size, is_complete = submit.params, self._tokenizer.vocab_size, False
        rules = [*params.allowed_token_ids, *(token_id for token_id, _ in params.logit_bias)]
        rules += [token_id for word in params.bad_word_ids for token_id in word]
        rules += params.visible_token_ids
        try:
            for ids in (submit.prompt_token_ids, submit.prior_token_ids, params.stop_token_ids, rules):
                if ids and not 0 <= min(ids) <= max(ids) < size:  # an unknown id would fail the step of all sequences
                    raise ValueError(
                        f"token ids in this request's prompt or parameters range from {min(ids)} to {max(ids)}, "
                        f"beyond this model's vocabulary; use ids from 0 to {size - 1}"
                    )
            if submit.adapter and submit.adapter not in self._runner.adapters:
                raise ValueError(ADAPTER_LOST)
            if submit.grammar is not None:
                is_complete = self._grammars.begin(submit.uid, submit.prior_token_ids)
            self._scheduler.add(sequence)
        except ValueError as error:
            self._grammars.forget(submit.uid)
            sequence.finish_reason = FinishReason.ERROR
            self._rejections.append(create_delta(sequence, error=str(error)))
            return
        self._outputs[submit.uid] = output = SequenceOutput(sequence, self._tokenizer)
        # The client already has the text of the prior tokens: only the detokenizer's state is needed.
        _, _, stop = output.detokenizer.push(submit.prior_token_ids)
        if stop is not None or is_complete:
            self._scheduler.finish_uncomputed(sequence, FinishReason.STOP, stop)

    def load_adapter(self, command: LoadAdapter) -> None:
        """Begin to load an adapter, unless it is loaded, and keep it until `unload_adapter`.

        If the adapter cannot be read, no exception is raised: sequences that use it end with ADAPTER_LOST.
        """
        assert self._loader is not None
        self._loader.load(command)

    def unload_adapter(self, key: str) -> None:
        """Free an adapter. Call only when no sequence uses it. Unknown keys are ignored."""
        assert self._loader is not None
        self._loader.unload(key)

    def cancel(self, uid: str) -> None:
        """Cancel a sequence: its blocks are freed, and no further events follow. Unknown uids are ignored."""
        self._grammars.forget(uid)
        if self._loader is not None:
            self._loader.forget(uid)
        output = self._outputs.pop(uid, None)
        if output is not None:
            self._scheduler.finish(output.sequence, FinishReason.ABORT)

    def step(self, *, before: Callable[[list[tuple[str, int]]], None] | None = None) -> StepResult:
        """Compute a step, or wait for the outputs of the step that was launched ahead, and return the step's result.

        before: called before the computation with uid and attempt of each sequence computed for the first time.
        """
        began = time.perf_counter()
        is_idle = not (self._scheduler.has_work or self._rejections)
        for submit in () if self._loader is None else self._loader.take_loaded(may_wait=is_idle):
            self._compile(submit)
        for submit in self._grammars.take_compiled(may_wait=is_idle):
            self._enqueue(submit)
        ended = self._scheduler.take_ended()
        plan, read = self._plan, self._launched
        self._plan = self._launched = None
        if plan is None or not self._scheduler.has_running(plan):
            plan, read = self._scheduler.schedule(), None
            if before is not None and plan.admitted:
                before(plan.admitted)
        try:
            outputs = self._compute(plan, read)
        except torch.OutOfMemoryError as error:
            if plan.num_tokens == 1:
                raise
            message = "a step of %d tokens lacked memory and is repeated in smaller steps: %s"
            logger.warning(message, plan.num_tokens, first_line(error))
            self._plan = self._launched = None
            plan, outputs = self._scheduler.preempt_all(plan), _NO_OUTPUTS
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        failed: list[SequenceState] = []
        if outputs.non_finite:
            failed = self._scheduler.end_non_finite(plan, outputs.non_finite)
        updates = self._scheduler.commit(plan, outputs.token_ids, outputs.non_finite)
        if self._grammars.uids:
            self._advance_grammars(updates, outputs.token_ids)
        events = [
            *self._rejections,
            *[create_delta(sequence, error=NON_FINITE) for sequence in failed],
            *[self._outputs[sequence.uid].ending(is_computed=False) for sequence in ended],
            *[event for update in updates if (event := self._event(update, outputs)) is not None],
        ]
        # Last: if anything above fails, `abort_all` still finds the sequences without a reported ending.
        self._rejections.clear()
        for event in events:
            if event.finish is not None:
                self._outputs.pop(event.uid, None)
                self._grammars.forget(event.uid)
        num_tokens = [len(event.token_ids) for event in events if event.token_ids]
        return StepResult(events, self._stats(plan, len(updates), num_tokens, len(failed), time.perf_counter() - began))

    def _compute(self, plan: StepPlan, read: Callable[[], StepOutputs] | None) -> StepOutputs:
        """Return the outputs of a step, and launch the next step ahead if possible.

        read: waits for the outputs of a step that was launched ahead; None: the step is not launched.
        """
        if read is None and plan.chunks:
            masks = self._grammars.masks(plan) if self._grammars.uids else None
            inputs = self._inputs.build(plan, masks)
            if not (self._looks_ahead and _needs_no_host(plan, inputs)):
                return self._runner.run(inputs)
            read = self._runner.launch(inputs)
        if read is None:
            return _NO_OUTPUTS
        ahead = self._scheduler.schedule_ahead(plan)
        if ahead is not None:
            self._launched = self._runner.launch(self._inputs.build(ahead))
            self._plan = ahead
        return read()

    def attention_weights(self, token_ids: tuple[int, ...], *, layer: int, heads: tuple[int, ...]) -> bytes:
        """Return the attention weights of a text in one layer as float32 bytes, see `ModelRunner.attention_weights`."""
        return self._runner.attention_weights(token_ids, layer=layer, heads=heads)

    def abort_all(self, error: str) -> list[TokenDelta]:
        """End all sequences with the message `error` after a failed step. Return the events of unreported endings."""
        events = list(self._rejections)
        for output in self._outputs.values():
            self._scheduler.finish(output.sequence, FinishReason.ERROR)
            events.append(create_delta(output.sequence, error=error))
        self._scheduler.reset_prefix_cache()
        for uid in self._grammars.uids:
            self._grammars.forget(uid)
        self._rejections.clear()
        self._outputs.clear()
        return events

    def check_integrity(self) -> None:
        """Assert that no KV block leaked, and that scheduler, outputs and grammar matchers hold the same sequences."""
        self._scheduler.check_integrity()
        assert self._outputs.keys() == {sequence.uid for sequence in self._scheduler.sequences()}
        assert set(self._grammars.uids) <= self._outputs.keys()

    def _advance_grammars(self, updates: list[SequenceUpdate], token_ids: Sequence[int | None]) -> None:
        """Feed each sampled token to its sequence's grammar matcher, and end the sequences with a complete grammar."""
        for update in updates:
            sequence = update.sequence
            if not update.rows or sequence.finish_reason is FinishReason.STOP:
                continue
            token_id = token_ids[update.rows[0]]
            if token_id is not None and self._grammars.advance(sequence, token_id):
                self._scheduler.finish(sequence, FinishReason.STOP)

    def _event(self, update: SequenceUpdate, outputs: StepOutputs) -> TokenDelta | None:
        """Return a sequence's event after a step: new tokens, text, ending. None while its prompt is being computed."""
        sequence, chunk = update.sequence, update.chunk
        output = self._outputs[sequence.uid]
        if (prompt_logprobs := outputs.prompt_logprobs.get(sequence.uid)) is not None:
            output.add_prompt_logprobs(prompt_logprobs)
        if (sum_E := outputs.pooled.get(sequence.uid)) is not None:
            output.add_hidden_states(sum_E, start=chunk.start)
        if not update.rows:
            return output.ending(is_computed=True) if sequence.finish_reason is not None else None
        new_ids = sequence.token_ids[chunk.num_known_tokens :]
        if not new_ids:
            error = self._grammars.error(sequence.uid) or _NO_TOKEN.format(sequence.num_completion_tokens)
            return create_delta(sequence, error=error)
        num_kept, text, stop = output.detokenizer.push(new_ids, is_last=sequence.finish_reason is not None)
        if stop is not None:
            self._scheduler.truncate(sequence, chunk.num_known_tokens + num_kept, stop)
            del new_ids[num_kept:]
        logprobs = None
        if outputs.logprobs:
            entries = (outputs.logprobs[row] for row in update.rows[: len(new_ids)])
            logprobs = tuple(entry for entry in entries if entry is not None) or None
        scores = output.prompt_logprobs_before(len(new_ids))
        return create_delta(sequence, new_ids, text, logprobs=logprobs, prompt_logprobs=scores)

    def _stats(
        self, plan: StepPlan, batch_size: int, num_tokens: list[int], num_failed: int, seconds: float
    ) -> StepStats:
        """Return a step's statistics for the metrics. `num_tokens`: new tokens of each sequence that got any."""
        drafts = [len(chunk.draft) for chunk in plan.chunks if chunk.draft]
        return StepStats(
            num_running=self._scheduler.num_running,
            max_num_running=self._scheduler.max_num_running,
            num_waiting=self._scheduler.num_waiting + self._num_held,
            kv_usage=1 - self._scheduler.num_free_blocks / self._config.num_blocks,
            batch_size=batch_size,
            num_prompt_tokens=plan.num_prompt_tokens,
            num_completion_tokens=sum(num_tokens),
            num_cached_prompt_tokens=plan.num_cached_prompt_tokens,
            num_prefix_queries=plan.num_prefix_queries,
            num_prefix_hits=plan.num_prefix_hits,
            num_preemptions=plan.num_preemptions,
            num_drafts=len(drafts),
            num_draft_tokens=sum(drafts),
            num_accepted_tokens=sum(num_tokens) - len(num_tokens),
            step_seconds=seconds,
            num_non_finite=num_failed,
        )


def create_submit(uid: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Submit:
    """Return the submission (`Submit`) of a prompt that arrives now, for an engine that runs without the API server."""
    return Submit(uid=uid, prompt_token_ids=tuple(prompt_token_ids), params=params, arrival_seconds=time.monotonic())


def complete_batch(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Complete prompts offline, with an engine created for them. Return the token ids of each prompt's completion.

    Raise ValueError if the engine rejects a prompt or its parameters.
    """
    longest = max((len(ids) + wanted.max_tokens for ids, wanted in zip(prompts, params, strict=True)), default=1)
    config = EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=max(1, min(_MAX_NUM_RUNNING, len(prompts))) * -(-longest // _BLOCK_SIZE),
        max_num_running=_MAX_NUM_RUNNING,
    )
    engine = Engine(model, tokenizer, config)
    for number, (ids, wanted) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(create_submit(str(number), ids, wanted))
    completions: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step().events:
            completions[int(event.uid)] += event.token_ids
            if event.finish is not None and event.finish.error is not None:
                raise ValueError(event.finish.error)
    return completions


def _needs_no_host(plan: StepPlan, inputs: ModelInputs) -> bool:
    """Return True if the device samples a step without the host: no token rules, grammar masks or logprobs."""
    return (
        all(chunk.samples for chunk in plan.chunks)
        and not (inputs.rules or inputs.forbidden or inputs.prompt_rows or inputs.wants_logprobs)
        and inputs.masks is None
    )
