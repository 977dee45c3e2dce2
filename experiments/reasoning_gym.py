"""Reinforcement learning on reasoning-gym tasks, from nothing, on two CPU cores."""

from axlearn_like.checkpoint import Checkpointer
from axlearn_like.input import SupervisedInput
from axlearn_like.learner import AdamW, Constant, Learner, WarmupCosine
from axlearn_like.phrase_tokenizer import PhraseTokenizer
from axlearn_like.trainer import Trainer
from experiments.registry import experiment
from models.tiny import tiny
from rl.evaluation import Evaluation
from rl.experiment import RLExperiment
from rl.objective.presets import grpo
from rl.parameter_server import ParameterServer
from rl.rollout.engine import RolloutEngine
from rl.task_family import TaskFamily
from rl.tasks import SupervisedSource, TaskMixture
from rl.trainer import PolicyTrainer
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier

PHRASES = (
    "How many 1 bits are there in the binary representation of the number ",
    "State the final answer to the following arithmetic problem: ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    "Spell this word backward (example: sun -> nus): ",
    "Give only the GCD as your final answer.",
)


@experiment
def demo(*, seed: int = 0) -> RLExperiment.Config:
    """A 0.8 M-parameter decoder learns four task families by supervision, then gets better at them by RL."""
    tasks = TaskMixture.Config(
        families=(
            TaskFamily.Config(
                name="chain_sum",
                params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
            ),
            TaskFamily.Config(name="spell_backward", params={"min_word_len": 3, "max_word_len": 5}),
            TaskFamily.Config(name="count_bits", params={"min_n": 1, "max_n": 1023}),
            TaskFamily.Config(name="gcd", params={"min_value": 1, "max_value": 60}),
        ),
        seed=seed,
        heldout_every=4,
    )
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    policy = tiny(vocab_size=tokenizer.vocab_size)
    sft_steps = 600
    return RLExperiment.Config(
        policy=policy,
        tokenizer=tokenizer,
        tasks=tasks,
        max_prompt=17,
        max_new=8,
        num_steps=100,
        groups=32,
        samples=16,
        staleness=1,
        seed=seed,
        warm_start=Trainer.Config(
            model=policy,
            input=SupervisedInput.Config(
                source=SupervisedSource.Config(
                    mixture=tasks, tokenizer=tokenizer, num_examples=1_000_000, start=1_000_000
                ),
                seq_len=128,
                batch_size=16,
                seed=seed,
            ),
            learner=Learner.Config(
                optimizer=AdamW.Config(b2=0.98, weight_decay=0.1),
                schedule=WarmupCosine.Config(
                    peak_lr=3e-3, warmup_steps=50, total_steps=sft_steps, end_lr=1e-4
                ),
            ),
            checkpoint=Checkpointer.Config(save_every=100_000, keep=1),
            num_steps=sft_steps,
            seed=seed,
        ),
        objective=grpo().set(old_policy="current", zero_variance="drop"),
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.98), schedule=Constant.Config(lr=1e-4), clip_norm=1.0
        ),
        trainer=PolicyTrainer.Config(
            checkpoint=Checkpointer.Config(save_every=50, keep=2), row_multiple=8
        ),
        engine=RolloutEngine.Config(groups=16),
        parameter_server=ParameterServer.Config(keep=4),
        verifier=Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=tasks), processes=1),
        evaluation=Evaluation.Config(problems_per_family=72),
        kill_worker_after=0.5,
    )
