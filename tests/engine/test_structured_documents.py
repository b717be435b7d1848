"""A thousand documents over fifty JSON Schemas each end by themselves and are valid."""

import json

import jsonschema

from model.structured_output.grammar import json_grammar
from service.ipc.messages import FinishReason
from tests.engine.grammar_runs import ask, drive, make_engine, schemas

_NUM_SCHEMAS, _NUM_DOCUMENTS = 50, 20


def test_a_thousand_documents_are_valid() -> None:
    """The model has random weights, so only the grammar masks make the documents valid."""
    wanted = schemas(_NUM_SCHEMAS)
    submits = [
        ask(f"{number}-{sample}", json_grammar(schema), seed=sample, max_tokens=900)
        for number, schema in enumerate(wanted)
        for sample in range(_NUM_DOCUMENTS)
    ]
    outcomes = drive(make_engine(num_blocks=6000), submits)
    assert len(outcomes) == 1000
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for uid, outcome in outcomes.items():
        assert outcome.reason is FinishReason.STOP, f"{uid}: {outcome.reason}: {outcome.text!r}"
        schema = wanted[int(uid.split("-")[0])]
        jsonschema.validate(
            json.loads(outcome.text), schema, cls=jsonschema.Draft202012Validator, format_checker=checker
        )
    assert len({outcome.text for outcome in outcomes.values()}) > 500
