"""Typed, nested configs: define, compose, edit, compare and build (docs/reference/config.md)."""

from axlearn_like.config.base import ConfigBase, Configurable
from axlearn_like.config.declared import config_function
from axlearn_like.config.edit import (
    apply_mesh_rules,
    errors_at,
    get_path,
    replace,
    set_path,
    split_path,
    walk,
    walk_configs,
)
from axlearn_like.config.errors import ConfigError, marking
from axlearn_like.config.fields import REQUIRED
from axlearn_like.config.function import config_for
from axlearn_like.config.mesh_rules import MeshRules, has_mesh_rules, reach, with_mesh_rules
from axlearn_like.config.names import config_name
from axlearn_like.config.resolve import check_values, record_resolved, resolve
from axlearn_like.config.text import (
    diff,
    differences,
    from_text,
    recorded_lines,
    recorded_values,
    strip_comments,
    text_lines,
    to_text,
)
from axlearn_like.config.tree import config_items, config_key, label, owner_name, path_of
from axlearn_like.config.trusted_code import trust

__all__ = [
    "REQUIRED",
    "ConfigBase",
    "ConfigError",
    "Configurable",
    "MeshRules",
    "apply_mesh_rules",
    "check_values",
    "config_for",
    "config_function",
    "config_items",
    "config_key",
    "config_name",
    "diff",
    "differences",
    "errors_at",
    "from_text",
    "get_path",
    "has_mesh_rules",
    "label",
    "marking",
    "owner_name",
    "path_of",
    "reach",
    "record_resolved",
    "recorded_lines",
    "recorded_values",
    "replace",
    "resolve",
    "set_path",
    "split_path",
    "strip_comments",
    "text_lines",
    "to_text",
    "trust",
    "walk",
    "walk_configs",
    "with_mesh_rules",
]
