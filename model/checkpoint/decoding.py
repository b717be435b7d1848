"""Decoding of stored tensors to quantized matrices in groups, or to dense float32 tensors.

Legend: F outputs, I inputs of a matrix, G groups of 32 inputs, J groups of the stored matrix, W words of 8 codes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from model.checkpoint.weights import check_finite, opened, part_views, stored_tensor
from model.config import ModelConfig
from model.gguf.grouped import map_grouped, read_grouped
from model.gguf.tensor_types import joint_bits
from model.huggingface.families.reading.family import Layout
from model.huggingface.quantization_config import (
    AwqEncoding,
    Encoding,
    Fp8Encoding,
    GgufEncoding,
    GptqEncoding,
    Int8Encoding,
    PackedEncoding,
    PlainEncoding,
)
from model.huggingface.tensor_placement import EncodedTensor, Placement
from model.io.files import CheckpointError
from model.nn.grouped_weight import GROUP_SIZE, DeferredWeight, GroupedWeight, StoredWeight
from model.nn.matrix_kinds import GROUPED_BYTES

_MIDDLE = 8  # of the codes 0 to 15
# Bytes of a decoded weight, 1 for its code and 0.25 for the scale and offset of its group, and while it is decoded.
_DECODED_BYTES, _DECODING_BYTES = 1.25, 6
_LEAST_8_BIT_BYTES = 0.75  # a matrix stored with more bytes a weight than this is served with 8 bits a weight
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word of each of 8 outputs


def decode(place: Placement, config: ModelConfig, dtype: torch.dtype = torch.float32) -> GroupedWeight | Tensor:
    """Return a model tensor, decoded from its stored tensors. Raises CheckpointError.

    The result is a quantized matrix in groups, or a dense float32 tensor if a part of it is fp8 or not quantized.
    dtype: in which a dense tensor will be served; its numbers must fit.
    """
    if isinstance(place.encoded[0].encoding, GgufEncoding):
        whole: GroupedWeight | Tensor = read_grouped(place.parts)
    else:
        whole = _join([_decode_finite(encoded, dtype) for encoded in place.encoded])
    if (rows_F := _stored_rows(place, config)) is None:
        return whole
    if isinstance(whole, Tensor):
        return whole[rows_F]
    return whole.select(rows_F)


def is_deferred(place: Placement) -> bool:
    """Return True for a matrix with 4 bits in groups of consecutive inputs: `defer` need not read it."""
    return all(_is_consecutive_int4(encoded.encoding) for encoded in place.encoded)


def _is_consecutive_int4(encoding: Encoding) -> bool:
    if isinstance(encoding, GptqEncoding | PackedEncoding):
        return not encoding.has_order
    return isinstance(encoding, AwqEncoding)


def defer(place: Placement, config: ModelConfig) -> DeferredWeight | None:
    """Return a quantized matrix with 4 bits that is decoded when it is packed; None for a matrix of another kind."""
    if not is_deferred(place):
        return None

    def read() -> GroupedWeight:
        weight = decode(place, config)
        assert isinstance(weight, GroupedWeight)
        if weight.bits != 4:
            header = next(iter(place.encoded[0].tensors.values()))
            raise CheckpointError(
                f"{header.path}: the groups of {header.name} are not of consecutive inputs, although "
                "quantization_config has no desc_act; correct the config"
            )
        return weight

    return DeferredWeight(bits=4, read=read)


def quantized_bytes(places: Iterable[Placement], *, is_packed: bool, is_loading: bool) -> int:
    """Return the bytes of quantized matrices on a CPU, while the model is loaded or as they are served.

    is_packed: native kernels pack them. Before, those of a GGUF file stay mapped, and others with 4 bits are decoded
        one by one.
    """
    total, most_decoded = 0.0, 0
    for place in places:
        for part in place.encoded:
            size, is_mapped = math.prod(part.shape), isinstance(part.encoding, GgufEncoding)
            is_decoded = is_loading and not (is_mapped or is_deferred(place))
            if isinstance(part.encoding, PlainEncoding) or not is_packed or is_decoded:
                total += size * _DECODED_BYTES
                continue
            stored = sum(header.end - header.begin for header in part.tensors.values())
            bits = 4 if stored < _LEAST_8_BIT_BYTES * size else 8
            total += size * GROUPED_BYTES[joint_bits([each.dtype for each in place.parts]) if is_mapped else bits]
        if is_deferred(place):
            most_decoded = max(most_decoded, math.prod(place.shape))
    return round(total) + (_DECODING_BYTES * most_decoded if is_loading and is_packed else 0)


def _decode_finite(encoded: EncodedTensor, dtype: torch.dtype) -> GroupedWeight | Tensor:
    """Return a decoded matrix. Raises CheckpointError if a dense one does not fit `dtype`, or a scale is infinite."""
    weight = DECODERS[type(encoded.encoding)](encoded)
    header = next(iter(encoded.tensors.values()))
    if isinstance(weight, Tensor):
        check_finite(weight, header, dtype)
        return weight
    for numbers_FG in (weight.scale_FG, weight.offset_FG):
        if numbers_FG is not None:
            check_finite(numbers_FG, header, torch.float32)
    return weight


def map_blocks(place: Placement, config: ModelConfig) -> StoredWeight:
    """Return a quantized matrix of a GGUF file, which stays mapped until it is packed. Raises CheckpointError."""
    stored, rows_F = map_grouped(place.parts), _stored_rows(place, config)

    def read() -> GroupedWeight:
        weight = decode(place, config)
        assert isinstance(weight, GroupedWeight)
        return weight

    if rows_F is None:
        return replace(stored, read=read)
    return replace(stored, read=read, address_F=stored.address_F[rows_F], type_F=stored.type_F[rows_F])


def _stored_rows(place: Placement, config: ModelConfig) -> Tensor | None:
    """Return the index of the stored row of each row of a model tensor; None if the rows are in the same order."""
    if place.layout in (Layout.AS_IS, Layout.CONCATENATED):
        return None
    rows_F = torch.empty(place.shape[0], dtype=torch.int64)
    sizes = [encoded.shape[0] for encoded in place.encoded]
    stored = torch.arange(place.shape[0]).split(sizes)
    for view, rows in zip(part_views(rows_F, place.layout, sizes, config), stored, strict=True):
        view.copy_(rows.view(view.shape))
    return rows_F


def _join(parts: Sequence[GroupedWeight | Tensor]) -> GroupedWeight | Tensor:
    """Return matrices concatenated along their outputs: dense if any matrix is dense, else quantized in groups."""
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(parts) == 1:
        return parts[0]
    if len(grouped) < len(parts):
        return torch.cat([part if isinstance(part, Tensor) else part.dense() for part in parts])
    offsets = [torch.zeros_like(part.scale_FG) if part.offset_FG is None else part.offset_FG for part in grouped]
    return GroupedWeight(
        codes_FI=torch.cat([part.codes_FI for part in grouped]),
        scale_FG=torch.cat([part.scale_FG for part in grouped]),
        offset_FG=None if all(part.offset_FG is None for part in grouped) else torch.cat(offsets),
        bits=max(part.bits for part in grouped),
    )


def _read(encoded: EncodedTensor) -> dict[str, Tensor]:
    """Return the stored tensors of a matrix by the last part of their names, such as qweight.

    Raises CheckpointError if a float of 16 or 32 bits is NaN or infinite.
    """
    tensors = {}
    for role, header in encoded.tensors.items():
        with opened(header.path) as file:
            tensors[role] = stored_tensor(file, header)
        if tensors[role].is_floating_point() and tensors[role].dtype.itemsize > 1:
            check_finite(tensors[role], header, torch.float32)
    return tensors


def _decode_plain(encoded: EncodedTensor) -> Tensor:
    (tensor,) = _read(encoded).values()
    return tensor.float()


def _decode_gptq(encoded: EncodedTensor) -> GroupedWeight:
    encoding: GptqEncoding = encoded.encoding
    stored = _read(encoded)
    outputs, inputs = encoded.shape
    # GPTQModel subtracts the shift from whole words, with carries between codes. The same addition undoes this.
    zeros_JW = stored["qzeros"] + encoding.zero_shift * 0x1111_1111
    return _ordered(
        encoded,
        _nibbles(stored["qweight"].t()).reshape(outputs, -1)[:, :inputs],
        stored["scales"].t(),
        zeros_FJ=_nibbles(zeros_JW).flatten(1)[:, :outputs].t(),
        groups_I=stored.get("g_idx"),
    )


def _decode_awq(encoded: EncodedTensor) -> GroupedWeight:
    stored = _read(encoded)
    outputs, _ = encoded.shape
    codes_FI, zeros_FJ = (
        _nibbles(stored[name])[..., list(_AWQ_ORDER)].flatten(1)[:, :outputs].t() for name in ("qweight", "qzeros")
    )
    return _grouped(codes_FI, stored["scales"].t(), zeros_FJ, encoded.encoding.group_size)


def _decode_packed(encoded: EncodedTensor) -> GroupedWeight:
    stored = _read(encoded)
    outputs, inputs = encoded.shape
    if tuple(stored["weight_shape"].tolist()) != encoded.shape:
        header = encoded.tensors["weight_shape"]
        raise CheckpointError(
            f"{header.path}: tensor {header.name} contradicts the shape of its matrix, {encoded.shape}; "
            "save the weights again"
        )
    zeros_FJ = None
    if "weight_zero_point" in stored:
        zeros_FJ = _nibbles(stored["weight_zero_point"].t()).flatten(1)[:, :outputs].t()
    codes_FI = _nibbles(stored["weight_packed"]).flatten(1)[:, :inputs]
    if (offset_FG := stored.get("weight_offset")) is not None:
        codes_FI = (codes_FI.view(torch.int8) - _MIDDLE).contiguous()
        scale_FG = stored["weight_scale"].float()
        return GroupedWeight(codes_FI=codes_FI, scale_FG=scale_FG, offset_FG=offset_FG.float(), bits=4)
    return _ordered(encoded, codes_FI, stored["weight_scale"], zeros_FJ, stored.get("weight_g_idx"))


def _decode_int8(encoded: EncodedTensor) -> GroupedWeight:
    stored = _read(encoded)
    outputs, inputs = encoded.shape
    scale_FG = stored["weight_scale"].float().reshape(-1, 1).expand(outputs, -(-inputs // GROUP_SIZE))
    return GroupedWeight(codes_FI=stored["weight"].clone(), scale_FG=scale_FG, offset_FG=None, bits=8)


def _decode_fp8(encoded: EncodedTensor) -> Tensor:
    encoding: Fp8Encoding = encoded.encoding
    stored = _read(encoded)
    weight_FI, scale = stored["weight"].float(), stored[encoding.scale].float()
    if encoding.block is not None:
        for dimension, size in enumerate(encoding.block):
            scale = scale.repeat_interleave(min(size, encoded.shape[dimension]), dim=dimension)
        scale = scale[: encoded.shape[0], : encoded.shape[1]]
    weight_FI *= scale
    return weight_FI


def _nibbles(words: Tensor) -> Tensor:
    """Return the eight 4-bit numbers of each int32, lowest bits first, in a new last dimension: uint8."""
    bytes_ = words.contiguous().unsqueeze(-1).view(torch.uint8)
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def _ordered(
    encoded: EncodedTensor, codes_FI: Tensor, scale_FJ: Tensor, zeros_FJ: Tensor | None, groups_I: Tensor | None
) -> GroupedWeight:
    """Return a matrix in groups from 4-bit codes; requantized to int8 if its groups are not of consecutive inputs.

    groups_I: number of each input's group (act-order); None: groups are of consecutive inputs.
    """
    group_size: int | None = encoded.encoding.group_size
    size = encoded.shape[1] if group_size is None else min(group_size, encoded.shape[1])
    if groups_I is None or torch.equal(groups_I, torch.arange(encoded.shape[1], dtype=groups_I.dtype) // size):
        return _grouped(codes_FI, scale_FJ, zeros_FJ, group_size)
    if not 0 <= int(groups_I.min()) <= int(groups_I.max()) < scale_FJ.shape[1]:
        header = next(header for name, header in encoded.tensors.items() if name.endswith("g_idx"))
        raise CheckpointError(
            f"{header.path}: tensor {header.name} has a group number outside 0 to {scale_FJ.shape[1] - 1}; "
            "save the weights again"
        )
    zeros = _MIDDLE if zeros_FJ is None else zeros_FJ[:, groups_I].float()
    return _quantized(scale_FJ.float()[:, groups_I] * (codes_FI.float() - zeros))


def _grouped(codes_FI: Tensor, scale_FJ: Tensor, zeros_FJ: Tensor | None, group_size: int | None) -> GroupedWeight:
    """Convert an int4 matrix whose groups are a multiple of 32 inputs to one with a scale for each 32 inputs.

    codes_FI: codes from 0 to 15; weight = scale * (code - zero).
    zeros_FJ: zero of each stored group; None: all are 8.
    group_size: inputs of a stored group; None: one group of all inputs.
    """
    groups = -(-codes_FI.shape[1] // GROUP_SIZE)
    times = groups if group_size is None else min(groups, group_size // GROUP_SIZE)
    scale_FJ = scale_FJ.float()
    offset_FJ = None
    if zeros_FJ is not None and not bool((zeros_FJ == _MIDDLE).all()):
        offset_FJ = scale_FJ * (_MIDDLE - zeros_FJ.float())
    scale_FG, offset_FG = (
        None if numbers is None else numbers.repeat_interleave(times, dim=1)[:, :groups].contiguous()
        for numbers in (scale_FJ, offset_FJ)
    )
    assert scale_FG is not None
    codes_FI = (codes_FI.to(torch.int8) - _MIDDLE).contiguous()
    return GroupedWeight(codes_FI=codes_FI, scale_FG=scale_FG, offset_FG=offset_FG, bits=4)


def _quantized(weight_FI: Tensor) -> GroupedWeight:
    """Return a matrix quantized to int8, symmetric, with a scale for each group of 32 inputs."""
    outputs, inputs = weight_FI.shape
    groups_FGS = functional.pad(weight_FI, (0, -inputs % GROUP_SIZE)).view(outputs, -1, GROUP_SIZE)
    scale_FG = groups_FGS.abs().amax(dim=2).clamp_(min=torch.finfo(torch.float32).tiny) / 127
    codes_FI = (groups_FGS / scale_FG[..., None]).round_().to(torch.int8).flatten(1)[:, :inputs].contiguous()
    return GroupedWeight(codes_FI=codes_FI, scale_FG=scale_FG, offset_FG=None, bits=8)


DECODERS: Mapping[type, Callable[[EncodedTensor], GroupedWeight | Tensor]] = {
    PlainEncoding: _decode_plain,
    GptqEncoding: _decode_gptq,
    AwqEncoding: _decode_awq,
    PackedEncoding: _decode_packed,
    Int8Encoding: _decode_int8,
    Fp8Encoding: _decode_fp8,
}
