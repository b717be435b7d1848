"""Quantized Hugging Face directories are read as the matrices that they hold, or rejected in one line."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.conversion.quantize import quantize_checkpoint
from model.checkpoint.decoding import DECODERS, decode, quantized_bytes
from model.checkpoint.loading import MATRICES, load_model
from model.checkpoint.manifest import read_manifest
from model.huggingface.directory import INDEX_FILE, SINGLE_FILE
from model.huggingface.quantization_config import Encoding, Fp8Encoding, Int8Encoding, PackedEncoding, read_quantization
from model.huggingface.tensor_placement import EncodedTensor
from model.io.files import CheckpointError
from model.io.safetensors_header import read_headers
from model.nn.grouped_weight import DeferredWeight, GroupedWeight
from model.nn.linear import GroupedLinear, Int4Linear, Int8Linear
from model.tokenizer.files import load_tokenizer
from service.cli.main import main
from service.config.settings import ModelSettings, SettingsError
from service.worker.engine_factory import build_engine
from service.worker.memory_plan import LoadedModel
from tests.e2e.process import serving
from tests.families.models import CASES, load
from tests.families.quantized_files import FORMS, Tensors, gptq, random_codes, scheme, write_directory, write_form
from tests.families.test_parity import difference
from tests.families.tokenizer_files import write_byte_level

PROMPT = "The dog did not cross the road."
MLP = "model.layers.1.mlp.down_proj"
IDS = torch.arange(40)
METADATA = AttentionMetadata.uncached((40,))


def decoded(directory: Path) -> dict[str, GroupedWeight | Tensor]:
    manifest = read_manifest(directory)
    places = manifest.placements.items()
    return {name: decode(place, manifest.config) for name, place in places if place.encoded}


def dense(weight: GroupedWeight | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense()


class FloatLinear(nn.Module):
    """Linear layer with the weights of a quantized layer as they are stored, computed in float."""

    def __init__(self, quantized: GroupedLinear | Int8Linear) -> None:
        super().__init__()
        if isinstance(quantized, GroupedLinear):
            self.weight_FE = quantized.weight.dense()
        else:
            self.weight_FE = quantized.rows(torch.arange(len(quantized.weight_FE)))
        self.bias_F = quantized.bias_F

    def forward(self, x_TE: Tensor) -> Tensor:
        return functional.linear(x_TE, self.weight_FE, self.bias_F)


def check_logits(directory: Path, tolerance: float) -> None:
    """Compare the logits of a quantized directory with those of its dequantized twin.

    `tolerance` is for the same float arithmetic. The served layers round their inputs to int8 besides.
    """
    theirs, model = load(directory / "dense")(IDS, METADATA, None), load(directory)
    assert difference(model(IDS, METADATA, None), theirs) <= 0.15
    for name, module in list(model.named_modules()):
        if isinstance(module, GroupedLinear | Int8Linear):
            model.set_submodule(name, FloatLinear(module))
    assert difference(model(IDS, METADATA, None), theirs) <= tolerance


@pytest.mark.parametrize("name", FORMS)
def test_a_quantized_directory_computes_its_dequantized_weights(tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    write_form(tmp_path, form)
    manifest = read_manifest(tmp_path)
    assert manifest.quantization is not None
    assert manifest.quantization.text == form.text
    expected = dict(load(tmp_path / "dense").state_dict())
    matrices = decoded(tmp_path)
    # Requantization rounds by at most half a code of 127.
    tolerance = 1 / 254 if form.is_shuffled else 1e-6
    for key, weight in matrices.items():
        assert isinstance(weight, GroupedWeight)
        assert weight.bits == (8 if form.is_shuffled else 4)
        assert (weight.offset_FG is None) == (form.is_shuffled or not form.has_zeros)
        largest = expected[key].abs().max()
        assert float((weight.dense() - expected[key]).abs().max()) <= tolerance * float(largest), key
    assert len(matrices) == 12
    kinds = {type(module) for key, module in load(tmp_path).named_modules() if f"{key}.weight" in matrices}
    assert kinds == {GroupedLinear if form.is_shuffled else Int4Linear}
    check_logits(tmp_path, 0.1 if form.is_shuffled else 1e-5)


def int8(weight_FI: Tensor) -> tuple[Tensors, Tensor]:
    """Quantize as compressed-tensors does: the range of the codes is -128 to 127."""
    scale_F = weight_FI.abs().amax(dim=1, keepdim=True) / 127.5
    codes_FI = (weight_FI / scale_F).round().clamp(-128, 127)
    assert codes_FI.min() == -128
    return {"weight": codes_FI.to(torch.int8), "weight_scale": scale_F}, codes_FI * scale_F


def fp8(weight_FI: Tensor, block: tuple[int, int], name: str) -> tuple[Tensors, Tensor]:
    """Quantize to fp8 with a scale for each block of outputs and inputs; the last blocks may be smaller."""
    scale = torch.empty([-(-size // each) for size, each in zip(weight_FI.shape, block, strict=True)])
    codes_FI, dense_FI = weight_FI.to(torch.float8_e4m3fn), torch.empty_like(weight_FI)
    for row, column in torch.cartesian_prod(*(torch.arange(size) for size in scale.shape)).view(-1, 2).tolist():
        at = tuple(slice(start * size, (start + 1) * size) for start, size in zip((row, column), block, strict=True))
        scale[row, column] = weight_FI[at].abs().max() / 448
        codes_FI[at] = (weight_FI[at] / scale[row, column]).to(torch.float8_e4m3fn)
        dense_FI[at] = codes_FI[at].float() * scale[row, column]
    return {"weight": codes_FI, name: scale}, dense_FI


def fp8_whole(weight_FI: Tensor) -> tuple[Tensors, Tensor]:
    """Quantize with one scale, and store a scale of the inputs too, which is not used."""
    stored, dense_FI = fp8(weight_FI, (weight_FI.shape[0], weight_FI.shape[1]), "weight_scale")
    return {**stored, "weight_scale": stored["weight_scale"].view(1), "input_scale": torch.ones(1)}, dense_FI


_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 96]}
WIDE_FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Tensors, Tensor]], str]] = {
    "int8": (
        scheme("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel", activations=_TOKENS),
        int8,
        "int8, from compressed-tensors",
    ),
    "fp8 per output": (
        scheme("float-quantized", strategy="channel", **_FLOAT8),
        lambda weight_FI: fp8(weight_FI, (1, weight_FI.shape[1]), "weight_scale"),
        "dequantized from fp8",
    ),
    "fp8 per matrix": (scheme("float-quantized", strategy="tensor", **_FLOAT8), fp8_whole, "dequantized from fp8"),
    "fp8 blocks": (_BLOCKS, lambda weight_FI: fp8(weight_FI, (128, 96), "weight_scale_inv"), "dequantized from fp8"),
    "fp8 of AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_whole, "dequantized from fp8"),
}


@pytest.mark.parametrize("name", WIDE_FORMS)
def test_eight_bit_directories_compute_their_dequantized_weights(tmp_path: Path, name: str) -> None:
    config, store, text = WIDE_FORMS[name]
    write_directory(tmp_path, config, store)
    quantization = read_manifest(tmp_path).quantization
    assert quantization is not None
    assert quantization.text == text
    expected = dict(load(tmp_path / "dense").state_dict())
    matrices = decoded(tmp_path)
    assert len(matrices) == 12
    assert all(isinstance(weight, GroupedWeight) == (name == "int8") for weight in matrices.values())
    for key, weight in matrices.items():
        torch.testing.assert_close(dense(weight), expected[key])
    modules = dict(load(tmp_path).named_modules())
    kind = Int8Linear if name == "int8" else nn.Linear
    assert {type(modules[key.removesuffix(".weight")]) for key in matrices} == {kind}
    check_logits(tmp_path, 1e-5)


def test_numbers_that_become_infinite_are_rejected(tmp_path: Path) -> None:
    """A scale times a zero point, and an fp8 number times its scale in bfloat16, exceed the largest finite number."""
    write_form(tmp_path / "awq", FORMS["awq 32"])
    tensors = load_file(tmp_path / "awq" / SINGLE_FILE)
    tensors[f"{MLP}.scales"] = torch.full_like(tensors[f"{MLP}.scales"], 1e38, dtype=torch.float32)
    save_file(tensors, tmp_path / "awq" / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=f"{MLP}.* holds NaN or infinity"):
        load(tmp_path / "awq")
    config, store, _ = WIDE_FORMS["fp8 of AutoFP8"]
    write_directory(tmp_path / "fp8", config, store)
    tensors = load_file(tmp_path / "fp8" / SINGLE_FILE)
    tensors[f"{MLP}.weight_scale"] = 3.397e38 / tensors[f"{MLP}.weight"].float().abs().max()
    save_file(tensors, tmp_path / "fp8" / SINGLE_FILE)
    load(tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=f"{MLP}.* holds numbers that are too large for bfloat16"):
        load(tmp_path / "fp8", dtype=torch.bfloat16)


def test_added_biases_of_zeros_are_dropped(tmp_path: Path) -> None:
    """AutoGPTQ adds a bias to every layer, for example in the published GPTQ files of Qwen2.5."""
    write_form(tmp_path, FORMS["gptq biased"])
    tensors = load_file(tmp_path / SINGLE_FILE)
    save_file(tensors | {f"{MLP}.bias": torch.zeros(128).half()}, tmp_path / SINGLE_FILE)
    check_logits(tmp_path, 1e-5)
    save_file(tensors | {f"{MLP}.bias": torch.ones(128).half()}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"down_proj\.bias is not part of the model"):
        dict(read_manifest(tmp_path).placements)


# Values of quantization_config as published checkpoints have them, with all keys of their tools.
PUBLISHED: dict[str, tuple[str, str]] = {
    "Qwen2.5 GPTQ-Int4": (
        """{"batch_size": 1, "bits": 4,
        "block_name_to_quantize": null, "cache_block_outputs": true, "damp_percent": 0.01,
        "dataset": null, "desc_act": false, "exllama_config": {"version": 1}, "group_size": 128,
        "max_input_length": null, "model_seqlen": null, "module_name_preceding_first_block": null,
        "modules_in_block_to_quantize": null, "pad_token_id": null, "quant_method": "gptq", "sym": true,
        "tokenizer": null, "true_sequential": true, "use_cuda_fp16": false, "use_exllama": true}""",
        "int4 in groups of 128, from GPTQ",
    ),
    "Llama 2 by AutoGPTQ": (
        """{"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": true, "sym": true, "true_sequential": true,
        "model_name_or_path": null, "model_file_base_name": "model", "quant_method": "gptq"}""",
        "int8 in groups of 32, requantized from GPTQ's int4 with desc_act",
    ),
    "GPTQModel": (
        """{"bits": 4, "checkpoint_format": "gptq", "desc_act": false, "group_size": 128, "lm_head": false,
        "meta": {"quantizer": ["gptqmodel:5.0.0"]}, "method": "gptq", "offload_to_disk": true,
        "offload_to_disk_path": "./gptqmodel_offload/a/", "pack_dtype": "int32", "pack_impl": "cpu",
        "quant_method": "gptq", "sym": true}""",
        "int4 in groups of 128, from GPTQ",
    ),
    "AutoRound, exported as GPTQ": (
        """{"amp": true, "autoround_version": "0.4.2", "batch_size": 8, "bits": 4, "damp_percent": 0.01,
        "data_type": "int", "desc_act": false, "enable_minmax_tuning": true, "enable_norm_bias_tuning": false,
        "enable_quanted_input": true, "gradient_accumulate_steps": 1, "group_size": 128, "iters": 200,
        "low_gpu_mem_usage": true, "lr": 0.005, "minmax_lr": 0.005, "nsamples": 512, "quant_method": "gptq",
        "scale_dtype": "torch.float16", "seqlen": 2048, "sym": true, "to_quant_block_names": null,
        "true_sequential": false}""",
        "int4 in groups of 128, from GPTQ",
    ),
    "Qwen3 by AutoRound": (
        """{"autoround_version": "0.14.2", "bits": 4, "data_type": "int", "extra_config": {"lm_head": {"bits": 16,
        "data_type": "float"}}, "group_size": 128, "iters": 0, "model_free": true,
        "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "sym": true}""",
        "int4 in groups of 128, from AutoRound",
    ),
    "Qwen2.5 AWQ": (
        """{"bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm",
        "zero_point": true}""",
        "int4 in groups of 128, from AWQ",
    ),
    "Qwen3 FP8": (
        """{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}""",
        "dequantized from fp8",
    ),
    "Llama 3.1 w8a8": (
        """{"config_groups": {"group_0": {"input_activations": {"actorder": null, "block_structure": null,
        "dynamic": true, "group_size": null, "num_bits": 8, "observer": null, "observer_kwargs": {},
        "strategy": "token", "symmetric": true, "type": "int"}, "output_activations": null, "targets": ["Linear"],
        "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8,
        "observer": "mse", "observer_kwargs": {}, "strategy": "channel", "symmetric": true, "type": "int"}}},
        "format": "int-quantized", "global_compression_ratio": 1.24, "ignore": ["lm_head"], "kv_cache_scheme": null,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": [], "targets": [],
        "registry_requires_subclass": false, "sparsity_structure": "unstructured"}}""",
        "int8, from compressed-tensors",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_quantization_configs_are_read(name: str) -> None:
    config, text = PUBLISHED[name]
    quantization = read_quantization(Path("config.json"), json.loads(config))
    assert quantization is not None
    assert quantization.text == text


def test_a_quantized_head_and_shards_are_read(tmp_path: Path) -> None:
    """A quantizer may include lm_head, and write several files with an index."""
    write_form(tmp_path, FORMS["gptq 32, zeros"])
    tensors = load_file(tmp_path / SINGLE_FILE)
    shape = 300, 128
    codes = random_codes(shape, torch.Generator().manual_seed(5), group=32, has_zeros=True, is_shuffled=False)
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{role}": tensor.contiguous() for role, tensor in gptq(codes).items()}
    names = sorted(tensors)
    files = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for file, chosen in files.items():
        save_file({name: tensors[name] for name in chosen}, tmp_path / file)
    weight_map = {name: file for file, chosen in files.items() for name in chosen}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / SINGLE_FILE).unlink()
    plain = load_file(tmp_path / "dense" / SINGLE_FILE)
    save_file(plain | {"lm_head.weight": codes.dense.contiguous()}, tmp_path / "dense" / SINGLE_FILE)
    assert isinstance(load(tmp_path).lm_head, GroupedLinear)
    check_logits(tmp_path, 1e-5)


LIBRARY_FILE = Path(__file__).parents[1] / "data" / "compressed_tensors.safetensors"
ENCODINGS: dict[str, Encoding] = {
    "group": PackedEncoding(group_size=32),
    "zeros": PackedEncoding(group_size=32, has_zeros=True),
    "channel": PackedEncoding(group_size=None, has_zeros=True),
    "int8": Int8Encoding(),
    "fp8": Fp8Encoding(scale="weight_scale"),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_file_of_the_compressed_tensors_library_is_decoded_as_the_library_does(name: str) -> None:
    """The file holds a matrix of 12 x 64 in each format, and the matrix that compressed-tensors 0.20.0 decompresses."""
    headers, shape = read_headers(LIBRARY_FILE), (12, 64)
    stored = {role: headers[f"{name}.{role}"] for role in ENCODINGS[name].roles(shape)}
    assert len(stored) + 1 == sum(key.startswith(f"{name}.") for key in headers)
    encoded = EncodedTensor(encoding=ENCODINGS[name], shape=shape, tensors=stored)
    weight = DECODERS[type(ENCODINGS[name])](encoded)
    torch.testing.assert_close(dense(weight), load_file(LIBRARY_FILE)[f"{name}.dense"], rtol=1e-6, atol=1e-7)


def test_a_float_matrix_beside_quantized_matrices_makes_one_float_matrix(tmp_path: Path) -> None:
    """An ignore list may name single modules, such as v_proj, which is part of Kvasir's matrix qkv."""
    form = FORMS["awq 32"]
    expected = write_form(tmp_path, form)
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = "model.layers.1.self_attn.v_proj"
    for role in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{role}"]
    save_file(tensors | {f"{name}.weight": expected[f"{name}.weight"]}, tmp_path / SINGLE_FILE)
    matrices = decoded(tmp_path)
    assert [key for key, weight in matrices.items() if isinstance(weight, Tensor)] == ["layers.1.attention.qkv.weight"]
    check_logits(tmp_path, 1e-5)


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return found


Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[str, Change, str]] = {
    "other method": ("gptq 128", lambda c: c.update(quant_method="bitsandbytes"), "quant_method='bitsandbytes': "),
    "3 bits": ("gptq 128", lambda c: c.update(bits=3), "bits=3: only 4 bits are supported"),
    "2 bits": ("awq 32", lambda c: c.update(bits=2), "bits=2: only 4 bits are supported"),
    "8 bits": ("gptq 128", lambda c: c.update(bits=8), "bits=8: only 4 bits are supported"),
    "group of 16": ("gptq 128", lambda c: c.update(group_size=16), "group_size=16: supported are -1 (one group) and"),
    "group of 0": ("awq 32", lambda c: c.update(group_size=0), "group_size=0: supported are -1 (one group) and"),
    "marlin": ("gptq 128", lambda c: c.update(checkpoint_format="marlin"), "checkpoint_format='marlin': supported"),
    "marlin flag": ("gptq 128", lambda c: c.update(is_marlin_format=True), "is_marlin_format=True: Marlin's packing"),
    "dynamic": ("gptq 128", lambda c: c.update(dynamic={"-:.*": {}}), "dynamic={'-:.*': {}}: schemes of single"),
    "other packing": (
        "auto-round 128",
        lambda c: c.update(packing_format="x"),
        "packing_format='x': supported are auto_",
    ),
    "no packing": ("auto-round 128", lambda c: c.pop("packing_format"), "packing_format='': supported are auto_round:"),
    "quantized inputs": ("auto-round 128", lambda c: c.update(act_bits=8), "act_bits=8: only inputs that are not"),
    "gemv": ("awq 32", lambda c: c.update(version="gemv"), "version='gemv': supported are gemm"),
    "awq without zeros": ("awq 32", lambda c: c.update(zero_point=False), "zero_point=False: only AWQ with zero"),
    "unknown key": ("awq 32", lambda c: c.update(rotation="x"), "quantization_config.rotation='x': unknown key"),
    "kv cache": ("packed 32", lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme={'num_bits': 8}: "),
    "sparsity": ("packed 32", lambda c: c.update(sparsity_config={"format": "x"}), "sparsity_config={'format': 'x'}: "),
    "two groups": ("packed 32", lambda c: c["config_groups"].update(group_1={}), "config_groups={"),
    "other format": ("packed 32", lambda c: c.update(format="marlin-24"), "format='marlin-24': supported are pack-"),
    "packed 8 bits": (
        "packed 32",
        lambda c: weights_of(c).update(num_bits=8),
        "quantization_config.config_groups.group_0.weights.num_bits=8: only 4 bits",
    ),
    "packed floats": (
        "packed 32",
        lambda c: weights_of(c).update(type="float"),
        "group_0.weights.type='float': supported are int",
    ),
    "no object": (
        "packed 32",
        lambda c: c.update(config_groups={"group_0": ["Linear"]}),
        "this key must have a JSON object",
    ),
    "not a flag": ("gptq 128", lambda c: c.update(desc_act=1), "desc_act=1: expected true or false"),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a directory of each form that the tests of errors damage."""
    root = tmp_path_factory.mktemp("quantized")
    for name in ("gptq 128", "gptq desc_act", "auto-round 128", "awq 32", "packed 32", "packed actorder"):
        write_form(root / name, FORMS[name])
        write_byte_level(root / name, 300)
        write_byte_level(root / name / "dense", 300)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_quantization_is_rejected_in_one_line(
    directories: dict[str, Path], tmp_path: Path, name: str
) -> None:
    source, change, message = REFUSED[name]
    shutil.copytree(directories[source], tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    values = json.loads(path.read_text())
    change(values["quantization_config"])
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path / "copy")
    line = str(caught.value)
    assert message in line
    assert line.startswith(f"{path}: quantization_config")


def test_a_quantized_model_of_a_transposed_family_is_rejected(tmp_path: Path) -> None:
    CASES["gpt2"].build().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": FORMS["awq 32"].config}))
    with pytest.raises(CheckpointError, match="quantized gpt2 models are not supported; use the unquantized"):
        read_manifest(tmp_path)


Damage = Callable[[Tensors], object]
DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "8 bits in extra_config": (
        "auto-round 128",
        lambda t: t.update({f"{MLP}.qweight": torch.zeros(64, 128).int()}),
        "has shape (64, 128), but",
    ),
    "qweight": ("gptq 128", lambda t: t.update({f"{MLP}.qweight": torch.zeros(8, 8).int()}), "has shape (8, 8), but"),
    "dtype": ("gptq 128", lambda t: t.update({f"{MLP}.qweight": t[f"{MLP}.qweight"].long()}), "dtype I64, not I32"),
    "g_idx": ("gptq desc_act", lambda t: t.pop(f"{MLP}.g_idx"), f"tensor {MLP}.g_idx is in no weight file"),
    "scales": ("awq 32", lambda t: t.update({f"{MLP}.scales": torch.ones(1, 128)}), "has shape (1, 128), but"),
    "qzeros": ("awq 32", lambda t: t.update({f"{MLP}.qzeros": torch.zeros(2, 16).int()}), "has shape (2, 16), but"),
    "extra": ("awq 32", lambda t: t.update({f"{MLP}.g_idx": torch.zeros(1)}), f"tensor {MLP}.g_idx is not part of"),
    "float too": ("awq 32", lambda t: t.update({f"{MLP}.weight": torch.zeros(128, 256)}), "is not part of the model"),
    "zero points": (
        "packed 32",
        lambda t: t.update({f"{MLP}.weight_zero_point": torch.zeros(1).int()}),
        "is not part of the model",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_wrong_tensor_is_rejected_from_the_headers(directories: dict[str, Path], tmp_path: Path, name: str) -> None:
    source, damage, message = DAMAGED[name]
    shutil.copytree(directories[source], tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / SINGLE_FILE)
    damage(tensors)
    save_file(tensors, tmp_path / "copy" / SINGLE_FILE)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path / "copy").verify()
    assert message in str(caught.value)
    assert str(tmp_path / "copy") in str(caught.value)


NUMBERS: dict[str, tuple[str, Damage, str]] = {
    "infinite scale": ("gptq 128", lambda t: t[f"{MLP}.scales"].fill_(torch.inf), "holds NaN or infinity"),
    "group": ("packed actorder", lambda t: t[f"{MLP}.weight_g_idx"].fill_(8), "has a group number outside 0 to 7;"),
    "negative": ("packed actorder", lambda t: t[f"{MLP}.weight_g_idx"].fill_(-1), "has a group number outside 0 to 7"),
    "shape": (
        "packed 32",
        lambda t: t[f"{MLP}.weight_shape"].fill_(7),
        "weight_shape contradicts the shape of its matrix, (128, 256)",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers_are_rejected_as_they_are_read(directories: dict[str, Path], tmp_path: Path, name: str) -> None:
    source, damage, message = NUMBERS[name]
    shutil.copytree(directories[source], tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / SINGLE_FILE)
    damage(tensors)
    save_file(tensors, tmp_path / "copy" / SINGLE_FILE)
    read_manifest(tmp_path / "copy").verify()
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "copy")
    assert message in str(caught.value)
    assert f"tensor {MLP}." in str(caught.value)


def test_a_group_or_block_larger_than_a_matrix_is_the_matrix(tmp_path: Path) -> None:
    """A hostile size takes no memory."""
    write_form(tmp_path / "packed", FORMS["packed per output"])
    write_form(tmp_path / "gptq", FORMS["gptq per output"])
    write_directory(tmp_path / "fp8", _BLOCKS, lambda w: fp8(w, (w.shape[0], w.shape[1]), "weight_scale_inv"))
    for name, changes in {
        "packed": {
            "config_groups": scheme("", num_bits=4, type="int", strategy="group", group_size=2**60)["config_groups"]
        },
        "gptq": {"group_size": 2**40},
        "fp8": {"weight_block_size": [2**60, 2**60]},
    }.items():
        path = tmp_path / name / "config.json"
        values = json.loads(path.read_text())
        values["quantization_config"] |= changes
        path.write_text(json.dumps(values))
        check_logits(tmp_path / name, 1e-5)


JSON_VALUES = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(), inner, max_size=3),
    max_leaves=6,
)


@given(strategies.sampled_from([form.config for form in FORMS.values()]), strategies.data())
def test_any_quantization_config_is_read_or_rejected(config: dict[str, Any], data: strategies.DataObject) -> None:
    config = json.loads(json.dumps(config))
    objects = [config]
    if "config_groups" in config:
        objects += [config["config_groups"], *(config["config_groups"].values()), weights_of(config)]
    changed = data.draw(strategies.sampled_from(objects))
    changed[data.draw(strategies.sampled_from([*changed, "kv_cache_scheme"]) | strategies.text())] = data.draw(
        JSON_VALUES
    )
    with contextlib.suppress(CheckpointError):
        quantization = read_quantization(Path("config.json"), config)
        assert quantization is None or quantization.encoding.roles((64, 96))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq 128", "own int4"])
def test_a_quantized_directory_is_served(directories: dict[str, Path], tmp_path: Path, name: str) -> None:
    """The first token's logprob equals that of the reference implementation, up to rounding of other kernels."""
    if name == "own int4":
        directory = tmp_path / "own int4"
        quantize_checkpoint(directories["awq 32"] / "dense", directory, "int4")
    else:
        directory = directories[name]
    ids = load_tokenizer(directory).encode(PROMPT)
    logits = load(directory)(torch.tensor(ids), AttentionMetadata.uncached((len(ids),)), None)
    best = logits[-1].log_softmax(-1).max()
    quantization = read_manifest(directory).quantization
    assert quantization is not None
    with serving(directory, tmp_path, "--dtype", "float32") as service:
        body = service.complete(PROMPT, temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
        assert f"int4 matrices ({quantization.text.removeprefix('int4 ')})" in service.log.read_text()
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(float(best), abs=0.02)


@pytest.mark.parametrize("name", ["gptq 128", "awq 32", "packed 32", "packed actorder"])
def test_matrices_with_4_bits_are_decoded_when_they_are_packed(directories: dict[str, Path], name: str) -> None:
    """Without act-order, no matrix of 4 bits is in memory before. The weights are those that `decode` returns."""
    manifest, expected = read_manifest(directories[name]), decoded(directories[name])
    backend = ATTENTION_BACKENDS["sdpa"]
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=backend, packed_next=MATRICES)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, GroupedLinear)}
    assert {f"{name}.weight" for name in linears} == expected.keys()
    kinds = {type(linear.stored) for linear in linears.values()}
    assert kinds == {GroupedWeight if name == "packed actorder" else DeferredWeight}
    for key, linear in linears.items():
        torch.testing.assert_close(linear.weight.dense(), dense(expected[f"{key}.weight"]), rtol=0, atol=0)


def test_groups_of_any_inputs_need_desc_act_in_the_config(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(directories["gptq 128"], tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / SINGLE_FILE)
    tensors[f"{MLP}.g_idx"] = tensors[f"{MLP}.g_idx"].flip(0).contiguous()
    save_file(tensors, tmp_path / "copy" / SINGLE_FILE)
    settings = ModelSettings(checkpoint=tmp_path / "copy", device="cpu", threads=1)
    with pytest.raises(
        CheckpointError, match="are not of consecutive inputs, although quantization_config has no desc"
    ):
        build_engine(settings, read_manifest(settings.checkpoint))


def test_other_devices_than_a_cpu_get_dequantized_matrices(directories: dict[str, Path]) -> None:
    manifest = read_manifest(directories["awq 32"])
    model = load_model(manifest, device="meta", dtype=torch.bfloat16, attention=ATTENTION_BACKENDS["sdpa"])
    assert not any(isinstance(module, GroupedLinear) for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_memory_plan_counts_quantized_weights_as_bytes(directories: dict[str, Path]) -> None:
    manifest = read_manifest(directories["awq 32"])
    matrices = [weight for weight in decoded(manifest.directory).values() if isinstance(weight, GroupedWeight)]
    quantized = sum(weight.codes_FI.numel() for weight in matrices)
    assert manifest.num_quantized == quantized
    plan = LoadedModel(manifest.config, 4, 4, 2, 64, quantized, 1000)
    assert plan.weight_bytes == 8 * (manifest.config.num_parameters - quantized) + 1000
    places = [*manifest.placements.values()]
    served, loading, decoded_bytes = (
        quantized_bytes(places, is_packed=is_packed, is_loading=is_loading)
        for is_packed, is_loading in ((True, False), (True, True), (False, True))
    )
    assert served == round(quantized * 4.75 / 8)
    assert loading == served + 6 * max(weight.codes_FI.numel() for weight in matrices)  # one is decoded at a time
    assert decoded_bytes == 1.25 * quantized
    assert read_manifest(directories["awq 32"] / "dense").num_quantized == 0


def test_inspect_shows_the_stored_format(directories: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--checkpoint", str(directories["gptq 128"])]) == 0
    assert re.search(
        r"stored +weights [\d.]+ .iB, served on a CPU as int4 in groups of 128, from GPTQ\n", capsys.readouterr().out
    )


def test_quantizing_quantized_matrices_is_rejected(directories: dict[str, Path]) -> None:
    settings = ModelSettings(checkpoint=directories["awq 32"], quantize="int8")
    with pytest.raises(
        SettingsError, match=r"--quantize int8: the checkpoint is quantized already \(int4 in groups of 32"
    ):
        build_engine(settings, read_manifest(settings.checkpoint))
