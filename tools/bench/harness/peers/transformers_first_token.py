"""transformers from a directory to one greedy token: load, and `generate`. Prints CPU seconds of the process so far.

    python transformers_first_token.py DIRECTORY TOKENS

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`).
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time


def main(directory: str, tokens: int) -> None:
    """Load the model in bfloat16, as it is saved, and generate the token after 1, 2, ..."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    prompt = torch.arange(1, tokens + 1)[None]
    with torch.inference_mode():
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False, pad_token_id=0
        )
    print(json.dumps({"token": int(answer[0, -1]), "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
