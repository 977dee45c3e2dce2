"""A server that the tests of a file share, and the official client of it."""

from collections.abc import Iterator

import openai
import pytest

from tests.rl.serving.running import Running, running


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Running) -> openai.OpenAI:
    return served.client()
