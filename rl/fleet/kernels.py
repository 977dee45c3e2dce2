"""The attention kernels that a policy gets where RL computes it: updates, scoring and decoding."""

from collections.abc import Iterator
from typing import Any

from axlearn_like.kernels.attention.dispatch import AttentionParams, explain
from axlearn_like.kernels.attention.shared_prefix import PrefixRows, SharedPrefix, SharedPrefixes, SharedPrefixTrees
from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.layers.base import inexact_layers
from axlearn_like.layers.contexts.latents import expands_latents
from axlearn_like.layers.contexts.paged_decode import SPLIT
from axlearn_like.layers.contexts.sharded_rows import shared_length
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights


def policy_kernels(cfg: Any, attention: AttentionParams, platform: str, dtype: Any) -> Iterator[str]:
    """Return what one kind of attention of a policy gets in the contexts of RL."""
    prefix = cfg.max_prompt_tokens - 1
    rows: PrefixRows = SharedPrefix(prefix, cfg.samples_per_prompt, cfg.max_new_tokens)
    if cfg.trainer.packing is not None:
        packing = cfg.trainer.packing.build(
            max_prompt_tokens=cfg.max_prompt_tokens, max_new_tokens=cfg.max_new_tokens, chunks=cfg.trainer.chunks
        )
        kind = SharedPrefixTrees if packing.tree else SharedPrefixes
        rows = kind(packing.prompts, packing.lengths[0])
    sharing = max(1, cfg.trainer.mesh.get("sequence", 1))  # devices, where the config says how many
    padded = shared_length(rows.length, sharing, platform, cfg.trainer.chunks)
    group = explain(attention, platform=platform, dtype=dtype, length=padded, cp_size=sharing, shared_prefix=rows)
    stored = "" if group.kernel.shared_prefixes else "; all scores are stored"
    over = f" over {sharing} devices" if sharing > 1 else ""
    yield f"prompts with completions ({rows.prefix} + {rows.length - rows.prefix} tokens{over}): {group}{stored}"
    length = cfg.max_prompt_tokens + cfg.max_new_tokens
    if numerics_of(cfg.policy) == "exact":
        if found := inexact_layers(cfg.policy, platform):
            yield f'numerics="exact" is refused: {"; ".join(found)}'
            return
        if platform == "tpu":
            yield f"scoring ({length} tokens) and decoding: paged attention in fixed blocks"
            yield "products, norms and head of both: kernels of fixed tiles"
            return
        yield "products, norms and head of scoring and decoding: by XLA, the order fixed by the layers"
    scoring = explain(attention, platform=platform, dtype=dtype, length=length)
    stored = "; all scores are stored" if type(scoring.kernel).__name__ == "Xla" else ""
    yield f"scoring ({length} tokens): {scoring}{stored}"
    in_rank_space = isinstance(cfg.engine.weights, FactorisedWeights.Config) and cfg.engine.weights.rank_cache
    rank_space = "rank-space attention (an engine refuses it where its pages are no smaller; see `axl aot`)"
    if platform == "tpu":
        yield f"decoding: {rank_space if in_rank_space else 'ragged paged attention'}"
        return
    expands = in_rank_space or expands_latents(attention)
    if cfg.engine.decodes_from(platform, expands=expands) == "pages":
        yield f"decoding: XLA, from the pages, {SPLIT} keys of a row at a time"
    else:
        yield "decoding: XLA, from windows: copies of the pages, a second cache"
