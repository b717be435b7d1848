"""The only reader of environment and arguments.

A setting is one field: flag `--max-num-running`, variable `KVASIR_MAX_NUM_RUNNING`, default, bounds, help and
group on the help page all come from it. A flag wins over the environment, which wins over the default.
Torch-free: what "auto" means on a device is decided by the worker, which knows the device.
"""

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model.config import ModelConfig
from service.complaints import EMPTY, in_words
from service.flags import FlagError, flag_of, parse_flags

PREFIX = "KVASIR_"
AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
# A variable holds several values as PATH does; flags give one each.
LISTED = BeforeValidator(lambda value: value.split(os.pathsep) if isinstance(value, str) else value)
Settings = TypeVar("Settings", bound=BaseSettings)


class SettingsError(ValueError):
    """A flag or variable that cannot be used, named in one line."""


def _option(group: str, help_: str, default: Any = ..., *, metavar: str | None = None, **bounds: Any) -> Any:
    return Field(default, description=help_, json_schema_extra={"group": group, "metavar": metavar}, **bounds)


class ModelSettings(BaseSettings):
    """Which model, and on what. Shared by every command that runs one."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    checkpoint: Path = _option("model", "checkpoint directory")
    device: Literal["auto", "cpu", "cuda"] = _option("model", "auto takes CUDA where there is any", "auto")
    dtype: Literal["auto", "float32", "bfloat16"] = _option(
        "model", "auto: float32 on CPU (neighbours in a batch do not change an answer), bfloat16 on CUDA", "auto"
    )
    attention: Literal["sdpa", "eager"] = _option("model", "attention backend", "sdpa")
    threads: AutoOrCount = _option("model", "CPU threads of the model; auto: one less than the CPUs we may use", "auto")
    generation_config: bool = _option(
        "model", "take the defaults of requests from the checkpoint's generation_config.json", True
    )
    max_context_length: AutoOrCount = _option(
        "engine", "tokens of prompt and completion together; auto: as many as the model has positions", "auto"
    )
    max_num_running: int = _option("engine", "sequences that compute in one step", 64, ge=1, le=4096)
    max_batched_tokens: int = _option("engine", "tokens computed in one step", 512, ge=1)
    block_size: int = _option("engine", "tokens a KV-cache block holds", 16, ge=1, le=1024)
    kv_cache_memory: AutoOrCount = _option(
        "engine",
        "KV-cache size in MiB; auto: every running sequence at full length, or 8192 tokens of each if that is less, "
        "and half again for shared prefixes, within half of free memory; at least one sequence at full length",
        "auto",
    )
    enable_prefix_cache: bool = _option("engine", "share the KV blocks of equal prefixes", True)

    @model_validator(mode="after")
    def _every_running_sequence_gets_a_token(self) -> Self:
        if self.max_batched_tokens < self.max_num_running:
            raise ValueError(
                f"--max-batched-tokens {self.max_batched_tokens} is under --max-num-running "
                f"{self.max_num_running}: every running sequence needs one token a step"
            )
        return self


class ServeSettings(ModelSettings):
    """`kvasir serve`."""

    host: Literal["127.0.0.1", "0.0.0.0", "::"] = _option("http", "address to listen on", "127.0.0.1")
    port: int = _option("http", "port to listen on", 8000, ge=1024, le=65535)
    model_name: str | None = _option("http", "name clients use (default: the checkpoint's)", None, min_length=1)
    chat_template: str = _option(
        "http",
        "how messages become a prompt: auto (the checkpoint's template, else plain), plain (their texts alone), "
        "none (chat is refused), or a Jinja file",
        "auto",
        metavar="auto|plain|none|FILE",
        min_length=1,
    )
    max_body_mb: int = _option("http", "largest request body, in MiB", 2, ge=1, le=1024)
    max_waiting_requests: int = _option(
        "admission", "sequences that may wait for a place in the batch; more get a 429", 256, ge=0
    )
    max_waiting_tokens: int = _option(
        "admission", "prompt and completion tokens that may wait; more get a 429", 200_000, ge=1
    )
    max_inspect_tokens: int = _option(
        "admission", "tokens of a prompt whose attention may be looked at; 0 switches that off", 128, ge=0, le=512
    )
    drain_seconds: float = _option(
        "operation", "after SIGTERM, how long running requests may take to finish", 30.0, ge=0, le=3600
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option("operation", "least severe log", "info")

    @field_validator("host", mode="before")
    @classmethod
    def _localhost_is_an_address(cls, value: Any) -> Any:
        return "127.0.0.1" if value == "localhost" else value


class GenerateSettings(ModelSettings):
    """`kvasir generate`."""

    prompt: str = _option("completion", "text to continue", min_length=1)
    max_tokens: int = _option("completion", "most tokens to generate", 200, ge=0)
    temperature: float = _option("completion", "0 always takes the most likely token", 0.8, ge=0, le=2)
    top_k: int = _option("completion", "keep the k most likely tokens; 0: all", 0, ge=0)
    top_p: float = _option("completion", "keep the most likely tokens of this total probability", 0.95, gt=0, le=1)
    min_p: float = _option("completion", "drop tokens below this share of the likeliest", 0.0, ge=0, le=1)
    seed: int | None = _option("completion", "same seed, same text (default: a random one)", None, ge=0, lt=2**64)
    stop: str | None = _option("completion", "stop before this text", None, min_length=1)


class CheckpointSettings(BaseSettings):
    """`kvasir inspect`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    checkpoint: Path = _option("model", "checkpoint directory")


class InspectAttentionSettings(CheckpointSettings):
    """`kvasir inspect attention`."""

    prompt: str = _option("text", "text whose tokens are looked at", min_length=1)
    layer: int = _option("look", "which layer, from 0", ge=0)
    head: str = _option("look", "which head, from 0, or all", "all", metavar="all|N")
    out: Path | None = _option("look", "picture to write: .png, .svg or .pdf (default: none)", None, metavar="FILE")


class TokenizeSettings(CheckpointSettings):
    """`kvasir tokenize`."""

    text: str | None = _option("text", "text to tokenize (default: standard input)", None)
    ids_only: bool = _option("text", "print the ids alone, on one line", False)
    no_begin: bool = _option("text", "without the mark that begins a prompt", False)


class ExportTokenizerSettings(CheckpointSettings):
    """`kvasir export-tokenizer`."""

    out: Path = _option("result", "directory to write: a new or an empty one, or an earlier export")


class TrainSettings(BaseSettings):
    """`kvasir train`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    corpus: Annotated[tuple[Path, ...], NoDecode, LISTED] = _option(
        "a text of your own",
        'text to learn from: .txt, .jsonl (a "text" a line), either also .xz, or a directory of such; may be repeated',
        (),
        metavar="FILE",
    )
    minutes: float | None = _option(
        "a text of your own", "for everything, from start to finished checkpoint (default: 10)", None, gt=0, le=10_080
    )
    config: Path | None = _option("a recipe", "a TOML file, see docs/training.md", None, metavar="FILE")
    steps: int | None = _option("a recipe", "optimizer steps (default: the recipe's)", None, ge=1)
    out: Path = _option("run", "directory of the finished checkpoint")
    run_directory: Path | None = _option(
        "run", "where to save and resume (default: runs/ and the name of --out, or of the recipe)", None
    )
    seed: int | None = _option(
        "run", "of the weights and of the order of texts (default: 1, or the recipe's)", None, ge=0
    )
    stop_after: int | None = _option("run", "save and leave after this step, as an interruption would", None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = _option("hardware", "auto takes CUDA where there is any", "auto")
    precision: Literal["auto", "float32", "bfloat16"] = _option(
        "hardware", "of the arithmetic; auto: bfloat16 where the hardware multiplies it", "auto"
    )
    threads: AutoOrCount = _option("hardware", "CPU threads; auto: the CPUs we may use", "auto")
    attention: Literal["sdpa", "eager"] = _option("hardware", "attention backend", "sdpa")
    compile: bool = _option("hardware", "compile the model where a compiler is found; faster after a minute", True)

    @model_validator(mode="after")
    def _text_or_recipe(self) -> Self:
        if bool(self.corpus) == (self.config is not None):
            raise ValueError("give one of --corpus, a text to learn from, and --config, a recipe that names its texts")
        if self.corpus and self.steps is not None:
            raise ValueError("--steps goes with --config; with --corpus it is --minutes that says how long")
        if self.config is not None and self.minutes is not None:
            raise ValueError("--minutes goes with --corpus; with --config it is --steps that says how long")
        return self


class EvalSettings(CheckpointSettings):
    """`kvasir eval`."""

    config: Path | None = _option("what", "recipe whose held-out documents are measured", None, metavar="FILE")
    texts: Annotated[tuple[str, ...], NoDecode, LISTED] = _option(
        "what", "texts to measure, .txt or .jsonl, either also .xz; may be given several times", (), metavar="NAME=FILE"
    )
    pairs: Path | None = _option(
        "what", "minimal pairs: JSON lines of sentence_good, sentence_bad", None, metavar="FILE"
    )
    max_documents: int | None = _option("what", "of each of these texts, evenly spaced (default: all)", None, ge=1)
    max_context_length: AutoOrCount = _option(
        "what", "tokens a text is read in at once; auto: the positions of the model, at most 2048", "auto"
    )
    samples: int = _option("what", "completions of each fixed prompt and temperature; 0: none", 4, ge=0, le=1000)
    out: Path | None = _option("result", "JSON file of everything measured (default: none)", None, metavar="FILE")
    documents: Path | None = _option(
        "result", "JSON lines of each document's and sentence's log-likelihood (default: none)", None, metavar="FILE"
    )
    export_tasks: Path | None = _option("result", "write texts and pairs as tasks of lm-evaluation-harness here", None)
    device: Literal["auto", "cpu", "cuda"] = _option("hardware", "auto takes CUDA where there is any", "auto")
    dtype: Literal["float32", "bfloat16"] = _option("hardware", "of weights and arithmetic", "float32")
    threads: AutoOrCount = _option("hardware", "CPU threads; auto: the CPUs we may use", "auto")

    @field_validator("texts")
    @classmethod
    def _texts_have_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for name, _, path in (text.partition("=") for text in value) if name and path]
        if len(set(names)) < len(value):
            raise ValueError("must be NAME=FILE, each with a name of its own")
        return value


class ConvertSettings(BaseSettings):
    """`kvasir convert`: one source, one directory to write."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    nanogpt: Path | None = _option("source", "nanoGPT's ckpt.pt, to make a checkpoint of ours", None, metavar="FILE")
    tokenizer: Path | None = _option(
        "source", "of --nanogpt: its meta.pkl, or the files of GPT-2's tokenizer", None, metavar="FILE|DIR"
    )
    pickle: Path | None = _option("source", "Hugging Face directory with pytorch_model.bin, for safetensors", None)
    export: Path | None = _option("source", "any checkpoint, to make a Hugging Face directory", None)
    out: Path = _option("result", "new directory to write")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.nanogpt, self.pickle, self.export)) != 1:
            raise ValueError("give one of --nanogpt, --pickle and --export")
        if (self.nanogpt is None) != (self.tokenizer is None):
            raise ValueError("--nanogpt and --tokenizer need each other")
        return self


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
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise SettingsError(first["msg"].removeprefix("Value error, ")) from None
        name = str(first["loc"][0])
        source = flag_of(name) if name in given or _variable(name) not in os.environ else _variable(name)
        if first["type"] == "missing":
            raise SettingsError(f"{source} is needed (or {_variable(name)})") from None
        is_union = kind.model_fields[name].annotation == AutoOrCount
        problem = "must be auto or at least 1" if is_union else in_words(first["type"], first["msg"])
        instead = "" if problem == EMPTY else f", not {first['input']!r}"
        raise SettingsError(f"{source}: {problem}{instead}") from None


def effective_values(settings: BaseSettings, found: Mapping[str, object]) -> Iterable[str]:
    """One line a setting: its name and the value in force.

    Args:
        found: what "auto" and None came to, and further facts, by name.
    """
    values = {**settings.model_dump(), **found}
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


def model_threads(settings: ModelSettings) -> int:
    """CPU threads of the model: what was asked for, or one less than the CPUs we may use.

    The last CPU is for the API process and the neighbours. OpenMP's threads spin while they wait for each other, so
    that one that shares its CPU stops all the others. On 2 CPUs, with the default model: 2 threads make 140, 1,620 and
    2,490 tokens/s for 1, 16 and 64 streams on a quiet machine and 2 to 50 for one beside a busy process; 1 thread makes
    150, 1,480 and 1,960, and 180 to 230.
    """
    return max(1, usable_cpus() - 1) if settings.threads == "auto" else settings.threads


def usable_cpus() -> int:
    """CPUs this process may use: its affinity, within the CPU quota of its control group (v2)."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, math.ceil(int(quota) / int(period))))


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _warn_of_unknown_variables(command: str) -> None:
    """Name variables that look like settings and are none. Only a warning: an orchestrator adds some of its own,
    as Kubernetes gives every pod KVASIR_SERVICE_HOST for a service of that name."""
    known = {_variable(name) for kind in _COMMANDS for name in kind.model_fields}
    for name in sorted(set(os.environ) - known):
        if name.startswith(PREFIX):
            print(f"kvasir {command}: warning: {name} is not a setting; ignored", file=sys.stderr)
