"""Low-rank adapters by PEFT on a tiny Llama and a tiny GPT-2: their files and logits, and those of one exported here.

Not run by the tests and not by the project's environment; any Python >= 3.10 with torch, transformers >= 5 and peft:

    golden/bin/python tests/golden/peft_adapter.py make tests/models/golden        # peft_llama, peft_dora, peft_gpt2
    golden/bin/python tests/golden/peft_adapter.py check tests/models/golden DIR   # of `axl convert export --adapter`

The bases are those of tests/models/golden/llama_untied.npz and parity/gpt2.npz. A file holds `config`
(adapter_config.json), the tensors as `weights/<name>`, `tokens` and `logits` of one row.
"""

# pyright: reportMissingImports=false

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file

RANK, ALPHA, TARGETS = 3, 6, ["q_proj", "v_proj", "o_proj", "down_proj"]
OF_GPT2 = ["c_attn", "attn.c_proj", "c_fc"]  # not the other `c_proj`, of the feed-forward layers


def base_model(folder: Path) -> tuple[Any, np.ndarray]:
    """Return the base, and the tokens of one row."""
    with np.load(folder / "llama_untied.npz") as file:
        arrays = {key: file[key] for key in file.files}
    theirs = json.loads(str(arrays["config"]))
    fields = {key: value for key, value in theirs.items() if key not in ("family", "tied")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, tie_word_embeddings=theirs["tied"]))
    weights = {key.removeprefix("weights/"): torch.from_numpy(arrays[key]) for key in arrays if "/" in key}
    model.load_state_dict(weights)
    return model.float().eval(), arrays["tokens"][0]


def gpt2_model(folder: Path) -> tuple[Any, np.ndarray]:
    """Return a tiny GPT-2, and the tokens of one row."""
    with np.load(folder / "parity" / "gpt2.npz") as file:
        arrays = {key: file[key] for key in file.files if not key.startswith("gradient/")}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**json.loads(str(arrays["config"]))))
    weights = {key.removeprefix("weights/"): arrays[key] for key in arrays if key.startswith("weights/")}
    found = {key: torch.from_numpy(x.astype(np.int32) << 16).view(torch.float32) for key, x in weights.items()}
    model.load_state_dict({**found, "lm_head.weight": found["transformer.wte.weight"]})
    return model.float().eval(), arrays["tokens"][0]


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of one row."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


def make(folder: Path, name: str, *, gpt2: bool = False, **kind: bool) -> None:
    """Write an adapter with random factors, and its logits, alone and merged."""
    base, tokens = (gpt2_model if gpt2 else base_model)(folder)
    targets = OF_GPT2 if gpt2 else TARGETS
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM", **kind)
    model = get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) if "lora_" in path else weight
            if "lora_magnitude" in path:
                weight.copy_((weight * (1 + 0.3 * noise)).bfloat16().float())
            elif "lora_" in path:
                weight.copy_((0.2 * noise).bfloat16().float())
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tensors = load_file(Path(saved) / "adapter_model.safetensors")
        written = json.loads((Path(saved) / "adapter_config.json").read_text())
    arrays: dict[str, Any] = {f"weights/{key}": tensor for key, tensor in tensors.items()}
    arrays |= {"tokens": tokens, "logits": logits(model, tokens)}
    np.savez_compressed(folder / f"{name}.npz", config=np.array(json.dumps(written)), **arrays)


def check(folder: Path, exported: Path) -> None:
    """Print how far the logits with an exported adapter are from those stored, and from the base's."""
    base, tokens = base_model(folder)
    alone = logits(base, tokens)
    found = logits(PeftModel.from_pretrained(base, str(exported)).eval(), tokens)
    with np.load(folder / "peft_llama.npz") as file:
        stored = file["logits"]
    scale = float(np.abs(stored).max())
    print(
        json.dumps(
            {name: float(np.abs(found - one).max()) / scale for name, one in (("stored", stored), ("base", alone))}
        )
    )


def main() -> None:
    """Make or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["make", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("exported", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.folder, "peft_llama", use_rslora=True)
        make(arguments.folder, "peft_dora", use_dora=True)
        make(arguments.folder, "peft_gpt2", gpt2=True, use_dora=True, fan_in_fan_out=True)
    else:
        check(arguments.folder, arguments.exported)


if __name__ == "__main__":
    main()
