"""Training data of a run: sources, tokenizer, and the batches of its two phases."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.chat.chatml import supports_chatml
from model.tokenizer.byte_level import SPEC_FILE, ByteLevelTokenizer, load_native, save_native
from model.training.config import TrainConfig
from model.training.data.batches import ROUND_BATCHES, Batches, Ids, Mixture, TokenizedSource
from model.training.data.bpe import train_bpe
from model.training.sources import TextSource, encode_conversation, leave_out_held_out, read_source

_PRETRAINING, _CHAT = 0, 1  # seed tags, so that the phases shuffle differently
_STREAM_BATCHES = ROUND_BATCHES // 8  # piece length, in batches, for a token stream: a round holds several pieces


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sources, their tokenizer, and the batches of the two phases."""

    config: TrainConfig
    sources: list[TextSource]
    tokenizer: ByteLevelTokenizer

    @functools.cached_property
    def pretraining(self) -> Batches:
        """Batches of the pretraining phase: plain texts."""
        return self.batches([self._tokenized(s, s.config.repeats) for s in self.sources], _PRETRAINING)

    @functools.cached_property
    def chat(self) -> Batches:
        """Batches of the chat phase: conversations, and the plain text of documents without turns."""
        return self.batches([self._tokenized(s, s.config.chat_repeats, chat=True) for s in self.sources], _CHAT)

    def _tokenized(self, source: TextSource, repeats: float, *, chat: bool = False) -> TokenizedSource:
        """Tokenize the training documents, each between two end-of-text tokens; none if `repeats` is 0."""
        bos = self.tokenizer.bos_token_id
        assert bos is not None  # `train_bpe` always sets it
        ids: list[Ids] = []
        trained: list[NDArray[np.bool_]] = []
        for document in source.train if repeats else []:
            if chat and document.turns == ():
                continue
            if chat and document.turns:
                token_ids, targets = encode_conversation(self.tokenizer, document.turns)
                mask = np.array(targets)
            else:
                token_ids = [bos, *self.tokenizer.encode(document.text), bos]
                mask = np.ones(len(token_ids), dtype=np.bool_)
            ids.append(np.array(token_ids, dtype=np.uint16))
            trained.append(mask)
        return TokenizedSource(
            token_ids=np.concatenate(ids or [np.zeros(0, dtype=np.uint16)]),
            starts=np.cumsum([0, *map(len, ids)]),
            trained=np.concatenate(trained or [np.zeros(0, dtype=np.bool_)]),
            repeats=repeats,
        )

    def batches(self, sources: Sequence[TokenizedSource], tag: int = _PRETRAINING) -> Batches:
        """Return the batches of tokenized sources. tag: number of the phase."""
        config = self.config
        length = config.sequence_length if config.mask_documents else _STREAM_BATCHES * config.tokens_per_step
        round_length = ROUND_BATCHES * config.tokens_per_step
        return Batches(
            Mixture(sources, piece_length=length, round_length=round_length, seed=config.seed, tag=tag),
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            documents=config.mask_documents,
        )


def read_corpus(config: TrainConfig, directory: Path, report: Callable[[str], None]) -> Corpus:
    """Read and tokenize the sources. The tokenizer is loaded from `directory`, or trained and saved there.

    Raises:
        ValueError: a corpus is unusable or too small, or `directory` holds another recipe's tokenizer.
    """
    sources = leave_out_held_out(map(read_source, config.sources))
    for source in sources:
        if source.left_out:
            report(f"{source.config.name}: {source.left_out:,} documents left out because they quote held-out texts")
        if config.chat_steps and source.config.chat_repeats and not any(d.turns != () for d in source.train):
            raise ValueError(f"{source.config.path}: no conversation has an answer; set chat_repeats = 0")
    corpus = Corpus(config=config, sources=sources, tokenizer=_tokenizer(config, sources, directory, report))
    total = corpus.pretraining.mixture.epoch_length
    epochs = config.chat_start * config.tokens_per_step / total
    report(f"{total:,} tokens per epoch, {epochs:.1f} epochs; {config.model.num_parameters:,} parameters")
    return corpus


def _tokenizer(
    config: TrainConfig, sources: Sequence[TextSource], directory: Path, report: Callable[[str], None]
) -> ByteLevelTokenizer:
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
        raise ValueError(f"the texts yield only {size} tokens: set vocab_size = {size}, or give more text")
    return tokenizer
