"""MODEL_CARD.md and the loss curve: what a trained model is, from what was measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from model.training.config import TrainConfig

LOSS_CURVE_FILE = "loss.png"

_DATA = """
## Data

| source | documents | repeats an epoch | held out | licence | SHA-256 |
|---|---:|---:|---:|---|---|
{sources}

{epoch_tokens:,} tokens an epoch. No held-out text stands in training (compared by letters and digits). The weights are
a result computed from these texts and contain none of the files.
"""
_HELD_OUT = """
## Held-out bits per byte

Measured on the weights as shipped (bfloat16 files, float32 arithmetic).

| source | bits per byte |
|---|---:|
{rows}
"""
_SAMPLES = """
## Samples

Temperature 0.8, top-p 0.95, the first draw of each prompt.

"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt and its completion."""

    prompt: str
    completion: str


def draw_loss_curve(path: Path, log: list[dict[str, float]], tokens_per_step: int) -> None:
    """Training loss (each step, and smoothed over 50) and held-out loss against tokens, as PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    tokens = [(line["step"] + 1) * tokens_per_step / 1e6 for line in log]
    losses = [line["loss"] for line in log]
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else smooth[-1] + (loss - smooth[-1]) / min(50, len(smooth) + 1))
    axes.plot(tokens, losses, color="tab:blue", alpha=0.2, linewidth=0.8)
    axes.plot(tokens, smooth, color="tab:blue", label="training (smoothed)")
    held = [(t, line["held_out_loss"]) for t, line in zip(tokens, log, strict=True) if "held_out_loss" in line]
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color="tab:orange", markersize=3, label="held out")
    axes.set_xlabel("tokens seen (millions)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_ylim(top=min(max(losses), 7.0) if losses else None)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def write_model_card(
    path: Path, config: TrainConfig, training: dict[str, Any], bits: dict[str, float], samples: list[Sample]
) -> None:
    """The card beside the weights."""
    sources = "\n".join(
        f"| {s['name']} | {s['documents']:,} | {s['repeats']} | {s['held_out_documents']:,} | {s['licence']} |"
        f" `{s['sha256'][:16]}` |"
        for s in training["sources"]
    )
    sections = (
        _architecture(config),
        _DATA.format(sources=sources, epoch_tokens=training["epoch_tokens"]),
        _recipe(config, training),
        _HELD_OUT.format(rows="\n".join(f"| {name} | {value:.4f} |" for name, value in bits.items())),
        _SAMPLES + "\n\n".join(f"> **{s.prompt}**{_quote(s.completion)}" for s in samples),
    )
    path.write_text("\n".join(section.strip() + "\n" for section in sections))


def _architecture(config: TrainConfig) -> str:
    model = config.model
    heads = f"{model.num_heads} query and {model.num_kv_heads} key/value heads of {model.head_dim}"
    return f"""# {config.name}

A decoder-only transformer of {model.num_parameters:,} parameters, trained from scratch by `kvasir train` in this
repository. It writes short English stories for children; it knows no facts and follows no instructions.

## Architecture

{model.num_layers} layers, width {model.hidden_size}, {heads}, {model.mlp} MLP of {model.mlp_size}, {model.norm},
{model.position} positions, {"tied" if model.tie_embeddings else "untied"} embeddings, a context of
{model.max_context_length} tokens, byte-level BPE of {model.vocab_size:,} tokens trained on the same text.
"""


def _recipe(config: TrainConfig, training: dict[str, Any]) -> str:
    epochs = training["tokens"] / training["epoch_tokens"]
    return f"""## Recipe

{training["steps"]:,} steps of {config.batch_size} x {config.sequence_length} tokens
({training["tokens"] / 1e6:.1f} million tokens, {epochs:.1f} epochs), Muon on the matrices (peak {config.matrix_lr})
and AdamW on the rest (peak {config.adam_lr}), {config.warmup_steps} steps of warm-up, {config.decay_steps} of linear
decay, weight decay {config.weight_decay}, gradients clipped at {config.grad_clip}, computed in
{training["precision"]}; seed {config.seed}, commit `{training["commit"][:12]}`.
{training["hardware"]}: {training["seconds"] / 60:.0f} minutes.

![loss curve]({LOSS_CURVE_FILE})

Training loss over the last 100 steps: {training["final_loss"]:.4f} nats a token.
"""


def _quote(text: str) -> str:
    return text.rstrip().replace("\n", "\n> ")
