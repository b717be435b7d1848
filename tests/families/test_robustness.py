"""Random content of config.json, an index or a header is read or rejected in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.huggingface.directory import INDEX_FILE, find_weight_files
from model.huggingface.families.table import FAMILIES
from model.huggingface.family_table import read_family_config
from model.io.files import CheckpointError
from model.io.safetensors_header import read_headers
from tests.families.models import CASES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({key for case in CASES.values() for key in json.loads(case.config().to_json_string())})
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "low_freq_factor"]
ROPES = st.dictionaries(st.sampled_from(ROPE_KEYS), JSON, max_size=4)


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the CheckpointError that a call raises; an empty text without an error."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    model_type=st.sampled_from(sorted(FAMILIES)),
    values=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    rope=st.none() | ROPES,
)
def test_any_config_is_read_or_gives_one_error_line(
    model_type: str, values: dict[str, Any], rope: dict[str, Any] | None
) -> None:
    named = {"rope_scaling": rope, **values, "model_type": model_type}
    assert "\n" not in error_of(lambda: read_family_config(Path("config.json"), named))


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(weight_map=st.dictionaries(st.text(max_size=5), st.text(max_size=12) | JSON, max_size=3) | JSON)
def test_any_index_is_read_or_gives_one_error_line(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as caught:
        find_weight_files(tmp_path)
    assert "\n" not in str(caught.value)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    entry=st.dictionaries(st.sampled_from(sorted(ENTRY)), JSON), name=st.text(max_size=4), tail=st.binary(max_size=9)
)
def test_any_header_is_read_or_gives_one_error_line(
    tmp_path: Path, entry: dict[str, Any], name: str, tail: bytes
) -> None:
    text = json.dumps({name: {**ENTRY, **entry}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + tail)

    def read() -> None:
        for header in read_headers(path).values():
            assert header.end <= path.stat().st_size

    assert "\n" not in error_of(read)
