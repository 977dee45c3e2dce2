"""Functions as tools: the schema of a signature, what is refused, and arguments that do not fit."""

from typing import Any, Literal

import pytest

from axlearn_like.config import ConfigError
from rl.environments.tools.calculator import Calculator
from rl.environments.tools.function import FunctionTool
from rl.environments.tools.schema import ArgumentError, checked_arguments


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", places: list[float] | None = None) -> str:
    """Tell the weather.

    Of tomorrow.
    """
    return f"{city} {days} {unit} {places}"


def no_types(city):  # noqa: ANN001, ANN201
    return city


def any_number(*cities: str) -> str:
    return str(cities)


def strange(when: complex) -> str:
    return str(when)


def test_the_schema_is_that_of_the_signature():
    cfg = FunctionTool.Config(function=weather)
    assert (cfg.title(), cfg.text()) == ("weather", "Tell the weather.")
    cfg.check()
    assert cfg.described()["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "places": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
        },
        "required": ["city"],
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"function": no_types}, r"function.*no_types: the parameter 'city' has no annotation"),
        ({"function": any_number}, r"function.*any_number\(\*cities: str\): expected parameters that can be named"),
        ({"function": strange}, r"function.*strange: the parameter 'when' has the annotation .*complex"),
        ({"function": weather, "name": "the weather"}, r"name.*letters, digits and underscores"),
        ({"parameters": {"properties": {}}}, r'parameters.*expected \{"type": "object"'),
        ({"parameters": {"type": "object", "proprties": {}}}, r"parameters.*proprties.*properties"),
        ({"parameters": {"type": "object", "properties": {"city": {"type": "strin"}}}}, r"city.*strin.*string"),
        ({"parameters": {"type": "object", "properties": {"city": "string"}}}, r"property 'city' is 'string'"),
        ({"parameters": {"type": "object", "properties": {}, "required": ["city"]}}, r"requires 'city'"),
        ({"parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}, r"parameters of the function"),
    ],
)
def test_a_wrong_schema_is_refused_with_its_field(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        FunctionTool.Config(**{"function": weather, **fields}).check()


def test_arguments():
    schema = FunctionTool.Config(function=weather).schema()
    assert checked_arguments(schema, {"city": "Ulm", "days": 2.0, "places": [1, 2.5]}) == {
        "city": "Ulm",
        "days": 2,
        "places": [1, 2.5],
    }
    assert checked_arguments(schema, {"city": "Ulm", "places": None})["places"] is None
    for arguments, message in (
        ({}, "missing city"),
        ({"city": "Ulm", "day": 2}, "no parameter 'day'; expected city, days, unit, places"),
        ({"city": 3}, "city is 3; expected string"),
        ({"city": "Ulm", "days": True}, "days is True; expected integer"),
        ({"city": "Ulm", "unit": "K"}, "unit is 'K'; expected one of 'C', 'F'"),
        ({"city": "Ulm", "places": ["a"]}, "an item of places is 'a'; expected number"),
        ("Ulm", "arguments are 'Ulm'; expected an object"),
    ):
        with pytest.raises(ArgumentError, match=message):
            checked_arguments(schema, arguments)


def test_the_schema_of_a_tool_is_that_of_its_call():
    expression = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    assert Calculator.Config().schema() == expression
