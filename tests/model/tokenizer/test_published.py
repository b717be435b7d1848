"""Published tokenizer files of GPT-2, GPT-3.5, GPT-4o, and Llama 3's format: recognised by hash, and exact."""

import base64
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import tiktoken
from tiktoken_ext import openai_public
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from model.io.files import CheckpointError
from model.tokenizer.files import load_tokenizer
from model.tokenizer.tokenizer_json import TokenDecoder
from tests.model.tokenizer import makers, real_files
from tests.model.tokenizer.texts import all_texts, stories


@cache
def gpt2_directory() -> Path:
    return real_files.gpt2(Path(mkdtemp()))


@cache
def gpt2_library() -> Tokenizer:
    """Return the `tokenizers` library's tokenizer made from GPT-2's encoder.json and vocab.bpe."""
    directory = gpt2_directory()
    vocabulary = json.loads((directory / "encoder.json").read_text())
    lines = (directory / "vocab.bpe").read_text().split("\n")[1:]
    library = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=[(left, right) for left, right in (line.split(" ") for line in lines if line)]
        )
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|endoftext|>", normalized=True)])
    return library


def test_gpt2_files_give_the_ids_of_the_library(tmp_path: Path) -> None:
    """Encode all texts with a tokenizer from tokenizer.json, and with one from OpenAI's encoder.json and vocab.bpe."""
    library = gpt2_library()
    library.encode_special_tokens = True
    from_json = load_tokenizer(makers.write(tmp_path, library, eos_token="<|endoftext|>"))
    from_files = load_tokenizer(gpt2_directory())
    assert (from_json.vocab_size, from_json.eos_token_ids, from_json.bos_token_id) == (50257, (50256,), None)
    assert (from_files.vocab_size, from_files.eos_token_ids, from_files.bos_token_id) == (50257, (50256,), None)
    for text in all_texts():
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        expected = library.encode(clean).ids
        assert from_json.encode(text) == expected
        assert from_files.encode(text) == expected


def test_vocab_json_and_merges_txt_give_the_ids_of_gpt2_files(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes((gpt2_directory() / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((gpt2_directory() / "vocab.bpe").read_bytes())
    assert load_tokenizer(tmp_path).encode(stories()[0]) == load_tokenizer(gpt2_directory()).encode(stories()[0])


def test_r50k_gives_the_ids_of_gpt2(tmp_path: Path) -> None:
    """r50k_base.tiktoken is made from GPT-2's vocabulary; its known SHA-256 proves that the content is right."""
    ranks = json.loads((gpt2_directory() / "encoder.json").read_text())
    del ranks["<|endoftext|>"]
    decoder = TokenDecoder(byte_level=True)
    real_files.write_ranks(
        tmp_path / "r50k_base.tiktoken", {decoder.token_bytes(token): rank for token, rank in ranks.items()}
    )
    r50k, gpt2 = load_tokenizer(tmp_path), load_tokenizer(gpt2_directory())
    assert (r50k.vocab_size, r50k.eos_token_ids) == (50257, (50256,))
    for text in all_texts():
        assert r50k.encode(text) == gpt2.encode(text)


@pytest.mark.parametrize("name", real_files.HASHED)
def test_published_ranks_give_the_ids_of_tiktoken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with tiktoken's own pattern and special tokens, from the installed package."""
    path = real_files.unpack(f"{name}.tiktoken", tmp_path) / f"{name}.tiktoken"
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}
    asked: list[str] = []

    def load(url: str, *, expected_hash: str) -> dict[bytes, int]:
        asked.append(expected_hash)
        return ranks

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", load)
    theirs = tiktoken.Encoding(**openai_public.ENCODING_CONSTRUCTORS[name]())
    ours = load_tokenizer(tmp_path)
    assert (ours.vocab_size, dict(ours.special_tokens)) == (theirs.n_vocab, theirs._special_tokens)
    assert ours.eos_token_ids == (theirs.eot_token,)
    for text in all_texts():
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.encode(text, parse_special=True) == theirs.encode(text, allowed_special="all")


def test_an_unknown_tiktoken_file_is_rejected(tmp_path: Path) -> None:
    real_files.write_ranks(tmp_path / "mine.tiktoken", {bytes([byte]): byte for byte in range(256)})
    with pytest.raises(
        CheckpointError, match=r"mine\.tiktoken: the SHA-256 [0-9a-f]{16}… matches no known file \(r50k_base"
    ) as caught:
        load_tokenizer(tmp_path)
    assert "add a tokenizer.json" in str(caught.value)


def test_tokenizer_model_of_llama3_is_read(tmp_path: Path) -> None:
    """The 128,000 original ranks cannot be redistributed; made-up ranks stand for them."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    numbers = iter(range(2**20))
    while len(ranks) < 128_000:
        ranks.setdefault(next(numbers).to_bytes(3, "big").lstrip(b"\0") + b"x", len(ranks))
    real_files.write_ranks(tmp_path / "tokenizer.model", ranks)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 128_256
    assert tokenizer.bos_token_id == tokenizer.special_tokens["<|begin_of_text|>"] == 128_000
    assert tokenizer.special_tokens["<|eot_id|>"] == 128_009
    assert tokenizer.special_tokens["<|reserved_special_token_247|>"] == 128_255
    assert tokenizer.eos_token_ids == (128_001, 128_009)
    assert tokenizer.decode(tokenizer.encode(stories()[0])) == stories()[0]


def test_a_sentencepiece_model_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(CheckpointError, match="a SentencePiece model") as caught:
        load_tokenizer(tmp_path)
    assert "save_pretrained" in str(caught.value)
    assert "\n" not in str(caught.value)
