"""`kvasir serve`."""

import sys
from collections.abc import Sequence

from model.chat_template import ChatTemplateError
from model.generation_config import GenerationConfigError
from model.manifest import CheckpointError
from model.tokenizer.interface import TokenizerError
from service import logs
from service.server import StartError, build_server
from service.settings import ServeSettings, SettingsError, read_settings

_SUMMARY = "Serve a checkpoint over HTTP, in OpenAI's protocol. SIGTERM or Ctrl-C drains, a second one ends at once."


def main(argv: Sequence[str]) -> int:
    """Serve until a signal or a failure. Exit codes: 0 after a drain, 1 on a failure, 2 for unusable settings."""
    try:
        settings = read_settings(ServeSettings, argv, command="serve", summary=_SUMMARY)
        logs.configure(settings.log_level)
        server = build_server(settings)
        return server.serve()
    except SettingsError as error:
        print(f"kvasir serve: {error}", file=sys.stderr)
        return 2
    except (StartError, CheckpointError, TokenizerError, ChatTemplateError, GenerationConfigError) as error:
        if str(error):
            print(f"kvasir serve: {error}", file=sys.stderr)
        return 1
