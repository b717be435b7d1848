"""End of a run: checkpoint directory, evaluation of the weights as served, model card and loss curve."""

import contextlib
import dataclasses
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model, save_checkpoint
from model.checkpoint.manifest import MANIFEST_FILE, read_manifest
from model.checkpoint.shards import remove_shards
from model.evaluation.evaluation import evaluate_checkpoint
from model.evaluation.samples import Complete, Sample, Sampler
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.stream import StreamDecoder
from model.training.config import TrainConfig
from model.training.corpus import Corpus
from model.training.model_card import LOSS_CURVE_FILE, draw_loss_curve, write_model_card
from model.training.state import LOG_FILE, read_log

# Directory inside the checkpoint directory in which the files are written, so that a killed run leaves nothing else.
PARTIAL_DIRECTORY = ".partial"
_FINAL_STEPS = 100  # the final training loss is the mean over these steps
_SHOWN_SAMPLES = 6  # printed; the card has all samples
# Default sampling parameters of a chat model, for requests that set none.
_CHAT_SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """Result of a run. tensors: weights by name. seconds: total time of the training steps."""

    config: TrainConfig
    corpus: Corpus
    tensors: Mapping[str, Tensor]
    run_directory: Path
    device: str
    precision: str
    seconds: float


def finish(run: FinishedRun, directory: Path, complete: Complete, report: Callable[[str], None]) -> None:
    """Write the checkpoint in bfloat16, measure it, and write its manifest and model card.

    Raises:
        OSError: a file cannot be written.
    """
    config, corpus = run.config, run.corpus
    log = read_log(run.run_directory / LOG_FILE)
    training = _facts(run, log)
    partial = directory / PARTIAL_DIRECTORY
    report(f"writing {directory}")

    def write() -> None:
        save_checkpoint(
            partial,
            config=config.model,
            tensors=dict(run.tensors),
            tokenizer=corpus.tokenizer,
            name=config.name,
            training=training,
            dtype=torch.bfloat16,
            generation=_CHAT_SAMPLING if config.chat_steps else None,
        )

    write()
    backend = ATTENTION_BACKENDS["sdpa"]
    served = load_model(read_manifest(partial), device=run.device, dtype=torch.float32, attention=backend)
    evaluation = evaluate_checkpoint(
        served,
        corpus.tokenizer,
        splits={source.config.name: source.held_out for source in corpus.sources},
        sampler=None if config.sample_prompts else Sampler(served, corpus.tokenizer, partial, complete),
        report=report,
    )
    for name, measured in evaluation.held_out.items():
        losses = f"{measured.bits_per_byte:.4f} bits per byte, {measured.nats_per_token:.4f} nats per token"
        report(f"held out, {name}: {losses}, next-token accuracy {measured.accuracy:.1%}")
    training["held_out_bits_per_byte"] = {name: m.bits_per_byte for name, m in evaluation.held_out.items()}
    training["held_out_nats_per_token"] = {name: m.nats_per_token for name, m in evaluation.held_out.items()}
    training["held_out_accuracy"] = {name: m.accuracy for name, m in evaluation.held_out.items()}
    write()
    draw_loss_curve(partial / LOSS_CURVE_FILE, log, config.tokens_per_step)
    if config.sample_prompts:
        evaluation = dataclasses.replace(evaluation, samples=_samples(run, served, complete))
    for sample in evaluation.samples[:_SHOWN_SAMPLES]:
        report(f"\n{sample.prompt}{sample.completion}")
    write_model_card(partial / "MODEL_CARD.md", config, training, evaluation)
    remove_shards(directory)
    # The manifest is last, since it marks a complete checkpoint.
    for path in sorted(partial.iterdir(), key=lambda path: path.name == MANIFEST_FILE):
        path.replace(directory / path.name)
    partial.rmdir()


def _samples(run: FinishedRun, model: Transformer, complete: Complete) -> list[Sample]:
    """Return a completion of each prompt in the recipe."""
    tokenizer, prompts = run.corpus.tokenizer, run.config.sample_prompts
    assert tokenizer.bos_token_id is not None  # training and serving also start with it
    encoded = [[tokenizer.bos_token_id, *tokenizer.encode(prompt)] for prompt in prompts]
    params = SamplingParams(max_tokens=200, temperature=0.8, top_p=0.95, seed=0)
    samples = []
    for prompt, ids in zip(prompts, complete(model, tokenizer, encoded, [params] * len(encoded)), strict=True):
        decoder = StreamDecoder(tokenizer)
        samples.append(Sample(prompt=prompt, completion=decoder.push(ids) + decoder.flush()))
    return samples


def _facts(run: FinishedRun, log: list[dict[str, float]]) -> dict[str, Any]:
    """Return the provenance of the model, for its manifest and card."""
    config, last = run.config, log[-_FINAL_STEPS:]
    return {
        "seed": config.seed,
        "steps": config.steps,
        "chat_steps": config.chat_steps,
        "tokens": config.steps * config.tokens_per_step,
        "epoch_tokens": run.corpus.pretraining.mixture.epoch_length,
        "seconds": round(run.seconds, 1),
        "precision": run.precision,
        "hardware": _hardware(run.device),
        "torch": torch.__version__,
        "commit": _commit(),
        "final_loss": float(np.mean([line["loss"] for line in last])) if last else None,  # the log is missing
        "final_loss_steps": len(last),
        "sources": [
            {
                "name": source.config.name,
                "licence": source.config.licence,
                "attribution": source.config.attribution,
                "sha256": source.sha256,
                "repeats": source.config.repeats,
                "chat_repeats": source.config.chat_repeats,
                "documents": len(source.train),
                "held_out_documents": len(source.held_out),
                "left_out_documents": source.left_out,
            }
            for source in run.corpus.sources
        ],
    }


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' if threads > 1 else ''} of {os.cpu_count()} CPUs, {model}"


def _commit() -> str:
    """Return the commit of this repository, or "unknown" outside of a repository."""
    git = ("git", "-C", str(Path(__file__).parent))
    try:
        # An installed copy may lie inside a different repository (site-packages), which does not track this file.
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
