"""Chat template of the server: the tokenizer's own, a Jinja file, or a form for each role."""

from collections.abc import Mapping, Sequence
from typing import Any, override

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.chat import encode_chat
from axlearn_like.tokenizers.jinja_template import JinjaTemplate
from axlearn_like.tokenizers.protocol import Template, Tokenizer, begin
from mesh import UserError, did_you_mean
from rl.environments.calls import OPENING
from rl.serving.output.text import CallStyle

CONTENT = "{content}"


class ChatTemplate(Configurable):
    """Template that turns messages into the tokens that the policy continues.

    `jinja` names a file; without one it is the tokenizer's own template; and where there is none, the forms of `roles`
    are joined. By default a single user message then has the form in which `rl.tasks.encoding.encode_prompt` writes a
    question. In each case a chat asks the policy as training did.
    """

    class Config(ConfigBase["ChatTemplate"]):
        jinja: str = ""  # a file; "": the tokenizer's own template, or `roles` where it has none
        # Form of a message by role; `{content}` stands for its content.
        roles: dict[str, str] = {"system": "{content}\n", "user": "{content}\n", "assistant": "{content}\n"}
        opening: str = ""  # text before the assistant's answer

        @override
        def check_fields(self) -> None:
            fits = bool(self.roles) and all(form.count(CONTENT) == 1 for form in self.roles.values())
            self.require("roles", fits, f"a form for each role, with {CONTENT} in it once")

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer):
        self.cfg, self._tokenizer = cfg, tokenizer
        own = tokenizer.chat_template
        variables = own.special_tokens if isinstance(own, JinjaTemplate) else {}
        plain = ChatTemplate.Config()
        changed = (cfg.roles, cfg.opening) != (plain.roles, plain.opening)
        self.template: Template | None = None if changed else own
        if cfg.jinja:
            self.template = JinjaTemplate.read(cfg.jinja, variables)

    @property
    def in_jinja(self) -> bool:
        """True with a template in Jinja, which may read more than role and content."""
        return self.template is not None

    @property
    def call_style(self) -> CallStyle | None:
        """The form in which a policy that knows this template writes calls of tools; None: the template has none."""
        source = self.template.source if isinstance(self.template, JinjaTemplate) else ""
        if OPENING in source:
            return "tagged"
        return "bare" if "<|python_tag|>" in source or "Environment: ipython" in source else None

    def check(self, message: Mapping[str, Any]) -> None:
        """Refuse a message that no form is for (UserError); a Jinja template refuses when it renders."""
        if self.template is None and message["role"] not in self.cfg.roles:
            raise UserError(f"unknown role {message['role']!r}{did_you_mean(message['role'], self.cfg.roles)}")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return a conversation's tokens up to the answer; see `encode_chat` (UserError: the template refuses it)."""
        if self.template is None:
            given = {"tools": tools, "documents": documents, "chat_template_kwargs": variables}
            unknown = next((name for name, value in given.items() if value), None)
            if unknown or continue_final_message:
                raise UserError(f"{unknown or 'continue_final_message'} needs a Jinja template (server.template.jinja)")
            text = self.render(messages) if add_generation_prompt else self.render(messages, opening="")
            return [*begin(self._tokenizer), *self._tokenizer.encode(text)]
        return encode_chat(
            self._tokenizer,
            messages,
            template=self.template,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def render(self, messages: Sequence[Mapping[str, Any]], opening: str | None = None) -> str:
        """Return messages in the forms of their roles, then the opening (UserError: a role without a form)."""
        parts: list[str] = []
        for message in messages:
            self.check(message)
            parts.append(self.cfg.roles[message["role"]].replace(CONTENT, message["content"]))
        return "".join(parts) + (self.cfg.opening if opening is None else opening)
