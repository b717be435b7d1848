"""Equality of the joined stream and the JSON body of a request, for any fields, delta sizes and worker deaths."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from service.admission.controller import Admission
from service.api.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder
from service.api.streaming import CompletionBody, CompletionStream, Delivery
from service.engine.output_processor import Detokenizer
from service.ipc.messages import Command, FinishReason, Submit, TokenDelta, TokenLogprob
from service.protocol.completions import CompletionRequest, StreamOptions
from service.requests.engine_client import EngineClient
from service.requests.inflight import Choice
from tests.service.desk import fake_workers
from tests.service.sequences import make_choice, make_delta, make_finish, make_hello, make_request
from tests.service.streams import events, joined
from tests.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = ((97, 0xF0, 98), (99,))
SILENT: Any = SimpleNamespace(
    **dict.fromkeys(
        (
            "observe",
            "observe_inter_token",
            "observe_finish",
            "flush",
            "count_cancellation",
            "count_wasted_tokens",
        ),
        lambda *args, **more: None,
    )
)


def scored(token_id: int, position: int, num_top: int) -> TokenLogprob:
    """Return the logprob of a token, which depends on position only, so that each attempt computes the same."""
    top = tuple(((token_id + number) % 256, -float(number + position % 3)) for number in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-float(position % 3), rank=1, top=top)


@dataclass
class Engine:
    """Simulated worker that generates the token ids `texts[uid]`. Every step returns one delta of one sequence.

    The first delta of a prompt's first sample has the prompt's logprobs. In a first attempt, no other sample of the
    prompt gets a delta earlier.
    """

    texts: dict[str, Sequence[int]]
    running: dict[str, tuple[Submit, Detokenizer, int]] = field(default_factory=dict)

    def take(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                detokenizer = Detokenizer(TOKENIZER, command.params)
                detokenizer.push(command.prior_token_ids)
                self.running[command.uid] = (command, detokenizer, len(command.prior_token_ids))

    def next(self, turn: int) -> str:
        """Return the uid of the sequence that gets the next delta."""
        uid = sorted(self.running)[turn % len(self.running)]
        first = uid.split(".")[0] + ".0"
        submit, _, start = self.running.get(first, self.running[uid])
        has_to_score = submit.params.prompt_logprobs is not None and start == len(submit.prior_token_ids)
        return submit.uid if has_to_score and not submit.attempt else uid

    def step(self, uid: str, count: int) -> TokenDelta:
        submit, detokenizer, start = self.running.pop(uid)
        params, ids = submit.params, self.texts[uid]
        new = tuple(ids[start : start + count])
        is_over = start + len(new) == len(ids)
        _, text, _ = detokenizer.push(new, is_last=is_over)
        if not is_over:
            self.running[uid] = (submit, detokenizer, start + len(new))
        is_first = start == len(submit.prior_token_ids)
        scores = None
        if is_first and params.prompt_logprobs is not None:
            prompt = submit.prompt_token_ids
            scores = tuple(scored(i, p, params.prompt_logprobs) for p, i in enumerate(prompt))
            scores = (TokenLogprob(token_id=prompt[0], logprob=None, rank=None, top=()), *scores[1:])
        return make_delta(
            uid,
            index=start,
            ids=new,
            text=text,
            attempt=submit.attempt,
            logprobs=None
            if params.logprobs is None
            else tuple(scored(i, start + n, params.logprobs) for n, i in enumerate(new)),
            prompt_logprobs=scores,
            finish=make_finish(FinishReason.LENGTH, num_cached_tokens=1) if is_over else None,
        )


def make_choices(builder: type[ResponseBuilder], asked: CompletionRequest, num_samples: int) -> list[Choice]:
    """Return choices as the request processor builds them."""
    prompts = PROMPTS if builder is CompletionBuilder else PROMPTS[:1]
    wanted = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
    choices = [
        make_choice(
            f"{prompt_index}.{sample}",
            index=prompt_index * num_samples + sample,
            prompt_index=prompt_index,
            text=f"<{prompt_index}>" if asked.echo else "",
            prompt=prompt,
            logprobs=asked.logprobs,
            prompt_logprobs=None if sample else max((number for number in wanted if number is not None), default=None),
        )
        for prompt_index, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]
    for choice in choices:
        choice.prompt_logprobs = choices[choice.prompt_index * num_samples].prompt_logprobs
    return choices


@dataclass(frozen=True)
class Scene:
    """One request, the sequence and number of tokens of each step, and the steps at which the worker dies."""

    builder: type[CompletionBuilder] | type[ChatBuilder]
    asked: CompletionRequest
    num_samples: int
    texts: list[list[int]]
    turns: list[tuple[int, int]]
    deaths: set[int]

    async def play(self, kind: Callable[..., Delivery], deaths: set[int]) -> str:
        """Return the bytes that the client receives."""
        choices = make_choices(self.builder, self.asked, self.num_samples)
        engine = Engine({choice.submit.uid: self.texts[choice.index] for choice in choices})
        engine_client = EngineClient(
            **fake_workers(engine.take),
            admission=Admission(max_num_running=8, max_waiting_requests=8, max_waiting_tokens=1000),
            on_worker_ready=lambda hello, worker: None,
            on_engine=lambda event, worker: None,
            on_replay=lambda outcome: None,
            on_late=lambda num_tokens: None,
            on_count=lambda number: None,
        )
        request = make_request(*choices)
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.Event().wait()

        engine_client.submit(request)
        builder = self.builder(self.asked, response_id="id", created=5, model="tiny", tokenizer=TOKENIZER)
        response = kind(request, builder, metrics=SILENT, finish=lambda request: None)
        task = asyncio.create_task(response({}, receive, send))
        turns, number = list(self.turns), 0
        while engine.running:
            turn, count = turns.pop() if turns else (0, 3)
            delta = engine.step(engine.next(turn), count)
            if number in deaths:
                engine.running.clear()  # the tokens of this step are lost
                engine_client.receive([make_hello(number + 1)])
            else:
                engine_client.receive([delta])
            number += 1
            for _ in range(number % 3):  # in some turns several deltas arrive before the response task runs
                await asyncio.sleep(0)
        await task
        return b"".join(sent).decode()


WANTS = st.builds(
    CompletionRequest,
    prompt=st.just("a"),
    logprobs=st.none() | st.integers(0, 3),
    prompt_logprobs=st.none() | st.integers(0, 3),
    return_token_ids=st.booleans(),
    return_tokens_as_token_ids=st.booleans(),
    stream_options=st.builds(StreamOptions, include_usage=st.booleans(), continuous_usage_stats=st.booleans()),
    echo=st.booleans(),
)
TOKENS = st.sampled_from([97, 98, 0xF0, 0x9F, *TOKENIZER.encode("😀é"), TOKENIZER.eos_token_ids[0]])


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    builders: list[type[CompletionBuilder] | type[ChatBuilder]] = [CompletionBuilder, ChatBuilder]
    builder = draw(st.sampled_from(builders))
    asked = draw(WANTS)
    num_samples = draw(st.integers(1, 2))
    if builder is ChatBuilder:  # chat completions have no echo
        asked = asked.model_copy(update={"echo": False})
    return Scene(
        builder=builder,
        asked=asked,
        num_samples=num_samples,
        texts=draw(st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=4, max_size=4)),
        turns=draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=20)),
        deaths=draw(st.sets(st.integers(0, 8))),
    )


def check_usage(scene: Scene, chunks: list[dict[str, Any]], body: dict[str, Any]) -> None:
    """Check that streamed usage never falls, is in every requested chunk, and in the last equals the body's usage."""
    told, options = [chunk["usage"] for chunk in chunks if "usage" in chunk], scene.asked.stream_options
    assert options is not None
    assert len(told) == (len(chunks) if options.continuous_usage_stats else int(bool(options.include_usage)))
    totals = [usage["total_tokens"] for usage in told]
    assert totals == sorted(totals)
    assert all(usage["prompt_tokens"] == body["usage"]["prompt_tokens"] for usage in told)
    assert told == [] or told[-1] == body["usage"]
    assert (chunks[-1]["choices"] == []) is options.include_usage


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_a_stream_joined_equals_the_json_body_even_after_worker_deaths(scene: Scene) -> None:
    body = json.loads(asyncio.run(scene.play(CompletionBody, set())))
    expected = {name: body[name] for name in ("choices", "prompt_token_ids", "prompt_logprobs") if name in body}
    after_deaths = json.loads(asyncio.run(scene.play(CompletionBody, scene.deaths)))
    assert {**after_deaths, "timings": None} == {**body, "timings": None}
    for deaths in (set[int](), scene.deaths):
        chunks = events(asyncio.run(scene.play(CompletionStream, deaths)))
        assert joined(chunks) == expected
        check_usage(scene, chunks, body)
    check_choices(scene, body)


def check_choices(scene: Scene, body: dict[str, Any]) -> None:
    """Check that the body has each generated token once, and no optional field that was not requested."""
    asked = scene.asked
    for choice, ids in zip(body["choices"], scene.texts, strict=False):
        assert choice.get("token_ids") == (ids if asked.return_token_ids else None)
        names = [f"token_id:{i}" for i in ids] if asked.return_tokens_as_token_ids else None
        if asked.logprobs is None:
            assert choice["logprobs"] is None
        elif scene.builder is ChatBuilder:
            content = choice["logprobs"]["content"]
            assert [len(entry["top_logprobs"]) for entry in content] == [asked.logprobs] * len(ids)
            assert names is None or [entry["token"] for entry in content] == names
        else:
            told = choice["logprobs"]["tokens"]
            prompt = PROMPTS[choice["index"] // scene.num_samples]
            assert len(told) == len(ids) + (len(prompt) if asked.echo else 0)
            assert names is None or told[len(told) - len(ids) :] == names
        assert ("prompt_logprobs" in choice) is (
            scene.builder is CompletionBuilder and asked.prompt_logprobs is not None
        )
        assert ("prompt_token_ids" in choice) is (scene.builder is CompletionBuilder and asked.return_token_ids)
    assert ("prompt_logprobs" in body) is (scene.builder is ChatBuilder and asked.prompt_logprobs is not None)
    assert ("prompt_token_ids" in body) is (scene.builder is ChatBuilder and asked.return_token_ids)
