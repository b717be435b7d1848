"""Settings of the commands that run no model service, such as train, eval and inspect.

`service.config.settings` reads them. The docstring of each class heads the help page of its command.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from service.config.setting_fields import CHECKPOINT_DEFAULT, CONFIG, LISTED, AutoOrCount, CacheDtype, option


class CheckpointSettings(BaseSettings):
    """Settings of a command that reads a checkpoint."""

    model_config = CONFIG

    checkpoint: Path = option("model", "checkpoint directory", default_text=CHECKPOINT_DEFAULT)


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
