"""The model that a start begins with: a directory whose weights and tokenizer are checked before anything is spent."""

import dataclasses
from pathlib import Path
from typing import Any, Self

from axlearn_like.checkpoint.convert import WrapPlain
from axlearn_like.checkpoint.pretrained import Pretrained
from axlearn_like.config import replace
from axlearn_like.input.rows.forms import RowForm
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.operations.flops import count_parameters
from axlearn_like.run.object_store import fetched
from axlearn_like.tokenizers.embedding import check_tokenizer
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from experiments.recipes.sizes import Method, with_adapters
from experiments.start.served import is_model, positions, served_model
from mesh.errors import UserError, did_you_mean
from mesh.files.bucket import bucket_url
from models.huggingface import hf, hf_weights
from models.huggingface.checkpoints.directory import ORIGINAL, RECORD, HuggingFaceDirectory


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A model as a start sees it.

    Attributes:
        path: its directory on this machine.
        place: the directory as configs name it, on every machine: a URL, or `path`.
        policy: decoder that begins with its parameters.
        tokenizer: config of its own tokenizer.
        built: the tokenizer.
        parameters: their number.
        context: positions that it knows; None: no limit.
    """

    path: Path
    place: str | Path
    policy: Pretrained.Config
    tokenizer: HuggingFaceTokenizer.Config
    built: Tokenizer
    parameters: int
    context: int | None

    @classmethod
    def read(cls, place: str) -> Self:
        """Read config, headers of the weights, and tokenizer.

        Raises:
            UserError: there is no such directory, it is no model, or weights or tokenizer are missing or do not fit.
        """
        path = fetched(place, "--model")  # a copy, where it is in a bucket
        if not path.is_dir():
            beside = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
            near = did_you_mean(path.name, beside) if beside else ""
            raise UserError(f"--model {place}: there is no such directory{near}")
        if not is_model(path):
            has = ", ".join(sorted(one.name for one in path.iterdir())[:6]) or "nothing"
            expected = "a directory with config.json, *.safetensors and tokenizer.json"
            raise UserError(f"--model {place}: expected {expected}, as of Hugging Face; it has {has}")
        files = path / ORIGINAL if (path / RECORD).is_file() else path
        try:
            found = served_model(path)
            if files == path:
                HuggingFaceDirectory.open(path)
            built: Any = found.tokenizer.build()
            check_tokenizer(found.tokenizer, found.policy)
        except UserError as error:
            raise UserError(f"--model {place}: {error}") from error
        policy, tokenizer = found.policy, found.tokenizer
        assert isinstance(policy, Pretrained.Config) and isinstance(tokenizer, HuggingFaceTokenizer.Config)
        url = bucket_url(place)
        if url is not None and files == path:
            tokenizer = tokenizer.clone(path=url)
        return cls(path, url or path, policy, tokenizer, built, count_parameters(policy), positions(policy))

    def require_template(self, form: RowForm, files: str) -> None:
        """Refuse conversations where the tokenizer has no chat template (UserError)."""
        if self.built.chat_template is None and (form.asks or form.messages is not None):
            raise UserError(
                f"--data {files}: its rows are conversations, and the tokenizer of {self.path} has no chat template; "
                "expected a chat model, or rows of a prompt and an answer as text"
            )

    def trained(self, method: Method, **fields: Any) -> Pretrained.Config:
        """Return the policy to train by a method, with fields of the decoder changed."""
        return {"lora": hf_lora, "int8 lora": hf_int8_lora}.get(method, hf)(self.place, **fields)


def hf_lora(path: str | Path, **fields: Any) -> Pretrained.Config:
    """Return the model of a directory, as `hf`, with LoRA factors around all matrices of its blocks."""
    policy = hf(path, **fields)
    policy.start_from = hf_weights(path, conversions=(WrapPlain.Config(),))
    return with_adapters(policy)


def hf_int8_lora(path: str | Path, **fields: Any) -> Pretrained.Config:
    """Return `hf_lora` with all matrices of its blocks held as int8 numbers."""
    policy = hf_lora(path, **fields)
    replace(policy, LoRA.Config, lambda adapted: adapted.set(base="int8"))
    return policy
