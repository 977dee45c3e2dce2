"""`axl rl sweep`: the product of values of some fields, each a policy of one experiment."""

import itertools
import re
from collections.abc import Mapping, Sequence

from axlearn_like.config import ConfigBase, label, path_of
from mesh.errors import UserError
from rl.experiment import RLExperiment
from rl.runtime.policies.adapters import are_adapters
from rl.runtime.policies.configs import MOST_POLICIES, policy_configs
from tools.experiment import apply_edits
from tools.report.cards import Sheet
from tools.report.words import plain

_LONGEST = 100  # characters of a name
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def read_over(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each field that `--over PATH=VALUE,VALUE` names; commas in brackets or quotes divide none.

    Raises:
        UserError: one of them has no path, no values or one twice, or a path is named twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        path, equals, values = (part.strip() for part in text.partition("="))
        parts = tuple(_parts(values))
        if not path or not equals or not all(parts):
            raise UserError(f"--over {text!r}: expected PATH=VALUE,VALUE, like learner.schedule.lr=1e-4,3e-4")
        if path in found:
            raise UserError(f"--over {text!r}: {path} is swept twice; expected one --over with all of its values")
        if len(set(parts)) < len(parts):
            raise UserError(f"--over {text!r}: expected values that differ")
        found[path] = parts
    return found


def _parts(text: str) -> list[str]:
    """Split a text at the commas that are in no brackets and no quotes."""
    parts, closing = [""], list[str]()
    for character in text:
        if closing and character == closing[-1]:
            closing.pop()
        elif character in "'\"" and not (closing and closing[-1] in "'\""):
            closing.append(character)
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
        if character == "," and not closing:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def swept(cfg: ConfigBase, over: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Return the edits of each policy by name: one for each combination of values, the last field changing fastest.

    A name is `lr=1e-4+seed=0`: of each path the last words, as many as tell the paths apart, with the value in small
    letters; characters other than a-z, 0-9 and ._=+- become `-`. Names that are equal or too long are numbered.

    Raises:
        UserError: a path or a value does not fit the experiment, or there are too many combinations.
    """
    for path, values in over.items():
        for value in values:
            try:
                apply_edits(label(cfg.clone(), path_of(cfg)), {path: value})
            except UserError as error:
                raise UserError(f"--over {path}={value}: {error}") from error
    words = {path: path.split(".") for path in over}
    depth = next(n for n in itertools.count(1) if len({tuple(own[-n:]) for own in words.values()}) == len(words))
    found: dict[str, dict[str, str]] = {}
    for values in itertools.product(*over.values()):
        edits = dict(zip(over, values, strict=True))
        if len(found) == MOST_POLICIES:
            raise UserError(f"--over: more than {MOST_POLICIES} combinations; expected that many or fewer")
        name = "+".join(f"{'.'.join(words[path][-depth:])}={value}" for path, value in edits.items())
        found[_unique(re.sub(r"[^a-z0-9._=+-]", "-", name.lower()), found)] = edits
    return found


def _unique(name: str, taken: Mapping[str, object]) -> str:
    name = name.lstrip("._=+-")
    names = itertools.chain([name], (f"{name[: _LONGEST - 5]}-{n}" for n in itertools.count(2)))
    return next(one for one in names if one not in taken and len(one) <= _LONGEST)


def plan_sheet(cfg: RLExperiment.Config) -> Sheet:
    """Return the policies of an experiment as a table: edits of each, updates, and how many tokens it may draw.

    The title says if the engine draws fewer answers at a time than the policies have in a step.
    """
    found = policy_configs(cfg)
    paths = list(dict.fromkeys(path for edits in cfg.policies.values() for path in edits))
    rows = [
        (
            name,
            *(_shown(cfg.policies[name].get(path)) for path in paths),
            plain(own.num_steps),
            f"{own.num_steps * own.prompts_per_step * own.samples_per_prompt * own.max_new_tokens:,}",
        )
        for name, own in found.items()
    ]
    heads, numeric = ("policy", *paths, "updates", "tokens at most"), range(len(paths) + 1, len(paths) + 3)
    if not are_adapters(cfg.policy):
        title = f"{len(rows)} whole models; --apply low_rank: of one base"
        return Sheet(title, heads, rows, numeric=numeric)
    title, most = f"{len(rows)} polic{'y' if len(rows) == 1 else 'ies'} of one base", cfg.engine.max_num_seqs
    answers = sum(own.prompts_per_step * own.samples_per_prompt for own in found.values())
    if len(rows) > 1 and answers > most:
        title += f"; engine.max_num_seqs={most} of their {answers} answers a step are drawn at a time"
    return Sheet(title, heads, rows, numeric=numeric)


def _shown(value: object) -> str:
    return "" if value is None else path_of(value) if isinstance(value, ConfigBase) else str(value)
