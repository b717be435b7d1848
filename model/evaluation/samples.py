"""Completions of the fixed prompts: a few to show, and many to measure diversity.

Diversity counts words instead of tokens, so that models with different tokenizers can be compared. A word is a
lower-case run of letters, digits and underscores; "don't" is one word. Text in a script without spaces is not split
into words.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.evaluation.prompts import PROMPTS, Prompt, PromptKind, prompt_ids, read_template
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.interface import StreamDecoder, Tokenizer

TEMPERATURES = (0.5, 0.8, 1.0)
SHOWN_TEMPERATURE, SHOWN_TOP_P, SHOWN_TOKENS = 0.8, 0.95, 200
COUNTED_TOKENS, DRAWS = 128, 4
REPEATED_N = 4
_WORD = re.compile(r"\w+(?:['’]\w+)*")

# Function that returns the token ids of each prompt's completion, including the stop token.
Complete = Callable[[Transformer, Tokenizer, Sequence[Sequence[int]], Sequence[SamplingParams]], list[list[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt and its completion.

    kind: kind of a fixed prompt; None for any other prompt.
    """

    prompt: str
    completion: str
    kind: PromptKind | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diversity:
    """Diversity of the samples at one temperature.

    distinct: distinct-1, distinct-2 and distinct-3.
    repetition: mean of `repetition` over the samples that have enough words.

    A value is None if no sample has enough words for it.
    """

    temperature: float
    num_samples: int
    num_words: int
    distinct: tuple[float | None, float | None, float | None]
    repetition: float | None


def complete_one_by_one(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Reference implementation of `Complete`: slow, without a KV cache. An engine must return equal completions."""
    eos = tokenizer.eos_token_ids
    return [generate(model, ids, wanted, eos_token_ids=eos) for ids, wanted in zip(prompts, params, strict=True)]


class Sampler:
    """Sampler of completions of the fixed prompts.

    Prompts that leave no room in the context for a new token are skipped, and so are prompts without tokens.

    Args:
        directory: the checkpoint directory, which may have a chat template.
        complete: makes the completions.
        draws: number of completions of each prompt at each temperature, for `diversity`.

    Raises:
        CheckpointError, TemplateFailure: the checkpoint's chat template cannot be used.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, directory: Path, complete: Complete, *, draws: int = DRAWS
    ) -> None:
        self._model = model
        self._draws = draws
        self._tokenizer = tokenizer
        self._complete = complete
        template = read_template(directory, tokenizer)
        encoded = ((prompt, prompt_ids(prompt, tokenizer, template)) for prompt in PROMPTS)
        context = model.config.max_context_length
        self._prompts: list[tuple[Prompt, list[int]]] = [(p, ids) for p, ids in encoded if 0 < len(ids) < context]

    def shown(self) -> list[Sample]:
        """Return one completion of each prompt, sampled with the `SHOWN_*` parameters and seed 0."""
        texts = self._draw(
            [
                (ids, self._params(ids, SHOWN_TOKENS, temperature=SHOWN_TEMPERATURE, top_p=SHOWN_TOP_P, seed=0))
                for _, ids in self._prompts
            ]
        )
        drawn = zip(self._prompts, texts, strict=True)
        return [Sample(prompt=prompt.text, completion=text, kind=prompt.kind) for (prompt, _), text in drawn]

    def diversity(self, temperature: float) -> Diversity:
        """Measure the diversity of completions sampled at this temperature, without top_p or top_k."""
        asked = [
            (ids, self._params(ids, COUNTED_TOKENS, temperature=temperature, top_p=1.0, seed=draw * len(PROMPTS) + i))
            for draw in range(self._draws)
            for i, (_, ids) in enumerate(self._prompts)
        ]
        return measure_diversity(temperature, self._draw(asked))

    def _params(
        self, ids: list[int], max_tokens: int, *, temperature: float, top_p: float, seed: int
    ) -> SamplingParams:
        room = self._model.config.max_context_length - len(ids)
        return SamplingParams(max_tokens=min(max_tokens, room), temperature=temperature, top_p=top_p, seed=seed)

    def _draw(self, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[str]:
        """Return the text of each completion. The EOS token at its end has no text."""
        prompts, params = [ids for ids, _ in asked], [wanted for _, wanted in asked]
        completions = self._complete(self._model, self._tokenizer, prompts, params)
        return [self._text(ids) for ids in completions]

    def _text(self, token_ids: list[int]) -> str:
        decoder = StreamDecoder(self._tokenizer)
        return decoder.push(token_ids) + decoder.flush()


def measure_diversity(temperature: float, texts: Sequence[str]) -> Diversity:
    """Measure the diversity of samples that were made at one temperature."""
    samples = [words(text) for text in texts]
    repeated = [share for sample in samples if (share := repetition(sample)) is not None]
    return Diversity(
        temperature=temperature,
        num_samples=len(samples),
        num_words=sum(map(len, samples)),
        distinct=(distinct(samples, 1), distinct(samples, 2), distinct(samples, 3)),
        repetition=sum(repeated) / len(repeated) if repeated else None,
    )


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def distinct(samples: Iterable[Sequence[str]], n: int) -> float | None:
    """Return distinct-n over all samples together: unique n-grams / n-grams; None without n-grams.

    Source: Li et al. 2016 (arXiv 1510.03055), section 5.2. The value falls as the amount of text grows, so compare only
    equal numbers of samples.
    """
    grams = [gram for sample in samples for gram in _grams(sample, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(sample: Sequence[str], n: int = REPEATED_N) -> float | None:
    """Return the share of repeated n-grams in a sample: 1 - unique n-grams / n-grams; None without n-grams.

    Source: seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319), section 6.1.
    """
    unique = distinct([sample], n)
    return None if unique is None else 1 - unique


def _grams(sample: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(itertools.islice(sample, start, None) for start in range(n)), strict=False)
