"""Changes that fit every experiment: functions that edit a config in place, whatever the experiment is.

On the command line, `axl train demo_sft --apply low_rank`; a modifier of one's own is a function in any file,
`--apply my_file.py:function`. What they cost in lines, and which others were measured: docs/concepts/modularity.md.
"""

from typing import Any

from axlearn_like.config import ConfigBase, config_items, replace, set_path
from axlearn_like.layers.attention.rope import NoPositions, Rope
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import Embedding, Float32Embedding, Float32Head, Head
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights
from axlearn_like.layers.wrappers.quantised import QuantisedProducts, QuantisedWeights, StoredWeights
from axlearn_like.learner import Learner, ParameterGroup
from rl.controller.controller import Controller
from rl.controller.prompt_pool import PromptPool
from rl.experiment import RLExperiment
from rl.objective import Objective, ReferenceKL, presets
from rl.parameter_server.server import ParameterServer
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.engine import RolloutEngine
from rl.rollout.speculation.speculator import Speculation
from rl.tasks.supervised import SupervisedSource
from rl.training.critic import Critic, SharedCritic
from rl.training.trainer import PolicyTrainer


def no_positions(cfg: ConfigBase[Any]) -> None:
    """Attention without rotary positions."""
    replace(cfg, Rope.Config, lambda rope: NoPositions.Config())


def experts(cfg: ConfigBase[Any]) -> None:
    """Four experts, of which a token uses two, in the place of every feed-forward network."""

    def mixture(block: Block.Config) -> Block.Config:
        experts = Experts.Config(hidden=getattr(block.feed_forward, "hidden", 64))
        return block.set(feed_forward=MoE.Config(num_experts=4, router=SoftmaxRouter.Config(top_k=2), experts=experts))

    replace(cfg, Block.Config, mixture)


def low_rank(cfg: ConfigBase[Any]) -> None:
    """LoRA on all matrices of all blocks; nothing else is trained."""
    adapt = lambda inner: LoRA.Config(inner=inner, rank=4)  # noqa: E731
    replace(cfg, Block.Config, lambda b: b.set(attention=adapt(b.attention), feed_forward=adapt(b.feed_forward)))
    groups = (ParameterGroup.Config(match="*/lora/*"), ParameterGroup.Config(frozen=True))
    replace(cfg, Learner.Config, lambda learner: learner.set(groups=groups))


def int8(cfg: ConfigBase[Any]) -> None:
    """All matrices of all blocks rounded to eight bits while they are trained."""
    rounded = lambda inner: QuantisedWeights.Config(inner=inner)  # noqa: E731
    replace(cfg, Block.Config, lambda b: b.set(attention=rounded(b.attention), feed_forward=rounded(b.feed_forward)))


def int4(cfg: ConfigBase[Any]) -> None:
    """All matrices of all blocks rounded to four bits while they are trained, 32 inputs to a scale."""
    rounded = lambda inner: QuantisedWeights.Config(inner=inner, numbers="int4", group=32)  # noqa: E731
    replace(cfg, Block.Config, lambda b: b.set(attention=rounded(b.attention), feed_forward=rounded(b.feed_forward)))


def int8_products(cfg: ConfigBase[Any]) -> None:
    """Weights and activations of all blocks rounded to int8 before each product, in training and rollouts."""
    rounded = lambda inner: QuantisedProducts.Config(inner=inner)  # noqa: E731
    replace(cfg, Block.Config, lambda b: b.set(attention=rounded(b.attention), feed_forward=rounded(b.feed_forward)))


def fp8_products(cfg: ConfigBase[Any]) -> None:
    """Weights and activations of all blocks rounded to fp8 (e4m3) before each product, in training and rollouts."""
    rounded = lambda inner: QuantisedProducts.Config(inner=inner, numbers="fp8")  # noqa: E731
    replace(cfg, Block.Config, lambda b: b.set(attention=rounded(b.attention), feed_forward=rounded(b.feed_forward)))


def int8_rollouts(cfg: ConfigBase[Any]) -> None:
    """Engines hold all matrices, embedding and head as int8; the objective needs an importance correction."""
    weights = StoredWeights.Config(vocabulary="int8")
    replace(cfg, RolloutEngine.Config, lambda engine: engine.set(weights=weights.clone()))


def int4_rollouts(cfg: ConfigBase[Any]) -> None:
    """Engines hold all blocks as int4, 32 inputs to a scale, embedding and head as int8; needs a correction."""
    weights = StoredWeights.Config(numbers="int4", group=32, vocabulary="int8")
    replace(cfg, RolloutEngine.Config, lambda engine: engine.set(weights=weights.clone()))


def svd_rollouts(cfg: ConfigBase[Any]) -> None:
    """Engines hold each matrix of all blocks as factors with three quarters of its numbers; needs a correction."""
    weights = FactorisedWeights.Config(share=0.75)
    replace(cfg, RolloutEngine.Config, lambda engine: engine.set(weights=weights.clone()))


def whitened_rollouts(cfg: ConfigBase[Any]) -> None:
    """The same, with errors weighed by the activations of 64 solved training problems."""
    svd_rollouts(cfg)
    if isinstance(cfg, RLExperiment.Config):
        tasks: Any = cfg.tasks
        solved = SupervisedSource.Config(mixture=tasks.clone(), num_examples=64, tokenizer=cfg.tokenizer.clone())
        replace(cfg, FactorisedWeights.Config, lambda weights: weights.set(calibration=solved))


def rank_cache(cfg: ConfigBase[Any]) -> None:
    """Engines that hold factors, as after --apply whitened_rollouts, cache keys and values in their rank space."""
    replace(cfg, FactorisedWeights.Config, lambda weights: weights.set(rank_cache=True))


def int8_kv_cache(cfg: ConfigBase[Any]) -> None:
    """Engines cache keys and values as int8; the objective needs an importance correction."""
    # Pages of 64 tokens, whose scales fill registers of TPUs.
    replace(cfg, RolloutEngine.Config, lambda engine: engine.set(kv_cache_dtype="int8", page_size=64))


def speculation(cfg: ConfigBase[Any]) -> None:
    """Engines verify drafted tokens, from sibling samples and the own text; no result changes."""
    replace(cfg, RolloutEngine.Config, lambda engine: engine.set(speculation=Speculation.Config()))


def cascade(cfg: ConfigBase[Any]) -> None:
    """Engines read the keys that the samples of a prompt share once for up to 16 of them; no bit changes on a CPU."""
    samples = getattr(cfg, "samples_per_prompt", 8)
    tile = next((size for size in (16, 8, 4, 2) if samples % size == 0), 8)
    replace(cfg, RolloutEngine.Config, lambda engine: engine.set(cascade=tile))


def shared_critic(cfg: ConfigBase[Any]) -> None:
    """PPO's critic is a value head on the policy's hidden states, learned in its update, in place of a second model."""
    replace(cfg, Critic.Config, lambda c: SharedCritic.Config(learner=c.learner.clone(), value_clip=c.value_clip))


def prompt_pool(cfg: ConfigBase[Any]) -> None:
    """Problems that are solved about half of the time are drawn again; what is always or never solved rests."""
    replace(cfg, Controller.Config, lambda controller: controller.set(pool=PromptPool.Config()))


def dynamic_sampling(cfg: ConfigBase[Any]) -> None:
    """Groups whose rewards are all equal are replaced, up to twice as many groups in all."""
    replace(cfg, Controller.Config, lambda controller: controller.set(oversample=2.0))


def luffy(cfg: ConfigBase[Any]) -> None:
    """LUFFY: one of each prompt's samples is the task's own answer, in the group's mean and shaped in the loss."""

    def mixed(old: Objective.Config) -> Objective.Config:
        kept = {"importance": old.importance, "old_policy": old.old_policy, "zero_variance": old.zero_variance}
        return presets.luffy(max_length=getattr(cfg, "max_new_tokens", 1)).set(**kept)

    replace(cfg, Objective.Config, mixed)
    set_path(cfg, "demonstrations", GroupDemonstrations.Config())


def exact_kl(cfg: ConfigBase[Any]) -> None:
    """The objective's KL to a reference or teacher is that of whole distributions, in tiles of words."""
    replace(cfg, ReferenceKL.Config, lambda kl: kl.set(estimator="exact", ratio="none"))
    replace(cfg, PolicyTrainer.Config, lambda trainer: trainer.set(head_tile=trainer.head_tile or 2048))


def float32_head(cfg: ConfigBase[Any]) -> None:
    """Logits of float32 factors in a policy of bfloat16: the head's matrix is rounded in neither trainer nor engine."""

    def unrounded(decoder: Decoder.Config) -> Decoder.Config:
        name, old = ("embedding", decoder.embedding) if decoder.head is None else ("head", decoder.head)
        new = Float32Embedding.Config if name == "embedding" else Float32Head.Config
        plain = type(old) in (Embedding.Config, Head.Config, new)
        decoder.require(name, plain, "Embedding.Config or Head.Config, of which there is a form of float32 factors")
        return decoder.set(**{name: new(**dict(config_items(old)))})

    replace(cfg, Decoder.Config, unrounded)


def scale_rl(cfg: ConfigBase[Any]) -> None:
    """ScaleRL: its loss, rollouts up to 8 versions old, weights swapped in flight, no row again once it is solved."""
    kept = PromptPool.Config(explore=1.0, retire_at=0.9, rest=10**9, quarantine_after=10**9, size=2**16)
    replace(cfg, Objective.Config, lambda _: presets.scale_rl())
    replace(cfg, Controller.Config, lambda controller: controller.set(weights="in_flight", pool=kept))
    replace(cfg, ParameterServer.Config, lambda server: server.set(keep=max(server.keep, 10)))
    set_path(cfg, "staleness", 8)
