"""Program that prints the errors of the load test's client."""

import pytest

from tests.loadtest.known_delays import main


def test_errors_are_printed_for_each_number_of_streams(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--streams", "1", "3", "--seconds", "0.2"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "ITL error p99, ms" in head
    assert [line.split("|")[1].strip() for line in lines] == ["1", "3"]
    assert all(float(cell) > 0.0 for line in lines for cell in line.split("|")[3:9])
