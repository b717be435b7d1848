"""Independent implementation of nanoGPT's model, with the names and formulas of its model.py."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Arguments = dict[str, Any]
ARGUMENTS: Arguments = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "block_size": 64,
    "bias": True,
    "vocab_size": 300,
    "dropout": 0.2,
}


def random_state(arguments: Arguments, seed: int = 0) -> dict[str, Tensor]:
    """Return a random state_dict like one of nanoGPT's train.py: lm_head shares the embedding's memory."""
    generator = torch.Generator().manual_seed(seed)
    width, vocabulary = arguments["n_embd"], arguments["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocabulary, width),
        "transformer.wpe.weight": (arguments["block_size"], width),
    }
    norms = ["transformer.ln_f"]
    linears: dict[str, tuple[int, ...]] = {}
    for layer in range(arguments["n_layer"]):
        block = f"transformer.h.{layer}."
        norms += [block + "ln_1", block + "ln_2"]
        linears |= {block + "attn.c_attn": (3 * width, width), block + "attn.c_proj": (width, width)}
        linears |= {block + "mlp.c_fc": (4 * width, width), block + "mlp.c_proj": (width, 4 * width)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if arguments["bias"] else {})
    for name in norms:
        shapes |= {f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if arguments["bias"] else {})
    state = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in norms:
        state[f"{name}.weight"] += 1
    return {**state, "lm_head.weight": state["transformer.wte.weight"]}


def logits(arguments: Arguments, state: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return the next-token logits of one text, of shape (positions, vocabulary)."""
    heads, width, length = arguments["n_head"], arguments["n_embd"], len(ids)

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (width,), state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5)

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][:length]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for layer in range(arguments["n_layer"]):
        block = f"transformer.h.{layer}."
        q, k, v = linear(block + "attn.c_attn", norm(block + "ln_1", x)).split(width, dim=1)
        q, k, v = (part.view(length, heads, -1).transpose(0, 1) for part in (q, k, v))
        scores = (q @ k.transpose(1, 2) / (width // heads) ** 0.5).masked_fill(~causal, float("-inf"))
        x = x + linear(block + "attn.c_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, width))
        x = x + linear(block + "mlp.c_proj", functional.gelu(linear(block + "mlp.c_fc", norm(block + "ln_2", x))))
    return norm("transformer.ln_f", x) @ state["lm_head.weight"].T


def write_checkpoint(path: Path, arguments: Arguments, state: dict[str, Any], **more: Any) -> Path:
    """Write a ckpt.pt with all entries that nanoGPT's train.py writes."""
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(5)}}, "param_groups": [{"lr": 6e-4}]}
    values = {
        "model": state,
        "optimizer": optimizer,
        "model_args": arguments,
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char", "compile": True},
    }
    torch.save(values | more, path)
    return path
