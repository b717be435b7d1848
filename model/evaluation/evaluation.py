"""One checkpoint, measured: what the model card and `kvasir eval` tell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from model.evaluation.diversity import Diversity
from model.evaluation.held_out import HeldOut, evaluate
from model.evaluation.pairs import Pair, PairScore, accuracy, by_group, score_pairs
from model.evaluation.samples import TEMPERATURES, Sample, Sampler
from model.tokenizer.interface import Tokenizer
from model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What was measured; what was not is empty.

    held_out: by the name of the split.
    diversity: of each temperature. samples: the fixed prompts with a completion each.
    """

    held_out: Mapping[str, HeldOut] = field(default_factory=dict)
    pairs: Sequence[PairScore] = ()
    diversity: Sequence[Diversity] = ()
    samples: Sequence[Sample] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Documents and pairs are summed up."""
        return {
            "held_out": {name: _held_out_facts(measured) for name, measured in self.held_out.items()},
            "pairs": _pairs_facts(self.pairs) if self.pairs else None,
            "diversity": [asdict(diversity) for diversity in self.diversity],
            "samples": [asdict(sample) for sample in self.samples],
        }


def _held_out_facts(measured: HeldOut) -> dict[str, Any]:
    return {
        "bits_per_byte": measured.bits_per_byte,
        "nats_per_token": measured.nats_per_token,
        "accuracy": measured.accuracy,
        "documents": len(measured.documents),
        "tokens": measured.num_tokens,
        "bytes": measured.num_bytes,
    }


def _pairs_facts(scores: Sequence[PairScore]) -> dict[str, Any]:
    groups = by_group(scores)
    return {
        "accuracy": accuracy(scores),
        "pairs": len(scores),
        "groups": {name: {"accuracy": accuracy(of), "pairs": len(of)} for name, of in groups.items()},
    }


def evaluate_checkpoint(
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    splits: Mapping[str, Sequence[str]],
    pairs: Sequence[Pair] = (),
    sampler: Sampler | None = None,
    max_context_length: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Measure a loaded checkpoint.

    Args:
        splits: held-out texts by name; empty ones are passed over.
        sampler: draws its completions; None leaves out samples and diversity.
        max_context_length: tokens a held-out text is read in at once; None for as many as the model has positions.
        report: is told what is measured next.

    Raises:
        ValueError: a sentence of a pair is longer than the context, or a text is beyond the tokenizer's means.
    """
    held_out = {}
    for name, texts in splits.items():
        if texts:
            report(f"measuring {len(texts):,} held-out documents of {name}")
            held_out[name] = evaluate(model, tokenizer, texts, max_context_length=max_context_length)
    scores: list[PairScore] = []
    if pairs:
        report(f"measuring {len(pairs):,} minimal pairs")
        scores = score_pairs(model, tokenizer, pairs)
    diversity: list[Diversity] = []
    samples: list[Sample] = []
    if sampler is not None:
        report("completing the fixed prompts")
        samples = sampler.shown()
        for temperature in TEMPERATURES:
            report(f"drawing samples at temperature {temperature}")
            diversity.append(sampler.diversity(temperature))
    return Evaluation(held_out=held_out, pairs=scores, diversity=diversity, samples=samples)
