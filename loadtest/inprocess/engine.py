"""Engine of the service, built in the benchmark's own process."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from model.checkpoint.manifest import Manifest, read_manifest
from model.tokenizer.files import load_tokenizer
from service.config.settings import ModelSettings
from service.engine.engine import Engine
from service.worker.engine_factory import EngineFacts, build_engine


@dataclass(frozen=True, slots=True)
class InProcess:
    """Engine in this process, built from settings as the worker process builds it."""

    engine: Engine
    manifest: Manifest
    built: EngineFacts
    settings: ModelSettings

    @classmethod
    def open(cls, settings: ModelSettings) -> Self:
        """Build the engine. Raises ValueError if the checkpoint or the settings cannot be used."""
        manifest = read_manifest(settings.checkpoint)
        engine, built = build_engine(settings, manifest)
        return cls(engine, manifest, built, settings)

    @property
    def max_context_tokens(self) -> int:
        """Context length of the model, in tokens."""
        return self.manifest.config.max_context_length

    @property
    def facts(self) -> dict[str, Any]:
        """Name, size, dtypes, limits and KV-cache size of model and engine, JSON-ready."""
        built = asdict(self.built)
        return built | {
            "name": self.manifest.name,
            "parameters": self.manifest.config.num_parameters,
            "weights": built["matrices"] if built["matrices"] in ("int8", "int4", "fp8") else built["dtype"],
            "max_num_running": self.settings.max_num_running,
            "max_batched_tokens": self.settings.max_batched_tokens,
            "kv_cache_tokens": self.built.num_blocks * self.built.block_size,
        }

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, by the model's tokenizer."""
        return load_tokenizer(self.manifest.directory).encode(text)
