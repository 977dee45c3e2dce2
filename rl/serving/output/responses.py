"""The answer of `/v1/responses`, whole or as events, made of the body and the chunks of a chat."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

Json = dict[str, Any]
_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "user")


class ResponseWriter:
    """One response; `request` is the body that asked for it."""

    # Names of a chat's fields here.
    names: Mapping[str, str] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    def __init__(self, request: Mapping[str, Any]):
        self._request, self._sequence = request, 0
        self._head = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
        self._items: list[Json] = []
        self._text: Json | None = None  # the message that is under way
        self._reason, self._usage = "stop", None

    def whole(self, chat: Json) -> Json:
        """Return the response for the body of a chat."""
        (choice,) = chat["choices"]
        message = choice["message"]
        if message["content"] is not None:
            logprobs = (choice["logprobs"] or {}).get("content") or []
            self._items.append(_message(_id("msg"), message["content"], logprobs))
        self._items += [_call(call) for call in message.get("tool_calls", ())]
        self._reason, self._usage = choice["finish_reason"], chat["usage"]
        return self._response(self._status)

    async def events(self, chunks: AsyncGenerator[Json]) -> AsyncGenerator[Json]:
        """Yield the events for the chunks of a chat."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))
        async for chunk in chunks:
            if "error" in chunk:
                yield self._event("error", **{name: chunk["error"][name] for name in ("code", "message", "param")})
                return
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk["choices"]:
                for event in self._more(choice):
                    yield event
        for event in self._end_text():
            yield event
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _more(self, choice: Json) -> Iterator[Json]:
        delta = choice["delta"]
        self._reason = choice["finish_reason"] or self._reason
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        if delta.get("content") or logprobs:
            yield from self._begin_text()
            assert self._text is not None
            part = self._text["content"][0]
            part["text"] += delta.get("content") or ""
            part["logprobs"] += logprobs
            said = {"delta": delta.get("content") or "", "logprobs": logprobs}
            yield self._event("response.output_text.delta", **self._place(), **said)
        for call in delta.get("tool_calls", ()):
            yield from self._end_text()
            item = _call(call)
            place = {"output_index": len(self._items), "item_id": item["id"]}
            begun = {**item, "arguments": "", "status": "in_progress"}
            self._items.append(item)
            yield self._event("response.output_item.added", output_index=place["output_index"], item=begun)
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            done = {"name": item["name"], "arguments": arguments}
            yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _begin_text(self) -> Iterator[Json]:
        if self._text is None:
            self._text = _message(_id("msg"), "", [])
            self._items.append(self._text)
            begun = {**self._text, "content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun)
            yield self._event("response.content_part.added", **self._place(), part=_part("", []))

    def _end_text(self) -> Iterator[Json]:
        if self._text is not None:
            (part,), place = self._text["content"], self._place()
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **place, **said)
            yield self._event("response.content_part.done", **place, part=part)
            yield self._event("response.output_item.done", output_index=place["output_index"], item=self._text)
            self._text = None

    def _place(self) -> Json:
        assert self._text is not None
        return {"output_index": len(self._items) - 1, "item_id": self._text["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _response(self, status: str) -> Json:
        request, usage = self._request, self._usage
        counted = usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": request.get("model"),
            "output": list(self._items),
            "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "tool_choice": request.get("tool_choice", "auto"),
            "tools": request.get("tools") or [],
            "text": request.get("text") or {"format": {"type": "text"}},
            **{name: request.get(name) for name in _ECHOED},
            "usage": counted,
        }


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message(name: str, text: str, logprobs: list[Json]) -> Json:
    content = [_part(text, logprobs)]
    return {"type": "message", "id": name, "status": "completed", "role": "assistant", "content": content}


def _call(call: Json) -> Json:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return {"type": "function_call", "id": _id("fc"), "call_id": call["id"], **function, "status": "completed"}
