"""Settings of every command, read from command-line flags and environment variables.

The docstring of each class heads the help page of its command.

No other module reads the environment or arguments. A setting is one field. Its flag (`--max-num-running`), variable
(`KVASIR_MAX_NUM_RUNNING`), default, bounds, help text and help group all come from that field. A flag takes precedence
over the variable, and the variable over the default.

This module does not import torch. The worker resolves "auto", because only the worker knows the device.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ByteSize, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from model.checkpoint.manifest import MANIFEST_FILE
from model.config import ModelConfig
from model.kernels.build import CACHE
from service.config.flags import (
    CONFIG,
    LISTED,
    NAMES,
    PREFIX,
    AutoOrCount,
    AutoOrSize,
    CacheDtype,
    FlagError,
    Size,
    flag_of,
    is_secret,
    older_names,
    option,
    parse_flags,
    secret,
    variable_of,
)
from service.config.validation_messages import EMPTY, reword

Settings = TypeVar("Settings", bound=BaseSettings)
# Origin as browsers send it (https://fetch.spec.whatwg.org/#origin-header).
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]+")


# The shipped model is the default checkpoint.
_SHIPPED_CHECKPOINT = Path("checkpoints") / "kvasir-9m"
# Parent directory of `service`; the repository, if the package is installed in editable mode.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class SettingsError(ValueError):
    """Unusable flag or variable. The message is one line that names the flag or variable."""


class CheckpointSettings(BaseSettings):
    """Settings of a command that reads a checkpoint."""

    model_config = CONFIG

    checkpoint: Path = option(
        "model",
        "checkpoint directory",
        default_text="checkpoints/kvasir-9m in the working directory, else beside the package",
    )


class ModelSettings(CheckpointSettings):
    """Model, device and engine settings, common to all commands that run a model."""

    device: Literal["auto", "cpu", "cuda"] = option("model", "auto: cuda if there is a CUDA device, else cpu", "auto")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = option(
        "model",
        "auto: bfloat16 on CUDA; on a CPU bfloat16 if the checkpoint is bfloat16 and native kernels run, else float32",
        "auto",
    )
    quantize: Literal["none", "int8", "fp8"] = option(
        "model",
        "quantize weights and inputs of matrix products: int8, or fp8 on GPUs that support it; see docs/operations.md",
        "none",
    )
    attention: Literal["auto", "native", "sdpa", "eager", "paged"] = option(
        "model",
        "attention backend; auto: native (Kvasir's kernels) on a CPU with AVX2 or better; paged on CUDA for models "
        "without attention biases; else sdpa",
        "auto",
    )
    cache_dir: Path = option(
        "model",
        "directory of native kernels compiled for this machine; $XDG_CACHE_HOME/kvasir if that variable is set",
        CACHE,
    )
    cuda_graphs: bool = option(
        "engine", "capture steps as CUDA graphs and replay them (CUDA with paged attention)", True
    )
    lookahead: bool = option(
        "engine", "launch each decode step before the tokens of the previous step are read back (CUDA)", True
    )
    threads: AutoOrCount = option(
        "model", "CPU threads of the model; auto: all usable CPUs, or one less without native kernels", "auto"
    )
    generation_config: bool = option(
        "model", "use the checkpoint's generation_config.json for the defaults of requests", True
    )
    max_context_length: AutoOrCount = option(
        "engine", "maximum tokens of prompt and completion together; auto: all positions of the model", "auto"
    )
    max_num_running: int = option("engine", "maximum sequences in one step", 64, ge=1, le=4096)
    max_batched_tokens: int = option("engine", "maximum tokens computed in one step", 512, ge=1)
    prompt_slowdown: float = option(
        "engine",
        "maximum slowdown of a decode step caused by chunked prefill, as an approximate factor; inf: no limit",
        1.75,
        ge=1,
    )
    target_itl_ms: float = option(
        "engine",
        "target for the mean time between two tokens of a response, in ms; sequences per step are reduced below "
        "--max-num-running to meet it; 0: no target",
        0.0,
        ge=0,
        le=60_000,
    )
    speculative_tokens: int = option(
        "engine",
        "maximum draft tokens of speculative decoding by prompt lookup, for repetitive text; 0: off",
        0,
        ge=0,
        le=64,
    )
    block_size: int = option("engine", "tokens per KV-cache block", 16, ge=1, le=1024)
    kv_cache_memory: AutoOrSize = option(
        "engine",
        "KV-cache size, such as 512MiB or 2GiB; a number alone is in MiB; auto: --max-num-running sequences of full "
        "context or 8192 tokens, whichever is less, plus half of that for shared prefixes; limited to half of free "
        "memory (on a GPU, to --gpu-memory-share); at least one sequence of full context",
        "auto",
    )
    kv_cache_dtype: CacheDtype = option(
        "engine",
        "auto: dtype of the model; float16: twice the tokens in the same memory, for a float32 model on a CPU",
        "auto",
    )
    gpu_memory_share: float = option(
        "engine",
        "fraction of GPU memory for weights, activations of the largest step, CUDA graphs and KV-cache",
        0.9,
        gt=0,
        le=1,
    )
    enable_prefix_cache: bool = option("engine", "reuse KV-cache blocks of equal prefixes", True)

    @model_validator(mode="after")
    def _check_max_batched_tokens(self) -> Self:
        if self.max_batched_tokens < self.max_num_running:
            raise ValueError(
                f"--max-batched-tokens {self.max_batched_tokens} is under --max-num-running "
                f"{self.max_num_running}: every running sequence needs one token a step"
            )
        return self


class ServeSettings(ModelSettings):
    """Serve a checkpoint over HTTP with OpenAI's API. SIGTERM or Ctrl-C drains; a second signal stops at once."""

    host: Literal["127.0.0.1", "0.0.0.0", "::"] = option("http", "address to listen on", "127.0.0.1")
    port: int = option("http", "port to listen on", 8000, ge=1024, le=65535)
    model_name: str | None = option(
        "http", "model name for clients (default: the checkpoint's name)", None, min_length=1
    )
    model_alias: Annotated[tuple[str, ...], NoDecode, NAMES] = option(
        "http", "further model name for clients; may be repeated", (), metavar="NAME"
    )
    chat_template: str = option(
        "http",
        "chat template: auto (the checkpoint's, else plain), plain (message texts only), none (reject chat requests), "
        "or a Jinja file",
        "auto",
        metavar="auto|plain|none|FILE",
        min_length=1,
    )
    max_body_size: Size = option(
        "http",
        "largest request body, 1KiB to 1GiB; a number alone is in MiB",
        "2MiB",
        older_name="max_body_mb",
    )
    max_connections: int = option(
        "http",
        "maximum client connections; a further connection closes the one that is idle longest",
        1024,
        ge=1,
        le=65_536,
    )
    client_seconds: float = option(
        "http",
        "timeout for slow clients, in seconds: to send a request's headers, to send its body (plus 1 s per 10 kB), and "
        "to read 16 KiB of a response",
        30.0,
        ge=0.1,
        le=3600,
    )
    api_keys_file: Path | None = option(
        "access",
        "file of API keys, one NAME: KEY per line; without any key, requests need no authentication",
        None,
        metavar="FILE",
    )
    api_keys: SecretStr | None = secret("access", "further API keys, as comma-separated NAME: KEY pairs")
    api_key: SecretStr | None = secret("access", "one further API key, without a name")
    open_probes: bool = option("access", "serve /health and /ready without an API key", True)
    open_metrics: bool = option("access", "serve /metrics without an API key", True)
    share_prefix_cache: bool = option(
        "access",
        "share the prefix cache among all API keys; cached_tokens and TTFT then reveal what other keys have sent",
        False,
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode, NAMES] = option(
        "access",
        "web origin allowed by CORS, such as https://example.com, or * for all; may be repeated (default: none)",
        (),
        metavar="ORIGIN",
    )
    max_prompts: int = option("admission", "maximum prompts, or texts to embed, in one request", 4096, ge=1, le=4096)
    max_waiting_requests: int = option(
        "admission", "maximum sequences waiting for a slot; further requests get a 429", 256, ge=0
    )
    max_waiting_tokens: int = option(
        "admission",
        "maximum prompt and completion tokens of waiting requests; further requests get a 429",
        200_000,
        ge=1,
    )
    target_queue_seconds: float = option(
        "admission",
        "longest predicted wait for a slot; a request predicted to wait longer gets a 429; the request's timeout may "
        "allow a longer wait; 0: no limit",
        0.05,
        ge=0,
        le=86_400,
    )
    max_queue_seconds: float = option(
        "admission",
        "a request that has waited this long without starting gets a 408; caps every timeout; 0: no limit",
        60.0,
        ge=0,
        le=86_400,
    )
    resume_seconds: float = option(
        "http",
        "how long a response is kept for a client that lost its connection and retries with Last-Event-ID or its "
        "Idempotency-Key; 0: responses are not kept",
        15.0,
        ge=0,
        le=3600,
    )
    embedding_pooling: Literal["mean", "last"] = option(
        "http", "pooling of embeddings: mean of all tokens' hidden states, or the last token's hidden state", "mean"
    )
    max_inspect_tokens: int = option(
        "admission", "maximum prompt tokens of an attention inspection; 0: inspection is off", 128, ge=0, le=512
    )
    drain_seconds: float = option(
        "operation", "time limit for running requests to finish after SIGTERM", 30.0, ge=0, le=3600
    )
    standby: bool = option(
        "operation", "keep a standby worker process, which replaces a dead worker about 1.5 s sooner", True
    )
    hang_seconds: float = option(
        "operation", "replace a worker that sends no heartbeat for this long; 0: never", 120.0, ge=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("operation", "minimum level of log lines", "info")

    @field_validator("host", mode="before")
    @classmethod
    def _resolve_localhost(cls, value: Any) -> Any:
        return "127.0.0.1" if value == "localhost" else value

    @field_validator("max_body_size")
    @classmethod
    def _check_max_body_size(cls, value: ByteSize) -> ByteSize:
        if not 2**10 <= value <= 2**30:
            raise ValueError("must be a size from 1KiB to 1GiB, such as 2MiB")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _normalize_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        origins = tuple(origin.lower().removesuffix("/") for origin in value)
        if "*" in origins and len(origins) > 1:
            raise ValueError("must be * alone, or origins without *")
        if not all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in origins):
            raise ValueError("must be origins such as https://example.com:8443, without a path, or *")
        return origins

    @field_validator("hang_seconds")
    @classmethod
    def _check_hang_seconds(cls, value: float) -> float:
        if 0 < value < 3:
            raise ValueError("must be 0, or at least 3: heartbeats come every second")
        return value


class GenerateSettings(ModelSettings):
    """Continue a text. The completion is streamed to stdout, its statistics to stderr."""

    prompt: str = option("completion", "text to continue", min_length=1)
    max_tokens: int = option(
        "completion", "maximum tokens to generate", 200, default_text="the checkpoint's, else 200", ge=0
    )
    temperature: float = option(
        "completion", "0: always take the most likely token", 0.8, default_text="the checkpoint's, else 0.8", ge=0, le=2
    )
    top_k: int = option(
        "completion", "keep the k most likely tokens; 0: all", 0, default_text="the checkpoint's, else 0", ge=0
    )
    top_p: float = option(
        "completion",
        "keep the most likely tokens up to this total probability",
        0.95,
        default_text="the checkpoint's, else 0.95",
        gt=0,
        le=1,
    )
    min_p: float = option(
        "completion",
        "drop tokens below this fraction of the highest probability",
        0.0,
        default_text="the checkpoint's, else 0.0",
        ge=0,
        le=1,
    )
    seed: int | None = option(
        "completion", "seed of sampling; the same seed gives the same text (default: random)", None, ge=0, lt=2**64
    )
    stop: str | None = option("completion", "stop before this text", None, min_length=1)


class InspectSettings(CheckpointSettings):
    """Show the contents of a checkpoint: architecture, parameters by part, memory, tokens, files, training. Verifies
    the hash of every file. `kvasir inspect params` counts the parameters of every matrix, and `kvasir inspect
    attention` shows the attention weights of a prompt.
    """


class InspectParamsSettings(CheckpointSettings):
    """Count the parameters of each part by formula and from the tensors, and the bytes of KV-cache per token."""


class InspectAttentionSettings(CheckpointSettings):
    """Show the attention weights of a prompt in one layer. Standard output lists the most attended tokens of the last
    tokens, and --out gets a heat map of each head. Layers and heads count from 0. Computed in float32 on the CPU.
    """

    prompt: str = option("text", "prompt to compute attention weights for", min_length=1)
    layer: int = option("look", "layer to show, counted from 0", ge=0)
    head: str = option("look", "head to show, counted from 0, or all heads", "all", metavar="all|N")
    out: Path | None = option("look", "picture to write: .png, .svg or .pdf (default: none)", None, metavar="FILE")


class TokenizeSettings(CheckpointSettings):
    """Show the token ids of a prompt: one line per token, or with --ids-only the ids alone. The begin-of-text token is
    included, as in POST /tokenize; --no-begin leaves it out.
    """

    text: str | None = option("text", "text to tokenize (default: standard input)", None)
    ids_only: bool = option("text", "print the ids alone, on one line", False)
    no_begin: bool = option("text", "leave out the begin-of-text token", False)


class ExportTokenizerSettings(CheckpointSettings):
    """Write a checkpoint's tokenizer as a Hugging Face directory for transformers.AutoTokenizer, so that benchmark
    tools count the same tokens as this service. One difference remains: transformers parses the text of a special token
    as that token, and the service treats it as plain text.
    """

    out: Path = option("result", "directory to write: a new or empty directory, or an earlier export")


class TrainSettings(BaseSettings):
    """Train a model on your text, or by a recipe, and write its checkpoint, ready for `kvasir serve`. The run saves its
    state regularly; the same command resumes an interrupted run.
    """

    model_config = CONFIG

    corpus: Annotated[tuple[Path, ...], NoDecode, LISTED] = option(
        "a text of your own",
        'training text: .txt, or .jsonl with a "text" field per line, either also .xz, or a directory of such files; '
        "may be repeated",
        (),
        metavar="FILE",
    )
    minutes: float | None = option(
        "a text of your own", "minutes from start to finished checkpoint (default: 10)", None, gt=0, le=10_080
    )
    config: Path | None = option("a recipe", "TOML file of the recipe, see docs/training.md", None, metavar="FILE")
    steps: int | None = option("a recipe", "optimizer steps (default: the recipe's)", None, ge=1)
    out: Path = option("run", "directory of the finished checkpoint")
    run_directory: Path | None = option(
        "run", "directory to save to and resume from (default: runs/ and the name of --out, or of the recipe)", None
    )
    seed: int | None = option(
        "run", "random seed of the weights and the order of texts (default: 1, or the recipe's)", None, ge=0
    )
    stop_after: int | None = option("run", "save and exit after this step, as on an interruption", None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = option("hardware", "device; auto: CUDA if available, else the CPU", "auto")
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "hardware", "dtype of the arithmetic; auto: bfloat16 where the hardware multiplies it", "auto"
    )
    threads: AutoOrCount = option("hardware", "CPU threads; auto: the CPUs this process may use", "auto")
    attention: Literal["sdpa", "eager"] = option("hardware", "attention backend", "sdpa")
    compile: bool = option("hardware", "compile the model if a compiler is found; faster after a minute", True)

    @model_validator(mode="after")
    def _text_or_recipe(self) -> Self:
        if bool(self.corpus) == (self.config is not None):
            raise ValueError("give exactly one of --corpus (a training text) and --config (a recipe)")
        if self.corpus and self.steps is not None:
            raise ValueError("--steps needs --config; with --corpus set the duration by --minutes")
        if self.config is not None and self.minutes is not None:
            raise ValueError("--minutes needs --corpus; with --config set the duration by --steps")
        return self


class EvalSettings(CheckpointSettings):
    """Evaluate a checkpoint of any family: bits per byte, nats per token and top-1 accuracy on held-out texts, accuracy
    on minimal pairs, and repetition in samples of fixed prompts. docs/evaluation.md explains each figure.
    """

    config: Path | None = option("what", "recipe whose held-out documents are measured", None, metavar="FILE")
    texts: Annotated[tuple[str, ...], NoDecode, LISTED] = option(
        "what", "texts to measure, .txt or .jsonl, either also .xz; may be repeated", (), metavar="NAME=FILE"
    )
    pairs: Path | None = option(
        "what", "minimal pairs: JSON lines of sentence_good, sentence_bad", None, metavar="FILE"
    )
    max_documents: int | None = option("what", "documents of each text, evenly spaced (default: all)", None, ge=1)
    max_context_length: AutoOrCount = option(
        "what", "tokens per evaluated window of a text; auto: the model's context length, at most 2048", "auto"
    )
    samples: int = option("what", "completions of each fixed prompt and temperature; 0: none", 4, ge=0, le=1000)
    out: Path | None = option("result", "JSON file of all results (default: none)", None, metavar="FILE")
    documents: Path | None = option(
        "result", "JSON lines of each document's and sentence's log-likelihood (default: none)", None, metavar="FILE"
    )
    export_tasks: Path | None = option(
        "result", "directory to write texts and pairs to, as lm-evaluation-harness tasks", None
    )
    device: Literal["auto", "cpu", "cuda"] = option("hardware", "device; auto: CUDA if available, else the CPU", "auto")
    dtype: Literal["float32", "bfloat16"] = option("hardware", "dtype of weights and arithmetic", "float32")
    quantize: Literal["none", "int8", "fp8"] = option("hardware", "as kvasir serve --quantize", "none")
    kv_cache_dtype: CacheDtype = option(
        "hardware", "dtype to round keys and values to, as kvasir serve --kv-cache-dtype", "auto"
    )
    threads: AutoOrCount = option("hardware", "CPU threads; auto: the CPUs this process may use", "auto")

    @field_validator("texts")
    @classmethod
    def _texts_have_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for name, _, path in (text.partition("=") for text in value) if name and path]
        if len(set(names)) < len(value):
            raise ValueError("must be NAME=FILE, each with a different name")
        return value


class ConvertSettings(BaseSettings):
    """Convert a checkpoint: nanoGPT's ckpt.pt to a Kvasir checkpoint, a Hugging Face directory of pickles to
    safetensors, or a Kvasir checkpoint to a Hugging Face directory. Code in a file is never run. The result is
    verified.
    """

    model_config = CONFIG

    nanogpt: Path | None = option("source", "nanoGPT's ckpt.pt, to write a Kvasir checkpoint", None, metavar="FILE")
    tokenizer: Path | None = option(
        "source", "tokenizer of --nanogpt: its meta.pkl, or the files of GPT-2's tokenizer", None, metavar="FILE|DIR"
    )
    pickle: Path | None = option(
        "source", "Hugging Face directory with pytorch_model.bin, to write as safetensors", None
    )
    export: Path | None = option("source", "any checkpoint, to write as a Hugging Face directory", None)
    out: Path = option("result", "new directory to write")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.nanogpt, self.pickle, self.export)) != 1:
            raise ValueError("give exactly one of --nanogpt, --pickle and --export")
        if (self.nanogpt is None) != (self.tokenizer is None):
            raise ValueError("give --nanogpt and --tokenizer together")
        return self


_COMMANDS: tuple[type[BaseSettings], ...] = (
    *(ServeSettings, GenerateSettings, TokenizeSettings, TrainSettings, InspectAttentionSettings, ConvertSettings),
    *(ExportTokenizerSettings, EvalSettings),
)


def read_settings(kind: type[Settings], argv: Sequence[str], *, command: str, summary: str) -> Settings:
    """Read the settings of one command from its arguments and the environment.

    Raises:
        SettingsError: a flag is unknown, or a value is unusable. The message is one line that names the flag.
        SystemExit: `--help` was given.
    """
    epilog = f"Every flag is also an environment variable: --max-thing is {PREFIX}MAX_THING. A flag takes precedence."
    try:
        given = parse_flags(kind, argv, command=command, summary=summary, epilog=epilog)
    except FlagError as error:
        raise SettingsError(str(error)) from None
    _warn_of_unknown_variables(command)
    older = older_names(kind)
    # The variables that set fields, by present or older name.
    names = {name: [variable_of(each) for each in (name, older.get(name)) if each] for name in kind.model_fields}
    variables = {name: next(filter(os.environ.get, names[name]), None) for name in names}
    values = {name: os.environ[variable] for name in older if (variable := variables[name]) is not None}
    default = None
    if "checkpoint" in names and not ("checkpoint" in given or variables["checkpoint"]):
        default = find_default_checkpoint()
    if default is not None:
        values["checkpoint"] = str(default)
    try:
        settings = kind(**{**values, **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise SettingsError(first["msg"].removeprefix("Value error, ")) from None
        name = str(first["loc"][0])
        source = flag_of(name) if name in given else variables.get(name) or flag_of(name)
        if first["type"] == "missing":
            raise SettingsError(f"{source} is needed (or {variable_of(name)})") from None
        is_union = kind.model_fields[name].annotation == AutoOrCount
        problem = "must be auto or at least 1" if is_union else reword(first["type"], first["msg"])
        value = ", ".join(map(str, first["input"])) if isinstance(first["input"], list) else first["input"]
        instead = "" if problem == EMPTY or is_secret(kind, name) else f", not {value!r}"
        raise SettingsError(f"{source}: {problem}{instead}") from None
    if default is not None:
        print(f"kvasir {command}: no --checkpoint given; using the shipped model, {default}", file=sys.stderr)
    return settings


def find_default_checkpoint() -> Path | None:
    """Return the shipped model's directory below the working directory, else beside the package; None if missing."""
    places = (_SHIPPED_CHECKPOINT, _PACKAGE_ROOT / _SHIPPED_CHECKPOINT)
    return next((path for path in places if (path / MANIFEST_FILE).is_file()), None)


def effective_values(settings: BaseSettings, found: Mapping[str, object]) -> Iterable[str]:
    """Return one line per setting: its name and the value in force.

    Args:
        found: resolved values of "auto" and None, and further facts, by name.
    """
    values = {**dict(settings), **found}
    values = {name: value.human_readable() if isinstance(value, ByteSize) else value for name, value in values.items()}
    width = max(map(len, values))
    return (f"{name:<{width}}  {value}" for name, value in values.items())


def context_length(settings: ModelSettings, config: ModelConfig) -> int:
    """Return the maximum tokens of prompt and completion together: the setting, or all positions of the model.

    Raises:
        SettingsError: the setting is over the positions of the model.
    """
    wanted, available = settings.max_context_length, config.max_context_length
    if wanted == "auto":
        return available
    if wanted > available:
        raise SettingsError(
            f"--max-context-length {wanted} is over the {available} positions of the model; "
            f"ask for at most {available}, or leave it at auto"
        )
    return wanted


def _warn_of_unknown_variables(command: str) -> None:
    """Warn of variables with the prefix that are not settings.

    This is no error, because orchestrators set such variables: Kubernetes gives every pod KVASIR_SERVICE_HOST for a
    Service named kvasir.
    """
    known = {variable_of(name) for kind in _COMMANDS for name in (*kind.model_fields, *older_names(kind).values())}
    for name in sorted(set(os.environ) - known):
        if name.startswith(PREFIX):
            print(f"kvasir {command}: warning: {name} is not a setting; ignored", file=sys.stderr)
