"""Engines in the comparison: their precisions, and the commands that start them. Torch-free."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.measurement.shape_names import SHAPE_SIZES
from loadtest.peers.comparison_cells import DEFAULTS, PROMPT_TOKENS, Cell
from loadtest.peers.installation import Place, openvino_weights, our_weights
from loadtest.peers.processes import Driver, Server
from loadtest.scenarios.service_process import free_port
from service.config.torch_environment import LIBRARY_ENVIRONMENT

_MIB = 2**20
_SLOT_TOKENS = 256  # tokens of each of llama-server's 64 slots: prompt and completion fit
_MAX_STREAMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings that all engines share: directories, the model, and the threads."""

    place: Place
    shape: str
    precision: str
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One way to run another engine.

    environment: name of its environment; several ways may share one.
    server: None without a server that streams completions.
    rounds: maximum number of rounds; None without a limit. Slow engines run once.
    """

    name: str
    environment: str
    precisions: tuple[str, ...]
    engine: Callable[[Setting], Driver] | None
    server: Callable[[Setting], Server] | None = None
    rounds: int | None = None
    note: str

    def can(self, cell: Cell) -> bool:
        """Return True if the peer supports the cell."""
        return cell.precision in self.precisions and (self.server if cell.kind == "http" else self.engine) is not None


def our_engine(setting: Setting) -> Driver:
    """Start Kvasir's engine, built as the worker builds it."""
    command = [sys.executable, "-m", "loadtest.peers.drivers.ours_engine", *_our_settings(setting)]
    return Driver(command, LIBRARY_ENVIRONMENT)


def our_server(setting: Setting) -> Server:
    """Start Kvasir's server. Queueing is unlimited, as in the peers' servers; `DEFAULTS` keeps Kvasir's own limits."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("kvasir")), "serve", "--port", str(port)]
    if setting.precision == DEFAULTS:
        checkpoint = setting.place.model(setting.shape, our_weights(setting.precision))
        return Server([*command, "--checkpoint", str(checkpoint)], port, "/ready")
    return Server([*command, *_our_settings(setting), "--target-queue-seconds", "0"], port, "/ready")


def _our_settings(setting: Setting) -> list[str]:
    """Return flags for precision, threads, and a KV-cache for the largest cell, with 2-byte values as in the peers."""
    sizes = SHAPE_SIZES[setting.shape]
    dtype = "float32" if setting.precision == "float32" else "bfloat16"
    token_bytes = 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"] * 2
    tokens = 2 * _MAX_STREAMS * (PROMPT_TOKENS + _SLOT_TOKENS)
    given = ["--checkpoint", str(setting.place.model(setting.shape, "ours")), "--dtype", dtype]
    given += ["--quantize", "int8"] if setting.precision == "int8" else []
    given += ["--kv-cache-dtype", "float16"] if dtype == "float32" else []
    return [*given, "--threads", str(setting.threads), "--kv-cache-memory", str(-(-tokens * token_bytes // _MIB))]


def _llama_engine(setting: Setting) -> Driver:
    model = setting.place.model(setting.shape, f"llama_cpp_{setting.precision}.gguf")
    bench = setting.place.program("llama-batched-bench")
    command = [sys.executable, "-m", "loadtest.peers.drivers.llama_cpp_engine", bench, str(model), str(setting.threads)]
    return Driver(command, {})


def _llama_server(setting: Setting) -> Server:
    port = free_port()
    model = setting.place.model(setting.shape, f"llama_cpp_{setting.precision}.gguf")
    command = [setting.place.program("llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    if setting.precision == DEFAULTS:
        return Server(command, port, "/health")
    command += ["-t", str(setting.threads), "-tb", str(setting.threads), "-np", str(_MAX_STREAMS)]
    # No prompt cache in host memory: no prompt repeats, and the copies would cost time.
    return Server([*command, "-c", str(_MAX_STREAMS * _SLOT_TOKENS), "--cache-ram", "0"], port, "/health")


def _python_driver(environment: str, weights: str, setting: Setting) -> Driver:
    model = str(setting.place.model(setting.shape, weights))
    command = [setting.place.python(environment), "-m", f"loadtest.peers.drivers.{environment}_engine", model]
    # Offline: the model is a local directory.
    return Driver([*command, setting.precision, str(setting.threads)], {"HF_HUB_OFFLINE": "1"})


PEERS: Final = (
    Peer(
        name="llama.cpp",
        environment="llama_cpp",
        precisions=("bfloat16", "int8", "float32", DEFAULTS),
        engine=_llama_engine,
        server=_llama_server,
        note="llama-batched-bench, which samples no tokens; llama-server with 64 slots; Q8_0 for int8; "
        "KV-cache float16; defaults: llama-server without flags, a bfloat16 file",
    ),
    Peer(
        name="OpenVINO GenAI",
        environment="openvino",
        precisions=("bfloat16", "int8", "float32"),
        engine=lambda setting: _python_driver("openvino", openvino_weights(setting.precision), setting),
        note="ContinuousBatchingPipeline, 512 tokens per step; int8 weights per channel, "
        "activations quantized by OpenVINO; KV-cache float16, with int8 weights int8",
    ),
    Peer(
        name="transformers generate",
        environment="transformers",
        precisions=("bfloat16", "float32"),
        engine=lambda setting: _python_driver("transformers", "hugging_face", setting),
        rounds=1,
        note="static batch; its server has only a chat API, and the random model has no chat template",
    ),
)
