"""Training loop of `kvasir train`: from a config to a checkpoint directory that can be served.

The loop saves periodically. A killed run resumes from its last save with the same losses as an uninterrupted run. The
batch and the learning rate are functions of the step number alone, and the save holds all other state as tensors.
"""

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.loading import check_writable
from model.evaluation.held_out import evaluate
from model.evaluation.samples import Complete, complete_one_by_one
from model.nn.transformer import Block, Transformer
from model.training.attention import DocumentAttention
from model.training.config import TrainConfig
from model.training.corpus import Corpus, read_corpus
from model.training.data.packing import UNTRAINED, Batch, Batches, PackedDocuments
from model.training.data.sources import check_sources
from model.training.finish import FinishedRun, finish
from model.training.optimizer import Optimizers
from model.training.progress import Progress
from model.training.run_length import Pace
from model.training.state import RunLog, RunState, clone_tensors, deterministic, load_state, locked, save_state

_HELD_OUT_TEXTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Execution settings of a run: paths, device, precision. Only rounding differs between two settings.

    run_directory: the saved state and the log. checkpoint: the directory of the finished model.
    precision: "float32" or "bfloat16" (autocast: weights stay float32).
    stop_after: stop as if interrupted after this many steps; None for never.
    attention: the backend: "sdpa", or "eager" to measure the gain of the fused kernels.
    pace: measures the speed, and may change the number of steps while the learning rate is on its plateau.
    """

    run_directory: Path
    checkpoint: Path
    device: str
    precision: str
    compile: bool
    stop_after: int | None
    attention: str = "sdpa"
    pace: Pace = dataclasses.field(default_factory=Pace)


def default_precision(device: str) -> str:
    """Return "bfloat16" if the hardware multiplies it natively, else "float32"."""
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
    """Start or resume training, and write the finished checkpoint. Returns whether the run finished.

    `should_stop` is called between steps. If it returns True, the run is saved and can be resumed. `complete` generates
    the samples of the model card.

    Raises:
        CheckpointError: the checkpoint directory holds files that this run did not write.
        CorpusError: a corpus cannot be used.
        StateError: the run directory holds a different run or a damaged one, or is in use.
        ValueError: the loss is not finite; the last save is still usable.
    """
    check_sources(config.sources)
    check_writable(settings.checkpoint, may_replace=(settings.run_directory / "state").exists())
    report(_beginning(config, settings))
    with locked(settings.run_directory):
        return _train(config, settings, report, should_stop, complete)


def _beginning(config: TrainConfig, settings: RunSettings) -> str:
    how = f"{settings.device} in {settings.precision}{', compiled' if settings.compile else ''}"
    return (
        f"training {config.name} on {how}: saves to {settings.run_directory} every "
        f"{config.checkpoint_minutes:g} min, then writes {settings.checkpoint}"
    )


def _train(
    config: TrainConfig,
    settings: RunSettings,
    report: Callable[[str], None],
    should_stop: Callable[[], bool],
    complete: Complete,
) -> bool:
    deterministic(config.seed)
    corpus = read_corpus(config, settings.run_directory, report)
    trainer = Trainer(config, settings, corpus)
    if not trainer.run(report, should_stop):
        return False
    finish(trainer.finished(), settings.checkpoint, complete, report)
    return True


class Trainer:
    """Model, optimizers and current step of a run."""

    def __init__(self, config: TrainConfig, settings: RunSettings, corpus: Corpus) -> None:
        self.config = config
        self.settings = settings
        self.corpus = corpus
        self.tokenizer = corpus.tokenizer
        self.sources = corpus.sources
        backend = ATTENTION_BACKENDS[settings.attention]
        self.model = Transformer(config.model, DocumentAttention(backend) if config.mask_documents else backend)
        self.model.initialize(config.seed)
        self.model.to(settings.device)
        for module in self.model.modules():
            if isinstance(module, Block):
                module.dropout = config.dropout
        self.optimizers = Optimizers(self.model, config)
        self.step = 0
        self.seconds = 0.0
        self._corpora = [source.sha256 for source in self.sources]
        state = load_state(settings.run_directory, config, self._corpora)
        if state is not None:
            self.model.load_state_dict(state.model)
            if state.step:  # the optimizers have no state before the first step
                self.optimizers.load_state_tensors(state.optimizer)
            self.step, self.seconds = state.step, state.seconds
        self._rows = AttentionMetadata.uncached((config.sequence_length,) * config.batch_size, settings.device)
        self._loss = torch.compile(self._loss_of) if settings.compile else self._loss_of
        self._held_out = {
            source.config.name: source.held_out[:: max(1, len(source.held_out) // _HELD_OUT_TEXTS)]
            for source in self.sources
            if source.held_out
        }

    @functools.cached_property
    def _pretraining(self) -> Batches:
        return self.corpus.batches(self.corpus.pretraining)

    @functools.cached_property
    def _chat(self) -> Batches:
        return self.corpus.batches(self.corpus.chat)

    def _batch(self) -> Batch:
        """Return the batch of the current step."""
        start = self.config.chat_start
        if self.config.chat_steps and self.step >= start:
            return self._chat.batch(self.step - start)
        return self._pretraining.batch(self.step)

    def _metadata(self, batch: Batch) -> AttentionMetadata:
        if not self.config.mask_documents:
            return self._rows
        return PackedDocuments.of(batch, self.config.sequence_length)

    def _loss_of(self, inputs_T: Tensor, targets_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the mean loss over the target tokens.

        The loss is 0 for a batch without targets, such as the middle of a long question.
        """
        logits_TV = self.model(inputs_T, metadata, None)
        total = functional.cross_entropy(logits_TV, targets_T, ignore_index=UNTRAINED, reduction="sum")
        return total / (targets_T != UNTRAINED).sum().clamp(min=1)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        enabled = self.settings.precision == "bfloat16"
        return torch.autocast(self.settings.device, dtype=torch.bfloat16, enabled=enabled)

    def run(self, report: Callable[[str], None], should_stop: Callable[[], bool]) -> bool:
        """Train until the last step or `stop_after`, with periodic saves. Returns whether the last step was reached."""
        settings, pace = self.settings, self.settings.pace
        if not self.step:
            self.save()  # a later run with another config is then rejected
        else:
            report(f"resuming at step {self.step:,} of {self.config.steps:,}")
        saved_at = time.monotonic()
        log = RunLog(settings.run_directory / "log.jsonl", self.step)
        with log, Progress(self.config, self.step, pace, report) as progress:
            while self.step < self._last_step and not should_stop():
                config, began = self.config, time.monotonic()
                loss = self.train_step()
                elapsed = time.monotonic() - began
                self.seconds += elapsed
                line = {"step": self.step - 1, "loss": loss, "seconds": round(self.seconds, 3)}
                if self._held_out and (self.step % config.evaluate_every == 0 or self.step == config.steps):
                    line |= self.held_out()
                log.write(**line)
                self._follow(pace.after_step(self.step, self.config, line.get("held_out_loss")))
                progress.update(self.config, self.step, loss, elapsed, line.get("held_out_loss"))
                if time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                    self.save()
                    saved_at = time.monotonic()
        self.save()
        return self.step >= self.config.steps

    @property
    def _last_step(self) -> int:
        return min(self.config.steps, self.settings.stop_after or self.config.steps)

    def _follow(self, config: TrainConfig) -> None:
        """Continue with a config that may have a different number of steps."""
        self.config = self.optimizers.config = config

    def train_step(self) -> float:
        """Run one optimizer step. Returns its loss, in nats per token.

        Raises:
            ValueError: the loss or the gradient norm is not finite.
        """
        batch = self._batch().to(self.settings.device)
        if self.config.mask_documents:
            torch._dynamo.mark_dynamic(batch.starts_N, 0)  # the number of documents varies by batch
        if self.config.dropout:
            # Dropout depends on the step alone, so that a resumed run repeats it. torch takes 64-bit seeds.
            torch.manual_seed((self.config.seed * 2**32 + self.step) % 2**63)
        with self._autocast():
            loss = self._loss(batch.inputs_T, batch.targets_T, self._metadata(batch))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizers.step(self.step)
        value = float(loss.detach())
        if not math.isfinite(value) or not math.isfinite(norm):  # the weights are unusable: do not save them
            raise ValueError(f"the loss became {value} at step {self.step}; lower matrix_lr and adam_lr")
        self.step += 1
        return value

    def held_out(self) -> dict[str, Any]:
        """Measure the loss on a sample of the held-out texts: nats per token overall, bits per byte by source."""
        self.model.eval()
        measured = {name: evaluate(self.model, self.tokenizer, texts) for name, texts in self._held_out.items()}
        self.model.train()
        nats = sum(part.nats for part in measured.values()) / sum(part.num_tokens for part in measured.values())
        return {"held_out_loss": nats, "held_out_bits": {name: m.bits_per_byte for name, m in measured.items()}}

    def finished(self) -> FinishedRun:
        """Return the finished run, for `finish`."""
        return FinishedRun(
            config=self.config,
            corpus=self.corpus,
            tensors=self.model.state_dict(),
            run_directory=self.settings.run_directory,
            device=self.settings.device,
            precision=self.settings.precision,
            seconds=self.seconds,
        )

    def save(self) -> None:
        """Save the state from which the run can be resumed."""
        state = RunState(
            step=self.step,
            seconds=self.seconds,
            model=clone_tensors(dict(self.model.state_dict())),
            optimizer=clone_tensors(self.optimizers.state_tensors()),
        )
        save_state(self.settings.run_directory, state, self.config, self._corpora)
