"""Command `kvasir serve`."""

import sys

from model.chat_template import ChatTemplateError
from model.generation_config import GenerationConfigError
from model.manifest import CheckpointError
from model.tokenizer.interface import TokenizerError
from service import logs
from service.server import build_server
from service.settings import ServeSettings
from service.supervision import StartError


def main(settings: ServeSettings) -> int:
    """Serve until a signal or a failure. Exit codes: 0 after a drain, 1 failure, 2 invalid settings."""
    try:
        logs.configure(settings.log_level)
        server = build_server(settings)
        return server.serve()
    except (StartError, CheckpointError, TokenizerError, ChatTemplateError, GenerationConfigError) as error:
        if str(error):
            print(f"kvasir serve: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, StartError) else 1
