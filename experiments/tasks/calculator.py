"""A small policy learns to use a calculator, on two CPU cores.

Supervised fine-tuning shows it transcripts of both kinds: half call the calculator, half give the product at once,
which a decoder of this size cannot compute. RL finds out which of the two pays.

Measured with `axl rl calculator_rl` (two cores, no accelerator, three minutes on an idle machine): pass@1 39 % after
supervised fine-tuning, with a call in 54 % of the episodes; 74 % after RL, with a call in 98 %.
"""

from collections.abc import Sequence

from axlearn_like.config import config_function
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.trainer import Trainer
from experiments.registry import experiment
from experiments.tasks.small import small_learner, small_rl, small_sft
from rl.environments.calls import TextCalls
from rl.environments.demonstrations import Demonstrations
from rl.environments.task import EnvironmentTask
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.calculator import Calculator
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.protocol.messages import Problem
from rl.rollout.engine import RolloutEngine
from rl.tasks.family import TaskFamily
from rl.tasks.heldout import question_digest
from rl.tasks.mixture import TaskMixture
from rl.verification.scorers import ReasoningGymScorer

# One token each: the words of the question, and the form of a call. Digits stay bytes.
PHRASES = (
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
    "<tool>calculator: ",
    "</tool>",
    "<result>",
    "</result>",
    " * ",
)


def products(seed: int) -> TaskMixture.Config:
    """Products of two numbers of three digits, with a calculator at hand; a quarter of the questions is held out."""
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}
    source = TaskFamily.Config(name="products", params=digits)
    environment = ToolEnvironment.Config(tools=(Calculator.Config(),), calls=TextCalls.Config(), max_turns=3)
    return TaskMixture.Config(
        families=(EnvironmentTask.Config(source=source, environment=environment),), seed=seed, heldout_every=4
    )


@config_function
def transcript(problem: Problem) -> Sequence[str]:
    """Return the actions of a demonstration: half of the questions are answered at once."""
    if question_digest(problem.question) // 4 % 2:  # independent of the split, which is by a remainder of 4
        return (problem.answer,)
    expression = problem.entry["metadata"]["expression"]
    return (TextCalls.Config().build().call("calculator", {"expression": expression}), problem.answer)


def calculator_sft(*, seed: int = 0, steps: int = 300) -> Trainer.Config:
    """Supervised fine-tuning on transcripts, half with a calculator and half without."""
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    source = Demonstrations.Config(mixture=products(seed), actions=transcript, tokenizer=tokenizer)
    return small_sft(source, vocab_size=tokenizer.vocab_size, seq_len=64, batch_size=32, steps=steps, seed=seed)


@experiment
def calculator_rl(*, seed: int = 0, steps: int = 60) -> RLExperiment.Config:
    """A 0.4 M-parameter decoder learns by RL to call a calculator for products that it cannot compute."""
    tasks, tokenizer = products(seed), PhraseTokenizer.Config(phrases=PHRASES)
    scorer = ReasoningGymScorer.Config(mixture=tasks, pass_mark=1.0)
    return small_rl(
        *(calculator_sft(seed=seed), tokenizer, tasks, scorer),
        max_prompt_tokens=16,
        max_new_tokens=32,
        num_steps=steps,
        samples_per_prompt=8,
        learner=small_learner(3e-4, 1e-4, warmup=5, steps=steps),
        engine=RolloutEngine.Config(max_num_seqs=64, keep_completions=False, steps_per_dispatch=8),
        evaluation=Evaluation.Config(problems_per_family=96),
    )
