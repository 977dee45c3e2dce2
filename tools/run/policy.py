"""A policy to draw answers from: of a run, a checkpoint in one, an experiment, or a model's directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.versions import SavedWeights
from axlearn_like.tokenizers.protocol import answer_text
from rl.experiment import RLExperiment
from rl.protocol.messages import Prompt
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.policy import ServedModel, make_engine
from rl.tasks.encoding import encode_prompt
from tools.experiment import find_policy


class Policy:
    """A policy with its weights in a rollout engine."""

    def __init__(self, cfg: RLExperiment.Config | ServedModel.Config, weights: SavedWeights | None):
        """Build the engine; without weights the policy has those that its config starts from."""
        built: Any = cfg.build()
        self.tokenizer = built.tokenizer
        self.engine, _ = make_engine(built, weights)

    def generate(
        self,
        questions: str | Sequence[str],
        *,
        samples: int = 1,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Return answers in order of (question, sample), each as a verifier reads it.

        Args:
            questions: texts, which are encoded as prompts of RL are: with the chat template, if there is one.
            samples: answers to each question.
            temperature: 0: the likeliest tokens; None: the experiment's.
            max_new_tokens: tokens of an answer; None: the experiment's.
            seed: equal calls with equal seeds have equal answers.

        Raises:
            UserError: a question is longer than the engine has room for, or a number is out of its range.
        """
        texts = [questions] if isinstance(questions, str) else list(questions)
        settings: dict[str, Any] = {"samples": samples, "seed": seed}
        if temperature is not None:
            settings["sampler"] = Sampler.Config(temperature=temperature)
        if max_new_tokens is not None:
            settings["stop"] = StopConditions(tokens=self.tokenizer.stop_ids, max_new_tokens=max_new_tokens)
        prompts = [Prompt(n, "question", encode_prompt(text, self.tokenizer)) for n, text in enumerate(texts)]
        rollouts = self.engine.generate([Request(prompt, **settings) for prompt in prompts])
        return [answer_text(self.tokenizer, rollout.tokens.tolist()) for rollout in rollouts]


def load_policy(name: str | Path, *, sets: Mapping[str, Any] | None = None, random_weights: bool = False) -> Policy:
    """Return the policy that `axl serve NAME` would serve.

    Args:
        name: a run directory, RUN@best, RUN@STEP, a checkpoint's path, an experiment's name, or a model's directory.
        sets: fields of its config to change, by path.
        random_weights: take those that the policy begins with.

    Raises:
        UserError: there is no such policy, or it has no weights yet.
    """
    cfg, weights, _ = find_policy(str(name), sets or {}, random_weights=random_weights, command="serve")
    return Policy(cfg, weights)
