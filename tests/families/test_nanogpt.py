"""Conversion of nanoGPT's ckpt.pt: equal logits, a tokenizer of characters, and no code of a pickle runs."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention.metadata import AttentionMetadata
from model.checkpoint.conversion.import_nanogpt import convert_nanogpt
from model.checkpoint.manifest import read_manifest
from model.io.files import CheckpointError
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import TokenizerError
from service.cli.main import main
from tests.families.models import load, transformers
from tests.families.nanogpt import ARGUMENTS, logits, random_state, write_checkpoint
from tests.families.tokenizer_files import END, write_byte_level
from tests.model.paging import PagedRun

TOLERANCE = 1e-5
CHARACTERS = "\n !$&',-.3:;?" + "".join(map(chr, range(65, 91))) + "".join(map(chr, range(97, 123)))
IDS = torch.randint(300, (50,), generator=torch.Generator().manual_seed(3))
CASES: dict[str, dict[str, Any]] = {
    "biased": {},
    "unbiased": {"bias": False},
    "padded vocabulary": {"vocab_size": 50304 // 100},
    "one head": {"n_head": 1},
}


def meta(path: Path, **more: Any) -> Path:
    """Write a meta.pkl as nanoGPT's data/shakespeare_char/prepare.py does."""
    stoi = {character: index for index, character in enumerate(CHARACTERS)}
    values = {"vocab_size": len(stoi), "itos": {index: c for c, index in stoi.items()}, "stoi": stoi}
    path.write_bytes(pickle.dumps(values | more))
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_has_the_logits_of_nanogpt(tmp_path: Path, case: str) -> None:
    arguments = ARGUMENTS | CASES[case]
    state = random_state(arguments)
    ids = IDS % arguments["vocab_size"]
    path = write_checkpoint(tmp_path / "ckpt.pt", arguments, state)
    convert_nanogpt(path, meta(tmp_path / "meta.pkl"), tmp_path / "out")
    theirs = logits(arguments, state, ids)
    for attention in ("sdpa", "eager"):
        model = load(tmp_path / "out", attention)
        whole = model(ids, AttentionMetadata.uncached((len(ids),)), None)
        (chunked,) = PagedRun(model, [ids]).forward_in_chunks(7)
        for ours in (whole, chunked):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) <= TOLERANCE


def test_the_reference_for_nanogpt_is_gpt2_with_exact_gelu() -> None:
    """The tests' implementation of nanoGPT equals the transformers library's GPT-2 with exact GELU."""
    state = random_state(ARGUMENTS)
    config = transformers.GPT2Config(
        **{key: ARGUMENTS[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")},
        n_positions=ARGUMENTS["block_size"],
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    model.load_state_dict({n: t.T if n.endswith(transposed) else t for n, t in state.items()})
    mine = logits(ARGUMENTS, state, IDS)
    with torch.no_grad():
        theirs = model(IDS[None]).logits[0]
    assert float((mine - theirs).abs().max() / theirs.abs().max()) <= TOLERANCE


def test_compiled_names_and_old_masks_are_accepted(tmp_path: Path) -> None:
    state = random_state(ARGUMENTS)
    plain = write_checkpoint(tmp_path / "plain.pt", ARGUMENTS, state)
    renamed = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    mask = {"_orig_mod.transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}
    compiled = write_checkpoint(tmp_path / "compiled.pt", ARGUMENTS, renamed | mask)
    characters = meta(tmp_path / "meta.pkl")
    first = convert_nanogpt(plain, characters, tmp_path / "first")
    second = convert_nanogpt(compiled, characters, tmp_path / "second")
    assert first.config == second.config
    assert first.training == {"steps": 250, "best_val_loss": 1.5, "source": "plain.pt"}
    assert first.files == second.files


def test_an_untied_head_stays_untied_after_conversion(tmp_path: Path) -> None:
    state = random_state(ARGUMENTS)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, state)
    manifest = convert_nanogpt(path, meta(tmp_path / "meta.pkl"), tmp_path / "out")
    assert not manifest.config.tie_embeddings
    theirs = logits(ARGUMENTS, state, IDS)
    ours = load(tmp_path / "out")(IDS, AttentionMetadata.uncached((len(IDS),)), None)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= TOLERANCE


def test_the_characters_of_meta_pkl_become_a_tokenizer_json(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS))
    convert_nanogpt(path, meta(tmp_path / "meta.pkl"), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    text = "First Citizen:\nBefore we  proceed any further,\n\n hear me speak.\n"
    assert tokenizer.encode(text) == [CHARACTERS.index(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (len(CHARACTERS), None, ())
    with pytest.raises(TokenizerError):
        tokenizer.encode("é")


def test_a_converted_tokenizer_keeps_its_eos_token(tmp_path: Path) -> None:
    write_byte_level(tmp_path / "gpt2", 290)
    (tmp_path / "gpt2" / "tokenizer_config.json").unlink()
    (tmp_path / "gpt2" / "config.json").write_text('{"eos_token_id": 0}')
    source = load_tokenizer(tmp_path / "gpt2")
    assert source.special_tokens[END] in source.eos_token_ids
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS))
    manifest = convert_nanogpt(path, tmp_path / "gpt2", tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").eos_token_ids == source.eos_token_ids
    assert {"tokenizer.json", "generation_config.json"} <= manifest.files.keys()


class Evil:
    """Object whose unpickling would run a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("where", ["model", "model_args", "optimizer", "config", "meta.pkl"])
def test_code_in_a_pickle_never_runs(tmp_path: Path, where: str) -> None:
    mark = tmp_path / "it-ran"
    evil = Evil(mark)
    in_meta = where == "meta.pkl"
    state = random_state(ARGUMENTS)
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, state, **({} if in_meta else {where: {"x": evil}}))
    characters = meta(tmp_path / "meta.pkl", **({"stoi": evil} if in_meta else {}))
    with pytest.raises(CheckpointError, match="reading it would run code, which is not allowed") as caught:
        convert_nanogpt(path, characters, tmp_path / "out")
    assert not mark.exists()
    assert "\n" not in str(caught.value)
    pickle.loads(pickle.dumps(evil))
    assert mark.exists(), "unrestricted unpickling runs the command"


TROUBLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such file": (lambda d: (d / "ckpt.pt").unlink(), "ckpt.pt: no such file"),
    "cut": (
        lambda d: (d / "ckpt.pt").write_bytes((d / "ckpt.pt").read_bytes()[:3000]),
        "not a complete file written by torch.save",
    ),
    "no model": (lambda d: torch.save({"x": 1}, d / "ckpt.pt"), "has no entries model and model_args"),
    "a tensor alone": (lambda d: torch.save(torch.ones(1), d / "ckpt.pt"), "expected a dictionary"),
    "unknown argument": (lambda d: _write(d, {"flash": True}), "ckpt.pt: flash=True: unknown key"),
    "uneven heads": (
        lambda d: _write(d, {"n_head": 5}),
        "n_head|num_attention_heads=5: the hidden size 32 is not a multiple",
    ),
    "another width": (
        lambda d: _write(d, {"n_embd": 64}),
        r"wte.weight is torch.float32 of shape \(300, 32\), but model_arg",
    ),
    "fewer positions": (
        lambda d: _write(d, {"block_size": 32}),
        r"wpe.weight .*model_args require floats of shape \(32, 32\)",
    ),
    "more layers": (
        lambda d: _write(d, {"n_layer": 3}),
        "tensor h.2.ln_1.weight, which model_args require, is missing",
    ),
    "fewer layers": (lambda d: _write(d, {"n_layer": 1}), r"tensor h.1.* is not part of nanoGPT's model \(12 extra\)"),
    "integers": (
        lambda d: _state(d, "transformer.ln_f.bias", torch.ones(32, dtype=torch.int64)),
        "ln_f.bias is torch.in",
    ),
    "no stoi": (lambda d: (d / "meta.pkl").write_bytes(pickle.dumps({})), "meta.pkl: no stoi"),
    "meta is no pickle": (lambda d: (d / "meta.pkl").write_bytes(b"abc"), "meta.pkl: not a complete pickle"),
    "words": (lambda d: meta(d / "meta.pkl", stoi={"ab": 0}), "tokens of more than one character"),
    "holes": (lambda d: meta(d / "meta.pkl", stoi={"a": 0, "b": 2}), "ids in stoi are not 0 to 1"),
    "too many characters": (
        lambda d: meta(d / "meta.pkl", stoi={chr(256 + i): i for i in range(400)}),
        "has 300 rows, the tokenizer beside it 400 tokens",
    ),
    "no tokenizer": (lambda d: (d / "meta.pkl").unlink(), "meta.pkl: no such file"),
    "taken": (lambda d: _fill(d / "out"), "out: holds files; choose an"),
}


def _fill(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.txt").write_text("x")


def _write(directory: Path, changes: dict[str, Any]) -> None:
    write_checkpoint(directory / "ckpt.pt", ARGUMENTS | changes, random_state(ARGUMENTS))


def _state(directory: Path, name: str, tensor: torch.Tensor) -> None:
    write_checkpoint(directory / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS) | {name: tensor})


@pytest.mark.parametrize("name", TROUBLES)
def test_an_unusable_file_gives_one_error_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = TROUBLES[name]
    _write(tmp_path, {})
    meta(tmp_path / "meta.pkl")
    damage(tmp_path)
    flags = {"--nanogpt": "ckpt.pt", "--tokenizer": "meta.pkl", "--out": "out"}
    assert main(["convert", *(word for flag, file in flags.items() for word in (flag, str(tmp_path / file)))]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_the_convert_command_reports_the_written_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, {})
    flags = ["--nanogpt", str(tmp_path / "ckpt.pt"), "--tokenizer", str(meta(tmp_path / "meta.pkl"))]
    assert main(["convert", *flags, "--out", str(tmp_path / "bard")]) == 0
    parameters = read_manifest(tmp_path / "bard").config.num_parameters
    assert f"{parameters:,} parameters" in capsys.readouterr().out
    assert read_manifest(tmp_path / "bard").name == "bard"


@pytest.mark.parametrize("flags", [[], ["--pickle", "x", "--export", "y"], ["--nanogpt", "x"], ["--tokenizer", "x"]])
def test_convert_requires_exactly_one_source(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *flags, "--out", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("kvasir convert: ")
