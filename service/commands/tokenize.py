"""`kvasir tokenize`."""

import sys
from collections.abc import Sequence

from model.manifest import CheckpointError, read_manifest
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import TokenizerError
from service.logprobs import token_name
from service.settings import SettingsError, TokenizeSettings, read_settings

_SUMMARY = "Show how a text becomes token ids: one line a token, or with --ids-only the ids alone."


def main(argv: Sequence[str]) -> int:
    """Tokenize `--text`, or standard input."""
    try:
        settings = read_settings(TokenizeSettings, argv, command="tokenize", summary=_SUMMARY)
        tokenizer = load_tokenizer(read_manifest(settings.checkpoint).directory)
    except (SettingsError, CheckpointError, TokenizerError) as error:
        print(f"kvasir tokenize: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    try:
        text = sys.stdin.buffer.read().decode() if settings.text is None else settings.text
        token_ids = tokenizer.encode(text)
    except (UnicodeDecodeError, TokenizerError) as error:
        print(f"kvasir tokenize: {error}", file=sys.stderr)
        return 1
    if settings.ids_only:
        print(*token_ids)
        return 0
    for token_id in token_ids:
        print(f"{token_id:>8}  {token_name(tokenizer, token_id)!r}")
    size = len(text.encode())
    print(f"{len(token_ids)} tokens, {size} bytes, {size / max(1, len(token_ids)):.2f} bytes a token")
    return 0
