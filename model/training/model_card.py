"""Model card (MODEL_CARD.md) and loss curve of a finished run."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from model.config import ModelConfig
from model.config_enums import AttentionKind, NormKind, NormPlacement, PositionKind
from model.evaluation.diversity import Diversity
from model.evaluation.evaluation import Evaluation
from model.evaluation.held_out import HeldOut
from model.evaluation.prompts import PromptKind
from model.evaluation.samples import COUNTED_TOKENS, SHOWN_TEMPERATURE, SHOWN_TOP_P, Sample
from model.training.config import TrainConfig
from model.training.data.contamination import RUN_WORDS

LOSS_CURVE_FILE = "loss.png"

_POSITIONS = {
    PositionKind.NONE: "no positions",
    PositionKind.LEARNED: "learned positions",
    PositionKind.SINUSOIDAL: "sinusoidal positions",
    PositionKind.ROTARY: "rotary positions",
    PositionKind.RELATIVE_BIAS: "a relative position bias",
    PositionKind.ALIBI: "linear position biases (ALiBi)",
    PositionKind.DISENTANGLED: "disentangled positions",
}
_NORMS = {NormKind.LAYER_NORM: "LayerNorm", NormKind.RMS_NORM: "RMSNorm"}
_DATA = """
## Data

| source | documents | repeats an epoch | held out | licence | SHA-256 |
|---|---:|---:|---:|---|---|
{sources}

{facts}
"""
_SPLIT = f"No training document shares {RUN_WORDS} words in a row with a held-out text of any source, or is one."
_RESULT = "The weights are a result computed from these texts and contain none of the files."
_ATTRIBUTIONS = """
## Attribution

| source | licence | attribution |
|---|---|---|
{rows}
"""
_HELD_OUT = """
## Held-out texts

Measured on the weights as shipped (bfloat16 files, float32 arithmetic). Accuracy: how often the likeliest next token is
the right one.

| source | documents | bits per byte | nats per token | top-1 accuracy |
|---|---:|---:|---:|---:|
{rows}
"""
_DIVERSITY = """
## Diversity of samples

{samples} completions of the fixed prompts at each temperature, of at most {tokens} tokens, nothing cut off (top-p 1).
distinct-n: different n-grams of words over all of them, in all samples together (Li et al. 2016). Repetition: the share
of 4-grams that stood earlier in the same sample (seq-rep-4, Welleck et al. 2020).

| temperature | words | distinct-1 | distinct-2 | distinct-3 | repetition |
|---:|---:|---:|---:|---:|---:|
{rows}
"""
_SAMPLES = """
## Samples

Temperature {temperature}, top-p {top_p}, the first draw of each prompt{which}.

"""
_FIXED = "; the prompts are those of every card, see `model/evaluation/prompts.py`"
_KINDS: dict[PromptKind | None, str] = {
    None: "",
    PromptKind.STORY: "Stories",
    PromptKind.FACT: "Facts",
    PromptKind.DIALOGUE: "Dialogues",
    PromptKind.CHAT: "Answers to messages, in the chat template",
}


def draw_loss_curve(path: Path, log: list[dict[str, float]], tokens_per_step: int) -> None:
    """Plot training loss (per step, and smoothed over 50 steps) and held-out loss against tokens, as PNG."""
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
    path: Path,
    config: TrainConfig,
    training: Mapping[str, Any],
    evaluation: Evaluation,
) -> None:
    """Write the model card. Sections without data (held-out texts, samples, a description) are left out."""
    sections = [
        _architecture(config),
        _data(config, training),
        _attributions(training["sources"]),
        _recipe(config, training),
    ]
    sections += [_held_out(evaluation.held_out), _diversity(evaluation.diversity), _samples(evaluation.samples)]
    path.write_text("\n".join(section.strip() + "\n" for section in sections if section))


def _attributions(sources: Sequence[Mapping[str, Any]]) -> str:
    """Return the attribution section for the sources whose licences require attribution."""
    rows = [f"| {s['name']} | {s['licence']} | {_cell(s['attribution'])} |" for s in sources if s.get("attribution")]
    return _ATTRIBUTIONS.format(rows="\n".join(rows)) if rows else ""


def _held_out(measured: Mapping[str, HeldOut]) -> str:
    rows = [
        f"| {name} | {len(m.documents):,} | {m.bits_per_byte:.4f} | {m.nats_per_token:.4f} | {m.accuracy:.1%} |"
        for name, m in measured.items()
    ]
    return _HELD_OUT.format(rows="\n".join(rows)) if rows else ""


def _diversity(measured: Sequence[Diversity]) -> str:
    if not measured:
        return ""
    rows = [
        f"| {m.temperature} | {m.num_words:,} | {' | '.join(map(_share, (*m.distinct, m.repetition)))} |"
        for m in measured
    ]
    return _DIVERSITY.format(samples=measured[0].num_samples, tokens=COUNTED_TOKENS, rows="\n".join(rows))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    which = _FIXED if any(sample.kind for sample in samples) else ""
    text = _SAMPLES.format(temperature=SHOWN_TEMPERATURE, top_p=SHOWN_TOP_P, which=which)
    for kind, title in _KINDS.items():
        of_kind = [sample for sample in samples if sample.kind is kind]
        if of_kind:
            gap = " " if kind is PromptKind.CHAT else ""
            quotes = [f"> **{_quote(s.prompt)}**{gap}{_quote(s.completion)}" for s in of_kind]
            text += "\n\n".join([*([f"### {title}"] if title else []), *quotes]) + "\n\n"
    return text


def _architecture(config: TrainConfig) -> str:
    made = f"A decoder-only transformer of {config.model.num_parameters:,} parameters, trained from scratch by"
    parts = (
        f"# {config.name}",
        textwrap.fill(f"{made} `kvasir train` in this repository. {config.description}".strip(), 120),
        "## Architecture",
        textwrap.fill(describe_model(config.model), 120),
    )
    return "\n\n".join(parts)


def describe_model(model: ModelConfig) -> str:
    """Describe the architecture in one sentence."""
    parts = [
        f"{model.num_layers} layers",
        f"width {model.hidden_size}",
        *_attention(model),
        f"{model.mlp} MLP of {model.mlp_size}" + (" beside the attention" if model.parallel_residual else ""),
        _NORMS[model.norm] + (" after each half of a block" if model.norm_placement is NormPlacement.POST else ""),
        _positions(model),
        f"{'tied' if model.tie_embeddings else 'untied'} embeddings",
        f"a context of {model.max_context_length:,} tokens",
        f"byte-level BPE of {model.vocab_size:,} tokens trained on the same text",
    ]
    return ", ".join(parts) + "."


def _attention(model: ModelConfig) -> list[str]:
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_dim
    if model.attention is AttentionKind.AVERAGE:
        parts = [f"averages of all that came before, {heads} heads of {size}"]
    elif heads == 1:
        parts = [f"one attention head of {size}"]
    elif heads == kv_heads:
        parts = [f"{heads} attention heads of {size}"]
    else:
        parts = [f"{heads} query and {kv_heads} key/value head{'s' if kv_heads > 1 else ''} of {size}"]
    if model.qk_norm:
        parts.append("normalised queries and keys")
    if model.sliding_window is not None:
        layers = ", ".join(map(str, model.global_layers))
        parts.append(f"a sliding window of {model.sliding_window}" + (f" but in layers {layers}" if layers else ""))
    return parts


def _positions(model: ModelConfig) -> str:
    text = _POSITIONS[model.position]
    if model.rotary_dim is not None:
        text += f" in {model.rotary_dim} of {model.head_dim} dimensions"
    return text + (f" ({model.rope_scaling.kind} scaling)" if model.rope_scaling is not None else "")


def _data(config: TrainConfig, training: Mapping[str, Any]) -> str:
    sources = "\n".join(
        f"| {s['name']} | {s['documents']:,} | {_repeats(config, s)} | {s['held_out_documents']:,} | {s['licence']} |"
        f" `{s['sha256'][:16]}` |"
        for s in training["sources"]
    )
    facts = [f"{training['epoch_tokens']:,} tokens an epoch."]
    if any(source["held_out_documents"] for source in training["sources"]):
        facts.append(_SPLIT)
    return _DATA.format(sources=sources, facts=textwrap.fill(" ".join([*facts, _RESULT]), 120))


def _repeats(config: TrainConfig, source: Mapping[str, Any]) -> str:
    repeats = source.get("chat_repeats", 0) if config.chat_steps else 0
    return f"{source['repeats']}" + (f", {repeats} in conversations" if repeats else "")


def _recipe(config: TrainConfig, training: Mapping[str, Any]) -> str:
    of_texts = training["tokens"] - config.chat_steps * config.tokens_per_step
    return f"""## Recipe

{training["steps"]:,} steps of {config.batch_size} x {config.sequence_length} tokens
({_amount(training["tokens"], of_texts / training["epoch_tokens"])}), Muon on the matrices (peak {config.matrix_lr})
and AdamW on the rest (peak {config.adam_lr}), {config.warmup_steps} steps of warm-up, {config.decay_steps} of linear
decay, weight decay {config.weight_decay}, gradients clipped at {config.grad_clip}, computed in
{training["precision"]}; seed {config.seed}, commit `{training["commit"][:12]}`.
{training["hardware"]}: {_duration(training["seconds"])}.

{_choices(config)}![loss curve]({LOSS_CURVE_FILE})

{_final_loss(config, training)}"""


def _choices(config: TrainConfig) -> str:
    """Describe the optional training methods that the recipe uses."""
    parts = []
    if config.mask_documents:
        parts.append("Attention stays within a document.")
    if config.dropout:
        parts.append(f"Dropout of {config.dropout} on what each half of a block adds.")
    if config.chat_steps:
        parts.append(f"The last {config.chat_steps:,} steps learn conversations, and of these what the assistant says.")
    return textwrap.fill(" ".join(parts), 120) + "\n\n" if parts else ""


def _final_loss(config: TrainConfig, training: Mapping[str, Any]) -> str:
    """Describe the final training loss; empty if the log of the run is missing."""
    averaged = training["final_loss_steps"]
    if not averaged:
        return ""
    which = f"the mean of the last {averaged} steps" if averaged > 1 else "its only step"
    of = ", of the chat phase" if config.chat_steps >= averaged else ""
    return f"Training loss at the end, {which}{of}: {training['final_loss']:.4f} nats a token.\n"


def _amount(tokens: int, epochs: float) -> str:
    counted = f"{tokens / 1e6:.1f} million" if tokens >= 1_000_000 else f"{tokens:,}"
    return f"{counted} tokens, {epochs:.1f} epochs" if epochs >= 1 else f"{counted} tokens, {epochs:.2g} of an epoch"


def _duration(seconds: float) -> str:
    """Format a duration in the largest unit of which it has at least two."""
    if seconds >= 7200.0:
        return f"{seconds / 3600.0:.1f} hours"
    if seconds >= 120.0:
        return f"{seconds / 60.0:.0f} minutes"
    return f"{seconds:.1f} seconds"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _quote(text: str) -> str:
    return text.rstrip().replace("\n", "\n> ")
