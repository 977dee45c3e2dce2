"""Mesh rules in configs: what changes with the devices that an experiment runs on."""

import contextlib
from collections.abc import Mapping
from typing import Any

from axlearn_like.config.base import ConfigBase
from axlearn_like.config.edit import apply_mesh_rules, set_path, walk_configs
from mesh.errors import UserError

# Pairs of a pattern of `mesh.device_name` ("tpu-v5p-.*") and edits, path -> value. The first pattern that fits counts.
MeshRules = tuple[tuple[str, dict[str, Any]], ...]


def with_mesh_rules[C: ConfigBase[Any]](cfg: C, device: str, within: Mapping[str, str] | None = None) -> C:
    """A copy with the edits for these devices, of the config itself and of those within that have rules of their own.

    Args:
        within: path -> name of other devices, on which the part of the config below that path lives.

    Raises:
        ConfigError: there are rules, and none fits (they are all named), or an edit does not fit the config.
    """
    cfg = cfg.clone()
    for path, node in list(walk_configs(cfg)):
        rules: MeshRules = getattr(node, "mesh_rules", ())
        if rules:
            others = (name for part, name in (within or {}).items() if f"{path}.".startswith(f"{part}."))
            edits_by_pattern = [(pattern, list(edits.items())) for pattern, edits in rules]
            apply_mesh_rules(node, edits_by_pattern, next(others, device))
    return cfg


def has_mesh_rules(cfg: ConfigBase[Any]) -> bool:
    """Return True if anything depends on the devices."""
    return any(getattr(node, "mesh_rules", ()) for _, node in walk_configs(cfg))


def reach(cfg: ConfigBase[Any]) -> dict[str, str]:
    """Return what a config and those within reach outside of the run: item -> path, see `ConfigBase.reaches`.

    Edits of mesh rules count, each rule on its own, whatever the devices are, as do those of each of several policies.
    """
    found: dict[str, str] = {}
    for path, node in walk_configs(cfg):
        for item in node.all_reaches():
            found.setdefault(item, path)
        alternatives = [("mesh_rules", edits) for _, edits in getattr(node, "mesh_rules", ())]
        alternatives += [("policies", edits) for edits in getattr(node, "policies", {}).values()]
        for field, edits in alternatives:
            edited = node.clone(**{field: type(getattr(node, field))()})
            for edit in edits.items():
                with contextlib.suppress(UserError):  # edit that does not fit is refused at its use
                    set_path(edited, *edit)
            for item in reach(edited):
                found.setdefault(item, f"{path}.{field}".removeprefix("."))
    return found
