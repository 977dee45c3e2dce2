"""One episode of an agent, as the engine behind an endpoint: its requests wait for the turns of the policy."""

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.environments.environment import Ask
from rl.protocol.messages import Rollout
from rl.rollout.request import Request, RequestOutput
from rl.serving.agents.history import ChatHistory
from rl.serving.engine_thread import Done, Failed, Stream
from rl.serving.errors import ApiError

NO_LIMIT = 2**30  # tokens of an answer that no request has limited


class Ended(NamedTuple):
    """The end of an agent, with its exit status."""

    status: int


class AgentSession:
    """Requests of an agent, one at a time. An event loop submits them; another thread waits for them and answers."""

    def __init__(self, tokenizer: Tokenizer):
        self.history = ChatHistory(tokenizer)
        self.reward: float | None = None  # given by the agent
        self.metrics: Mapping[str, float] = {}
        self.requests = 0
        self._events: queue.SimpleQueue[Ask | Ended] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._streams: list[Stream] = []  # wait for the answer to the last request
        self._tokens: list[int] = []  # seen and drawn so far
        self._asked: list[int] = []  # tokens of the last request
        self._last: Rollout | None = None  # answer to it

    # ---- for the application, as `EngineThread`

    alive = True
    version = 0

    @property
    def stats(self) -> Mapping[str, float]:
        """The session's own figures."""
        return {"requests": self.requests}

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queue a request, or refuse it; a repeated one gets the same answer."""
        stream, tokens = Stream(requests), requests[0].prompt.tokens.tolist()
        with self._lock:
            if error := self._refusal(requests, tokens):
                stream.post([Failed(ApiError(400, error, code="not_one_chat"))])
            elif tokens == self._asked and self._last is not None:
                stream.post([_done(self._last)])
            else:
                self._streams.append(stream)
                if tokens != self._asked:
                    self._asked, self._last = tokens, None
                    self.requests += 1
                    self._events.put(_ask(requests[0], tokens, self.history.new))
        return stream

    def abort(self, stream: Stream) -> None:
        """Forget who waits; the answer is drawn all the same, for the client that asks again."""
        with self._lock:
            self._streams = [one for one in self._streams if one is not stream]

    def _refusal(self, requests: Sequence[Request], tokens: list[int]) -> str:
        (request, *others), waits = requests, bool(self._asked) and self._last is None
        if others or request.samples > 1:
            return "an agent's request has one answer: one prompt, and n=1"
        if request.grammar is not None or request.scores is not None or request.prompt_scores:
            return "forms of answers, and log-probabilities of others than the tokens drawn, are not given in episodes"
        if tokens == self._asked:
            return ""
        if waits:
            return "another request of this agent is being answered; expected one at a time"
        if tokens[: len(self._tokens)] != self._tokens or len(tokens) == len(self._tokens):
            return "the prompt does not begin with the tokens of the episode so far"
        return ""

    # ---- for the environment

    async def next(self) -> Ask | Ended:
        """Wait for the agent's next request, or its end."""
        return await asyncio.to_thread(self._events.get)

    def answer(self, drawn: Rollout) -> None:
        """Send the policy's turn to those that wait."""
        with self._lock:
            self._tokens, self._last = [*self._asked, *drawn.tokens.tolist()], drawn
            self.history.answered(drawn.tokens.tolist())
            waiting, self._streams = self._streams, []
        for stream in waiting:
            stream.post([_done(drawn)])

    def end(self, status: int) -> None:
        """Tell that the agent has ended; nobody waits from now on."""
        self._events.put(Ended(status))


def _ask(request: Request, tokens: list[int], messages: tuple[Mapping[str, Any], ...]) -> Ask:
    assert request.stop is not None
    limit = request.stop.max_new_tokens
    return Ask(np.asarray(tokens, np.int32), None if limit == NO_LIMIT else limit, request.stop.strings, messages)


def _done(drawn: Rollout) -> Done:
    return Done(0, RequestOutput(0, (dataclasses.replace(drawn, sample_id=0),), scores=(None,)))
