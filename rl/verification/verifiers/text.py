"""Verifiers of text: equal to the reference, of a form, or JSON of a schema."""

import importlib
import json
import re
import unicodedata
from typing import Any, override

from axlearn_like.input.encoding import field_of
from rl.protocol.messages import Problem
from rl.verification.verifiers.rows import RowScorer


class ExactMatch(RowScorer):
    """1 for an answer equal to the reference, or to one of several; case and the number of spaces do not count."""

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> float:
        references = reference if isinstance(reference, list | tuple) else [reference]
        return float(_normal(answer) in {_normal(str(one)) for one in references})


class RegexMatch(RowScorer):
    """1 for an answer of which the whole matches a regular expression: the reference of its row."""

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> float:
        return float(re.fullmatch(str(reference), answer.strip(), re.DOTALL) is not None)


class JsonMatch(RowScorer):
    """1 for JSON that fits a schema and equals the reference, if there is one.

    Numbers compare by value, objects without their order. The schema is a field of the row, or the reference itself.
    """

    class Config(RowScorer.Config):
        schema_field: str | None = None  # field of the row with the JSON schema; None: there is none
        compare: bool = True  # compare with the reference; False: the form alone counts

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("compare", self.compare or self.schema_field is not None, "True without a schema_field")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> float:
        try:
            found = json.loads(_unfenced(answer), parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        if self._cfg.schema_field is not None:
            validators = importlib.import_module("jsonschema.validators")

            schema = field_of(problem.entry, self._cfg.schema_field, f"problem {problem.id}")
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if not validators.validator_for(schema)(schema).is_valid(found):
                return 0.0
        if not self._cfg.compare:
            return 1.0
        wanted = json.loads(reference) if isinstance(reference, str) else reference
        return float(_told_apart(found) == _told_apart(wanted))


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split()).casefold()


def _unfenced(text: str) -> str:
    """Return what stands inside of ```json fences, if there are some."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    return fenced[1] if fenced else text


def _told_apart(value: Any) -> Any:
    """Return a value of JSON whose booleans equal no number."""
    if isinstance(value, bool):
        return ("true" if value else "false",)
    if isinstance(value, dict):
        return {name: _told_apart(item) for name, item in value.items()}
    return [_told_apart(item) for item in value] if isinstance(value, list) else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
