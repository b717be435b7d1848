"""Prompt logprobs that all samples of a prompt share."""

from service.admission.controller import Admission
from service.ipc.messages import Command, Submit, TokenLogprob
from service.requests.engine_client import EngineClient
from tests.service.desk import fake_workers
from tests.service.sequences import make_choice, make_delta, make_hello, make_request


def test_after_a_worker_death_each_sample_computes_prompt_logprobs_and_the_first_result_counts() -> None:
    """After a worker death any sample may run first, because a sample that may be the cause is held back."""
    sent: list[Command] = []
    engine_client = EngineClient(
        **fake_workers(sent.extend),
        admission=Admission(max_num_running=8, max_waiting_requests=8, max_waiting_tokens=1000),
        on_worker_ready=lambda hello, worker: None,
        on_engine=lambda event, worker: None,
        on_replay=lambda outcome: None,
        on_late=lambda num_tokens: None,
        on_count=lambda number: None,
    )
    choices = [
        make_choice("first", prompt_logprobs=2),
        make_choice("second", index=1),
        make_choice("other", index=2, prompt_index=1),
    ]
    choices[1].prompt_logprobs = choices[0].prompt_logprobs
    engine_client.submit(make_request(*choices))
    sent.clear()
    engine_client.receive([make_hello(1)])
    again = {submit.uid: submit.params.prompt_logprobs for submit in sent if isinstance(submit, Submit)}
    assert again == {"first": 2, "second": 2, "other": None}
    ids = choices[0].submit.prompt_token_ids
    scores = [
        tuple(TokenLogprob(token_id=i, logprob=logprob, rank=1, top=()) for i in ids) for logprob in (-1.0, -1.0001)
    ]
    for uid, told in zip(("second", "first"), scores, strict=True):
        engine_client.receive([make_delta(uid, attempt=1, ids=(5,), text="x", prompt_logprobs=told)])
        assert choices[0].prompt_logprobs == list(scores[0])
    sent.clear()
    engine_client.receive([make_hello(2)])
    assert {submit.params.prompt_logprobs for submit in sent if isinstance(submit, Submit)} == {None}
