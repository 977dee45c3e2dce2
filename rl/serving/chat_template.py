"""Chat template: each message in the form of its role, then the assistant's opening."""

from collections.abc import Sequence
from typing import override

from axlearn_like.config import ConfigBase, Configurable
from mesh import UserError, did_you_mean

CONTENT = "{content}"


class ChatTemplate(Configurable):
    """Template that joins messages into the text that the policy continues.

    By default a single user message has the form in which `rl.tasks.mixture.encode_prompt` writes a question, so a chat
    asks the policy as training did.
    """

    class Config(ConfigBase["ChatTemplate"]):
        roles: dict[str, str] = {"system": "{content}\n", "user": "{content}\n", "assistant": "{content}\n"}
        """Form of a message by role; `{content}` stands for its content."""
        opening: str = ""
        """Text before the assistant's answer."""

        @override
        def check_fields(self) -> None:
            fits = bool(self.roles) and all(form.count(CONTENT) == 1 for form in self.roles.values())
            self.require("roles", fits, f"a form for each role, with {CONTENT} in it once")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return the text of (role, content) pairs, up to the assistant's answer.

        Raises:
            UserError: a role without a form.
        """
        parts = []
        for role, content in messages:
            if role not in self.cfg.roles:
                raise UserError(f"unknown role {role!r}{did_you_mean(role, self.cfg.roles)}")
            parts.append(self.cfg.roles[role].replace(CONTENT, content))
        return "".join(parts) + self.cfg.opening
