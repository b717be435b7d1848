"""Reading of LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors. Torch-free.

An adapter adds scale * B A to matrices of its base model (Hu et al. 2021, arXiv 2106.09685). Kvasir's model joins
some of these matrices (q, k and v; gate and up), so one matrix of the model may get several additions of an adapter.

Legend: F outputs, I inputs of a matrix, R rank, H heads, D head dimension.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import regex
from numpy.typing import NDArray

from model.checkpoint.manifest import Manifest
from model.config import ModelConfig
from model.gguf.container import is_gguf
from model.huggingface.families.reading.family import Layout, ModelFamily, sources
from model.huggingface.family_table import hugging_face_configs
from model.io.files import CheckpointError, check_is_searchable, parsing, read_bytes, read_json
from model.io.safetensors_header import WEIGHT_DTYPES, TensorHeader, read_headers

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."  # of PEFT's tensor names
_A, _B = ".lora_A.weight", ".lora_B.weight"
MAX_RANK = 1024
# Matrices of a layer that adapters can change.
MODULES = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.up", "mlp.down")
# Keys of adapter_config.json that do not change what the saved adapter computes.
_IGNORED_KEYS = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "lora_dropout", "megatron_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
}
# Initial values of an adapter with which training leaves the base weights unchanged. Others, such as "pissa", do not.
_INITIAL_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")
_REGEX_SECONDS = 1.0  # time limit of a pattern that backtracks
_MAX_PATTERN_CHARACTERS = 10_000
# Numbers of repetitions in a pattern: regex copies the repeated part, so a{1000000000} takes 270 GB.
_MANY_REPETITIONS = regex.compile(r"(?s)\{.*(\{.*\{|\d{3})")

Array = NDArray[np.float32]
# Part of a matrix that an adapter changes: its rows in the matrix, the entries of A and B, and the scale of B.
_Part: TypeAlias = tuple[slice, TensorHeader, TensorHeader, float]


@dataclass(frozen=True, eq=False)
class Addition:
    """Addition to a matrix of Kvasir's model: the product up_FR @ down_RI. `up_FR` includes the scale."""

    down_RI: Array
    up_FR: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """LoRA adapter. key: digest of its files. matrices: additions by changed module, as `layers.0.attention.qkv`."""

    key: str
    matrices: Mapping[str, Addition]

    @property
    def num_bytes(self) -> int:
        return sum(low.down_RI.nbytes + low.up_FR.nbytes for low in self.matrices.values())


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Fields of adapter_config.json.

    targets, excluded: modules with and without an addition, as a regular expression or as ends of module names.
    rank_pattern, alpha_pattern: rank or alpha by regular expression of module names, in place of `rank` or `alpha`.
    layers: numbers of the only layers with additions, used if `targets` is a list; None: all.
    """

    path: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    is_rank_stabilized: bool

    def has_target(self, module: str) -> bool:
        """Return True if the adapter changes a module of the base model. Full names are matched as PEFT does."""
        if self.excluded and self._matches(self.excluded, module):
            return False
        if self.layers is not None and not isinstance(self.targets, str):
            index = regex.match(r".*\.[^.]*\.(\d+)\.", module)
            if index is None or int(index[1]) not in self.layers:
                return False
        return self.targets == "all-linear" or self._matches(self.targets, module)

    def rank_of(self, module: str) -> int:
        return int(self._find(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), self._find(self.alpha_pattern, module, self.alpha)
        return float(alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def _matches(self, wanted: str | tuple[str, ...], module: str) -> bool:
        if isinstance(wanted, str):
            return _match(regex.fullmatch, wanted, module, self.path)
        return any(module == name or module.endswith(f".{name}") for name in wanted)

    def _find(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        for pattern, value in patterns.items():
            if _match(regex.match, rf"(.*\.)?({pattern})$", module, self.path):
                return value
        return default


def _match(match: Callable[..., Any], pattern: str, module: str, path: Path) -> bool:
    if len(pattern) > _MAX_PATTERN_CHARACTERS or _MANY_REPETITIONS.search(pattern):
        raise CheckpointError(
            f"{path}: the pattern {pattern!r} is too long or repeats too often; list the names of the modules"
        )
    try:
        return match(pattern, module, timeout=_REGEX_SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError, OverflowError, MemoryError) as error:
        reason = "takes too long" if isinstance(error, TimeoutError) else f"is not a regular expression ({error})"
        raise CheckpointError(f"{path}: the pattern {pattern!r} {reason}; list the names of the modules") from None


def read_adapter(directory: Path, manifest: Manifest) -> Adapter:
    """Read an adapter and check that it fits the base model of `manifest`. The adapter's numbers become float32.

    Raises:
        CheckpointError: the base model is a GGUF file, or the adapter is no directory; a file is missing or malformed;
            a key is not supported or has a wrong value; no target is a matrix that adapters can change; a tensor is
            missing, extra, or of a wrong shape or dtype; or a number is not finite. The message begins with the path.
    """
    path = directory / WEIGHTS_FILE
    check_is_searchable(directory)  # is_dir raises OSError for a path that is too long
    if not directory.is_dir():
        problem = "not a directory" if directory.exists() else "no such directory"
        raise CheckpointError(f"{directory}: {problem}; give one with {CONFIG_FILE} and {WEIGHTS_FILE}")
    if is_gguf(manifest.directory):
        raise CheckpointError(f"{directory}: adapters for a GGUF file are not supported; serve the model's directory")
    if not path.exists() and (directory / _PICKLE_FILE).exists():
        raise CheckpointError(
            f"{directory / _PICKLE_FILE}: a pickle can run code, and is not read; convert it to {WEIGHTS_FILE}: load "
            "it with PEFT, and call save_pretrained with safe_serialization=True"
        )
    config = _read_config(directory / CONFIG_FILE)
    headers = read_headers(path)
    family = manifest.family or _family_of_names(headers, manifest.config)
    found, prefix = _short_names(headers, family)
    stored: dict[str, tuple[list[_Part], int, Layout]] = {}
    unknown = dict(found)
    for name, layout, shapes in _matrices(manifest.config, family):
        parts: list[_Part] = []
        row = 0
        for module, (outputs, inputs) in shapes.items():
            full = prefix + module
            names = [module + kind for kind in (_A, _B)]
            if config.has_target(full):
                pair = _find_pair(config, full, names, (outputs, inputs), found)
                parts.append((slice(row, row + outputs), *pair, config.scale_of(full)))
                for tensor in names:
                    del unknown[tensor]
            row += outputs
        if parts:
            stored[name] = parts, row, layout
    if unknown:
        header = next(iter(unknown.values()))
        raise CheckpointError(
            f"{path}: tensor {header.name} belongs to no target module that Kvasir can adapt ({len(unknown)} such "
            f"tensors); train adapters of the layers' linear modules, and list these in target_modules"
        )
    if not stored:
        raise CheckpointError(
            f"{config.path}: the adapter has no linear module of the base model's layers as a target; correct "
            "target_modules, exclude_modules or layers_to_transform"
        )
    data = read_bytes(path)  # after the checks of its header: a wrong file may be larger than memory
    digest = hashlib.blake2b(read_bytes(config.path), digest_size=16)
    digest.update(b"\0")
    digest.update(data)
    return Adapter(
        key=digest.hexdigest(), matrices={name: _join(*parts, manifest, data) for name, parts in stored.items()}
    )


def _read_config(path: Path) -> _Config:
    """Read adapter_config.json. Raises CheckpointError with all keys that are not supported or have a wrong value.

    A key that is not supported is ignored if its value is null, false, 0 or empty.
    """
    values, problems = read_json(path), list[str]()

    def take(key: str, is_valid: Callable[[Any], bool], wanted: str, default: Any = None) -> Any:
        value = values.pop(key, None)
        value = default if value is None else value
        if not is_valid(value):
            problems.append(f"{key} is {json.dumps(value)}, not {wanted}; correct it")
        return value

    def check() -> None:
        if problems:
            raise CheckpointError(f"{path}: {'; '.join(problems)}")

    def is_names(value: Any) -> bool:
        is_list = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
        return is_list or isinstance(value, str)

    take("peft_type", lambda value: value == "LORA", '"LORA"')
    check()  # the keys of other methods have other meanings
    rank = take("r", _is_rank, f"an integer from 1 to {MAX_RANK}")
    alpha = take("lora_alpha", _is_number, "a number from -1e6 to 1e6")
    take("bias", lambda value: value == "none", '"none", the only supported value', "none")
    take(
        "init_lora_weights", lambda value: value in _INITIAL_VALUES, "a value that leaves the base weights unchanged", 1
    )
    targets = take(
        "target_modules", lambda value: is_names(value) and value, "a regular expression or a list of names, not empty"
    )
    excluded = take("exclude_modules", is_names, "a regular expression or a list of names", [])
    layers = take("layers_to_transform", _is_layers, "a layer number or a list of layer numbers")
    ranks = take("rank_pattern", _all_values(_is_rank), f"an object of integers from 1 to {MAX_RANK}", {})
    alphas = take("alpha_pattern", _all_values(_is_number), "an object of numbers from -1e6 to 1e6", {})
    stabilized = take("use_rslora", lambda value: isinstance(value, bool), "true or false", False)
    # A key that is off cannot change the result, whatever it means.
    if unsupported := [key for key, value in values.items() if key not in _IGNORED_KEYS and value]:
        verb, pronoun = ("is", "it") if len(unsupported) == 1 else ("are", "them")
        problems.append(f"{', '.join(unsupported)} {verb} not supported; train the adapter without {pronoun}")
    check()
    return _Config(
        path=path,
        rank=rank,
        alpha=alpha,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        targets=targets if isinstance(targets, str) else tuple(targets),
        excluded=excluded if isinstance(excluded, str) else tuple(excluded),
        layers=None if layers is None else (layers,) if isinstance(layers, int) else tuple(layers),
        is_rank_stabilized=stabilized,
    )


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_layers(value: Any) -> bool:
    return value is None or all(type(index) is int for index in (value if isinstance(value, list) else [value]))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e6  # false for NaN


def _all_values(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))


def _short_names(
    headers: Mapping[str, TensorHeader], family: ModelFamily | None
) -> tuple[dict[str, TensorHeader], str]:
    """Return the tensors' headers by short name, and the family's prefix that the names in the file have.

    A short name has neither PEFT's prefix nor the family's. The prefix is "" if no name has a prefix of the family.
    """
    prefixes = () if family is None else (family.prefix, *family.other_prefixes)
    found: dict[str, TensorHeader] = {}
    used = ""
    for name, header in headers.items():
        short = name.removeprefix(_PREFIX)
        prefix = next((prefix for prefix in prefixes if short.startswith(prefix)), "")
        used = used or prefix
        found[short.removeprefix(prefix)] = header
    return found, used


def _family_of_names(headers: Mapping[str, TensorHeader], config: ModelConfig) -> ModelFamily | None:
    """Return the first model family that can express a model in Kvasir's format and has the adapter's module names.

    Such a model was exported before its adapter was trained, or converted from the adapter's base model.
    """
    for family, _ in hugging_face_configs(config):
        found, _ = _short_names(headers, family)
        modules = {module for _, _, shapes in _matrices(config, family) for module in shapes}
        if all(name.removesuffix(_A).removesuffix(_B) in modules for name in found):
            return family
    return None


def _matrices(
    config: ModelConfig, family: ModelFamily | None
) -> Iterator[tuple[str, Layout, dict[str, tuple[int, int]]]]:
    """Yield module, layout and parts of each matrix of Kvasir's model that adapters can change.

    The parts are modules of the checkpoint (q_proj) with their (outputs, inputs), in the order of the matrix's rows.
    """
    for name, source in sources(config, family).items():
        module = name.removesuffix(".weight")
        if module != name and module.startswith("layers.") and module.split(".", 2)[2] in MODULES:
            shapes = {part.removesuffix(".weight"): shape for part, shape in source.shapes.items()}
            is_transposed = source.layout is Layout.TRANSPOSED
            yield module, source.layout, {part: (b, a) if is_transposed else (a, b) for part, (a, b) in shapes.items()}


def _find_pair(
    config: _Config, module: str, names: list[str], shape: tuple[int, int], found: Mapping[str, TensorHeader]
) -> tuple[TensorHeader, TensorHeader]:
    """Return the headers of the tensors A and B of a target module. Raises CheckpointError if one is unusable.

    names: tensor names of A and B in `found`. shape: outputs and inputs of the module.
    """
    rank, (outputs, inputs), pair = config.rank_of(module), shape, []
    for name, wanted in zip(names, ((rank, inputs), (outputs, rank)), strict=True):
        header = found.get(name)
        if header is None:
            raise CheckpointError(
                f"{config.path.with_name(WEIGHTS_FILE)}: tensor {_PREFIX}{module}{name[-len(_A) :]} is missing, "
                f"though target_modules names its module; save the whole adapter again"
            )
        if header.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{header.path}: tensor {header.name} has dtype {header.dtype}; save it in one of "
                f"{', '.join(WEIGHT_DTYPES)}"
            )
        if header.shape != wanted:
            raise CheckpointError(
                f"{header.path}: tensor {header.name} has shape {header.shape}, but rank {rank} and the base model "
                f"require {wanted}; correct r or rank_pattern, or serve the adapter's own base model"
            )
        pair.append(header)
    down, up = pair
    return down, up


def _floats(header: TensorHeader, data: bytes) -> Array:
    """Return a tensor of the weight file's bytes, in float32. Raises CheckpointError if a number is not finite."""
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[header.dtype]
    with parsing(header.path):  # the file may have changed since its header was read
        numbers = np.frombuffer(data, dtype, math.prod(header.shape), header.begin).reshape(header.shape)
    is_bfloat16 = header.dtype == "BF16"
    array = (numbers.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else numbers.astype(np.float32)
    if not np.isfinite(array).all():
        raise CheckpointError(f"{header.path}: tensor {header.name} holds NaN or infinity; train the adapter again")
    return array


def _join(parts: list[_Part], outputs: int, layout: Layout, manifest: Manifest, data: bytes) -> Addition:
    """Return the addition to a matrix of Kvasir's model: A of all parts, stacked, and B as a block-diagonal matrix.

    outputs: number of rows of the matrix. layout: layout of the parts in the checkpoint. data: the weight file's bytes.
    """
    down_RI = np.concatenate([_floats(down, data) for _, down, _, _ in parts])
    up_FR = np.zeros((outputs, len(down_RI)), dtype=np.float32)
    column = 0
    for rows, down, up, scale in parts:
        up_FR[rows, column : column + down.shape[0]] = _floats(up, data) * np.float32(scale)
        column += down.shape[0]
    if layout is Layout.INTERLEAVED_HEADS:  # file: q, k and v of each head; model: q of all heads, then k, then v
        config = manifest.config
        heads = up_FR.reshape(config.num_heads, 3, config.head_dim, -1)
        up_FR = np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(outputs, -1)
    return Addition(down_RI, up_FR)
