"""Encodings of quantized matrices, and the reader of `quantization_config` in config.json. Torch-free.

Ignore lists are not read: a matrix that is stored as a float `weight` is served as such.

Legend: F outputs, I inputs of a matrix, G groups of inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from model.gguf.tensor_types import TENSOR_TYPES
from model.huggingface.families.reading.reader import ConfigReader, Requirements
from model.io.files import CheckpointError
from model.io.safetensors_header import WEIGHT_DTYPES
from model.nn.matrix_kinds import INT4_TEXT

QUANTIZATION_KEY = "quantization_config"
# Last part of a stored tensor's name, such as qweight -> possible dtypes and possible shapes.
Roles = Mapping[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]
_INT32 = ("I32",)
_GROUP = 32  # inputs of a group of the kernels; larger groups repeat their scales
_SCALES = "quantized scales are not supported"


class Encoding(Protocol):
    """Format in which a matrix is stored as one or more tensors. Its type selects the decoder."""

    def roles(self, shape: tuple[int, ...]) -> Roles:
        """Return the dtypes and shapes that each stored tensor of a matrix may have, by the last part of its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainEncoding:
    """Floats that are not quantized, in one stored tensor. kind: last part of the tensor's name, such as weight."""

    kind: str

    def roles(self, shape: tuple[int, ...]) -> Roles:
        return {self.kind: (WEIGHT_DTYPES, (shape,))}


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqEncoding:
    """GPTQ: 4-bit codes of 8 inputs in an int32, and the group of each input. Frantar et al. 2022 (arXiv 2210.17323).

    group_size: inputs that share a scale; None: all.
    has_order: groups may be of any inputs (desc_act); without it, they are of consecutive inputs, and the tensor g_idx,
        which then says the same, may be absent, as in AutoRound's files.
    zero_shift: difference between a zero point and its stored number: 1 in the format `gptq`, 0 in `gptq_v2`.
    """

    group_size: int | None
    zero_shift: int
    has_order: bool = False

    def roles(self, shape: tuple[int, ...]) -> Roles:
        outputs, inputs = shape
        groups = _ceil_divide(inputs, self.group_size or inputs)
        return {
            "qweight": (_INT32, ((_ceil_divide(inputs, 8), outputs),)),
            "qzeros": (_INT32, ((groups, _ceil_divide(outputs, 8)),)),
            "scales": (WEIGHT_DTYPES, ((groups, outputs),)),
            "g_idx": (_INT32, ((inputs,),)),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class AwqEncoding:
    """AWQ, packing `gemm`: 4-bit codes of 8 outputs in an int32. Lin et al. 2023 (arXiv 2306.00978).

    group_size: inputs that share a scale; None: all.
    """

    group_size: int | None

    def roles(self, shape: tuple[int, ...]) -> Roles:
        outputs, inputs = shape
        groups, words = _ceil_divide(inputs, self.group_size or inputs), _ceil_divide(outputs, 8)
        return {
            "qweight": (_INT32, ((inputs, words),)),
            "qzeros": (_INT32, ((groups, words),)),
            "scales": (WEIGHT_DTYPES, ((groups, outputs),)),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedEncoding:
    """Format `pack-quantized` of compressed-tensors: 4-bit codes of 8 inputs in an int32.

    has_zeros: groups have zero points. has_order: a tensor holds each input's group; without it, groups are of
        consecutive inputs.
    has_offsets: groups have offsets, which `kvasir convert` writes.
    """

    group_size: int | None
    has_zeros: bool = False
    has_order: bool = False
    has_offsets: bool = False

    def roles(self, shape: tuple[int, ...]) -> Roles:
        outputs, inputs = shape
        groups = _ceil_divide(inputs, self.group_size or inputs)
        zeros: Roles = {"weight_zero_point": (_INT32, ((_ceil_divide(outputs, 8), groups),))}
        order: Roles = {"weight_g_idx": (_INT32, ((inputs,),))}
        offsets: Roles = {"weight_offset": (WEIGHT_DTYPES, ((outputs, groups),))}
        return {
            "weight_packed": (_INT32, ((outputs, _ceil_divide(inputs, 8)),)),
            "weight_scale": (WEIGHT_DTYPES, ((outputs, groups),)),
            "weight_shape": (("I64", "I32"), ((2,),)),
            **(zeros if self.has_zeros else {}),
            **(order if self.has_order else {}),
            **(offsets if self.has_offsets else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Encoding:
    """Format `int-quantized` of compressed-tensors: int8 weights, with a scale for each output or for the matrix."""

    def roles(self, shape: tuple[int, ...]) -> Roles:
        return {"weight": (("I8",), (shape,)), "weight_scale": (WEIGHT_DTYPES, ((shape[0], 1), (1,), ()))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Encoding:
    """Weights in fp8 (e4m3), with a scale for each block, each output or the matrix.

    scale: last part of the name of the tensor of scales.
    block: outputs and inputs of a block; None: one scale for each output or for the matrix.
    """

    scale: str
    block: tuple[int, int] | None = None

    def roles(self, shape: tuple[int, ...]) -> Roles:
        outputs, inputs = shape
        shapes: tuple[tuple[int, ...], ...] = (outputs, 1), (1,), ()
        if self.block is not None:
            shapes = ((_ceil_divide(outputs, self.block[0]), _ceil_divide(inputs, self.block[1])),)
        return {"weight": (("F8_E4M3",), (shape,)), self.scale: (WEIGHT_DTYPES, shapes)}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufEncoding:
    """Blocks of quantized numbers in a GGUF file. A tensor's dtype is the name of its block type, such as Q4_K."""

    def roles(self, shape: tuple[int, ...]) -> Roles:
        return {"weight": (tuple(name for name, kind in TENSOR_TYPES.items() if kind.is_quantized), (shape,))}


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Encoding of a checkpoint's quantized matrices.

    text: description of the loaded weights, which the server shows among its effective settings.
    """

    encoding: Encoding
    text: str

    @property
    def is_kept(self) -> bool:
        """Return True if matrices stay quantized on a CPU: in all encodings but fp8, which becomes floats."""
        return not isinstance(self.encoding, Fp8Encoding)


def may_be_absent(encoding: Encoding, role: str) -> bool:
    """Return True for a stored tensor without which a matrix can be decoded, by the last part of its name."""
    return role == "g_idx" and isinstance(encoding, GptqEncoding) and not encoding.has_order


def read_quantization(path: Path, value: object) -> StoredQuantization | None:
    """Return the encoding that a `quantization_config` in the config.json `path` describes; None for null.

    Raises CheckpointError.
    """
    if value is None:
        return None
    reader = _reader(path, QUANTIZATION_KEY, value, _HARMLESS, _MUST_BE)
    try:
        quantization = reader.choice("quant_method", "", _METHODS)(reader)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {QUANTIZATION_KEY}: {error}; correct the config") from error
    reader.check_unread()
    return quantization


def _read_gptq(reader: ConfigReader, origin: str = "GPTQ") -> StoredQuantization:
    group_size = _group_size(reader, ("group_size",))
    _check_bits(reader, ("bits",))
    shift = _agreed_choice(reader, ("checkpoint_format", "format"), {"gptq": 1, "gptq_v2": 0})
    has_order = reader.flag("desc_act", False) and group_size is not None
    encoding = GptqEncoding(group_size=group_size, zero_shift=shift, has_order=has_order)
    if has_order:
        return StoredQuantization(encoding, f"int8 in groups of 32, requantized from {origin}'s int4 with desc_act")
    return StoredQuantization(encoding, f"{_groups_text(group_size)}, from {origin}")


def _read_awq(reader: ConfigReader, origin: str = "AWQ") -> StoredQuantization:
    group_size = _group_size(reader, ("group_size", "q_group_size"))
    _check_bits(reader, ("bits", "w_bit"))
    _agreed_choice(reader, ("version", "format", "checkpoint_format"), {"gemm": None, "GEMM": None})
    if not reader.flag("zero_point", True):
        reader.reject("zero_point", False, "only AWQ with zero points is supported; use a checkpoint with them")
    return StoredQuantization(AwqEncoding(group_size=group_size), f"{_groups_text(group_size)}, from {origin}")


def _read_auto_round(reader: ConfigReader) -> StoredQuantization:
    return reader.choice("packing_format", "", _AUTO_ROUND)(reader, "AutoRound")


def _read_fp8(reader: ConfigReader) -> StoredQuantization:
    block = reader.value("weight_block_size")
    if block is None:  # as written by AutoFP8
        return StoredQuantization(Fp8Encoding(scale="weight_scale"), _FP8_TEXT)
    sizes = _block(reader, "weight_block_size", block)
    return StoredQuantization(Fp8Encoding(scale="weight_scale_inv", block=sizes), _FP8_TEXT)


def _read_compressed_tensors(reader: ConfigReader) -> StoredQuantization:
    groups = reader.value("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        reader.reject("config_groups", groups, "expected exactly one group; use a checkpoint with one scheme")
    sparsity = reader.value("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        reader.reject("sparsity_config", sparsity, f"sparse weights are not supported; {_PLAIN}")
    name, group = next(iter(groups.items()))
    key = f"{QUANTIZATION_KEY}.config_groups.{name}"
    scheme = _reader(reader.path, key, group, frozenset({"targets", "input_activations"}), _GROUP_MUST_BE)
    outer, inner = reader.value("format"), scheme.value("format")
    weights = _reader(reader.path, f"{key}.weights", scheme.value("weights"), _WEIGHTS_HARMLESS, _WEIGHTS_MUST_BE)
    scheme.check_unread()
    stored = inner if outer in (None, "mixed-precision") else outer
    if not isinstance(stored, str) or stored not in _STORED:
        reader.reject("format", stored, f"supported are {', '.join(_STORED)}; use a checkpoint with one of these")
    quantization = _STORED[stored](weights)
    weights.check_unread()
    return quantization


def _read_own(reader: ConfigReader) -> StoredQuantization:
    """Read the `quantization_config` that `kvasir convert --quantize` writes."""
    bits = reader.value("bits")
    if bits == 8:
        return StoredQuantization(Int8Encoding(), "int8, from kvasir convert")
    if bits != 4:
        reader.reject("bits", bits, "supported are 4 and 8; convert the checkpoint again")
    encoding = PackedEncoding(group_size=_GROUP, has_offsets=True)
    return StoredQuantization(encoding, f"int4 {INT4_TEXT}, from kvasir convert")


def _read_packed(weights: ConfigReader) -> StoredQuantization:
    _check_kind(weights, "int")
    _check_bits(weights, ("num_bits",))
    has_groups = weights.choice("strategy", "group", {"group": True, "channel": False})
    group_size = _group_size(weights, ("group_size",)) if has_groups else None
    order = weights.value("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        weights.reject("actorder", order, "supported are group and weight; use a checkpoint with one of these")
    encoding = PackedEncoding(
        group_size=group_size,
        has_zeros=not weights.flag("symmetric", True),
        has_order=order in (True, "group", "dynamic") and group_size is not None,
    )
    if encoding.has_order:
        text = "int8 in groups of 32, requantized from compressed-tensors' int4 with actorder"
    else:
        text = f"{_groups_text(group_size)}, from compressed-tensors"
    return StoredQuantization(encoding, text)


def _read_int8(weights: ConfigReader) -> StoredQuantization:
    _check_kind(weights, "int")
    _check_bits(weights, ("num_bits",), 8)
    if not weights.flag("symmetric", True):
        weights.reject("symmetric", False, "int8 weights with zero points are not supported; use symmetric weights")
    weights.choice("strategy", "tensor", {"channel": None, "tensor": None})
    return StoredQuantization(Int8Encoding(), "int8, from compressed-tensors")


def _read_float8(weights: ConfigReader) -> StoredQuantization:
    _check_kind(weights, "float")
    _check_bits(weights, ("num_bits",), 8)
    blocks = weights.choice("strategy", "tensor", {"channel": False, "tensor": False, "block": True})
    block = weights.value("block_structure")
    sizes = _block(weights, "block_structure", block) if blocks else None
    return StoredQuantization(Fp8Encoding(scale="weight_scale", block=sizes), _FP8_TEXT)


def _reader(path: Path, name: str, value: object, harmless: frozenset[str], must_be: Requirements) -> ConfigReader:
    """Return a reader of `value`, found under the key `name`. Raises CheckpointError unless it is a JSON object."""
    if not isinstance(value, Mapping):
        ConfigReader(path, {}).reject(name, value, "this key must have a JSON object; correct the config")
    return ConfigReader(path, value, prefix=f"{name}.", harmless=harmless, must_be=must_be)


def _check_bits(reader: ConfigReader, names: tuple[str, ...], bits: int = 4) -> None:
    """Raise CheckpointError if a key of `names` sets another number of bits than `bits`. Absent keys are accepted."""
    for name, found in ((name, reader.value(name)) for name in names):
        if found is not None and (found != bits or isinstance(found, bool)):
            reader.reject(name, found, f"only {bits} bits are supported in this format; use such a checkpoint")


def _check_kind(weights: ConfigReader, kind: str) -> None:
    weights.choice("type", "int", {kind: None})


def _group_size(reader: ConfigReader, names: tuple[str, ...]) -> int | None:
    """Return the number of inputs that share a scale, from the first given key of `names`, else 128; None: all.

    Raises CheckpointError unless the number is -1 (all) or a multiple of 32.
    """
    found = [(name, value) for name in names if (value := reader.value(name)) is not None]
    name, size = found[0] if found else (names[0], 128)
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and (size < _GROUP or size % _GROUP)):
        reader.reject(
            name, size, f"supported are -1 (one group) and multiples of {_GROUP}; use a checkpoint with one of these"
        )
    return None if size == -1 else size


def _agreed_choice(reader: ConfigReader, names: tuple[str, ...], choices: Mapping[str, Any]) -> Any:
    """Return the item of `choices` that the keys `names` select. The first key wins, unless it selects the default.

    The default is the first item, which an absent key selects. Raises CheckpointError for a value not in `choices`.
    """
    found = [reader.choice(name, next(iter(choices)), choices) for name in names]
    return found[-1] if found[0] == next(iter(choices.values())) else found[0]


def _block(reader: ConfigReader, name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        reader.reject(name, value, "expected two positive integers; correct the config")
    return value[0], value[1]


def _groups_text(group_size: int | None) -> str:
    return "int4 with a scale for each output" if group_size is None else f"int4 in groups of {group_size}"


def _ceil_divide(size: int, divisor: int) -> int:
    return -(-size // divisor)


_FP8_TEXT = "dequantized from fp8"
_METHODS: Mapping[str, Callable[[ConfigReader], StoredQuantization]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "kvasir": _read_own,
}
_AUTO_ROUND: Mapping[str, Callable[[ConfigReader, str], StoredQuantization]] = {
    "auto_round:auto_gptq": _read_gptq,
    "auto_round:auto_awq": _read_awq,
}
_STORED: Mapping[str, Callable[[ConfigReader], StoredQuantization]] = {
    "pack-quantized": _read_packed,
    "int-quantized": _read_int8,
    "float-quantized": _read_float8,
}
# Keys about how the matrices were quantized, about other engines' kernels, and lists of modules left unquantized.
# Modules that `extra_config` stores with other bits or groups are rejected by the shapes of their tensors.
_HARMLESS_KEYS = """
    quant_method modules_to_not_convert ignored_layers ignore sym damp_percent damp_auto_increment true_sequential
    static_groups model_name_or_path model_file_base_name lm_head meta dataset tokenizer use_cuda_fp16 model_seqlen
    block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id use_exllama max_input_length
    exllama_config cache_block_outputs modules_in_block_to_quantize backend mse act_group_aware disable_exllama
    do_fuse fuse_max_seq_len modules_to_fuse activation_scheme dequantize expert_dtype quantization_status
    global_compression_ratio version run_compressed use_optimized_inference method pack_impl offload_to_disk
    offload_to_disk_path autoround_version enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning seqlen
    scale_dtype lr minmax_lr gradient_accumulate_steps iters amp nsamples low_gpu_mem_usage to_quant_block_names
    extra_config model_free
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
_PLAIN = "use a checkpoint without it"
_MUST_BE: Requirements = {
    "is_marlin_format": ((False,), "Marlin's packing is not supported; use the checkpoint before its repacking"),
    "dynamic": (({}, False), f"schemes of single modules are not supported; {_PLAIN}"),
    "data_type": (("int",), f"only integers are supported; {_PLAIN}"),
    "act_bits": ((16,), f"only inputs that are not quantized are supported; {_PLAIN}"),
    "pack_dtype": (("int32",), f"only int32 is supported; {_PLAIN}"),
    "kv_cache_scheme": ((), f"a quantized KV-cache is not supported; {_PLAIN}"),
    "transform_config": (({},), f"transforms are not supported; {_PLAIN}"),
    "modules_to_convert": (([],), f"quantized embeddings are not supported; {_PLAIN}"),
    "scale_fmt": (("float",), f"{_SCALES}; {_PLAIN}"),
    "fmt": (("e4m3",), f"only e4m3 is supported; {_PLAIN}"),
}
_GROUP_MUST_BE: Requirements = {"output_activations": ((), f"quantized outputs are not supported; {_PLAIN}")}
_WEIGHTS_HARMLESS = frozenset({"observer", "observer_kwargs", "group_size", "block_structure", "actorder", "symmetric"})
_WEIGHTS_MUST_BE: Requirements = {
    "dynamic": ((False,), f"dynamic weights are not supported; {_PLAIN}"),
    "scale_dtype": (tuple(f"torch.{name}" for name in ("float32", "bfloat16", "float16")), f"{_SCALES}; {_PLAIN}"),
    "zp_dtype": (("torch.int8",), f"only int8 is supported; {_PLAIN}"),
}
