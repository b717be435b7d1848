"""Traces: every format, broken lines, and the requests that repeat a trace on a model of a given context."""

import itertools
import json
from pathlib import Path

import pytest

import loadtest.traces
from loadtest.client.outcome import Outcome
from loadtest.client.requests import ConversationRequest, LoadRequest
from loadtest.client.workload import Passages, Workload, WorkloadSpec, tales
from loadtest.traces.formats import RecordedRequest, Trace, read_trace
from loadtest.traces.replay_requests import Fit, Replay, replay_of
from tests.loadtest.outcomes import outcome

EXCERPT = Path(loadtest.traces.__file__).with_name("azure_conversations.csv")
TALES = tales()
TOKENS = [TALES[start : start + 4] for start in range(0, len(TALES), 4)]
SHARED = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}',
    '{"timestamp": 1500, "input_length": 1500, "output_length": 30, "hash_ids": [1, 2, 9]}',
    '{"timestamp": 3000, "input_length": 700, "output_length": 40, "hash_ids": [4, 5]}',
]
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hello there"},
                                  {"from": "gpt", "value": "Good day " * 4}, {"from": "human", "value": "Bye"},
                                  {"from": "gpt", "value": "Bye"}, {"from": "human", "value": "unanswered"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "nothing was asked"}]},
    {"id": "c", "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]},
]  # fmt: skip


def written(directory: Path, text: str) -> Path:
    path = directory / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def workload(max_context_tokens: int = 100_000) -> Workload:
    return Workload(WorkloadSpec(max_context_tokens=max_context_tokens), Passages(TALES, TOKENS))


def num_tokens(request: LoadRequest) -> int:
    return round(len(str(request.prompt)) / 4)


def lengths(trace: Trace) -> list[tuple[float, int, int]]:
    return [(each.seconds, each.prompt_tokens, each.output_tokens) for each in trace.requests]


def test_mooncake_has_times_in_milliseconds_and_hash_ids(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "\n".join([*SHARED, ""])))
    assert trace.form == "Mooncake"
    assert lengths(trace) == [(0.0, 1100, 20), (1.5, 1500, 30), (3.0, 700, 40)]
    assert trace.requests[1].hash_ids == [1, 2, 9]


def test_burstgpt_is_a_table_in_which_a_failed_request_has_no_answer(tmp_path: Path) -> None:
    rows = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,472,18,490,API log"]
    trace = read_trace(written(tmp_path, "\n".join([*rows, "45,ChatGPT,1087,0,1087,API log", "47.5,GPT-4,9,7,16,x"])))
    assert (trace.form, trace.num_unusable) == ("BurstGPT", 1)
    assert lengths(trace) == [(0.0, 472, 18), (42.5, 9, 7)]
    assert replay_of(trace, workload()).notes == ["1 without a prompt or an answer left out"]


def test_the_excerpt_of_azure_is_read() -> None:
    trace = read_trace(EXCERPT)
    assert (trace.form, len(trace.requests)) == ("Azure", 200)
    assert lengths(trace)[:2] == [(0.0, 374, 44), (pytest.approx(4.314579, abs=1e-5), 396, 109)]


def test_sharegpt_and_messages_are_conversations_in_turns(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, json.dumps(SHAREGPT, indent=1)))
    assert (len(trace.conversations), trace.num_unusable) == (2, 1)
    assert trace.conversations[0].texts == ["Hello there", "Good day " * 4, "Bye", "Bye"]
    replayed = replay_of(trace, workload())
    assert replayed.offsets is None
    first, other = itertools.islice(replayed.requests, 2)
    assert (first.prompt, first.max_tokens, other.prompt) == (["Hello there"], 9, ["Why?"])
    assert first.on_end is not None
    answered: Outcome = outcome(text="Hm.")
    first.on_end(first, answered)
    assert next(replayed.requests).prompt == ["Hello there", "Hm.", "Bye"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n".join([*SHARED[:2], '{"timestamp": 3, "input_length": "many", "output_length": 4}']),
         ":3: Expected `int`, got `str` - at `$.input_length`"),
        (SHARED[0][:40], ":1: Input data was truncated"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\nnoon,1,2", ":3: Invalid isoformat"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374\n", ":2: invalid literal for int"),
        ("Timestamp,Request tokens,Response tokens\n1,2,-3", ":2: a length is below 0: -3"),
        ("a,b,c\n1,2,3", ":1: not a known trace"),
        ("", ":1: not a known trace"),
        ('[{"messages": []},\n{"messages": 3}]', ":1: Expected `array`, got `int` - at `$[1].messages`"),
        ('[{"messages": []},\n{"messages": ]}]', ":2: JSON is malformed"),
    ],
)  # fmt: skip
def test_a_broken_line_is_one_error_with_file_and_line(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is compared
        read_trace(path)
    assert str(error.value).startswith(f"{path}{message}")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.csv: No such file or directory"):
        read_trace(tmp_path / "none.csv")


def shared_tokens(replayed: Replay) -> list[int]:
    """Return the length of each prompt's beginning that the first prompt has, too, in tokens of four characters."""
    texts = [str(request.prompt) for request in replayed.requests]
    pairs = [itertools.takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], text, strict=False)) for text in texts]
    return [sum(1 for _ in pair) // 4 for pair in pairs]


def test_prompts_with_equal_leading_hash_ids_begin_with_equal_text(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "\n".join(SHARED)))
    requests = list(replay_of(trace, workload()).requests)
    assert [num_tokens(request) for request in requests] == pytest.approx([1100, 1500, 700], abs=8)
    assert [request.max_tokens for request in requests] == [20, 30, 40]
    own, shared, other = shared_tokens(replay_of(trace, workload()))
    assert own == pytest.approx(num_tokens(requests[0]), abs=1)
    assert shared == pytest.approx(1024, abs=8)
    assert other < 3


def test_a_short_context_scales_a_trace_with_shared_prefixes_and_says_so(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "\n".join(SHARED)))
    replayed = replay_of(trace, workload(512))
    (note,) = replayed.notes
    assert note == "all lengths multiplied by 0.334, a block of 512 tokens is 171"
    requests = list(replayed.requests)
    assert all(num_tokens(each) + each.max_tokens <= 512 for each in requests)
    assert [num_tokens(request) for request in requests] == pytest.approx([367, 501, 234], abs=8)
    assert shared_tokens(replay_of(trace, workload(512)))[1] == pytest.approx(2 * 171, abs=8)


@pytest.mark.parametrize(("fit", "count"), [(None, 2), (Fit.CUT, 2), (Fit.DROP, 1)])
def test_longer_requests_are_cut_or_dropped_and_counted(fit: Fit | None, count: int) -> None:
    records = [RecordedRequest(seconds=s, prompt_tokens=900, output_tokens=out) for s, out in ((0.0, 700), (2.0, 90))]
    replayed = replay_of(Trace("Azure", records), workload(1000), fit)
    done = "dropped" if fit is Fit.DROP else "cut"
    assert replayed.notes == [f"1 longer than the context of 1000 tokens {done}"]
    assert replayed.offsets == [0.0, 2.0][-count:]
    requests = list(replayed.requests)
    assert [request.max_tokens for request in requests] == [500, 90][-count:]
    assert num_tokens(requests[-1]) == pytest.approx(900, abs=6)
    assert all(num_tokens(each) + each.max_tokens <= 1000 for each in requests)


def test_conversations_end_at_the_context(tmp_path: Path) -> None:
    long = {"messages": [{"role": ("user", "assistant")[i % 2], "content": "word " * 300} for i in range(8)]}
    trace = read_trace(written(tmp_path, json.dumps([long])))
    replayed = replay_of(trace, workload(2000))
    request = next(replayed.requests)
    assert isinstance(request, ConversationRequest)
    assert len(request.later) == 1
    assert replayed.notes == ["1 conversations ended early, at the context of the model"]
    (cut,) = replay_of(trace, workload(300)).requests
    assert isinstance(cut, ConversationRequest)
    assert (len(cut.prompt), len(cut.later)) == (1, 0)
    assert len(str(cut.prompt[0])) / 4 + cut.max_tokens <= 300
