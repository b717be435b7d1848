"""Request fields of tool calling, in OpenAI's chat completions form: tools, the choice of a tool, and past calls."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field
from pydantic_core import from_json

from service.protocol.errors import InvalidRequest
from service.protocol.request_model import RequestModel

MAX_TOOLS = 128
MAX_CONTAINERS = 20_000  # lists and objects in the arguments of a past call, as in a body
NO_PARAMETERS = {"type": "object", "properties": {}}
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(RequestModel):
    """Field `tools[].function`. `parameters` is a JSON Schema of the arguments; without it, a call has none.

    strict: reject a schema that cannot be enforced completely, instead of ignoring some of its keywords.
    """

    IGNORES_UNKNOWN: ClassVar[bool] = True

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def schema_of_arguments(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments. Arguments that are not in its `properties` are not allowed.

        A schema with `additionalProperties`, `$ref`, `anyOf` or the like gets no such limit.

        Raises:
            InvalidRequest: the schema does not describe an object.
        """
        schema = {"type": "object", **(self.parameters or {})}
        if schema["type"] != "object" or not isinstance(schema.get("properties", {}), dict):
            raise InvalidRequest(
                f"the parameters of the tool {self.name!r} must be a JSON Schema of type object, with an object as "
                "properties",
                param="tools",
            )
        is_composed = any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties"))
        return schema if is_composed else {"properties": {}, "additionalProperties": False, **schema}


class ToolDefinition(RequestModel):
    """Field `tools[]`: a function that the model may call."""

    IGNORES_UNKNOWN: ClassVar[bool] = True

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect, which is OpenAI's without `strict`.

        A tool without parameters gets an empty schema, because some templates fail without one.
        """
        function = self.function.model_dump(exclude_none=True, include={"name", "description", "parameters"})
        return {"type": "function", "function": {**function, "parameters": function.get("parameters") or NO_PARAMETERS}}


class NamedFunction(RequestModel):
    """Field `tool_choice.function`: the name of a tool."""

    name: str


class NamedToolChoice(RequestModel):
    """Field `tool_choice` that demands a call of one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    """Field `tool_choice.allowed_tools`: the tools that may be called, as in mode `auto` or `required`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestModel):
    """Field `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice
TOOL_CHOICE_ERROR = (
    'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} '
    'or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)


class CalledFunction(RequestModel):
    """Field `tool_calls[].function` of a past assistant message. `arguments` is JSON text."""

    IGNORES_UNKNOWN: ClassVar[bool] = True  # openai's `parsed_arguments`, for example

    name: str
    arguments: str = "{}"

    def parsed_arguments(self) -> dict[str, Any] | None:
        """Return the arguments as an object; None if they are no JSON object, or hold over 20,000 lists and objects.

        If the call was cut off at `max_tokens`, the object has the values before the cut.
        """
        if self.arguments.count("[") + self.arguments.count("{") > MAX_CONTAINERS:
            return None  # parsing would delay other streams
        try:
            parsed = from_json(self.arguments or "{}", allow_partial="trailing-strings")
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None


class PastToolCall(RequestModel):
    """Field `tool_calls[]` of a past assistant message."""

    IGNORES_UNKNOWN: ClassVar[bool] = True

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in messages that clients joined from a stream


def callable_tools(tools: list[ToolDefinition] | None, choice: ToolChoice | None) -> tuple[list[ToolDefinition], bool]:
    """Return the tools that a completion may call, and True if it must call one.

    Raises:
        InvalidRequest: two tools have the same name, or `tool_choice` names or requires a tool that is missing.
    """
    by_name = {tool.function.name: tool for tool in tools or ()}
    if len(by_name) < len(tools or ()):
        names = [tool.function.name for tool in tools or ()]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest.of("tools", f": two tools have the name {twice!r}; rename one")
    match choice:
        case NamedToolChoice():
            names, must_call = [choice.function.name], True
        case AllowedToolsChoice():
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            must_call = choice.allowed_tools.mode == "required"
        case "none":
            return [], False
        case _:
            names, must_call = list(by_name), choice == "required"
    if (unknown := next((name for name in names if name not in by_name), None)) is not None:
        raise InvalidRequest.of("tool_choice", f": the tool {unknown!r} is not in tools; add it")
    if must_call and not names:
        raise InvalidRequest.of("tool_choice", ": required needs tools; add tools")
    return [by_name[name] for name in dict.fromkeys(names)], must_call
