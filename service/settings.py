"""The only reader of environment and arguments.

A setting is one field: flag `--max-num-running`, variable `KVASIR_MAX_NUM_RUNNING`, default, bounds, help and
group on the help page all come from it. A flag wins over the environment, which wins over the default.
Torch-free: what "auto" means on a device is decided by the worker, which knows the device.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ByteSize, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from model.config import ModelConfig
from model.kernels.build import CACHE
from service.command_settings import (
    ConvertSettings,
    EvalSettings,
    ExportTokenizerSettings,
    InspectAttentionSettings,
    TokenizeSettings,
    TrainSettings,
)
from service.complaints import EMPTY, in_words
from service.default_checkpoint import find_default_checkpoint
from service.flags import FlagError, flag_of, is_secret, older_names, parse_flags, variable_of
from service.options import CHECKPOINT_DEFAULT, CONFIG, NAMES, PREFIX, AutoOrCount, CacheDtype, option, secret
from service.sizes import AutoOrSize, Size

Settings = TypeVar("Settings", bound=BaseSettings)
# As browsers send it (https://fetch.spec.whatwg.org/#origin-header).
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]+")


class SettingsError(ValueError):
    """A flag or variable that cannot be used, named in one line."""


class ModelSettings(BaseSettings):
    """Which model, and on what. Shared by every command that runs one."""

    model_config = CONFIG

    checkpoint: Path = option("model", "checkpoint directory", told=CHECKPOINT_DEFAULT)
    device: Literal["auto", "cpu", "cuda"] = option("model", "auto takes CUDA where there is any", "auto")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = option(
        "model",
        "auto: on a CPU with native kernels the checkpoint's, if that is bfloat16, else float32; bfloat16 on CUDA",
        "auto",
    )
    quantize: Literal["none", "int8", "fp8"] = option(
        "model",
        "weights and inputs of matrices in eight bits: int8, or fp8 on a GPU that has it; see docs/operations.md",
        "none",
    )
    attention: Literal["auto", "native", "sdpa", "eager", "paged"] = option(
        "model",
        "attention backend; auto: native (Kvasir's own kernels) on a CPU with AVX2 or more; paged on CUDA, where the "
        "model has no biases in its scores; else sdpa",
        "auto",
    )
    cache_dir: Path = option(
        "model",
        "where native kernels compiled for this machine are kept; $XDG_CACHE_HOME/kvasir, if that is set",
        CACHE,
    )
    cuda_graphs: bool = option("engine", "on CUDA with paged attention: record steps and replay them", True)
    lookahead: bool = option("engine", "on CUDA: launch a decode step before the last one's tokens are read", True)
    threads: AutoOrCount = option(
        "model", "CPU threads of the model; auto: all usable CPUs, without native kernels one less", "auto"
    )
    generation_config: bool = option(
        "model", "take the defaults of requests from the checkpoint's generation_config.json", True
    )
    max_context_length: AutoOrCount = option(
        "engine", "tokens of prompt and completion together; auto: as many as the model has positions", "auto"
    )
    max_num_running: int = option("engine", "sequences that compute in one step", 64, ge=1, le=4096)
    max_batched_tokens: int = option("engine", "tokens computed in one step", 512, ge=1)
    prompt_slowdown: float = option(
        "engine",
        "how many times as long one prompt may make a step in which others get tokens, about; inf: any number",
        1.75,
        ge=1,
    )
    target_itl_ms: float = option(
        "engine",
        "longest mean time between two tokens of an answer, in ms: fewer sequences than --max-num-running compute at "
        "once where it takes that; 0: none",
        0.0,
        ge=0,
        le=60_000,
    )
    speculative_tokens: int = option(
        "engine", "most tokens to guess ahead where a text repeats itself (prompt lookup); 0: none", 0, ge=0, le=64
    )
    block_size: int = option("engine", "tokens a KV-cache block holds", 16, ge=1, le=1024)
    kv_cache_memory: AutoOrSize = option(
        "engine",
        "KV-cache size, such as 512MiB or 2GiB; a number alone is in MiB; auto: every running sequence at full length, "
        "or 8192 tokens of each if that is less, and half again for shared prefixes, within half of free memory (of a "
        "GPU, within --gpu-memory-share); at least one sequence at full length",
        "auto",
    )
    kv_cache_dtype: CacheDtype = option(
        "engine",
        "auto: the model's; float16: for a float32 model on a CPU, twice the tokens in the same memory",
        "auto",
    )
    gpu_memory_share: float = option(
        "engine", "share of a GPU's memory for weights, largest step, recorded steps and KV-cache", 0.9, gt=0, le=1
    )
    enable_prefix_cache: bool = option("engine", "share the KV blocks of equal prefixes", True)

    @model_validator(mode="after")
    def _every_running_sequence_gets_a_token(self) -> Self:
        if self.max_batched_tokens < self.max_num_running:
            raise ValueError(
                f"--max-batched-tokens {self.max_batched_tokens} is under --max-num-running "
                f"{self.max_num_running}: every running sequence needs one token a step"
            )
        return self


class ServeSettings(ModelSettings):
    """Serve a checkpoint over HTTP, in OpenAI's protocol. SIGTERM or Ctrl-C drains, a second one ends at once."""

    host: Literal["127.0.0.1", "0.0.0.0", "::"] = option("http", "address to listen on", "127.0.0.1")
    port: int = option("http", "port to listen on", 8000, ge=1024, le=65535)
    model_name: str | None = option("http", "name clients use (default: the checkpoint's)", None, min_length=1)
    model_alias: Annotated[tuple[str, ...], NoDecode, NAMES] = option(
        "http", "further name clients may use; may be repeated", (), metavar="NAME"
    )
    chat_template: str = option(
        "http",
        "how messages become a prompt: auto (the checkpoint's template, else plain), plain (their texts alone), "
        "none (chat is refused), or a Jinja file",
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
        "http", "connections of all clients; one more ends the one that is idle longest", 1024, ge=1, le=65_536
    )
    client_seconds: float = option(
        "http",
        "how long to wait for a client: for a request's head, for its body (and a second more for each 10 kB), and for "
        "16 KiB of an answer to be taken",
        30.0,
        ge=0.1,
        le=3600,
    )
    api_keys_file: Path | None = option(
        "access",
        "who may use the server: a file with NAME: KEY on each line; without any key everybody may",
        None,
        metavar="FILE",
    )
    api_keys: SecretStr | None = secret("access", "further keys, NAME: KEY, with commas between them")
    api_key: SecretStr | None = secret("access", "one more key, without a name")
    open_probes: bool = option("access", "/health and /ready ask for no key", True)
    open_metrics: bool = option("access", "/metrics asks for no key", True)
    share_prefix_cache: bool = option(
        "access",
        "let all API keys use one prefix cache; cached_tokens and TTFT then show one key what another has sent",
        False,
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode, NAMES] = option(
        "access",
        "origin whose pages may use the server, https://example.com, or * for all; may be repeated (default: none)",
        (),
        metavar="ORIGIN",
    )
    max_prompts: int = option("admission", "prompts, or texts to embed, in one request", 4096, ge=1, le=4096)
    max_waiting_requests: int = option(
        "admission", "sequences that may wait for a place in the batch; more get a 429", 256, ge=0
    )
    max_waiting_tokens: int = option(
        "admission", "prompt and completion tokens that may wait; more get a 429", 200_000, ge=1
    )
    target_queue_seconds: float = option(
        "admission",
        "longest wait for a place: what would wait longer, by what the answers under way have left and how fast they "
        "come, gets a 429; a request may accept more by timeout; 0: any",
        0.05,
        ge=0,
        le=86_400,
    )
    max_queue_seconds: float = option(
        "admission",
        "what has waited so long and not begun ends with a 408; bounds every timeout; 0: never",
        60.0,
        ge=0,
        le=86_400,
    )
    resume_seconds: float = option(
        "http",
        "how long an answer waits for a client that lost its connection and comes back with Last-Event-ID or its "
        "Idempotency-Key; 0: not at all",
        15.0,
        ge=0,
        le=3600,
    )
    embedding_pooling: Literal["mean", "last"] = option(
        "http", "an embedding is the mean of all tokens' hidden states, or the last token's", "mean"
    )
    max_inspect_tokens: int = option(
        "admission", "tokens of a prompt whose attention may be looked at; 0 switches that off", 128, ge=0, le=512
    )
    drain_seconds: float = option(
        "operation", "after SIGTERM, how long running requests may take to finish", 30.0, ge=0, le=3600
    )
    standby: bool = option(
        "operation", "keep a process ready to take a dead worker's place: a second and a half sooner", True
    )
    hang_seconds: float = option(
        "operation", "a worker without a sign of life for so long is replaced; 0: never", 120.0, ge=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("operation", "least severe log", "info")

    @field_validator("host", mode="before")
    @classmethod
    def _localhost_is_an_address(cls, value: Any) -> Any:
        return "127.0.0.1" if value == "localhost" else value

    @field_validator("max_body_size")
    @classmethod
    def _bodies_are_bounded(cls, value: ByteSize) -> ByteSize:
        if not 2**10 <= value <= 2**30:
            raise ValueError("must be a size from 1KiB to 1GiB, such as 2MiB")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        origins = tuple(origin.lower().removesuffix("/") for origin in value)
        if "*" in origins and len(origins) > 1:
            raise ValueError("must be * alone, or origins")
        if not all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in origins):
            raise ValueError("must be origins such as https://example.com:8443, without a path, or *")
        return origins

    @field_validator("hang_seconds")
    @classmethod
    def _signs_of_life_come_every_second(cls, value: float) -> float:
        if 0 < value < 3:
            raise ValueError("must be 0, or at least 3: signs of life come every second")
        return value


class GenerateSettings(ModelSettings):
    """Continue a text: the completion goes to stdout as it is made, its figures to stderr."""

    prompt: str = option("completion", "text to continue", min_length=1)
    max_tokens: int = option("completion", "most tokens to generate", 200, told="the checkpoint's, else 200", ge=0)
    temperature: float = option(
        "completion", "0 always takes the most likely token", 0.8, told="the checkpoint's, else 0.8", ge=0, le=2
    )
    top_k: int = option("completion", "keep the k most likely tokens; 0: all", 0, told="the checkpoint's, else 0", ge=0)
    top_p: float = option(
        "completion",
        "keep the most likely tokens of this total probability",
        0.95,
        told="the checkpoint's, else 0.95",
        gt=0,
        le=1,
    )
    min_p: float = option(
        "completion",
        "drop tokens below this share of the likeliest",
        0.0,
        told="the checkpoint's, else 0.0",
        ge=0,
        le=1,
    )
    seed: int | None = option("completion", "same seed, same text (default: a random one)", None, ge=0, lt=2**64)
    stop: str | None = option("completion", "stop before this text", None, min_length=1)


_COMMANDS: tuple[type[BaseSettings], ...] = (
    *(ServeSettings, GenerateSettings, TokenizeSettings, TrainSettings, InspectAttentionSettings, ConvertSettings),
    *(ExportTokenizerSettings, EvalSettings),
)


def read_settings(kind: type[Settings], argv: Sequence[str], *, command: str, summary: str) -> Settings:
    """The settings of one command from its arguments and the environment.

    Raises:
        SettingsError: an unknown flag or an unusable value; one line that names it.
        SystemExit: `--help` was asked for.
    """
    epilog = f"Every flag is also an environment variable: --max-thing is {PREFIX}MAX_THING. Flags win."
    try:
        given = parse_flags(kind, argv, command=command, summary=summary, epilog=epilog)
    except FlagError as error:
        raise SettingsError(str(error)) from None
    _warn_of_unknown_variables(command)
    default = _default_checkpoint(kind, given)
    try:
        settings = kind(**{**_older_variables(kind), **given, **default})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise SettingsError(first["msg"].removeprefix("Value error, ")) from None
        name = str(first["loc"][0])
        source = flag_of(name) if name in given else _variable_in_force(kind, name) or flag_of(name)
        if first["type"] == "missing":
            raise SettingsError(f"{source} is needed (or {variable_of(name)})") from None
        is_union = kind.model_fields[name].annotation == AutoOrCount
        problem = "must be auto or at least 1" if is_union else in_words(first["type"], first["msg"])
        value = ", ".join(map(str, first["input"])) if isinstance(first["input"], list) else first["input"]
        instead = "" if problem == EMPTY or is_secret(kind, name) else f", not {value!r}"
        raise SettingsError(f"{source}: {problem}{instead}") from None
    for path in default.values():
        print(f"kvasir {command}: no --checkpoint given; using the shipped model, {path}", file=sys.stderr)
    return settings


def _default_checkpoint(kind: type[BaseSettings], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the shipped model as `checkpoint`, if the command takes one and none was given; otherwise nothing."""
    if "checkpoint" not in kind.model_fields or "checkpoint" in given or os.environ.get(variable_of("checkpoint")):
        return {}
    found = find_default_checkpoint()
    return {} if found is None else {"checkpoint": found}


def _older_variables(kind: type[BaseSettings]) -> dict[str, str]:
    """Return the values of variables that have a setting's older name, where the present one has no value."""
    older = {name: variable_of(earlier) for name, earlier in older_names(kind).items()}
    return {name: os.environ[older[name]] for name in older if _variable_in_force(kind, name) == older[name]}


def _variable_in_force(kind: type[BaseSettings], name: str) -> str | None:
    """Return the variable that sets a field, of those that have a value; None without one."""
    names = [name, *filter(None, [older_names(kind).get(name)])]
    return next((variable_of(each) for each in names if os.environ.get(variable_of(each))), None)


def effective_values(settings: BaseSettings, found: Mapping[str, object]) -> Iterable[str]:
    """One line a setting: its name and the value in force.

    Args:
        found: what "auto" and None came to, and further facts, by name.
    """
    values = {**dict(settings), **found}
    values = {name: value.human_readable() if isinstance(value, ByteSize) else value for name, value in values.items()}
    width = max(map(len, values))
    return (f"{name:<{width}}  {value}" for name, value in values.items())


def context_length(settings: ModelSettings, config: ModelConfig) -> int:
    """Tokens of prompt and completion together: what was asked for, or all the model has positions for.

    Raises:
        SettingsError: more was asked for than the model has.
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
    """Name variables that look like settings and are none. Only a warning: an orchestrator adds some of its own,
    as Kubernetes gives every pod KVASIR_SERVICE_HOST for a service of that name."""
    known = {variable_of(name) for kind in _COMMANDS for name in (*kind.model_fields, *older_names(kind).values())}
    for name in sorted(set(os.environ) - known):
        if name.startswith(PREFIX):
            print(f"kvasir {command}: warning: {name} is not a setting; ignored", file=sys.stderr)
