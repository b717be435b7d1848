"""Engines of the comparison and the cells (configurations) that they run: installation, model files, processes.

`install.sh` creates the environments in `.venv-peers/NAME`. Model files are in `.venv-peers/models/SHAPE`.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from loadtest.client.report import latencies_ms
from loadtest.client.requests import LoadRequest
from loadtest.client.workload import random_prompt
from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.measurement.figures import percentiles
from loadtest.measurement.model_shapes import shape_config, write_random_checkpoint
from loadtest.scenarios.service_benchmark import ServiceProcess, complete_all, kvasir_serve
from model.checkpoint.conversion.export_hugging_face import export_checkpoint
from service.config.torch_environment import TORCH_ENVIRONMENT

ROOT, PINS = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
Kind = Literal["decode", "prompt", "http"]
KINDS: Final[tuple[Kind, ...]] = ("decode", "http", "prompt")
DEFAULTS: Final = ("defaults", "defaults-q4_k_m")  # used as precisions: both servers are started without flags


class Format(NamedTuple):
    """Weights of one precision: Kvasir's flags, llama.cpp's file type, OpenVINO's hint and export flags.

    openvino: None if OpenVINO is not measured.
    ours: name of the model that Kvasir reads: its own bfloat16 checkpoint, or llama.cpp's file.
    """

    flags: tuple[str, ...]
    gguf: str
    openvino: tuple[str, str] | None = None
    ours: str = "ours"


_BFLOAT16 = ("--dtype", "bfloat16")
_OPENVINO_INT4 = ("f32", "int4 --sym --group-size 128 --group-size-fallback adjust --all-layers")
# All files are made from the same bfloat16 weights.
_FORMATS: Final = {
    "bfloat16": Format(_BFLOAT16, "BF16", ("bf16", "fp32")),
    # A float32 hint: OpenVINO then rounds activations to int8.
    "int8": Format((*_BFLOAT16, "--quantize", "int8"), "Q8_0", ("f32", "int8")),
    "int4": Format(_BFLOAT16, "Q4_0", _OPENVINO_INT4, "llama_cpp_Q4_0.gguf"),
    "q4_k_m": Format(_BFLOAT16, "Q4_K_M", ours="llama_cpp_Q4_K_M.gguf"),
    "float32": Format(("--dtype", "float32", "--kv-cache-dtype", "float16"), "F32", ("f32", "fp32")),
    DEFAULTS[0]: Format((), "BF16"),
    DEFAULTS[1]: Format((), "Q4_K_M", ours="llama_cpp_Q4_K_M.gguf"),
}
PRECISIONS: Final = tuple(_FORMATS)
STREAMS, CONTEXTS, PROMPT_TOKENS = (1, 4, 16, 64), (128, 1024, 4096), 64
# Kind, streams, tokens of a prompt, tokens of a completion. A context is the mean length while a completion grows.
_SIZES: Final[tuple[tuple[Kind, int, int, int], ...]] = (
    *(("decode", streams, PROMPT_TOKENS, 128) for streams in STREAMS),
    *(("http", streams, PROMPT_TOKENS, 128) for streams in STREAMS),
    ("prompt", 1, 1024, 1),
    *(("decode", streams, context - 32, 64) for context in CONTEXTS[1:] for streams in STREAMS),
)
# Weights and KV-cache of one engine. Two engines are in memory at a time, on machines of 24 GB.
_MAX_CELL_BYTES = 9_000_000_000
_REQUESTS_PER_STREAM, _MIN_REQUESTS = 2, 3
_MAX_SLOW_REQUESTS = 64  # for a server without flags
_DRIVERS = "loadtest.peers.drivers"
_SLOT_TOKENS, _MAX_STREAMS = 256, 64  # llama-server's slots; each holds a prompt and its completion
_REQUEST_SECONDS = 900.0  # llama-server without flags runs four requests at a time: of 64, some wait for minutes


@dataclass(frozen=True, slots=True)
class Cell:
    """Configuration in which the engines are compared: model shape, precision, kind of work, streams and lengths.

    kind: decode (tokens/s after every sequence has its first token), prompt (prompt tokens/s until the first token), or
    http (tokens/s of all streaming clients, from the first request to the last response).
    """

    shape: str
    precision: str
    kind: Kind
    streams: int
    prompt_tokens: int
    output_tokens: int

    @property
    def key(self) -> str:
        """Name that identifies the cell in the file of measured pairs."""
        return "/".join(map(str, asdict(self).values()))

    @property
    def context_length(self) -> int:
        """Tokens of a sequence when half of its completion is generated."""
        return self.prompt_tokens + self.output_tokens // 2

    @property
    def num_prompts(self) -> int:
        """Number of prompts in one measurement of the cell."""
        if self.kind != "http":
            return self.streams
        wanted = max(_MIN_REQUESTS, _REQUESTS_PER_STREAM * self.streams)
        return min(wanted, _MAX_SLOW_REQUESTS) if self.precision in DEFAULTS else wanted


def _cache_bytes(cell: Cell) -> int:
    """Return the bytes of KV-cache, in 2-byte values, that all streams of a cell fill by their last token."""
    token_bytes = shape_config(cell.shape).kv_bytes_per_token(2)
    return cell.streams * (cell.prompt_tokens + cell.output_tokens) * token_bytes


def _fits(cell: Cell) -> bool:
    """Return True if the cell fits the model's context and `_MAX_CELL_BYTES` of memory."""
    config = shape_config(cell.shape)
    return (
        cell.prompt_tokens + cell.output_tokens <= config.max_context_length
        and 2 * config.num_parameters + _cache_bytes(cell) <= _MAX_CELL_BYTES
    )


def make_cells(shapes: Sequence[str], precisions: Sequence[str], kinds: Sequence[Kind]) -> list[Cell]:
    """Return the cells of these shapes, precisions and kinds; of precisions in `DEFAULTS`, only those of kind http.

    Cells that exceed the model's context, or `_MAX_CELL_BYTES` of weights and KV-cache, are left out.
    """
    cells = (
        Cell(shape, precision, *size)
        for shape, precision in itertools.product(shapes, precisions)
        for size in _SIZES
        if size[0] == "http" or precision not in DEFAULTS
    )
    return [cell for cell in cells if cell.kind in kinds and _fits(cell)]


def _largest_cache(cell: Cell) -> int:
    """Return the KV-cache bytes of the largest cell with this cell's shape and precision: one engine runs them all."""
    return max(map(_cache_bytes, make_cells([cell.shape], [cell.precision], KINDS)))


def random_prompts(cell: Cell, vocab_size: int, seed: int | str) -> list[list[int]]:
    """Return the random prompts of one measurement of a cell, as token ids."""
    rng = random.Random(seed)
    return [random_prompt(rng, vocab_size, cell.prompt_tokens) for _ in range(cell.num_prompts)]


def run(command: Sequence[str]) -> None:
    """Run a command to its end. Raises MeasurementFailed with the last line of output if the command fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise MeasurementFailed(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        name = " ".join([Path(command[0]).name, *command[1:4]])
        raise MeasurementFailed(f"`{name} ...` failed with exit code {done.returncode}: {lines[-1] if lines else ''}")


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Paths in the directory of the environments and models of peers, usually `.venv-peers`."""

    directory: Path

    def program(self, environment: str, name: str = "python") -> str:
        """Return the path of a program in a peer's Python environment, by default of its interpreter."""
        return str(self.directory / environment / "bin" / name)

    def model(self, cell: Cell, kind: str) -> Path:
        """Return the path of the cell's model in a format, for example ours, hugging_face or llama_cpp_int8.gguf."""
        return self.directory / "models" / cell.shape / kind


def install(files: PeerFiles, environment: str) -> None:
    """Create the Python environment of a peer engine unless it exists. Raises MeasurementFailed if that fails."""
    run(["bash", str(PINS / "install.sh"), str(files.directory), environment, sys.executable])


def _write_our_model(files: PeerFiles, cell: Cell) -> None:
    """Write a Kvasir checkpoint, its export for the peers' converters, and llama.cpp's GGUF file if Kvasir reads it."""
    ours, exported = files.model(cell, "ours"), files.model(cell, "hugging_face")
    if not (ours / "manifest.json").is_file():
        write_random_checkpoint(ours, cell.shape, dtype="bfloat16")
    if not (exported / "config.json").is_file():
        export_checkpoint(ours, exported)
    if _FORMATS[cell.precision].ours != "ours":
        _write_llama_model(files, cell)


def _our_settings(cell: Cell, threads: int) -> list[str]:
    """Return Kvasir's flags: precision, threads, KV-cache for the largest cell, with 2-byte values like the peers."""
    memory = str(-(-_largest_cache(cell) * 11 // 10 // 2**20))  # a tenth more, because sequences end within a block
    return [*_FORMATS[cell.precision].flags, "--threads", str(threads), "--kv-cache-memory", memory]


def _our_engine(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    checkpoint = ["--checkpoint", str(files.model(cell, _FORMATS[cell.precision].ours))]
    return [sys.executable, "-m", f"{_DRIVERS}.ours_engine", *checkpoint, *_our_settings(cell, threads)]


def _our_server(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    """Return the command of Kvasir's service: without flags for `DEFAULTS`, else with an unlimited queue."""
    settings = [*_our_settings(cell, threads), "--target-queue-seconds", "0"]
    return kvasir_serve(
        files.model(cell, _FORMATS[cell.precision].ours), [] if cell.precision in DEFAULTS else settings
    )


def _llama_weights(files: PeerFiles, cell: Cell) -> Path:
    return files.model(cell, f"llama_cpp_{_FORMATS[cell.precision].gguf}.gguf")


def _write_llama_model(files: PeerFiles, cell: Cell) -> None:
    whole, out = files.model(cell, "llama_cpp_BF16.gguf"), _llama_weights(files, cell)
    if not whole.is_file():
        convert = [files.program("llama_cpp"), "-m", f"{_DRIVERS}.llama_cpp_model"]
        run([*convert, str(files.model(cell, "hugging_face")), str(whole), "BF16"])
    if not out.is_file():
        gguf = _FORMATS[cell.precision].gguf
        pure = [] if gguf.endswith("_M") else ["--pure"]  # otherwise some matrices get more bits
        run([files.program("llama_cpp", "llama-quantize"), *pure, str(whole), str(out), gguf, "1"])


Command = Callable[[PeerFiles, Cell, int], list[str]]


def _llama_engine(environment: str, *flags: str) -> Command:
    """Return the function that makes the command of llama-batched-bench in this environment, with more flags."""

    def engine(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
        command = [sys.executable, "-m", f"{_DRIVERS}.llama_cpp_engine"]
        command.append(files.program(environment, "llama-batched-bench"))
        return [*command, str(_llama_weights(files, cell)), str(threads), *flags]

    return engine


def _llama_server(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    server, weights = files.program("llama_cpp", "llama-server"), _llama_weights(files, cell)
    command = [server, "-m", str(weights), "--host", "127.0.0.1"]
    # No prompt cache in host memory: no prompt repeats, and the copies would cost time.
    flags = ["-t", str(threads), "-tb", str(threads), "-np", str(_MAX_STREAMS), "--cache-ram", "0"]
    flags += ["-c", str(_MAX_STREAMS * _SLOT_TOKENS)]
    return command if cell.precision in DEFAULTS else command + flags


def _openvino_weights(files: PeerFiles, cell: Cell) -> tuple[Path, str, str]:
    """Return the directory for OpenVINO's model, the precision hint, and the value of --weight-format, plus flags."""
    form = _FORMATS[cell.precision].openvino
    assert form is not None, "the peer supports this cell"
    return files.model(cell, f"openvino_{form[1].split()[0]}"), *form


def _write_openvino_model(files: PeerFiles, cell: Cell) -> None:
    out, _, flags = _openvino_weights(files, cell)
    if not (out / "openvino_model.bin").is_file():
        export = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", *flags.split()]
        model = ["--model", str(files.model(cell, "hugging_face")), str(out)]
        run([files.program("openvino", "optimum-cli"), *export, *model])


def _openvino_engine(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    out, hint, _ = _openvino_weights(files, cell)
    driver = [files.program("openvino"), "-m", f"{_DRIVERS}.openvino_engine", str(out), hint]
    return [*driver, str(threads), str(1 + _largest_cache(cell) // 2**30)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One engine of the comparison.

    environment: name of its Python environment. variables: environment variables of its driver.
    write_model: function that creates the model's files unless they exist.
    engine, server: functions that return the command of the driver and of the HTTP server; None: no HTTP server.
    """

    name: str
    environment: str
    precisions: tuple[str, ...] = PRECISIONS
    write_model: Callable[[PeerFiles, Cell], None]
    engine: Command
    server: Command | None = None
    variables: dict[str, str] = field(default_factory=dict)
    note: str

    def supports(self, cell: Cell) -> bool:
        """Return True if the engine can run the cell: its precision, and HTTP if needed."""
        return cell.precision in self.precisions and (cell.kind != "http" or self.server is not None)


OURS: Final = Peer(
    name="ours",
    environment="",
    write_model=_write_our_model,
    engine=_our_engine,
    server=_our_server,
    variables=TORCH_ENVIRONMENT,
    note="engine and service as `kvasir serve` builds them",
)
PEERS: Final = (
    Peer(
        name="llama.cpp",
        environment="llama_cpp",
        write_model=_write_llama_model,
        engine=_llama_engine("llama_cpp"),
        server=_llama_server,
        note="llama-batched-bench, which samples no tokens; llama-server with 64 slots; Q8_0 for int8, Q4_0 for int4; "
        "KV-cache float16; defaults: llama-server without flags",
    ),
    Peer(
        name="ik_llama.cpp",
        environment="ik_llama_cpp",
        write_model=_write_llama_model,
        engine=_llama_engine("ik_llama_cpp", "--run-time-repack"),
        note="llama-batched-bench with --run-time-repack; the files of llama.cpp; KV-cache float16",
    ),
    Peer(
        name="OpenVINO GenAI",
        environment="openvino",
        precisions=tuple(name for name, form in _FORMATS.items() if form.openvino),
        write_model=_write_openvino_model,
        engine=_openvino_engine,
        variables={"HF_HUB_OFFLINE": "1"},  # the model is a local directory
        note="ContinuousBatchingPipeline, 512 tokens per step; int8 weights per channel, int4 in groups of 128; "
        "activations quantized by OpenVINO; KV-cache float16, with quantized weights int8",
    ),
)


class DriverProcess:
    """Engine in a child process that runs a driver. Raises MeasurementFailed if the program is missing."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        # Errors quote the last line of standard error.
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
        pipe, environment = subprocess.PIPE, {**os.environ, **variables}
        try:
            self.child = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=self._log
            )
        except OSError as error:
            self._log.close()
            raise MeasurementFailed(f"cannot run {command[0]}: {error.strerror}") from error

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Run all prompts at once and return tokens/s and times. Raises MeasurementFailed if the engine fails."""
        with suppress(BrokenPipeError):  # the read below reports the engine's last line
            line = json.dumps({"prompts": prompts, "output_tokens": cell.output_tokens})
            print(line, file=self.child.stdin, flush=True)
        wave = self._read()
        if "error" in wave:
            raise MeasurementFailed(wave["error"])
        first, later_tokens = wave["first_seconds"], wave.pop("later_tokens")
        if cell.kind == "prompt":
            return {"tokens_per_second": sum(map(len, prompts)) / first, **wave}
        return {"tokens_per_second": later_tokens / (wave["total_seconds"] - first), **wave}

    def close(self) -> None:
        """Stop the engine's process."""
        self.child.kill()
        self.child.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        for line in self.child.stdout or ():
            if line.startswith("{"):  # skip what libraries print while they load
                response: dict[str, Any] = json.loads(line)
                return response
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        raise MeasurementFailed(f"the engine's process ended: {lines[-1] if lines else 'no output'}")


class PeerServer:
    """HTTP server of a compared engine, in child processes. Raises MeasurementFailed if the server does not start."""

    def __init__(self, command: Sequence[str]) -> None:
        self._service = ServiceProcess(command).__enter__()
        self._indexes = itertools.count()
        try:
            self._service.wait_first_token()
        except MeasurementFailed:
            self.close()
            raise

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Send all prompts from N clients and return tokens/s and TTFT. Raises MeasurementFailed if a request fails."""
        requests = [
            LoadRequest(index=index, prompt=prompt, max_tokens=cell.output_tokens, temperature=0.0)
            for index, prompt in zip(self._indexes, prompts, strict=False)
        ]
        run = complete_all(self._service.target, requests, num_streams=cell.streams, timeout_seconds=_REQUEST_SECONDS)
        ttfts = percentiles(latencies_ms(run.outcomes)["ttft"], (50, 99))
        rates = {"tokens_per_second": run.tokens_per_second, "client_cpu_share": run.client_cpu_share}
        return rates | {f"ttft_{share}_ms": value for share, value in ttfts.items()}

    def close(self) -> None:
        """Stop the server's processes."""
        self._service.__exit__()
