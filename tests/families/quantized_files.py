"""Quantized Hugging Face directories, packed here from the published layouts, each with its dequantized twin.

Legend: F outputs, I inputs of a matrix, J groups.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from model.huggingface.directory import SINGLE_FILE
from tests.families.models import CASES

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each place of a word, as in AutoAWQ's packing
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Codes:
    """Quantized matrix: w[f, i] = scale[f, groups[i]] * (codes[f, i] - zeros[f, groups[i]])."""

    codes_FI: Tensor
    zeros_FJ: Tensor
    scale_FJ: Tensor
    groups_I: Tensor

    @property
    def dense(self) -> Tensor:
        return self.scale_FJ[:, self.groups_I].float() * (self.codes_FI - self.zeros_FJ[:, self.groups_I]).float()


def random_codes(
    shape: tuple[int, int], generator: torch.Generator, *, group: int, has_zeros: bool, is_shuffled: bool
) -> Codes:
    """Return random codes from 0 to 15. A group of -1 has all inputs."""
    outputs, inputs = shape
    size = inputs if group == -1 else group
    num_groups = -(-inputs // size)
    groups_I = torch.arange(inputs) // size
    zeros = torch.randint(6, 11, (outputs, num_groups), generator=generator)
    zeros[0, 0], zeros[1, -1] = 0, 15  # GPTQ's subtraction of 1 borrows from the next zero point
    return Codes(
        codes_FI=torch.randint(0, 16, shape, generator=generator),
        zeros_FJ=zeros if has_zeros else torch.full_like(zeros, 8),
        scale_FJ=(0.01 + 0.03 * torch.rand(outputs, num_groups, generator=generator)).half(),
        groups_I=groups_I[torch.randperm(inputs, generator=generator)] if is_shuffled else groups_I,
    )


def pack(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack each eight 4-bit numbers of a row into an int32: the number `order[place]` at bit 4 * place."""
    padded = functional.pad(numbers.long(), (0, -numbers.shape[1] % 8))
    placed = padded.unflatten(1, (-1, 8))[..., list(order)]
    words = sum(placed[..., place] << 4 * place for place in range(8))
    assert isinstance(words, Tensor)
    return words.to(torch.int32)


def gptq(codes: Codes, *, is_v2: bool = False) -> Tensors:
    """Return a matrix as GPTQModel stores it: v1 subtracts 1 from every zero point, with borrows between them."""
    words = pack(codes.zeros_FJ.t())
    return {
        "qweight": pack(codes.codes_FI).t(),
        "qzeros": words if is_v2 else words - 0x11111111,
        "scales": codes.scale_FJ.t(),
        "g_idx": codes.groups_I.int(),
    }


def awq(codes: Codes) -> Tensors:
    """Return a matrix as AutoAWQ's gemm stores it."""
    return {
        "qweight": pack(codes.codes_FI.t(), AWQ_ORDER),
        "qzeros": pack(codes.zeros_FJ.t(), AWQ_ORDER),
        "scales": codes.scale_FJ.t(),
    }


def packed(codes: Codes, *, has_zeros: bool = False, has_order: bool = False) -> Tensors:
    """Return a matrix as compressed-tensors' pack-quantized stores it."""
    zeros = {"weight_zero_point": pack(codes.zeros_FJ.t()).t()}
    return {
        "weight_packed": pack(codes.codes_FI),
        "weight_scale": codes.scale_FJ.bfloat16(),
        "weight_shape": torch.tensor(codes.codes_FI.shape),
        **(zeros if has_zeros else {}),
        **({"weight_g_idx": codes.groups_I.int()} if has_order else {}),
    }


def scheme(form: str, *, activations: object = None, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors with one group."""
    common = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "block_structure": None, "actorder": None}
    group = {"targets": ["Linear"], "weights": common | weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "output_activations": None}},
    }


@dataclass(frozen=True)
class Form:
    """Stored form of 4-bit matrices: quantization_config, function to stored tensors, description, kinds of codes."""

    config: dict[str, Any]
    store: Callable[[Codes], Tensors]
    text: str
    group: int = 128
    has_zeros: bool = False
    is_shuffled: bool = False
    scale_dtype: torch.dtype = torch.float16
    case: str = "llama wide heads"
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)


_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True, "damp_percent": 0.1, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"]}
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "sym": True,
    "data_type": "int",
}
_ORDERED = "int8 in groups of 32, requantized from"


def _gptq_form(group: int, **options: Any) -> Form:
    config = {**_GPTQ, "group_size": group, "checkpoint_format": "gptq", **options.pop("config", {})}
    groups = "with a scale for each output" if group == -1 else f"in groups of {group}"
    values: dict[str, Any] = {"store": gptq, "text": f"int4 {groups}, from GPTQ", "group": group, **options}
    return Form(config=config, **values)


def _packed_form(group: int, *, text: str = "", has_order: bool = False, **options: Any) -> Form:
    has_zeros = options.get("has_zeros", False)
    kind = {"strategy": "channel", "group_size": None} if group == -1 else {"strategy": "group", "group_size": group}
    kind |= {"actorder": "group"} if has_order else {}
    groups = "with a scale for each output" if group == -1 else f"in groups of {group}"
    return Form(
        config=scheme("pack-quantized", num_bits=4, type="int", symmetric=not has_zeros, **kind),
        store=lambda codes: packed(codes, has_zeros=has_zeros, has_order=has_order),
        text=text or f"int4 {groups}, from compressed-tensors",
        group=group,
        scale_dtype=torch.bfloat16,
        is_shuffled=has_order,
        **options,
    )


FORMS: dict[str, Form] = {
    "gptq 128": _gptq_form(128),
    "gptq 32, zeros": _gptq_form(32, has_zeros=True, config={"sym": False}),
    "gptq per output": _gptq_form(-1),
    "gptq v2, zeros": _gptq_form(
        64,
        has_zeros=True,
        store=lambda codes: gptq(codes, is_v2=True),
        config={"sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq desc_act": _gptq_form(
        32,
        has_zeros=True,
        is_shuffled=True,
        config={"desc_act": True, "sym": False},
        text=f"{_ORDERED} GPTQ's int4 with desc_act",
    ),
    "gptq biased": _gptq_form(32, case="qwen2", has_zeros=True),
    "gptq interleaved heads": _gptq_form(
        32, case="gpt_neox", has_zeros=True, sizes={"hidden_size": 128, "intermediate_size": 256}
    ),
    "awq 128": Form({**_AWQ, "group_size": 128}, awq, "int4 in groups of 128, from AWQ", has_zeros=True),
    "awq 32": Form({**_AWQ, "group_size": 32}, awq, "int4 in groups of 32, from AWQ", group=32, has_zeros=True),
    "auto-round 128": Form(
        {**_AUTO_ROUND, "group_size": 128, "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}},
        lambda codes: {role: tensor for role, tensor in gptq(codes).items() if role != "g_idx"},
        "int4 in groups of 128, from AutoRound",
    ),
    "auto-round awq 32": Form(
        {**_AUTO_ROUND, "group_size": 32, "packing_format": "auto_round:auto_awq"},
        awq,
        "int4 in groups of 32, from AutoRound",
        group=32,
        has_zeros=True,
    ),
    "packed 32": _packed_form(32),
    "packed 64, zeros": _packed_form(64, has_zeros=True),
    "packed 128": _packed_form(128),
    "packed per output": _packed_form(-1),
    "packed per output, zeros": _packed_form(-1, has_zeros=True),
    "packed actorder": _packed_form(32, has_order=True, text=f"{_ORDERED} compressed-tensors' int4 with actorder"),
}


def is_quantized(name: str) -> bool:
    """Return whether the quantizers quantize a tensor: matrices of layers, but not the head or embeddings."""
    return name.endswith(("proj.weight", "query_key_value.weight", "dense.weight", "_to_4h.weight", "_to_h.weight"))


def write_form(directory: Path, form: Form) -> Tensors:
    """Write a directory in a stored form, and its dequantized twin below `dense`. Return the dequantized matrices."""
    generator = torch.Generator().manual_seed(3)

    def store(weight_FI: Tensor) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight_FI.shape
        codes = random_codes(
            (outputs, inputs), generator, group=form.group, has_zeros=form.has_zeros, is_shuffled=form.is_shuffled
        )
        codes = replace(codes, scale_FJ=codes.scale_FJ.to(form.scale_dtype))
        return form.store(codes), codes.dense

    return write_directory(directory, form.config, store, case=form.case, sizes=form.sizes)


def write_directory(
    directory: Path,
    config: dict[str, Any],
    store: Callable[[Tensor], tuple[Tensors, Tensor]],
    *,
    case: str = "llama wide heads",
    sizes: dict[str, Any] = SIZES,
) -> Tensors:
    """Write a directory with the matrices that `store` returns (stored tensors, dequantized matrix), and its twin."""
    model = CASES[case].build(spread=0.06, **sizes)
    model.save_pretrained(directory)
    model.save_pretrained(directory / "dense")
    tensors = load_file(directory / SINGLE_FILE)
    dense = {}
    for name in filter(is_quantized, list(tensors)):
        stored, dense[name] = store(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{role}": tensor.contiguous() for role, tensor in stored.items()}
    save_file(tensors, directory / SINGLE_FILE)
    plain = load_file(directory / "dense" / SINGLE_FILE)
    save_file(plain | {name: tensor.contiguous() for name, tensor in dense.items()}, directory / "dense" / SINGLE_FILE)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return dense
