"""Training loop of `kvasir train`: from a config to a checkpoint directory that can be served.

A killed run resumes from its last save with the losses of an uninterrupted run: the batch and the learning rate are
functions of the step number, and the save holds all other state as tensors.
"""

import contextlib
import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.loading import check_writable, load_model, save_checkpoint
from model.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest, write_manifest
from model.checkpoint.weights import remove_shards
from model.config import ModelConfig
from model.evaluation.evaluation import Evaluation, evaluate_checkpoint
from model.evaluation.likelihood import HeldOut, evaluate
from model.evaluation.minimal_pairs import shipped_pairs
from model.evaluation.prompts import DRAWS, PROMPTS, Complete, Prompt, Sampler, complete_one_by_one
from model.io.files import writing
from model.nn.transformer import Block, Transformer
from model.tokenizer.byte_level import RANKS_FILE
from model.training.attention import DocumentAttention
from model.training.config import TrainConfig
from model.training.corpus import Corpus, check_sources, read_corpus
from model.training.data.batches import UNTRAINED, Batch, PackedDocuments
from model.training.growth import check_growth, grow
from model.training.model_card import LOSS_CURVE_FILE, draw_loss_curve, write_model_card
from model.training.optimizer import Optimizers, rate_factor
from model.training.repetition import OwnCompletions, unlikelihood
from model.training.state import (
    LOG_FILE,
    STATE_FILE,
    Progress,
    RunState,
    deterministic,
    load_state,
    locked,
    read_log,
    save_state,
    truncate_log,
)

_HELD_OUT_TEXTS = 64  # of each source, measured during the run
_PARTIAL_DIRECTORY = ".partial"  # of an unfinished checkpoint, inside the checkpoint directory
_SOURCE_FACTS = ("name", "licence", "attribution", "repeats", "chat_repeats")  # in the manifest
# Facts of the first checkpoint of `start_from` that the manifest repeats, as far as its own manifest has them.
_START_FACTS = ("steps", "tokens", "seconds", "commit", "held_out_bits_per_byte", "suite", "started_from")
_SUITE = ("pairs", "cloze", "looping_share", "diversity")  # parts of an evaluation's facts
SUITE_CONTEXT = 64  # tokens; a sentence of `shipped_pairs` has at most 51 bytes
_FINAL_STEPS = 100  # the final training loss is the mean over these steps
_SHOWN_SAMPLES = 6  # printed; the card has all samples
# Default sampling parameters of a chat model, for requests that set none.
_CHAT_SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Execution settings of a training run. All but `next_config` change its losses only by rounding.

    precision: "float32" or "bfloat16" (autocast: weights stay float32).
    stop_after: stop as if interrupted when this many steps of the run are done; None: at the last step.
    next_config: called after each step with the number of steps done, the config, the recent seconds per step (None if
        unknown) and all held-out losses. It returns the config for the next step. Its `steps` and `decay_steps` may
        differ from the previous config until the learning rate decays.
    """

    run_directory: Path
    checkpoint: Path
    device: str
    precision: str
    compile: bool
    stop_after: int | None
    attention: str = "sdpa"
    next_config: Callable[[int, TrainConfig, float | None, Sequence[float]], TrainConfig] | None = None


def default_precision(device: str) -> str:
    """Return "bfloat16" if the hardware of the device multiplies bfloat16 natively, else "float32"."""
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def can_compile(device: str) -> bool:
    """Return whether torch.compile can run: it needs Triton on a GPU and a C++ compiler on a CPU."""
    return device == "cuda" or any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def train(
    config: TrainConfig,
    settings: RunSettings,
    report: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    complete: Complete = complete_one_by_one,
) -> bool:
    """Start or resume a training run, and write the finished checkpoint. Return True if the run finished.

    should_stop: called between steps; after True the run is saved and can be resumed.
    complete: completes the sample prompts of the model card.

    Raises:
        CheckpointError: see `check_output`.
        ValueError: a corpus is unusable, the run directory is in use or holds a damaged or different run, or the loss
            is not finite. In the last case, the last save is still usable.
    """
    check_sources(config.sources)
    with locked(settings.run_directory):
        check_output(settings)
        how = f"{settings.device} in {settings.precision}{', compiled' if settings.compile else ''}"
        report(
            f"training {config.name} on {how}: saves to {settings.run_directory} every "
            f"{config.checkpoint_minutes:g} min, then writes {settings.checkpoint}"
        )
        deterministic(config.seed)
        trainer = Trainer(config, settings, read_corpus(config, settings.run_directory, report), complete)
        if not trainer.run(report, should_stop):
            return False
        _finish(trainer, complete, report)
        return True


def check_output(settings: RunSettings) -> None:
    """Remove the unfinished checkpoint of a killed run, and create the checkpoint directory if it is missing.

    Raises:
        CheckpointError: the directory cannot be written, has files but no manifest, or has a complete checkpoint
            although the run directory has no save.
    """
    partial, has_save = settings.checkpoint / _PARTIAL_DIRECTORY, (settings.run_directory / STATE_FILE).exists()
    if has_save and partial.is_dir():
        # This run was killed while it wrote the checkpoint, so files without a manifest may be its own. The directory
        # stays as their mark until they are complete.
        with writing(settings.checkpoint):
            for path in partial.iterdir():
                path.unlink()
        return
    shutil.rmtree(partial, ignore_errors=True)
    check_writable(settings.checkpoint, may_replace=has_save)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Trainer:
    """Training run in progress: model, optimizers, corpus and number of steps done."""

    def __init__(
        self, config: TrainConfig, settings: RunSettings, corpus: Corpus, complete: Complete = complete_one_by_one
    ) -> None:
        self.config = config
        self.settings = settings
        self.corpus = corpus
        backend = ATTENTION_BACKENDS[settings.attention]
        self.model = Transformer(config.model, DocumentAttention(backend) if config.mask_documents else backend)
        self.model.initialize(config.seed)
        self.model.to(settings.device)
        for module in self.model.modules():
            if isinstance(module, Block):
                module.dropout = config.dropout
        self.optimizers = Optimizers(
            self.model,
            matrix_lr=config.matrix_lr,
            adam_lr=config.adam_lr,
            weight_decay=config.weight_decay,
            dtype=getattr(torch, settings.precision),
        )
        self.step = 0
        self.seconds = 0.0
        self._mean: dict[str, Tensor] = {}  # of the weights, since the first of `average_steps`
        starts = [read_manifest(directory) for directory in config.start_from]
        self.start = starts[0] if starts else None
        self._corpora = [source.sha256 for source in corpus.sources]
        state = load_state(settings.run_directory, config, self._corpora)
        if state is not None:
            self.model.load_state_dict(_below("model/", state.tensors))
            self._mean = _below("mean/", state.tensors)
            if state.step:  # the optimizers have no state before the first step
                self.optimizers.load_state_tensors(_below("optimizer/", state.tensors))
            self.step, self.seconds = state.step, state.seconds
        elif starts:
            self.model.load_state_dict(_mean_weights(starts, config.model, config.seed))
        self._rows = AttentionMetadata.uncached((config.sequence_length,) * config.batch_size, settings.device)
        self._loss = torch.compile(self._loss_of) if settings.compile else self._loss_of
        self._own = OwnCompletions(self.model, corpus.tokenizer, complete) if config.repetition_steps else None
        self._held_out = {
            source.config.name: source.held_out[:: max(1, len(source.held_out) // _HELD_OUT_TEXTS)]
            for source in corpus.sources
            if source.held_out
        }

    def _loss_of(self, inputs_T: Tensor, targets_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the mean loss in nats over the target tokens of a batch, or 0 for a batch without targets."""
        logits_TV = self.model(inputs_T, metadata, None)
        total = functional.cross_entropy(logits_TV, targets_T, ignore_index=UNTRAINED, reduction="sum")
        return total / (targets_T != UNTRAINED).sum().clamp(min=1)

    def run(self, report: Callable[[str], None], should_stop: Callable[[], bool]) -> bool:
        """Train to the last step, `stop_after` or `should_stop`. Return True if the last step is done.

        Saves the run before the first step, regularly, and at the end. Each step adds a line to the log.
        """
        settings = self.settings
        if not self.step:
            self.save()  # a later run with another config is then rejected
        else:
            report(f"resuming at step {self.step:,} of {self.config.steps:,}")
        saved_at = time.monotonic()
        path = settings.run_directory / LOG_FILE
        losses = [line["held_out_loss"] for line in truncate_log(path, self.step) if "held_out_loss" in line]
        progress = Progress(report)
        with path.open("a", buffering=1) as log:
            while self.step < min(self.config.steps, settings.stop_after or self.config.steps) and not should_stop():
                config, began = self.config, time.monotonic()
                loss = self.train_step()
                self.seconds += time.monotonic() - began
                line = {"step": self.step - 1, "loss": loss, "seconds": round(self.seconds, 3)}
                if self._held_out and (self.step % config.evaluate_every == 0 or self.step == config.steps):
                    line |= self.held_out()
                    losses.append(line["held_out_loss"])
                log.write(json.dumps(line) + "\n")
                progress.record(self.step)
                if settings.next_config is not None:
                    self.config = settings.next_config(self.step, config, progress.seconds_per_step, losses)
                progress.report(self.config, loss, losses, self.seconds)
                if time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                    self.save()
                    saved_at = time.monotonic()
        self.save()
        return self.step >= self.config.steps

    def train_step(self) -> float:
        """Run one optimizer step and return the loss of its batch in nats per token, before the update.

        Raises ValueError if the loss or the gradient's norm is not finite; the weights are then unusable.
        """
        chat_step = self.step - self.config.chat_start
        batch = self.corpus.pretraining.batch(self.step) if chat_step < 0 else self.corpus.chat.batch(chat_step)
        batch = batch.to(self.settings.device)
        metadata = self._rows
        if self.config.mask_documents:
            torch._dynamo.mark_dynamic(batch.starts_N, 0)  # the number of documents varies by batch
            metadata = PackedDocuments.of(batch, self.config.sequence_length)
        if self.config.dropout:
            # Dropout depends on the step alone, so that a resumed run repeats it. torch takes 64-bit seeds.
            torch.manual_seed((self.config.seed * 2**32 + self.step) % 2**63)
        is_bfloat16 = self.settings.precision == "bfloat16"
        with torch.autocast(self.settings.device, dtype=torch.bfloat16, enabled=is_bfloat16):
            loss = self._loss(batch.inputs_T, batch.targets_T, metadata)
        loss.backward()
        since = self.step - (self.config.steps - self.config.repetition_steps)
        if self._own is not None and since >= 0 and since % self.config.repetition_interval == 0:
            self._train_against_loops(self._own.batch(batch, self.step))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizers.step(rate_factor(self.step, self.config))
        value = float(loss.detach())
        if not math.isfinite(value) or not math.isfinite(norm):  # the weights are unusable: do not save them
            raise ValueError(
                f"the training loss ({value}) or the norm of its gradient ({norm:g}) is not finite at step "
                f"{self.step}; lower matrix_lr and adam_lr in the recipe"
            )
        self.step += 1
        if (count := self.step - (self.config.steps - self.config.average_steps)) > 0:
            for name, tensor in self.model.state_dict().items():
                self._mean.setdefault(name, torch.zeros_like(tensor)).lerp_(tensor, 1 / count)
        return value

    def final_weights(self) -> dict[str, Tensor]:
        """Return the weights of the checkpoint: those after the last step, or their mean over `average_steps`."""
        return self.model.state_dict() | self._mean

    def _train_against_loops(self, batch: Batch | None) -> None:
        """Add the gradients of the unlikelihood of repeated tokens, if there are any."""
        if batch is not None:
            batch = batch.to(self.settings.device)
            is_bfloat16 = self.settings.precision == "bfloat16"
            with torch.autocast(self.settings.device, dtype=torch.bfloat16, enabled=is_bfloat16):
                logits_TV = self.model(
                    batch.inputs_T, PackedDocuments.of(batch, int(batch.starts_N.diff().max())), None
                )
            unlikelihood(logits_TV, batch.targets_T).backward()

    def held_out(self) -> dict[str, Any]:
        """Measure a sample of the held-out texts: one loss in nats per token, and the bits per byte of each source."""
        self.model.eval()
        measured = {name: evaluate(self.model, self.corpus.tokenizer, texts) for name, texts in self._held_out.items()}
        self.model.train()
        scores = tuple(score for part in measured.values() for score in part.documents)
        nats = HeldOut(scores, num_bytes=0).nats_per_token
        return {"held_out_loss": nats, "held_out_bits": {name: m.bits_per_byte for name, m in measured.items()}}

    def save(self) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self.optimizers.state_tensors().items()}
        tensors |= {f"mean/{name}": tensor for name, tensor in self._mean.items()}
        state = RunState(step=self.step, seconds=self.seconds, tensors=tensors)
        save_state(self.settings.run_directory, state, self.config, self._corpora)


def _mean_weights(manifests: Sequence[Manifest], model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return the mean of the checkpoints' weights, where a checkpoint that is named twice counts twice.

    Raises CheckpointError, or ValueError for another tokenizer or an architecture that cannot grow to `model`.
    """
    tokenizers = [manifest.files.get(RANKS_FILE) for manifest in manifests]
    for manifest, tokenizer in zip(manifests, tokenizers, strict=True):
        if tokenizer != tokenizers[0]:
            raise ValueError(
                f"start_from {manifest.directory}: its tokenizer is not that of {manifests[0].directory}; only the "
                "weights of models with one tokenizer can be averaged"
            )
    weights = [_weights(manifest, model, seed) for manifest in manifests]
    return {name: torch.stack([each[name] for each in weights]).mean(dim=0) for name in weights[0]}


def _weights(manifest: Manifest, model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return the weights of a Kvasir checkpoint, grown to the architecture `model`.

    Raises CheckpointError, or ValueError for an architecture that it cannot grow to.
    """
    directory = manifest.directory
    try:
        check_growth(manifest.config, model)
    except ValueError as error:
        raise ValueError(f"start_from {directory}: {error}") from error
    if manifest.quantization is not None:
        raise ValueError(f"start_from {directory}: its matrices are quantized; give the checkpoint before conversion")
    backend = ATTENTION_BACKENDS["sdpa"]
    weights = load_model(manifest, device="cpu", dtype=torch.float32, attention=backend).state_dict()
    return grow(weights, manifest.config, model, seed)


def _finish(trainer: Trainer, complete: Complete, report: Callable[[str], None]) -> None:
    """Write the finished checkpoint in bfloat16, evaluate it, and write its manifest, loss curve and model card."""
    config, corpus, directory = trainer.config, trainer.corpus, trainer.settings.checkpoint
    log = read_log(trainer.settings.run_directory / LOG_FILE)
    training = _facts(trainer, log)
    partial = directory / _PARTIAL_DIRECTORY
    report(f"writing {directory}")
    save_checkpoint(
        partial,
        config=config.model,
        tensors=trainer.final_weights(),
        tokenizer=corpus.tokenizer,
        name=config.name,
        training=training,
        dtype=torch.bfloat16,
        generation=_CHAT_SAMPLING if config.chat_steps else None,
    )
    backend = ATTENTION_BACKENDS["sdpa"]
    served = load_model(read_manifest(partial), device=trainer.settings.device, dtype=torch.float32, attention=backend)
    own = [Prompt(None, text) for text in config.sample_prompts]
    prompts, draws = (own, 0) if own else (PROMPTS, DRAWS)
    sampler = Sampler(served, corpus.tokenizer, partial, complete, prompts=prompts, draws=draws)
    has_suite = not own and config.model.max_context_length >= SUITE_CONTEXT
    evaluation = evaluate_checkpoint(
        served,
        corpus.tokenizer,
        splits={source.config.name: source.held_out for source in corpus.sources},
        pairs=shipped_pairs() if has_suite else (),
        sampler=sampler,
        has_cloze=has_suite,
        report=report,
    )
    for name, measured in evaluation.held_out.items():
        losses = f"{measured.bits_per_byte:.4f} bits per byte, {measured.nats_per_token:.4f} nats per token"
        report(f"held out, {name}: {losses}, next-token accuracy {measured.accuracy:.1%}")
    for metric in ("bits_per_byte", "nats_per_token", "accuracy"):
        training[f"held_out_{metric}"] = {name: getattr(m, metric) for name, m in evaluation.held_out.items()}
    if has_suite:
        training["suite"] = suite_facts(evaluation)
    write_manifest(partial, name=config.name, training=training)
    if len(log) > 1:
        draw_loss_curve(partial / LOSS_CURVE_FILE, log, config.tokens_per_step)
    for sample in evaluation.samples[:_SHOWN_SAMPLES]:
        report(f"\n{sample.prompt}{sample.completion}")
    write_model_card(partial / "MODEL_CARD.md", config, training, evaluation)
    remove_shards(directory)
    # The manifest is last, since it marks a complete checkpoint.
    for path in sorted(partial.iterdir(), key=lambda path: path.name == MANIFEST_FILE):
        path.replace(directory / path.name)
    partial.rmdir()


def suite_facts(evaluation: Evaluation) -> dict[str, Any]:
    """Return the totals of `kvasir eval --suite shipped` for the manifest, as JSON values."""
    facts = evaluation.to_dict()
    del facts["pairs"]["groups"]
    return {name: facts[name] for name in _SUITE}


def start_facts(start: Manifest, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a run's manifest says of the checkpoint that it started from.

    own: facts of the run's own sources. Other sources of the earlier run are listed, and its losses on held-out texts
    that are not this run's are left out.
    """
    training = start.training
    sources = training.get("sources", [])
    facts = {"name": start.name} | {name: training[name] for name in _START_FACTS if name in training}
    known = {source["sha256"] for source in own}
    facts["sources"] = [source for source in sources if source["sha256"] not in known]
    held_out = [{(s["name"], s["sha256"], s["held_out_documents"]) for s in listed} for listed in (own, sources)]
    same = {name for name, *_ in held_out[0] & held_out[1]}
    losses = facts.get("held_out_bits_per_byte", {}).items()
    return facts | {"held_out_bits_per_byte": {name: bits for name, bits in losses if name in same}}


def _facts(trainer: Trainer, log: list[dict[str, float]]) -> dict[str, Any]:
    config, last = trainer.config, log[-_FINAL_STEPS:]
    sources = [
        {name: getattr(source.config, name) for name in _SOURCE_FACTS}
        | {
            "sha256": source.sha256,
            "documents": len(source.train),
            "held_out_documents": len(source.held_out),
            "left_out_documents": source.left_out,
        }
        for source in trainer.corpus.sources
    ]
    started = {} if trainer.start is None else {"started_from": start_facts(trainer.start, sources)}
    return {
        "seed": config.seed,
        "steps": config.steps,
        "chat_steps": config.chat_steps,
        "tokens": config.steps * config.tokens_per_step,
        "epoch_tokens": trainer.corpus.first_phase.mixture.epoch_length,
        "seconds": round(trainer.seconds, 1),
        "precision": trainer.settings.precision,
        "hardware": _hardware(trainer.settings.device),
        "torch": torch.__version__,
        "commit": _commit(),
        "final_loss": float(np.mean([line["loss"] for line in last])) if last else None,  # the log is missing
        "final_loss_steps": len(last),
        "sources": sources,
        **started,
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
    """Return the git commit of the repository of this file, or "unknown" outside of a repository."""
    git = ("git", "-C", str(Path(__file__).parent))
    try:
        # An installed copy may lie inside a different repository (site-packages), which does not track this file.
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
