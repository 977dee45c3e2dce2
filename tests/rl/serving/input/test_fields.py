"""Objects read field by field."""

import json

import pytest

from rl.serving.errors import ApiError
from rl.serving.input.fields import Fields, is_integer, is_number, text


def refusal(value: object, read: str, *arguments: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        getattr(Fields(value), read)(*arguments)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("value", "read", "arguments", "message"),
    [
        ({"a": "yes"}, "take_bool", ("a",), "a: got 'yes'; expected true or false"),
        ({"a": 1}, "take_bool", ("a",), "a: got 1; expected true or false"),
        ({"a": True}, "take_int", ("a", 0, 5), "a: got True; expected an integer from 0 to 5"),
        ({"a": 6}, "take_int", ("a", 0, 5), "a: got 6; expected an integer from 0 to 5"),
        ({"a": 1.5}, "take_int", ("a", 0, 5), "a: got 1.5; expected an integer from 0 to 5"),
        ({"a": 10**400}, "take_int", ("a", 0, 5), "a: got 1" + "0" * 56 + "..."),
        ({"a": 0}, "take_text", ("a",), "a: got a number; expected a string"),
        ({"a": "\ud800"}, "take_text", ("a",), "a: holds half of a surrogate pair, which is no character"),
        ({"a": [1] * 99}, "take_int", ("a", 0, 5), "a: got an array; expected an integer from 0 to 5"),
    ],
)
def test_a_value_that_does_not_fit_is_named(value: object, read: str, arguments: tuple, message: str) -> None:
    error = refusal(value, read, *arguments)
    assert error.message.startswith(message)
    assert error.param == "a"


def test_the_ends_of_a_range_belong_to_it_unless_it_is_open() -> None:
    assert Fields({"a": 0}).take_number("a", 0, 1) == 0.0
    assert Fields({"a": 1}).take_number("a", 0, 1, open_low=True) == 1.0
    with pytest.raises(ApiError, match="a: got 0; expected a number above 0 and up to 1"):
        Fields({"a": 0}).take_number("a", 0, 1, open_low=True)


def test_null_is_absent() -> None:
    fields = Fields({"a": None, "b": None, "c": None})
    assert (fields.take_bool("a", True), fields.take_int("b", 1, 2), fields.take_text("c")) == (True, None, None)
    fields.finish()


def test_a_field_that_nobody_took_is_refused_with_the_nearest() -> None:
    fields = Fields({"temprature": 1}, "outer")
    fields.take_number("temperature", 0, 1)
    fields.take_int("n", 0, 1)
    with pytest.raises(ApiError, match="unknown field 'outer.temprature'; did you mean 'temperature'") as caught:
        fields.finish()
    assert caught.value.param == "outer.temprature"


def test_a_neutral_value_of_an_unsupported_field_passes() -> None:
    fields = Fields({"echo": False, "best_of": 2})
    fields.refuse("echo", (False,))
    with pytest.raises(ApiError, match="best_of: not supported by this server"):
        fields.refuse("best_of", (1,))


@pytest.mark.parametrize("value", [[], "x", None, 3])
def test_only_an_object_has_fields(value: object) -> None:
    with pytest.raises(ApiError, match="the body is .*; expected an object"):
        Fields(value)


@pytest.mark.parametrize(
    ("value", "integer", "number"),
    [("3", True, True), ("3.0", True, True), ("3.5", False, True), ("true", False, False), ('"3"', False, False)]
    + [("1e999", False, False), ("9" * 30, False, False), ("NaN", False, False), ("[]", False, False)],
)
def test_what_json_calls_a_number(value: str, integer: bool, number: bool) -> None:
    loaded = json.loads(value)
    assert (is_integer(loaded), is_number(loaded)) == (integer, number)


def test_text_has_a_utf8_form() -> None:
    assert text("€", "a") == "€"
