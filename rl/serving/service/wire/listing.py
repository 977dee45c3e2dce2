"""Lists of a tenant's models (training runs, as clients call them) and saved states (checkpoints), as JSON."""

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request as HttpRequest

from rl.serving.service.messages import Json, SavedFacts, UnknownId
from rl.serving.service.service import AdapterService

_KINDS = {"weights": "training", "sampler_weights": "sampler"}
_MOST = 1000  # entries of a page


def model_info(service: AdapterService, tenant: str, model: str) -> Json:
    """Return the answer to get_info (UnknownId: the model has no slot)."""
    if (entry := service.models(tenant).get(model)) is None:
        raise UnknownId("model", model)
    base = service.base
    data = {"arch": None, "model_name": base.name, "tokenizer_id": base.tokenizer}
    own = {"model_id": model, "model_name": base.name, "model_data": data}
    return {"type": "get_info", "is_lora": True, "lora_rank": entry.spec.rank, **own}


def weights_info(service: AdapterService, tenant: str, path: str) -> Json:
    """Return what is needed to continue from a saved state (UnknownId: there is none of this path)."""
    spec = next((facts.spec for facts in service.saved(tenant) if facts.path == path), None)
    if spec is None:
        raise UnknownId("path", path)
    parts = {"train_attn": spec.train_attention, "train_mlp": spec.train_mlp, "train_unembed": spec.train_unembed}
    return {"base_model": service.base.name, "is_lora": True, "lora_rank": spec.rank, **parts}


def checkpoints(service: AdapterService, tenant: str, model: str | None = None) -> list[Json]:
    """Return the saved states of a tenant, or of one model, the newest first."""
    return [_checkpoint(facts) for facts in service.saved(tenant) if model in (None, facts.model)]


def training_runs(service: AdapterService, tenant: str) -> list[Json]:
    """Return the models that have a slot or saved states, the newest first."""
    live = {model: (entry.spec, entry.created) for model, entry in service.models(tenant).items()}
    saved: dict[str, list[SavedFacts]] = {model: [] for model in live}
    for facts in service.saved(tenant):
        saved.setdefault(facts.model, []).append(facts)
    runs: list[Json] = []
    for model, own in saved.items():
        times = [(one.spec, one.created) for one in own] + ([live[model]] if model in live else [])
        newest = {kind: next((_checkpoint(one) for one in own if one.kind == kind), None) for kind in _KINDS}
        run = {"training_run_id": model, "base_model": service.base.name, "model_owner": tenant, "is_lora": True}
        run |= {"lora_rank": times[0][0].rank, "last_request_time": _time(max(created for _, created in times))}
        run |= {"last_checkpoint": newest["weights"], "last_sampler_checkpoint": newest["sampler_weights"]}
        runs.append(run)
    return sorted(runs, key=lambda run: run["last_request_time"], reverse=True)


def page(items: Sequence[Json], name: str, request: HttpRequest) -> Json:
    """Return the part of a list that `limit` and `offset` of a request ask for."""
    query = request.query_params
    limit = min(_natural(query.get("limit"), 100), _MOST)
    offset = _natural(query.get("offset"), 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


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
