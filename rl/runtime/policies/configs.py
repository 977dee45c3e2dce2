"""Configs of an experiment's policies: its own config with the edits of each, and what they may not change."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from axlearn_like.checkpoint.pretrained import pretrained_source
from axlearn_like.config import ConfigBase, ConfigError, differences, label, set_path, split_path, text_lines
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.layers.wrappers.adapters import adapter_of
from axlearn_like.layers.wrappers.base import plain_config
from mesh import UserError
from rl.controller.fair_share import Quota, check_shares, read_quotas
from rl.experiment import RLExperiment, Runtime
from rl.runtime.policies.adapters import are_adapters
from rl.runtime.policies.changes import NAME
from rl.runtime.policies.role_configs import check_roles, players_by_policy

MOST_POLICIES = 256
_LORA = "lora/"  # folder of factors among the parameters of a layer
_ADD_LORA = "--apply low_rank makes a policy of LoRA layers, and freezes the others"
# Fields of what all policies share: engine, fleet, and the settings of their processes.
_SHARED = frozenset(
    """tokenizer max_prompt_tokens max_new_tokens stop_at_eos engine fleet mesh_rules workers parameter_server timeouts
    swap warm_start policies policy_shares policy_quotas policy_slots""".split()
)


def policy_configs(cfg: RLExperiment.Config) -> dict[str, RLExperiment.Config]:
    """Return the config of each policy by name, in the order of names: the experiment's, edited; {}: it has only one.

    Raises:
        ConfigError: a name or a share cannot be, an edit does not fit or is of what is shared; names policy and field.
    """
    _check_names(cfg)
    own: dict[str, dict[str, Any]] = cfg.clone().policies  # values of their own: two policies share none
    return {name: _edited(cfg, name, own[name]) for name in sorted(own)}


def check_policies(
    cfg: RLExperiment.Config, runtime: Runtime = "ray", devices: Sequence[Any] | None = None
) -> dict[str, RLExperiment.Config]:
    """Refuse policies that cannot be trained on one fleet, and check each config as that of a run of its own.

    Args:
        cfg: config of the experiment.
        runtime: see `RLExperiment.Config.check`.
        devices: see there.

    Raises:
        UserError: names the policy and the field to change.
    """
    found = policy_configs(cfg)
    check_roles(cfg, found)
    with_roles = bool(players_by_policy(found))
    if not found:
        return found
    if cfg.warm_start is not None:
        said = "expected None with several policies: train what they begin with, and name it in `start_from`"
        raise ConfigError(f"warm_start: {said}", "warm_start")
    _check_processes(cfg)
    shared, adapters = cfg.build(), are_adapters(cfg.policy)
    if adapters:
        _ranks("policy", cfg.policy)
    else:
        cfg.require("policy_slots", cfg.policy_slots is None, "None with whole models, which begin together")
    for name, own in found.items():
        where = _place(name)
        if adapters:
            _check_adapter(cfg.policy, own.policy, f"{where}.policy")
            _check_learner(own, where)
        if adapters or with_roles:
            kept = "'pinned' or 'newest': requests keep the weights that they began with"
            own.controller.require("weights", own.controller.weights != "in_flight", kept)
        own.trainer.require("processes", own.trainer.processes == 1, "1, as the experiment has")
        _check_engine(shared, own.build(), where)
        own.check(runtime, devices=devices)
    return found


def _check_processes(cfg: RLExperiment.Config) -> None:
    """Refuse roles of several processes, and a reference on devices of its own (ConfigError)."""
    cfg.trainer.require("processes", cfg.trainer.processes == 1, "1 with several policies")
    cfg.fleet.require("reference", cfg.fleet.reference is None, "None with several policies: their trainer holds it")
    alone = cfg.fleet.worker_hosts == 1
    cfg.fleet.require("workers", alone, "workers on one host each with several policies")


def _check_names(cfg: RLExperiment.Config) -> None:
    names = list(cfg.policies)
    if len(names) > MOST_POLICIES:
        raise ConfigError(f"policies: there are {len(names)}; expected {MOST_POLICIES} or fewer", "policies")
    for name in names:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{_place(name)}: expected a name of a-z, 0-9, and ._=+- behind the first, up to 100 of them",
                "policies",
            )
    fits = cfg.policy_slots is None or 1 <= cfg.policy_slots <= MOST_POLICIES
    cfg.require("policy_slots", fits, f"1 to {MOST_POLICIES}, or None: as many as begin")
    check_shares("policy_shares", cfg.policy_shares, names, "policy")
    quotas_of(cfg)


def slots_of(cfg: RLExperiment.Config) -> int:
    """Return how many policies there is room for at a time, those included that join while others train."""
    return max(cfg.policy_slots or 0, len(cfg.policies))


def quotas_of(cfg: RLExperiment.Config) -> dict[str, Quota]:
    """Return the quotas of an experiment's policies (ConfigError: of another policy, of another name, or no limit)."""
    return read_quotas("policy_quotas", cfg.policy_quotas, cfg.policies, "policy")


def _place(name: str) -> str:
    return f"policies[{name!r}]"


def _edited(cfg: RLExperiment.Config, name: str, edits: dict[str, Any]) -> RLExperiment.Config:
    """Return a copy of the experiment's config with the edits of one policy."""
    where, shared = _place(name), _SHARED | ({"start_from"} if are_adapters(cfg.policy) else set[str]())
    own = label(cfg.clone(policies={}, policy_shares={}, policy_quotas={}, policy_slots=None), where)
    for path, value in edits.items():
        field = str(split_path(path)[0])
        if field in shared:
            raise ConfigError(
                f"{where}.{path}: all policies share {field!r}; expected an edit of the experiment's own, or of: "
                f"{', '.join(sorted(own.__dataclass_fields__.keys() - shared))}",
                f"{where}.{path}",
            )
        set_path(own, path, value)
    return label(own, where)


def _ranks(where: str, policy: ConfigBase[Any]) -> dict[str, int]:
    """Return the rank of each matrix that a policy's LoRA layers adapt (ConfigError: it has none, or other layers)."""
    nothing = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.zeros(leaf.shape, np.float32) if _LORA in path_name(path) else leaf, _abstract(policy)
    )
    try:
        return {path: factors.a.shape[-1] for path, factors in adapter_of(policy, nothing).factors.items()}
    except UserError as error:
        needed = f"policies of one fleet are LoRA adapters of one base: {error} ({_ADD_LORA})"
        raise ConfigError(f"{where}: {needed}", where) from error


def _abstract(policy: ConfigBase[Any]) -> Any:
    return split(build_abstract(label(policy.clone(), "policy")))[1]  # one path, and so one trace for equal policies


def _check_adapter(base: ConfigBase[Any], own: ConfigBase[Any], where: str) -> None:
    """Refuse a policy that is no adapter of the experiment's own base, within its ranks and matrices."""
    sides = (text_lines(plain_config(base)), text_lines(plain_config(own)))
    for path, (expected, found) in differences(*sides).items():
        place = f"{where}.{path}"
        said = f"expected {expected}, as in the base that all policies share, got {found}"
        raise ConfigError(f"{place}: {said}; of a policy's model, its LoRA layers alone may differ", place)
    room = _ranks("policy", base)
    for path, rank in _ranks(where, own).items():
        if path not in room:
            raise ConfigError(f"{where}: it adapts {path}, which the experiment's own policy does not", where)
        if rank > room[path]:
            said = f"rank {rank} of {path}; expected {room[path]} or less, as the experiment's own policy has"
            raise ConfigError(f"{where}: {said}", where)


def _check_learner(own: RLExperiment.Config, where: str) -> None:
    """Refuse a learner that trains more than the factors of the adapter."""
    params = _abstract(own.policy)
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    if trained := sorted(name for name in names - own.learner.build().frozen(params) if _LORA not in name):
        place = f"{where}.learner.groups"
        raise ConfigError(f"{place}: {trained[0]} is trained, which all policies share ({_ADD_LORA})", place)


def _check_engine(shared: RLExperiment, own: RLExperiment, where: str) -> None:
    """Refuse what would make the engine of a policy another one, whichever field it comes from."""
    models: list[Any] = [plain_config(each.engine_cfg.model) for each in (shared, own)]
    if all(pretrained_source(model) is not None for model in models):
        models[1].set(start_from=models[0].start_from)  # directories may differ
    engines = zip((shared.engine_cfg, own.engine_cfg), models, strict=True)
    sides = [text_lines(cfg.clone(model=model, sampler=shared.cfg.sampler)) for cfg, model in engines]
    for path, (expected, found) in differences(*sides).items():
        place = f"{where}.engine.{path}"
        raise ConfigError(f"{place}: expected {expected}, as in the engine that all policies share, got {found}", place)
