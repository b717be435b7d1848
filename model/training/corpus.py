"""What a run learns from: texts read and split, their tokenizer, and the windows cut from them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.native import SPEC_FILE, load_native, save_native
from model.training.bpe import train_bpe
from model.training.config import TrainConfig
from model.training.data import CorpusError, Source, TrainingData, encode_documents, read_source, remove_held_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """What is learned from: the sources, their tokenizer, and the windows cut from their texts."""

    sources: list[Source]
    tokenizer: ByteLevelTokenizer
    data: TrainingData


def read_corpus(config: TrainConfig, directory: Path, report: Callable[[str], None]) -> Corpus:
    """Read the sources, take the tokenizer out of `directory` or learn it and put it there, and tokenize.

    Raises:
        CorpusError: a corpus cannot be used, or is too small for the vocabulary.
        ValueError: the directory's tokenizer does not fit the recipe.
    """
    sources = remove_held_out([read_source(source) for source in config.sources])
    tokenizer = _tokenizer(config, sources, directory, report)
    documents = [ids for source in sources for ids in encode_documents(tokenizer, source.train)]
    repeats = [source.config.repeats for source in sources for _ in source.train]
    data = TrainingData(documents=documents, repeats=repeats, sequence_length=config.sequence_length, seed=config.seed)
    epochs = config.steps * config.tokens_per_step / data.num_tokens
    report(f"{data.num_tokens:,} tokens an epoch, {epochs:.1f} epochs; {config.model.num_parameters:,} parameters")
    return Corpus(sources=sources, tokenizer=tokenizer, data=data)


def _tokenizer(
    config: TrainConfig, sources: list[Source], directory: Path, report: Callable[[str], None]
) -> ByteLevelTokenizer:
    """The run's tokenizer: learned from the training documents the first time, read afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SPEC_FILE).exists():  # the spec is written last
        report(f"learning a tokenizer of {config.vocab_size:,} tokens")
        learned = train_bpe((text for source in sources for text in source.train), config.vocab_size)
        save_native(learned, directory)
    tokenizer = load_native(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"{directory}: its tokenizer has {tokenizer.vocab_size} tokens, not {config.vocab_size}")
    if tokenizer.vocab_size < config.vocab_size:
        # Otherwise the model had rows for tokens that no text holds, and could draw one.
        size = tokenizer.vocab_size
        raise CorpusError(f"the texts give no more than {size} tokens: set vocab_size = {size}, or give more text")
    return tokenizer
