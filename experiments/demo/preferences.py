"""Preferences between answers to the demo's problems: a reward model, and policies aligned by DPO, KTO and others.

The policies start from `axl train demo_sft`. Measured: 82 % of the pairs of held-out questions in the right order by
the reward model (docs/how-to/heads.md), 94 % by the policy of DPO (docs/how-to/align.md).
"""

from typing import Any

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.input import FirstFit, LabelledInput, PreferenceInput, UnpairedInput
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import AdamW, Learner, WarmupCosine
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.alignment.kto import KTO
from axlearn_like.training.alignment.preferences import DPO, IPO, ORPO, SimPO
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.head_losses import PairwiseLoss
from axlearn_like.training.trainer import Trainer
from experiments.demo.config import demo_sft
from experiments.demo.data import PHRASES, task_mixture
from experiments.registry import experiment
from rl.tasks.preferences import JudgedSource, PreferenceSource

SFT = "runs/demo_sft"  # run directory of `axl train demo_sft`


@experiment
def reward_model(*, steps: int = 600, seed: int = 0) -> Trainer.Config:
    """A 0.4 M-parameter reward model learns to tell right answers from wrong ones, in minutes on two cores."""
    cfg = _aligned(PairwiseLoss.Config(), PreferenceSource.Config, LabelledInput.Config, steps, seed, scale=2)
    learner = Learner.Config(
        optimizer=AdamW.Config(b2=0.98, weight_decay=0.1),
        schedule=WarmupCosine.Config(peak_lr=2e-3, warmup_steps=50, total_steps=steps, end_lr=1e-4),
    )
    cfg.evaluators[0].set(every=100)
    return cfg.set(model=cfg.model.clone(head=ScoreHead.Config()), start_from=None, learner=learner)


@experiment
def demo_dpo(*, steps: int = 300, seed: int = 0) -> Trainer.Config:
    """The demo's decoder, supervised before, learns by DPO to prefer right answers to wrong ones."""
    return _aligned(DPO.Config(beta=0.1), PreferenceSource.Config, PreferenceInput.Config, steps, seed)


@experiment
def demo_kto(*, steps: int = 300, seed: int = 0) -> Trainer.Config:
    """The demo's decoder, supervised before, learns by KTO from answers that are right or wrong."""
    return _aligned(KTO.Config(beta=0.1), JudgedSource.Config, UnpairedInput.Config, steps, seed)


@experiment
def demo_ipo(*, steps: int = 300, seed: int = 0) -> Trainer.Config:
    """The demo's decoder, supervised before, learns by IPO to prefer right answers to wrong ones by a given margin."""
    return _aligned(IPO.Config(beta=0.1), PreferenceSource.Config, PreferenceInput.Config, steps, seed)


@experiment
def demo_orpo(*, steps: int = 300, seed: int = 0) -> Trainer.Config:
    """The demo's decoder, supervised before, learns right answers and, by their odds, to prefer them; no reference."""
    return _aligned(ORPO.Config(weight=0.1), PreferenceSource.Config, PreferenceInput.Config, steps, seed)


@experiment
def demo_simpo(*, steps: int = 300, seed: int = 0) -> Trainer.Config:
    """The demo's decoder, supervised before, learns by SimPO to prefer right answers to wrong ones; no reference."""
    return _aligned(SimPO.Config(beta=2.0, gamma=1.0), PreferenceSource.Config, PreferenceInput.Config, steps, seed)


def _aligned(loss: Any, source: Any, rows: Any, steps: int, seed: int, scale: int = 1) -> Trainer.Config:
    """Compose a trainer of the demo's policy with this loss, on these examples of its problems.

    `scale`: factor of the rows of a batch, and of what is evaluated.
    """
    examples = source(
        mixture=task_mixture(seed), tokenizer=PhraseTokenizer.Config(phrases=PHRASES), num_examples=1_000_000
    )
    batches = rows(
        source=examples, seq_len=128, batch_size=16 * scale, rows=FirstFit.Config(window=128 * scale), seed=seed
    )
    unseen = batches.clone(source=examples.clone(heldout=True, num_examples=256 * scale))
    return Trainer.Config(
        model=demo_sft(seed=seed).model,
        start_from=StartFrom.Config(path=SFT),
        input=batches,
        loss=loss,
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.98),
            schedule=WarmupCosine.Config(peak_lr=1e-4, warmup_steps=20, total_steps=steps, end_lr=1e-5),
        ),
        checkpoint=Checkpointer.Config(save_every=100, keep=1),
        mesh={"data": -1},
        num_steps=steps,
        evaluators=(LossEvaluator.Config(input=unseen, batches=8 * scale, every=50),),
        seed=seed,
    )
