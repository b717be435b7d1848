"""Who is compared with us, in which precisions, and how each is started. Torch-free."""

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.bench_peers_cells import DEFAULTS, PROMPT_TOKENS, Cell
from loadtest.bench_peers_install import Place, openvino_weights, our_weights
from loadtest.bench_peers_processes import Driver, Server
from loadtest.shape_names import SHAPE_SIZES
from service.cli import LIBRARY_ENVIRONMENT

_MIB = 2**20
_SLOT_TOKENS = 256  # of one of llama-server's 64 slots: prompt and answer fit
_MOST_STREAMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is the same for all: where things are, the model, and the threads."""

    place: Place
    shape: str
    precision: str
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One way to run another engine.

    environment: whose packages it needs; several ways may share one.
    server: None for what has no server that streams completions.
    rounds: how often it is measured at most; None for as often as is asked. The slow ones once.
    """

    name: str
    environment: str
    precisions: tuple[str, ...]
    engine: Callable[[Setting], Driver] | None
    server: Callable[[Setting], Server] | None = None
    rounds: int | None = None
    note: str

    def can(self, cell: Cell) -> bool:
        """Whether the cell is its kind of thing."""
        return cell.precision in self.precisions and (self.server if cell.kind == "http" else self.engine) is not None


def our_engine(setting: Setting) -> Driver:
    """Ours, as the worker builds it."""
    command = [sys.executable, "-m", "loadtest.peers.ours_engine", *_our_settings(setting)]
    return Driver(command, LIBRARY_ENVIRONMENT)


def our_server(setting: Setting) -> Server:
    """Return our server. Requests wait without a limit, as they do at the peers; with defaults, by our own limits."""
    port = _free_port()
    command = [str(Path(sys.executable).with_name("kvasir")), "serve", "--port", str(port)]
    if setting.precision == DEFAULTS:
        checkpoint = setting.place.model(setting.shape, our_weights(setting.precision))
        return Server([*command, "--checkpoint", str(checkpoint)], port, "/ready")
    return Server([*command, *_our_settings(setting), "--target-queue-seconds", "0"], port, "/ready")


def _our_settings(setting: Setting) -> list[str]:
    """Flags: the precision, the threads, and a KV-cache of what the largest cell needs, of 16 bits as the others'."""
    sizes = SHAPE_SIZES[setting.shape]
    dtype = "float32" if setting.precision == "float32" else "bfloat16"
    token_bytes = 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"] * 2
    tokens = 2 * _MOST_STREAMS * (PROMPT_TOKENS + _SLOT_TOKENS)
    given = ["--checkpoint", str(setting.place.model(setting.shape, "ours")), "--dtype", dtype]
    given += ["--quantize", "int8"] if setting.precision == "int8" else []
    given += ["--kv-cache-dtype", "float16"] if dtype == "float32" else []
    return [*given, "--threads", str(setting.threads), "--kv-cache-memory", str(-(-tokens * token_bytes // _MIB))]


def _llama_engine(setting: Setting) -> Driver:
    model = setting.place.model(setting.shape, f"llama_cpp_{setting.precision}.gguf")
    bench = setting.place.program("llama-batched-bench")
    command = [sys.executable, "-m", "loadtest.peers.llama_cpp_engine", bench, str(model), str(setting.threads)]
    return Driver(command, {})


def _llama_server(setting: Setting) -> Server:
    port = _free_port()
    model = setting.place.model(setting.shape, f"llama_cpp_{setting.precision}.gguf")
    command = [setting.place.program("llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    if setting.precision == DEFAULTS:
        return Server(command, port, "/health")
    command += ["-t", str(setting.threads), "-tb", str(setting.threads), "-np", str(_MOST_STREAMS)]
    # No copies of prompts for later: none comes again, and keeping them would cost it time.
    return Server([*command, "-c", str(_MOST_STREAMS * _SLOT_TOKENS), "--cache-ram", "0"], port, "/health")


def _openvino_engine(setting: Setting) -> Driver:
    model = setting.place.model(setting.shape, openvino_weights(setting.precision))
    return _python_driver("openvino", "openvino_engine", model, setting)


def _python_driver(environment: str, module: str, model: Path, setting: Setting) -> Driver:
    command = [setting.place.python(environment), "-m", f"loadtest.peers.{module}", str(model)]
    # Nothing is to be looked for in the network.
    return Driver([*command, setting.precision, str(setting.threads)], {"HF_HUB_OFFLINE": "1"})


def _transformers_engine(setting: Setting) -> Driver:
    model = setting.place.model(setting.shape, "hugging_face")
    return _python_driver("transformers", "transformers_engine", model, setting)


def _transformers_batching(setting: Setting) -> Driver:
    model = setting.place.model(setting.shape, "hugging_face")
    return _python_driver("transformers", "transformers_batching", model, setting)


def _litgpt_engine(setting: Setting) -> Driver:
    return _python_driver("litgpt", "litgpt_engine", setting.place.model(setting.shape, "litgpt"), setting)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


PEERS: Final = (
    Peer(
        name="llama.cpp",
        environment="llama_cpp",
        precisions=("bfloat16", "int8", "float32", DEFAULTS),
        engine=_llama_engine,
        server=_llama_server,
        note="llama-batched-bench, which samples no tokens; llama-server of 64 slots; Q8_0 for int8; KV-cache float16; "
        "defaults: llama-server without flags, a bfloat16 file",
    ),
    Peer(
        name="OpenVINO GenAI",
        environment="openvino",
        precisions=("bfloat16", "int8", "float32"),
        engine=_openvino_engine,
        note="ContinuousBatchingPipeline, 512 tokens a step; int8 weights of a channel each, inputs rounded by itself; "
        "KV-cache float16, of int8 weights int8",
    ),
    Peer(
        name="transformers generate",
        environment="transformers",
        precisions=("bfloat16", "float32"),
        engine=_transformers_engine,
        rounds=1,
        note="one batch from its first token to its last; its server speaks chats alone, and random weights have none",
    ),
    Peer(
        name="transformers generate_batch",
        environment="transformers",
        precisions=("bfloat16", "float32"),
        engine=_transformers_batching,
        rounds=1,
        note="continuous batching, paged attention",
    ),
    Peer(
        name="litgpt",
        environment="litgpt",
        precisions=("bfloat16", "float32"),
        engine=_litgpt_engine,
        rounds=1,
        note="generate_fn for one, batched_generate_fn for prompts of one length; its server takes no token ids",
    ),
)
