"""Model card (MODEL_CARD.md) and loss curve of a finished run."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from model.evaluation.evaluation import Evaluation
from model.evaluation.likelihood import HeldOut
from model.evaluation.prompts import COUNTED_TOKENS, SHOWN_TEMPERATURE, SHOWN_TOP_P, Diversity, PromptKind, Sample
from model.training.config import TrainConfig, chosen_values
from model.training.corpus import RUN_WORDS
from model.training.state import duration

LOSS_CURVE_FILE = "loss.png"
_VALUES = "key | value"


def draw_loss_curve(path: Path, log: list[dict[str, float]], tokens_per_step: int) -> None:
    """Plot the training loss (per step, and smoothed over 50 steps) and the held-out loss of a run, as PNG."""
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


def write_model_card(path: Path, config: TrainConfig, training: Mapping[str, Any], evaluation: Evaluation) -> None:
    """Write the model card in Markdown. What has no data (loss curve, held-out texts, samples) is left out."""
    introduction = (
        f"A decoder-only transformer of {config.model.num_parameters:,} parameters, trained from scratch by "
        f"`kvasir train` in this repository. {config.description}"
    )
    sections = [
        f"# {config.name}",
        textwrap.fill(introduction.strip(), 120),
        "## Architecture",
        _table(_VALUES, chosen_values(config.model).items()),
        "## Data",
        *_data(config, training),
        "## Recipe",
        _table(_VALUES, _recipe(config, training).items()),
        *_start(config, training),
        *([f"![loss curve]({LOSS_CURVE_FILE})"] if (path.parent / LOSS_CURVE_FILE).exists() else []),
        *_held_out(evaluation.held_out, training),
        *_suite(training),
        *_diversity(evaluation.diversity),
        *_samples(evaluation.samples),
    ]
    path.write_text("\n\n".join(sections) + "\n")


def _table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. columns: names of the columns, separated by " | "."""
    head = f"| {columns} |\n|{'---|' * len(columns.split('|'))}"
    return "\n".join([head, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _data(config: TrainConfig, training: Mapping[str, Any]) -> Iterator[str]:
    """Yield the card's table of sources, with the attributions that licences require, and facts about the texts.

    The last rows are sources of earlier runs, whose weights the run started from.
    """
    earlier = [source for start in _starts(training) for source in start["sources"]]
    own = training["sources"]
    rows = []
    for number, source in enumerate([*own, *earlier]):
        is_own = number < len(own)
        chat_repeats = source.get("chat_repeats", 0) if config.chat_steps or not is_own else 0
        repeats = f"{source['repeats']:g}" + (f", {chat_repeats:g} in the chat phase" if chat_repeats else "")
        repeats += "" if is_own else ", in an earlier run"
        counts = (f"{source['documents']:,}", repeats, f"{source['held_out_documents']:,}")
        attribution = source.get("attribution", "").replace("|", "\\|").replace("\n", " ")
        rows.append((source["name"], *counts, source["licence"], attribution, f"`{source['sha256'][:16]}`"))
    yield _table("source | documents | repeats an epoch | held out | licence | attribution | SHA-256", rows)
    facts = f"{training['epoch_tokens']:,} tokens an epoch."
    if any(source["held_out_documents"] for source in own):
        of_run = " of this run" if "started_from" in training else ""
        facts += f" No training document{of_run} equals a held-out text or shares {RUN_WORDS} words in a row with one."
    facts += " The weights are a result computed from these texts and contain none of the files."
    yield textwrap.fill(facts, 120)


def _recipe(config: TrainConfig, training: Mapping[str, Any]) -> dict[str, object]:
    """Return the card's recipe table: values that differ from their defaults, and measurements of the run."""
    chat_tokens = 0 if config.is_all_chat else config.chat_steps * config.tokens_per_step
    epochs = (training["tokens"] - chat_tokens) / training["epoch_tokens"]
    hidden = ("name", "description", "model", "sources", "vocab_size", "sample_prompts", "checkpoint_minutes")
    rows = {key: value for key, value in chosen_values(config).items() if key not in hidden}
    if config.start_from:
        rows["start_from"] = ", ".join(path.name for path in config.start_from)
    rows["tokens"] = f"{training['tokens']:,} ({epochs:.2g} epochs)"
    if training["final_loss_steps"]:  # 0 if the log of the run is missing
        mean = f"mean of the last {training['final_loss_steps']} steps"
        rows["final training loss"] = f"{training['final_loss']:.4f} nats per token, {mean}"
    rows["duration of the steps"] = f"{duration(training['seconds'])} on {training['hardware']}"
    return rows | {"precision": training["precision"], "commit": f"`{training['commit'][:12]}`"}


def _starts(training: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the facts of the checkpoint that the run started from, of the one that this started from, and so on."""
    start = training.get("started_from")
    while start is not None:
        yield start
        start = start.get("started_from")


def _start(config: TrainConfig, training: Mapping[str, Any]) -> Iterator[str]:
    """Yield the earlier runs that the weights come from, and the tokens of all runs."""
    starts = list(_starts(training))
    if starts:
        sentences = []
        for number, start in enumerate(starts):
            figures = [
                *([f"{_millions(start['tokens'])} tokens"] if "tokens" in start else []),
                *([f"{duration(start['seconds'])} of steps"] if "seconds" in start else []),
                *([f"commit `{start['commit'][:12]}`"] if "commit" in start else []),
            ]
            run = f"a checkpoint named {start['name']}"
            if "steps" in start:
                run = f"a run of {start['steps']:,} step{'' if start['steps'] == 1 else 's'}"
            mean = "a mean of weights, first those" if len(config.start_from) > 1 else "the weights"
            began = "That one started from the weights" if number else f"Starts from {mean}"
            sentences.append(f"{began} of {run}" + (f" ({', '.join(figures)})." if figures else "."))
        if all("tokens" in start for start in starts):
            tokens = training["tokens"] + sum(start["tokens"] for start in starts)
            sentences.append(f"{_millions(tokens)} tokens in all.")
        yield textwrap.fill(" ".join(sentences), 120)


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{number:,}"


def _held_out(measured: Mapping[str, HeldOut], training: Mapping[str, Any]) -> Iterator[str]:
    if measured:
        yield "## Held-out texts"
        before = training.get("started_from", {}).get("held_out_bits_per_byte", {})
        note = " Before: the checkpoint that the run started from." if before else ""
        yield f"Measured on the bfloat16 files, in float32 arithmetic.{note}"
        rows = (
            (
                *(name, f"{len(m.documents):,}"),
                *([f"{before[name]:.4f}" if name in before else "–"] if before else []),
                *(f"{m.bits_per_byte:.4f}", f"{m.nats_per_token:.4f}", f"{m.accuracy:.1%}"),
            )
            for name, m in measured.items()
        )
        columns = f"source | documents | {'before | ' if before else ''}bits per byte | nats per token | top-1 accuracy"
        yield _table(columns, rows)


def _suite(training: Mapping[str, Any]) -> Iterator[str]:
    """Yield the totals of the suite, beside those of the checkpoint that the run started from if it has any."""
    if "suite" in training:
        yield "## Suite"
        before = _suite_rows(training.get("started_from", {}).get("suite", {}))
        note = " Before: the checkpoint that the run started from." if before else ""
        yield f"`kvasir eval --suite shipped`, as `docs/evaluation.md` describes it.{note}"
        rows = (
            (name, *([before.get(name, "–")] if before else []), now)
            for name, now in _suite_rows(training["suite"]).items()
        )
        yield _table(f"measurement | {'before | ' if before else ''}this model", rows)


def _suite_rows(suite: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a suite by a description, which has the number of texts: other texts are another figure."""
    rows = {}
    if pairs := suite.get("pairs"):
        rows[f"minimal pairs, {pairs['pairs']:,}: right"] = f"{pairs['accuracy']:.1%}"
    for name, cloze in suite.get("cloze", {}).items():
        rows[f"last word among five, {cloze['questions']:,} of {name}: right"] = f"{cloze['accuracy']:.1%}"
    if suite.get("looping_share") is not None:
        rows["greedy completions that loop"] = f"{suite['looping_share']:.1%}"
    for measured in suite.get("diversity", ()):
        if measured["repetition"] is not None:
            name = f"repetition at temperature {measured['temperature']}, {measured['num_samples']:,} samples"
            rows[name] = f"{measured['repetition']:.3f}"
    return rows


def _diversity(measured: Sequence[Diversity]) -> Iterator[str]:
    if measured:
        yield "## Diversity of samples"
        text = (
            f"{measured[0].num_samples} completions of the fixed prompts at each temperature, of at most "
            f"{COUNTED_TOKENS} tokens (top-p 1). distinct-n: share of different word n-grams (Li et al. 2016). "
            "Repetition: share of 4-grams that occurred earlier in the same sample (seq-rep-4, Welleck et al. 2020)."
        )
        yield textwrap.fill(text, 120)
        rows = (
            (
                m.temperature,
                f"{m.num_words:,}",
                *("–" if x is None else f"{x:.3f}" for x in (*m.distinct, m.repetition)),
            )
            for m in measured
        )
        yield _table("temperature | words | distinct-1 | distinct-2 | distinct-3 | repetition", rows)


def _samples(samples: Sequence[Sample]) -> Iterator[str]:
    if samples:
        yield "## Samples"
        fixed = "; every model card has these prompts, see `model/evaluation/prompts.py`" if samples[0].kind else ""
        yield f"Temperature {SHOWN_TEMPERATURE}, top-p {SHOWN_TOP_P}, one sample of each prompt{fixed}."
    kind = None
    for sample in samples:
        if sample.kind != kind:
            kind = sample.kind
            yield f"### Kind of prompt: {kind}"
        gap = " " if kind is PromptKind.CHAT else ""
        yield f"> **{_quote(sample.prompt)}**{gap}{_quote(sample.completion)}"


def _quote(text: str) -> str:
    return text.rstrip().replace("\n", "\n> ")
