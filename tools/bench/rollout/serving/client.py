"""Clients of a server, in a process of their own, with the load as JSON on standard input."""

import http.client
import json
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0  # limit of one answer
_TICKS = 100  # ticks of /proc/PID/stat per second


@dataclass(frozen=True)
class Load:
    """Requests to make."""

    port: int  # port of the server, on 127.0.0.1
    pid: int  # number of the process of the server
    model: str  # name in requests
    passes: int  # `{requests at once: requests}` is gone through so often, in random order
    levels: dict[str, int]  # requests of a pass, by how many are made at once
    prompt: int  # tokens of the longest prompt
    new: int  # the most tokens of an answer
    seed: int = 0  # seed of the order and the prompts


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first token and to the last, and the number of tokens."""

    first_s: float
    all_s: float
    tokens: int


def ask(load: Load, number: int) -> Answer:
    """Make one streamed request, whose prompt follows from its number.

    Raises:
        RuntimeError: the server has refused it, or broken off.
    """
    rng = random.Random(f"{load.seed} {number}")
    prompt = [rng.randrange(1, 40) for _ in range(rng.randint(4, load.prompt))]
    body = {"model": load.model, "prompt": prompt, "max_tokens": load.new, "temperature": 1.0, "seed": number}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", load.port, timeout=TIMEOUT_S)
    began, first, tokens = time.perf_counter(), 0.0, None
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:300].decode(errors='replace')}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise RuntimeError(f"the stream broke off: {chunk['error']}")
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    finally:
        connection.close()
    if tokens is None:
        raise RuntimeError("the stream ended without its usage")
    return Answer(first, time.perf_counter() - began, tokens)


def run_pass(load: Load, at_once: int, numbers: list[int]) -> dict[str, Any]:
    """Make requests, so many at once; returns tokens, seconds, CPU seconds of the server, and each request's times."""
    waiting, answers, errors = iter(numbers), list[Answer](), list[Exception]()
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(waiting, None)
            if number is None or errors:
                return
            try:
                answers.append(ask(load, number))
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(at_once)]
    cpu, began = cpu_seconds(load.pid), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - began, cpu_seconds(load.pid) - cpu
    if errors:
        raise errors[0]
    tokens = sum(answer.tokens for answer in answers)
    times = {"first_s": [one.first_s for one in answers], "all_s": [one.all_s / one.tokens for one in answers]}
    return {"at_once": at_once, "tokens": tokens, "seconds": seconds, "cpu_s": cpu, **times}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used, on Linux; elsewhere NaN."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / _TICKS


def run(load: Load) -> list[dict[str, Any]]:
    """Make one request, then the passes of all levels in random order; returns all of them."""
    order = [int(level) for level in load.levels for _ in range(load.passes)]
    random.Random(load.seed).shuffle(order)
    found, number = [run_pass(load, 1, [0])], 1
    for at_once in order:
        count = load.levels[str(at_once)]
        found.append(run_pass(load, at_once, list(range(number, number + count))))
        number += count
    return found


if __name__ == "__main__":
    print(json.dumps(run(Load(**json.loads(sys.stdin.read())))))
