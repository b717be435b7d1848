"""What the overload run counts, and the run itself on a real service of a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.outcome import Ending
from loadtest.scenarios import bench_overload
from loadtest.scenarios.bench_overload import Load, accuracy, aims, growth_per_minute, histogram_between, ttft_of
from loadtest.scenarios.closed_and_open_loop import Run
from tests.loadtest.outcomes import outcome


def load(*outcomes: Any, settled: float = 10.0, ended: float = 20.0) -> Load:
    return Load(Run(outcomes=outcomes, duration_seconds=1.0, client_cpu_share=0.1), settled, ended)


def answer(sent: float, chunks: tuple[float, ...], ending: Ending = Ending.OK) -> Any:
    end = max(chunks, default=sent)
    return outcome(ending=ending, intended_seconds=sent, chunk_seconds=chunks, end_seconds=end, completion_tokens=10)


def test_tokens_count_where_they_arrive() -> None:
    whole, early, late = answer(11.0, (12.0, 13.0)), answer(8.0, (9.0, 11.0)), answer(19.0, (19.5, 21.0))
    assert load(whole).tokens_per_second == 1.0
    assert load(whole, early, late).tokens_per_second == 2.0
    assert load(answer(1.0, (2.0, 3.0)), answer(12.0, (13.0,), Ending.TIMEOUT)).tokens_per_second == 0.0


def test_first_tokens_are_those_of_the_admitted_in_the_steady_part() -> None:
    given = load(answer(1.0, (9.0,)), answer(11.0, (11.5,)), answer(12.0, (), Ending.SHED))
    assert ttft_of([given], 99) == pytest.approx(0.5)
    assert ttft_of([load()], 99) is None
    told = given.to_dict()
    assert told["endings"] == {"ok": 1, "shed": 1}
    assert told["failures"] == {}


def test_loads_count_together_by_their_length_and_by_their_requests() -> None:
    short = load(answer(11.0, (11.5,)), settled=10.0, ended=15.0)
    long = load(answer(11.0, (11.1,)), answer(12.0, (12.1,)), answer(13.0, (13.1,)), settled=10.0, ended=25.0)
    assert (short.tokens_per_second, long.tokens_per_second) == (2.0, 2.0)
    assert ttft_of([short, long], 50) == pytest.approx(0.1)
    assert ttft_of([short, long], 100) == pytest.approx(0.5)
    assert ttft_of([load()], 99) is None


def test_growth_is_a_slope() -> None:
    assert growth_per_minute([(float(second), 100.0 + 0.5 * second) for second in range(20)]) == pytest.approx(30.0)
    assert growth_per_minute([(1.0, 5.0)]) == 0.0


SCRAPES = (
    'x_bucket{engine="0",le="-0.2"} 1.0\nx_bucket{engine="0",le="0.5"} 3.0\nx_bucket{engine="0",le="+Inf"} 3.0\n',
    'x_bucket{engine="0",le="-0.2"} 2.0\nx_bucket{engine="0",le="0.5"} 9.0\nx_bucket{engine="0",le="+Inf"} 10.0\n',
)


def test_what_a_histogram_gathered_between_two_scrapes() -> None:
    assert histogram_between(*SCRAPES, "x") == [(-0.2, 1), (0.5, 5), (float("inf"), 1)]
    before, after = (scrape.replace("x_", "llm_retry_after_error_seconds_") for scrape in SCRAPES)
    told = accuracy(before, after)
    assert (told["promises_watched"], told["share_within_0.5_s"]) == (7, round(6 / 7, 4))


def test_aims_are_met_or_not() -> None:
    calm, full = load(answer(11.0, (11.1,))), load(answer(11.0, (11.3,)), answer(12.0, (12.3,)))
    told: dict[str, Any] = {
        "service": {"api": {"growth_mib_per_minute": 0.1}, "worker": {"growth_mib_per_minute": 5.0}},
        "overload": {"failures": {"http_error: 500 x": 2}},
        "sdk": {"own_key": {"errors": {}, "tokens_per_second": 0.5}},
    }
    found = aims(told, 2.0, [calm], full)
    assert found["throughput_share"] == {"value": 1.25, "aim": 0.95, "met": True}
    assert (found["ttft_p99_ratio"]["value"], found["ttft_p99_ratio"]["met"]) == (pytest.approx(3.0), False)
    assert not found["growth_mib_per_minute"]["met"]
    assert (found["answers_of_5xx"]["value"], found["failures"]["value"]) == (2, 2)
    assert found["errors_seen_by_sdk_users"]["met"]


@pytest.mark.slow
def test_the_whole_run_on_a_service(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "overload.json"
    arguments = ["--checkpoint", str(checkpoint), "--out", str(out), "--seconds", "3", "--level-seconds", "1"]
    arguments += ["--saturation-seconds", "1", "--settle-seconds", "0.5", "--streams", "2", "--output-tokens", "16"]
    assert bench_overload.main([*arguments, "--", "--threads", "1", "--max-num-running", "4"]) == 0
    told = json.loads(out.read_text())
    assert told["overload"]["endings"]["ok"] > 0
    assert told["overload"]["failures"] == {}
    loads = ["2 streams", "saturation", "overload", "saturation again"]
    assert list(told["other_work_cores_during"]) == loads
    assert told["saturation"]["streams"] == told["saturation_again"]["streams"] == 4
    assert set(told["service"]) == {"api", "worker"}
    assert all(part["most_mib"] > 1 for part in told["service"].values())
    assert {user: facts["errors"] for user, facts in told["sdk"].items()} == {"own_key": {}, "key_of_the_flood": {}}
    assert all(facts["completions"] > 0 for facts in told["sdk"].values())
    assert set(told["aims"]["throughput_share"]) == {"value", "aim", "met"}


def test_settings_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_overload.main(["--checkpoint", str(tmp_path), "--", "--threads", "none"])
    assert "--threads" in capsys.readouterr().err
