"""JSON schemas of a tool's parameters: made from a function's signature, checked, and applied to arguments.

The schemas are those of function calling: an object whose properties have plain types, `enum` or `items`.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from mesh.errors import did_you_mean

Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_KNOWN = ("type", "properties", "required", "additionalProperties", "description", "title")


class SchemaError(ValueError):
    """A schema that describes no parameters, or a function that has none."""


class ArgumentError(ValueError):
    """Arguments that do not fit a schema; the text is for the policy."""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function's parameters, by its annotations; those without a default are required.

    Raises:
        SchemaError: a parameter has no annotation, or one that JSON has no type for; names it.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise SchemaError(f"{name}: its annotations name {error.name!r}, which its module lacks") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise SchemaError(f"{name}({parameter}): expected parameters that can be named, each with a type")
        if parameter.name not in hints:
            raise SchemaError(f"{name}: the parameter {parameter.name!r} has no annotation; expected str, int, ...")
        properties[parameter.name] = _of_hint(hints[parameter.name], f"{name}: the parameter {parameter.name!r}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required}


def check_schema(schema: Any, where: str = "the schema") -> None:
    """Refuse what is no schema of parameters (SchemaError)."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise SchemaError(f'{where} is {schema!r:.80}; expected {{"type": "object", "properties": {{...}}}}')
    if unknown := [key for key in schema if key not in _KNOWN]:
        raise SchemaError(f"{where} has {unknown[0]!r}{did_you_mean(unknown[0], _KNOWN, limit=len(_KNOWN))}")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise SchemaError(f"{where}: properties is {properties!r:.80}; expected a mapping of names to schemas")
    for name, one in properties.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise SchemaError(f"{where}: a property is named {name!r}; expected an identifier")
        _check_value(one, f"{where}: property {name!r}")
    required = schema.get("required", [])
    if not isinstance(required, Sequence) or isinstance(required, str):
        raise SchemaError(f"{where}: required is {required!r:.80}; expected a list of names")
    if missing := [name for name in required if name not in properties]:
        raise SchemaError(f"{where} requires {missing[0]!r}{did_you_mean(str(missing[0]), properties)}")


def checked_arguments(schema: Schema, arguments: Any) -> dict[str, Any]:
    """Return arguments that fit a schema (ArgumentError); whole floats become integers where these are asked for."""
    if not isinstance(arguments, Mapping):
        raise ArgumentError(f"arguments are {arguments!r:.80}; expected an object")
    properties = schema.get("properties", {})
    if unknown := [name for name in arguments if name not in properties]:
        raise ArgumentError(f"no parameter {unknown[0]!r}; expected {', '.join(properties) or 'none'}")
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        raise ArgumentError(f"missing {', '.join(missing)}")
    return {name: _fitted(properties[name], value, name) for name, value in arguments.items()}


def _check_value(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping) or not {"type", "enum", "anyOf"} & schema.keys():
        raise SchemaError(f"{where} is {schema!r:.80}; expected a schema with a type, an enum or anyOf")
    for part in [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]:
        _check_value(part, where)
    if wrong := [kind for kind in _kinds(schema) if kind not in _TYPES]:
        raise SchemaError(f"{where} has type {wrong[0]!r}{did_you_mean(str(wrong[0]), _TYPES, limit=len(_TYPES))}")


def _fitted(schema: Schema, value: Any, name: str) -> Any:
    if "anyOf" in schema:
        return _fitted_to_any(schema["anyOf"], value, name)
    kinds = _kinds(schema)
    if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
        value = int(value)
    if "enum" in schema and value not in schema["enum"]:
        raise ArgumentError(f"{name} is {value!r:.80}; expected one of {', '.join(map(repr, schema['enum']))}")
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise ArgumentError(f"{name} is {value!r:.80}; expected {' or '.join(kinds)}")
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_fitted(schema["items"], item, f"an item of {name}") for item in value]
    return value


def _fitted_to_any(schemas: Sequence[Schema], value: Any, name: str) -> Any:
    errors: list[str] = []
    for schema in schemas:
        try:
            return _fitted(schema, value, name)
        except ArgumentError as error:
            errors.append(str(error))
    raise ArgumentError("; or ".join(dict.fromkeys(errors)))


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _kinds(schema: Schema) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def _of_hint(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if one is type(None) else _of_hint(one, where) for one in args]}
    plain = _NAMES.get(origin or hint)
    if plain is None:
        raise SchemaError(f"{where} has the annotation {hint}; expected str, int, float, bool, list, dict or Literal")
    if plain == "array" and args:
        return {"type": "array", "items": _of_hint(args[0], where)}
    return {"type": plain}
