"""Command `kvasir export-tokenizer`."""

from model.checkpoint.manifest import read_manifest
from model.tokenizer.export import export_tokenizer
from model.tokenizer.files import load_tokenizer
from service.config.settings import ExportTokenizerSettings


def main(settings: ExportTokenizerSettings) -> int:
    """Export the tokenizer of `--checkpoint` to `--out`."""
    directory = read_manifest(settings.checkpoint).directory
    for path in export_tokenizer(load_tokenizer(directory), directory, settings.out):
        print(path)
    return 0
