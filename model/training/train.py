"""Training loop of `kvasir train`: from a config to a checkpoint directory that can be served.

The loop saves periodically. A killed run resumes from its last save with the same losses as an uninterrupted run. The
batch and the learning rate are functions of the step number alone, and the save holds all other state as tensors.
"""

import contextlib
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
from model.evaluation.likelihood import evaluate
from model.evaluation.samples import Complete, complete_one_by_one
from model.nn.transformer import Block, Transformer
from model.training.attention import DocumentAttention
from model.training.config import TrainConfig
from model.training.corpus import Corpus, read_corpus
from model.training.data.batches import UNTRAINED, Batch, PackedDocuments
from model.training.data.sources import check_sources
from model.training.finish import PARTIAL_DIRECTORY, FinishedRun, finish
from model.training.optimizer import Optimizers, rate_factor
from model.training.progress import Progress
from model.training.run_length import Deadline, Pace
from model.training.state import (
    LOG_FILE,
    STATE_FILE,
    RunLog,
    RunState,
    deterministic,
    load_state,
    locked,
    save_state,
)

_HELD_OUT_TEXTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Execution settings of a run: paths, device, precision. Only rounding differs between two settings.

    run_directory: the saved state and the log. checkpoint: the directory of the finished model.
    precision: "float32" or "bfloat16" (autocast: weights stay float32).
    stop_after: stop as if interrupted after this many steps; None for never.
    attention: the backend: "sdpa", or "eager" to measure the gain of the fused kernels.
    deadline: may change the number of steps while the learning rate is on its plateau; None keeps the config's.
    """

    run_directory: Path
    checkpoint: Path
    device: str
    precision: str
    compile: bool
    stop_after: int | None
    attention: str = "sdpa"
    deadline: Deadline | None = None


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
    with locked(settings.run_directory):
        check_output(settings)
        how = f"{settings.device} in {settings.precision}{', compiled' if settings.compile else ''}"
        report(
            f"training {config.name} on {how}: saves to {settings.run_directory} every "
            f"{config.checkpoint_minutes:g} min, then writes {settings.checkpoint}"
        )
        deterministic(config.seed)
        trainer = Trainer(config, settings, read_corpus(config, settings.run_directory, report))
        if not trainer.run(report, should_stop):
            return False
        run = FinishedRun(
            config=trainer.config,
            corpus=trainer.corpus,
            tensors=trainer.model.state_dict(),
            run_directory=settings.run_directory,
            device=settings.device,
            precision=settings.precision,
            seconds=trainer.seconds,
        )
        finish(run, settings.checkpoint, complete, report)
        return True


def check_output(settings: RunSettings) -> None:
    """Check that the checkpoint directory can be written, and remove what a run left that was killed while finishing.

    Raises:
        CheckpointError: the checkpoint directory holds files that this run did not write.
    """
    shutil.rmtree(settings.checkpoint / PARTIAL_DIRECTORY, ignore_errors=True)
    check_writable(settings.checkpoint, may_replace=(settings.run_directory / STATE_FILE).exists())


class Trainer:
    """Model, optimizers and current step of a run."""

    def __init__(self, config: TrainConfig, settings: RunSettings, corpus: Corpus) -> None:
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
            self.model, matrix_lr=config.matrix_lr, adam_lr=config.adam_lr, weight_decay=config.weight_decay
        )
        self.step = 0
        self.seconds = 0.0
        self._corpora = [source.sha256 for source in corpus.sources]
        state = load_state(settings.run_directory, config, self._corpora)
        if state is not None:
            saved: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
            for name, tensor in state.tensors.items():
                kind, _, rest = name.partition("/")
                saved[kind][rest] = tensor
            self.model.load_state_dict(saved["model"])
            if state.step:  # the optimizers have no state before the first step
                self.optimizers.load_state_tensors(saved["optimizer"])
            self.step, self.seconds = state.step, state.seconds
        self._rows = AttentionMetadata.uncached((config.sequence_length,) * config.batch_size, settings.device)
        self._loss = torch.compile(self._loss_of) if settings.compile else self._loss_of
        self._held_out = {
            source.config.name: source.held_out[:: max(1, len(source.held_out) // _HELD_OUT_TEXTS)]
            for source in corpus.sources
            if source.held_out
        }

    def _batch(self) -> Batch:
        """Return the batch of the current step."""
        start = self.config.chat_start
        if self.step >= start:
            return self.corpus.chat.batch(self.step - start)
        return self.corpus.pretraining.batch(self.step)

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
        settings, pace = self.settings, Pace()
        if not self.step:
            self.save()  # a later run with another config is then rejected
        else:
            report(f"resuming at step {self.step:,} of {self.config.steps:,}")
        saved_at = time.monotonic()
        log = RunLog(settings.run_directory / LOG_FILE, self.step)
        losses = [line["held_out_loss"] for line in log.earlier if "held_out_loss" in line]
        with log, Progress(self.config, self.step, report) as progress:
            while self.step < min(self.config.steps, settings.stop_after or self.config.steps) and not should_stop():
                config, began = self.config, time.monotonic()
                loss = self.train_step()
                self.seconds += time.monotonic() - began
                line = {"step": self.step - 1, "loss": loss, "seconds": round(self.seconds, 3)}
                if self._held_out and (self.step % config.evaluate_every == 0 or self.step == config.steps):
                    line |= self.held_out()
                    losses.append(line["held_out_loss"])
                log.write(**line)
                pace.record(self.step)
                if settings.deadline is not None:
                    self.config = settings.deadline.next_config(self.step, config, pace, losses)
                progress.update(
                    self.config, self.step, loss, line.get("held_out_loss"), self.seconds, pace.seconds_per_step
                )
                if time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                    self.save()
                    saved_at = time.monotonic()
        self.save()
        return self.step >= self.config.steps

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
        self.optimizers.step(rate_factor(self.step, self.config))
        value = float(loss.detach())
        if not math.isfinite(value) or not math.isfinite(norm):  # the weights are unusable: do not save them
            raise ValueError(f"the loss became {value} at step {self.step}; lower matrix_lr and adam_lr")
        self.step += 1
        return value

    def held_out(self) -> dict[str, Any]:
        """Measure the loss on a sample of the held-out texts: nats per token overall, bits per byte by source."""
        self.model.eval()
        measured = {name: evaluate(self.model, self.corpus.tokenizer, texts) for name, texts in self._held_out.items()}
        self.model.train()
        nats = sum(part.nats for part in measured.values()) / sum(part.num_tokens for part in measured.values())
        return {"held_out_loss": nats, "held_out_bits": {name: m.bits_per_byte for name, m in measured.items()}}

    def save(self) -> None:
        """Save the state from which the run can be resumed."""
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self.optimizers.state_tensors().items()}
        state = RunState(step=self.step, seconds=self.seconds, tensors=tensors)
        save_state(self.settings.run_directory, state, self.config, self._corpora)
