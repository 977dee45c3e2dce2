"""A mixture of experts trained on a laptop: the demo's supervised part with other feed-forward layers."""

from axlearn_like.config import replace
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.trainer import Trainer
from experiments.reasoning_gym import PHRASES, demo_sft
from experiments.registry import experiment
from models.moe import tiny_moe


@experiment
def demo_moe_sft(*, seed: int = 0, steps: int = 700) -> Trainer.Config:
    """`demo_sft` with 8 experts of which each token uses 2: as many parameters in use, 0.9 M more beside them.

    Hardware: two CPU cores, about 1 GB of memory. Expected: the loss of `demo_sft` (1.47 and 1.51 after 60 steps).
    """
    cfg = demo_sft(seed=seed, steps=steps)
    vocab_size = PhraseTokenizer.Config(phrases=PHRASES).vocab_size
    cfg.model = tiny_moe(vocab_size=vocab_size, dim=96, num_heads=3, num_kv_heads=1, expert_hidden=128)
    replace(cfg, MoE.Config, lambda moe: moe.set(route_padding=True))  # as its figures were measured
    return cfg
