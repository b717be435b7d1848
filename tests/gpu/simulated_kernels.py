"""Formulas of the project's Triton kernels and of PyTorch's flash attention, for the simulated device.

A formula reads and writes the tensors of a launch's arguments, all on the CPU, as the kernel does on a GPU. The kernels
themselves are compared with PyTorch's operations on a GPU, by the tests marked `gpu`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from model.attention import kv_cache
from model.nn import linear
from model.nn.position_embeddings import rotate

Arguments = Mapping[str, Any]  # of a launch, by the names of the kernel's parameters


def _attend_splits(a: Arguments) -> None:
    """Attend over all keys of each sequence as one split, with the slots that the block tables name."""
    keys, values, tables, block = a["keys"], a["values"], a["tables"], a["BLOCK"]
    for row, position in enumerate(a["positions"].tolist()):
        first = max(0, position + 1 - a["window"]) if a["window"] else 0
        places = torch.arange(first, position + 1)
        blocks, offsets = tables[row, places // block], places % block
        k_SKD, v_SKD = keys[blocks, offsets].float(), values[blocks, offsets].float()
        if a["HAS_SCALES"]:
            k_SKD = k_SKD * a["key_scales"][blocks, offsets][..., None]
            v_SKD = v_SKD * a["value_scales"][blocks, offsets][..., None]
        q_KGD = a["q"][row].float().unflatten(0, (a["KV_HEADS"], a["GROUP"]))
        scores_KGS = torch.einsum("kgd,skd->kgs", q_KGD, k_SKD) * a["scale"]
        tops_KG = scores_KGS.amax(-1)
        weights_KGS = (scores_KGS - tops_KG[..., None]).exp()
        a["sums"][row, :, 0] = torch.einsum("kgs,skd->kgd", weights_KGS, v_SKD).flatten(0, 1)
        a["scales"][row, :, 0, 0] = tops_KG.flatten()
        a["scales"][row, :, 0, 1] = weights_KGS.sum(-1).flatten()


def _join_splits(a: Arguments) -> None:
    a["out"].copy_(a["sums"][:, :, 0] / a["scales"][:, :, 0, 1:])


def _rms_norm(x: Tensor, weight: Tensor, a: Arguments) -> Tensor:
    weight = weight.float() + (1.0 if a["UNIT_OFFSET"] else 0.0)
    return functional.rms_norm(x.float(), weight.shape, weight, a["eps"])


def _add_norm(a: Arguments) -> None:
    x, bias = a["x"], a["bias"]
    if a["added"] is not None:
        x = x + a["added"]
        a["total"].copy_(x.view(a["total"].shape))
    if a["IS_CENTERED"]:
        bias = None if bias is None else bias.float()
        normed = functional.layer_norm(x.float(), a["weight"].shape, a["weight"].float(), bias, a["eps"])
    else:
        normed = _rms_norm(x, a["weight"], a)
    a["out"].copy_(normed.view(a["out"].shape))
    _store_quantized(a["out"], a)


def _rotate_and_write(a: Arguments) -> None:
    def turned(x_THD: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and not a["NORMS_ROTATED"]:
            x_THD = _rms_norm(x_THD, weight, a).to(x_THD.dtype)
        if a["ROTATED"]:
            x_THD = rotate(x_THD, (a["cosines"], a["sines"]))
        if weight is not None and a["NORMS_ROTATED"]:
            x_THD = _rms_norm(x_THD, weight, a).to(x_THD.dtype)
        return x_THD

    if a["HEADS"]:
        a["q"].copy_(turned(a["q"], a["query_weight"]))
    if a["KV_HEADS"]:
        a["k"].copy_(turned(a["k"], a["key_weight"]))
        places = a["slots"] // a["BLOCK"], a["slots"] % a["BLOCK"]
        keys, values = (a["keys"], a["key_scales"]), (a["values"], a["value_scales"])
        for (pool, scales), new_TKD in ((keys, a["k"]), (values, a["v"])):
            if scales is None:
                pool[places] = kv_cache.rounded(new_TKD, pool.dtype)
            else:
                pool[places], scales[places] = kv_cache.quantized(new_TKD)


def _silu_product(a: Arguments) -> None:
    gate, up = a["gate_up"].chunk(2, dim=-1)
    a["out"].copy_((functional.silu(gate) * up).view(a["out"].shape))
    _store_quantized(a["out"], a)


def _store_quantized(x_TE: Tensor, a: Arguments) -> None:
    if a["quantized"] is not None:
        codes_TE, scales_T = linear.quantize_rows(x_TE, a["quantized"].dtype)
        a["quantized"].copy_(codes_TE)
        a["scales"].copy_(scales_T)


def _quantize_rows(a: Arguments) -> None:
    codes, scales = linear.quantize_rows(a["x"], a["numbers"].dtype)
    a["numbers"].zero_()[:, : codes.shape[1]] = codes
    a["scales"].copy_(scales)


def _multiply_few(a: Arguments) -> None:
    inputs, size = a["inputs"], a["each"]
    x, weight = a["x"].double(), a["weight"].double()
    sums = [x[:, at : at + size] @ weight[:, at : at + size].T for at in range(0, inputs, size)]
    if a["IS_PART"]:
        a["out"].copy_(torch.stack(sums))
    else:
        _scale(sums[0], a)


def _scale_sums(a: Arguments) -> None:
    _scale(a["sums"].sum(0, dtype=torch.float64), a)


def _scale(sums: Tensor, a: Arguments) -> None:
    bias = a["bias"] if a["HAS_BIAS"] else None
    a["out"].copy_(linear.scale_sums(sums, a["x_scale"], a["scale"], bias, a["out"].dtype))


def _complete_floors(a: Arguments) -> None:
    for row in torch.where(a["floors"][:, 0] < 0)[0].tolist():
        sorted_V = a["probs"][row].sort(descending=True).values
        num_kept = int((sorted_V.cumsum(0) - sorted_V < a["wanted"][row]).sum())
        a["floors"][row] = sorted_V[num_kept - 1]


def _mask(a: Arguments) -> None:
    size, out = a["logits"].shape[1], a["out"].copy_(a["logits"])
    for row, mask in enumerate(a["mask_of"].tolist()):
        if mask >= 0:
            bits = (a["words"][mask][:, None] >> torch.arange(32)) & 1
            out[row, bits.flatten()[:size] == 0] = -torch.inf


FORMULAS: Final[Mapping[str, Callable[[Arguments], None]]] = {
    function.__name__: function
    for function in (
        *(_attend_splits, _join_splits, _add_norm, _rotate_and_write, _silu_product),
        *(_quantize_rows, _multiply_few, _scale_sums, _complete_floors, _mask),
    )
}


def flash_attention(
    q_XHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, starts: Tensor, context_starts: Tensor,
    max_query: int, max_context: int, dropout: float, is_causal: bool, returns_mask: bool,
    *, scale: float, window_size_left: int, window_size_right: int, num_splits: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `aten::_flash_attention_forward` for sequences whose queries are their last tokens.

    Asserts what the operator and its kernel demand of their arguments.
    """
    assert q_XHD.dtype == k_SKD.dtype == v_SKD.dtype
    assert q_XHD.dtype in (torch.bfloat16, torch.float16)
    assert q_XHD.stride(-1) == k_SKD.stride(-1) == v_SKD.stride(-1) == 1
    assert q_XHD.shape[-1] % 8 == 0
    assert starts.dtype == context_starts.dtype == torch.int32
    assert (dropout, returns_mask, window_size_right) == (0.0, False, 0)
    assert is_causal == (window_size_left < 0)
    lengths, contexts = starts.diff().tolist(), context_starts.diff().tolist()
    assert (max(lengths), max(contexts)) == (max_query, max_context)
    assert (sum(lengths), sum(contexts)) == (len(q_XHD), len(k_SKD))
    outs = []
    for q_QHD, k, v in zip(q_XHD.split(lengths), k_SKD.split(contexts), v_SKD.split(contexts), strict=True):
        groups = q_QHD.shape[1] // k.shape[1]
        k_SHD, v_SHD = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        distances_QS = torch.arange(len(k) - len(q_QHD), len(k))[:, None] - torch.arange(len(k))
        hidden_QS = (distances_QS < 0) | (distances_QS > (len(k) if window_size_left < 0 else window_size_left))
        scores_HQS = torch.einsum("qhd,shd->hqs", q_QHD.float(), k_SHD) * scale
        weights_HQS = scores_HQS.masked_fill(hidden_QS, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqs,shd->qhd", weights_HQS, v_SHD).to(q_XHD.dtype))
    return torch.cat(outs), *q_XHD.new_zeros(4, 0)
