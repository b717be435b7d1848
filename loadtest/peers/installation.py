"""Installation of peers: environments in `.venv-peers/NAME` and model files in `.venv-peers/models/SHAPE`, each
created once.

A failed step raises `PeerUnavailable` with the reason. The comparison continues without that peer and reports it.
"""

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.peers.comparison_cells import DEFAULTS

ROOT = Path(__file__).resolve().parent.parent.parent
PINS = Path(__file__).resolve().parent
_QUANTIZED = {"bfloat16": "BF16", "int8": "Q8_0", DEFAULTS: "BF16"}
_BUILD_FLAGS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)
LLAMA_PROGRAMS = ("llama-server", "llama-batched-bench", "llama-quantize")


class PeerUnavailable(MeasurementFailed):
    """A peer cannot be installed, built, given the model, or started. The message is a one-line reason."""


class Place:
    """Directory with everything that is created for peers, usually `.venv-peers`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def python(self, peer: str) -> str:
        """Return the interpreter of a peer's environment."""
        return str(self.directory / peer / "bin" / "python")

    def program(self, name: str) -> str:
        """Return the path of a llama.cpp program."""
        return str(self.directory / "llama_cpp" / "programs" / name)

    def model(self, shape: str, kind: str) -> Path:
        """Return a model's file or directory, for example of kind ours, hugging_face or llama_cpp_int8.gguf."""
        return self.directory / "models" / shape / kind


def install(place: Place, peer: str) -> None:
    """Create a peer's environment and build its programs, unless they exist.

    Raises:
        PeerUnavailable: a step failed.
    """
    pins = PINS / f"{peer}.txt"
    home = place.directory / peer
    stamp = home / ".installed"
    wanted = f"{hashlib.sha256(pins.read_bytes()).hexdigest()} torch=={_torch_version()}"
    if not stamp.is_file() or stamp.read_text() != wanted:
        run([sys.executable, "-m", "venv", "--clear", str(home)])
        constraints = home / "constraints.txt"
        constraints.write_text(f"torch=={_torch_version()}\n")
        pip = [place.python(peer), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--constraint", str(constraints), "--requirement", str(pins)])
        # The registry's torchvision is for another build of torch and fails at import. transformers imports it if it
        # is installed.
        run([place.python(peer), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"])
        stamp.write_text(wanted)
    if peer == "llama_cpp" and not all(Path(place.program(name)).is_file() for name in LLAMA_PROGRAMS):
        _build_llama_cpp(place)


def _torch_version() -> str:
    """Return the installed torch version. Peers get the same build, to avoid gigabytes of CUDA libraries."""
    return importlib.metadata.version("torch")


def _build_llama_cpp(place: Place) -> None:
    """Compile the three programs from the source distribution in the registry: ten minutes on one core."""
    if shutil.which("c++") is None:
        raise PeerUnavailable("no C++ compiler to build llama.cpp; install one")
    home = place.directory / "llama_cpp"
    pin = (PINS / "llama_cpp_source.txt").read_text().strip()
    package = pin.partition("==")[0]
    if not any(home.glob("*.tar.gz")):
        download = [place.python("llama_cpp"), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
        run([*download, "--dest", str(home), pin])
    (archive,) = home.glob("*.tar.gz")
    name = archive.name.removesuffix(".tar.gz")
    if not (home / name).is_dir():
        part = home / "unpacked"  # an interrupted extraction must not look complete
        with tarfile.open(archive) as file:
            file.extractall(part, filter="data")
        (part / name).rename(home / name)
    source = home / name / "vendor" / "llama.cpp"
    tools = home / "bin"
    build = home / "build"
    configure = [str(tools / "cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja", *_BUILD_FLAGS]
    run([*configure, f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"])
    run([str(tools / "ninja"), "-C", str(build), *LLAMA_PROGRAMS])
    (home / "programs").mkdir(exist_ok=True)
    for name in LLAMA_PROGRAMS:
        shutil.copy2(build / "bin" / name, place.program(name))


def give_model(place: Place, peer: str, shape: str, precision: str) -> None:
    """Create the model's files for a peer, unless they exist.

    Raises:
        PeerUnavailable: a step failed.
    """
    hugging_face = place.model(shape, "hugging_face")
    if peer == "llama_cpp":
        whole = place.model(shape, "llama_cpp_float32.gguf")
        if not whole.is_file():
            run([place.python(peer), "-m", "loadtest.peers.drivers.llama_cpp_model", str(hugging_face), str(whole)])
        out = place.model(shape, f"llama_cpp_{precision}.gguf")
        if not out.is_file():
            run([place.program("llama-quantize"), str(whole), str(out), _QUANTIZED[precision], "1"])
    elif peer == "openvino":
        out = place.model(shape, openvino_weights(precision))
        if not (out / "openvino_model.bin").is_file():
            weights = "int8" if precision == "int8" else "fp32"
            command = [str(Path(place.python(peer)).with_name("optimum-cli")), "export", "openvino"]
            command += ["--model", str(hugging_face), "--task", "text-generation-with-past"]
            run([*command, "--weight-format", weights, str(out)])


def openvino_weights(precision: str) -> str:
    """Return the name of OpenVINO's model. For bfloat16 its float32 weights are rounded when the model is compiled."""
    return "openvino_int8" if precision == "int8" else "openvino_float32"


def our_weights(precision: str) -> str:
    """Return the name of Kvasir's checkpoint. Only `DEFAULTS` stores bfloat16; others are converted at load."""
    return "ours_bfloat16" if precision == DEFAULTS else "ours"


def give_our_model(place: Place, shape: str, precision: str) -> None:
    """Write random weights as a Kvasir checkpoint, and an export of the float32 ones for the peers' converters."""
    for weights in dict.fromkeys(("ours", our_weights(precision))):
        path = place.model(shape, weights)
        if not (path / "manifest.json").is_file():
            dtype = "float32" if weights == "ours" else "bfloat16"
            program = "import torch; from pathlib import Path; "
            program += "from loadtest.measurement.model_shapes import write_random_checkpoint as write; "
            run([sys.executable, "-c", f"{program}write(Path({str(path)!r}), {shape!r}, dtype=torch.{dtype})"])
    exported = place.model(shape, "hugging_face")
    if not (exported / "config.json").is_file():
        kvasir = str(Path(sys.executable).with_name("kvasir"))
        run([kvasir, "convert", "--export", str(place.model(shape, "ours")), "--out", str(exported)])


def run(command: Sequence[str]) -> None:
    """Run a command to its end.

    Raises:
        PeerUnavailable: the command failed; the message has its last line of output.
    """
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise PeerUnavailable(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        what = " ".join([Path(command[0]).name, *command[1:4]])
        raise PeerUnavailable(
            f"{what} ... failed with exit code {done.returncode}: {lines[-1].strip() if lines else ''}"
        )
