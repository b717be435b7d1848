"""Exported tokenizers: `transformers` reads the output of `kvasir export-tokenizer` and gives the same ids."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from model.tokenizer.byte_level import ByteLevelTokenizer, save_native
from model.tokenizer.export import export_tokenizer
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.training.data.bpe import train_bpe
from service.cli.main import main
from tests.model.tokenizer import makers, real_files
from tests.model.tokenizer.texts import all_texts, stories
from tests.tiny_model import tiny_tokenizer

SHIPPED = Path(__file__).parents[3] / "checkpoints/kvasir-20m"


def native(directory: Path) -> Path:
    directory.mkdir()
    save_native(train_bpe(stories()[:40], 600), directory)
    return directory


def native_with_unreachable_tokens(directory: Path) -> Path:
    """Write a tokenizer with a token that is a whole piece but that no merge makes, as in hand-written vocabularies."""
    directory.mkdir()
    tokenizer = tiny_tokenizer()
    ranks = {**tokenizer.ranks, b" wolf": len(tokenizer.ranks)}
    marks = {"<|endoftext|>": len(ranks)}
    save_native(
        ByteLevelTokenizer(
            pattern=tokenizer.pattern, ranks=ranks, special_tokens=marks, eos_token_ids=(len(ranks),), bos_token_id=None
        ),
        directory,
    )
    return directory


def from_library(name: str, directory: Path) -> Path:
    library = makers.MAKERS[name]()
    return makers.write(directory, library, **({"eos_token": "</s>"} if name == "llama2" else {}))


SOURCES: dict[str, Callable[[Path], Path]] = {
    "shipped": lambda directory: SHIPPED,
    "native": native,
    "native_with_unreachable_tokens": native_with_unreachable_tokens,
    "gpt2_files": real_files.gpt2,
    "cl100k": partial(real_files.unpack, "cl100k_base.tiktoken"),
    **{name: partial(from_library, name) for name in makers.MAKERS},
}


def served_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids that the server computes for a text, with BOS and with special tokens parsed."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*begin, *tokenizer.encode(text, parse_special=True)]


@pytest.mark.parametrize("name", SOURCES)
def test_an_export_gives_the_same_ids_in_transformers_and_reloaded(name: str, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path / "source")
    ours = load_tokenizer(source)
    export_tokenizer(ours, source, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    clean = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in all_texts()]
    assert theirs(clean)["input_ids"] == [served_ids(ours, text) for text in all_texts()]
    ends = [theirs.eos_token_id] if theirs.eos_token_id is not None else []
    assert ends == [end for end in ours.eos_token_ids if end in ours.special_tokens.values()][:1]
    assert theirs.bos_token_id == ours.bos_token_id
    again = load_tokenizer(tmp_path / "out")
    assert again.bos_token_id == ours.bos_token_id
    assert again.special_tokens == ours.special_tokens
    for text in all_texts()[::7]:
        assert again.encode(text) == ours.encode(text)


def test_the_export_command_lists_the_written_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export-tokenizer", "--checkpoint", str(SHIPPED), "--out", str(tmp_path / "new" / "tokenizer")]) == 0
    written = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert written == ["chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]


def test_the_chat_template_is_exported(tmp_path: Path) -> None:
    source = makers.write(tmp_path / "source", makers.qwen(), chat_template="{{ messages }}", eos_token="<|im_end|>")
    export_tokenizer(load_tokenizer(source), source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["eos_token"]) == ("{{ messages }}", "<|im_end|>")


@pytest.mark.parametrize("foreign", ["notes.txt", "tokenizer.json", "config.json"])
def test_a_directory_with_other_files_is_not_changed(
    foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / foreign).write_text("{}")
    assert main(["export-tokenizer", "--checkpoint", str(SHIPPED), "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "holds files; choose an empty or a new directory" in error
    assert error.count("\n") == 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(foreign, "{}")]


def test_a_pattern_without_equivalent_is_rejected(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    odd = ByteLevelTokenizer(
        pattern=r"\p{Han}+|\s|\S",
        ranks=dict(tokenizer.ranks),
        special_tokens=dict(tokenizer.special_tokens),
        eos_token_ids=tokenizer.eos_token_ids,
        bos_token_id=None,
    )
    with pytest.raises(TokenizerError, match="has no equivalent in Hugging Face's format"):
        export_tokenizer(odd, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
