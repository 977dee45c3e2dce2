"""Reinforcement learning on reasoning-gym tasks: from random weights to a better policy, on two CPU cores.

Measured with `axl rl demo` (two cores, no accelerator): pass@1 about 0.3 after supervised fine-tuning, 0.5 to 0.56
after RL. The last bits of a matrix product differ between processors, so one seed starts RL from other weights on each.
"""

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import replace, set_path
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.learner import AdamW, Constant, Learner, WarmupCosine, WarmupLinear
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.alignment.distillation import DistillationLoss
from axlearn_like.training.alignment.teacher import Teacher
from axlearn_like.training.early_stopping import EarlyStopping
from axlearn_like.training.trainer import Trainer
from experiments.demo.data import PHRASES, task_mixture
from experiments.registry import experiment
from experiments.tasks.small import small_learner, small_rl, small_sft
from models.moe import tiny_moe
from models.tiny import tiny
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective import TruncatedImportance
from rl.objective.presets import distillation, ppo, rejection_sampling
from rl.rollout.engine import RolloutEngine
from rl.tasks.supervised import SupervisedSource
from rl.training.critic import Critic
from rl.training.updates import Updates
from rl.verification.scorers import ReasoningGymScorer


@experiment
def demo_sft(*, seed: int = 0, steps: int = 700) -> Trainer.Config:
    """Supervised fine-tuning until the decoder solves some of the tasks, not most.

    It ends at 89 % of the answers' tokens (350 to 450 steps; seeds differ), about a quarter of the answers. The
    learning rate is left high: annealing it would settle the policy in a place that RL then has to leave.
    """
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    source = SupervisedSource.Config(mixture=task_mixture(seed), tokenizer=tokenizer)
    cfg = small_sft(source, vocab_size=tokenizer.vocab_size, seq_len=64, batch_size=32, steps=steps, seed=seed)
    set_path(cfg, "evaluators.0.input.source.num_examples", 2_000)
    return cfg.set(early_stopping=EarlyStopping.Config(metric="accuracy", at_least=0.89))


@experiment
def demo(*, seed: int = 0, steps: int = 320) -> RLExperiment.Config:
    """A 0.4 M-parameter decoder learns three task families by supervision, then gets better at them by RL."""
    tasks = task_mixture(seed)
    return small_rl(
        demo_sft(seed=seed),
        PhraseTokenizer.Config(phrases=PHRASES),
        tasks,
        ReasoningGymScorer.Config(mixture=tasks, pass_mark=1.0),
        max_prompt_tokens=34,
        max_new_tokens=14,
        num_steps=steps,
        samples_per_prompt=16,
        learner=small_learner(2e-4, 5e-5, warmup=20, steps=steps),
        engine=RolloutEngine.Config(max_num_seqs=128, keep_completions=False),
        evaluation=Evaluation.Config(problems_per_family=96),
    )


@experiment
def demo_moe_sft(*, seed: int = 0, steps: int = 700) -> Trainer.Config:
    """`demo_sft` with 8 experts of which each token uses 2: as many parameters in use, 0.9 M more beside them.

    Hardware: two CPU cores, about 1 GB of memory. Expected: the loss of `demo_sft` (1.47 and 1.51 after 60 steps).
    """
    cfg = demo_sft(seed=seed, steps=steps)
    vocab_size = PhraseTokenizer.Config(phrases=PHRASES).vocab_size
    cfg.model = tiny_moe(vocab_size=vocab_size, dim=96, num_heads=3, num_kv_heads=1, expert_hidden=128)
    replace(cfg, MoE.Config, lambda moe: moe.set(route_padding=True))  # setting of its published figures
    return cfg


@experiment
def demo_teacher(*, seed: int = 0, steps: int = 1000) -> Trainer.Config:
    """A 1.4 M-parameter decoder learns the demo's tasks by supervision, long enough to teach the smaller one."""
    cfg = demo_sft(seed=seed, steps=steps)
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    model = tiny(vocab_size=tokenizer.vocab_size, dim=160, num_heads=5, num_kv_heads=1, hidden=512)
    schedule = WarmupCosine.Config(peak_lr=3e-3, warmup_steps=50, total_steps=steps, end_lr=1e-4)
    return cfg.set(model=model, early_stopping=None, learner=cfg.learner.clone(schedule=schedule))


@experiment
def demo_distilled_sft(*, seed: int = 0, steps: int = 300) -> Trainer.Config:
    """The demo's decoder learns from the distributions of `axl train demo_teacher` at the tokens of supervised data."""
    cfg, model = demo_sft(seed=seed, steps=steps), demo_teacher(seed=seed).model
    teacher = Teacher.Config(model=model, start_from=StartFrom.Config(path="runs/demo_teacher"))
    return cfg.set(loss=DistillationLoss.Config(teacher=teacher, top_k=16), early_stopping=None)


@experiment
def demo_distillation(*, seed: int = 0, steps: int = 60) -> RLExperiment.Config:
    """The demo's decoder, supervised, draws answers and learns each of their tokens from `axl train demo_teacher`."""
    cfg = demo(seed=seed, steps=steps)
    model = demo_teacher(seed=seed).model
    cfg.trainer.reference = Teacher.Config(model=model, start_from=StartFrom.Config(path="runs/demo_teacher"))
    schedule = WarmupLinear.Config(peak_lr=1e-3, warmup_steps=5, total_steps=steps, end_lr=1e-4)
    cfg.learner = cfg.learner.clone(schedule=schedule, clip_norm=1.0)
    importance = TruncatedImportance.Config(cap=2.0)  # rollouts are one update old
    return cfg.set(objective=distillation().set(old_policy="current", importance=importance), samples_per_prompt=8)


@experiment
def demo_expert_iteration(*, seed: int = 0, steps: int = 12) -> RLExperiment.Config:
    """The demo's decoder draws answers, is fine-tuned on those that the verifier accepts, and draws again."""
    cfg = demo(seed=seed, steps=max(steps, 21))
    updates = Updates.Config(minibatches=4, epochs=2)
    cfg.trainer.updates = updates
    schedule = WarmupLinear.Config(peak_lr=3e-4, warmup_steps=5, total_steps=steps * updates.count, end_lr=1e-4)
    cfg.learner = cfg.learner.clone(schedule=schedule)
    return cfg.set(
        objective=rejection_sampling(),
        num_steps=steps,
        prompts_per_step=64,
        samples_per_prompt=8,
        groups_per_lease=16,
        staleness=0,
    )


@experiment
def demo_ppo(*, seed: int = 0, steps: int = 320) -> RLExperiment.Config:
    """The demo by PPO: a critic of the policy's shape says what each token was worth."""
    cfg = demo(seed=seed, steps=steps)
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3), clip_norm=1.0)
    importance = TruncatedImportance.Config(cap=2.0)  # rollouts are one update old
    return cfg.set(objective=ppo(Critic.Config(learner=learner), lam=1.0).set(importance=importance))
