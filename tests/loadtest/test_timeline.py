"""Figures of a load over time, and the page that draws them."""

import re
from typing import Any

import pytest

from loadtest.client.outcome import Ending, LoadRun
from loadtest.client.report import Slo, summarize, without_details
from loadtest.client.timeline import Timeline, timeline
from loadtest.sweep.page import html_page
from tests.loadtest.outcomes import failed, outcome


def test_requests_count_when_they_end_and_tokens_when_they_arrive() -> None:
    rows = Timeline(0.0, 0.1)
    rows.add(outcome(0))  # chunks at 0.10, 0.12, 0.14 and 0.16 s, end at 0.17 s
    rows.add(failed(0, Ending.SHED))  # end at 0.05 s
    first, second = rows.rows()
    assert (first["rejected"], first["ok"], first["tokens"], first["p50_ttft_ms"]) == (10.0, 0.0, 0.0, None)
    assert (second["rejected"], second["ok"], second["tokens"]) == pytest.approx((0.0, 10.0, 40.0))
    assert second["p50_ttft_ms"] == pytest.approx(100.0)
    assert second["p99_itl_ms"] == pytest.approx(20.0)
    rows.add(failed(0, Ending.TIMEOUT))
    assert rows.rows()[0]["failed"] == 10.0, "a row is renewed"
    assert [row["seconds"] for row in rows.rows(until_seconds=0.35)] == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_timeline_has_many_points_and_all_requests() -> None:
    outcomes = [outcome(index) for index in range(100)] + [failed(50, Ending.SHED)]
    rows = timeline(outcomes)
    assert 50 <= len(rows) <= 60
    length = rows[1]["seconds"]
    assert sum(row["ok"] for row in rows) * length == pytest.approx(100)
    assert sum(row["rejected"] for row in rows) * length == pytest.approx(1)
    assert sum(row["tokens"] for row in rows) * length == pytest.approx(400)
    assert len(timeline([outcome(0)])) == 10
    assert timeline([]) == []


def test_the_page_of_several_loads_draws_each_over_time() -> None:
    loads = []
    for label in ("saturation", "overload"):
        outcomes = [outcome(0), outcome(1), failed(2, Ending.SHED, "full")]
        run = LoadRun(outcomes=outcomes, began_seconds=0.0, ended_seconds=3.0, client_cpu_share=0.9)
        loads.append(without_details(summarize(run, label=label, slo=Slo(max_shed_share=0.1))))
    page = html_page({"loads": loads, "model_id": "m<1", "command": "x"})
    text: Any = re.sub(r"<[^>]*>", " ", page)
    assert page.count("<svg") == 2
    assert "Load test of m&lt;1" in page
    assert text.count("1 rejected") == 2
    assert text.count("broken objective: shed: 33.33%") == 2
    assert "do not trust the latencies" in text
