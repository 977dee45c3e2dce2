"""The job of the recovery benchmark: a policy so tiny that restarts dominate the measured time.

Two workers, two leases an update, 16 rollouts an update, a checkpoint every five updates. The last step is never
reached: the benchmark ends the run by SIGTERM after the last kill.
"""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.experiment import RLExperiment
from rl.objective.presets import grpo
from rl.rollout.engine import RolloutEngine
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.training.trainer import PolicyTrainer
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.benches.recovery.reward import ascii_share, slow_ascii_share

SAVE_EVERY = 5


def recovery_job(staleness: int = 0) -> RLExperiment.Config:
    """Return the config of the run that is disturbed."""
    tokenizer = ByteTokenizer.Config()
    attention = Attention.Config(num_heads=4, num_kv_heads=2, head_dim=8)
    return RLExperiment.Config(
        policy=Decoder.Config(
            vocab_size=tokenizer.vocab_size,
            dim=32,
            num_layers=1,
            block=Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=64)),
        ),
        tokenizer=tokenizer,
        tasks=TaskMixture.Config(
            families=(TaskFamily.Config(name="spell_backward", params={"min_word_len": 3, "max_word_len": 5}),),
        ),
        max_prompt_tokens=80,
        max_new_tokens=6,
        stop_at_eos=False,
        num_steps=100_000,
        prompts_per_step=4,
        samples_per_prompt=4,
        groups_per_lease=2,
        staleness=staleness,
        objective=grpo().set(old_policy="current", zero_variance="drop"),
        learner=Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3), clip_norm=1.0),
        trainer=PolicyTrainer.Config(
            checkpoint=Checkpointer.Config(save_every=SAVE_EVERY, keep=3), row_multiple=4, logprob_diff_every=1
        ),
        engine=RolloutEngine.Config(max_num_seqs=8),
        verifier=Verifier.Config(scorer=FunctionScorer.Config(function=slow_ascii_share), processes=1),
        evaluation=None,
        workers=2,
    )


def undisturbed(num_steps: int, staleness: int = 0) -> RLExperiment.Config:
    """Return the config of the same updates in one process: no delay in the reward, one save at the end."""
    cfg = recovery_job(staleness).set(num_steps=num_steps)
    cfg.verifier = InlineVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share))
    cfg.trainer.checkpoint.set(save_every=10 * num_steps + 10)
    return cfg
