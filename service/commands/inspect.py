"""`kvasir inspect`."""

import sys
from collections.abc import Iterator, Sequence

from model.config import ModelConfig
from model.kinds import MlpKind, NormKind, PositionKind
from model.manifest import CheckpointError, Manifest, read_manifest
from service.settings import CheckpointSettings, SettingsError, read_settings

_SUMMARY = "Show what is in a checkpoint: architecture, parameters by part, memory, files. Verifies every hash."


def main(argv: Sequence[str]) -> int:
    """Print the facts of a checkpoint."""
    try:
        settings = read_settings(CheckpointSettings, argv, command="inspect", summary=_SUMMARY)
        manifest = read_manifest(settings.checkpoint)
        manifest.verify()
    except (SettingsError, CheckpointError) as error:
        print(f"kvasir inspect: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    for title, rows in (
        (f"{manifest.name} ({manifest.directory})", manifest.config.to_dict().items()),
        ("parameters", _parameter_rows(manifest.config)),
        ("memory", _memory_rows(manifest.config)),
        ("files, all hashes correct", _file_rows(manifest)),
        ("training", manifest.training.items()),
    ):
        lines = [(str(name), str(value)) for name, value in rows]
        width = max((len(name) for name, _ in lines), default=0)
        print(title, *(f"  {name:<{width}}  {value}" for name, value in lines), "", sep="\n")
    return 0


def parameters_by_part(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Formula and number of parameters of each part of the model; together they are `num_parameters`.

    Letters as in the model: V vocabulary, E width, S context, L layers, H query heads, K kv heads, D head, F MLP.
    """
    vocabulary, width, layers, mlp_size = config.vocab_size, config.hidden_size, config.num_layers, config.mlp_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm = width * (2 if config.norm is NormKind.LAYER_NORM else 1)
    norm_formula = "2E" if config.norm is NormKind.LAYER_NORM else "E"
    attention, attention_formula = 2 * width * (query + key), "2E(HD + KD)"
    if config.attention_bias:
        attention, attention_formula = attention + query + 2 * key + width, f"{attention_formula} + HD + 2KD + E"
    if config.qk_norm:
        attention, attention_formula = attention + 2 * config.head_dim, f"{attention_formula} + 2D"
    matrices = 3 if config.mlp is MlpKind.SWIGLU else 2
    mlp, mlp_formula = matrices * width * mlp_size, f"{matrices}EF"
    if config.mlp_bias:
        mlp, mlp_formula = mlp + (matrices - 1) * mlp_size + width, f"{mlp_formula} + {matrices - 1}F + E"
    parts = {"token embedding": ("VE", vocabulary * width)}
    if config.position is PositionKind.LEARNED:
        parts["position embedding"] = ("SE", config.max_context_length * width)
    parts["attention"] = (f"L({attention_formula})", layers * attention)
    parts["mlp"] = (f"L({mlp_formula})", layers * mlp)
    parts["norms"] = (f"(2L + 1){norm_formula}", (2 * layers + 1) * norm)
    if not config.tie_embeddings:
        parts["lm head"] = ("VE", vocabulary * width)
    return parts


def _parameter_rows(config: ModelConfig) -> Iterator[tuple[str, str]]:
    for part, (formula, number) in parameters_by_part(config).items():
        yield part, f"{number:>15,}  {number / config.num_parameters:6.1%}  = {formula}"
    yield "total", f"{config.num_parameters:>15,}"


def _memory_rows(config: ModelConfig) -> Iterator[tuple[str, str]]:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        kv_bytes = config.kv_bytes_per_token(size)
        yield (
            dtype,
            f"weights {_megabytes(config.num_parameters * size)}, KV-cache 2LKD·{size} = {kv_bytes:,} bytes a token, "
            f"{_megabytes(kv_bytes * config.max_context_length)} a full context",
        )


def _file_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for name, (size, digest) in manifest.files.items():
        yield name, f"{size:>13,} bytes  SHA-256 {digest[:16]}…"


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"
