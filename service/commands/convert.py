"""`kvasir convert`."""

import sys
from collections.abc import Sequence

from model.conversion.hugging_face import export_checkpoint
from model.conversion.nanogpt import convert_nanogpt
from model.conversion.safetensors_directory import convert_pickles
from model.manifest import CheckpointError, Manifest
from model.tokenizer.interface import TokenizerError
from service.command_settings import ConvertSettings
from service.settings import SettingsError, read_settings

_SUMMARY = (
    "Make a checkpoint of one kind from another: nanoGPT's ckpt.pt to one of ours, a Hugging Face directory of pickles "
    "to one of safetensors, one of ours to a Hugging Face directory. Code in a file is never run. What is written is "
    "verified."
)


def main(argv: Sequence[str]) -> int:
    """Convert, and say what was written. Exit codes: 0 done, 1 on a failure, 2 for unusable settings."""
    try:
        settings = read_settings(ConvertSettings, argv, command="convert", summary=_SUMMARY)
        manifest = _convert(settings)
    except (SettingsError, CheckpointError, TokenizerError) as error:
        print(f"kvasir convert: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    kind = "ours" if manifest.family is None else f"Hugging Face's, {manifest.family.model_type}"
    size = f"{manifest.config.num_parameters:,} parameters, {manifest.num_weight_bytes / 2**20:,.1f} MB of weights"
    print(f"{settings.out}: {size}, format {kind}; serve it with `kvasir serve --checkpoint {settings.out}`")
    return 0


def _convert(settings: ConvertSettings) -> Manifest:
    if settings.nanogpt is not None and settings.tokenizer is not None:
        return convert_nanogpt(settings.nanogpt, settings.tokenizer, settings.out)
    if settings.pickle is not None:
        return convert_pickles(settings.pickle, settings.out)
    assert settings.export is not None  # the settings saw to it
    return export_checkpoint(settings.export, settings.out)
