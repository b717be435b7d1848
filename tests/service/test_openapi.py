"""The document says what the code does."""

import json

import msgspec

from service import errors, responses
from service.openapi import openapi_document
from service.schemas import CompletionRequest


def test_every_reference_leads_somewhere() -> None:
    document = openapi_document()
    text = json.dumps(document)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]


def test_every_field_of_a_request_is_documented_and_no_other_is_allowed() -> None:
    schema = openapi_document()["components"]["schemas"]["CompletionRequest"]
    assert set(schema["properties"]) == set(CompletionRequest.model_fields)
    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is False


def test_answers_are_documented_by_what_is_encoded() -> None:
    schema = openapi_document()["components"]["schemas"]["Completion"]
    assert set(schema["properties"]) == set(responses.Completion.__struct_fields__)
    assert msgspec.json.schema_components([responses.Completion])[1]["Completion"]["required"] == schema["required"]


def test_completions_document_every_status_and_both_media_types() -> None:
    operation = openapi_document()["paths"]["/v1/completions"]["post"]
    assert set(operation["responses"]) == {"200", "400", "401", "404", "413", "429", "431", "500", "503"}
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    statuses = {str(kind.status) for kind in (errors.Overloaded, errors.Draining, errors.EngineFailed)}
    assert statuses <= set(operation["responses"])
