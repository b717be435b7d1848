"""Tokenizers made with the `tokenizers` library, in the formats of common checkpoints."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.tokenizer.split_patterns import LLAMA3_PATTERN, O200K_PATTERN, QWEN_PATTERN
from tests.model.tokenizer.texts import ADVERSARIAL, stories

VOCAB_SIZE = 700


def _train(library: Tokenizer, trainer: Any) -> Tokenizer:
    clean = [text.encode("utf-8", "replace").decode() for text in ADVERSARIAL]
    library.train_from_iterator([*stories()[:60], *clean * 3], trainer)
    return library


def _byte_level(
    pattern: str | None, *, special: list[str], add_prefix_space: bool = False, nfc: bool = False
) -> Tokenizer:
    library = Tokenizer(models.BPE())
    if nfc:
        library.normalizer = normalizers.NFC()
    if pattern is None:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _train(library, trainer)


def gpt2() -> Tokenizer:
    """Return a tokenizer like GPT-2's: ByteLevel with its built-in pattern."""
    return _byte_level(None, special=["<|endoftext|>"])


def gpt2_with_prefix_space() -> Tokenizer:
    """Return a tokenizer like GPT-2's that puts a space before every text."""
    return _byte_level(None, special=["<|endoftext|>"], add_prefix_space=True)


def llama3() -> Tokenizer:
    """Return one like Llama 3's: its split pattern, whole pieces first, BOS by a template, special tokens last."""
    library = _byte_level(LLAMA3_PATTERN, special=[])
    values = json.loads(library.to_str())
    values["model"]["ignore_merges"] = True
    library = Tokenizer.from_str(json.dumps(values))
    library.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = library.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return library


def smollm3() -> Tokenizer:
    """Return one like SmolLM3's: the split pattern of Llama 3, with every piece built by merges."""
    library = _byte_level(LLAMA3_PATTERN, special=[])
    library.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    return library


def qwen() -> Tokenizer:
    """Return a tokenizer like that of Qwen 2 and 3: with NFC, and every digit a piece."""
    library = _byte_level(QWEN_PATTERN, special=[], nfc=True)
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return library


def neox() -> Tokenizer:
    """Return one like GPT-NeoX's: NFC, special tokens first, runs of spaces and accents as ordinary added tokens."""
    library = _byte_level(None, special=["<|endoftext|>", "<|padding|>"], nfc=True)
    library.add_tokens([AddedToken(" " * length, normalized=True) for length in range(24, 1, -1)])
    library.add_tokens([AddedToken("e\u0301t\u00e9 ", normalized=True), AddedToken("\u00e9", normalized=False)])
    return library


def o200k_pattern() -> Tokenizer:
    """Return a tokenizer with GPT-4o's split pattern."""
    return _byte_level(O200K_PATTERN, special=["<|endoftext|>"])


def shuffled_ids() -> Tokenizer:
    """Return a tokenizer whose token ids are not in the order of merges and have gaps."""
    values = json.loads(gpt2().to_str())
    vocabulary = values["model"]["vocab"]
    values["model"]["vocab"] = {
        token: (token_id * 37) % 701 + token_id % 3 * 701 for token, token_id in vocabulary.items()
    }
    values["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(values))


def merges_lost() -> Tokenizer:
    """Return a tokenizer with tokens that no merge makes, because every third merge is removed."""
    values = json.loads(gpt2().to_str())
    values["model"]["merges"] = [merge for number, merge in enumerate(values["model"]["merges"]) if number % 3]
    return Tokenizer.from_str(json.dumps(values))


def digits() -> Tokenizer:
    """Return one like StarCoder's and SmolLM's: two pre-tokenizers, which no single split pattern can replace."""
    library = gpt2()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return library


def falcon() -> Tokenizer:
    """Return one like Falcon's: punctuation apart, then GPT-2's pattern, then digits by three."""
    library = gpt2()
    digits_by_three = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False), digits_by_three]
    )
    return library


def bloom() -> Tokenizer:
    """Return one like Bloom's: spaces and the punctuation of many languages end a piece."""
    library = gpt2()
    split = pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return library


def trimmed_added_token() -> Tokenizer:
    """Return a tokenizer with an added token that includes the spaces before it."""
    library = gpt2()
    library.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return library


def llama2() -> Tokenizer:
    """Return a tokenizer like Llama 2's: spaces are ▁, one is put before the text, and byte fallback."""
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(library, decoders.Sequence(steps))


def mistral() -> Tokenizer:
    """Return a tokenizer like that of Mistral 7B v0.3: as Llama 2's, but with the pre-tokenizer Metaspace."""
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(library, decoders.Sequence(steps))


def gemma() -> Tokenizer:
    """Return a tokenizer like Gemma's: spaces are ▁, and none is put before the text."""
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _sentencepiece(
        library, decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def _sentencepiece(library: Tokenizer, decoder: Any) -> Tokenizer:
    """Train BPE with byte fallback: ids of the special tokens, then of the 256 bytes, then of learned tokens."""
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        max_token_length=12,
        show_progress=False,
    )
    _train(library, trainer)
    library.decoder = decoder
    begin = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    values = json.loads(library.to_str())
    values["added_tokens"] = values["added_tokens"][:3]  # the bytes are ordinary tokens
    return Tokenizer.from_str(json.dumps(values))


def characters() -> Tokenizer:
    """Return a tokenizer with one token per character, like nanoGPT's shakespeare_char."""
    letters = sorted({character for story in stories() for character in story})
    library = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return library


MAKERS: Mapping[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker
    for maker in (
        gpt2,
        gpt2_with_prefix_space,
        llama3,
        qwen,
        neox,
        o200k_pattern,
        shuffled_ids,
        merges_lost,
        digits,
        trimmed_added_token,
        llama2,
        mistral,
        gemma,
    )
}


def write(directory: Path, library: Tokenizer, **config: object) -> Path:
    """Write tokenizer.json, and tokenizer_config.json if `config` has keys, to the directory; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
