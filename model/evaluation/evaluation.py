"""All metrics of one checkpoint, for the model card and for `kvasir eval`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from model.evaluation.cloze import cloze_accuracy, cloze_questions
from model.evaluation.likelihood import HeldOut, evaluate
from model.evaluation.minimal_pairs import Pair, PairScore, accuracy, by_group, score_pairs
from model.evaluation.prompts import TEMPERATURES, Diversity, Sample, Sampler
from model.nn.transformer import Transformer
from model.tokenizer.interface import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Metrics of a checkpoint. A metric that was not measured is empty.

    held_out: scores of held-out texts, by name of the split. cloze: number of questions and accuracy, by split. pairs:
    scores of minimal pairs. diversity: of completions, by temperature. looping_share: see `Sampler`. samples:
    completions of the sample prompts.
    """

    held_out: Mapping[str, HeldOut] = field(default_factory=dict)
    cloze: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    pairs: Sequence[PairScore] = ()
    diversity: Sequence[Diversity] = ()
    looping_share: float | None = None
    samples: Sequence[Sample] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON values: totals of each split, of all minimal pairs and of each group of pairs."""
        groups = {name: _pairs_facts(scores) for name, scores in by_group(self.pairs).items()}
        return {
            "held_out": {name: _held_out_facts(measured) for name, measured in self.held_out.items()},
            "cloze": {name: {"questions": num, "accuracy": share} for name, (num, share) in self.cloze.items()},
            "pairs": {**_pairs_facts(self.pairs), "groups": groups} if self.pairs else None,
            "diversity": [asdict(diversity) for diversity in self.diversity],
            "looping_share": self.looping_share,
            "samples": [asdict(sample) for sample in self.samples],
        }


def _held_out_facts(measured: HeldOut) -> dict[str, Any]:
    return {
        "bits_per_byte": measured.bits_per_byte,
        "nats_per_token": measured.nats_per_token,
        "accuracy": measured.accuracy,
        "documents": len(measured.documents),
        "tokens": measured.total.num_tokens,
        "bytes": measured.num_bytes,
    }


def _pairs_facts(scores: Sequence[PairScore]) -> dict[str, Any]:
    return {"accuracy": accuracy(scores), "pairs": len(scores)}


def evaluate_checkpoint(
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    splits: Mapping[str, Sequence[str]],
    pairs: Sequence[Pair] = (),
    sampler: Sampler | None = None,
    max_context_length: int | None = None,
    has_cloze: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Measure a loaded checkpoint, and report a progress line before each measurement.

    splits: held-out texts by name of the split; an empty split is skipped. sampler: completes the sample prompts; None:
    no samples and no diversity. max_context_length: see `evaluate`. has_cloze: ask for the last word of held-out texts,
    and measure loops of greedy completions.

    Raises:
        ValueError: a sentence of a pair exceeds the model's context, or the tokenizer cannot encode a text.
    """
    held_out = {}
    for name, texts in splits.items():
        if texts:
            report(f"measuring {len(texts):,} documents of {name}")
            held_out[name] = evaluate(model, tokenizer, texts, max_context_length=max_context_length)
    cloze = {}
    for name, texts in splits.items() if has_cloze else ():
        if questions := cloze_questions(texts):
            report(f"asking for the last word of {len(questions):,} documents of {name}")
            cloze[name] = len(questions), cloze_accuracy(model, tokenizer, questions)
    scores: list[PairScore] = []
    if pairs:
        report(f"measuring {len(pairs):,} minimal pairs")
        scores = score_pairs(model, tokenizer, pairs)
    diversity: list[Diversity] = []
    samples: list[Sample] = []
    looping_share = None
    if sampler is not None:
        report("completing the sample prompts")
        samples = sampler.shown()
        for temperature in TEMPERATURES if sampler.draws else ():
            report(f"sampling completions at temperature {temperature}")
            diversity.append(sampler.diversity(temperature))
        if has_cloze:
            report("completing the sample prompts greedily")
            looping_share = sampler.looping_share()
    return Evaluation(
        held_out=held_out, cloze=cloze, pairs=scores, diversity=diversity, looping_share=looping_share, samples=samples
    )
