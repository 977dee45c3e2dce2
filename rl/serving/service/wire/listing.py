"""Lists of a tenant's models (training runs, as clients call them) and saved states (checkpoints), as JSON."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HttpRequest

from rl.serving.service.verbs import ModelFacts, SavedFacts, ServiceVerbs, UnknownId

Json = dict[str, Any]
_KINDS = {"weights": "training", "sampler_weights": "sampler"}
_MOST = 1000  # entries of a page


def model_info(verbs: ServiceVerbs, tenant: str, model: str) -> Json:
    """Return the answer to get_info.

    Raises:
        UnknownId: the model has no slot.
    """
    facts = next((facts for facts in verbs.models(tenant) if facts.model == model), None)
    if facts is None:
        raise UnknownId("model", model)
    name, tokenizer = verbs.base.name, verbs.base.tokenizer
    data = {"arch": None, "model_name": name, "tokenizer_id": tokenizer}
    return {
        "type": "get_info",
        "model_id": model,
        "is_lora": True,
        "lora_rank": facts.spec.rank,
        "model_name": name,
        "model_data": data,
    }


def weights_info(verbs: ServiceVerbs, tenant: str, path: str) -> Json:
    """Return what is needed to continue from a saved state.

    Raises:
        UnknownId: there is none of this path.
    """
    facts = next((facts for facts in verbs.saved(tenant) if facts.path == path), None)
    if facts is None:
        raise UnknownId("path", path)
    spec = facts.spec
    return {
        "base_model": verbs.base.name,
        "is_lora": True,
        "lora_rank": spec.rank,
        "train_attn": spec.train_attention,
        "train_mlp": spec.train_mlp,
        "train_unembed": spec.train_unembed,
    }


def checkpoints(verbs: ServiceVerbs, tenant: str, model: str | None = None) -> list[Json]:
    """Return the saved states of a tenant, or of one model, the newest first."""
    return [_checkpoint(facts) for facts in verbs.saved(tenant) if model in (None, facts.model)]


def training_runs(verbs: ServiceVerbs, tenant: str) -> list[Json]:
    """Return the models that have a slot or saved states, the newest first."""
    saved: dict[str, list[SavedFacts]] = {}
    for facts in verbs.saved(tenant):
        saved.setdefault(facts.model, []).append(facts)
    live = {facts.model: facts for facts in verbs.models(tenant)}
    runs = [_run(verbs, tenant, model, live.get(model), saved.get(model, ())) for model in {**live, **saved}]
    return sorted(runs, key=lambda run: run["last_request_time"], reverse=True)


def page(items: Sequence[Json], name: str, request: HttpRequest) -> Json:
    """Return the part of a list that `limit` and `offset` of a request ask for."""
    query = request.query_params
    limit = min(_natural(query.get("limit"), 100), _MOST)
    offset = _natural(query.get("offset"), 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


def _run(verbs: ServiceVerbs, tenant: str, model: str, live: ModelFacts | None, saved: Sequence[SavedFacts]) -> Json:
    newest = {kind: next((one for one in saved if one.kind == kind), None) for kind in _KINDS}
    spec = live.spec if live is not None else saved[0].spec
    return {
        "training_run_id": model,
        "base_model": verbs.base.name,
        "model_owner": tenant,
        "is_lora": True,
        "lora_rank": spec.rank,
        "last_request_time": _time(max([one.created for one in saved] + ([live.created] if live else []))),
        "last_checkpoint": newest["weights"] and _checkpoint(newest["weights"]),
        "last_sampler_checkpoint": newest["sampler_weights"] and _checkpoint(newest["sampler_weights"]),
    }


def _checkpoint(facts: SavedFacts) -> Json:
    return {
        "checkpoint_id": facts.path.partition(f"{facts.model}/")[2],
        "checkpoint_type": _KINDS[facts.kind],
        "time": _time(facts.created),
        "tinker_path": facts.path,
        "size_bytes": facts.num_bytes,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _natural(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else default
