"""Server of all hostile tests: API keys, debug log, short timeouts and few slots."""

from collections.abc import Iterator

import pytest

from tests.e2e.process import Service, serving
from tests.hostile.raw import ALICE, BOB, CAROL, MAX_CONNECTIONS
from tests.tiny_model import save_tiny_checkpoint

# Chat template that fails for one message, as a third-party template may.
TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'boom' %}{{ 1 / 0 }}{% endif %}{{ message.content }}"
    "{% endfor %}"
)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("hostile")
    keys, template = directory / "keys", directory / "template.jinja"
    keys.write_text(f"alice: {ALICE}\n")
    keys.chmod(0o600)
    template.write_text(TEMPLATE)
    checkpoint = save_tiny_checkpoint(directory / "tiny", max_context_length=512)
    flags = ("--api-keys-file", str(keys), "--chat-template", str(template), "--log-level", "debug")
    bounds = ("--client-seconds", "2", "--max-connections", str(MAX_CONNECTIONS))
    variables = {"KVASIR_API_KEYS": f"bob: {BOB}", "KVASIR_API_KEY": CAROL}
    with serving(checkpoint, directory, *flags, *bounds, **variables) as running:
        yield running
