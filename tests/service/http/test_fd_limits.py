"""Number of client connections that the limit of open files allows."""

import pytest

from service.config.settings import SettingsError
from service.http.connection import RESERVED_FILES, limit_connections


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "numbers"),
    [
        (1024, 4096, 2088, (1000, 1024)),
        (1024, -1, 2088, (1000, 1024)),
        (1024, 1500, 1500, (1000, 436)),
        (1024, 1024, 1024, (960, 0)),
        (8192, 8192, 8192, (1000, 1024)),
        (-1, -1, -1, (1000, 1024)),
    ],
)
def test_connections_fit_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, numbers: tuple[int, int]
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr("resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, given: limits.append(given))
    assert limit_connections(1000) == numbers
    assert limits[-1] == (raised, hard)


def test_a_limit_of_open_files_without_room_for_connections_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (RESERVED_FILES + 15, RESERVED_FILES + 15))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    with pytest.raises(SettingsError, match=r"only 79 files .* raise the limit \(ulimit -n\) to 1064"):
        limit_connections(1000)
    assert limit_connections(15) == (15, 0)
