"""Engines with LoRA adapters, and what they return for requests: token ids and logprobs."""

from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import msgspec

from model.checkpoint.lora_adapter import Adapter, read_adapter
from model.checkpoint.manifest import read_manifest
from model.nn.transformer import Transformer
from model.tokenizer.interface import Tokenizer
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import LoadAdapter, Submit
from tests.engine.fakes import make_submit

TOKENIZER = train_bpe([], 257)


class AdaptedEngine:
    """Engine of a base model with adapters by name, and the logprobs and ids that it returns by uid.

    read_when: adapters are read when this event is set; None: at once.
    """

    def __init__(
        self,
        model: Transformer,
        base: Path,
        adapters: Mapping[str, Path],
        tokenizer: Tokenizer = TOKENIZER,
        *,
        read_when: Event | None = None,
        **config: Any,
    ) -> None:
        self.base = base
        values = {"block_size": 4, "num_blocks": 1500, "max_num_running": 64, "max_batched_tokens": 512, **config}
        manifest = read_manifest(base)

        def read(directory: Path) -> Adapter:
            if read_when is not None:
                read_when.wait()
            return read_adapter(directory, manifest)

        self.engine = Engine(model, tokenizer, EngineConfig(**values), read_adapter=read)
        self.keys = {"": ""}
        self.num_cached: dict[str, int] = {}
        self.largest_batch = 0
        for name, directory in adapters.items():
            self.load(name, directory)

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter, and wait until it is loaded."""
        self.begin_load(name, directory)
        self.run(self.submit_of(f"load {name}", name, [0], max_tokens=1))

    def begin_load(self, name: str, directory: Path) -> None:
        self.keys[name] = key = read_adapter(directory, read_manifest(self.base)).key
        self.load_key(key, directory)

    def load_key(self, key: str, directory: Path) -> None:
        self.engine.load_adapter(LoadAdapter(key=key, directory=str(directory)))

    def submit_of(self, uid: str, adapter: str, prompt: list[int], **params: Any) -> Submit:
        values = {
            "max_tokens": 6,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 2,
            "prompt_logprobs": 0,
            **params,
        }
        return msgspec.structs.replace(make_submit(uid, prompt, **values), adapter=self.keys[adapter])

    def run(self, *submits: Submit) -> dict[str, list[tuple[int, float]]]:
        """Return the ids and logprobs of each request's prompt and completion."""
        found: dict[str, list[tuple[int, float]]] = {}
        for submit in submits:
            self.engine.submit(submit)
        while self.engine.has_work:
            result = self.engine.step()
            self.largest_batch = max(self.largest_batch, result.stats.batch_size)
            for delta in result.events:
                entries = (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))
                found.setdefault(delta.uid, []).extend((e.token_id, e.logprob or 0.0) for e in entries)
                if delta.finish is not None:
                    assert delta.finish.error is None, delta.finish.error
                    self.num_cached[delta.uid] = delta.finish.num_cached_tokens
        return found


def difference(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> float:
    """Return the largest difference of logprobs, as a fraction of the largest logprob. The ids must be equal."""
    assert [token_id for token_id, _ in ours] == [token_id for token_id, _ in theirs]
    largest = max(abs(logprob) for _, logprob in theirs)
    return max(abs(mine - other) for (_, mine), (_, other) in zip(ours, theirs, strict=True)) / largest
