"""Small tokenizer.json files made by the tokenizers library: byte-level BPE and SentencePiece style."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TALES = (Path(__file__).parents[1] / "data" / "aesop.txt").read_text()[:40_000]
END = "<|endoftext|>"


def write_byte_level(directory: Path, vocab_size: int) -> Tokenizer:
    """Write a tokenizer.json like GPT-2's: every byte is a token, and no BOS token is put before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TALES], trainer)
    return _save(tokenizer, directory, {"eos_token": END})


def write_sentence_piece(directory: Path, vocab_size: int) -> Tokenizer:
    """Write a tokenizer.json like Llama 2's: spaces are ▁, byte fallback, and <s> is put before a text."""
    marks = ["<unk>", "<s>", "</s>"]
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(TALES.split("\n"), trainer)
    values = json.loads(tokenizer.to_str())
    # The bytes are ordinary tokens of the model, not added ones.
    values["added_tokens"] = [entry for entry in values["added_tokens"] if entry["content"] in marks]
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokens.index("<s>"))]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return _save(tokenizer, directory, config)


def _save(tokenizer: Tokenizer, directory: Path, config: dict[str, Any]) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
