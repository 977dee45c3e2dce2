"""The page of the server lists what it does with every field of vLLM's requests, as a running server answers.

`python -m tests.rl.serving.test_conformance` writes the table.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from rl.serving.chat_template import ChatTemplate
from rl.serving.input.request import _IGNORED
from tests.rl.serving.running import MODEL, Running, make_engine, running
from tests.rl.serving.test_grammars import LONG

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "serving.md"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"
COMMAND = "python -m tests.rl.serving.test_conformance"
BOTH, CHAT, COMPLETIONS = ("completions", "chat/completions"), ("chat/completions",), ("completions",)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
# Fields of CompletionRequest and ChatCompletionRequest in vLLM (vllm/entrypoints/openai/*/protocol.py at 002032ee,
# 2026-11), and `guided_*` of earlier versions, each with a value that asks for something; None: the request has it.
FIELDS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("model", None, BOTH),
    ("prompt", None, COMPLETIONS),
    ("messages", None, CHAT),
    ("echo", True, BOTH),
    ("frequency_penalty", 0.5, BOTH),
    ("logit_bias", {"5": 1}, BOTH),
    ("logprobs", 2, COMPLETIONS),
    ("logprobs", True, CHAT),
    ("top_logprobs", 2, CHAT),
    ("max_tokens", 3, BOTH),
    ("max_completion_tokens", 3, CHAT),
    ("n", 2, BOTH),
    ("presence_penalty", 0.5, BOTH),
    ("seed", 5, BOTH),
    ("stop", ["a"], BOTH),
    ("stream", True, BOTH),
    ("stream_options", {"include_usage": True, "continuous_usage_stats": True}, BOTH),
    ("suffix", "b", COMPLETIONS),
    ("best_of", 2, COMPLETIONS),
    ("temperature", 0.5, BOTH),
    ("top_p", 0.5, BOTH),
    ("user", "me", BOTH),
    ("response_format", {"type": "json_object"}, BOTH),
    ("tools", TOOLS, CHAT),
    ("tool_choice", "required", CHAT),
    ("parallel_tool_calls", False, CHAT),
    ("reasoning_effort", "low", CHAT),
    ("include_reasoning", False, CHAT),
    ("thinking_token_budget", 5, BOTH),
    ("use_beam_search", True, BOTH),
    ("length_penalty", 2.0, BOTH),
    ("top_k", 3, BOTH),
    ("min_p", 0.1, BOTH),
    ("repetition_penalty", 1.2, BOTH),
    ("watermarking", True, BOTH),
    ("stop_token_ids", [5], BOTH),
    ("include_stop_str_in_output", True, BOTH),
    ("ignore_eos", True, BOTH),
    ("min_tokens", 1, BOTH),
    ("skip_special_tokens", False, BOTH),
    ("spaces_between_special_tokens", False, BOTH),
    ("truncate_prompt_tokens", 3, BOTH),
    ("truncation_side", "left", BOTH),
    ("allowed_token_ids", [5], BOTH),
    ("prompt_logprobs", 1, BOTH),
    ("logprob_token_ids", [5], BOTH),
    ("bad_words", ["a"], BOTH),
    ("prompt_embeds", "AA==", COMPLETIONS),
    ("add_special_tokens", False, COMPLETIONS),
    ("add_special_tokens", True, CHAT),
    ("add_generation_prompt", False, CHAT),
    ("continue_final_message", True, CHAT),
    ("documents", [{"text": "a"}], CHAT),
    ("chat_template", "a", CHAT),
    ("chat_template_kwargs", {"a": 1}, CHAT),
    ("media_io_kwargs", {"a": {}}, CHAT),
    ("mm_processor_kwargs", {"a": 1}, CHAT),
    ("structured_outputs", {"choice": ["a", "b"]}, BOTH),
    ("guided_json", {"type": "object"}, BOTH),
    ("guided_regex", "a+", BOTH),
    ("guided_choice", ["a"], BOTH),
    ("guided_grammar", 'start: "a"', BOTH),
    ("priority", 1, BOTH),
    ("request_id", "a", BOTH),
    ("session_id", "a", BOTH),
    ("return_tokens_as_token_ids", True, BOTH),
    ("return_token_ids", True, BOTH),
    ("routed_experts_prompt_start", 1, BOTH),
    ("return_token_offsets", True, BOTH),
    ("return_prompt_text", True, CHAT),
    ("return_mm_kwargs", False, BOTH),
    ("cache_salt", "a", BOTH),
    ("kv_transfer_params", {"a": 1}, BOTH),
    ("ec_transfer_params", {"a": 1}, BOTH),
    ("vllm_xargs", {"a": 1}, BOTH),
    ("repetition_detection", {"a": 1}, BOTH),
    ("stream_interval", 2, BOTH),
]
# Fields without which another has no meaning.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": TOOLS},
    "add_generation_prompt": {},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "a"}]},
    "return_tokens_as_token_ids": {},
}


def answer_to(served: Running, endpoint: str, name: str, value: Any) -> str:
    """Return what the server does with a field, in a few words."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "seed": 1, **BESIDE.get(name, {})}
    if endpoint == "completions":
        body.setdefault("prompt", "hi")
    else:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
    if value is not None:
        body[name] = value
    if name == "max_completion_tokens":
        del body["max_tokens"]
    status, answer, _ = served.post(f"/v1/{endpoint}", body)
    if status == 200:
        return "taken, changes nothing" if name in _IGNORED else "taken"
    assert status == 400 and answer["error"]["param"] == name, answer
    return "refused: " + answer["error"]["message"].removeprefix(f"{name}: ")


def table(served: Running) -> str:
    """Return the rows of the page."""
    lines = ["| field | `/v1/completions` | `/v1/chat/completions` |", "|---|---|---|"]
    found: dict[str, list[str]] = {}
    for name, value, endpoints in FIELDS:
        cells = found.setdefault(name, ["", ""])
        for endpoint in endpoints:
            cells[BOTH.index(endpoint)] = answer_to(served, endpoint, name, value)
    return "\n".join([*lines, *(f"| `{name}` | {' | '.join(cells)} |" for name, cells in found.items())])


def served_table(folder: Path) -> str:
    path = folder / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with running(make_engine(max_new_tokens=LONG), template=ChatTemplate.Config(jinja=str(path))) as served:
        return table(served)


@pytest.mark.slow
def test_the_page_says_what_the_server_does_with_every_field_of_vllm(tmp_path: Path) -> None:
    written = re.search(f"{BEGIN}\n(.*?)\n{END}", PAGE.read_text(), re.DOTALL)
    assert written is not None and written.group(1) == served_table(tmp_path), f"`{COMMAND}`, if this is meant"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = served_table(Path(folder))
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}\n.*?{END}", lambda _: f"{BEGIN}\n{rows}\n{END}", page, flags=re.DOTALL))
