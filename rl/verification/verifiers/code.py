"""The verifier of code: unit tests on functions, or programs on standard input, in the sandbox."""

import json
import re
import time
from collections.abc import Sequence
from typing import Any, override

from axlearn_like.input.encoding import field_of, find_field
from rl.protocol.messages import Problem
from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.verifiers.rows import RowScorer

_FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)


class CodeVerifier(RowScorer):
    """1 for code that passes the tests of its row, 0 for code that fails, hangs, crashes or ends early.

    The last fenced block of an answer is the code, or the whole answer. A row has either tests (Python that calls the
    functions; of HumanEval a `check`, which is called) or cases: a list of {"input", "output"}, all of which a program
    must get right. What is expected stays outside of the box in which the code runs. Terms of the reward are "passed"
    (the share of the cases), "timeout" and "crash".
    """

    class Config(RowScorer.Config):
        sandbox: Sandbox.Config = Sandbox.Config()
        # Wall-clock seconds for all cases of a row, less than the verifier's deadline; the rest count as timeouts.
        answer_s: float = 8.0
        # Field with the beginning of the code, which an answer continues or repeats (HumanEval: "prompt").
        prompt_field: str | None = None
        tests_field: str = "test"
        cases_field: str = "cases"
        name_field: str | None = "entry_point"  # field with the name of the function that is tested, if rows have one

        @override
        def confined(self) -> bool:
            return False  # True: makes boxes

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        self._sandbox = cfg.sandbox.build()

    @property
    def isolation(self) -> str:
        """Kind of isolation that the code has on this machine."""
        return self._sandbox.isolation

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> Any:
        row, cfg, at = problem.entry, self._cfg, f"the row of problem {problem.id}"
        prompt = "" if cfg.prompt_field is None else str(field_of(row, cfg.prompt_field, at))
        name = "" if cfg.name_field is None else str(find_field(row, cfg.name_field) or "")
        code = code_of(answer)
        if prompt and name and re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE):
            code = f"{prompt}\n{code}"  # prompt's imports may be needed; the function is defined again
        elif prompt:
            code = prompt + (answer if code == answer.strip() else code)
        if (tests := find_field(row, cfg.tests_field)) is not None:
            tests = str(tests)
            if name and re.search(r"^def check\(", tests, re.MULTILINE):
                tests = f"{tests}\ncheck({name})\n"
            return self._terms([self._sandbox.run_tests(code, tests, prelude=prompt, names=[name] if name else [])])
        if (cases := find_field(row, cfg.cases_field)) is None:
            raise LookupError(f"{at} has neither {cfg.tests_field!r} nor {cfg.cases_field!r}")
        return self._programs(code, cases)

    def _programs(self, code: str, cases: Any) -> Any:
        listed = json.loads(cases) if isinstance(cases, str) else cases
        if not listed:
            raise ValueError("a row without cases")
        outcomes = []
        end = time.monotonic() + self._cfg.answer_s
        for case in listed:
            seconds = min(self._cfg.sandbox.deadline_s, max(0.01, end - time.monotonic()))
            outcome = self._sandbox.run_script(code, str(case["input"]), deadline_s=seconds)
            outcome.passed = outcome.passed and _lines(outcome.output) == _lines(str(case["output"]))
            outcomes.append(outcome)
            if outcome.ended == "timeout":
                break  # the others count as not passed
        return self._terms(outcomes, len(listed))

    def _terms(self, outcomes: Sequence[Any], count: int = 1) -> dict[str, float]:
        passed = sum(outcome.passed for outcome in outcomes) / count
        ends = [outcome.ended for outcome in outcomes]
        terms = {end: float(end in ends) for end in ("timeout", "crash")}
        return {"reward": float(passed == 1.0), "passed": passed, **terms}


def code_of(answer: str) -> str:
    """Return the last fenced block of an answer, or all of it."""
    found = _FENCED.findall(answer)
    return found[-1] if found else answer.strip()


def _lines(text: str) -> list[str]:
    """Return lines without the spaces at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
