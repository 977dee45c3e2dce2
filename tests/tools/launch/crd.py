"""Manifests against the schemas of a cluster: those of its CustomResourceDefinitions, in which no field is unknown."""

import gzip
from pathlib import Path
from typing import Any

import jsonschema
import yaml


def load_schema(path: Path) -> dict[str, Any]:
    """Return the schema of the newest stored version of a CustomResourceDefinition (.yaml.gz)."""
    with gzip.open(path, "rt") as file:
        found = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in found["spec"]["versions"] if one["storage"]]
    return _closed(schema)


def errors(schema: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Return a line for each field that the cluster would refuse."""
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found)


def _closed(schema: Any) -> Any:
    """Translate what OpenAPI says otherwise, and refuse fields that are not declared, as strict decoding does."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("anyOf", None)
        found["type"] = ["integer", "string"]
    declared = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if declared and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found
