"""`kvasir loadtest` against a stub server: options, progress, interruption, and the report in all three forms."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from loadtest.sweep import command, level
from loadtest.sweep.command import main
from loadtest.sweep.level import Level
from tests.loadtest.stub_server import CERTIFICATE, Script, StubServer

VOID = {"meta", "br", "link", "img", "input", "hr"}


class PageReader(HTMLParser):
    """Reader of a report: its text, its links to elsewhere, and the elements that were never closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.num_svg = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_svg += tag == "svg"
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def sweep(url: str, *flags: str, out: Path) -> int:
    quick = ("--windows", "3", "--window-seconds", "0.06", "--precision", "0.5", "--output-tokens", "4")
    return main(["sweep", "--url", url, *quick, "--out", str(out), *flags])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sweep a server that rejects each second request after the 60th, and return the path of the JSON file."""
    out = tmp_path_factory.mktemp("sweep") / "results" / "sweep.json"
    busy = Script(status=429, retry_after="1")
    with StubServer(lambda ordinal: busy if ordinal > 60 and ordinal % 2 else Script(gap_seconds=0.002)) as server:
        assert sweep(server.url, "--slo-ttft-p95-ms", "5000", "--rates", "50", "100", "200", out=out) == 0
    return out


def test_the_result_has_levels_settings_and_provenance(result: Path) -> None:
    figures = json.loads(result.read_text())
    assert {"command", "date", "commit", "machine", "workload", "settings", "slo"} <= set(figures)
    assert figures["kind"] == "sweep"
    assert figures["command"].startswith("kvasir loadtest sweep --url http")
    assert not figures["interrupted"]
    assert any(level["state"] == "overloaded" and level["shed"] for level in figures["levels"])
    rates = [level["rate"] for level in figures["levels"]]
    assert rates == sorted(rates)
    assert figures["capacity"]["requests_per_second"]["mean"] > 0.0


def test_the_html_report_is_complete_without_a_network(result: Path) -> None:
    text = result.with_suffix(".html").read_text()
    page = PageReader(text)
    assert page.open == []
    assert page.num_svg == 4
    assert [link for link in page.links if not link.startswith("#")] == [], "links within a plot only"
    assert not re.search(r"@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert "#010203" not in text, "plots take the page's text color"
    assert re.findall(r'id="([^"]+)"', text), "clip paths of the plots"
    assert "<small>" in text, "confidence intervals"
    assert text.count('<table class="levels">') == 2


def test_the_markdown_report_has_the_same_findings(result: Path) -> None:
    page, html = (result.with_suffix(suffix).read_text() for suffix in (".md", ".html"))
    found = re.findall(r"^- (?!warning)(.*)$", page, re.MULTILINE)
    assert found[0].startswith("Highest stable rate: " if "| stable |" in page else "No rate was stable")
    assert "While overloaded, the server completes " in found[0]
    assert html.index("requests in flight do not grow") < html.index("<h2>Plots</h2>")
    assert "TTFT: time to first token." in html
    assert "goodput/s" in page
    assert "goodput/s" in html
    assert all(line.replace("'", "&#x27;") in html for line in found)
    assert "| requests/s | state |" in page


def test_an_interrupted_sweep_keeps_its_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Level] = []

    def measure(*arguments: object) -> Level:
        if measured:
            raise KeyboardInterrupt
        measured.append(level.measure(*arguments))  # type: ignore[arg-type]
        return measured[-1]

    monkeypatch.setattr(command, "measure", measure)
    with StubServer(Script(gap_seconds=0.002)) as server:
        assert sweep(server.url, out=tmp_path) == 1
    (path,) = tmp_path.glob("*-sweep/results.json")  # a run has a directory of its own
    figures = json.loads(path.read_text())
    assert figures["interrupted"]
    assert len(figures["levels"]) == 1
    pages = [path.with_suffix(suffix).read_text() for suffix in (".html", ".md")]
    assert not any("goodput" in page or "| objectives" in page or ">objectives" in page for page in pages)


def test_a_server_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sweep("http://127.0.0.1:9", out=tmp_path / "sweep.json") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvasir loadtest sweep: http://127.0.0.1:9 does not answer: [Errno 111]")
    assert not (tmp_path / "sweep.json").exists()


def test_a_failing_request_is_reported_before_the_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with StubServer(Script(status=500), is_secure=True) as server:
        assert sweep(server.url, out=tmp_path / "sweep.json") == 1
        assert f"sweep: the certificate of {server.url} is not valid: self-signed" in capsys.readouterr().err
        assert sweep(server.url, "--ca-file", str(CERTIFICATE), out=tmp_path / "sweep.json") == 1
    assert "the only request in flight failed: http_error" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--precision", "0"], ["--windows", "2"], ["--window-seconds", "0"]])
def test_impossible_settings_are_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        sweep("http://127.0.0.1:9", *flags, out=tmp_path / "sweep.json")


def test_equal_rates_are_compared_and_a_regression_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("fast", "slow")}
    for name, gap in (("fast", 0.001), ("slow", 0.03)):
        with StubServer(Script(gap_seconds=gap)) as server:
            assert sweep(server.url, "--rates", "40", "60", out=paths[name]) == 0
    assert [level["rate"] for level in json.loads(paths["fast"].read_text())["levels"]] == [40.0, 60.0]
    capsys.readouterr()
    assert main(["compare", str(paths["fast"]), str(paths["slow"])]) == 1
    assert re.search(r"p50 itl at 40 requests/s .* regression", capsys.readouterr().out)
    main(["compare", str(paths["slow"]), str(paths["fast"])])
    assert re.search(r"p50 itl at 40 requests/s .* improvement", capsys.readouterr().out)
    assert main(["compare", str(paths["fast"]), str(paths["fast"])]) == 0
    assert "regression" not in capsys.readouterr().out
