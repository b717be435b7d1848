"""Command `kvasir tokenize`."""

import sys

from model.checkpoint.manifest import read_manifest
from model.tokenizer.files import load_tokenizer
from service.config.settings import TokenizeSettings
from service.protocol.logprobs import format_token_name


def main(settings: TokenizeSettings) -> int:
    """Print the tokens of `--text` or standard input."""
    tokenizer = load_tokenizer(read_manifest(settings.checkpoint).directory)
    begin = [] if settings.no_begin or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    text = sys.stdin.buffer.read().decode() if settings.text is None else settings.text
    token_ids = [*begin, *tokenizer.encode(text)]
    if settings.ids_only:
        print(*token_ids)
        return 0
    for token_id in token_ids:
        name = format_token_name(tokenizer, token_id)
        print(f"{token_id:>8}  {name if name.startswith('bytes:') else repr(name)}")
    size, num_text = len(text.encode("utf-8", "surrogateescape")), len(token_ids) - len(begin)
    count = f"{len(token_ids)} token{'' if len(token_ids) == 1 else 's'}{' (1 is begin-of-text)' if begin else ''}"
    print(f"{count}, {size} bytes, {size / max(1, num_text):.2f} bytes per token of text")
    return 0
