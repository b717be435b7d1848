"""Tenant, timeout and accepted wait of a request, from body, headers and settings."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from starlette.requests import Request

from service.admission.controller import QueuePolicy, read_queue_policy, tenant_of
from service.config.settings import ServeSettings
from service.http.middleware import KEY_NAME
from service.protocol.errors import InvalidRequest


def make(headers: Mapping[str, str] | None = None, *, host: str = "10.0.0.1", key: str | None = None) -> Request:
    written = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    state = {} if key is None else {KEY_NAME: key}
    return Request({"type": "http", "headers": written, "client": (host, 1), "state": state})


def make_settings(**changes: float) -> ServeSettings:
    return ServeSettings(checkpoint=Path("nowhere"), **changes)  # type: ignore[arg-type]


SETTINGS = make_settings(max_queue_seconds=60.0, target_queue_seconds=0.5)
UNLIMITED = make_settings(max_queue_seconds=0.0, target_queue_seconds=0.0)


def test_a_request_without_a_timeout_gets_the_limits_of_the_settings() -> None:
    assert read_queue_policy(make(), None, SETTINGS) == QueuePolicy(
        tenant="address 10.0.0.1", timeout_seconds=60.0, max_predicted_wait_seconds=0.5, is_retry=False
    )
    assert read_queue_policy(make(), None, UNLIMITED).deadline(1.0) is None
    assert read_queue_policy(make(), None, SETTINGS).deadline(1.0) == 61.0


@pytest.mark.parametrize(
    ("headers", "timeout", "timeout_seconds", "max_predicted_wait_seconds"),
    [
        ({}, 5.0, 5.0, 5.0),
        ({}, 0.1, 0.1, 0.1),
        ({}, 1000.0, 60.0, 60.0),
        ({"x-request-timeout": "5"}, None, 5.0, 5.0),
        ({"x-request-timeout": "5"}, 3.0, 3.0, 3.0),
        ({"x-stainless-read-timeout": "5.0"}, None, 5.0, 0.5),  # the SDK's default
        ({"x-stainless-read-timeout": "600"}, None, 60.0, 0.5),
        ({"x-stainless-timeout": "2"}, 10.0, 2.0, 2.0),
        ({"x-stainless-timeout": "0.2"}, None, 0.2, 0.2),
        ({"x-stainless-read-timeout": "None"}, None, 60.0, 0.5),
        ({"x-stainless-read-timeout": "inf"}, None, 60.0, 0.5),
        ({"x-stainless-timeout": "-1"}, None, 60.0, 0.5),
    ],
)
def test_the_shortest_timeout_applies(
    headers: dict[str, str], timeout: float | None, timeout_seconds: float, max_predicted_wait_seconds: float
) -> None:
    terms = read_queue_policy(make(headers), timeout, SETTINGS)
    assert (terms.timeout_seconds, terms.max_predicted_wait_seconds) == (timeout_seconds, max_predicted_wait_seconds)


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf"])
def test_an_invalid_timeout_header_is_rejected(value: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a number of seconds above 0") as caught:
        read_queue_policy(make({"x-request-timeout": value}), None, SETTINGS)
    assert caught.value.param == "x-request-timeout"


@pytest.mark.parametrize(("count", "is_retry"), [("0", False), ("1", True), ("10", True), ("", False), ("x", False)])
def test_a_retry_of_the_sdk_accepts_any_wait_within_its_timeout(count: str, is_retry: bool) -> None:
    terms = read_queue_policy(
        make({"x-stainless-retry-count": count, "x-stainless-read-timeout": "20"}), None, SETTINGS
    )
    assert terms.is_retry is is_retry
    assert terms.max_predicted_wait_seconds == (20.0 if is_retry else 0.5)


def test_the_tenant_is_the_api_key_or_the_client_address() -> None:
    assert tenant_of(make(key="tales")) == "key tales"
    assert tenant_of(make()) == "address 10.0.0.1"
    assert (
        tenant_of(make(host="2001:db8:1:2:3::4"))
        == tenant_of(make(host="2001:db8:1:2::5"))
        == ("address 2001:db8:1:2::/64")
    )
    assert tenant_of(make(host="2001:db8:1:3::4")) != tenant_of(make(host="2001:db8:1:2::4"))
    assert tenant_of(make(host="testclient")) == "address testclient"
    assert tenant_of(Request({"type": "http", "headers": [], "client": None})) == "address "


def test_each_key_has_its_own_prefix_cache_unless_the_setting_shares_it() -> None:
    for settings, namespaces in ((SETTINGS, ["", "bob"]), (make_settings(share_prefix_cache=True), ["", ""])):
        found = [read_queue_policy(make(key=key), None, settings).cache_namespace for key in (None, "bob")]
        assert found == namespaces


def test_a_setting_of_0_means_no_queue_limit() -> None:
    terms = read_queue_policy(make(), None, UNLIMITED)
    assert (terms.timeout_seconds, terms.max_predicted_wait_seconds) == (math.inf, math.inf)
