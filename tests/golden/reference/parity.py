"""Tiny random models of every family by Hugging Face transformers: what tests/golden/parity.py measures ours against.

Run as tests/golden/reference/decoders.py is, beside which it stands:

    golden/bin/python tests/golden/reference/parity.py tests/models/golden/parity

Each file holds `config` (config.json as saved), the tensors as `weights/<name>` (bfloat16 as uint16), and

* `tokens`, `positions` and `segment_ids` (0 is padding) of rows of documents: one longer than the windows and than the
  original length of a stretched rotary embedding, two packed in a row, and one with padding (which went through the
  reference as a padded batch with a mask); `logits` of the tokens that are `checked`.
* `generated`: prompt and greedy continuation by `generate` with its cache, and `step_logits`, of its last steps.
* `gradient/<name>`: norm, and inner products with two random signs, of the gradient of the mean cross entropy of the
  long document.
"""

# pyright: reportMissingImports=false

import argparse
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from cases import CASES, COMMON, SHORT, UNUSED
from decoders import saved_weights

DOCUMENTS = ((64,), (13, 8), (29,))  # of each row; what is left of a row is padding
PROMPT, NEW, STEPS = 6, 200, 4  # tokens; the logits of the last steps are stored
MARGIN = 1e-3  # of the spread of the logits, by which the likeliest token of every step must lead
NAN = 0x7FC0  # of bfloat16: of tensors that no model may read
EVERY = 8  # the logits of each eighth token are stored, and of the last four of each document


def make_model(name: str, seed: int) -> Any:
    """A model with every parameter and every bias of a router random, each a bfloat16 number."""
    kind, config, fields = CASES[name]
    common = {"vocab_size": 96} if name == "gpt2" else COMMON
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made = getattr(transformers, config)(**{**common, **ends, **fields}, attn_implementation="eager")
    model = getattr(transformers, kind)(made).float().eval()
    generator = torch.Generator().manual_seed(seed)
    buffers = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for key, weight in [*model.named_parameters(), *buffers]:
            # A few values only, so that the files are small.
            noise = torch.round(4 * torch.randn(weight.shape, generator=generator)) / 4
            vector = weight.ndim == 1 or key.endswith("_proj_bias")
            if "norm" in key or ".ln_" in key:
                value = (0.0 if name.startswith("gemma") or key.endswith("bias") else 1.0) + 0.2 * noise
            elif "correction_bias" in key:
                value = 0.05 * noise
            elif vector:
                value = 0.3 * noise
            elif "embed_tokens" in key or "wte" in key or "wpe" in key:
                value = (0.125 if name.startswith("g") else 1.0) * noise
            else:
                inputs = weight.shape[-2] if _inputs_first(name, key) else weight.shape[-1]
                value = 1.5 * noise * inputs**-0.5
            weight.copy_(value.bfloat16().float())
    return model


def _inputs_first(name: str, key: str) -> bool:
    return (name == "gpt2" and ".h." in key) or (name == "gpt_oss" and ".experts." in key)


def logits_of(model: Any, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Logits of one row [length, vocab] of a batch, padded as `mask` says."""
    with torch.no_grad():
        found = model(
            torch.from_numpy(tokens)[None],
            attention_mask=None if mask is None else torch.from_numpy(mask)[None],
            use_cache=False,
        )
    return found.logits[0].numpy()


def make_batch(name: str, model: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows of documents, and the logits of each document alone, that of the last row with padding behind it."""
    documents = SHORT.get(name, DOCUMENTS)
    rows, length = len(documents), sum(documents[0])
    batch: dict[str, np.ndarray] = {
        key: np.zeros((rows, length), np.int32) for key in ("tokens", "positions", "segment_ids")
    }
    batch["logits"] = np.zeros((rows, length, 96), np.float32)
    for row, lengths in enumerate(documents):
        start = 0
        for document, count in enumerate(lengths, start=1):
            here = (row, slice(start, start + count))
            batch["tokens"][here] = rng.integers(0, 96, count)
            batch["positions"][here], batch["segment_ids"][here] = np.arange(count), document
            if row < rows - 1:
                batch["logits"][here] = logits_of(model, batch["tokens"][here].astype(np.int64))
            start += count
    last = batch["tokens"][-1].astype(np.int64)
    live = (batch["segment_ids"][-1] > 0).astype(np.int64)
    batch["logits"][-1] = logits_of(model, last, live) * live[:, None]
    kept = np.zeros((rows, length), bool)
    for row, lengths in enumerate(documents):
        for end in np.cumsum(lengths):
            kept[row, end - 4 : end] = True
        kept[row, ::EVERY] = True
    batch["checked"] = kept & (batch["segment_ids"] > 0)
    batch["logits"] = batch["logits"][batch["checked"]]
    return batch


def generate(name: str, model: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Greedy tokens by `generate`, and the logits of the last steps.

    The prompt is the first of some random ones after which no step is near a tie, where rounding would decide.
    """
    prompts = torch.from_numpy(rng.integers(0, 96, (16, PROMPT)))
    margins = [margin(row) for row in greedy(model, prompts)[1].swapaxes(0, 1)]
    first = next(row for row, lead in enumerate(margins) if lead > MARGIN)
    tokens, steps = greedy(model, prompts[first : first + 1])
    assert margin(steps[:, 0]) > MARGIN
    print(name, "prompt", first, "smallest margin", margin(steps[:, 0]), "distinct", len(set(tokens[0].tolist())))
    return {"generated": tokens[0].astype(np.int32), "step_logits": steps[-STEPS:, 0]}


def greedy(model: Any, prompts: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [row, position] of prompts and completions, and logits [step, row, vocab]."""
    found = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences.numpy(), np.stack([logits.float().numpy() for logits in found.logits])


def margin(steps: np.ndarray) -> float:
    """Smallest lead of the likeliest token over the next one, over the spread of the logits [step, vocab]."""
    ordered = np.sort(steps, axis=-1)
    return float(np.min(ordered[:, -1] - ordered[:, -2]) / steps.std())


def signs(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Two random signs for each entry of a tensor."""
    return np.random.default_rng(zlib.crc32(name.encode())).choice([-1.0, 1.0], (2, *shape))


def gradients(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Norm and inner products of the gradient of each tensor, under its name in a saved model."""
    row = torch.from_numpy(tokens.astype(np.int64))
    logits = model(row[None], use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], row[1:]).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    found = {}
    for name, tensor in saved_weights(model).items():
        if not name.endswith("e_score_correction_bias"):
            g = tensor.astype(np.float64)
            products = [float(np.sum(g * sign)) for sign in signs(name, g.shape)]
            found[f"gradient/{name}"] = np.array([np.linalg.norm(g), *products])
    return found


def config_json(model: Any) -> str:
    """The saved config.json."""
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        return json.dumps(json.loads((Path(directory) / "config.json").read_text()))


def main() -> None:
    """Write one file for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(CASES):
        if arguments.names and name not in arguments.names:
            continue
        model, rng = make_model(name, seed), np.random.default_rng(seed)
        weights = {
            f"weights/{key}": (tensor.view(np.uint32) >> 16).astype(np.uint16)
            for key, tensor in saved_weights(model).items()
        }
        weights |= {f"weights/{key}": np.full(shape, NAN, np.uint16) for key, shape in UNUSED.get(name, {}).items()}
        config = config_json(model)
        batch = make_batch(name, model, rng)
        arrays = {**batch, **generate(name, model, rng), **weights}
        arrays |= gradients(model, batch["tokens"][0])  # last: it overwrites the parameters
        path = arguments.directory / f"{name}.npz"
        np.savez_compressed(path, config=np.array(config), **arrays)
        print(path, path.stat().st_size, "std", batch["logits"].std())


if __name__ == "__main__":
    main()
