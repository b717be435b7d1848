"""Sample prompts of model cards, their completions, and the diversity of completions.

Diversity counts words instead of tokens, so that models with different tokenizers can be compared. A text in a script
without spaces is not split into words.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from model.chat.template import PLAIN_SOURCE, ChatTemplate, load_chat_template
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.bos_eos import read_tokenizer_config
from model.tokenizer.interface import StreamDecoder, Tokenizer

TEMPERATURES = (0.5, 0.8, 1.0)
SHOWN_TEMPERATURE, SHOWN_TOP_P, SHOWN_TOKENS = 0.8, 0.95, 200
COUNTED_TOKENS, DRAWS = 128, 4
# Share of repeated 4-grams above which a completion counts as a loop.
_LOOP = 0.5
_WORD = re.compile(r"\w+(?:['’]\w+)*")


class PromptKind(StrEnum):
    """Kind of a prompt of `PROMPTS`: CHAT is a user message to reply to, other kinds are texts to continue."""

    STORY = "story"
    FACT = "fact"
    DIALOGUE = "dialogue"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text to complete for a model card, or a user message to reply to. kind: None if not one of `PROMPTS`."""

    kind: PromptKind | None
    text: str


# Fixed, so that model cards can be compared. The prompts are never selected by a model's completions.
PROMPTS = (
    Prompt(PromptKind.STORY, "Once upon a time, there was a little girl named Lily."),
    Prompt(PromptKind.STORY, "One day, a small dog found a red ball in the park."),
    Prompt(PromptKind.STORY, "The old king had three sons."),
    Prompt(PromptKind.STORY, "In a dark forest there lived a witch who"),
    Prompt(PromptKind.STORY, "Tom and his sister wanted to build a boat."),
    Prompt(PromptKind.STORY, "A hungry fox met a clever crow. The fox said,"),
    Prompt(PromptKind.STORY, "It was raining, and Ben could not go outside."),
    Prompt(PromptKind.STORY, "Long ago, a poor fisherman lived by the sea with his wife."),
    Prompt(PromptKind.STORY, "Grandma opened the old box. Inside it was"),
    Prompt(PromptKind.STORY, "The little bird was afraid to fly."),
    Prompt(PromptKind.FACT, "The capital of France is"),
    Prompt(PromptKind.FACT, "The Sun is"),
    Prompt(PromptKind.FACT, "A cat is a small animal that"),
    Prompt(PromptKind.FACT, "The largest ocean on Earth is"),
    Prompt(PromptKind.FACT, "Albert Einstein was"),
    Prompt(PromptKind.FACT, "Water is made of"),
    Prompt(PromptKind.FACT, "The heart is an organ that"),
    Prompt(PromptKind.FACT, "Africa is a continent"),
    Prompt(PromptKind.FACT, "A bicycle is"),
    Prompt(PromptKind.FACT, "The First World War began in"),
    Prompt(PromptKind.DIALOGUE, "User: I want to book a table at a restaurant.\nAssistant:"),
    Prompt(PromptKind.DIALOGUE, "User: What is the weather like in London today?\nAssistant:"),
    Prompt(PromptKind.DIALOGUE, '"Where are you going?" asked the bear.'),
    Prompt(PromptKind.DIALOGUE, '"I am so sorry," said Anna.'),
    Prompt(PromptKind.DIALOGUE, "User: Can you find me a film to watch tonight?\nAssistant:"),
    Prompt(PromptKind.DIALOGUE, '"Can I play with you?" asked Max.'),
    Prompt(PromptKind.DIALOGUE, '"Look!" cried the boy. "There is a dragon in the garden!"'),
    Prompt(PromptKind.CHAT, "Hello! Who are you?"),
    Prompt(PromptKind.CHAT, "Tell me a short story about a cat."),
    Prompt(PromptKind.CHAT, "What is the Moon?"),
    Prompt(PromptKind.CHAT, "I need a taxi to the airport."),
    Prompt(PromptKind.CHAT, "Write a story about a brave little mouse."),
    Prompt(PromptKind.CHAT, "What is your name?"),
    Prompt(PromptKind.CHAT, "I like football. Do you like it too?"),
    Prompt(PromptKind.CHAT, "I am a little sad today."),
    Prompt(PromptKind.CHAT, "What will the weather be tomorrow?"),
    Prompt(PromptKind.CHAT, "Why do birds have feathers?"),
    Prompt(PromptKind.CHAT, "Tell me something about elephants."),
    Prompt(PromptKind.CHAT, "Can you help me find a restaurant?"),
    Prompt(PromptKind.CHAT, "Thank you! Goodbye!"),
)


def read_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a checkpoint directory, with the names of its special tokens, as the service does.

    Without a template in the directory, this is the plain template (`PLAIN_SOURCE`).
    """
    template = load_chat_template(directory)
    if template is None:
        template = ChatTemplate(source=PLAIN_SOURCE, origin="plain")
    marks = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    own = {name: tokenizer.format_token_name(token_id) for name, token_id in marks.items() if token_id is not None}
    return dataclasses.replace(template, special_tokens={**own, **read_tokenizer_config(directory).roles})


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Return a prompt's token ids as the service encodes it: a text after BOS, a user message by the chat template."""
    if prompt.kind is PromptKind.CHAT:
        rendered = template.render([{"role": "user", "content": prompt.text}])
        return tokenizer.encode(rendered, parse_special=True)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*begin, *tokenizer.encode(prompt.text)]


# Function that returns the token ids of each prompt's completion, including the stop token.
Complete = Callable[[Transformer, Tokenizer, Sequence[Sequence[int]], Sequence[SamplingParams]], list[list[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Prompt with its completion, for a model card or `kvasir eval`. kind: None if not one of `PROMPTS`."""

    prompt: str
    completion: str
    kind: PromptKind | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diversity:
    """Diversity of the words of completions at one temperature. A value is None if all completions are too short.

    distinct: distinct-1, distinct-2 and distinct-3. repetition: mean of the `repetition` of each completion.
    """

    temperature: float
    num_samples: int
    num_words: int
    distinct: tuple[float | None, float | None, float | None]
    repetition: float | None


def complete_one_by_one(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Return the token ids that the reference implementation generates for each prompt: slow, without a KV-cache.

    Another `Complete` function, such as the engine's, must return equal ids.
    """
    eos = tokenizer.eos_token_ids
    return [generate(model, ids, wanted, eos_token_ids=eos) for ids, wanted in zip(prompts, params, strict=True)]


class Sampler:
    """Sampler of completions of `prompts`. A prompt that is empty or fills the model's whole context is skipped.

    directory: checkpoint directory, which may have a chat template. draws: number of completions of each prompt at each
    temperature for `diversity`; 0 if diversity is not measured.

    Raises:
        CheckpointError, TemplateFailure: the checkpoint's chat template cannot be used.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        directory: Path,
        complete: Complete,
        *,
        prompts: Sequence[Prompt] = PROMPTS,
        draws: int = DRAWS,
    ) -> None:
        self._model = model
        self.draws = draws
        self._tokenizer = tokenizer
        self._complete = complete
        template = read_template(directory, tokenizer)
        encoded = ((prompt, prompt_ids(prompt, tokenizer, template)) for prompt in prompts)
        context = model.config.max_context_length
        self._prompts: list[tuple[Prompt, list[int]]] = [(p, ids) for p, ids in encoded if 0 < len(ids) < context]

    def shown(self) -> list[Sample]:
        """Return one completion of each prompt, sampled with the `SHOWN_*` parameters and seed 0."""
        texts = self._completions([0] * len(self._prompts), SHOWN_TOKENS, SHOWN_TEMPERATURE, SHOWN_TOP_P)
        shown = zip(self._prompts, texts, strict=True)
        return [Sample(prompt=prompt.text, completion=text, kind=prompt.kind) for (prompt, _), text in shown]

    def diversity(self, temperature: float) -> Diversity:
        """Measure the diversity of completions of all prompts, sampled at this temperature without top_p and top_k."""
        seeds = [draw * len(PROMPTS) + i for draw in range(self.draws) for i in range(len(self._prompts))]
        return measure_diversity(temperature, self._completions(seeds, COUNTED_TOKENS, temperature, top_p=1.0))

    def looping_share(self) -> float | None:
        """Return the share of greedy completions in which over half of the word 4-grams are repeated.

        Returns None if all completions are shorter than four words.
        """
        texts = self._completions([0] * len(self._prompts), COUNTED_TOKENS, temperature=0.0, top_p=1.0)
        repeated = [share for text in texts if (share := repetition(words(text))) is not None]
        return sum(share > _LOOP for share in repeated) / len(repeated) if repeated else None

    def _completions(self, seeds: Sequence[int], max_tokens: int, temperature: float, top_p: float) -> list[str]:
        """Return one completion for each seed. The prompts are used in turn, again from the first after the last."""
        prompts = [self._prompts[number % len(self._prompts)][1] for number in range(len(seeds))]
        context = self._model.config.max_context_length
        params = [
            SamplingParams(
                max_tokens=min(max_tokens, context - len(ids)), temperature=temperature, top_p=top_p, seed=seed
            )
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        return [self._text(ids) for ids in self._complete(self._model, self._tokenizer, prompts, params)]

    def _text(self, token_ids: list[int]) -> str:
        decoder = StreamDecoder(self._tokenizer)
        return decoder.push(token_ids) + decoder.flush()


def measure_diversity(temperature: float, texts: Sequence[str]) -> Diversity:
    """Measure the diversity of texts sampled at one temperature."""
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
    """Return the words of a text in lower case: runs of letters, digits and underscores; "don't" is one word."""
    return _WORD.findall(text.lower())


def distinct(samples: Iterable[Sequence[str]], n: int) -> float | None:
    """Return distinct-n of samples (lists of words): unique n-grams / n-grams of all samples; None without n-grams.

    Source: Li et al. 2016 (arXiv 1510.03055), section 5.2. The value falls as the amount of text grows.
    """
    grams = [gram for sample in samples for gram in _grams(sample, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(sample: Sequence[str], n: int = 4) -> float | None:
    """Return seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319), section 6.1: the share of repeated word n-grams.

    Returns None for a sample of fewer than n words.
    """
    unique = distinct([sample], n)
    return None if unique is None else 1 - unique


def _grams(sample: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(itertools.islice(sample, start, None) for start in range(n)), strict=False)
