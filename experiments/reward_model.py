"""A reward model: the demo's decoder with a score head, trained on right and wrong answers to the demo's problems.

Measured: 82 % of the pairs of held-out questions in the right order (docs/how-to/heads.md).
"""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.input import FirstFit, LabelledInput
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import AdamW, Learner, WarmupCosine
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.head_losses import PairwiseLoss
from axlearn_like.training.trainer import Trainer
from experiments.reasoning_gym import PHRASES, demo_sft, task_mixture
from experiments.registry import experiment
from rl.tasks.preferences import PreferenceSource


@experiment
def reward_model(*, steps: int = 600, seed: int = 0) -> Trainer.Config:
    """A 0.4 M-parameter reward model learns to tell right answers from wrong ones, in minutes on two cores."""
    pairs = PreferenceSource.Config(
        mixture=task_mixture(seed), tokenizer=PhraseTokenizer.Config(phrases=PHRASES), num_examples=1_000_000
    )
    rows = LabelledInput.Config(source=pairs, seq_len=128, batch_size=32, rows=FirstFit.Config(window=256), seed=seed)
    unseen = rows.clone(source=pairs.clone(heldout=True, num_examples=512))
    return Trainer.Config(
        model=demo_sft(seed=seed).model.clone(head=ScoreHead.Config()),
        input=rows,
        loss=PairwiseLoss.Config(),
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.98, weight_decay=0.1),
            schedule=WarmupCosine.Config(peak_lr=2e-3, warmup_steps=50, total_steps=steps, end_lr=1e-4),
        ),
        checkpoint=Checkpointer.Config(save_every=100, keep=1),
        mesh={"data": -1},
        num_steps=steps,
        evaluators=(LossEvaluator.Config(input=unseen, batches=16),),
        seed=seed,
    )
