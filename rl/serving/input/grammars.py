"""Forms of answers that a request asks for: JSON, a schema, choices, expressions, grammars, and calls of tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rl.environments.calls import CLOSING, OPENING
from rl.rollout.decoding.grammar import Grammar, GrammarError, Kind
from rl.serving.context import ServingContext
from rl.serving.errors import bad_field
from rl.serving.input.fields import Fields, checked_json, shown, text
from rl.serving.output.text import CallStyle

FIELDS = ("response_format", "structured_outputs", "tool_choice")  # fields that are slow to read
_OBJECT = {"type": "object"}
_MAX_CHOICES = 1024


class _Source(NamedTuple):
    """A grammar as it is written, and the field that it comes from."""

    field: str
    kind: Kind
    written: str | Mapping[str, Any]


class ToolChoice(NamedTuple):
    """The calls of tools that an answer may have, or must have."""

    told_apart: bool  # calls become `tool_calls`
    forced: tuple[str, ...] = ()  # functions of which one at least is called


def read_tool_choice(fields: Fields, names: Sequence[str]) -> ToolChoice:
    """Read `tool_choice`; `names`: of the request's functions."""
    choice = fields.take("tool_choice")
    if choice in (None, "auto", "none"):
        return ToolChoice(choice != "none")
    if choice == "required":
        if not names:
            raise bad_field("tool_choice", "'required' needs tools, which the request does not have")
        return ToolChoice(True, tuple(names))
    if not isinstance(choice, dict):
        raise bad_field(
            "tool_choice",
            f"got {shown(choice)}; expected 'auto', 'none', 'required', or an object that names a function",
        )
    named = Fields(choice, "tool_choice")
    kind, function = named.take_text("type"), named.take("function")
    # The form of /v1/responses has the name beside the type.
    name = named.take_text("name") if function is None else Fields(function, "tool_choice.function").take_text("name")
    named.finish()
    if kind != "function" or name is None or name not in names:
        raise bad_field(
            "tool_choice", f"got {shown(name)}; expected a function of the tools, {', '.join(names) or 'none'}"
        )
    return ToolChoice(True, (name,))


def read_grammar(
    fields: Fields,
    context: ServingContext,
    forced: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    style: CallStyle = "bare",
) -> Grammar | None:
    """Read the form that answers must have, None for any.

    Args:
        forced: functions of which one at least must be called.
        style: how the policy writes calls.

    Raises:
        ApiError: 400, for what is no grammar, or more than one.
    """
    parallel = fields.take_bool("parallel_tool_calls", default=True)
    sources = [*_response_format(fields), *_structured_outputs(fields)]
    if forced:
        functions = [tool.get("function", tool) for tool in tools]
        wanted = [one for one in functions if isinstance(one, dict) and one.get("name") in forced]
        sources.append(_Source("tool_choice", "lark", _calls(wanted, style, parallel)))
    if len(sources) > 1:
        raise bad_field(sources[1].field, f"there is {sources[0].field}, too; expected one form of an answer")
    for field, kind, written in sources:
        try:
            return context.grammars.read(kind, written)
        except GrammarError as error:
            raise bad_field(field, str(error)) from None
    return None


def _calls(functions: Sequence[Mapping[str, Any]], style: CallStyle, parallel: bool) -> str:
    """Return the grammar of calls of these functions, in the form that `CallStream` reads."""
    key = "arguments" if style == "tagged" else "parameters"
    forms = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, key: one.get("parameters") or _OBJECT},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for one in functions
    ]
    body = f"%json {json.dumps({'anyOf': forms})}"
    if style == "bare":
        return f"start: {body}"
    call = f"{json.dumps(OPENING)} /\\n?/ body /\\n?/ {json.dumps(CLOSING)}"
    more = ' ("\\n" call)*' if parallel else ""
    return f"start: call{more}\ncall: {call}\nbody: {body}"


def _response_format(fields: Fields) -> list[_Source]:
    value = fields.take("response_format")
    if value is None:
        return []
    form = Fields(value, "response_format")
    kind, schema = form.take_text("type"), form.take("json_schema")
    form.finish()
    if kind == "text":
        return []
    if kind == "json_object":
        return [_Source("response_format", "json", _OBJECT)]
    if kind != "json_schema":
        raise bad_field("response_format.type", f"got {shown(kind)}; expected 'text', 'json_object' or 'json_schema'")
    where = "response_format.json_schema"
    if schema is None:
        raise form.missing("json_schema", "an object with a schema")
    named = Fields(schema, where)
    for name in ("name", "strict", "description"):
        named.take(name)
    found = named.take("schema")
    if found is None:
        raise named.missing("schema", "a JSON schema")
    named.finish()
    return [_json(found, f"{where}.schema")]


def _structured_outputs(fields: Fields) -> list[_Source]:
    """Read vLLM's `structured_outputs`, and the `guided_*` fields that its earlier versions had."""
    value = fields.take("structured_outputs")
    forms = Fields({} if value is None else value, "structured_outputs")
    found: list[_Source] = []
    for name in ("json", "regex", "choice", "grammar"):
        for reader, field in ((forms, name), (fields, f"guided_{name}")):
            given = reader.take(field)
            if given is not None:
                found.append(_form(name, given, reader.path(field)))
    if forms.take_bool("json_object"):
        found.append(_Source("structured_outputs.json_object", "json", _OBJECT))
    forms.finish()
    return found


def _form(name: str, value: Any, path: str) -> _Source:
    if name == "json":
        return _json(value, path)
    if name == "choice":
        return _choice(value, path)
    return _Source(path, "regex" if name == "regex" else "lark", text(value, path))


def _json(value: Any, path: str) -> _Source:
    if isinstance(value, bool):
        return _Source(path, "json", {} if value else {"not": {}})
    if not isinstance(value, (str, dict)):
        raise bad_field(path, f"got {shown(value)}; expected a JSON schema")
    return _Source(path, "json", checked_json(value, path, 64))


def _choice(value: Any, path: str) -> _Source:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_CHOICES or not all(text(one, path) for one in value):
        raise bad_field(path, f"expected an array of 1 to {_MAX_CHOICES} texts, none of them empty")
    return _Source(path, "lark", "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value))


def takes_time(body: Any) -> bool:
    """Return True for a body whose grammar may take long to be read."""
    return isinstance(body, dict) and any(name in FIELDS or name.startswith("guided_") for name in body)
