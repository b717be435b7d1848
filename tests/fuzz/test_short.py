"""Each fuzz target on a few hundred inputs: seeds with parts removed, doubled, or replaced by unusual bytes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

UNUSUAL = [
    *(
        b"",
        b"\0",
        b'"',
        b"\\",
        b"{",
        b"[",
        b"]",
        b"}",
        b",",
        b":",
        b"-",
        b"\r\n",
        b"\r",
        b"\n",
        b"\xff",
        b"\xed\xa0\x80",
    ),
    *(b"null", b"true", b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"0.5", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000),
    *(b'""', b"[]", b"{}", b"\\ud800", b"\\u0000", b"2147483648", b"18446744073709551616", b"a" * 70_000),
]
PARTS = st.sampled_from(UNUSUAL) | st.binary(max_size=12)


@st.composite
def inputs(draw: st.DrawFn, target: str) -> bytes:
    data = draw(st.sampled_from(seeds()[target]))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 8, 40, 400, 4000])))
        data = data[:start] + draw(PARTS | st.just(data[start:end] * 2)) + data[end:]
    return data


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_pass(target: str) -> None:
    for data in seeds()[target]:
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_inputs_pass(target: str) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(inputs(target) | st.binary(max_size=60))
    def hold(data: bytes) -> None:
        TARGETS[target](data)

    hold()
