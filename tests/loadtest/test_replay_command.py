"""`kvasir loadtest replay` against a stub server: a trace, shaped arrivals, and the comparison of two replays."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.measurement import benchmark_program
from loadtest.sweep.command import main
from tests.loadtest.stub_server import Script, StubServer
from tests.loadtest.test_traces import EXCERPT

NUM_CANARIES = 8  # asked before the load


@pytest.fixture(autouse=True, scope="module")
def _at_once() -> Iterator[None]:
    """Skip the second in which a benchmark measures other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_program, "measure_other_work", lambda program: 0.0)
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Replay a trace of 40 requests on a fast and on a slow server, and return the paths of the JSON files."""
    directory, found = tmp_path_factory.mktemp("replay"), {}
    rows = [f"2023-11-16 18:15:{second:02d}.5,{9000 if second == 7 else 30},4" for second in range(40)]
    trace = directory / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    flags = ["--speed-up", "100", "--slo-e2e-p95-ms", "300", "--canary-share", "0"]
    for name, first_seconds in (("fast", 0.0), ("slow", 0.4)):
        found[name] = directory / f"{name}.json"
        with StubServer(Script(first_seconds=first_seconds, gap_seconds=0.002)) as server:
            out = ["--trace", str(trace), "--out", str(found[name])]
            assert main(["replay", "--url", server.url, *out, *flags]) == 0
        assert len(server.requests) == 40
    return found


def test_the_result_has_the_form_of_a_sweep_and_goodput(paths: dict[str, Path]) -> None:
    fast, slow = (json.loads(path.read_text()) for path in paths.values())
    assert {"command", "date", "commit", "machine", "workload", "settings", "slo", "levels"} <= set(fast)
    assert (fast["kind"], fast["settings"]["form"]) == ("replay", "Azure")
    (quick,), (late,) = fast["levels"], slow["levels"]
    assert quick["sent"] == late["sent"] == 40
    assert quick["rate"] == pytest.approx(40 / 0.39, rel=1e-3)
    assert quick["request_goodput"] > late["request_goodput"] == 0.0
    assert fast["notes"] == ["1 longer than the context of 512 tokens cut"]
    page = paths["slow"].with_suffix(".md").read_text()
    assert "# Load replay of stub" in page
    assert "(Azure), 100 times as fast: 103 requests/s; 40 ok, 0 rejected, 0 failed." in page
    assert "0.0% of all requests within the objectives" in page
    assert "Missed objective: E2E p95" in page
    assert "Load replay of stub" in paths["slow"].with_suffix(".html").read_text()


def test_two_replays_are_compared_at_equal_objectives(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, paths.values())]) == 1
    found = capsys.readouterr().out
    goodput = next(line for line in found.splitlines() if "goodput" in line)
    assert "-100.0%" in goodput
    assert "regression" in goodput
    assert main(["compare", str(paths["fast"]), str(paths["fast"])]) == 0


def test_a_workload_is_sent_with_shaped_arrivals_until_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "80", "--arrivals", "ramp", "--period-seconds", "0.5", "--max-seconds", "1"]
    with StubServer() as server:
        main(["replay", "--url", server.url, *flags, "--workload", "fixed=3,lognormal=1", "--output-tokens", "4"])
    assert 20 < len(server.requests) - NUM_CANARIES < 110
    assert "requests of fixed=3,lognormal=1: " in capsys.readouterr().out


def test_the_help_has_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["replay", "--help"])
    shown = capsys.readouterr().out
    for option in ("--trace", "--fit", "--speed-up", "--burstiness", "--workload", "--think-seconds", "--slo-ttft"):
        assert option in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--rate is missing"),
        (["--rate", "3"], "give --max-seconds or --max-requests"),
        (["--trace", str(EXCERPT), "--speed-up", "0"], "--speed-up must be above 0"),
        (["--trace", "nothing.csv"], "nothing.csv: No such file"),
        (["--rate", "3", "--max-requests", "3", "--workload", "chat=1,songs"], "--workload: 'songs' is not KIND"),
    ],
)
def test_invalid_options_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", "--url", "http://127.0.0.1:9", *flags])
    assert message in capsys.readouterr().err.splitlines()[-1]
