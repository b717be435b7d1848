"""The comparison with other engines, on engines that compute nothing: pairs, resuming, what cannot be had."""

import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from loadtest.peers import bench_peers, engines
from loadtest.peers.comparison_cells import DEFAULTS, Cell, make_cells
from loadtest.peers.engines import PEERS, Peer, Setting
from loadtest.peers.installation import PeerUnavailable, Place, run
from loadtest.peers.processes import Driver, Server, num_prompts, random_prompts
from tests.loadtest.stub_server import Script, StubServer
from tests.loadtest.test_bench_peers_cells import cell

# A driver whose waves take as long as its argument says; it notes that it was started.
STUB = """
import sys
from pathlib import Path
from loadtest.peers.drivers.protocol import Wave, serve

def measure(prompts, output_tokens):
    if sys.argv[1] == "fails":
        raise ValueError("no such thing\\nhere")
    later = len(prompts) * (output_tokens - 1)
    return Wave(0.5, 0.5 + float(sys.argv[1]), later, [1, 2, int(sys.argv[2]), 4])

print("a library says something")
serve(measure)
"""


class Recorded(Driver):
    """Remembers what it was asked."""

    asked: ClassVar[list[tuple[str, list[list[int]], int]]] = []
    third = 3

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """As any driver."""
        self.asked.append((cell.key, prompts, self.third))
        return super().measure(cell, prompts)


def driver(seconds: str, third: int = 3) -> Driver:
    made = Recorded([sys.executable, "-c", STUB, seconds, str(third)], {})
    made.third = third
    return made


def test_a_driver_s_figures() -> None:
    stub = driver("2.0")
    try:
        prompts = random_prompts(cell(), 100, 0)
        decode = stub.measure(cell(), prompts)
        assert decode["tokens_per_second"] == pytest.approx(2 * 4 / 2.0)
        assert decode["token_ids"] == [1, 2, 3, 4]
        prompt = stub.measure(cell("prompt", output_tokens=1), prompts)
        assert prompt["tokens_per_second"] == pytest.approx(2 * 3 / 0.5)
    finally:
        stub.close()


def test_a_driver_that_fails_says_why_and_lives() -> None:
    stub = driver("fails")
    try:
        for _ in range(2):
            with pytest.raises(PeerUnavailable, match=r"^ValueError: no such thing$"):
                stub.measure(cell(), [[1, 2, 3]])
    finally:
        stub.close()


def test_a_driver_that_does_not_start_says_its_last_line() -> None:
    with pytest.raises(PeerUnavailable, match="the engine ended: ImportError: no engine here"):
        Driver([sys.executable, "-c", "raise ImportError('no engine here')"], {})
    with pytest.raises(PeerUnavailable, match="No such file"):
        Driver(["/nowhere/python"], {})


@pytest.mark.parametrize(("streams", "number"), [(1, 3), (16, 32), (64, 64)])
def test_servers_without_flags_get_fewer_requests(streams: int, number: int) -> None:
    (taken,) = (each for each in make_cells(["S"], [DEFAULTS], ["http"]) if each.streams == streams)
    assert num_prompts(taken) == number
    assert num_prompts(cell("http", streams=64)) == 128


def test_a_server_is_loaded_by_as_many_clients_as_streams() -> None:
    with StubServer(Script()) as stub:
        idle = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        server = Server(idle, stub.port, "/v1/models")
        try:
            taken = cell("http", streams=2)
            prompts = random_prompts(taken, 100, 0)
            figures = server.measure(taken, prompts)
        finally:
            server.close()
        assert [request.body["prompt"] for request in stub.requests] == prompts
        assert {request.body["max_tokens"] for request in stub.requests} == {5}
        assert {request.body["temperature"] for request in stub.requests} == {0.0}
        assert len({request.connection for request in stub.requests}) == 2
    assert figures["tokens_per_second"] > 0
    assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]


def test_a_server_that_refuses_is_no_figure() -> None:
    with StubServer(Script(status=500)) as stub:
        server = Server([sys.executable, "-c", "import sys; sys.stdin.read()"], stub.port, "/v1/models")
        try:
            with pytest.raises(PeerUnavailable, match="request 0 ended with http_error"):
                server.measure(cell("http", streams=1), [[1, 2, 3]])
        finally:
            server.close()


def test_a_server_that_ends_says_its_last_line() -> None:
    with pytest.raises(PeerUnavailable, match="the server ended: no model"):
        Server([sys.executable, "-c", "import sys; sys.exit('no model')"], 1, "/health")


def test_prompts_depend_on_the_seed_alone_and_no_two_are_alike() -> None:
    taken = cell("decode", streams=20)
    first, again = random_prompts(taken, 50, 1), random_prompts(taken, 50, 1)
    assert first == again
    assert len(set(map(tuple, first))) == 20
    assert first != random_prompts(taken, 50, 2)
    assert max(map(max, random_prompts(taken, 3, 0))) == 1  # the last id ends a text


def test_a_peer_is_asked_for_what_it_can() -> None:
    peer = Peer(name="a", environment="a", precisions=("int8", "float32"), engine=lambda _: driver("1"), note="")
    assert peer.can(cell())
    assert not peer.can(cell("http"))  # it has no server
    assert not peer.can(dataclasses.replace(cell(), precision="bfloat16"))


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_every_peer_is_asked_for_every_cell_of_both_floating_precisions(precision: str, kind: Any) -> None:
    for asked in make_cells(["S", "M"], [precision], [kind]):
        assert [peer.name for peer in PEERS if not peer.can(asked)] == []


def test_defaults_are_servers_without_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = make_cells(["S"], [DEFAULTS], ["decode", "http", "prompt"])
    assert [(cell.kind, cell.streams) for cell in asked] == [("http", 1), ("http", 4), ("http", 16), ("http", 64)]
    assert [peer.name for peer in PEERS if peer.can(asked[0])] == ["llama.cpp"]
    started: list[list[str]] = []
    monkeypatch.setattr(engines, "Server", lambda command, port, path: started.append(command[1:]))
    setting = Setting(place=Place(tmp_path), shape="S", precision=DEFAULTS, threads=2)
    engines.our_server(setting)
    (llama,) = (peer for peer in PEERS if peer.name == "llama.cpp")
    assert llama.server is not None
    llama.server(setting)
    (serve, _, our_port, *ours), (*theirs, their_port) = started
    assert (serve, ours) == ("serve", ["--checkpoint", str(tmp_path / "models" / "S" / "ours_bfloat16")])
    file = tmp_path / "models" / "S" / "llama_cpp_defaults.gguf"
    assert theirs == ["-m", str(file), "--host", "127.0.0.1", "--port"]
    assert our_port.isdecimal()
    assert their_port.isdecimal()


def test_a_step_that_fails_is_a_reason() -> None:
    with pytest.raises(PeerUnavailable, match="failed with exit code 3: at last"):
        run([sys.executable, "-c", "print('first'); print('at last'); raise SystemExit(3)"])
    with pytest.raises(PeerUnavailable, match="/nowhere: No such file"):
        run(["/nowhere"])


class Disturbed:
    """In place of `ForeignWork`: others' cores during one pair after the other."""

    cores_of_pairs: ClassVar[Iterator[float]]

    def cores(self) -> float:
        """Of the next pair."""
        return next(self.cores_of_pairs)


class Probed:
    """In place of `ProcessorProbe`: what the processors give, look after look."""

    told: ClassVar[Iterator[float]]

    def __init__(self, threads: int) -> None:
        assert threads == 2

    def gflops(self) -> float:
        """Of the next look."""
        return next(self.told)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two peers in place of all: one whose engine is half as fast as ours, one that cannot be installed."""
    started: list[str] = []

    def starts(name: str, seconds: str, third: int) -> Callable[[Setting], Driver]:
        def start(setting: Setting) -> Driver:
            started.append(f"{name} {setting.precision}")
            return driver(seconds, third)

        return start

    def install(place: Place, environment: str) -> None:
        if environment == "broken":
            raise PeerUnavailable("no compiler")

    peers = (
        Peer(name="slow", environment="half", precisions=("float32",), engine=starts("slow", "2.0", 9), note="half"),
        Peer(name="none", environment="broken", precisions=("float32",), engine=starts("none", "1", 3), note="none"),
    )
    monkeypatch.setattr(bench_peers, "PEERS", peers)
    monkeypatch.setattr(bench_peers, "install", install)
    monkeypatch.setattr(bench_peers, "give_model", lambda *given: None)
    monkeypatch.setattr(bench_peers, "other_work", lambda seconds: 0.1)
    monkeypatch.setattr(bench_peers, "ForeignWork", Disturbed)
    monkeypatch.setattr(bench_peers, "ProcessorProbe", Probed)
    Disturbed.cores_of_pairs = itertools.chain((1.5, 0.9), itertools.repeat(0.1))
    Probed.told = itertools.repeat(800.0)
    monkeypatch.setattr(bench_peers, "give_our_model", lambda *given: None)
    monkeypatch.setattr(bench_peers, "our_engine", starts("ours", "1.0", 3))
    monkeypatch.setattr(bench_peers, "_pins", lambda environment: [f"{environment}==1"])
    return started


def compare(tmp_path: Path, *further: str) -> tuple[int, dict[str, Any]]:
    """One comparison of a few cells: its exit code, its JSON."""
    out = tmp_path / "peers.json"
    given = ["--out", str(out), "--directory", str(tmp_path), "--shapes", "S", "--precisions", "float32", "int8"]
    code = bench_peers.main(
        [*given, "--kinds", "prompt", "decode", "--peers", "slow", "none", "--threads", "2", *further]
    )
    return code, json.loads(out.read_text())


def test_a_comparison_and_its_resuming(tmp_path: Path, stubs: list[str]) -> None:
    code, first = compare(tmp_path, "--rounds", "1")
    assert code == 0
    assert stubs == ["ours float32", "slow float32"]  # int8 is nobody's; what cannot be installed is not started
    assert first["peers"]["none"]["unavailable"] == "no compiler"
    assert first["peers"]["slow"]["pins"] == ["half==1"]
    float32 = [row for row in first["cells"] if row["precision"] == "float32"]
    assert len(float32) == 8
    for row in float32:
        assert list(row["peers"]) == ["slow"]
        expected = 1.0 if row["kind"] == "prompt" else 2.0
        assert row["peers"]["slow"]["ratio"]["values"] == [pytest.approx(expected)]
        assert row["peers"]["slow"]["theirs"]["first_tokens_alike"]["median"] == 2.0
        assert row["peers"]["slow"]["other_work_cores"] == [0.1]
    assert all(row["peers"] == {} for row in first["cells"] if row["precision"] == "int8")

    stubs.clear()
    code, again = compare(tmp_path, "--rounds", "1")
    assert (code, stubs) == (0, [])  # all was there
    assert again["cells"] == first["cells"]

    code, more = compare(tmp_path, "--rounds", "2")
    assert code == 0
    assert stubs == ["ours float32", "slow float32"]
    assert {len(row["peers"]["slow"]["ratio"]["values"]) for row in more["cells"] if row["precision"] == "float32"} == {
        2
    }


def test_a_disturbed_pair_is_taken_again_and_the_least_disturbed_counts(tmp_path: Path, stubs: list[str]) -> None:
    _, told = compare(tmp_path, "--rounds", "1", "--attempts", "2")
    pairs = [row["peers"]["slow"] for row in told["cells"] if row["precision"] == "float32"]
    assert [pair["other_work_cores"] for pair in pairs][:2] == [[0.9], [0.1]]
    assert {len(pair["ratio"]["values"]) for pair in pairs} == {1}

    _, told = compare(tmp_path, "--rounds", "1", "--attempts", "2")  # what was disturbed to the end is tried again
    pairs = [row["peers"]["slow"] for row in told["cells"] if row["precision"] == "float32"]
    assert [pair["other_work_cores"] for pair in pairs][:2] == [[0.1], [0.1]]


def test_a_pair_whose_processors_gave_less_is_taken_again(tmp_path: Path, stubs: list[str]) -> None:
    Disturbed.cores_of_pairs = itertools.repeat(0.0)
    low_in_between = (800.0, 800.0, 500.0, 800.0)  # while it waits, then before, between and after the pair
    Probed.told = itertools.chain(low_in_between, itertools.repeat(790.0))
    _, told = compare(tmp_path, "--rounds", "1", "--attempts", "2", "--kinds", "prompt")
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [line["gflops"] for line in lines] == [list(low_in_between[1:]), [790.0] * 3]
    (row,) = (row["peers"]["slow"] for row in told["cells"] if row["precision"] == "float32")
    assert row["processors_share"] == [1.0]


def test_processors_that_give_less_are_waited_for(tmp_path: Path, stubs: list[str]) -> None:
    Disturbed.cores_of_pairs = itertools.repeat(0.0)
    Probed.told = itertools.chain([800.0] * 4, [400.0] * 3, itertools.repeat(750.0))
    compare(tmp_path, "--rounds", "2", "--attempts", "1", "--kinds", "prompt")
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [line["gflops"] for line in lines] == [[800.0] * 3, [750.0] * 3]


def test_a_busy_machine_is_waited_for_but_not_for_ever(
    tmp_path: Path, stubs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(bench_peers, "other_work", lambda seconds: looks.append(seconds) or 1.0)
    compare(tmp_path, "--rounds", "1", "--attempts", "1", "--patience", "0", "--kinds", "prompt")
    assert len(looks) == 1


def test_both_sides_of_a_pair_get_the_same_prompts_and_no_other_pair_does(tmp_path: Path, stubs: list[str]) -> None:
    Recorded.asked.clear()
    compare(tmp_path, "--rounds", "2")
    who = collections.defaultdict(list)
    for key, prompts, third in Recorded.asked:
        who[json.dumps([key, prompts])].append(third)
    assert {tuple(both) for both in who.values()} == {(3, 9), (9, 3)}  # in the second round the other goes first


def test_minutes_that_are_too_few_end_it_in_between(tmp_path: Path, stubs: list[str]) -> None:
    code, told = compare(tmp_path, "--minutes", "0")
    assert (code, stubs) == (1, [])
    assert all(row["peers"] == {} for row in told["cells"])


def test_installing_alone_says_what_cannot_be_had(
    tmp_path: Path, stubs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--directory", str(tmp_path), "--install-only", "--peers", "slow", "none"]
    assert bench_peers.main(given) == 1
    assert "broken: no compiler" in capsys.readouterr().err
    assert bench_peers.main([*given[:-1]]) == 0
    assert stubs == []


@pytest.mark.parametrize(
    "given", [["--rounds", "0"], ["--threads", "0"], ["--attempts", "0"], ["--peers", "nobody"], ["--shapes", "XL"]]
)
def test_what_cannot_be_compared_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_peers.main(given)
    assert exit_.value.code == 2
    assert given[0] in capsys.readouterr().err
