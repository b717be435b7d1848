"""Settings of the commands that train and measure models: `kvasir train` and `kvasir eval`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import field_validator, model_validator

from service.config.flags import AutoOrCount, CommandSettings, OutputFile, Paths, Texts, option
from service.config.settings import CacheDtype, CheckpointSettings


class TrainSettings(CommandSettings):
    """Train a model on your text, or by a recipe, and write its checkpoint, ready for `kvasir serve`. The run saves its
    state regularly; the same command resumes an interrupted run.
    """

    corpus: Paths = option("training on your text", (), metavar="FILE")
    """training text: .txt, or .jsonl with a "text" field per line, either also .xz, or a directory of such files; may
    be repeated"""
    minutes: float = option("training on your text", 10.0, default_text="10", gt=0, le=10_080)
    """minutes of the whole run, from start to finished checkpoint"""
    config: Path | None = option("training by a recipe", None, metavar="FILE")
    """TOML file of the recipe, see docs/training.md"""
    steps: int | None = option("training by a recipe", None, ge=1)
    """optimizer steps of the whole run (default: the recipe's)"""
    out: Path = option("run")
    """directory of the finished checkpoint"""
    run_directory: Path | None = option("run", None)
    """directory to save to and resume from (default: runs/ and the name of --out, or of the recipe)"""
    seed: int | None = option("run", None, ge=0)
    """random seed of the weights and the order of texts (default: 1, or the recipe's)"""
    stop_after: int | None = option("run", None, ge=1)
    """save and exit after this optimizer step, as on an interruption"""
    device: Literal["auto", "cpu", "cuda"] = option("hardware", "auto")
    """device; auto: CUDA if available, else the CPU"""
    precision: Literal["auto", "float32", "bfloat16"] = option("hardware", "auto")
    """dtype of the arithmetic; auto: bfloat16 where the hardware multiplies it"""
    threads: AutoOrCount = option("hardware", "auto")
    """CPU threads; auto: the CPUs this process may use"""
    attention: Literal["sdpa", "eager"] = option("hardware", "sdpa")
    """attention backend"""
    compile: bool = option("hardware", True)
    """compile the model if a compiler is found; faster after a minute"""

    @model_validator(mode="after")
    def _text_or_recipe(self) -> Self:
        if bool(self.corpus) == (self.config is not None):
            raise ValueError("give either --corpus (a training text) or --config (a recipe)")
        if self.corpus and self.steps is not None:
            raise ValueError("--steps needs --config; with --corpus, set the duration with --minutes")
        if self.config is not None and "minutes" in self.model_fields_set:
            raise ValueError("--minutes needs --corpus; with --config, set the duration with --steps")
        return self


class EvalSettings(CheckpointSettings):
    """Evaluate a checkpoint of any family: bits per byte, nats per token and top-1 accuracy on held-out texts, accuracy
    on minimal pairs, and repetition in samples of fixed prompts. docs/evaluation.md explains each figure.
    """

    config: Path | None = option("evaluation", None, metavar="FILE")
    """training recipe (TOML) whose held-out documents are measured"""
    texts: Texts = option("evaluation", (), metavar="NAME=FILE")
    """texts to measure, .txt or .jsonl, either also .xz; may be repeated"""
    pairs: Path | None = option("evaluation", None, metavar="FILE")
    """minimal pairs: JSON lines of sentence_good, sentence_bad"""
    suite: Literal["none", "shipped"] = option("evaluation", "none")
    """shipped: also measure Kvasir's minimal pairs, the last word of each text among five, and greedy loops"""
    max_documents: int | None = option("evaluation", None, ge=1)
    """maximum documents to measure of each text, evenly spaced (default: all)"""
    max_context_length: AutoOrCount = option("evaluation", "auto")
    """tokens per evaluated window of a text; auto: the model's context length, at most 2048"""
    samples: int = option("evaluation", 4, ge=0, le=1000)
    """completions to sample of each fixed prompt at each temperature; 0: none"""
    out: OutputFile | None = option("result", None, metavar="FILE")
    """JSON file of all results (default: none)"""
    documents: OutputFile | None = option("result", None, metavar="FILE")
    """JSON lines of each document's and sentence's log-likelihood (default: none)"""
    export_tasks: Path | None = option("result", None)
    """directory to write texts and pairs to, as lm-evaluation-harness tasks"""
    device: Literal["auto", "cpu", "cuda"] = option("hardware", "auto")
    """device; auto: CUDA if available, else the CPU"""
    dtype: Literal["float32", "bfloat16"] = option("hardware", "float32")
    """dtype of weights and arithmetic"""
    quantize: Literal["none", "int8", "int4", "fp8"] = option("hardware", "none")
    """quantize the weights, as kvasir serve --quantize does"""
    kv_cache_dtype: CacheDtype = option("hardware", "auto")
    """dtype to round keys and values to, as kvasir serve --kv-cache-dtype"""
    threads: AutoOrCount = option("hardware", "auto")
    """CPU threads; auto: the CPUs this process may use"""

    @field_validator("texts")
    @classmethod
    def _texts_have_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for name, _, path in (text.partition("=") for text in value) if name and path]
        if len(set(names)) < len(value):
            raise ValueError("must be NAME=FILE: a name for the results and a text file; names must differ")
        return value
