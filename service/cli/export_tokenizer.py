"""Command `kvasir export-tokenizer`."""

import sys

from model.checkpoint.manifest import CheckpointError, read_manifest
from model.tokenizer.export import export_tokenizer
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import TokenizerError
from service.config.settings import ExportTokenizerSettings


def main(settings: ExportTokenizerSettings) -> int:
    """Export the tokenizer of `--checkpoint` to `--out`."""
    try:
        directory = read_manifest(settings.checkpoint).directory
        files = export_tokenizer(load_tokenizer(directory), directory, settings.out)
    except (CheckpointError, TokenizerError) as error:
        print(f"kvasir export-tokenizer: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(path)
    return 0
