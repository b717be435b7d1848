"""Field `suffix` of `/v1/completions`: prompts that are filled in the middle."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import AddedToken

from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.files import load_tokenizer
from service.ipc.messages import Submit
from service.preprocess.request_processor import RequestProcessor
from service.protocol.completions import CompletionRequest
from service.protocol.errors import ContextLengthExceeded, InvalidRequest
from tests.model.tokenizer import makers
from tests.tiny_model import tiny_tokenizer

PREFIX, SUFFIX, MIDDLE, PAD, BEGIN = range(274, 279)
NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<s>")


def coder(*, bos_token_id: int | None = None) -> RequestProcessor:
    plain = tiny_tokenizer()
    tokenizer = ByteLevelTokenizer(
        pattern=plain.pattern,
        ranks=dict(plain.ranks),
        special_tokens={**plain.special_tokens, **dict(zip(NAMES, range(274, 279), strict=True))},
        eos_token_ids=plain.eos_token_ids,
        bos_token_id=bos_token_id,
    )
    return RequestProcessor(tokenizer=tokenizer, model_name="tiny", max_context_length=64, max_num_choices=12)


def submits(processor: RequestProcessor, **fields: Any) -> list[Submit]:
    request = CompletionRequest.parse(json.dumps({"prompt": "ab", "suffix": "yz", **fields}).encode())
    processor.check(request)
    return [choice.submit for choice in processor.plan(request, arrival_seconds=3.0)]


def refused(processor: RequestProcessor, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        submits(processor, **fields)
    return caught.value


def test_the_prompt_stands_between_the_markers() -> None:
    (submit,) = submits(coder())
    assert submit.prompt_token_ids == (PREFIX, *b"ab", SUFFIX, *b"yz", MIDDLE)
    assert set(submit.params.stop_token_ids) == {PREFIX, SUFFIX, MIDDLE, PAD, 273}
    (submit,) = submits(coder(bos_token_id=BEGIN))
    assert submit.prompt_token_ids == (BEGIN, PREFIX, *b"ab", SUFFIX, *b"yz", MIDDLE)


def test_every_prompt_of_a_list_gets_the_suffix() -> None:
    made = submits(coder(), prompt=["a", "", "b"], n=2, stop_token_ids=[9, PAD])
    assert [submit.prompt_token_ids for submit in made] == [
        (PREFIX, *prefix, SUFFIX, *b"yz", MIDDLE) for prefix in (b"a", b"a", b"", b"", b"b", b"b")
    ]
    assert made[0].params.stop_token_ids[:2] == (9, PAD)
    assert len(made[0].params.stop_token_ids) == 6
    assert submits(coder(), prompt=[[5, 6]])[0].prompt_token_ids == (PREFIX, 5, 6, SUFFIX, *b"yz", MIDDLE)
    assert submits(coder(), prompt="")[0].prompt_token_ids == (PREFIX, SUFFIX, *b"yz", MIDDLE)


def test_with_ignore_eos_no_token_ends_the_completion() -> None:
    assert submits(coder(), ignore_eos=True)[0].params.stop_token_ids == ()


@pytest.mark.parametrize("suffix", [None, ""])
def test_an_empty_suffix_changes_nothing(suffix: str | None) -> None:
    (submit,) = submits(coder(), suffix=suffix)
    assert (submit.prompt_token_ids, submit.params.stop_token_ids) == (tuple(b"ab"), ())


def test_marker_names_in_a_text_are_not_markers() -> None:
    (submit,) = submits(coder(), prompt="<|fim_suffix|>", suffix="<|fim_middle|>")
    assert submit.prompt_token_ids == (PREFIX, *b"<|fim_suffix|>", SUFFIX, *b"<|fim_middle|>", MIDDLE)


def test_a_text_that_the_tokenizer_reads_as_a_marker_is_rejected(tmp_path: Path) -> None:
    """Qwen2.5-Coder's markers are ordinary added tokens, which the library finds in every text."""
    library = makers.qwen()
    library.add_tokens([AddedToken(name, normalized=False, special=False) for name in NAMES])
    tokenizer = load_tokenizer(makers.write(tmp_path, library))
    processor = RequestProcessor(tokenizer=tokenizer, model_name="q", max_context_length=64, max_num_choices=4)
    assert len(submits(processor)) == 1
    for field in ("prompt", "suffix"):
        error = refused(processor, **{field: "a<|fim_middle|>b"})
        assert (error.param, error.status) == (field, 400)
        assert f"{field} contains the token '<|fim_middle|>'" in error.message


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"echo": True}, "echo", "echo cannot be used with suffix"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "cannot be used with suffix"),
        ({"stop_token_ids": list(range(128))}, "stop_token_ids", "has 128 ids, and suffix adds 5"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [[999]]}, "prompt", "token id 999 is out of vocabulary"),
        ({"suffix": "a" * 2_000}, "suffix", "but suffix has at least"),
        ({"suffix": ["a"]}, "suffix", "suffix must be"),
        ({"prompt": "a" * 50}, "max_tokens", "but the prompt has 55 tokens and max_tokens is 16"),
    ],
)
def test_an_unusable_field_beside_a_suffix_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    error = refused(coder(), **fields)
    assert (error.param, error.status) == (param, 400)
    assert said in error.message
    assert isinstance(error, ContextLengthExceeded) == ("but" in said)


def test_a_model_without_such_tokens_rejects_a_suffix(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "suffix")
    assert "<|fim_prefix|> <|fim_suffix|> <|fim_middle|>, or <fim_prefix>" in error["message"]
