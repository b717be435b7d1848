"""Engines of the comparison, one row each: installation, model files, and commands. Torch-free.

Environments are created once in `.venv-peers/NAME`, and model files in `.venv-peers/models/SHAPE`. A failed step raises
`MeasurementFailed` with the reason. The comparison continues without that peer and reports the reason.
"""

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.measurement.shape_names import SHAPE_SIZES
from loadtest.peers.comparison_cells import DEFAULTS, PROMPT_TOKENS, Cell
from loadtest.scenarios.service_benchmark import kvasir_serve
from service.config.torch_environment import LIBRARY_ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent.parent
PINS = Path(__file__).resolve().parent
LLAMA_PROGRAMS = ("llama-server", "llama-batched-bench", "llama-quantize")
_DRIVERS = "loadtest.peers.drivers"
_BUILD_FLAGS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)
_QUANTIZED = {"bfloat16": "BF16", "int8": "Q8_0", DEFAULTS: "BF16"}
_SLOT_TOKENS, _MAX_STREAMS = 256, 64  # llama-server's slots; each holds a prompt and its completion


def run(command: Sequence[str]) -> None:
    """Run a command to its end. Raises MeasurementFailed, with the last line of output, if the command fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise MeasurementFailed(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        name = " ".join([Path(command[0]).name, *command[1:4]])
        raise MeasurementFailed(f"{name} ... failed with exit code {done.returncode}: {lines[-1] if lines else ''}")


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Directory with everything that is created for peers, usually `.venv-peers`."""

    directory: Path

    def python(self, environment: str, name: str = "python") -> str:
        """Return the interpreter of an environment, or another program of it."""
        return str(self.directory / environment / "bin" / name)

    def program(self, name: str) -> str:
        """Return the path of a llama.cpp program."""
        return str(self.directory / "llama_cpp" / "programs" / name)

    def model(self, cell: Cell, kind: str) -> Path:
        """Return a model's file or directory, for example of kind ours, hugging_face or llama_cpp_int8.gguf."""
        return self.directory / "models" / cell.shape / kind


def install(files: PeerFiles, environment: str) -> None:
    """Create an environment, and build llama.cpp's programs for its own, unless they exist."""
    pins, home = PINS / f"{environment}.txt", files.directory / environment
    # Peers get the installed build of torch, to avoid gigabytes of CUDA libraries.
    torch = f"torch=={importlib.metadata.version('torch')}"
    stamp, wanted = home / ".installed", f"{hashlib.sha256(pins.read_bytes()).hexdigest()} {torch}"
    if not stamp.is_file() or stamp.read_text() != wanted:
        run([sys.executable, "-m", "venv", "--clear", str(home)])
        (home / "constraints.txt").write_text(f"{torch}\n")
        pip = [files.python(environment), "-m", "pip"]
        options = ["--quiet", "--disable-pip-version-check", "--constraint", str(home / "constraints.txt")]
        run([*pip, "install", *options, "--requirement", str(pins)])
        # The registry's torchvision is for another build of torch and fails when transformers imports it.
        run([*pip, "uninstall", "--quiet", "--yes", "torchvision"])
        stamp.write_text(wanted)
    if environment == "llama_cpp" and not all(Path(files.program(name)).is_file() for name in LLAMA_PROGRAMS):
        _build_llama_cpp(files, home)


def _build_llama_cpp(files: PeerFiles, home: Path) -> None:
    """Compile the three programs from the source distribution in the registry: ten minutes on one core."""
    if shutil.which("c++") is None:
        raise MeasurementFailed("no C++ compiler to build llama.cpp; install one")
    pin = (PINS / "llama_cpp_source.txt").read_text().strip()
    if not any(home.glob("*.tar.gz")):
        download = [files.python("llama_cpp"), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        run([*download, pin.partition("==")[0], "--dest", str(home), pin])
    (archive,) = home.glob("*.tar.gz")
    unpacked = home / archive.name.removesuffix(".tar.gz")
    if not unpacked.is_dir():
        part = home / "unpacked"  # an interrupted extraction must not look complete
        with tarfile.open(archive) as file:
            file.extractall(part, filter="data")
        (part / unpacked.name).rename(unpacked)
    build, ninja = home / "build", files.python("llama_cpp", "ninja")
    configure = [files.python("llama_cpp", "cmake"), "-S", str(unpacked / "vendor" / "llama.cpp"), "-B", str(build)]
    run([*configure, "-G", "Ninja", *_BUILD_FLAGS, f"-DCMAKE_MAKE_PROGRAM={ninja}"])
    run([ninja, "-C", str(build), *LLAMA_PROGRAMS])
    (home / "programs").mkdir(exist_ok=True)
    for name in LLAMA_PROGRAMS:
        shutil.copy2(build / "bin" / name, files.program(name))


def _our_weights(files: PeerFiles, cell: Cell) -> Path:
    """Return Kvasir's checkpoint. Only `DEFAULTS` stores bfloat16; other precisions are converted at load."""
    return files.model(cell, "ours_bfloat16" if cell.precision == DEFAULTS else "ours")


def _write_our_model(files: PeerFiles, cell: Cell) -> None:
    """Write random weights as a Kvasir checkpoint, and an export of the float32 ones for the peers' converters."""
    for path, dtype in ((files.model(cell, "ours"), "float32"), (_our_weights(files, cell), "bfloat16")):
        if not (path / "manifest.json").is_file():
            program = "import torch; from pathlib import Path; "
            program += "from loadtest.measurement.model_shapes import write_random_checkpoint as write; "
            run([sys.executable, "-c", f"{program}write(Path({str(path)!r}), {cell.shape!r}, dtype=torch.{dtype})"])
    exported = files.model(cell, "hugging_face")
    if not (exported / "config.json").is_file():
        kvasir = str(Path(sys.executable).with_name("kvasir"))
        run([kvasir, "convert", "--export", str(files.model(cell, "ours")), "--out", str(exported)])


def _our_settings(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    """Return flags for precision, threads, and a KV-cache for the largest cell, with 2-byte values as in the peers."""
    sizes = SHAPE_SIZES[cell.shape]
    dtype = "float32" if cell.precision == "float32" else "bfloat16"
    token_bytes = 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"] * 2
    num_bytes = 2 * _MAX_STREAMS * (PROMPT_TOKENS + _SLOT_TOKENS) * token_bytes
    flags = ["--dtype", dtype, "--threads", str(threads), "--kv-cache-memory", str(-(-num_bytes // 2**20))]
    flags += ["--quantize", "int8"] if cell.precision == "int8" else []
    return flags + (["--kv-cache-dtype", "float16"] if dtype == "float32" else [])


def _our_engine(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    checkpoint = ["--checkpoint", str(_our_weights(files, cell))]
    return [sys.executable, "-m", f"{_DRIVERS}.ours_engine", *checkpoint, *_our_settings(files, cell, threads)]


def _our_server(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    """Return the service's command. Queueing is unlimited, as in the peers' servers, except for `DEFAULTS`."""
    settings = [*_our_settings(files, cell, threads), "--target-queue-seconds", "0"]
    return kvasir_serve(_our_weights(files, cell), [] if cell.precision == DEFAULTS else settings)


def _llama_weights(files: PeerFiles, cell: Cell) -> Path:
    return files.model(cell, f"llama_cpp_{cell.precision}.gguf")


def _write_llama_model(files: PeerFiles, cell: Cell) -> None:
    whole, out = files.model(cell, "llama_cpp_float32.gguf"), _llama_weights(files, cell)
    if not whole.is_file():
        convert = [files.python("llama_cpp"), "-m", f"{_DRIVERS}.llama_cpp_model"]
        run([*convert, str(files.model(cell, "hugging_face")), str(whole)])
    if not out.is_file():
        run([files.program("llama-quantize"), str(whole), str(out), _QUANTIZED[cell.precision], "1"])


def _llama_engine(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    driver = [sys.executable, "-m", f"{_DRIVERS}.llama_cpp_engine", files.program("llama-batched-bench")]
    return [*driver, str(_llama_weights(files, cell)), str(threads)]


def _llama_server(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    command = [files.program("llama-server"), "-m", str(_llama_weights(files, cell)), "--host", "127.0.0.1"]
    # No prompt cache in host memory: no prompt repeats, and the copies would cost time.
    flags = ["-t", str(threads), "-tb", str(threads), "-np", str(_MAX_STREAMS), "--cache-ram", "0"]
    flags += ["-c", str(_MAX_STREAMS * _SLOT_TOKENS)]
    return command if cell.precision == DEFAULTS else command + flags


def _openvino_weights(files: PeerFiles, cell: Cell) -> Path:
    """Return OpenVINO's model. For bfloat16, float32 weights are rounded when the model is compiled."""
    return files.model(cell, "openvino_int8" if cell.precision == "int8" else "openvino_float32")


def _write_openvino_model(files: PeerFiles, cell: Cell) -> None:
    out = _openvino_weights(files, cell)
    if not (out / "openvino_model.bin").is_file():
        command = [files.python("openvino", "optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
        command += ["--model", str(files.model(cell, "hugging_face"))]
        run([*command, "--weight-format", "int8" if cell.precision == "int8" else "fp32", str(out)])


def _openvino_engine(files: PeerFiles, cell: Cell, threads: int) -> list[str]:
    driver = [files.python("openvino"), "-m", f"{_DRIVERS}.openvino_engine"]
    return [*driver, str(_openvino_weights(files, cell)), cell.precision, str(threads)]


Command = Callable[[PeerFiles, Cell, int], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One engine of the comparison. Commands are given the files, the cell, and the number of threads.

    environment: name of its environment. write_model: creates the model's files unless they exist.
    engine: command of a driver, see `loadtest.peers.drivers.protocol`. server: None without a completions server.
    """

    name: str
    environment: str
    precisions: tuple[str, ...]
    write_model: Callable[[PeerFiles, Cell], None]
    engine: Command
    server: Command | None = None
    variables: dict[str, str] = field(default_factory=dict)
    note: str

    def supports(self, cell: Cell) -> bool:
        """Return True if the peer can run the cell."""
        return cell.precision in self.precisions and (cell.kind != "http" or self.server is not None)


OURS: Final = Peer(
    name="ours",
    environment="",
    precisions=("bfloat16", "int8", "float32", DEFAULTS),
    write_model=_write_our_model,
    engine=_our_engine,
    server=_our_server,
    variables=LIBRARY_ENVIRONMENT,
    note="engine and service as `kvasir serve` builds them",
)
PEERS: Final = (
    Peer(
        name="llama.cpp",
        environment="llama_cpp",
        precisions=("bfloat16", "int8", "float32", DEFAULTS),
        write_model=_write_llama_model,
        engine=_llama_engine,
        server=_llama_server,
        note="llama-batched-bench, which samples no tokens; llama-server with 64 slots; Q8_0 for int8; "
        "KV-cache float16; defaults: llama-server without flags, a bfloat16 file",
    ),
    Peer(
        name="OpenVINO GenAI",
        environment="openvino",
        precisions=("bfloat16", "int8", "float32"),
        write_model=_write_openvino_model,
        engine=_openvino_engine,
        variables={"HF_HUB_OFFLINE": "1"},  # the model is a local directory
        note="ContinuousBatchingPipeline, 512 tokens per step; int8 weights per channel, "
        "activations quantized by OpenVINO; KV-cache float16, with int8 weights int8",
    ),
)
