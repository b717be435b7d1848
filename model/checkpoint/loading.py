"""Loading of a model from a checkpoint directory, and saving of a model as a checkpoint directory."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.attention.backends import AttentionBackend
from model.chat.chatml import TEMPLATE, supports_chatml
from model.checkpoint.decoding import decode, defer, map_blocks
from model.checkpoint.manifest import CONFIG_FILE, MANIFEST_FILE, Manifest, write_manifest
from model.checkpoint.weights import map_parts, read_weights, remove_shards, write_shards
from model.config import ModelConfig
from model.huggingface.quantization_config import GgufEncoding
from model.huggingface.tensor_placement import Placement
from model.io.files import CheckpointError, write_json, writing
from model.nn.grouped_weight import DeferredWeight, GroupedWeight, StoredWeight
from model.nn.linear import (
    AnyGroupedWeight,
    GroupedLinear,
    Int8Linear,
    QuantizedEmbedding,
    StackedLinear,
    make_grouped_linear,
)
from model.nn.transformer import Transformer
from model.tokenizer.bos_eos import TEMPLATE_FILE
from model.tokenizer.byte_level import ByteLevelTokenizer, save_native
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE

EMBEDDING = "token_embedding.weight"
# Matrices that every kind of packing replaces.
MATRICES = tuple(f"{name}.weight" for name in ("qkv", "out", "gate_up", "up", "down", "lm_head"))


def load_model(
    manifest: Manifest,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attention: AttentionBackend,
    packed_next: tuple[str, ...] = (),
) -> Transformer:
    """Load a checkpoint's model onto a device, ready for inference. Raises CheckpointError.

    Args:
        packed_next: name endings of the matrices that the caller packs before any other use: `MATRICES`, perhaps with
            `EMBEDDING`. Until packed, such a matrix stays mapped from its file, if `map_parts` allows it. If there are
            any endings, quantized matrices of a GGUF file stay mapped too, and others with 4 bits are decoded later.
    """
    with torch.device("meta"), _NoInitialValues():
        model = Transformer(manifest.config, attention)
    placements = manifest.placements
    plain = {name: place for name, place in placements.items() if not _is_decoded(place, device)}
    matrices = {name for name in plain if name.endswith(packed_next)}
    stacked = {name: map_parts(plain[name], device, dtype) for name in matrices if len(plain[name].parts) > 1}
    plain = {name: place for name, place in plain.items() if not stacked.get(name)}
    tensors = read_weights(plain, manifest.config, device=device, dtype=dtype, packed_next=matrices)
    for name in placements.keys() - plain.keys():
        module = name.removesuffix(".weight")
        if parts := stacked.get(name):
            model.set_submodule(module, StackedLinear(parts, tensors.pop(f"{module}.bias", None)))
            continue
        place = placements[name]
        is_mapped = isinstance(place.encoded[0].encoding, GgufEncoding)
        is_on_cpu = torch.device(device).type == "cpu"
        weight: AnyGroupedWeight | Tensor | None = None
        if packed_next and is_on_cpu:
            weight = map_blocks(place, manifest.config) if is_mapped else defer(place, manifest.config)
        weight = decode(place, manifest.config, dtype) if weight is None else weight
        if isinstance(weight, StoredWeight | DeferredWeight) or (isinstance(weight, GroupedWeight) and is_on_cpu):
            _set_quantized(model, module, _linear(weight, tensors.pop(f"{module}.bias", None)), dtype)
        else:
            tensors[name] = (weight if isinstance(weight, Tensor) else weight.dense()).to(device, dtype)
    if isinstance(model.token_embedding, QuantizedEmbedding):
        tensors["token_embedding.weight"] = model.token_embedding.weight  # empty
    model.load_state_dict(tensors, strict=True, assign=True)
    # Only constants, such as rotary frequencies, are still on the CPU.
    return model.to(device).eval().requires_grad_(False)


def _is_decoded(place: Placement, device: torch.device | str) -> bool:
    """Return True if `decode` reads a model tensor, False if `read_weights` reads it as floats.

    Quantized matrices of a GGUF file are read as floats on a GPU, and if another part of the model tensor (q, k, v) is
    not quantized. If the parts have different block types, `decode` gives all of them the bits of the widest part.
    """
    encodings = {type(part.encoding) for part in place.encoded}
    if GgufEncoding in encodings:
        return encodings == {GgufEncoding} and torch.device(device).type == "cpu"
    return bool(encodings)


def _linear(weight: AnyGroupedWeight, bias_F: Tensor | None) -> GroupedLinear | Int8Linear:
    """Return the layer of a quantized matrix: the faster `Int8Linear` if all groups of an output have one scale."""
    if not isinstance(weight, GroupedWeight):
        return make_grouped_linear(weight, bias_F)
    scale_F = weight.scale_FG[:, 0]
    if weight.bits == 8 and weight.offset_FG is None and bool((weight.scale_FG == scale_F[:, None]).all()):
        return Int8Linear(weight.codes_FI, bias_F, scale_F)
    return make_grouped_linear(weight, bias_F)


def _set_quantized(model: Transformer, module: str, layer: GroupedLinear | Int8Linear, dtype: torch.dtype) -> None:
    """Replace a module by a quantized layer. For the token embedding, also replace a tied LM head by the layer."""
    if module != "token_embedding":
        model.set_submodule(module, layer)
        return
    model.token_embedding = QuantizedEmbedding(layer, dtype)
    if model.config.tie_embeddings:
        model.lm_head = layer


class _NoInitialValues(TorchFunctionMode):
    """Torch mode that makes torch.nn.init do nothing, since the checkpoint replaces all initial weights.

    Without this mode, torch.nn.init on the meta device imports 800 modules (79 MB).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {} if kwargs is None else kwargs
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def save_checkpoint(
    directory: Path,
    *,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    tokenizer: ByteLevelTokenizer,
    name: str,
    training: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a complete checkpoint directory, with the ChatML template if the tokenizer has ChatML's special tokens.

    Args:
        training: facts about the training run, for manifest.json.
        generation: default sampling parameters, written as generation_config.json.

    Raises:
        ValueError: the tensors differ from the config in names or shapes, or the tokenizer has too many tokens
            or no EOS token.
        CheckpointError: the directory cannot be used, see `check_writable`.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if shapes != config.parameter_shapes():
        raise ValueError(
            "names or shapes of the tensors do not match the model config; save the tensors with their own config"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocab_size is only {config.vocab_size}; "
            "save the model with the tokenizer of its training"
        )
    check_writable(directory)
    write_weights(directory, config, tensors, dtype=dtype)
    save_native(tokenizer, directory)
    for optional in (TEMPLATE_FILE, GENERATION_CONFIG_FILE):
        (directory / optional).unlink(missing_ok=True)  # of an earlier save
    if supports_chatml(tokenizer.special_tokens):
        (directory / TEMPLATE_FILE).write_text(TEMPLATE)
    if generation is not None:
        write_json(directory / GENERATION_CONFIG_FILE, generation)
    write_manifest(directory, name=name, training=training)


def write_weights(
    directory: Path, config: ModelConfig, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> None:
    """Write config.json and the weight files of a checkpoint, replacing old ones; `dtype` None keeps each dtype."""
    remove_shards(directory)
    num_bytes = {name: tensor.numel() * (dtype or tensor.dtype).itemsize for name, tensor in tensors.items()}
    stored = (tensor.detach().to(device="cpu", dtype=dtype).contiguous() for tensor in tensors.values())
    write_shards(directory, num_bytes, stored)
    write_json(directory / CONFIG_FILE, config.to_dict())


def check_writable(directory: Path, *, may_replace: bool = True) -> None:
    """Create the directory of a checkpoint if it is missing, and check that a checkpoint may be saved there.

    Raises:
        CheckpointError: the path is a file, cannot be written, has files but no manifest.json, or has a manifest.json
            (a complete checkpoint) although `may_replace` is false.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise CheckpointError(f"{directory}: cannot be written; choose another directory")
    if any(directory.iterdir()) and not (directory / MANIFEST_FILE).is_file():
        raise CheckpointError(f"{directory}: contains files but no {MANIFEST_FILE}; choose an empty or a new directory")
    if not may_replace and (directory / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{directory}: contains the finished model of another training run; choose a new directory"
        )
