"""Comparison with other engines, on drivers that compute nothing."""

import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from loadtest.client.sse_client import Target
from loadtest.measurement import benchmark_program
from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.measurement.roofline import Machine
from loadtest.peers import bench_peers, engines
from loadtest.peers.engines import (
    DEFAULTS,
    OURS,
    PEERS,
    Cell,
    DriverProcess,
    Peer,
    PeerFiles,
    PeerServer,
    make_cells,
    random_prompts,
    run,
)
from loadtest.scenarios.service_benchmark import ServiceProcess
from tests.loadtest.stub_server import Script, StubServer
from tests.loadtest.test_bench_peers_cells import cell

# Driver that reports, for each request, the number of seconds in its first argument.
STUB = """
import sys
from pathlib import Path
from loadtest.peers.drivers.protocol import Wave, serve

def measure(prompts, output_tokens):
    if sys.argv[1] == "fails":
        raise ValueError("no such thing\\nhere")
    later = len(prompts) * (output_tokens - 1)
    return Wave(0.5, 0.5 + float(sys.argv[1]), later)

print("a library says something")
serve(measure)
"""


class RecordedDriver(DriverProcess):
    """Driver process that records the prompts of each request, with the label of its stub engine."""

    waves: ClassVar[list[tuple[str, list[list[int]], str]]] = []

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        super().__init__(command, variables)
        self.side = command[-1]

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Record the prompts, then measure them."""
        self.waves.append((cell.key, prompts, self.side))
        return super().measure(cell, prompts)


def stub_command(seconds: str, side: int = 3) -> list[str]:
    return [sys.executable, "-c", STUB, seconds, str(side)]


def test_a_driver_returns_tokens_per_second_of_decode_and_prompt() -> None:
    stub = DriverProcess(stub_command("2.0"), {})
    try:
        prompts = random_prompts(cell(), 100, 0)
        decode = stub.measure(cell(), prompts)
        assert decode["tokens_per_second"] == pytest.approx(2 * 4 / 2.0)
        prompt = stub.measure(cell("prompt", output_tokens=1), prompts)
        assert prompt["tokens_per_second"] == pytest.approx(2 * 3 / 0.5)
    finally:
        stub.close()


TABLE = """
echo 'main: n_kv_max = 20'
echo '|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |'
echo '|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|'
echo '|     3 |      4 |    2 |     14 |    0.250 |    24.00 |    1.600 |     5.00 |    1.850 |     7.57 |'
"""


@pytest.mark.parametrize("output", ["1", "2"])
@pytest.mark.parametrize(("output_tokens", "rate"), [(5, 2 * 4 / 1.6), (1, 2 * 3 / 0.25)])
def test_the_driver_of_llama_cpp_reads_the_printed_table(
    tmp_path: Path, output_tokens: int, rate: float, output: str
) -> None:
    bench = tmp_path / "bench"
    bench.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/flags\ntouch llama.log\nexec >&{output}{TABLE}')
    bench.chmod(0o755)
    module = "loadtest.peers.drivers.llama_cpp_engine"
    driver = DriverProcess([sys.executable, "-m", module, str(bench), "model.gguf", "2", "--run-time-repack"], {})
    try:
        made = cell("decode" if output_tokens > 1 else "prompt", output_tokens=output_tokens)
        assert driver.measure(made, [[1, 2, 3], [4, 5, 6]])["tokens_per_second"] == pytest.approx(rate)
        flags = (tmp_path / "flags").read_text().split()
        assert flags[flags.index("-npp") : -1] == ["-npp", "3", "-ntg", str(max(1, output_tokens - 1)), "-npl", "2"]
        assert flags[-1] == "--run-time-repack"
        assert not (engines.ROOT / "llama.log").exists()
        bench.write_text("#!/bin/sh\nprintf 'no model here \\304' >&2\nexit 3\n")
        with pytest.raises(MeasurementFailed, match="failed with exit code 3: 'no model here"):
            driver.measure(made, [[1, 2, 3]])
    finally:
        driver.close()


def test_a_driver_reports_a_failed_wave_and_serves_the_next() -> None:
    stub = DriverProcess(stub_command("fails"), {})
    try:
        for _ in range(2):
            with pytest.raises(MeasurementFailed, match=r"^ValueError: no such thing$"):
                stub.measure(cell(), [[1, 2, 3]])
    finally:
        stub.close()


def test_a_driver_that_does_not_start_is_reported_with_its_last_line() -> None:
    driver = DriverProcess([sys.executable, "-c", "raise ImportError('no engine here')"], {})
    with pytest.raises(MeasurementFailed, match="the engine's process ended: ImportError: no engine here"):
        driver.measure(cell(), [[1, 2, 3]])
    driver.close()
    with pytest.raises(MeasurementFailed, match="No such file"):
        DriverProcess(["/nowhere/python"], {})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[StubServer], PeerServer]:
    """Return a function that makes a PeerServer of a stub server, with an idle child process."""

    class StubProcess(ServiceProcess):
        def __init__(self, command: list[str]) -> None:
            super().__init__(command)
            self.target = Target("127.0.0.1", int(command[-1]))

        def wait_first_token(self, model: str | None = None) -> float:
            return 0.0

    monkeypatch.setattr(engines, "ServiceProcess", StubProcess)
    idle = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    return lambda stub: PeerServer([*idle, str(stub.port)])


def test_a_server_is_loaded_by_one_client_per_stream(served: Callable[[StubServer], PeerServer]) -> None:
    with StubServer(Script()) as stub:
        server = served(stub)
        taken = cell("http", streams=2)
        prompts = random_prompts(taken, 100, 0)
        figures = server.measure(taken, prompts)
        server.close()
        assert sorted(request.body["prompt"] for request in stub.requests) == sorted(prompts)
        assert {request.body["max_tokens"] for request in stub.requests} == {5}
        assert {request.body["temperature"] for request in stub.requests} == {0.0}
        assert len({request.connection for request in stub.requests}) == 2
    assert figures["tokens_per_second"] > 0
    assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]


def test_a_failed_request_fails_the_measurement(served: Callable[[StubServer], PeerServer]) -> None:
    with StubServer(Script(status=500)) as stub:
        server = served(stub)
        with pytest.raises(MeasurementFailed, match="request 0 failed with http_error"):
            server.measure(cell("http", streams=1), [[1, 2, 3]])
        server.close()


def test_a_server_that_ends_is_reported_with_its_last_line() -> None:
    with pytest.raises(MeasurementFailed, match=r"exited with code 1\nno model$"):
        PeerServer([sys.executable, "-c", "import sys; sys.exit('no model')"])


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_every_peer_runs_every_cell_of_both_floating_precisions(precision: str, kind: Any) -> None:
    for made in make_cells(["S", "M"], [precision], [kind]):
        assert [peer.name for peer in PEERS if not peer.supports(made)] == []
    http = dataclasses.replace(cell("http"), precision=precision)
    assert [peer.name for peer in PEERS if peer.supports(http)] == ["llama.cpp"]


def test_defaults_are_servers_without_flags(tmp_path: Path) -> None:
    files = PeerFiles(tmp_path)
    for precision, names in zip(
        DEFAULTS, [("ours", "llama_cpp_BF16.gguf"), ("llama_cpp_Q4_K_M.gguf",) * 2], strict=True
    ):
        (made, *_) = make_cells(["S"], [precision], ["http"])
        (llama,) = (peer for peer in PEERS if peer.supports(made))
        assert OURS.server is not None
        assert llama.server is not None
        ours, theirs = (str(files.model(made, name)) for name in names)
        assert OURS.server(files, made, 2)[1:] == ["serve", "--checkpoint", ours]
        assert llama.server(files, made, 2)[1:] == ["-m", theirs, "--host", "127.0.0.1"]


def test_int4_has_four_bits_in_every_matrix_of_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(engines, "run", commands.append)
    files, (made, *_), (mixed, *_) = (
        PeerFiles(tmp_path),
        *(make_cells(["S"], [p], ["decode"]) for p in ("int4", "q4_k_m")),
    )
    same = ["--checkpoint", str(files.model(made, "llama_cpp_Q4_0.gguf")), "--dtype", "bfloat16"]
    assert OURS.engine(files, made, 2)[-8:-4] == same
    llama, ik_llama, openvino = PEERS
    for engine in (llama, ik_llama):
        assert engine.engine(files, made, 2)[4] == same[1]
    for peer in (llama, openvino):
        peer.write_model(files, made)
    _, quantize, export = commands
    assert quantize[1:2] + quantize[-2:] == ["--pure", "Q4_0", "1"]
    assert export[0].endswith("optimum-cli")
    assert {"int4", "--all-layers"} < set(export)
    assert [peer for peer in PEERS if peer.supports(mixed)] == [llama, ik_llama]
    llama.write_model(files, mixed)
    assert commands[-1][-2:] == ["Q4_K_M", "1"]
    assert "--pure" not in commands[-1]


def test_a_failed_command_is_reported_with_its_last_line() -> None:
    with pytest.raises(MeasurementFailed, match="failed with exit code 3: at last"):
        run([sys.executable, "-c", "print('first'); print('at last'); raise SystemExit(3)"])
    with pytest.raises(MeasurementFailed, match="cannot run /nowhere: No such file"):
        run(["/nowhere"])


class ScriptedWork:
    """Replacement of `ForeignWork` with a scripted number of busy cores for each pair."""

    cores_of_pairs: ClassVar[Iterator[float]]

    def cores(self) -> float:
        """Return the number of busy cores for the next pair."""
        return next(self.cores_of_pairs)


class ScriptedProbe:
    """Replacement of `Roofline` with scripted speeds of the processors, in GFLOP/s."""

    speeds: ClassVar[Iterator[float]]

    def __init__(self, weight_type: str, device: str, *, read_bytes: int, sides: tuple[int, ...]) -> None:
        assert (weight_type, device) == ("bfloat16", "cpu")

    def probe(self) -> Machine:
        """Return the next speed of the script."""
        return Machine(1.0, 1e9 * next(self.speeds))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the peers by one half as fast as Kvasir and one that cannot be installed. Return the started engines."""
    names: list[str] = []

    def peer(name: str, environment: str, seconds: str, side: int) -> Peer:
        def engine(files: PeerFiles, made: Cell, threads: int) -> list[str]:
            names.append(f"{name} {made.precision}")
            return stub_command(seconds, side)

        return Peer(
            name=name,
            environment=environment,
            precisions=("float32",),
            write_model=lambda files, made: None,
            engine=engine,
            note="",
        )

    def install(files: PeerFiles, environment: str) -> None:
        if environment == "broken":
            raise MeasurementFailed("no compiler")

    monkeypatch.setattr(bench_peers, "PEERS", (peer("slow", "half", "2.0", 9), peer("none", "broken", "1", 3)))
    monkeypatch.setattr(bench_peers, "OURS", peer("ours", "", "1.0", 3))
    monkeypatch.setattr(bench_peers, "install", install)
    monkeypatch.setattr(bench_peers, "DriverProcess", RecordedDriver)
    monkeypatch.setattr(benchmark_program, "measure_other_work", lambda program: 0.0)
    monkeypatch.setattr(bench_peers, "ForeignWork", ScriptedWork)
    monkeypatch.setattr(bench_peers, "Roofline", ScriptedProbe)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(bench_peers, "_pins", lambda environment: [f"{environment}==1"])
    ScriptedWork.cores_of_pairs = itertools.repeat(0.1)
    ScriptedProbe.speeds = itertools.repeat(800.0)
    return names


def compare(tmp_path: Path, *further: str) -> tuple[int, dict[str, Any]]:
    """Compare a few cells. Return the exit code and the JSON."""
    out = tmp_path / "peers.json"
    given = ["--out", str(out), "--directory", str(tmp_path), "--shapes", "S", "--precisions", "float32", "int8"]
    code = bench_peers.main(
        [*given, "--kinds", "prompt", "decode", "--peers", "slow", "none", "--threads", "2", *further]
    )
    return code, json.loads(out.read_text())


def test_a_comparison_resumes_from_stored_pairs(tmp_path: Path, started: list[str]) -> None:
    some = ("--streams", "1", "16", "--contexts", "128", "1024", "--rounds")
    code, first = compare(tmp_path, *some, "1")
    assert code == 0
    assert started == ["ours float32", "slow float32"]  # no stub supports int8, and an unavailable peer is not started
    assert first["peers"]["none"]["unavailable"] == "no compiler"
    assert first["peers"]["slow"]["pins"] == ["half==1"]
    float32 = [row for row in first["cells"] if row["precision"] == "float32"]
    assert [(row["kind"], row["streams"], row["context_length"]) for row in float32] == [
        ("decode", 1, 128),
        ("decode", 16, 128),
        ("prompt", 1, 1024),
        ("decode", 1, 1024),
        ("decode", 16, 1024),
    ]
    for row in float32:
        assert list(row["peers"]) == ["slow"]
        expected = 1.0 if row["kind"] == "prompt" else 2.0
        assert row["peers"]["slow"]["ratio"]["values"] == [pytest.approx(expected)]
        assert row["peers"]["slow"]["other_work_cores"] == [0.1]
    assert all(row["peers"] == {} for row in first["cells"] if row["precision"] == "int8")

    started.clear()
    code, again = compare(tmp_path, *some, "1")
    assert (code, started) == (0, [])  # all pairs were stored
    assert again["cells"] == first["cells"]

    code, more = compare(tmp_path, *some, "2")
    assert code == 0
    assert started == ["ours float32", "slow float32"]
    assert {len(row["peers"]["slow"]["ratio"]["values"]) for row in more["cells"] if row["precision"] == "float32"} == {
        2
    }


def test_a_disturbed_pair_is_measured_again_by_the_next_run(tmp_path: Path, started: list[str]) -> None:
    ScriptedWork.cores_of_pairs = itertools.chain((1.5, 0.9), itertools.repeat(0.1))
    cores = []
    for _ in range(3):
        _, result = compare(tmp_path, "--rounds", "1")
        pairs = [row["peers"]["slow"] for row in result["cells"] if row["precision"] == "float32"]
        assert {len(pair["ratio"]["values"]) for pair in pairs} == {1}
        cores.append([pair["other_work_cores"] for pair in pairs][:2])
    assert cores == [[[1.5], [0.9]], [[0.1], [0.1]], [[0.1], [0.1]]]


def test_a_pair_on_slow_processors_is_measured_again(tmp_path: Path, started: list[str]) -> None:
    ScriptedWork.cores_of_pairs = itertools.repeat(0.0)
    slow_between = (800.0, 500.0, 800.0)  # before, between and after the two sides
    ScriptedProbe.speeds = itertools.chain(slow_between, itertools.repeat(790.0))
    for _ in range(2):
        _, result = compare(tmp_path, "--rounds", "1", "--kinds", "prompt")
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [line["gflops"] for line in lines] == [list(slow_between), [790.0] * 3]
    (row,) = (row["peers"]["slow"] for row in result["cells"] if row["precision"] == "float32")
    assert row["processors_share"] == [1.0]


def test_both_sides_of_a_pair_get_the_same_fresh_prompts(tmp_path: Path, started: list[str]) -> None:
    RecordedDriver.waves.clear()
    compare(tmp_path, "--rounds", "2")
    sides = collections.defaultdict(list)
    for key, prompts, side in RecordedDriver.waves:
        sides[json.dumps([key, prompts])].append(side)
    assert {tuple(both) for both in sides.values()} == {("3", "9"), ("9", "3")}  # the order alternates


def test_an_interrupted_comparison_writes_its_measured_pairs(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def speeds() -> Iterator[float]:
        yield from [800.0] * 3
        raise KeyboardInterrupt

    ScriptedProbe.speeds = speeds()
    code, result = compare(tmp_path, "--rounds", "1", "--kinds", "prompt", "decode")
    assert code == 1
    assert "interrupted; repeat the command to continue" in capsys.readouterr().err
    assert sum(bool(row["peers"]) for row in result["cells"]) == 1


@pytest.mark.parametrize("given", [["--rounds", "0"], ["--threads", "0"], ["--peers", "absent"], ["--shapes", "XL"]])
def test_invalid_options_are_rejected(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_peers.main(given)
    assert exit_.value.code == 2
    assert given[0] in capsys.readouterr().err
