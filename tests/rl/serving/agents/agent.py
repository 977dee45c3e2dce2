"""An agent that knows nothing but OpenAI's protocol: `python agent.py WAY`, with a row on its standard input."""

import json
import os
import sys
import time
import urllib.request
from typing import Any

import openai

WAY = sys.argv[1]
ROW = json.load(sys.stdin)
MODEL = os.environ["OPENAI_MODEL"]
ADD: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
client = openai.OpenAI(max_retries=0, timeout=60)


def ask(messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **options).choices[0]


def reward(value: Any, **metrics: float) -> None:
    body = json.dumps({"reward": value, "metrics": metrics}).encode()
    request = urllib.request.Request(os.environ["AXL_REWARD_URL"], body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()


chat: list[Any] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": ROW["question"]},
]
if WAY == "silent":
    sys.exit("nothing to say")
first = ask(chat, max_tokens=4, temperature=0.5, logprobs=True)
print("seen", json.dumps([token.logprob for token in first.logprobs.content]))
again = [*chat, first.message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
if WAY == "one":
    share = sum(character.isascii() for character in first.message.content) / 4
    reward(share, length=len(first.message.content))
elif WAY == "two":
    stream = client.chat.completions.create(model=MODEL, messages=again, max_tokens=3, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    same = ask(again, max_tokens=3)  # a client that was cut off asks again
    assert same.message.content == said
    third = [*again, {"role": "assistant", "content": said}, {"role": "user", "content": "Really?"}]
    assert ask(third, max_tokens=2, tools=None).message.content is not None
    reward(0.5, same=1.0)
elif WAY == "rewrites":
    ask([*chat[:1], {"role": "user", "content": "another question"}])
elif WAY == "changes the answer":
    ask([*chat, {"role": "assistant", "content": "what I like better"}, {"role": "user", "content": "Sure?"}])
elif WAY == "two at once":
    ask(again, n=2)
elif WAY == "forgets its tokens":
    client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
elif WAY == "bad reward":
    reward("much")
elif WAY == "hangs":
    time.sleep(600)
elif WAY == "fails":
    raise KeyError("lost")
elif WAY == "verified":
    pass
