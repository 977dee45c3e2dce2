"""Answers of environments that let another policy speak: it draws a completion of its own, of which nobody learns."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

from axlearn_like.tokenizers.protocol import Tokenizer, answer_text
from rl.environments.environment import Consult, Environment, Step, checked_consult, checked_step
from rl.protocol.messages import Rollout
from rl.protocol.segments import SegmentedText
from rl.rollout.agent_loops.commands import Command, Completion, Generate, Join, Spawn, Wait
from rl.tasks.encoding import encode_prompt, encode_segments

Ask = Callable[[Callable[[Environment], Any]], Wait]


def heard(value: Any, cfg: Environment.Config, ask: Ask, tokenizer: Tokenizer) -> Generator[Command, Any, Step]:
    """Return the step to which an answer of the environment leads, once all that it consults have spoken.

    Args:
        value: the answer of `reset` or `step`.
        cfg: names the policies that may be consulted.
        ask: makes the command that calls the environment.
        tokenizer: that of all policies.

    Raises:
        TypeError: an answer is neither a step nor a `Consult`.
        UserError: the policy cannot be asked, or the prompt does not fit the engine.
    """
    paid = 0.0
    while isinstance(value, Consult):
        consult = checked_consult(value, cfg.consults)
        paid += consult.reward

        def speak(completion: Completion, strings: tuple[str, ...] = consult.strings) -> Generator[Command, Any, None]:
            yield Generate(strings=strings)

        asked, segments = consult.prompt, ()
        if isinstance(asked, SegmentedText):
            prompt, segments = encode_segments(asked, tokenizer)
        else:
            prompt = encode_prompt(asked, tokenizer)
        children: list[Completion] = []
        for _ in range(1 if consult.samples is None else consult.samples):
            child = yield Spawn(prompt.tolist(), speak, consult.max_new_tokens, consult.policy, segments)
            children.append(child)
        rollouts: Sequence[Rollout] = yield Join(tuple(children))
        answers = [answer_text(tokenizer, rollout.tokens.tolist()) for rollout in rollouts]
        told: Any = answers[0] if consult.samples is None else answers
        value = yield ask(lambda environment, said=told: environment.hear(said))
    step = checked_step(value)
    return step._replace(reward=paid + step.reward)


def opened(value: Any, cfg: Environment.Config, ask: Ask, tokenizer: Tokenizer) -> Generator[Command, Any, Any]:
    """Return the first observation, of an environment that consults before the first action (see `heard`)."""
    if not isinstance(value, Consult):
        return value
    step = yield from heard(value, cfg, ask, tokenizer)
    if step.done or step.reward:
        raise TypeError("the environment has ended or paid an episode before the first action")
    return step.observation
