"""The bench of the way to the client: a real service, whose engine computes nothing."""

import json
from pathlib import Path

import psutil
import pytest

from loadtest.scenarios import bench_frontend
from loadtest.scenarios.instant_engine import InstantEngine
from service.ipc.messages import FinishReason
from tests.service.sequences import make_submit


@pytest.mark.slow
def test_every_token_arrives_and_nothing_is_left_behind(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "frontend.json"
    arguments = ["--checkpoint", str(checkpoint), "--out", str(out), "--streams", "1", "4", "--repeats", "2"]
    arguments += ["--requests-per-stream", "2", "--output-tokens", "30", "--step-ms", "0", "5"]
    before = _services()
    assert bench_frontend.main(arguments) == 0
    assert _services() == before
    result = json.loads(out.read_text())
    assert {"commit", "machine", "versions", "command", "other_work_cores"} <= set(result)
    shapes = [(level["num_streams"], level["num_requests"], level["num_tokens"]) for level in result["levels"]]
    assert shapes == [(1, 2, 30), (4, 8, 30)] * 2
    assert [level["step_ms"] for level in result["levels"]] == [0.0, 0.0, 5.0, 5.0]
    for level in result["levels"]:
        on_one_core, us_per_token = (
            level[name]["values"] for name in ("tokens_per_second_on_one_core", "cpu_us_per_token")
        )
        assert [1e6 / each for each in on_one_core] == pytest.approx(us_per_token)
        assert len(level["tokens_per_second"]["values"]) == 2
        if level["step_ms"]:
            fastest = level["num_streams"] / (level["step_ms"] / 1000.0)
            assert level["tokens_per_second"]["max"] <= fastest * 1.05


def _services() -> set[psutil.Process]:
    """Those of this process; other tests may have theirs."""
    return {child for child in psutil.Process().children(recursive=True) if "serve" in child.cmdline()}


def test_a_service_that_cannot_start_is_reported_with_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_frontend.main(["--checkpoint", str(tmp_path)]) == 1
    assert "neither config.json nor manifest.json" in capsys.readouterr().err


def test_the_engine_gives_each_sequence_its_tokens_and_one_ending() -> None:
    engine = InstantEngine(token_id=5, step_seconds=0.0)
    for uid, count in (("a", 1), ("b", 3), ("c", 9)):
        engine.submit(make_submit(uid, max_tokens=count))
    told: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for step in range(4):
        result = engine.step()
        assert result.stats.num_completion_tokens == len(result.events) == (3, 2, 2, 1)[step]
        for event in result.events:
            assert event.index == len(told[event.uid])
            told[event.uid] += event.token_ids
            assert (event.finish is not None) == (len(told[event.uid]) == {"a": 1, "b": 3}.get(event.uid))
            assert event.finish is None or event.finish.reason is FinishReason.LENGTH
    engine.cancel("c")
    assert not engine.has_work
    assert told == {"a": [5], "b": [5] * 3, "c": [5] * 4}
