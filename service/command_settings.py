"""The settings of the commands that serve nothing: read by `service.settings`, like those of the others.

The docstring of each heads the help page of its command.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from service.options import CHECKPOINT_DEFAULT, CONFIG, LISTED, AutoOrCount, CacheDtype, option


class CheckpointSettings(BaseSettings):
    """Which checkpoint."""

    model_config = CONFIG

    checkpoint: Path = option("model", "checkpoint directory", told=CHECKPOINT_DEFAULT)


class InspectSettings(CheckpointSettings):
    """Show what is in a checkpoint: architecture, parameters by part, memory, tokens, files, training. Verifies every
    hash. `kvasir inspect params` counts every matrix, `kvasir inspect attention` draws where a prompt's tokens look.
    """


class InspectParamsSettings(CheckpointSettings):
    """Count the parameters of each part by closed formula and from the tensors, and the KV-cache's bytes a token."""


class InspectAttentionSettings(CheckpointSettings):
    """Show what the tokens of a prompt attend to in one layer: on stdout where the last ones look most, in --out a heat
    map of each head. Layers and heads count from 0. Computed in float32 on the CPU.
    """

    prompt: str = option("text", "text whose tokens are looked at", min_length=1)
    layer: int = option("look", "which layer, from 0", ge=0)
    head: str = option("look", "which head, from 0, or all", "all", metavar="all|N")
    out: Path | None = option("look", "picture to write: .png, .svg or .pdf (default: none)", None, metavar="FILE")


class TokenizeSettings(CheckpointSettings):
    """Show how a prompt becomes token ids: one line a token, or with --ids-only the ids alone. The mark that begins a
    prompt is shown and counted, as POST /tokenize does; --no-begin leaves it out.
    """

    text: str | None = option("text", "text to tokenize (default: standard input)", None)
    ids_only: bool = option("text", "print the ids alone, on one line", False)
    no_begin: bool = option("text", "without the mark that begins a prompt", False)


class ExportTokenizerSettings(CheckpointSettings):
    """Write a checkpoint's tokenizer as a Hugging Face directory, which transformers.AutoTokenizer reads: benchmark
    tools then count the tokens this service counts. One difference stays: transformers takes a control mark that stands
    in a text as one, the service takes it as text.
    """

    out: Path = option("result", "directory to write: a new or an empty one, or an earlier export")


class TrainSettings(BaseSettings):
    """Train a model on a text of your own, or by a recipe, and write its checkpoint, ready for `kvasir serve`. The run
    saves itself as it goes; the same command goes on where it was interrupted.
    """

    model_config = CONFIG

    corpus: Annotated[tuple[Path, ...], NoDecode, LISTED] = option(
        "a text of your own",
        'text to learn from: .txt, .jsonl (a "text" a line), either also .xz, or a directory of such; may be repeated',
        (),
        metavar="FILE",
    )
    minutes: float | None = option(
        "a text of your own", "for everything, from start to finished checkpoint (default: 10)", None, gt=0, le=10_080
    )
    config: Path | None = option("a recipe", "a TOML file, see docs/training.md", None, metavar="FILE")
    steps: int | None = option("a recipe", "optimizer steps (default: the recipe's)", None, ge=1)
    out: Path = option("run", "directory of the finished checkpoint")
    run_directory: Path | None = option(
        "run", "where to save and resume (default: runs/ and the name of --out, or of the recipe)", None
    )
    seed: int | None = option(
        "run", "of the weights and of the order of texts (default: 1, or the recipe's)", None, ge=0
    )
    stop_after: int | None = option("run", "save and leave after this step, as an interruption would", None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = option("hardware", "auto takes CUDA where there is any", "auto")
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "hardware", "of the arithmetic; auto: bfloat16 where the hardware multiplies it", "auto"
    )
    threads: AutoOrCount = option("hardware", "CPU threads; auto: the CPUs we may use", "auto")
    attention: Literal["sdpa", "eager"] = option("hardware", "attention backend", "sdpa")
    compile: bool = option("hardware", "compile the model where a compiler is found; faster after a minute", True)

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
    """Measure a checkpoint of any family: bits per byte, nats per token and top-1 accuracy on held-out texts, accuracy
    on minimal pairs, and what samples of fixed prompts repeat. docs/evaluation.md says what each figure means.
    """

    config: Path | None = option("what", "recipe whose held-out documents are measured", None, metavar="FILE")
    texts: Annotated[tuple[str, ...], NoDecode, LISTED] = option(
        "what", "texts to measure, .txt or .jsonl, either also .xz; may be given several times", (), metavar="NAME=FILE"
    )
    pairs: Path | None = option(
        "what", "minimal pairs: JSON lines of sentence_good, sentence_bad", None, metavar="FILE"
    )
    max_documents: int | None = option("what", "of each of these texts, evenly spaced (default: all)", None, ge=1)
    max_context_length: AutoOrCount = option(
        "what", "tokens a text is read in at once; auto: the positions of the model, at most 2048", "auto"
    )
    samples: int = option("what", "completions of each fixed prompt and temperature; 0: none", 4, ge=0, le=1000)
    out: Path | None = option("result", "JSON file of everything measured (default: none)", None, metavar="FILE")
    documents: Path | None = option(
        "result", "JSON lines of each document's and sentence's log-likelihood (default: none)", None, metavar="FILE"
    )
    export_tasks: Path | None = option("result", "write texts and pairs as tasks of lm-evaluation-harness here", None)
    device: Literal["auto", "cpu", "cuda"] = option("hardware", "auto takes CUDA where there is any", "auto")
    dtype: Literal["float32", "bfloat16"] = option("hardware", "of weights and arithmetic", "float32")
    quantize: Literal["none", "int8", "fp8"] = option("hardware", "as kvasir serve --quantize", "none")
    kv_cache_dtype: CacheDtype = option("hardware", "what a cache would round keys and values to, as serve", "auto")
    threads: AutoOrCount = option("hardware", "CPU threads; auto: the CPUs we may use", "auto")

    @field_validator("texts")
    @classmethod
    def _texts_have_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for name, _, path in (text.partition("=") for text in value) if name and path]
        if len(set(names)) < len(value):
            raise ValueError("must be NAME=FILE, each with a name of its own")
        return value


class ConvertSettings(BaseSettings):
    """Make a checkpoint of one kind from another: nanoGPT's ckpt.pt to one of ours, a Hugging Face directory of pickles
    to one of safetensors, one of ours to a Hugging Face directory. Code in a file is never run. What is written is
    verified.
    """

    model_config = CONFIG

    nanogpt: Path | None = option("source", "nanoGPT's ckpt.pt, to make a checkpoint of ours", None, metavar="FILE")
    tokenizer: Path | None = option(
        "source", "of --nanogpt: its meta.pkl, or the files of GPT-2's tokenizer", None, metavar="FILE|DIR"
    )
    pickle: Path | None = option("source", "Hugging Face directory with pytorch_model.bin, for safetensors", None)
    export: Path | None = option("source", "any checkpoint, to make a Hugging Face directory", None)
    out: Path = option("result", "new directory to write")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.nanogpt, self.pickle, self.export)) != 1:
            raise ValueError("give one of --nanogpt, --pickle and --export")
        if (self.nanogpt is None) != (self.tokenizer is None):
            raise ValueError("--nanogpt and --tokenizer need each other")
        return self
