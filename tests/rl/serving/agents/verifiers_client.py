"""The training client of verifiers against a server: `PYTHON verifiers_client.py URL MODEL TOKENIZER`."""
# pyright: reportMissingImports=false

import asyncio
import sys

import verifiers.v1 as vf
from renderers import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.dialects.chat import ChatDialect


async def main(url: str, model: str, tokenizer: str) -> None:
    parts = {"renderer": DefaultRendererConfig(), "renderer_model_name": tokenizer}
    client = TrainClient(vf.TrainClientConfig(base_url=f"{url}/v1", api_key_var="NONE", **parts))
    body = {"model": model, "messages": [{"role": "user", "content": "2+2?"}]}
    sampling = vf.SamplingConfig(max_tokens=8, temperature=1.0, seed=5)
    print((await client.get_response(ChatDialect(), body, sampling)).model_dump_json())
    await client.close()


asyncio.run(main(*sys.argv[1:]))
