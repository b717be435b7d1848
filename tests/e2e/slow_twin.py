"""Reference completions for a running service: the model generates without engine and KV-cache."""

from pathlib import Path
from typing import Any

import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.nn.reference_generate import generate
from model.sampling.params import SamplingParams
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import StreamDecoder


class Oracle:
    """Reference implementation of completions: the whole sequence is recomputed for each token."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = load_tokenizer(checkpoint)
        manifest = read_manifest(checkpoint)
        backend = ATTENTION_BACKENDS["sdpa"]
        self.model = load_model(manifest, device="cpu", dtype=torch.float32, attention=backend)

    def ids(self, prompt: str, **params: Any) -> list[int]:
        eos = self.tokenizer.eos_token_ids
        return generate(self.model, self.tokenizer.encode(prompt), SamplingParams(**params), eos_token_ids=eos)

    def text(self, prompt: str, **params: Any) -> str:
        decoder = StreamDecoder(self.tokenizer)
        return decoder.push(self.ids(prompt, **params)) + decoder.flush()
