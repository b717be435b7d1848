"""Stateful test of the engine: random submissions, cancellations, resubmissions, failures and steps.

The runner stores token ids in place of keys and values. So a sequence that reads a block of another sequence samples
wrong tokens.
"""

import math
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.engine.engine import StepResult
from service.engine.scheduling.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, external_hash
from service.ipc.messages import Finish, FinishReason, Submit
from tests.engine.fakes import CONTEXT, EOS, expected_tokens, make_engine, make_submit


class EngineMachine(RuleBasedStateMachine):
    """Hypothesis state machine of an engine: sequences arrive, are cancelled and resubmitted between steps."""

    max_draft_tokens = 0
    looks_ahead = False
    target_itl_seconds = math.inf

    def __init__(self) -> None:
        super().__init__()
        # The length of drafts depends on step times, which Hypothesis needs to be reproducible.
        self.engine, self.runner = make_engine(
            max_draft_tokens=self.max_draft_tokens,
            looks_ahead=self.looks_ahead,
            target_itl_seconds=self.target_itl_seconds,
            fakes_time=True,
        )
        self.live: dict[str, Submit] = {}
        self.sampled: dict[str, list[int]] = {}
        self.waited: dict[str, int] = {}
        self.count = 0
        self.cache_log = self.engine.log_prefix_cache()
        self.routed: set[int] = set()  # hashes of cached blocks, as a router knows them from the events

    @rule(
        prompt=st.one_of(
            st.lists(st.integers(0, 255), min_size=1, max_size=CONTEXT),
            # Shared prefixes, for the prefix cache.
            st.tuples(st.integers(0, 12), st.integers(0, 3)).map(lambda pair: [7] * pair[0] + [pair[1]]),
        ),
        max_tokens=st.integers(0, 20),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.lists(st.integers(0, 255), max_size=20),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        salt=st.sampled_from(["", "", "mine"]),
        namespace=st.sampled_from(["", "", "bob"]),
        bad_word_ids=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
    )
    def submit(self, prompt: list[int], max_tokens: int, min_tokens: int, **params: Any) -> None:
        self.count += 1
        uid = f"s{self.count}"
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
        submit = make_submit(uid, prompt, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **params)
        self.engine.submit(submit)
        self.live[uid], self.sampled[uid], self.waited[uid] = submit, [], 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.cancel(uid)
        del self.live[uid]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def resubmit(self, data: st.DataObject) -> None:
        """Resubmit a sequence as after a worker crash: with its tokens so far, as a newer attempt."""
        uid = data.draw(st.sampled_from(sorted(self.live)))
        old = self.live[uid]
        self.live[uid] = msgspec.structs.replace(old, attempt=old.attempt + 1, prior_token_ids=tuple(self.sampled[uid]))
        self.engine.submit(self.live[uid])
        self.engine.submit(old)  # late, and ignored
        self.waited[uid] = 0

    @precondition(lambda self: self.live)
    @rule()
    def fail(self) -> None:
        """Let a step fail. `abort_all` must report exactly one ending of each unfinished sequence."""
        self.runner.fail_at = len(self.runner.batches) + 1
        try:
            result = self.engine.step()
        except RuntimeError:
            events = self.engine.abort_all("it broke")
            assert sorted(event.uid for event in events) == sorted(self.live)
            for event in events:
                submit = self.live.pop(event.uid)
                assert event.attempt == submit.attempt
                assert event.finish is not None
                if event.finish.error == "it broke":
                    assert event.finish.reason is FinishReason.ERROR
        else:  # there was nothing to compute
            self._take(result)
        self.runner.fail_at = None

    @rule()
    def step(self) -> None:
        num_batches = len(self.runner.batches)
        result = self.engine.step()
        for batch in self.runner.batches[num_batches:]:
            assert sum(batch) <= 7
        self._take(result)
        for uid in self.live:
            self.waited[uid] += 1
            # No starvation: each sequence served before needs at most as many steps as a context has tokens.
            assert self.waited[uid] < 40 * (1 + self.count)

    def _take(self, result: StepResult) -> None:
        for event in result.events:
            submit = self.live[event.uid]  # KeyError: an event after the end, or of an unknown sequence
            assert event.attempt == submit.attempt
            assert event.index == len(self.sampled[event.uid])
            self.sampled[event.uid] += event.token_ids
            if event.finish is not None:
                del self.live[event.uid]
                self._check_end(submit, event.finish)

    def _check_end(self, submit: Submit, finish: Finish) -> None:
        wanted = expected_tokens(submit, CONTEXT)
        assert self.sampled[submit.uid] == wanted
        assert finish.num_completion_tokens == len(wanted)
        stopped = wanted and (
            (wanted[-1] == EOS and not submit.params.ignore_eos) or wanted[-1] in submit.params.stop_token_ids
        )
        assert finish.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    @invariant()
    def whole(self) -> None:
        self.engine.check_integrity()

    @invariant()
    def routers_know_the_prefix_cache(self) -> None:
        for event in self.cache_log.take():
            match event:
                case BlockStored():
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    self.routed.update(event.block_hashes)
                case BlockRemoved():
                    self.routed.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.routed.clear()
        scheduler = self.engine._scheduler
        cached = {external_hash(content) for content in scheduler._pool._hash_of_block.values()}
        assert self.routed <= cached
        for sequence in scheduler._running:
            hashes = sequence.full_block_hashes(sequence.num_registered_blocks, scheduler._config.block_size)
            public = {external_hash(content) for content in hashes} if sequence.has_public_prefix else set()
            assert public & cached <= self.routed

    def teardown(self) -> None:
        for _ in range(40 * (1 + self.count)):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert not self.live
        stats = self.engine.step().stats
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


class DraftingMachine(EngineMachine):
    """State machine of an engine with speculative decoding."""

    max_draft_tokens = 4


class LookaheadMachine(EngineMachine):
    """State machine of an engine that launches steps ahead."""

    looks_ahead = True


class TargetMachine(EngineMachine):
    """State machine of an engine with an inter-token latency target that lets one to four sequences run."""

    target_itl_seconds = 1.15

    @rule()
    def become_slower_or_faster(self) -> None:
        self.runner.step_seconds = 1.0 if self.runner.step_seconds > 1.0 else 1.5

    @rule()
    def step(self) -> None:
        scheduler = self.engine._scheduler
        most = max(scheduler.num_running, scheduler.max_num_running)
        super().step()
        assert scheduler.num_running <= most
        assert 1 <= scheduler.max_num_running <= 4


class TargetLookaheadMachine(TargetMachine):
    """State machine of an engine that launches steps ahead, with an inter-token latency target."""

    looks_ahead = True


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDraftingEngine = DraftingMachine.TestCase
TestDraftingEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTargetEngine = TargetMachine.TestCase
TestTargetEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTargetLookaheadEngine = TargetLookaheadMachine.TestCase
TestTargetLookaheadEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLookaheadEngine = LookaheadMachine.TestCase
TestLookaheadEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
