"""Chat templates render as transformers renders them, token for token, and cannot reach the interpreter."""

import re
from typing import Any

import pytest

from axlearn_like.tokenizers.chat import encode_chat
from axlearn_like.tokenizers.jinja_template import JinjaTemplate, TemplateError
from tests.axlearn_like.tokenizers.golden_files import CONVERSATIONS, TEMPLATES, jinja, rendered, tokenizer

ASKED = [{"role": "user", "content": "hi"}]


def render(source: str, **options: Any) -> str:
    return JinjaTemplate(source, {"eos_token": "</s>"}).render(ASKED, **options)


@pytest.mark.parametrize("title", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(template: str, title: str) -> None:
    options = dict(CONVERSATIONS[title])
    messages = options.pop("messages")
    for name in ("byte_level", "byte_fallback"):
        expected = rendered()[f"{name} | {template} | {title}"]
        if expected is None:
            with pytest.raises(TemplateError):
                jinja(template).render(messages, **options)
            continue
        assert jinja(template).render(messages, **options) == expected["text"]
        assert encode_chat(tokenizer(name, template), messages, **options) == expected["ids"]


def test_goldens_hold_refusals_tools_and_both_kinds_of_answer() -> None:
    """Otherwise a maker that refuses everything would pass."""
    found = [value for title, value in rendered().items() if "encode" not in title]
    assert len(found) == 2 * len(TEMPLATES) * len(CONVERSATIONS)
    assert 10 < sum(value is None for value in found) < 30


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{{ range(10**9) | list }}",
        "{{ raise_exception('no ' ~ messages[0].content) }}",
        "{{ 1 / 0 }}",
        # CVE-2025-27516 and CVE-2024-56326: `str.format` behind a filter reads attributes.
        "{% set f = '{0.__class__}' | attr('format') %}{{ f(messages) }}",
        "{{ ['{0.__class__.__init__.__globals__}'] | map('format', messages) | list }}",
        "{{ '{0.__class__}'.format_map({'0': 1}) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ strftime_now | attr('__globals__') }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.there }}",
    ],
)
def test_what_a_template_may_not_do_is_refused(source: str) -> None:
    """Jinja prints nothing for an attribute that its sandbox hides; nothing of Python's own comes out."""
    try:
        assert render(source) == ""
    except TemplateError as error:
        assert "chat template" in str(error)


def test_a_templates_own_refusal_is_the_message() -> None:
    with pytest.raises(TemplateError, match="the chat template refuses this conversation: no system, please"):
        render("{{ raise_exception('no system, please') }}")


def test_a_mistake_in_a_template_has_its_line() -> None:
    with pytest.raises(TemplateError, match=r"mine\.jinja, line 2 of the template: .*endfor"):
        JinjaTemplate("{% for m in messages %}\n{% endif %}", {}, where="mine.jinja")


def test_functions_and_blocks_of_transformers_are_there() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("  {% if true %}\n  a\n  {% endif %}\n{% generation %}b{% endgeneration %}") == "  a\nb"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}") == '{"a": 1, "b": "<é>"}'


def test_a_conversation_holds_json_only() -> None:
    with pytest.raises(TemplateError, match="JSON values only, not object"):
        jinja("llama3").render([{"role": "user", "content": object()}])
    with pytest.raises(TemplateError, match="at least one message"):
        jinja("llama3").render([])
    with pytest.raises(TemplateError, match="exclude each other"):
        jinja("llama3").render(ASKED, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(TemplateError, match="does not write the last message"):
        JinjaTemplate("{{ messages | length }}", {}).render(ASKED, continue_final_message=True)
    with pytest.raises(TemplateError, match="no text to continue"):
        jinja("llama3").render([{"role": "assistant"}], continue_final_message=True)
