"""Settings of every command: from flags, else environment variables, else defaults.

The docstring of a settings class heads its help page. The worker process, which knows the device, resolves "auto".
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import ByteSize, SecretStr, ValidationError, field_validator, model_validator

from model.checkpoint.manifest import MANIFEST_FILE
from model.config import ModelConfig
from model.kernels.build import CACHE
from model.system.limits import has_nvidia_driver
from service.config import flags
from service.config.flags import AutoOrCount, AutoOrSize, CommandSettings, Names, OutputFile, Size, option
from service.config.flags import SettingsError as SettingsError
from service.config.validation_messages import EMPTY, reword

Settings = TypeVar("Settings", bound=CommandSettings)
CacheDtype = Literal["auto", "float16", "int8"]
# Origin as browsers send it (https://fetch.spec.whatwg.org/#origin-header).
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]+")
# URL of an OTLP collector. The printed settings show it, so it holds no user name and password.
_COLLECTOR = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")
_TCP_PORT = re.compile(r"tcp://.*:(\d+)")  # port of a ZeroMQ address; ZeroMQ would open the port modulo 65,536
_GPU_DEFAULTS = {"max_num_running": 256, "max_batched_tokens": 4096}
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d?))?")
_SHIPPED_CHECKPOINT = Path("checkpoints") / "kvasir-20m"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # the repository, if the package is installed in editable mode
# Standard environment variables of OpenTelemetry, by field. Kvasir's own variable of the field takes precedence.
_STANDARD_VARIABLES = {"otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}


class CheckpointSettings(CommandSettings):
    """Settings of a command that reads a checkpoint."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("checkpoint",)

    checkpoint: Path = option(
        "model", default_text="checkpoints/kvasir-20m in the working directory, else beside the package"
    )
    """checkpoint directory, or a GGUF file"""


class ModelSettings(CheckpointSettings):
    """Model, device and engine settings, common to all commands that run a model."""

    device: str = option("model", "auto", metavar="auto|cpu|cuda|cuda:N")
    """device that runs the model; auto: cuda if there is a CUDA device, else cpu; cuda:1 is the second GPU of those
    that the environment variable CUDA_VISIBLE_DEVICES lists, which also takes names of MIG instances"""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = option("model", "auto")
    """dtype of the model; auto: bfloat16 on CUDA; on a CPU bfloat16 if the checkpoint is bfloat16 and native kernels
    run, else float32"""
    quantize: Literal["none", "int8", "int4", "fp8"] = option("model", "none")
    """quantize weights and inputs of matrix products: int8; int4 (4-bit weights, int8 inputs) on CPUs; fp8 on GPUs that
    support it; see docs/quantization.md"""
    attention: Literal["auto", "native", "sdpa", "eager", "paged"] = option("model", "auto")
    """attention backend; auto: native (Kvasir's kernels) on a CPU with AVX2 or better; paged on CUDA for models without
    attention biases; else sdpa"""
    cache_dir: Path = option("model", CACHE)
    """cache of native kernels compiled for this machine; $XDG_CACHE_HOME/kvasir if that variable is set"""
    cuda_graphs: bool = option("engine", True)
    """capture steps as CUDA graphs and replay them (CUDA with paged attention)"""
    lookahead: bool = option("engine", True)
    """launch each decode step before the tokens of the previous step are read back (CUDA)"""
    require_fast_path: bool = option("model", False)
    """do not start if a slower path had to be used: without native kernels on a CPU, or without Triton, flash attention
    or CUDA graphs on a GPU; the error names what is missing"""
    threads: AutoOrCount = option("model", "auto")
    """CPU threads of the model; auto: all usable CPUs, or one less without native kernels"""
    generation_config: bool = option("model", True)
    """use the checkpoint's generation_config.json for the sampling defaults of requests"""
    max_context_length: AutoOrCount = option("engine", "auto")
    """maximum tokens of prompt and completion together; auto: all positions of the model"""
    max_num_running: int = option("engine", 64, ge=1, le=4096)
    """maximum sequences in one step; the default on a GPU is 256, and at most --max-batched-tokens"""
    max_batched_tokens: int = option("engine", 512, ge=1)
    """maximum tokens computed in one step; the default on a GPU is 4096"""
    prompt_slowdown: float = option("engine", 1.75, ge=1)
    """maximum slowdown of a decode step caused by chunked prefill, as an approximate factor; inf: no limit"""
    target_itl_ms: float = option("engine", 0.0, ge=0, le=60_000)
    """target for the mean time between two tokens of a response, in ms; sequences per step are reduced below
    --max-num-running to meet it; 0: no target"""
    speculative_tokens: int = option("engine", 0, ge=0, le=64)
    """maximum draft tokens of speculative decoding by prompt lookup, for repetitive text; 0: off"""
    block_size: int = option("engine", 16, ge=1, le=1024)
    """tokens per KV-cache block"""
    kv_cache_memory: AutoOrSize = option("engine", "auto")
    """KV-cache size, such as 512MiB or 2GiB; a number alone is in MiB; auto: --max-num-running sequences of full
    context or 8192 tokens, whichever is less, plus half of that for shared prefixes; limited to half of free memory (on
    a GPU, to --gpu-memory-share); at least one sequence of full context"""
    kv_cache_dtype: CacheDtype = option("engine", "auto")
    """dtype of the KV-cache; auto: dtype of the model; int8: about twice the tokens of bfloat16 in the same memory;
    float16: twice the tokens of float32, for a float32 model on a CPU"""
    gpu_memory_share: float = option("engine", 0.9, gt=0, le=1)
    """fraction of GPU memory for weights, activations of the largest step, CUDA graphs and KV-cache"""
    enable_prefix_cache: bool = option("engine", True)
    """reuse KV-cache blocks among sequences that begin with the same tokens"""

    @model_validator(mode="before")
    @classmethod
    def _set_gpu_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Set higher defaults for a GPU, which needs thousands of tokens in a step to be busy.

        With --device auto, a machine with NVIDIA's driver counts as one with a GPU.
        """
        device = values.get("device", "auto")
        if not (device[:4] == "cuda" or (device == "auto" and has_nvidia_driver())):
            return values
        given = str(values.get("max_batched_tokens", ""))
        most = max(int(given), 1) if given.isdecimal() else _GPU_DEFAULTS["max_num_running"]
        return _GPU_DEFAULTS | {"max_num_running": min(_GPU_DEFAULTS["max_num_running"], most)} | values

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError("must be auto, cpu, cuda, or one of several GPUs, such as cuda:1")
        return value

    @model_validator(mode="after")
    def _check_max_batched_tokens(self) -> Self:
        if self.max_batched_tokens < self.max_num_running:
            raise ValueError(
                f"--max-batched-tokens {self.max_batched_tokens} is under --max-num-running {self.max_num_running}: "
                "a step computes at least one token per running sequence; raise --max-batched-tokens"
            )
        return self


class ServeSettings(ModelSettings):
    """Serve a checkpoint over HTTP with OpenAI's and Anthropic's APIs. SIGTERM or Ctrl-C drains; a second signal stops
    at once.
    """

    host: Literal["127.0.0.1", "0.0.0.0", "::"] = option("http", "127.0.0.1")
    """address to listen on"""
    port: int = option("http", 8000, ge=1024, le=65535)
    """port to listen on"""
    model_name: str | None = option("http", None, min_length=1)
    """name of the model in requests and responses (default: the checkpoint's name)"""
    strict_config: bool = option("model", False)
    """reject a checkpoint with unknown keys in config.json, also where the key's value is null, false, 0 or empty"""
    model_alias: Names = option("http", (), metavar="NAME")
    """further name of the model that requests may use; may be repeated"""
    lora: Names = option("model", (), metavar="NAME=DIR")
    """LoRA adapter in PEFT's format, which requests choose by NAME as their model; may be repeated"""
    lora_dir: Path | None = option("model", None, metavar="DIR")
    """let clients load and unload LoRA adapters in directories below DIR, by /v1/load_lora_adapter (default: off)"""
    chat_template: str = option("http", "auto", metavar="auto|plain|none|FILE", min_length=1)
    """chat template: auto (the checkpoint's, else plain), plain (message texts only), none (reject chat requests), or a
    Jinja file"""
    tool_format: str = option("http", "auto", metavar="auto|NAME")
    """format in which the model writes tool calls; auto: the chat template's, else hermes; docs/tools.md
    lists the names"""
    reasoning_format: str = option("http", "auto", metavar="auto|none|NAME")
    """format of the model's reasoning, such as <think> tags, which responses separate from the content; auto: the chat
    template's; docs/tools.md lists the names"""
    parse_special: bool = option("http", True)
    """parse names of special tokens in the prompts of completions as these tokens, unless a request sets parse_special;
    messages of chat completions are always plain text"""
    max_body_size: Size = option("http", "2MiB")
    """largest request body, 1KiB to 1GiB; a number alone is in MiB"""
    max_connections: int = option("http", 1280, ge=1, le=65_536)
    """maximum client connections; a further connection closes the one that is idle longest"""
    client_seconds: float = option("http", 30.0, ge=0.1, le=3600)
    """timeout for slow clients, in seconds: to send a request's headers, to send its body (plus 1 s per 10 kB), and to
    read 16 KiB of a response"""
    api_keys_file: Path | None = option("access", None, metavar="FILE")
    """file of API keys, one NAME: KEY per line; without any key, requests need no authentication"""
    api_keys: SecretStr | None = option("access", None)
    """further API keys, as comma-separated NAME: KEY pairs"""
    api_key: SecretStr | None = option("access", None)
    """one further API key, named "default" in logs"""
    open_probes: bool = option("access", True)
    """serve /health and /ready without an API key"""
    open_metrics: bool = option("access", True)
    """serve /metrics without an API key"""
    share_prefix_cache: bool = option("access", False)
    """share the prefix cache among all API keys; cached_tokens and TTFT then reveal what other keys have sent"""
    cors_origins: Names = option("access", (), metavar="ORIGIN")
    """web origin allowed by CORS, such as https://example.com, or * for all; may be repeated (default: none)"""
    max_prompts: int = option("admission", 4096, ge=1, le=4096)
    """maximum prompts, or texts to embed, in one request"""
    max_waiting_requests: int = option("admission", 1024, ge=0)
    """maximum sequences waiting to run; further requests get a 429"""
    max_waiting_tokens: int = option("admission", 1_000_000, ge=1)
    """maximum prompt and completion tokens of all waiting requests together; further requests get a 429"""
    target_queue_seconds: float = option("admission", 30.0, ge=0, le=86_400)
    """longest predicted wait in the queue; a request predicted to wait longer gets a 429; the request's timeout may
    allow a longer wait; 0.05: first tokens stay fast under overload; 0: no limit"""
    max_queue_seconds: float = option("admission", 60.0, ge=0, le=86_400)
    """a request that has waited this long without starting gets a 408; caps every timeout; 0: no limit"""
    resume_seconds: float = option("http", 15.0, ge=0, le=3600)
    """how long a response is kept for a client that lost its connection and retries with Last-Event-ID or its
    Idempotency-Key; 0: responses are not kept"""
    response_store_size: Size = option("http", "64MiB")
    """memory for stored responses of /v1/responses, the oldest of which make room for new ones; a number alone is in
    MiB"""
    response_store_seconds: float = option("http", 86_400.0, ge=0, le=31_536_000)
    """how long a response of /v1/responses is stored after its end; 0: responses are not stored"""
    embedding_pooling: Literal["mean", "last"] = option("http", "mean")
    """pooling of embeddings: mean of all tokens' hidden states, or the last token's hidden state"""
    score_method: Literal["auto", "embedding", "yes-no"] = option("http", "auto")
    """scores of /v1/score and /v1/rerank: cosine similarity of embeddings, or the probability that the model says yes
    and not no; auto: yes-no if there is a rerank template, and yes and no are one token each, else embedding"""
    rerank_template: str = option("http", "auto", metavar="auto|none|FILE", min_length=1)
    """prompt of yes-no scores: auto (that of Qwen3-Reranker, if the directory has this name), none, or a text file with
    {query} and {document}"""
    max_inspect_tokens: int = option("admission", 128, ge=0, le=512)
    """maximum prompt tokens of an attention inspection; 0: inspection is off"""
    devices: int = option("model", 1, ge=1, le=64)
    """workers behind one API process, each with the whole model on its own GPU, or on its share of the CPU's cores;
    sizes and limits, such as --kv-cache-memory and --max-num-running, apply to each worker"""
    drain_seconds: float = option("operation", 30.0, ge=0, le=3600)
    """time limit for unfinished requests to finish after SIGTERM"""
    standby: bool = option("operation", True)
    """keep a standby worker process, which replaces a dead worker about 1.5 s sooner"""
    hang_seconds: float = option("operation", 120.0, ge=0)
    """replace a worker that sends no heartbeat for this long; 0: never"""
    log_level: Literal["debug", "info", "warning", "error"] = option("operation", "info")
    """minimum level of log lines"""
    log_format: Literal["text", "json"] = option("operation", "text")
    """format of log lines; json: one object per line, and one line per request at its end"""
    log_prompts: bool = option("operation", False)
    """log the prompts and completions of requests; needs --log-format json"""
    otlp_endpoint: str | None = option("operation", None, metavar="URL")
    """collector of OpenTelemetry traces, over HTTP, such as http://127.0.0.1:4318; OTEL_EXPORTER_OTLP_ENDPOINT sets it
    too (default: no traces)"""
    kv_events_endpoint: str | None = option("operation", None, metavar="ADDRESS", min_length=1)
    """ZeroMQ address, such as tcp://*:5557, at which changes of the prefix cache are published in vLLM's format, for
    routers that send a request to the replica with the longest cached prefix; worker i of --devices adds i to the port
    (default: none)"""
    kv_events_replay_endpoint: str | None = option("operation", None, metavar="ADDRESS", min_length=1)
    """ZeroMQ address at which a router asks for changes that it has missed, such as tcp://*:5657 (default: none)"""
    kv_events_topic: str | None = option("operation", None, metavar="TOPIC", min_length=1)
    """topic of the published changes; llm-d expects kv@POD_ADDRESS@MODEL (default: the empty topic)"""

    @field_validator("host", mode="before")
    @classmethod
    def _resolve_localhost(cls, value: Any) -> Any:
        return "127.0.0.1" if value == "localhost" else value

    @field_validator("lora")
    @classmethod
    def _check_lora(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for name, _, directory in (adapter.partition("=") for adapter in value) if name and directory]
        if len(names) < len(value) or len(set(names)) < len(names) or not all(map(str.isprintable, names)):
            raise ValueError("must be NAME=DIR, with a printable NAME that no other adapter has")
        return value

    @field_validator("lora_dir")
    @classmethod
    def _check_lora_dir(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError("must be an existing directory")
        return value

    @field_validator("max_body_size")
    @classmethod
    def _check_max_body_size(cls, value: ByteSize) -> ByteSize:
        if not 2**10 <= value <= 2**30:
            raise ValueError("must be a body size from 1KiB to 1GiB, such as 2MiB")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _normalize_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        origins = tuple(origin.lower().removesuffix("/") for origin in value)
        if "*" in origins and len(origins) > 1:
            raise ValueError("must be * alone (any web origin), or web origins without *")
        if not all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in origins):
            raise ValueError("must be web origins such as https://example.com:8443, without a path, or *")
        return origins

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _COLLECTOR.fullmatch(value):
            raise ValueError(
                "must be a URL such as http://127.0.0.1:4318, without credentials (set OTEL_EXPORTER_OTLP_HEADERS)"
            )
        return value

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _check_tcp_port(cls, value: str | None) -> str | None:
        if value is not None and (found := _TCP_PORT.fullmatch(value)) and not 1 <= int(found[1]) <= 65535:
            raise ValueError("must be a ZeroMQ address such as tcp://*:5557, with a port from 1 to 65535")
        return value

    @model_validator(mode="after")
    def _check_needed_settings(self) -> Self:
        if self.log_prompts and self.log_format != "json":
            raise ValueError("--log-prompts needs --log-format json, which writes a line per request")
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(self, name) is not None and self.kv_events_endpoint is None:
                raise ValueError(f"{flags.flag_of(name)} needs --kv-events-endpoint, at which changes are published")
        return self

    @field_validator("hang_seconds")
    @classmethod
    def _check_hang_seconds(cls, value: float) -> float:
        if 0 < value < 3:
            raise ValueError("must be 0 (never replace a worker), or at least 3 seconds (heartbeats come every second)")
        return value


class GenerateSettings(ModelSettings):
    """Continue a text in this process. The completion is streamed to stdout, its statistics to stderr."""

    prompt: str = option("completion", min_length=1)
    """text to continue"""
    max_tokens: int = option("completion", 200, default_text="the checkpoint's, else 200", ge=0)
    """maximum tokens to generate"""
    temperature: float = option("completion", 0.8, default_text="the checkpoint's, else 0.8", ge=0, le=2)
    """sampling temperature; 0: always take the most likely token"""
    top_k: int = option("completion", 0, default_text="the checkpoint's, else 0", ge=0)
    """keep the k most likely tokens; 0: all"""
    top_p: float = option("completion", 0.95, default_text="the checkpoint's, else 0.95", gt=0, le=1)
    """keep the most likely tokens up to this total probability"""
    min_p: float = option("completion", 0.0, default_text="the checkpoint's, else 0.0", ge=0, le=1)
    """drop tokens below this fraction of the highest probability"""
    seed: int | None = option("completion", None, ge=0, lt=2**64)
    """seed of sampling; the same seed gives the same text (default: random)"""
    stop: str | None = option("completion", None, min_length=1)
    """end the completion before this text"""


class FamiliesSettings(CommandSettings):
    """List the supported model families: what the reader of config.json accepts of each, whether its GGUF files are
    read, and the date of its oldest proof of parity with the transformers library, which `make families` renews.
    """

    json_: bool = option("view", False)
    """print JSON, with the rope types and the names of the passed checks"""


class InspectSettings(CheckpointSettings):
    """Show a checkpoint and how it would be served on this machine: family, shape, memory, streams, tokens, files,
    training, and everything that `kvasir serve` would reject. Without --verify, only headers are read, no weights.
    `kvasir inspect params` counts the parameters of every matrix. `kvasir inspect attention` shows the attention
    weights of a prompt.
    """

    json_: bool = option("view", False)
    """print JSON"""
    verify: bool = option("view", False)
    """read all files, and compare their SHA-256 with manifest.json"""


class InspectParamsSettings(CheckpointSettings):
    """Count the parameters of each part by formula and from the tensors, and the bytes of KV-cache per token."""


class InspectAttentionSettings(CheckpointSettings):
    """Show the attention weights of a prompt in one layer. Standard output lists the tokens that each of the last
    tokens attends to most, and --out gets a heat map of each head. Layers and heads count from 0. Computed in float32
    on the CPU.
    """

    prompt: str = option("text", min_length=1)
    """prompt to compute attention weights for"""
    layer: int = option("view", ge=0)
    """layer to show, counted from 0"""
    head: str = option("view", "all", metavar="all|N")
    """head to show, counted from 0, or all heads"""
    out: OutputFile | None = option("view", None, metavar="FILE")
    """picture to write: .png, .svg or .pdf (default: none)"""

    @field_validator("out", mode="before")
    @classmethod
    def _check_suffix(cls, value: str | None) -> str | None:
        if value is not None and not value.lower().endswith((".png", ".svg", ".pdf")):
            raise ValueError("must be a picture file that ends in .png, .svg or .pdf")
        return value


class TokenizeSettings(CheckpointSettings):
    """Show the token ids of --text or of standard input: one line per token, or with --ids-only the ids alone. The
    begin-of-text token is included, as in POST /tokenize; --no-begin leaves it out.
    """

    text: str | None = option("text", None)
    """text to tokenize (default: standard input)"""
    ids_only: bool = option("text", False)
    """print the ids alone, on one line"""
    no_begin: bool = option("text", False)
    """leave out the begin-of-text token"""


class ExportTokenizerSettings(CheckpointSettings):
    """Write a checkpoint's tokenizer as a Hugging Face directory for transformers.AutoTokenizer, so that benchmark
    tools count the same tokens as this service. One difference remains: transformers parses the text of a special token
    as that token, and the service treats it as plain text.
    """

    out: Path = option("result")
    """directory to write: new or empty"""


class ConvertSettings(CommandSettings):
    """Convert a checkpoint: nanoGPT's ckpt.pt to a Kvasir checkpoint, a Hugging Face directory of pickles to
    safetensors, an unquantized checkpoint to a Hugging Face directory, or any checkpoint to one with quantized weights.
    Code in the files is never run. The new checkpoint is verified.
    """

    nanogpt: Path | None = option("source", None, metavar="FILE")
    """nanoGPT's ckpt.pt, to write a Kvasir checkpoint"""
    tokenizer: Path | None = option("source", None, metavar="FILE|DIR")
    """tokenizer of --nanogpt: its meta.pkl, or the files of GPT-2's tokenizer"""
    pickle: Path | None = option("source", None)
    """Hugging Face directory with pytorch_model.bin, to write as safetensors"""
    export: Path | None = option("source", None)
    """any unquantized checkpoint, to write as a Hugging Face directory"""
    source: Path | None = option("source", None, metavar="DIR")
    """any checkpoint, to write as a Kvasir checkpoint with quantized matrices, see --quantize"""
    quantize: Literal["int8", "int4"] | None = option("result", None)
    """format of the matrices of --source, as kvasir serve --quantize makes them"""
    out: Path = option("result")
    """new directory to write"""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.nanogpt, self.pickle, self.export, self.source)) != 1:
            raise ValueError("give exactly one checkpoint to convert: --nanogpt, --pickle, --export or --source")
        if (self.source is None) != (self.quantize is None):
            raise ValueError("--source and --quantize need each other; give both or neither")
        if (self.nanogpt is None) != (self.tokenizer is None):
            raise ValueError("--nanogpt and --tokenizer need each other; give both or neither")
        return self


def read_settings(kind: type[Settings], argv: Sequence[str], *, command: str, summary: str) -> Settings:
    """Read the settings of a command from flags and environment. Raises SettingsError: a flag or value is wrong.

    Warnings on stderr name KVASIR_ variables that are no settings, and the shipped model if it is used.
    """
    given = flags.parse_flags(kind, argv, command=command, summary=summary)
    for name in sorted(set(os.environ) - {flags.variable_of(name) for name in _field_names(flags.CommandSettings)}):
        # An error would stop services in Kubernetes, which gives every pod KVASIR_SERVICE_HOST for a Service kvasir.
        if name.startswith(flags.PREFIX):
            print(f"kvasir {command}: warning: environment variable {name} is not a setting; ignored", file=sys.stderr)
    variables = {name: variable for name in kind.model_fields if (variable := _given_variable(name)) is not None}
    values = {name: os.environ[variable] for name, variable in variables.items()} | given
    default = None
    if "checkpoint" in kind.model_fields and not {"checkpoint", "url"} & values.keys():
        default = values["checkpoint"] = find_default_checkpoint()
    try:
        settings = kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        sources = variables | {name: flags.flag_of(name) for name in given}
        raise SettingsError(first_problem(kind, sources, error)) from None
    if default is not None:
        print(f"kvasir {command}: no --checkpoint given; using the shipped model, {default}", file=sys.stderr)
    return settings


def _field_names(kind: type[CommandSettings]) -> set[str]:
    """Return the present and former field names of a settings class and its subclasses."""
    names = {name for each in kind.__subclasses__() for name in _field_names(each)}
    return {*kind.model_fields, *flags.FORMER_NAMES.values(), *names}


def _given_variable(name: str) -> str | None:
    """Return the environment variable that sets a field, by its present, former or standard name; None if unset."""
    variables = [flags.variable_of(each) for each in (name, flags.FORMER_NAMES.get(name)) if each is not None]
    return next(filter(os.environ.get, [*variables, _STANDARD_VARIABLES.get(name, "")]), None)


def first_problem(kind: type[CommandSettings], sources: Mapping[str, str], error: ValidationError) -> str:
    """Return a one-line error message: the flag or variable of the first invalid field, the problem, and the value."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0])
    source = sources.get(name, flags.flag_of(name))
    if first["type"] == "missing":
        return f"{source} is needed (or {flags.variable_of(name)})"
    is_union = kind.model_fields[name].annotation == AutoOrCount
    problem = "must be auto or at least 1" if is_union else reword(first["type"], first["msg"])
    if problem == EMPTY or flags.is_secret(kind, name):
        return f"{source}: {problem}"
    value = ", ".join(map(str, first["input"])) if isinstance(first["input"], list) else first["input"]
    return f"{source}: {problem}, not {value!r}"


def find_default_checkpoint() -> Path | None:
    """Return the shipped model's directory below the working directory, else beside the package; None if missing."""
    places = (_SHIPPED_CHECKPOINT, _PACKAGE_ROOT / _SHIPPED_CHECKPOINT)
    return next((path for path in places if (path / MANIFEST_FILE).is_file()), None)


def effective_values(settings: CommandSettings, found: Mapping[str, object]) -> Iterable[str]:
    """Return a line of text per setting: its name and effective value, for the listing printed at start-up.

    found: values by name. Under the name of a setting, the value replaces "auto". Any other name adds a line.
    """
    values = effective_settings(settings, found)
    width = max(map(len, values))
    return (f"{name:<{width}}  {value}" for name, value in values.items())


def effective_settings(settings: CommandSettings, found: Mapping[str, object]) -> dict[str, str]:
    """Return the effective value of each setting by name, as text.

    found: values that replace "auto", and further values.
    """
    values = {**dict(settings), **found}
    return {
        name: value.human_readable() if isinstance(value, ByteSize) else "none" if value in (None, ()) else str(value)
        for name, value in values.items()
    }


def context_length(settings: ModelSettings, config: ModelConfig) -> int:
    """Return the maximum tokens of prompt and completion together: the setting, or the maximum of the model if "auto".

    Raises SettingsError if the setting is over the maximum of the model.
    """
    wanted, available = settings.max_context_length, config.max_context_length
    if wanted != "auto" and wanted > available:
        raise SettingsError(
            f"--max-context-length {wanted} is over the {available} positions of the model; "
            f"set at most {available}, or auto"
        )
    return available if wanted == "auto" else wanted
