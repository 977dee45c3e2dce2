"""Episodes of a run in the forms of others: messages of OpenAI's chats, and ATIF, Harbor's trajectories of agents.

ATIF is the Agent Trajectory Interchange Format, version 1.6 (https://harborframework.com/docs/trajectory-format).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError
from rl.environments.calls import OPENING, JsonCalls

Row = dict[str, Any]
TraceForm = Literal["openai", "atif"]
ATIF = "ATIF-v1.6"
_RESULTS = JsonCalls.Config().build().results(["", ""])  # text between two results of one turn
_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}
_KEPT = ("family", "expected", "reward", "status", "finish_reason", "version", "ended", "turn_rewards")


def recorded_episodes(folder: Path) -> Iterator[Row]:
    """Yield rollouts of a run (`rollouts/*.jsonl`), or of `axl eval --out` (UserError: there are none)."""
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    samples = folder / "samples.jsonl"
    if not files and not samples.is_file():
        raise UserError(f"{folder} has no rollouts/*.jsonl of a run and no samples.jsonl of `axl eval --out`")
    for path in files or [samples]:
        for row in read_rows(path):
            head = {name: value for name, value in row.items() if name != "samples"}
            yield from ({**head, **sample} for sample in row.get("samples", [{}]))


def as_openai(row: Row) -> Row:
    """Return an episode as messages, with calls of tools told apart from text."""
    messages: list[Row] = []
    said = row.get("messages") or [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": row["answer"]},
    ]
    calls: list[Row] = []  # calls of the last turn, without results yet
    for number, message in enumerate(said):
        if message["role"] == "assistant":
            ids = [one.get("tool_call_id") for one in said[number + 1 :] if one["role"] == "tool"]
            messages.append(_told_apart(message["content"], number, ids))
            calls = list(messages[-1].get("tool_calls", ()))
        elif message["role"] == "tool" and calls:
            content = message["content"]
            parts = content.split(_RESULTS) if len(content.split(_RESULTS)) == len(calls) else [content]
            answered, calls = calls[: len(parts)], calls[len(parts) :]
            pairs = zip(answered, parts, strict=True)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": part} for call, part in pairs]
        else:  # a result of what was no call
            messages.append({**message, "role": "user" if message["role"] == "tool" else message["role"]})
    return {"messages": messages, "metadata": {name: row[name] for name in _KEPT if name in row}}


def as_atif(row: Row, name: str) -> Row:
    """Return an episode as a trajectory of ATIF; `name` is its own, unique one."""
    chat = as_openai(row)
    steps: list[Row] = []
    for message in chat["messages"]:
        if message["role"] == "tool":
            result = {"source_call_id": message["tool_call_id"], "content": message["content"]}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = _SOURCES.get(message["role"], "user")
        step: Row = {"step_id": len(steps) + 1, "source": source, "message": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            step["tool_calls"] = [
                {
                    "tool_call_id": call["id"],
                    "function_name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                }
                for call in calls
            ]
        steps.append(step)
    agent = {"name": "axlearn-like", "version": str(row.get("version", 0)), "model_name": name.partition("/")[0]}
    metrics = {"total_steps": len(steps)}
    head = {"schema_version": ATIF, "session_id": name, "agent": agent, "steps": steps}
    return {**head, "final_metrics": metrics, "extra": chat["metadata"]}


def write_episodes(folder: Path, output: Path, form: TraceForm) -> int:
    """Write the recorded episodes of a folder as JSONL; returns their number."""
    count = 0
    with open(output, "w", encoding="utf-8") as file:
        for row in recorded_episodes(folder):
            written = as_openai(row) if form == "openai" else as_atif(row, f"{folder.resolve().name}/{count}")
            file.write(json.dumps(written, ensure_ascii=False) + "\n")
            count += 1
    return count


def _told_apart(text: str, number: int, ids: Sequence[str | None]) -> Row:
    """Return a message of the policy; what cannot be read as calls stays text."""
    calls = JsonCalls.Config().build().calls(text)
    if not calls or any(call.error or not isinstance(call.arguments, Mapping) for call in calls):
        return {"role": "assistant", "content": text}
    told = [
        {
            "id": (ids[n] if n < len(ids) else None) or f"call_{number}_{n}",
            "type": "function",
            "function": {"name": call.tool, "arguments": json.dumps(dict(call.arguments or {}), ensure_ascii=False)},
        }
        for n, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": text.partition(OPENING)[0].strip() or None, "tool_calls": told}
