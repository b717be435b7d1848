"""Quantization of a checkpoint to Kvasir's format with int8 or int4 matrices.

A checkpoint that is quantized already, or a GGUF file, is rejected.

Legend: F outputs, I inputs of a matrix, W words of 8 codes.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.conversion.import_pickles import KEPT_FILES
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import CONFIG_FILE, MANIFEST_FILE, Manifest, read_manifest, write_manifest
from model.checkpoint.weights import DTYPES, write_shards
from model.gguf.container import is_gguf
from model.huggingface.directory import INDEX_FILE
from model.huggingface.quantization_config import QUANTIZATION_KEY
from model.io.files import CheckpointError, read_json, write_json, written_whole
from model.nn.linear import GroupedLinear, Int8Linear, replace_linears
from model.nn.transformer import Transformer
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE


def quantize_checkpoint(directory: Path, out: Path, kind: str) -> Manifest:
    """Write a checkpoint to `out` in Kvasir's format, with matrices in int8 or int4 (`kind`); return its manifest.

    The matrices are those that `serve --quantize` makes.

    Raises:
        CheckpointError: the checkpoint is damaged, quantized already or a GGUF file, or `out` is not empty.
    """
    manifest = read_manifest(directory)
    if is_gguf(directory):
        raise CheckpointError(f"{directory}: a GGUF file is not converted; serve the file itself")
    tokenizer = manifest.verify()
    if manifest.quantization is not None:
        raise CheckpointError(
            f"{directory}: the matrices are quantized already ({manifest.quantization.text}); "
            "give the unquantized checkpoint"
        )
    stored = {header.dtype for place in manifest.placements.values() for header in place.parts}
    dtype = DTYPES[stored.pop()] if len(stored) == 1 else torch.float32
    with written_whole(out) as new:
        names = _copy_other_files(directory, new)
        model = load_model(manifest, device="cpu", dtype=dtype, attention=ATTENTION_BACKENDS["eager"])
        replace_linears(model, kind)
        tensors = dict(_stored_tensors(model, dtype))
        write_shards(new, {name: tensor.nbytes for name, tensor in tensors.items()}, tensors.values())
        quantization = {"quant_method": "kvasir", "bits": 4 if kind == "int4" else 8}
        write_json(new / CONFIG_FILE, {**manifest.config.to_dict(), QUANTIZATION_KEY: quantization})
        if tokenizer.eos_token_ids:
            defaults = read_json(new / GENERATION_CONFIG_FILE, optional=True)
            write_json(new / GENERATION_CONFIG_FILE, {**defaults, "eos_token_id": list(tokenizer.eos_token_ids)})
        name = f"{manifest.name}-{kind}"
        write_manifest(new, name=name, training=manifest.training, tokenizer_files=names)
        read_manifest(new).verify()
    return read_manifest(out)


def _copy_other_files(directory: Path, out: Path) -> tuple[str, ...]:
    """Copy a checkpoint's tokenizer, template and other small files to `out`, except those that describe the weights.

    Return the names of the copied files.
    """
    left_out = (CONFIG_FILE, MANIFEST_FILE, INDEX_FILE)
    names = {path.name for pattern in KEPT_FILES for path in directory.glob(pattern) if path.is_file()}
    for name in sorted(names.difference(left_out)):
        shutil.copyfile(directory / name, out / name)
    return tuple(sorted(names.difference(left_out)))


def _stored_tensors(model: Transformer, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all stored tensors: floats unchanged, matrices as `PackedEncoding` or `Int8Encoding`.

    A tied embedding and LM head share one layer. It is yielded once, under the embedding's name.
    """
    for name, parameter in model.named_parameters():
        if parameter.numel():  # a quantized embedding has an empty weight
            yield name, parameter.detach()
    for path, module in model.named_modules():
        if not isinstance(module, GroupedLinear | Int8Linear):
            continue
        name = path.removesuffix(".linear")
        if isinstance(module, Int8Linear):
            yield f"{name}.weight", module.weight_FE
            yield f"{name}.weight_scale", module.scale_F[:, None]
        else:
            codes_FI, offset_FG = module.weight.codes_FI, module.weight.offset_FG
            yield f"{name}.weight_packed", _packed(codes_FI)
            yield f"{name}.weight_scale", module.weight.scale_FG.bfloat16()  # exact, see `quantize_weight`
            if offset_FG is not None:
                yield f"{name}.weight_offset", offset_FG.bfloat16()
            yield f"{name}.weight_shape", torch.tensor(codes_FI.shape)
        if module.bias_F is not None:
            yield f"{name}.bias", module.bias_F.to(dtype)


def _packed(codes_FI: Tensor) -> Tensor:
    """Pack each eight codes of a row, -8 to 7, as code + 8 into an int32: the first code in the lowest bits."""
    nibbles_FI = functional.pad(codes_FI + 8, (0, -codes_FI.shape[1] % 8)).to(torch.uint8)
    bytes_FI = nibbles_FI[:, ::2] | nibbles_FI[:, 1::2] << 4
    words_FW: Tensor = bytes_FI.contiguous().view(torch.int32)
    return words_FW
