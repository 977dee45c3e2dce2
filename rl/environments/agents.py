"""Agents: several roles answer one question, each with a prompt of its own that shows it what others have said.

    roles = (
        AgentRole.Config(name="solver", instruction="Solve it."),
        AgentRole.Config(name="critic", instruction="Find the mistake.", sees=("solver",)),
        AgentRole.Config(name="editor", instruction="Answer.", sees=("solver", "critic")),
    )
    Agents.Config(roles=roles, consults=("base",))

Roles speak in this order. The last one is the policy that learns; frozen policies speak for the others. A prompt has
the question first, then what most roles see, and the role's own instruction last: so the prompts of an episode begin
alike as far as they can, and an engine computes what they share once (`prefix_cache_hit_tokens`).
"""

from collections.abc import Mapping
from typing import Any, Literal, override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from rl.environments.environment import Consult, Environment, Row
from rl.protocol.segments import SegmentedText, TextSegment

QUESTION = "question"


class AgentRole(Configurable):
    """A role: what it is told, and what it sees beside the question."""

    class Config(ConfigBase["AgentRole"]):
        name: str = REQUIRED
        instruction: str = REQUIRED  # text of its own
        # Placeholders: roles before it, for their answers, and columns of the row, such as a retrieved text
        sees: tuple[str, ...] = ()
        policy: str = "base"  # speaks for it, one of the environment's `consults`; the last role is the policy's own
        max_new_tokens: int | None = None  # limit of its answer; None: the engine's

        @override
        def check_fields(self) -> None:
            self.require("name", self.name.isidentifier() and self.name != QUESTION, "a name of letters and digits")
            once = len({*self.sees, QUESTION}) == len(self.sees) + 1
            self.require("sees", once, f"each placeholder once; every role sees the {QUESTION}")
            self.require_least(1, "max_new_tokens")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def segments(self, texts: Mapping[str, str], forms: Mapping[str, str], order: tuple[str, ...]) -> list[TextSegment]:
        """Return what it sees beside the question, by `texts` and `forms` ("{}": place) in this order (ValueError)."""
        found: list[TextSegment] = []
        for name in (one for one in order if one in self.cfg.sees):
            if not texts.get(name, "").strip():
                known = ", ".join(sorted(one for one, text in texts.items() if text.strip())) or "none"
                raise ValueError(
                    f"placeholder {name!r} of role {self.cfg.name!r} has no text; those with text: {known}"
                )
            before, after = forms.get(name, f"{name}: {{}}\n").split("{}")
            found += [TextSegment(before), TextSegment(texts[name], name), TextSegment(after)]
        return [one for one in found if one.text]


class Agents(Environment):
    """Roles that speak in order; the verifier judges what the last one says."""

    class Config(Environment.Config):
        roles: tuple[AgentRole.Config, ...] = REQUIRED  # 2 to 5, in the order in which they speak
        # Text around placeholders, with "{}" in the place of each; of others it is "NAME: {}" and a line end
        forms: dict[str, str] = {}
        # "shared_first": prompts of an episode begin alike as far as they can. "role_first": the instruction comes
        # first, as in most published prompts; then no prefix is shared, except with a cache that does not need one
        # (`RolloutEngine.kvcomm`). The policy's own prompt has the question first in both.
        order: Literal["shared_first", "role_first"] = "shared_first"
        max_turns: int = 1
        verify: bool = True
        pure: bool = True

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("roles", 2 <= len(self.roles) <= 5, "2 to 5 roles")
            names = [one.name for one in self.roles]
            self.require("roles", len(set(names)) == len(names), "roles of different names")
            self.require("max_turns", self.max_turns == 1, "1: each role speaks once")
            for number, role in enumerate(self.roles):
                early = not set(role.sees) & set(names[number:])
                role.require(
                    "sees", early, f"roles that speak before it: {', '.join(names[:number]) or 'there are none'}"
                )
                known = role.policy in self.consults or role is self.roles[-1]
                role.require("policy", known, f"one of the environment's consults, {', '.join(self.consults)}")
            one_place = all(form.count("{}") == 1 for form in self.forms.values())
            self.require("forms", one_place, "texts with '{}' once")
            unseen = set(self.forms) - {one for role in self.roles for one in role.sees}
            self.require("forms", not unseen, f"placeholders that a role sees, not {', '.join(sorted(unseen))}")

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._cfg, self._roles = cfg, [one.build() for one in cfg.roles]
        self._order = shared_order(cfg.roles)
        self._texts: dict[str, str] = {}
        self._spoken = 0  # roles that have spoken

    @override
    def reset(self, row: Row) -> Any:
        columns = {*self._order, QUESTION} - {one.cfg.name for one in self._roles}
        self._texts = {name: str(row[name]) for name in columns if row.get(name) is not None}
        return self._next()

    @override
    def hear(self, answer: str) -> Any:
        self._texts[self._roles[self._spoken].cfg.name] = answer
        self._spoken += 1
        asked = self._next()
        return asked if isinstance(asked, Consult) else (asked, 0.0, False)

    @override
    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True

    def _next(self) -> Consult | SegmentedText:
        """Return what the next role is asked, or what the policy itself is shown behind its question."""
        role = self._roles[self._spoken]
        if not self._texts.get(QUESTION, "").strip():
            raise ValueError(f"placeholder {QUESTION!r} of role {role.cfg.name!r} has no text")
        seen = role.segments(self._texts, self._cfg.forms, self._order)
        own = TextSegment(role.cfg.instruction)
        if role is self._roles[-1]:
            shared_first = self._cfg.order == "shared_first"
            return SegmentedText([*([*seen, own] if shared_first else [own, *seen]), TextSegment("\n")])
        question = TextSegment(f"{self._texts[QUESTION]}\n", QUESTION)
        parts = [question, *seen, own] if self._cfg.order == "shared_first" else [own, question, *seen]
        return Consult(role.cfg.policy, SegmentedText(parts), role.cfg.max_new_tokens)


def shared_order(roles: tuple[AgentRole.Config, ...]) -> tuple[str, ...]:
    """Return all placeholders in the order of prompts: what most roles see first, answers as they come.

    Where what each role sees contains what fewer roles see, no order lets the prompts share more.
    """
    speaks = {role.name: place for place, role in enumerate(roles, 1)}
    names = list(dict.fromkeys(name for role in roles for name in role.sees))
    return tuple(sorted(names, key=lambda name: (-sum(name in role.sees for role in roles), speaks.get(name, 0))))
