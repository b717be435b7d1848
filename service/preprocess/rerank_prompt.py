"""Prompts of generative rerankers: the model is asked if a document answers a query, and says `yes` or `no`."""

import re
from collections.abc import Mapping
from pathlib import Path

from model.chat.special_token_escaping import ForbiddenText, SpecialTokenEscaper
from model.io.files import CheckpointError, read_text
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.config.settings import ServeSettings, SettingsError
from service.protocol.errors import InvalidRequest
from service.protocol.scores import TextPairs

YES, NO = "yes", "no"
_PLACES = re.compile(r"\{(query|document)\}")
# https://huggingface.co/Qwen/Qwen3-Reranker-0.6B, "Transformers Usage".
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# Templates of published checkpoints, by a part of the directory's name in lower case.
_TEMPLATES: Mapping[str, str] = {"qwen3-reranker": _QWEN3}


class RerankPrompt:
    """Prompt of a pair of texts, after which the model says `yes` or `no`. `yes_id`, `no_id`: ids of these tokens."""

    def __init__(self, template: str, tokenizer: Tokenizer, *, yes_id: int, no_id: int) -> None:
        self.yes_id, self.no_id = yes_id, no_id
        self._template = template
        self._tokenizer = tokenizer
        self._escaper = SpecialTokenEscaper(tokenizer)

    def encode(self, pairs: TextPairs, query: str, document: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a pair's prompt. Names of special tokens in the texts are plain text.

        max_tokens: cut the document's end so that the prompt has at most this many tokens, if the rest leaves room.
        Raises InvalidRequest if a text cannot be tokenized.
        """
        param = pairs.document_param
        try:
            token_ids = self._encode(query, document)
            if max_tokens is None or len(token_ids) <= max_tokens:
                return token_ids
            document_ids = self._tokenizer.encode(document)
            while document_ids and len(token_ids) > max_tokens:
                del document_ids[max(0, len(document_ids) - (len(token_ids) - max_tokens)) :]
                token_ids = self._encode(query, self._tokenizer.decode(document_ids).rstrip("\ufffd"))
            return token_ids
        except (ForbiddenText, TokenizerError) as error:
            raise InvalidRequest.of(param, f": {error}") from None

    def _encode(self, query: str, document: str) -> list[int]:
        (texts,), breaker = self._escaper.escape([{"query": query, "document": document}])
        token_ids = self._escaper.encode(_PLACES.sub(lambda place: str(texts[place[1]]), self._template), breaker)
        begin = self._tokenizer.bos_token_id
        return token_ids if begin is None or token_ids[:1] == [begin] else [begin, *token_ids]


def read_rerank_prompt(settings: ServeSettings, tokenizer: Tokenizer) -> RerankPrompt | None:
    """Return the prompt of yes-no scores; None if scores are similarities of embeddings.

    With --score-method auto, scores are yes-no if there is a template, and `yes` and `no` are one token each.

    Raises:
        SettingsError: --score-method yes-no without a template, or with a tokenizer that splits `yes` or `no`.
        CheckpointError: the template file cannot be used.
    """
    if settings.score_method == "embedding":
        return None
    needs_yes_no, template = settings.score_method == "yes-no", _read_template(settings)
    if template is None:
        if needs_yes_no:
            raise SettingsError("--score-method yes-no needs a template; give a file with --rerank-template")
        return None
    ids = [tokenizer.encode(answer) for answer in (YES, NO)]
    if any(len(each) != 1 for each in ids):
        if needs_yes_no:
            raise SettingsError(
                "--score-method yes-no needs a tokenizer in which yes and no are one token each; "
                "use --score-method embedding"
            )
        return None
    return RerankPrompt(template, tokenizer, yes_id=ids[0][0], no_id=ids[1][0])


def _read_template(settings: ServeSettings) -> str | None:
    origin = settings.rerank_template
    if origin == "none":
        return None
    if origin == "auto":
        name = settings.checkpoint.resolve().name.lower()
        return next((template for part, template in _TEMPLATES.items() if part in name), None)
    if not Path(origin).is_file():
        raise CheckpointError(f"--rerank-template {origin}: no such file; give auto, none or a text file")
    template = read_text(Path(origin))
    if set(_PLACES.findall(template)) != {"query", "document"}:
        raise CheckpointError(f"{origin}: a template needs {{query}} and {{document}}; add them")
    return template
