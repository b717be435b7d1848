"""API keys from files and variables, and errors that never quote a key."""

import hashlib
import hmac
import logging
from pathlib import Path

import pytest

from service.config.settings import ServeSettings, SettingsError, effective_values, read_settings
from service.http.api_keys import ApiKeys, read_api_keys

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef:+/="


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVASIR_API_KEYS", "KVASIR_API_KEY", "KVASIR_API_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)


def read(*argv: str) -> ApiKeys:
    settings = read_settings(ServeSettings, ["--checkpoint", "c", *argv], command="serve", summary="Serve.")
    return read_api_keys(settings)


def in_file(directory: Path, text: str) -> ApiKeys:
    path = directory / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return read("--api-keys-file", str(path))


def test_a_key_file_has_one_key_per_line(tmp_path: Path) -> None:
    keys = in_file(tmp_path, f"# who may\n\nalice: {ALICE}\n  bob  {BOB}   # until May\nci.bot@x:{ALICE}2\n")
    assert list(keys.digests) == ["alice", "bob", "ci.bot@x"]
    for name, key in (("alice", ALICE), ("bob", BOB), ("ci.bot@x", ALICE + "2")):
        assert keys.name_of(key.encode()) == name
    for wrong in (b"", b"alice", ALICE[:-1].encode(), ALICE.upper().encode(), b"\xff"):
        assert keys.name_of(wrong) is None
    assert keys.warnings == ()


def test_variables_hold_keys_and_add_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_API_KEYS", f"alice: {ALICE}, bob {BOB}\n")
    assert list(read().digests) == ["alice", "bob"]
    monkeypatch.setenv("KVASIR_API_KEY", "sk-of-nobody-in-particular")
    assert read().name_of(b"sk-of-nobody-in-particular") == "default"
    assert list(in_file(tmp_path, f"carol: {ALICE}3\n").digests) == ["carol", "alice", "bob", "default"]


def test_without_keys_no_request_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read()
    monkeypatch.setenv("KVASIR_API_KEYS", "")
    assert not read()
    assert str(read()) == "none: this server accepts requests without an API key"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "contains no API key; write one NAME: KEY per line"),
        ("# alice: sk-secret\n\n", "contains no API key"),
        ("\nsk-secret\n", "entry 2 must be NAME: KEY"),
        ("alice: sk-secret and more", "entry 1 must be NAME: KEY"),
        ("alice: sk-secrét", "entry 1 must be NAME: KEY"),
        ("a/b: sk-secret", "entry 1 must be NAME: KEY"),
        ("alice: sk-secret\nalice: sk-secret2\n", "two API keys are called alice"),
        ("alice: sk-secret\nbob: sk-secret\n", "the API keys named alice and bob are equal"),
    ],
)
def test_an_invalid_key_source_is_named_without_quoting_a_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        in_file(tmp_path, text)
    assert said in str(caught.value)
    assert "sk-" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none", "No such file"), (".", "Is a directory"), ("binary", "not UTF-8 text")):
        with pytest.raises(SettingsError, match=f"--api-keys-file {tmp_path / name}: .*{said}"):
            read("--api-keys-file", str(tmp_path / name))


def test_insecure_keys_cause_warnings(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice: {ALICE}\nbob: short\n")
    path.chmod(0o644)
    everybody, short = read("--api-keys-file", str(path)).warnings
    assert f"every user of this machine can read it; chmod 600 {path}" in everybody
    assert short == "the API key of bob has under 16 characters; use a longer key"


def test_every_digest_is_compared_for_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys({name: hashlib.sha256(name.encode()).digest() for name in "abcd"})
    compared: list[bytes] = []
    compare_digest = hmac.compare_digest

    def compare(presented: bytes, digest: bytes) -> bool:
        compared.append(digest)
        return compare_digest(presented, digest)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (b"a", b"d", b"z"):
        compared.clear()
        keys.name_of(key)
        assert compared == list(keys.digests.values())


def test_an_api_key_has_no_flag_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["--api-key", "sk-secret"], ["--api-keys=a: sk-secret"]):
        with pytest.raises(SettingsError, match="is not a flag, because flags show in the list of processes") as caught:
            read(*argv)
        assert "sk-secret" not in str(caught.value)
    monkeypatch.setenv("KVASIR_API_KEY", "sk-secret")
    monkeypatch.setenv("KVASIR_API_KEYS", f"alice: {ALICE}")
    settings = read_settings(ServeSettings, ["--checkpoint", "c"], command="serve", summary="Serve.")
    with caplog.at_level(logging.DEBUG):
        keys = read_api_keys(settings)
    shown = [*effective_values(settings, {"api_keys": keys}), repr(settings), str(settings), repr(keys)]
    told = "\n".join([*shown, *keys.warnings, caplog.text, *capsys.readouterr()])
    assert "sk-secret" not in told
    assert ALICE not in told
    assert "alice, default" in told
    monkeypatch.setenv("KVASIR_API_KEY", "sk secret")
    with pytest.raises(SettingsError, match="KVASIR_API_KEY: must be one word of visible ASCII characters") as caught:
        read()
    assert "sk secret" not in str(caught.value)
