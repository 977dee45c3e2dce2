"""Validation of policies when an engine is built, and of requests when they are submitted."""

import math
from collections.abc import Sequence as Items
from typing import Any

import jax
import numpy as np

from axlearn_like.config import path_of
from axlearn_like.kernels.exact.parts import require_tensor
from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.kernels.paged_attention.rows import check_rules, padded
from axlearn_like.layers.base import refuse_inexact
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights
from axlearn_like.layers.wrappers.low_rank.rank_space import unknown_rotation
from axlearn_like.training.program import check_length
from mesh import UserError
from mesh.rules import axis_sizes
from rl.protocol.segments import TokenSegment
from rl.rollout.agent_loops.commands import single_turn
from rl.rollout.config import EngineConfig
from rl.rollout.decoding.stop_strings import check_strings
from rl.rollout.kv_cache.kvcomm.arrays import frequencies
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler, recorded_candidates


def check_policy(cfg: EngineConfig[Any], model: Any, platform: str, *, adapters: bool) -> None:
    """Refuse a policy that an engine cannot run on a platform, or not with the exactness that it promises.

    Args:
        model: abstract, as the engine computes with it.
        platform: platform of the devices: cpu, gpu or tpu.
        adapters: LoRA adapters are served, another one for every row.

    Raises:
        UserError: names the field.
    """
    kernel = platform == "tpu" or cfg.kernel.interpret
    windows = cfg.decode_from == "windows"
    cfg.require("decode_from", not (kernel and windows), "None on TPUs, where a kernel reads the pages")
    most, words = recorded_candidates(cfg.sampler), model.vocab_size
    cfg.sampler.require("most", most is None or most <= words, f"at most {words}, the words of the policy")
    if numerics_of(cfg.model) == "exact":
        _check_numerics(cfg, "tpu" if kernel else platform, adapters=adapters)
    cfg.require("weights", not adapters or cfg.weights is None, "None with adapters, which are added to float matrices")
    if cfg.replicas is not None:
        plain = cfg.weights is None and not adapters and numerics_of(cfg.model) != "exact"
        cfg.require("replicas", plain, "None with weights in another form, with adapters, and with exact numerics")
    # Adapters differ by row, and are gathered for all rows of a dispatch, not for those of one window.
    if (kernel or adapters) and model.window_shape != model.cache_shape:
        what = "the kernel for TPUs" if kernel else "an engine with adapters"
        raise UserError(f'LatentAttention.decode="absorbed": {what} caches the keys of all heads; expected "expanded"')
    if cfg.kv_cache_dtype is not None:
        cfg.require("kv_cache_dtype", model.latent_width is None, f"None {_latents(cfg)}")
        cfg.require("cascade", not kernel or cfg.cascade is None, "None on TPUs with kv_cache_dtype='int8'")
        # A row of registers has 128 lanes: the scales of shorter pages would take as much memory.
        cfg.require("page_size", not kernel or cfg.page_size == 64, "64 on TPUs with kv_cache_dtype='int8'")
    if cfg.kvcomm is not None:
        _check_kvcomm(cfg, model, kernel=kernel)
    if cfg.speculation is not None and platform == "cpu":
        _check_exact(model, "speculation", "drafts")
    if cfg.cascade is not None:
        _check_cascade(cfg, model, platform, adapters=adapters)
    check_length(cfg.model, cfg.longest, "RolloutEngine's max_prompt_tokens + max_new_tokens", path_of(cfg.model))
    if kernel:
        for block, _ in model.kinds():
            check_rules(block.attention.rules, block.attention.sinks_kq is not None)
            if isinstance(cfg.weights, FactorisedWeights.Config) and cfg.weights.rank_cache:
                _check_rank_cache(cfg.weights, block.attention)


def _check_kvcomm(cfg: EngineConfig[Any], model: Any, *, kernel: bool) -> None:
    """Refuse to move keys that have more than a rotation in them, and pages of another form."""
    cfg.require("kvcomm", not kernel, "None on TPUs, whose kernel has pages of its own form")
    ranks = isinstance(cfg.weights, FactorisedWeights.Config) and cfg.weights.rank_cache
    cfg.require("kvcomm", not ranks, "None with weights.rank_cache, where keys are made at their positions")
    same = frequencies(model) is not None
    cfg.require("kvcomm", same, "None for a policy whose layers rotate keys by other angles, or not by RoPE's alone")
    layout = getattr(model, "routing_layout", None)
    cfg.require("kvcomm", layout is None or not layout.recorded, "None for a policy whose routing is recorded")


def _check_rank_cache(weights: FactorisedWeights.Config, attention: Any) -> None:
    """Refuse a cache in rank space that the kernel for TPUs does not have, or that is no smaller in its pages."""
    from axlearn_like.kernels.low_rank.factors import numbers_of_page  # Pallas: slow to import

    unknown = unknown_rotation(attention.rope)
    weights.require("rank_cache", unknown is None, f"False on TPUs: their kernel has no rotation of {unknown}")
    heads, width = attention.cache_shape
    own, held = 2 * heads * padded(width), numbers_of_page(max(attention.cache_ranks))
    own //= math.prod(axis_sizes("heads").values())
    wanted = f"False: pages of the kernel for TPUs have {held} numbers of a token, and {own} of keys and values"
    weights.require("rank_cache", held < own, wanted)


def _latents(cfg: EngineConfig[Any]) -> str:
    """Return what makes the pages hold latents."""
    of_rank = isinstance(cfg.weights, FactorisedWeights.Config) and cfg.weights.rank_cache
    return "with weights.rank_cache" if of_rank else "for a policy with latent attention"


def _check_numerics(cfg: EngineConfig[Any], platform: str, *, adapters: bool) -> None:
    """Refuse what would make the bits of a policy with exact numerics others than those of its scoring."""
    refuse_inexact(cfg.model, platform)
    exact = 'with policy.numerics="exact"'
    for field in ("weights", "kv_cache_dtype", "kvcomm"):
        cfg.require(field, getattr(cfg, field) is None, f"None {exact}, for the trainer scores with other numbers")
    fixed = platform != "cpu" or cfg.decodes_from(platform, expands=False) == "windows"
    cfg.require("decode_from", fixed, f"None {exact}: pages are summed in another order than scores on CPUs")
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    tensor = sizes.pop("tensor", 1)
    others = math.prod(sizes.values())
    if platform == "tpu":
        cfg.require("mesh", others == 1, f"devices on the axis tensor alone {exact}")
        require_tensor(cfg, tensor)
        cfg.require("cascade", cfg.cascade is None, f"None {exact} on TPUs, where it changes the order of sums")
        if adapters:
            raise UserError(f"RolloutEngine: expected no adapters {exact} on TPUs: their products have no fixed order")
    else:
        one = tensor * others == 1
        cfg.require("mesh", one, f"one device {exact} on a CPU, where sums over devices have no fixed order")


def _check_cascade(cfg: EngineConfig[Any], model: Any, platform: str, *, adapters: bool) -> None:
    """Refuse shared keys where they cannot be read once, or would change a bit."""
    if isinstance(cfg.weights, FactorisedWeights.Config):
        cfg.require("cascade", not cfg.weights.rank_cache, "None with weights.rank_cache")
    if platform == "tpu":
        windowed = any(block.attention.rules.window for block, _ in model.kinds())
        cfg.require("cascade", not windowed, "None on TPUs for a policy with a sliding window")
    elif not adapters:  # adapters need expanded keys
        cfg.require("cascade", model.latent_width is None, "None for a policy with latent attention")
    if platform == "cpu":
        _check_exact(model, "cascade", "shared keys")


def _check_exact(model: Any, field: str, what_it_does: str) -> None:
    """Refuse a field on a CPU for layers whose sums of a few tokens differ there from those of one, in the last bit."""
    if (what := why_inexact(model)) is not None:
        raise UserError(
            f"RolloutEngine.{field}: on a CPU {what_it_does} may change the last bit of a log-probability of a policy "
            f"with {what}; expected None"
        )


def why_inexact(model: Any) -> str | None:
    """Return what makes sums of a few tokens differ from those of one on a CPU; None: they are equal."""
    caps = [model.output, *(block.attention.rules for block, _ in model.kinds())]
    if any(getattr(one, "soft_cap", None) or getattr(one, "logit_soft_cap", None) for one in caps):
        return "capped scores or logits"
    return None if model.latent_width is None else "keys that are made from latents"


def validate(
    request: Request, cfg: EngineConfig[Any], *, vocab: int, cache_tokens: int, has_text: bool
) -> StopConditions:
    """Return the request's stop conditions in full.

    Args:
        cache_tokens: tokens that fit into all pages of the cache.
        has_text: True if the engine can decode, as stop strings need.

    Raises:
        UserError: naming the request and what is wrong with it.
    """
    _check_prompt(request, cfg, vocab)
    _check_fields(request, vocab)
    stop = _stop_conditions(request, cfg, vocab, has_text)
    assert stop.max_new_tokens is not None
    _check_partial(request, stop.max_new_tokens, vocab)
    needed = -(-(len(request.prompt.tokens) + stop.max_new_tokens) // cfg.page_size)
    if needed * cfg.page_size > cache_tokens:
        raise UserError(
            f"{request.name} may need {needed} pages of {cfg.page_size} tokens; the cache has "
            f"{cache_tokens // cfg.page_size} (RolloutEngine.pages)"
        )
    return stop


def outside(tokens: np.ndarray, vocab: int) -> int | None:
    """Return the first token that the vocabulary does not have."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab)]
    return int(wrong[0]) if len(wrong) else None


def _check_prompt(request: Request, cfg: EngineConfig[Any], vocab: int) -> None:
    name, prompt = request.name, request.prompt
    if not 0 <= prompt.id < 1 << 64:
        raise UserError(f"{name}: the prompt's id makes the keys of its draws; expected 0 to 2**64 - 1")
    if not 1 <= len(prompt.tokens) <= cfg.max_prompt_tokens:
        raise UserError(
            f"{name} has {len(prompt.tokens)} tokens; the engine takes 1 to {cfg.max_prompt_tokens} "
            "(RolloutEngine.max_prompt_tokens)"
        )
    if (wrong := outside(prompt.tokens, vocab)) is not None:
        raise UserError(f"{name} has token {wrong}; the vocabulary is 0 to {vocab - 1}")
    check_segments(request.segments, len(prompt.tokens), name)


def check_segments(segments: Items[TokenSegment], tokens: int, name: str) -> None:
    """Refuse segments that are not all of so many tokens, and a placeholder without any (UserError)."""
    for one in segments:
        if one.tokens < 1:
            what = f"placeholder {one.placeholder!r}" if one.placeholder else "a segment of its prompt"
            raise UserError(f"{name}: {what} has {one.tokens} tokens; expected 1 or more")
    if segments and (all_of_them := sum(one.tokens for one in segments)) != tokens:
        raise UserError(f"{name}: its segments have {all_of_them} tokens; expected {tokens}, as they divide")


def _check_fields(request: Request, vocab: int) -> None:
    name = request.name
    if request.samples < 1:
        raise UserError(f"{name} asks for {request.samples} samples; expected 1 or more")
    if request.deadline is not None and not request.deadline > 0:
        raise UserError(f"{name} has a deadline of {request.deadline} s; expected more than 0")
    apart = request.scores or request.prompt_scores or request.grammar
    if apart and (request.agent_loop is not single_turn or request.partial):
        raise UserError(f"{name} has scores or a grammar; expected one turn, no agent loop and no partial rollouts")
    if request.sampler is not None:
        Sampler.check(request.sampler, vocab, f"{name}: sampler")


def _stop_conditions(request: Request, cfg: EngineConfig[Any], vocab: int, has_text: bool) -> StopConditions:
    name, stop = request.name, request.stop or StopConditions(tokens=cfg.stop_tokens)
    limit = cfg.max_new_tokens if stop.max_new_tokens is None else stop.max_new_tokens
    least = 0 if request.prompt_scores else 1
    if not least <= limit <= cfg.max_new_tokens:
        raise UserError(
            f"{name} asks for {limit} new tokens; the engine gives {least} to {cfg.max_new_tokens} "
            "(RolloutEngine.max_new_tokens)"
        )
    if not 0 <= stop.min_new_tokens <= limit:
        raise UserError(f"{name} asks for {stop.min_new_tokens} new tokens at least; expected 0 to {limit}, its most")
    if (wrong := outside(np.asarray(stop.tokens, np.int64), vocab)) is not None:
        raise UserError(f"{name} has stop token {wrong}; the vocabulary is 0 to {vocab - 1}")
    check_strings(stop.strings, has_text=has_text, where=name)
    return StopConditions(stop.tokens, stop.strings, limit, stop.min_new_tokens)


def _check_partial(request: Request, max_new_tokens: int, vocab: int) -> None:
    """Refuse partial rollouts of another prompt, twice of one sample, or longer than the request allows."""
    seen: set[int] = set()
    for rollout in request.partial:
        name = f"{request.name}: the partial rollout of sample {rollout.sample_id}"
        if rollout.prompt_id != request.prompt.id:
            raise UserError(f"{name} is of prompt {rollout.prompt_id}")
        if rollout.sample_id in seen:
            raise UserError(f"{name} is there twice")
        if len(rollout.tokens) > max_new_tokens:
            raise UserError(f"{name} has {len(rollout.tokens)} tokens; the request allows {max_new_tokens}")
        if (wrong := outside(rollout.tokens, vocab)) is not None:
            raise UserError(f"{name} has token {wrong}; the vocabulary is 0 to {vocab - 1}")
        seen.add(rollout.sample_id)
