"""Training data of a run: sources, tokenizer, and the mixtures of its two phases."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.chat.chatml import supports_chatml
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.native import SPEC_FILE, load_native, save_native
from model.training.config import TrainConfig
from model.training.data.bpe import train_bpe
from model.training.data.contamination import leave_out_held_out
from model.training.data.conversations import conversation, encode_conversation
from model.training.data.mixture import Mixture, TokenizedSource
from model.training.data.packing import ROUND_BATCHES, Batches
from model.training.data.sources import CorpusError, Source, read_source

_PRETRAINING, _CHAT = 0, 1  # seed tags, so that the phases shuffle differently
_STREAM_BATCHES = ROUND_BATCHES // 8  # piece length, in batches, for a token stream: a round holds several pieces


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sources, their tokenizer, and the token mixtures of the two phases.

    texts: the tokenized training documents of each source.
    """

    config: TrainConfig
    sources: list[Source]
    tokenizer: ByteLevelTokenizer
    texts: list[TokenizedSource]

    @functools.cached_property
    def pretraining(self) -> Mixture:
        """Mixture of the pretraining phase: plain texts."""
        return self._mixture(self._repeated([source.config.repeats for source in self.sources]), _PRETRAINING)

    @functools.cached_property
    def chat(self) -> Mixture:
        """Mixture of the chat phase: conversations, and plain texts of the sources without `chat`."""
        texts = self._repeated([source.config.chat_repeats for source in self.sources])
        has_chat = [source.config.chat != "" for source in self.sources]
        return self._mixture(
            [
                self._conversations(source) if is_chat else text
                for source, text, is_chat in zip(self.sources, texts, has_chat, strict=True)
            ],
            _CHAT,
        )

    def batches(self, mixture: Mixture) -> Batches:
        """Return the batches of a mixture."""
        config = self.config
        return Batches(
            mixture,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            documents=config.mask_documents,
        )

    def _mixture(self, sources: Sequence[TokenizedSource], tag: int) -> Mixture:
        config = self.config
        length = config.sequence_length if config.mask_documents else _STREAM_BATCHES * config.tokens_per_step
        round_length = ROUND_BATCHES * config.tokens_per_step
        return Mixture(sources, piece_length=length, round_length=round_length, seed=config.seed, tag=tag)

    def _repeated(self, repeats: Sequence[float]) -> list[TokenizedSource]:
        return [dataclasses.replace(text, repeats=count) for text, count in zip(self.texts, repeats, strict=True)]

    def _conversations(self, source: Source) -> TokenizedSource:
        conversations = (
            conversation(document.record, source.config.chat, seed)
            for seed in range(self.config.seed, self.config.seed + source.config.chat_draws)
            for document in source.train
            if source.config.chat_repeats
        )
        encoded = (encode_conversation(self.tokenizer, turns) for turns in conversations if turns is not None)
        return _tokenized(encoded, source.config.chat_repeats)


def _tokenized(documents: Iterable[tuple[Sequence[int], Sequence[bool] | None]], repeats: float) -> TokenizedSource:
    ids: list[np.ndarray[tuple[int], np.dtype[np.uint16]]] = []
    trained: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    for token_ids, is_trained in documents:
        ids.append(np.array(token_ids, dtype=np.uint16))
        if is_trained is not None:
            trained.append(np.array(is_trained, dtype=np.bool_))
    return TokenizedSource(
        token_ids=np.concatenate(ids) if ids else np.zeros(0, dtype=np.uint16),
        starts=np.cumsum([0, *map(len, ids)]),
        trained=np.concatenate(trained) if trained else None,
        repeats=repeats,
    )


def read_corpus(config: TrainConfig, directory: Path, report: Callable[[str], None]) -> Corpus:
    """Read and tokenize the sources. The tokenizer is loaded from `directory`, or trained and saved there.

    Raises:
        CorpusError: a corpus cannot be used, or is too small for the vocabulary.
        ValueError: the tokenizer in `directory` does not match the recipe.
    """
    sources = leave_out_held_out([read_source(source) for source in config.sources])
    for source in sources:
        if source.left_out:
            report(f"{source.config.name}: {source.left_out:,} documents left out because they quote held-out texts")
    if config.chat_steps:
        _check_conversations(sources)
    tokenizer = _tokenizer(config, sources, directory, report)
    corpus = Corpus(
        config=config, sources=sources, tokenizer=tokenizer, texts=[_texts(tokenizer, source) for source in sources]
    )
    total = corpus.pretraining.epoch_length
    epochs = config.chat_start * config.tokens_per_step / total
    report(f"{total:,} tokens per epoch, {epochs:.1f} epochs; {config.model.num_parameters:,} parameters")
    return corpus


def _check_conversations(sources: Iterable[Source]) -> None:
    """Check early that each chat source yields a conversation, since the chat phase comes last.

    Raises:
        CorpusError: a source yields no conversation.
    """
    for source in sources:
        kind = source.config.chat
        if source.config.chat_repeats and kind:
            try:
                has_conversation = any(conversation(document.record, kind, 0) for document in source.train)
            except (KeyError, TypeError, ValueError) as error:
                said = f"a record has no {error}" if isinstance(error, KeyError) else str(error)
                raise CorpusError(f"{source.config.path}: not a source of chat = {kind!r}: {said}") from error
            if not has_conversation:
                raise CorpusError(f"{source.config.path}: no document yields a conversation; remove chat = {kind!r}")


def _texts(tokenizer: ByteLevelTokenizer, source: Source) -> TokenizedSource:
    """Tokenize the training documents as plain text, each between two end-of-text tokens."""
    bos = tokenizer.bos_token_id
    assert bos is not None  # `train_bpe` always sets it
    is_chat_only = source.config.chat and not source.config.repeats
    documents = [] if is_chat_only else source.train
    return _tokenized((([bos, *tokenizer.encode(document.text), bos], None) for document in documents), 1.0)


def _tokenizer(
    config: TrainConfig, sources: list[Source], directory: Path, report: Callable[[str], None]
) -> ByteLevelTokenizer:
    """Load the tokenizer of the run, or train it on the training documents."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SPEC_FILE).exists():  # the spec is written last
        report(f"training a tokenizer of {config.vocab_size:,} tokens")
        texts = (document.text for source in sources if source.config.repeats for document in source.train)
        save_native(train_bpe(texts, config.vocab_size, chat=config.chat_steps > 0), directory)
    tokenizer = load_native(directory)
    if config.chat_steps and not supports_chatml(tokenizer.special_tokens):
        raise ValueError(
            f"{directory}: the run began without conversations, and its tokenizer has no ChatML tokens; set "
            f"chat_steps = 0, or use another --run-directory"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"{directory}: its tokenizer has {tokenizer.vocab_size} tokens, not {config.vocab_size}")
    if tokenizer.vocab_size < config.vocab_size:
        # Otherwise the model could sample token ids that the tokenizer does not have.
        size = tokenizer.vocab_size
        raise CorpusError(f"the texts yield only {size} tokens: set vocab_size = {size}, or give more text")
    return tokenizer
