"""Scores of a real server, compared with the model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.tokenizer.files import load_tokenizer
from tests.e2e.process import serving, wait_until
from tests.tiny_model import save_tiny_checkpoint

pytestmark = pytest.mark.slow

DOCUMENTS = ["the theatre", "a hat 😀", "an ending" * 5, *(f"once {number}" for number in range(100))]


def test_yes_no_scores_are_those_of_the_model(tmp_path: Path) -> None:
    """The random model seldom has no among its 20 most likely tokens, so second sequences must say no."""
    directory = save_tiny_checkpoint(tmp_path / "tiny", b"yes", b"no")
    template = tmp_path / "template"
    template.write_text("{query}? {document}: ")
    tokenizer = load_tokenizer(directory)
    model = load_model(
        read_manifest(directory), device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["eager"]
    )
    expected = []
    for document in DOCUMENTS:
        ids = tokenizer.encode(f"in the hat? {document}: ")
        with torch.inference_mode():
            logits_V = model(torch.tensor(ids), AttentionMetadata.uncached((len(ids),)), None)[-1]
        yes, no = (logits_V[tokenizer.encode(word)[0]] for word in ("yes", "no"))
        expected.append(float(torch.sigmoid(yes - no)))
    flags = ("--rerank-template", str(template), "--max-num-running", "8", "--max-batched-tokens", "64")
    with serving(directory, tmp_path, *flags) as service:
        body = service.post("/v1/score", text_1="in the hat", text_2=DOCUMENTS).json()
        np.testing.assert_allclose([each["score"] for each in body["data"]], expected, atol=1e-5)
        ranking = service.post("/rerank", query="in the hat", documents=DOCUMENTS, top_n=5).json()["results"]
        assert [each["relevance_score"] for each in ranking] == sorted(
            (each["relevance_score"] for each in ranking), reverse=True
        )
        np.testing.assert_allclose([each["relevance_score"] for each in ranking], sorted(expected)[:-6:-1], atol=1e-5)
        worker = service.worker
        worker.suspend()  # so that the request is not computed before its client disconnects
        try:
            with service.asking("/rerank", query="in the hat", documents=DOCUMENTS):
                wait_until(lambda: service.metric("llm_api_requests") == 1, what="the request to be taken")
        finally:
            worker.resume()
        wait_until(lambda: service.metric("llm_requests_cancelled_total") >= 1, what="the cancellation")
        wait_until(lambda: service.metric("llm_num_requests_running") == 0, what="an idle engine")
