"""Named API keys from a file or the environment, kept as digests and compared in constant time."""

import hashlib
import hmac
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from service.config.settings import ServeSettings, SettingsError

# The characters of a key are valid after "Bearer" in a header, and those of a name are safe in a log line.
_LINE = re.compile(r"(?P<name>[\w.@-]{1,64})(?:\s*:\s*|\s+)(?P<key>[!-~]+)(?:\s+#.*)?")
_KEY = re.compile(r"[!-~]+")
DEFAULT_NAME = "default"  # of the key in KVASIR_API_KEY
# 16 characters of base64 are 96 bits: at a million guesses per second, finding a key takes 10^15 years.
_SHORT_KEY = 16


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """API keys of a server: SHA-256 digests by key name, and warnings about short keys or a world-readable file."""

    digests: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __str__(self) -> str:
        return ", ".join(self.digests) or "none: this server accepts requests without an API key"

    def name_of(self, key: bytes) -> str | None:
        """Return the name of an API key; None if the key is unknown. The comparison takes as long for any key."""
        presented = hashlib.sha256(key).digest()
        matches = [name for name, digest in self.digests.items() if hmac.compare_digest(presented, digest)]
        return matches[0] if matches else None


def read_api_keys(settings: ServeSettings) -> ApiKeys:
    """Return the API keys of `--api-keys-file`, KVASIR_API_KEYS and KVASIR_API_KEY together; no keys if none is set.

    Raises SettingsError if the file, a line or a key cannot be used, or if two names or two keys are equal.
    """
    found: list[tuple[str, str]] = []
    warnings: list[str] = []
    if (path := settings.api_keys_file) is not None:
        source = f"--api-keys-file {path}"
        try:
            found += _parse(path.read_text("utf-8-sig").splitlines(), source)
            if path.stat().st_mode & stat.S_IROTH:
                warnings.append(f"{source}: every user of this machine can read it; chmod 600 {path}")
        except OSError as error:
            raise SettingsError(f"{source}: the file of API keys cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{source}: the file of API keys is not UTF-8 text; save it as UTF-8") from None
    if settings.api_keys is not None:
        found += _parse(re.split(r"[,\n]", settings.api_keys.get_secret_value()), "KVASIR_API_KEYS")
    if settings.api_key is not None:
        key = settings.api_key.get_secret_value().strip()
        if not _KEY.fullmatch(key):
            raise SettingsError("KVASIR_API_KEY: must be one word of visible ASCII characters")
        found.append((DEFAULT_NAME, key))
    digests: dict[str, bytes] = {}
    for name, key in found:
        if len(key) < _SHORT_KEY:
            warnings.append(f"the API key of {name} has under {_SHORT_KEY} characters; use a longer key")
        if name in digests:
            raise SettingsError(f"two API keys are called {name}; rename one of them")
        digest = hashlib.sha256(key.encode()).digest()
        if (other := next((known for known, value in digests.items() if value == digest), None)) is not None:
            raise SettingsError(f"the API keys named {other} and {name} are equal; replace one of the keys")
        digests[name] = digest
    return ApiKeys(digests, tuple(warnings))


def _parse(lines: list[str], source: str) -> list[tuple[str, str]]:
    """Return the (name, key) pairs of lines NAME: KEY. An error never quotes a line, which may contain a key."""
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        matched = _LINE.fullmatch(text)
        if matched is None:
            raise SettingsError(
                f"{source}: entry {number} must be NAME: KEY; a name has letters, digits and . _ - @, "
                "a key is one word of visible ASCII characters"
            )
        found.append((matched["name"], matched["key"]))
    if not found:
        raise SettingsError(f"{source}: contains no API key; write one NAME: KEY per line")
    return found
