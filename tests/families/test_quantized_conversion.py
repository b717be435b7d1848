"""Command `kvasir convert --quantize` writes the matrices that `serve --quantize` makes, and nothing is lost."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from model.attention.metadata import AttentionMetadata
from model.checkpoint.conversion.quantize import quantize_checkpoint
from model.checkpoint.manifest import read_manifest
from model.huggingface.directory import SINGLE_FILE
from model.io.files import CheckpointError
from model.nn.grouped_weight import GroupedWeight
from model.nn.linear import GroupedLinear, Int8Linear, replace_linears
from model.nn.matrix_kinds import INT4_TEXT
from model.tokenizer.files import load_tokenizer
from service.cli.main import main
from tests.families.models import CASES, load
from tests.families.tokenizer_files import write_byte_level

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "kvasir-20m"
IDS = torch.arange(40)
METADATA = AttentionMetadata.uncached((40,))
TEXTS = {"int4": f"int4 {INT4_TEXT}, from kvasir convert", "int8": "int8, from kvasir convert"}


def write(directory: Path, case: str, dtype: torch.dtype) -> Path:
    cast(Any, CASES[case].build()).to(dtype).save_pretrained(directory)
    write_byte_level(directory, 300)
    return directory


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama mha", "qwen2 mha tied", "gpt2", "gpt2 relu, narrow", "gpt_neox"])
def test_a_quantized_checkpoint_equals_quantization_at_start(
    tmp_path: Path, case: str, dtype: torch.dtype, kind: str
) -> None:
    source = write(tmp_path / "source", case, dtype)
    manifest = quantize_checkpoint(source, tmp_path / "new", kind)
    assert manifest.quantization is not None
    assert manifest.quantization.text == TEXTS[kind]
    assert manifest.name == f"source-{kind}"
    assert manifest.config == read_manifest(source).config
    assert manifest.weight_dtype == read_manifest(source).weight_dtype
    assert load_tokenizer(tmp_path / "new").eos_token_ids == load_tokenizer(source).eos_token_ids
    expected, model = load(source), load(tmp_path / "new")
    replace_linears(expected, kind)
    theirs, ours = (dict(each.named_modules()) for each in (expected, model))
    assert theirs.keys() == ours.keys()
    for name, module in theirs.items():
        mine = ours[name]
        assert type(module) is type(mine)
        if isinstance(module, GroupedLinear) and isinstance(mine, GroupedLinear):
            assert_equal(module.weight, mine.weight)
        if isinstance(module, Int8Linear) and isinstance(mine, Int8Linear):
            assert torch.equal(module.weight_FE, mine.weight_FE)
            assert torch.equal(module.scale_F, mine.scale_F)
    assert torch.equal(model(IDS, METADATA, None), expected(IDS, METADATA, None))


def assert_equal(one: GroupedWeight, other: GroupedWeight) -> None:
    assert torch.equal(one.codes_FI, other.codes_FI)
    assert torch.equal(one.scale_FG, other.scale_FG)
    assert one.offset_FG is not None
    assert other.offset_FG is not None
    assert torch.equal(one.offset_FG, other.offset_FG)
    assert one.bits == other.bits


def test_the_command_writes_a_verified_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    assert main(["convert", "--source", str(SHIPPED), "--quantize", "int4", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}: 20,323,392 parameters, 13.8 MiB of weights, format native")
    manifest = read_manifest(out)
    assert manifest.num_weight_bytes < 0.4 * read_manifest(SHIPPED).num_weight_bytes
    assert set(manifest.files) >= {"config.json", SINGLE_FILE, "chat_template.jinja", "generation_config.json"}
    data = bytearray((out / SINGLE_FILE).read_bytes())
    data[-1] ^= 1
    (out / SINGLE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"SHA-256 differs from manifest\.json"):
        read_manifest(out).verify()


def test_a_quantized_checkpoint_is_not_converted_again(tmp_path: Path) -> None:
    quantize_checkpoint(SHIPPED, tmp_path / "small", "int8")
    for command in (["--source", str(tmp_path / "small"), "--quantize", "int4"], ["--export", str(tmp_path / "small")]):
        assert main(["convert", *command, "--out", str(tmp_path / "again")]) == 1
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "x"], "--source and --quantize need each other"),
        (["--export", "x", "--quantize", "int4"], "--source and --quantize need each other"),
        (["--source", "x", "--quantize", "int4", "--export", "y"], "give exactly one checkpoint to convert"),
        (["--quantize", "int3"], "--quantize: "),
    ],
)
def test_flags_that_do_not_fit_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["convert", *flags, "--out", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
