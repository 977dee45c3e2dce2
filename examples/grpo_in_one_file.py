"""GRPO from top to bottom in one file: a small policy learns to sort the digits of a number.

python examples/grpo_in_one_file.py

First it imitates the answers to a few questions, then it improves by reinforcement on many to which it is never shown
an answer. The loop is that of every RL run here: draw several answers to each question, score them, and make those
above the mean of their group more likely. `axl rl` adds processes, checkpoints and recovery around the same objects.
"""

import random
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, bind, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.learner import AdamW, Learner, WarmupLinear
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.training.losses import token_logprobs
from axlearn_like.training.step import init_state, make_train_step
from models.tiny import tiny
from rl.objective import Objective
from rl.objective.presets import grpo
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler

PROMPTS, SAMPLES = 16, 16  # questions of a step, and answers drawn to each
PROMPT_TOKENS, ANSWER_TOKENS = 6, 5  # bos + "3951=", and "1359" + eos
UNSEEN, SHOWN = 200, 100  # questions kept for the examination, and those imitated; the rest is for reinforcement

Batch = Mapping[str, Any]


# 1. The task: questions such as "3951=", and a verifier that scores answers.


def right_answer(question: str) -> str:
    """Return the digits of a question in order."""
    return "".join(sorted(question.rstrip("=")))


def verify(question: str, answer: str) -> float:
    """Return the reward: 1 for a right answer, and a little for each right digit of another."""
    right = right_answer(question)
    return 1.0 if answer == right else 0.1 * sum(a == b for a, b in zip(answer, right, strict=False))


# 2. The policy: a decoder of 0.1 M parameters, and the engine that draws answers from it.

tokenizer = ByteTokenizer.Config().build()
policy = tiny(vocab_size=tokenizer.vocab_size, dim=64, num_layers=2, num_heads=2, num_kv_heads=1, hidden=192)
sizes = RolloutEngine.Config(
    model=policy,
    stop_tokens=tokenizer.stop_ids,
    max_prompt_tokens=PROMPT_TOKENS,
    max_new_tokens=ANSWER_TOKENS,
    max_num_seqs=PROMPTS * SAMPLES,
)


def encode(question: str) -> list[int]:
    """Return the tokens of a prompt."""
    return [tokenizer.bos, *tokenizer.encode(question)]


class Answered(NamedTuple):
    """Rollouts in order of (question, sample), with their texts and rewards."""

    questions: list[str]
    rollouts: list[Rollout]
    texts: list[str]
    rewards: np.ndarray


def ask(engine: RolloutEngine, questions: list[str], samples: int, *, seed: int, temperature: float = 1.0) -> Answered:
    """Draw so many answers to each question, and score them."""
    sampler = Sampler.Config(temperature=temperature)
    prompts = [Prompt(n, "sort", np.array(encode(question), np.int32)) for n, question in enumerate(questions)]
    rollouts = engine.generate([Request(prompt, samples=samples, seed=seed, sampler=sampler) for prompt in prompts])
    asked = [question for question in questions for _ in range(samples)]
    texts = [tokenizer.decode(rollout.tokens.tolist()) for rollout in rollouts]
    return Answered(asked, rollouts, texts, np.array([verify(*pair) for pair in zip(asked, texts, strict=True)]))


# 3. Rows of tokens, and the log-probabilities of their targets.


def rows_of(questions: list[str], answers: list[list[int]]) -> dict[str, np.ndarray]:
    """Return tokens, targets (the same, one to the left) and the mask of targets that are part of an answer: [b, t]."""
    tokens = np.zeros((len(questions), PROMPT_TOKENS + ANSWER_TOKENS), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        tokens[row, :PROMPT_TOKENS] = encode(question)
        tokens[row, PROMPT_TOKENS : PROMPT_TOKENS + len(answer)] = answer
        mask[row, PROMPT_TOKENS : PROMPT_TOKENS + len(answer)] = True
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "action_mask": mask[:, 1:]}


def logprobs_of(graphdef: nnx.GraphDef[Any], params: Params, batch: Batch) -> jax.Array:
    """Return log pi of each target, float32 [b, t]."""
    tokens = batch["tokens"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = bind(graphdef, params)(tokens, PackedContext(positions, segment_ids=jnp.ones_like(tokens)))
    return token_logprobs(logits, batch["targets"])


# 4. Two losses: imitation, and GRPO.

objective: Objective = grpo().set(old_policy="current", zero_variance="drop").build()


def imitation_loss(graphdef: nnx.GraphDef[Any], params: Params, batch: Batch) -> tuple[jax.Array, Any]:
    """Return the cross entropy of answers' tokens."""
    mask = batch["action_mask"]
    return -jnp.sum(jnp.where(mask, logprobs_of(graphdef, params, batch), 0)) / jnp.sum(mask), {}


def grpo_batch(answered: Answered) -> dict[str, np.ndarray]:
    """Return rows of rollouts, with advantages [b] and weights [b, t], which the objective makes of their rewards."""
    batch = rows_of(answered.questions, [rollout.tokens.tolist() for rollout in answered.rollouts])
    group = np.arange(len(answered.rollouts)) // SAMPLES
    batch |= objective.prepare(answered.rewards, batch["action_mask"], groups=group).arrays
    batch["logprobs_behaviour"] = np.zeros(batch["action_mask"].shape, np.float32)
    batch["logprobs_behaviour"][batch["action_mask"]] = np.concatenate([one.logprobs for one in answered.rollouts])
    return batch


def grpo_loss(graphdef: nnx.GraphDef[Any], params: Params, batch: Batch) -> tuple[jax.Array, Any]:
    """Return the objective's loss and its metrics."""
    return objective.loss(logprobs_of(graphdef, params, batch), batch)


# 5. The two phases.


def make_learner(rate: float, steps: int) -> Learner:
    """Return AdamW with a learning rate that warms up and then falls to a tenth."""
    schedule = WarmupLinear.Config(peak_lr=rate, warmup_steps=10, total_steps=steps, end_lr=rate / 10)
    return Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=schedule).build()


def imitate(graphdef: nnx.GraphDef[Any], params: Params, questions: list[str], steps: int) -> Params:
    """Return parameters that have learned the right answers to these questions."""
    learner = make_learner(3e-3, steps)
    update, state = make_train_step(partial(imitation_loss, graphdef), learner), init_state(params, learner)
    batch = rows_of(questions, [[*tokenizer.encode(right_answer(one)), tokenizer.eos] for one in questions])
    for _ in range(steps):
        state, _ = update(state, batch)
    return state["params"]


def main(imitation_steps: int = 60, steps: int = 200, *, seed: int = 0) -> list[float]:
    """Run both phases, print what happens, and return the mean reward of each step of the second."""
    rng, began = random.Random(seed), time.monotonic()
    questions = [f"{number:04}=" for number in range(10_000)]
    rng.shuffle(questions)
    unseen, shown, others = questions[:UNSEEN], questions[UNSEEN:][:SHOWN], questions[UNSEEN + SHOWN :]
    graphdef, params = split(policy.build(rngs=nnx.Rngs(seed)))
    engine, learner = sizes.build(), make_learner(1e-3, steps)
    update = make_train_step(partial(grpo_loss, graphdef), learner)
    state, rewards = init_state(imitate(graphdef, params, shown, imitation_steps), learner), list[float]()
    for step in range(steps + 1):
        engine.set_weights(state["params"], version=step)
        if step in (0, steps):
            found = ask(engine, unseen, 1, seed=seed, temperature=0.0).rewards
            print(f"{np.mean(found == 1):.0%} of {UNSEEN} unseen questions right, {time.monotonic() - began:.0f} s")
        if step < steps:
            answered = ask(engine, rng.sample(others, PROMPTS), SAMPLES, seed=seed + step)
            rewards.append(float(answered.rewards.mean()))
            state, metrics = update(state, grpo_batch(answered))
            if step % 20 == 0:
                sample = f"{answered.questions[0]} {answered.texts[0]!r}"
                print(
                    f"step {step:3}: reward {rewards[-1]:.3f}, drift {metrics['drift_max']:.0e}, {sample}", flush=True
                )
    return rewards


if __name__ == "__main__":
    main()
