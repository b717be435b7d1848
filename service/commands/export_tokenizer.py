"""`kvasir export-tokenizer`."""

import sys
from collections.abc import Sequence

from model.manifest import CheckpointError, read_manifest
from model.tokenizer.export import export_tokenizer
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import TokenizerError
from service.command_settings import ExportTokenizerSettings
from service.settings import SettingsError, read_settings

_SUMMARY = (
    "Write a checkpoint's tokenizer as a Hugging Face directory, which transformers.AutoTokenizer reads: benchmark "
    "tools then count the tokens this service counts. One difference stays: transformers takes a control mark that "
    "stands in a text as one, the service takes it as text."
)


def main(argv: Sequence[str]) -> int:
    """Export the tokenizer of `--checkpoint` to `--out`."""
    try:
        settings = read_settings(ExportTokenizerSettings, argv, command="export-tokenizer", summary=_SUMMARY)
        directory = read_manifest(settings.checkpoint).directory
        files = export_tokenizer(load_tokenizer(directory), directory, settings.out)
    except (SettingsError, CheckpointError, TokenizerError) as error:
        print(f"kvasir export-tokenizer: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    for path in files:
        print(path)
    return 0
