"""Files that came from elsewhere are read by the commands: nothing of them is imported, unpickled or started.

Each is written as an attacker would, with names and pickles that leave a mark; a process reads it while Python's audit
hooks report what it does.
"""

import http.server
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from axlearn_like.input.token_cache import DamagedCache, TokenFile, TokenWriter
from tests.axlearn_like.checkpoint.plain.test_chunks import ORDERS, PARAMS, write
from tests.axlearn_like.checkpoint.test_checkpointer import make_state
from tests.axlearn_like.checkpoint.test_tiers import tiers

EVIL = "evil_module"  # a module that is found, and leaves a mark when it is imported
# Reports imports of it, names that a pickle asks for, processes and connections.
WATCH = """
import json, sys
seen = []
def hook(event, args):
    if event == "import" and args[0].startswith("evil_module"):
        seen.append(f"import {args[0]}")
    elif event == "pickle.find_class" and args[0].partition(".")[0] not in ("numpy", "jax", "jaxlib", "collections"):
        seen.append(f"unpickled {args}")
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        seen.append(f"started {args}")
    elif event == "socket.connect" and isinstance(args[1], tuple):
        seen.append(f"connected {args[1]}")
sys.addaudithook(hook)
said = ""
try:
    CODE
except BaseException as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps({"seen": seen, "said": said}))
"""


class Payload:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    """A server that counts who asks it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    asked: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.asked = asked  # pyright: ignore[reportAttributeAccessIssue]
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def watched(folder: Path, code: str, *arguments: str) -> dict[str, Any]:
    """Run code in a process with `folder` in its import path and as its working directory."""
    (folder / f"{EVIL}.py").write_text(f"open({str(folder / 'mark')!r}, 'w')\n")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    script = WATCH.replace("CODE", "\n    ".join(code.strip().splitlines()))
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seen"] == [] and not (folder / "mark").exists()
    return found


RESTORE = """
import numpy as np
from axlearn_like.checkpoint.reader import restore_params
said = str(sorted(restore_params(sys.argv[1])))
"""


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def checkpoint(folder: Path) -> Path:
    one = tiers(folder)
    one.save(1, make_state(1), {"n": 1}, None)
    one.close()
    return folder / "checkpoints" / "1"


@pytest.mark.slow
def test_names_and_pickles_in_a_checkpoint_are_not_followed(tmp_path: Path):
    """Orbax's metadata name handlers and types; its loaders of other forms look for pickles."""
    step = checkpoint(tmp_path / "run")
    handlers = ("params", "rest", "extras", "manifest")
    rewritten(
        step / "_CHECKPOINT_METADATA", lambda m: {**m, "item_handlers": dict.fromkeys(handlers, f"{EVIL}.Handler")}
    )

    def typed(metadata: Any) -> Any:
        for entry in metadata["tree_metadata"].values():
            entry["value_metadata"] = {"value_type": f"{EVIL}.Type", "skip_deserialize": False}
        return {**metadata, "custom_metadata": {"class": f"{EVIL}.Type"}}

    rewritten(step / "params" / "_METADATA", typed)
    for name in ("data.pkl", "params/data.pkl", "params/_sharding", "params/checkpoint.pkl", "state.pkl"):
        (step / name).write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    said = watched(tmp_path, RESTORE, str(step))["said"]
    assert said.startswith("CheckpointError") or "embed" in said or "head" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("ocdbt", "http"),
        ("plain", "file"),
        pytest.param("ocdbt", "file", marks=pytest.mark.full),
        pytest.param("plain", "http", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_leads_to_no_other_store(tmp_path: Path, server: http.server.HTTPServer, form: str, scheme: str):
    """Descriptions of arrays that name another store, and links out of the folder: neither is content (flax#5487)."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"a key of the user's " * 1000)
    if form == "ocdbt":
        step = checkpoint(tmp_path / "run")
    else:
        write(tmp_path / "checkpoints", PARAMS, ORDERS, 10**6)
        step = tmp_path / "checkpoints" / "0"
    assert (step / "params" / "manifest.ocdbt").exists() == (form == "ocdbt")
    url = f"http://127.0.0.1:{server.server_address[1]}/" if scheme == "http" else secret.as_uri()
    if scheme == "file":
        contents = [p for p in (step / "params").rglob("*") if p.parent.name == "d" or p.name.startswith("c.")]
        for path in contents:
            content = secret.read_bytes()[: path.stat().st_size]
            (tmp_path / path.name).write_bytes(content)
            path.unlink()
            path.symlink_to(tmp_path / path.name)
        assert contents
    elif form == "plain":
        for path in (step / "params").rglob("zarr.json"):
            extra = {"kvstore": url, "driver": "zarr3", "storage_transformers": [{"name": "kvstore", "url": url}]}
            rewritten(path, lambda m, extra=extra: {**m, **extra, "codecs": [*m["codecs"], {"name": url}]})
    else:  # a store that is itself a description
        spec = {"driver": "ocdbt", "base": url, "kvstore": url}
        (step / "params" / "manifest.ocdbt").write_text(json.dumps(spec))
    assert watched(tmp_path, RESTORE, str(step))["said"].startswith("CheckpointError")
    assert server.asked == []  # pyright: ignore[reportAttributeAccessIssue]


def token_folder(folder: Path) -> Path:
    writer = TokenWriter(folder, 100)
    writer.add([1, 2, 3, 4], [True] * 4, "here")
    writer.finish()
    return folder


@pytest.mark.parametrize("dtype", ["O", "object", "V2", "<u2,O", "<i8"])
def test_tokens_are_numbers_whatever_their_folder_says(tmp_path: Path, dtype: str):
    """NumPy maps a file as objects if it is told to: numbers of the file become addresses."""
    folder = token_folder(tmp_path / "tokens")
    rewritten(folder / "meta.json", lambda meta: {**meta, "dtype": dtype, "tokens": 1})
    with pytest.raises(DamagedCache, match="dtype"):
        TokenFile(folder, "name", "digest")


@pytest.mark.parametrize("index", ["offsets", "learned", "checks"])
def test_pickles_in_a_folder_of_tokens_are_not_read(tmp_path: Path, index: str):
    folder = token_folder(tmp_path / "tokens")
    np.save(folder / f"{index}.npy", np.array([Payload(tmp_path / "mark")], dtype=object), allow_pickle=True)
    with pytest.raises(DamagedCache):
        TokenFile(folder, "name", "digest")
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_an_extension_type_in_a_table_is_not_unpickled(tmp_path: Path):
    """Arrow and Parquet files may carry the pickle of a Python type (CVE-2023-47248)."""
    mark = pickle.dumps(Payload(tmp_path / "mark"))
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": mark}
    schema = pa.schema([pa.field("prompt", pa.string(), metadata=metadata), pa.field("answer", pa.string())])
    table = pa.table([["q"], ["a"]], schema=schema)
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as out:
        out.write_table(table)
    read = "from pathlib import Path\nfrom axlearn_like.input.rows.tables import read_rows\n"
    read += "list(read_rows(Path(sys.argv[1])))"
    for name in ("rows.parquet", "rows.arrow"):
        watched(tmp_path, read, str(tmp_path / name))


COMMANDS = """
from tools.cli import main
said = [main(words.split()) for words in sys.argv[1:]]
"""


@pytest.mark.slow
def test_a_model_directory_runs_none_of_the_code_that_it_brings(tmp_path: Path):
    """`auto_map` names a class beside the weights, which are pickled: both would run in transformers or torch."""
    model = tmp_path / "model"
    model.mkdir()
    mapped = {
        "auto_map": {"AutoConfig": f"{EVIL}.C", "AutoModelForCausalLM": f"{EVIL}.M", "AutoTokenizer": f"{EVIL}.T"}
    }
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [EVIL], **sizes, **mapped}))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{EVIL}.T", **mapped}))
    (model / f"{EVIL}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    words = f"convert import {model} {tmp_path / 'out'}", f"serve {model} --random-weights"
    assert watched(tmp_path, COMMANDS, *words)["said"] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("text", [f"{EVIL}:C", f"axlearn_like.learner:Optax\ndirection: {EVIL}:f()"])
def test_a_run_directory_that_was_changed_runs_nothing(tmp_path: Path, text: str):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.txt").write_text(f"{text}\n# code: {tmp_path / f'{EVIL}.py'}\n")
    (run / "metrics.jsonl").write_text('{"phase": "rl", "step": 1, "time": 1.0, "reward": 0.5}\n')
    (run / "events.jsonl").write_text('{"time": 1.0, "role": "trainer", "event": "start", "pid": 1}\n')
    (run / "cluster.json").write_text('{"address": "203.0.113.5:6379", "namespace": "x", "token": "theirs"}')
    (run / "run.lock").write_text(f'{{"pid": -1, "host": "x", "started": "{EVIL}:f"}}')
    words = f"eval {run}", f"serve {run}", f"report {run}", f"worker {run}"
    assert watched(tmp_path, COMMANDS, *words)["said"] == [2, 2, 0, 2]
