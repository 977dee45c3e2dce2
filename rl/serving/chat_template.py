"""A conversation as one text: each message in the form of its role, then the assistant's opening."""

from collections.abc import Sequence

from axlearn_like.config import ConfigBase, Configurable
from mesh import UserError, did_you_mean

CONTENT = "{content}"


class ChatTemplate(Configurable):
    """Joins messages into the text that the policy continues.

    By the defaults a single user message reads as `rl.tasks.mixture.encode_prompt` writes a question, so that a chat
    asks the policy what training asked it.
    """

    class Config(ConfigBase["ChatTemplate"]):
        roles: dict[str, str] = {"system": "{content}\n", "user": "{content}\n", "assistant": "{content}\n"}
        """Form of a message by role; `{content}` stands for what it says."""
        opening: str = ""
        """What the assistant's answer is preceded by."""

    def __init__(self, cfg: Config):
        if not cfg.roles:
            raise UserError("ChatTemplate.roles is empty; expected a form with {content} for each role")
        for role, form in cfg.roles.items():
            if form.count(CONTENT) != 1:
                raise UserError(f"ChatTemplate.roles[{role!r}] is {form!r}; expected {CONTENT} in it, once")
        self.cfg = cfg

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of (role, content) pairs, ending where the assistant begins.

        Raises:
            UserError: a role without a form.
        """
        parts = []
        for role, content in messages:
            if role not in self.cfg.roles:
                raise UserError(f"unknown role {role!r}{did_you_mean(role, self.cfg.roles)}")
            parts.append(self.cfg.roles[role].replace(CONTENT, content))
        return "".join(parts) + self.cfg.opening
