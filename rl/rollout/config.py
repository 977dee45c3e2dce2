"""Sizes and defaults of a rollout engine."""

import math
from typing import Literal

from axlearn_like.config import REQUIRED, ConfigBase, MeshRules
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.contexts.int8_cache import TAG
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights
from axlearn_like.layers.wrappers.quantised import StoredWeights
from rl.protocol.experiment import ExperimentFields
from rl.rollout.kv_cache.kvcomm.anchors import TAG as KVCOMM
from rl.rollout.kv_cache.kvcomm.anchors import KVComm
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.model_runner.expert_slots import ExpertSlots
from rl.rollout.sampling import RecordedSampler, Sampler
from rl.rollout.speculation.speculator import Speculation


def decodes_in_windows(platform: str, *, expands: bool) -> bool:
    """Return True if an engine on cpu or gpu decodes from windows unless its config says otherwise."""
    return platform == "cpu" or expands


def engine_mesh(kv_heads: int, experts: int, devices: int) -> dict[str, int] | None:
    """Return the mesh of an engine of so many devices; None: key/value heads and experts do not divide over them."""
    tensor = math.gcd(devices, kv_heads)
    expert = devices // tensor
    if expert > 1 and (not experts or experts % expert):
        return None
    return {axis: size for axis, size in {"tensor": tensor, "expert": expert}.items() if size > 1}


class EngineConfig[T](ConfigBase[T], renamed={"max_prompt": "max_prompt_tokens", "max_new": "max_new_tokens"}):
    """Fields of `RolloutEngine.Config`. They stand here for the files that the engine is made of."""

    model: ConfigBase = REQUIRED
    stop_tokens: tuple[int, ...] = REQUIRED  # token ids that end a completion; empty: every completion has full length
    max_prompt_tokens: int = REQUIRED  # limit of a prompt's tokens
    max_new_tokens: int = REQUIRED  # limit of a completion's tokens, the stop token included
    max_num_seqs: int = 64  # sequences that draw tokens at the same time
    page_size: int = 16  # tokens of a page; divides 64
    pages: int | None = None  # number of pages; None: enough for `max_num_seqs` sequences of full length
    steps_per_dispatch: int = 32  # tokens that each sequence draws before the host looks at them
    prefill_tokens: int = 512  # tokens in all rows of a prefill dispatch
    prefills_per_iteration: int = 4  # prefill dispatches of an iteration while other sequences draw
    enable_prefix_caching: bool = True  # cache prompts for requests that begin alike, until the weights change
    keep_completions: bool = True  # cache completions too, for conversations that continue
    max_queue: int | None = None  # limit of unfinished requests; further ones are refused
    mesh: dict[str, int] = {}  # axis sizes: {"tensor": n}, with MoE {"tensor": n, "expert": m}; {}: one device
    mesh_rules: MeshRules = ()  # edits by the devices of a worker (axlearn_like/config/mesh_rules.py)
    sampler: Sampler.Config = Sampler.Config()
    cascade: int | None = None  # rows that read the keys they share once: best the samples of a group; None: not shared
    speculation: Speculation.Config | None = None  # drafted tokens, verified by their own draws; None: no drafts
    kernel: PagedKernel.Config = PagedKernel.Config()  # attention kernel on TPUs
    # Source of keys and values for decoding without that kernel: "pages", a part at a time, or "windows", a second
    # cache of copies for some steps. None: windows on CPUs, which alone score as they draw to the bit, and if keys are
    # made from latents; else pages.
    decode_from: Literal["pages", "windows"] | None = None
    # Storage of weights as fewer bits, or as factors; None: unchanged, in the type of the model's activations.
    weights: StoredWeights.Config | FactorisedWeights.Config | None = None
    # Replicas of popular experts, chosen again with each version (docs/concepts/expert-replicas.md); None: no replicas.
    replicas: ExpertSlots.Config | None = None
    kv_cache_dtype: Literal["int8"] | None = None  # dtype of pages (contexts/int8_cache.py); None: the activations'
    # Host memory and disk for pages that the device has no room for (docs/how-to/kv-tiers.md); None: they are dropped.
    tiers: HostTiers.Config | None = None
    # Keys and values of texts behind other contexts, approximately (docs/how-to/agents.md); None: computed in each
    kvcomm: KVComm.Config | None = None

    @property
    def longest(self) -> int:
        """Tokens that a sequence can have."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return 1 + self.max_num_seqs * -(-self.longest // self.page_size) if self.pages is None else self.pages

    def decodes_from(self, platform: str, *, expands: bool) -> Literal["pages", "windows"]:
        """Return what decoding reads on cpu, gpu or tpu, where the kernel reads pages.

        `expands`: keys and values are made from latents in the pages, which from pages is done in every step.
        """
        if platform == "tpu" or self.kernel.interpret:
            return "pages"
        return self.decode_from or ("windows" if decodes_in_windows(platform, expands=expands) else "pages")

    @property
    def tags(self) -> tuple[str, ...]:
        """Approximations of all that the engine draws with, which make it another policy than the trainer's."""
        of_weights = () if self.weights is None else self.weights.tags
        of_pages = () if self.tiers is None else self.tiers.tags
        return (*of_weights, *(() if self.kv_cache_dtype is None else (TAG,)), *of_pages)

    @property
    def possible_tags(self) -> tuple[str, ...]:
        """Approximations of some of what the engine draws with, all of it included."""
        return self.tags if self.kvcomm is None else (*self.tags, KVCOMM)

    def requires(self, experiment: ExperimentFields) -> None:
        """Refuse an objective that takes rollouts of an approximated policy for the trainer's own."""
        objective, tags = experiment.objective, self.possible_tags
        expected = f"TruncatedImportance.Config, as rollouts are of {' and '.join(tags)}"
        objective.require("importance", objective.corrects or not tags, expected)

    def check_fields(self) -> None:
        """Refuse sizes that no engine can have."""
        self.require_least(
            1, "max_prompt_tokens", "max_new_tokens", "max_num_seqs", "steps_per_dispatch", "prefills_per_iteration"
        )
        self.require_least(1, "max_queue")
        recorded = isinstance(self.sampler, RecordedSampler.Config)
        self.require("speculation", not recorded or self.speculation is None, "None with a RecordedSampler")
        self.require_least(2, "cascade")
        self.require("page_size", self.page_size >= 1 and 64 % self.page_size == 0, "a divisor of 64")
        self.require_least(2, "pages")  # page 0 never holds a sequence
        self.require_least(64, "prefill_tokens")
        cached = self.tiers is None or (self.enable_prefix_caching and not (self.kv_cache_dtype and self.tiers.tags))
        self.require("tiers", cached, "None without enable_prefix_caching; with an int8 cache a codec without loss")
        if self.kvcomm is not None:
            expected = "None with an int8 cache, with tiers, or on several devices"
            alone = all(size == 1 for size in self.mesh.values())
            self.require("kvcomm", not self.kv_cache_dtype and self.tiers is None and alone, expected)
        others = [axis for axis, size in self.mesh.items() if axis not in ("tensor", "expert") and size != 1]
        expected = "tensor and expert alone, as all devices of an engine have all rows: for more, run more workers"
        self.require("mesh", not others, expected)
