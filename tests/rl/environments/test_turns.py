"""Turns with a chat template: what is appended is what the template writes, and what was drawn stays."""

from pathlib import Path

from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.chat import encode_chat
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.protocol import completion_text
from rl.environments.calls import JsonCalls
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.calculator import Calculator
from rl.environments.turns import Turns
from rl.protocol.messages import Problem
from rl.tasks.encoding import encode_problem
from tests.axlearn_like.tokenizers.golden_files import FOLDER

FORM = JsonCalls.Config()
TOKENIZER = HuggingFaceTokenizer.Config(
    path=str(FOLDER / "byte_level"), chat_template=str(FOLDER / "templates" / "qwen25.jinja")
).build()
ASKED = Problem(1, "toys", "3*4?", "12", {})
PROBLEM = ToolEnvironment.Config(tools=(Calculator.Config(),), calls=FORM).prepare(ASKED)
CALL = FORM.build().call("calculator", {"expression": "3*4"})


def test_a_call_and_its_result_are_the_conversation_of_the_template():
    turns, prompt = Turns(TOKENIZER, PROBLEM, FORM.role()), encode_problem(PROBLEM, TOKENIZER).tolist()
    assert turns.observation("") == []
    action = [token for character in CALL for token in TOKENIZER.encode(character)]  # no tokenizer writes it so
    assert turns.action(action) == CALL
    given = turns.observation("12")
    messages = (
        {"role": "user", "content": "3*4?"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "12"},
    )
    expected = encode_chat(TOKENIZER, messages, tools=PROBLEM.tools, add_generation_prompt=True)
    assert completion_text(TOKENIZER, [*prompt, *action, *given]) == completion_text(TOKENIZER, expected)
    assert "calculator" in completion_text(TOKENIZER, prompt) and "12" in completion_text(TOKENIZER, given)


def test_a_template_that_leaves_results_out_gets_them_from_the_user(tmp_path: Path):
    template = tmp_path / "two.jinja"
    shown = "{% for m in messages if m.role != 'tool' %}{{ m.role }}:{{ m.content }};{% endfor %}"
    template.write_text(f"{shown}{{% if add_generation_prompt %}}assistant:{{% endif %}}")
    two = HuggingFaceTokenizer.Config(path=str(FOLDER / "byte_level"), chat_template=str(template)).build()
    turns = Turns(two, ASKED, "tool")
    turns.action([])
    assert completion_text(two, turns.observation("12")) == ";user:12;assistant:"


def test_an_observation_before_the_first_action_is_a_message_behind_an_empty_turn():
    turns = Turns(TOKENIZER, ASKED)
    prompt = encode_problem(ASKED, TOKENIZER).tolist()
    text = completion_text(TOKENIZER, [*prompt, *turns.observation("go!")])
    assert text.count("assistant") == 2 and text.index("3*4?") < text.index("go!") < text.rindex("assistant")


def test_without_a_template_observations_are_their_text():
    plain = ByteTokenizer.Config().build()
    turns = Turns(plain, ASKED)
    assert turns.observation("go!") == list(b"go!") and turns.observation("") == []
    assert turns.action([*b"left", plain.eos]) == "left"
