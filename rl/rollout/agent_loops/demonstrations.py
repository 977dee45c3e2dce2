"""Demonstrations in the groups of RL: answers that somebody else wrote, scored and trained on beside the policy's own.

A demonstration takes the place of a sample: of its prompt's `samples` the policy draws the others. It follows from the
prompt alone, so a lost group gets the same one again.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input.rows.tables import find_tables, read_rows
from axlearn_like.input.source import InputError
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.environments.task import environments_of
from rl.protocol.experiment import ExperimentFields
from rl.protocol.messages import Problem, Prompt, Rollout
from rl.rollout.sampling import plain
from rl.tasks.encoding import encode_solution
from rl.tasks.mixture import TaskMixture

__all__ = ["GroupDemonstrations"]


class GroupDemonstrations(Configurable):
    """The demonstrations of each prompt, as rollouts with log-probabilities of 0."""

    class Config(ConfigBase["GroupDemonstrations"]):
        """Fields of the answers that take the place of samples."""

        # Paths, globs or directories of rows with `prompt`, the question as the task asks it, and `response`, a text or
        # a list of them; None: the tasks' own answers
        files: str | tuple[str, ...] | None = None
        per_prompt: int = 1  # limit of demonstrations among a group's samples
        max_new_tokens: int = REQUIRED  # tokens that one may have, the end included; a longer one is left out

        def check_fields(self) -> None:
            """Refuse none at all."""
            self.require_least(1, "per_prompt")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse what takes demonstrations for draws of the policy, or needs of them what nobody recorded."""
            objective, trainer = experiment.objective, experiment.trainer
            mixes = objective.surrogate.build().mixes
            expected = (
                "MixedPolicy.Config(), or objective=luffy(...), with demonstrations, which no policy of the run drew"
            )
            objective.require("surrogate", mixes, expected)
            samples = experiment.samples_per_prompt
            drawn = samples - self.per_prompt
            self.require(
                "per_prompt", drawn >= 1, f"less than samples_per_prompt={samples}: the policy draws the others"
            )
            whole = not environments_of(experiment.tasks) and experiment.branching is None
            expected = "None with environments or branching, whose rollouts are the policy's own"
            experiment.require("demonstrations", whole, expected)
            unaudited = not experiment.controller.audit
            experiment.require("demonstrations", unaudited, "None with an audit: nobody has drawn them")
            experiment.require("stop_at_eos", experiment.stop_at_eos, "True with demonstrations, which end so")
            expected = "the whole distribution with demonstrations: none has candidates"
            experiment.require("sampler", plain(experiment.sampler), expected)
            expected = "False with demonstrations, of which no routing is recorded"
            trainer.require("replay_routing", not trainer.replay_routing, expected)
            shaping = objective.reward_shaping
            free = shaping is None or not shaping.build().needs_reference
            expected = "one without a reference: log mu - log ref of a demonstration is not known; or a regulariser"
            objective.require("reward_shaping", free, expected)

    def __init__(self, cfg: Config, *, tasks: TaskMixture, tokenizer: Tokenizer):
        """Read the files, if there are any."""
        self._cfg, self._tasks, self._tokenizer = cfg, tasks, tokenizer
        with cfg.errors_in("files"):
            self._by_question = None if cfg.files is None else _read(cfg.files)
        if self._by_question is None and (missing := tasks.without_answers()):
            cfg.require("files", False, f"files with answers: the task {missing[0]!r} has none of its own")

    def answers(self, problem: Problem) -> list[np.ndarray]:
        """Return the tokens of a problem's demonstrations, int32."""
        texts = [problem.answer] if self._by_question is None else self._by_question.get(problem.question, [])
        tokens = [encode_solution(problem, text, self._tokenizer)[1] for text in texts]
        return [one for one in tokens if len(one) <= self._cfg.max_new_tokens][: self._cfg.per_prompt]

    def rollouts(self, prompt: Prompt, samples: int, version: int) -> list[Rollout]:
        """Return the demonstrations of a prompt, which take the last of its `samples` sample ids."""
        answers = self.answers(self._tasks.problem(prompt.id))
        first = samples - len(answers)
        return [_rollout(prompt.id, first + n, tokens, version) for n, tokens in enumerate(answers)]

    def check(self, problems: Sequence[Problem]) -> None:
        """Refuse to start where none of these problems has a demonstration (UserError)."""
        if any(self.answers(problem) for problem in problems):
            return
        where = "the tasks' own answers" if self._cfg.files is None else f"{self._cfg.files}"
        raise UserError(
            f"demonstrations: none of the first {len(problems)} training problems, such as {problems[0].question!r:.80}"
            f", has one of at most max_new_tokens={self._cfg.max_new_tokens} tokens in {where}; expected rows whose "
            "`prompt` is the question as the task asks it"
        )


def _rollout(prompt_id: int, sample_id: int, tokens: np.ndarray, version: int) -> Rollout:
    size = len(tokens)
    return Rollout(
        prompt_id=prompt_id,
        sample_id=sample_id,
        tokens=tokens,
        logprobs=np.zeros(size, np.float32),
        versions=np.full(size, version, np.int32),
        action_mask=np.ones(size, bool),
        finish_reason="stop",
        demonstration=True,
    )


def _read(files: str | tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the responses by question; InputError names the first row that is wrong."""
    found: dict[str, list[str]] = {}
    for path in find_tables(files):
        for row, where in read_rows(path):
            question, given = row.get("prompt"), row.get("response")
            responses = [given] if isinstance(given, str) else given
            right = isinstance(responses, list) and all(isinstance(text, str) for text in responses)
            if not (isinstance(question, str) and responses and right):
                expected = "expected `prompt`, a text, and `response`, a text or a list of texts"
                raise InputError(f"{where}: {expected}; got the fields {', '.join(row)}")
            found.setdefault(question, []).extend(responses)
    return found
