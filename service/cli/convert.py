"""Command `kvasir convert`."""

from model.checkpoint.conversion.export_hugging_face import export_checkpoint
from model.checkpoint.conversion.import_nanogpt import convert_nanogpt
from model.checkpoint.conversion.import_pickles import convert_pickles
from model.checkpoint.conversion.quantize import quantize_checkpoint
from service.cli.main import program
from service.config.settings import ConvertSettings


def main(settings: ConvertSettings) -> int:
    """Run `kvasir convert`: convert a checkpoint, and print the directory, size and format of the new checkpoint."""
    if settings.nanogpt is not None and settings.tokenizer is not None:
        manifest = convert_nanogpt(settings.nanogpt, settings.tokenizer, settings.out)
    elif settings.pickle is not None:
        manifest = convert_pickles(settings.pickle, settings.out)
    elif settings.source is not None and settings.quantize is not None:
        manifest = quantize_checkpoint(settings.source, settings.out, settings.quantize)
    else:
        assert settings.export is not None  # the settings require exactly one source
        manifest = export_checkpoint(settings.export, settings.out)
    kind = "native" if manifest.family is None else f"Hugging Face, {manifest.family.model_type}"
    size = f"{manifest.config.num_parameters:,} parameters, {manifest.num_weight_bytes / 2**20:,.1f} MiB of weights"
    print(f"wrote {settings.out}: {size}, format {kind}; serve it with `{program()} serve --checkpoint {settings.out}`")
    return 0
