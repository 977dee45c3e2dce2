"""Weight transfer engine `axl` for vLLM: loads a file of weights after it has verified the checksum of every tensor.

This file runs in vLLM's workers, where this project is not installed (`mirror.write_plugin` takes it there): it needs
torch, safetensors and vLLM 0.32. The interface is vLLM's `vllm.distributed.weight_transfer`.
"""

import dataclasses
import hashlib
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "axl"


@dataclasses.dataclass
class NoInfo(WeightTransferInitInfo):
    """Initialisation without settings."""


@dataclasses.dataclass
class WeightsFile(WeightTransferUpdateInfo):
    """A safetensors file that this host can read, and the BLAKE2b digest (16 bytes, hex) of each tensor's bytes."""

    path: str
    digests: dict[str, str]


class VerifyingEngine(WeightTransferEngine):
    """Loads all or nothing: the model is not touched before every tensor is verified."""

    init_info_cls = NoInfo
    update_info_cls = WeightsFile

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` is the whole update."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` is the whole update."""

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""

    def receive_weights(self, update_info: WeightsFile) -> None:
        """Verify the file, then load it.

        Raises:
            ValueError: a tensor is missing, unknown or has other contents; the model is as it was.
        """
        with safe_open(update_info.path, "pt") as file:
            names = list(file.keys())
            if differing := sorted(set(names) ^ set(update_info.digests)):
                raise ValueError(f"{update_info.path}: tensors in the file or in the list alone: {differing[:5]}")
            wrong = [name for name in names if digest(file.get_tensor(name)) != update_info.digests[name]]
            if wrong:
                raise ValueError(f"{update_info.path}: checksums of {len(wrong)} tensors are wrong: {wrong[:5]}")
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, file.get_tensor(name)) for name in names)
            finalize_layerwise_reload(self.model, self.model_config)


def digest(tensor: Any) -> str:
    """Return the digest of a tensor's bytes, in row-major order."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(flat, digest_size=16).hexdigest()


def register() -> None:
    """Register the engine; vLLM calls it in every process, possibly more than once."""
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, VerifyingEngine)
    except ValueError:
        pass  # registered before
