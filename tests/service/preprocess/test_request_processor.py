"""Conversion of requests into sequences: token ids, seeds, limits and errors."""

import dataclasses
import json
from typing import Any

import pytest

from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.interface import TokenizerError
from service.ipc.messages import TokenLogprob
from service.preprocess.request_processor import RequestProcessor, sample_seed
from service.preprocess.served_model import RequestDefaults
from service.protocol.completions import CompletionRequest
from service.protocol.errors import ApiError, ContextLengthExceeded, InvalidRequest, ModelNotFound
from service.protocol.logprobs import LogprobFormat, LogprobWriter
from service.requests.inflight import Choice


@pytest.fixture
def processor(tokenizer: ByteLevelTokenizer) -> RequestProcessor:
    return RequestProcessor(tokenizer=tokenizer, model_name="tiny", max_context_length=64, max_num_choices=12)


def plan(processor: RequestProcessor, **fields: Any) -> list[Choice]:
    request = CompletionRequest.parse(json.dumps({"prompt": "abc", **fields}).encode())
    processor.check(request)
    return processor.plan(request, arrival_seconds=3.0)


def test_choices_are_numbered_prompt_by_prompt(processor: RequestProcessor) -> None:
    choices = plan(processor, prompt=["ab", "c"], n=3)
    assert [(c.index, c.prompt_index) for c in choices] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert [c.submit.prompt_token_ids for c in choices] == [(97, 98)] * 3 + [(99,)] * 3
    assert len({c.submit.uid for c in choices}) == 6
    assert {c.submit.arrival_seconds for c in choices} == {3.0}


def test_every_sampling_field_reaches_the_engine(processor: RequestProcessor) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 7,
        "stop": ["x", "yz"],
        "stop_token_ids": [1],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 2,
    }
    (choice,) = plan(processor, **fields)
    params = choice.submit.params
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)
    assert params.prompt_logprobs is None
    (scored,) = plan(processor, **fields, echo=True)
    assert scored.submit.params.prompt_logprobs == 2
    for asked, found in ((0, 2), (5, 5)):  # the greater of `logprobs` and `prompt_logprobs`
        (scored,) = plan(processor, **fields, echo=True, prompt_logprobs=asked)
        assert scored.submit.params.prompt_logprobs == found
    (scored,) = plan(processor, prompt_logprobs=3)
    assert (scored.submit.params.prompt_logprobs, scored.submit.params.logprobs) == (3, None)


def test_the_first_sample_computes_the_prompt_logprobs_for_all_samples(processor: RequestProcessor) -> None:
    choices = plan(processor, prompt=["ab", "c"], n=2, echo=True, logprobs=3)
    assert [choice.submit.params.prompt_logprobs for choice in choices] == [3, None, 3, None]
    first, second, other, _ = (choice.prompt_logprobs for choice in choices)
    assert first is second
    assert first is not other


def test_a_top_k_of_minus_one_is_off(processor: RequestProcessor) -> None:
    assert plan(processor, top_k=-1)[0].submit.params.top_k == 0


def test_echo_returns_the_prompt_text(processor: RequestProcessor) -> None:
    assert [c.prompt_text for c in plan(processor, prompt=["ab", "é"], echo=True)] == ["ab", "é"]
    assert [c.prompt_text for c in plan(processor, prompt=[[97, 0xF0], [98]], echo=True)] == ["a\ufffd", "b"]
    assert plan(processor)[0].prompt_text == ""


def test_seeds_are_repeatable_and_different_for_each_sample(processor: RequestProcessor) -> None:
    def seeds(**fields: Any) -> list[int]:
        return [choice.submit.params.seed for choice in plan(processor, **fields)]

    assert seeds(seed=5, n=4) == seeds(seed=5, n=4)
    assert len(set(seeds(seed=5, n=8))) == 8
    assert seeds(seed=5, n=4)[:1] == seeds(seed=5)  # the first sample's seed does not depend on n
    assert seeds(seed=5, n=2, prompt=["a", "b"])[:2] == seeds(seed=5, n=2)  # nor a prompt's seeds on other prompts
    assert seeds(seed=5, n=2)[1] != seeds(seed=6, n=2)[1]
    assert len(set(seeds(n=8) + seeds(n=4))) == 12  # without a seed, all random
    assert 0 <= sample_seed(-1, 0) < 2**64
    assert sample_seed(-1, 0) == 2**64 - 1


def test_a_request_over_the_context_length_is_rejected_with_both_numbers(processor: RequestProcessor) -> None:
    assert len(plan(processor, prompt="a" * 60, max_tokens=4)) == 1
    with pytest.raises(
        ContextLengthExceeded, match="context length is 64 tokens, but the prompt has 60 tokens and max_tokens is 5"
    ):
        plan(processor, prompt="a" * 60, max_tokens=5)
    with pytest.raises(ContextLengthExceeded, match=r"the prompt has 60 tokens and max_tokens is 16, its default$"):
        plan(processor, prompt="a" * 60)
    with pytest.raises(ContextLengthExceeded, match="the prompt has 65"):
        plan(processor, prompt=[97] * 65, max_tokens=0)


def test_a_text_that_cannot_fit_is_rejected_without_tokenizing(
    processor: RequestProcessor, tokenizer: ByteLevelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteLevelTokenizer, "encode", lambda self, text, **more: pytest.fail("tokenized"))
    # A token covers at most 13 bytes: the name of the special token.
    with pytest.raises(ContextLengthExceeded, match="at least 76924"):
        plan(processor, prompt="a" * 1_000_000)


@pytest.mark.parametrize("token_id", [-1, 274, 2**62])
def test_token_ids_out_of_vocabulary_are_rejected(processor: RequestProcessor, token_id: int) -> None:
    for fields in ({"prompt": [1, token_id]}, {"prompt": [[1], [token_id]]}, {"stop_token_ids": [token_id]}):
        with pytest.raises(InvalidRequest, match="out of vocabulary") as caught:
            plan(processor, **fields)
        assert caught.value.param in ("prompt", "stop_token_ids")


def test_too_many_choices_are_rejected(processor: RequestProcessor) -> None:
    assert len(plan(processor, prompt=["a", "b"], n=6)) == 12
    with pytest.raises(InvalidRequest, match="13 completions, over the limit of 12"):
        plan(processor, n=13)


def test_min_tokens_over_max_tokens_is_rejected(processor: RequestProcessor) -> None:
    with pytest.raises(InvalidRequest, match="min_tokens=5 is over max_tokens=4; lower min_tokens"):
        plan(processor, min_tokens=5, max_tokens=4)


def test_an_unknown_model_is_not_found_and_null_means_the_served_model(processor: RequestProcessor) -> None:
    with pytest.raises(ModelNotFound, match="'gpt-4' does not exist"):
        plan(processor, model="gpt-4")
    assert plan(processor, model="tiny")
    assert plan(processor, model=None)


def test_a_text_prompt_begins_with_the_begin_of_text_token(tokenizer: ByteLevelTokenizer) -> None:
    marked = ByteLevelTokenizer(
        pattern=tokenizer.pattern,
        ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<begin>": 256, "<end>": 257},
        eos_token_ids=(257,),
        bos_token_id=256,
    )
    processor = RequestProcessor(tokenizer=marked, model_name="m", max_context_length=64, max_num_choices=4)
    assert plan(processor, prompt="ab")[0].submit.prompt_token_ids == (256, 97, 98)
    assert plan(processor, prompt=[97])[0].submit.prompt_token_ids == (97,)


def test_special_tokens_in_a_text_are_parsed_unless_the_request_or_the_server_says_otherwise(
    tokenizer: ByteLevelTokenizer,
) -> None:
    marked = ByteLevelTokenizer(
        pattern=tokenizer.pattern,
        ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<begin>": 256, "<end>": 257},
        eos_token_ids=(257,),
        bos_token_id=256,
    )
    parses = RequestProcessor(tokenizer=marked, model_name="m", max_context_length=64, max_num_choices=4)
    for processor, default in ((parses, True), (dataclasses.replace(parses, parse_special=False), False)):
        for fields, is_parsed in (({}, default), ({"parse_special": True}, True), ({"parse_special": False}, False)):
            (choice,) = plan(processor, prompt="a<end>b", **fields)
            expected = (97, 257, 98) if is_parsed else (97, *b"<end>", 98)
            assert choice.submit.prompt_token_ids == (256, *expected)
    # The begin-of-text token is not doubled, and a long text of special tokens fits the context.
    assert plan(parses, prompt="<begin>a")[0].submit.prompt_token_ids == (256, 97)
    assert plan(parses, prompt="<begin><begin>")[0].submit.prompt_token_ids == (256, 256)
    assert plan(parses, prompt="<end>" * 40)[0].submit.prompt_token_ids == (256, *[257] * 40)
    # Stop strings and forbidden words are texts.
    assert plan(parses, bad_words=["<end>"])[0].submit.params.bad_word_ids[0] == tuple(b"<end>")


def test_an_echoed_prompt_has_the_special_tokens_that_the_client_sent(tokenizer: ByteLevelTokenizer) -> None:
    marked = ByteLevelTokenizer(
        pattern=tokenizer.pattern,
        ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<begin>": 256, "<end>": 257},
        eos_token_ids=(257,),
        bos_token_id=256,
    )
    processor = RequestProcessor(tokenizer=marked, model_name="m", max_context_length=64, max_num_choices=4)
    for prompt, fields, text, offsets in (
        ("a<end>b", {}, "a<end>b", [0, 0, 1, 6]),
        ("<begin>a", {}, "<begin>a", [0, 7]),
        ("<end>", {"parse_special": False}, "<end>", [0, 0, 1, 2, 3, 4]),
        ("<begin>", {"parse_special": False}, "<begin>", [0, 0, 1, 2, 3, 4, 5, 6]),
        ("abc<end>d", {"truncate_prompt_tokens": 3}, "<end>d", [0, 0, 5]),
        ([256, 97, 257, 98], {}, "ab", [0, 0, 1, 1]),
        ([256, 97, 257, 98], {"skip_special_tokens": False}, "<begin>a<end>b", [0, 7, 8, 13]),
    ):
        (choice,) = plan(processor, prompt=prompt, echo=True, logprobs=0, **fields)
        assert choice.prompt_text == text
        entries = [TokenLogprob(token_id=i, logprob=-1.0, rank=1, top=()) for i in choice.submit.prompt_token_ids]
        writer = LogprobWriter(LogprobFormat(tokenizer=marked, num_top=0))
        written = writer.write([], prompt=entries, num_hidden=choice.num_hidden_prompt_tokens)
        assert written.text_offset == offsets


def test_special_tokens_are_visible_only_with_skip_special_tokens_false(processor: RequestProcessor) -> None:
    for fields, visible in (({}, ()), ({"skip_special_tokens": None}, ()), ({"skip_special_tokens": False}, (273,))):
        more = {"spaces_between_special_tokens": False, "detokenize": True}
        assert plan(processor, **fields, **more)[0].submit.params.visible_token_ids == visible
    with pytest.raises(InvalidRequest, match="detokenize is not supported"):
        plan(processor, detokenize=False)


@pytest.fixture
def mild(tokenizer: ByteLevelTokenizer) -> RequestProcessor:
    """Return a request processor for a checkpoint with default sampling parameters."""
    sampling = {"temperature": 0.0, "top_k": 7, "top_p": 0.5, "min_p": 0.25}
    defaults = RequestDefaults(sampling=sampling, max_new_tokens=50)
    return RequestProcessor(
        tokenizer=tokenizer, model_name="tiny", max_context_length=64, max_num_choices=12, defaults=defaults
    )


def test_a_request_gets_the_checkpoints_defaults(mild: RequestProcessor) -> None:
    for fields in ({}, dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "max_tokens"), None)):
        params = plan(mild, **fields)[0].submit.params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 7, 0.5, 0.25)
        assert params.max_tokens == 50


def test_request_fields_override_the_checkpoints_defaults(mild: RequestProcessor) -> None:
    params = plan(mild, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=16)[0].submit.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.max_tokens) == (1.0, 0, 1.0, 0.0, 16)


def test_a_default_length_is_cut_to_the_context_and_a_requested_length_is_not(mild: RequestProcessor) -> None:
    assert plan(mild, prompt="a" * 40)[0].submit.params.max_tokens == 24
    with pytest.raises(
        ContextLengthExceeded, match=r"the prompt has 64 tokens, which leaves no room for a completion$"
    ):
        plan(mild, prompt=[97] * 64)
    with pytest.raises(ContextLengthExceeded, match="the prompt has 40 tokens and max_tokens is 50"):
        plan(mild, prompt=[97] * 40, max_tokens=50)


def test_errors_of_lengths_and_of_the_model_name_the_field(processor: RequestProcessor) -> None:
    for fields, param in (({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"model": "gpt-4"}, "model")):
        with pytest.raises(ApiError) as caught:
            plan(processor, **fields)
        assert caught.value.param == param


def test_a_long_text_is_tokenized_if_tokens_have_no_maximum_length(
    processor: RequestProcessor, tokenizer: ByteLevelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "longest_token", None)
    monkeypatch.setattr(ByteLevelTokenizer, "encode", lambda self, text, **more: [97])
    assert plan(processor, prompt="é" * 1_000_000)[0].submit.prompt_token_ids == (97,)


def test_a_text_that_cannot_be_tokenized_is_a_400(processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ByteLevelTokenizer, text: str, **more: bool) -> list[int]:
        raise TokenizerError("no token stands for it")

    monkeypatch.setattr(ByteLevelTokenizer, "encode", refuse)
    with pytest.raises(InvalidRequest, match="no token stands for it") as caught:
        plan(processor, prompt="a")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_choice_has_the_grammar_and_the_field_of_the_grammar(processor: RequestProcessor) -> None:
    """If the grammar allows no token in the middle of a completion, the error names the request field."""
    fields = {"prompt": "abc", "structured_outputs": {"regex": "a+"}}
    request = CompletionRequest.parse(json.dumps(fields).encode())
    (choice,) = processor.plan(request, arrival_seconds=0.0, grammar="start: /a+/")
    assert choice.submit.grammar == "start: /a+/"
    assert choice.grammar_param == "structured_outputs.regex"
