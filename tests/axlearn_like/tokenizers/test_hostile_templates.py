"""A stranger's chat template is refused with a sentence, within a second and 200 MB, and hurts no later one."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from axlearn_like.tokenizers import template_process as process
from axlearn_like.tokenizers.jinja_template import JinjaTemplate, TemplateError
from tests.axlearn_like.tokenizers import hostile_templates
from tests.measured import check, measured

ASKED = [{"role": "user", "content": "x"}]


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [hostile_templates.AS_LONG, pytest.param((), marks=pytest.mark.full)])
def test_every_hostile_template_is_refused(left_out: tuple[str, ...]) -> None:
    """The bound on CPU time ends a dozen, each after as long: three of them run without --full."""
    names = [name for name in hostile_templates.CASES if name not in left_out]
    found = measured(hostile_templates.__name__, *names)
    assert list(found) == names and len(names) > 35
    check(found)


@pytest.mark.slow
def test_one_that_ends_the_process_leaves_the_others_theirs() -> None:
    good = JinjaTemplate("{{ messages[0].content }}", {})
    endless = hostile_templates.SOURCES["loops in loops"]
    with pytest.raises(TemplateError, match=r"the chat template takes too much: more than 0\.8 seconds of CPU time"):
        JinjaTemplate(endless, {}).render(ASKED)
    assert good.render(ASKED) == "x"
    os.kill(_process(), signal.SIGKILL)  # by somebody, while it waits
    assert good.render(ASKED) == "x"


IGNORING = """
import signal, sys
signal.signal(signal.SIGPROF, signal.SIG_IGN)
from axlearn_like.tokenizers.jinja_template import JinjaTemplate
JinjaTemplate(sys.argv[1], {}).render([{"role": "user", "content": "x"}])
"""


def test_a_process_that_ignores_the_signal_of_profilers_bounds_templates_too() -> None:
    command = [sys.executable, "-c", IGNORING, hostile_templates.SOURCES["loops in loops"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert "more than 0.8 seconds of CPU time" in done.stderr


def test_a_template_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    good = JinjaTemplate("{{ messages[0].content }}", {})
    monkeypatch.setattr("axlearn_like.tokenizers.template_process._WAIT", 0.3)
    good.render(ASKED)
    os.kill(_process(), signal.SIGSTOP)
    with pytest.raises(TemplateError, match=r"more than 0\.3 seconds"):
        good.render(ASKED)
    monkeypatch.undo()
    assert good.render(ASKED) == "x"


def test_threads_and_forks_have_answers_of_their_own() -> None:
    template, wrong = JinjaTemplate("{{ messages[0].content * 100 }}", {}), list[str]()

    def render(number: int) -> None:
        said = f"{number:04d}"
        wrong.extend(text for _ in range(50) if (text := template.render([{"content": said}])) != said * 100)

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_fork_has_a_process_of_its_own() -> None:
    """The fork is made in a process without JAX, whose threads do not survive one."""
    script = """
import os
from axlearn_like.tokenizers.jinja_template import JinjaTemplate
from axlearn_like.tokenizers.template_process import template_process
template = JinjaTemplate("{{ messages[0].content }}", {})
here = lambda: template.render([{"content": "x"}]) == "x" and template_process()._process.pid
before = here()
pid = os.fork()
if not pid:
    os._exit(here() in (before, False))
assert os.waitpid(pid, 0)[1] == 0 and here() == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_wait_that_is_interrupted_leaves_no_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    template = JinjaTemplate("{{ messages[0].content }}", {})

    def interrupted(of: subprocess.Popen[bytes], request: bytes) -> bytes:
        exchange(of, request)
        raise KeyboardInterrupt

    exchange = process._exchange
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(process, "_exchange", interrupted)
        template.render([{"content": "before"}])
    assert template.render(ASKED) == "x"


def test_it_ends_with_this_process_and_holds_none_of_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    one = process.TemplateProcess()
    assert one.ask("x", {}) == {"text": "x"}
    found = one._process
    assert found is not None
    with open(f"/proc/{found.pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    assert found.stdin is not None
    found.stdin.close()  # as the end of its parent does
    deadline = time.monotonic() + 30
    while found.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found.returncode == 0


def _process() -> int:
    found = process.template_process()._process
    assert found is not None
    return found.pid


def test_a_large_conversation_is_rendered_and_a_larger_one_refused() -> None:
    template = JinjaTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    said = "\u00e9" * (4 << 20)
    assert template.render([{"content": said}]) == said
    with pytest.raises(TemplateError, match="takes too much: a conversation of"):
        template.render([{"content": said * 8}])
    with pytest.raises(TemplateError, match="nested too deeply"):
        nested: list[object] = []
        for _ in range(5000):
            nested = [nested]
        template.render([{"content": nested}])
