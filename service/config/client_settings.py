"""Settings of the commands that are clients of a server: `kvasir batch` and `kvasir chat`."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import SecretStr, ValidationError, model_validator

from service.config.flags import CommandSettings, OutputFile, SettingsError, option
from service.config.settings import first_problem


class BatchSettings(CommandSettings):
    """Answer a file of requests in OpenAI's batch format, one JSON object per line: custom_id, method, url and body.
    Each line of the output file is one response. The same command continues an interrupted batch. Without --url it
    starts a server for --checkpoint, which KVASIR_* variables configure as they do `kvasir serve`, and stops it at the
    end.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ("input", "output")

    input: Path = option("files", metavar="FILE")
    """file of requests, one JSON object per line"""
    output: OutputFile = option("files", metavar="FILE")
    """file to append the responses to; a request whose custom_id it contains is not sent again"""
    url: str | None = option("server", None, pattern=r"^https?://[!-~]+$")
    """base URL of a running server, such as http://127.0.0.1:8000 (default: start a server)"""
    checkpoint: Path | None = option("server", None, default_text="the shipped model, without --url")
    """checkpoint directory to start a server for"""
    api_key: SecretStr | None = option("server", None)
    """API key of the server"""
    concurrency: int = option("requests", 64, ge=1, le=4096)
    """maximum requests at a time; the default is that of --max-num-running of `kvasir serve`"""
    max_retries: int = option("requests", 20, ge=0, le=1000)
    """maximum retries of a request that a busy server rejects, or whose connection is lost"""

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.url is not None and self.checkpoint is not None:
            raise ValueError("give either --url (a running server) or --checkpoint (a server to start), not both")
        if self.url is None and self.checkpoint is None:
            raise ValueError(
                "there is no shipped model; give --checkpoint (a server to start), or --url (a running server)"
            )
        if self.output.exists() and not self.output.is_file():
            raise ValueError(f"{self.output} is not a regular file, so its lines cannot be read; choose another output")
        if self.input.exists() and self.output.exists() and self.input.samefile(self.output):
            raise ValueError("the input file and the output file are the same; choose another output file")
        return self


class ChatSettings(CommandSettings):
    """Chat with a model in this terminal, over the HTTP API of a running server. `/help` lists the commands. If the
    input is a pipe, each line of it is a message. Answers go to stdout, and all other text to stderr.
    """

    url: str = option("server", "http://127.0.0.1:8000", metavar="URL")
    """base URL of the server"""
    api_key: SecretStr | None = option("server", None)
    """API key of the server"""
    model: str | None = option("server", None, metavar="NAME")
    """model to use (default: the first model that the server lists)"""
    system: str | None = option("conversation", None)
    """system prompt"""
    max_tokens: int | None = option("conversation", None, ge=1)
    """maximum tokens of an answer (default: the server's, as for every option below)"""
    temperature: float | None = option("conversation", None, ge=0, le=2)
    """sampling temperature; 0: always take the most likely token"""
    top_p: float | None = option("conversation", None, gt=0, le=1)
    """keep the most likely tokens up to this total probability"""
    top_k: int | None = option("conversation", None, ge=0)
    """keep the k most likely tokens; 0: all"""
    min_p: float | None = option("conversation", None, ge=0, le=1)
    """drop tokens below this fraction of the highest probability"""
    presence_penalty: float | None = option("conversation", None, ge=-2, le=2)
    """subtract this from the logit of each token that the answer contains"""
    frequency_penalty: float | None = option("conversation", None, ge=-2, le=2)
    """subtract this from the logit of a token, once for each time that the answer contains it"""
    repetition_penalty: float | None = option("conversation", None, gt=0, le=100)
    """divide positive logits of tokens in the conversation by this, and multiply negative ones; 1: off"""
    seed: int | None = option("conversation", None, ge=0, lt=2**64)
    """seed of sampling; the same seed and conversation give the same answer"""
    stop: str | None = option("conversation", None, min_length=1)
    """end the answer before this text"""

    def sampling(self) -> dict[str, object]:
        """Return the values of the fields in `sampling_names` that are set, as fields of a chat request."""
        return {name: value for name in self.sampling_names() if (value := getattr(self, name)) is not None}

    @classmethod
    def sampling_names(cls) -> list[str]:
        """Return the names of the settings that are fields of a chat request: sampling, max_tokens, seed, stop."""
        return [name for name in cls.model_fields if name not in ("url", "api_key", "model", "system")]

    def with_sampling(self, name: str, value: str) -> Self:
        """Return a copy of the settings with the value of one field in `sampling_names`; the value `none` unsets it.

        Raises SettingsError for any other name, or for a value that is out of bounds.
        """
        if name not in (names := self.sampling_names()):
            raise SettingsError(f"/set has no parameter {name!r}; choose one of {', '.join(names)}")
        try:
            return type(self)(**self.model_dump() | {name: None if value == "none" else value})
        except ValidationError as error:
            raise SettingsError(first_problem(type(self), {name: name}, error)) from None
