"""Request bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from model.checkpoint.manifest import MAX_NAME_CHARACTERS
from service.protocol.request_model import IGNORED, RequestModel, Unsupported


def _check_printable(name: str) -> str:
    if not name.isprintable() or not name.strip():
        raise PydanticCustomError("name", "must have printable characters only, and not only spaces")
    return name


AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS), AfterValidator(_check_printable)]


class LoadAdapterRequest(RequestModel):
    """Body of `POST /v1/load_lora_adapter`. Requests choose the adapter by `lora_name` as their model."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, description="directory below --lora-dir, absolute or relative to it")]
    load_inplace: Annotated[bool | None, Unsupported(False, remedy="unload the adapter first")] = None
    base_model_name: IGNORED = None


class UnloadAdapterRequest(RequestModel):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: AdapterName
    lora_int_id: IGNORED = None
