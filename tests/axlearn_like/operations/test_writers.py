import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.operations.writers import TensorBoard, Trackio, WeightsAndBiases
from axlearn_like.run.events import EventLog
from mesh import UserError

ROW = {"phase": "sft", "step": 3, "time": 1.5, "loss": 0.25, "note": "text", "gone": None}


@pytest.mark.parametrize(
    ("config", "module", "extra"),
    [
        (TensorBoard.Config(), "tensorboardX", "tensorboard"),
        (WeightsAndBiases.Config(project="p"), "wandb", "wandb"),
        (Trackio.Config(project="p"), "trackio", "trackio"),
    ],
)
def test_a_writer_that_is_not_installed_names_its_extra(tmp_path, monkeypatch, config, module, extra):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not
    monkeypatch.setattr(sys, "meta_path", [Absent(module), *sys.meta_path])
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UserError, match=rf"needs {module}.*pip install .*\[{extra}\]"):
        config.build(run_dir=tmp_path, resume_step=0)


class Absent:
    """A finder to which one module does not exist."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_tensorboard_gets_the_numbers_of_a_row(tmp_path):
    event_of = pytest.importorskip("tensorboardX.proto.event_pb2").Event.FromString
    for resume_step in (0, 2):
        writer = TensorBoard.Config().build(run_dir=tmp_path, resume_step=resume_step)
        writer.write(ROW)
        writer.close()
    files = sorted((tmp_path / "tensorboard").iterdir())
    found = [record for path in files for record in records(path.read_bytes())]
    events = [event_of(record) for record in found]
    scalars = [(e, v) for e in events for v in e.summary.value if not v.tag.startswith("_hparams_")]
    values = [(e.step, v.tag, v.simple_value, e.wall_time) for e, v in scalars]
    assert values == [(3, "sft/loss", 0.25, 1.5)] * 2
    assert [e.step for e in events if e.session_log.status == 1] == [3]  # rows from step 3 on are replaced


def records(content):
    """Yield the records of a TFRecord file; each is a length, its checksum, the record, its checksum."""
    while content:
        size = int.from_bytes(content[:8], "little")
        yield content[12 : 12 + size]
        content = content[16 + size :]


ANSWER = {"family": "sums", "question": "1 + 1 | \n2?", "answer": "<b>2", "expected": "2", "reward": 1.0}


def told(writer: Any, run_dir: Path) -> None:
    """Write a row while the run answers and raises an alarm."""
    for step, reward in ((1, 0.0), (2, 1.0)):
        EventLog(run_dir / "rollouts" / "rl.jsonl").append("controller", "sample", phase="rl", step=step, **ANSWER)
        EventLog(run_dir / "events.jsonl").append("driver", "alarm", step=step, text=f"alarm ess at update {step}: few")
        writer.write({"phase": "rl", "step": step, "time": 1.0, "reward": reward})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    (path / "rollouts").mkdir(parents=True)
    (path / "config.txt").write_text("rl.x:X\nnum_steps: 7\npolicy: a.b:C\npolicy.name: 'x'\nsizes: (1, 2)\n")
    EventLog(path / "rollouts" / "rl.jsonl").append("controller", "sample", phase="rl", step=0, question="of before")
    EventLog(path / "events.jsonl").append("driver", "alarm", step=0, text="alarm of before")
    return path


def test_tensorboard_gets_config_answers_and_alarms(run_dir: Path):
    event_of = pytest.importorskip("tensorboardX.proto.event_pb2").Event.FromString
    plugin = pytest.importorskip("tensorboardX.proto.plugin_hparams_pb2").HParamsPluginData
    writer = TensorBoard.Config().build(run_dir=run_dir, resume_step=0)
    told(writer, run_dir)
    writer.close()
    [path] = (run_dir / "tensorboard").iterdir()
    found = [v for record in records(path.read_bytes()) for v in event_of(record).summary.value]
    texts = [(v.tag, v.tensor.string_val[0].decode()) for v in found if v.metadata.plugin_data.plugin_name == "text"]
    alarms = [text for tag, text in texts if tag.startswith("alarms")]
    assert alarms == ["alarm ess at update 1: few", "alarm ess at update 2: few"]
    [first, _] = [text for tag, text in texts if tag.startswith("answers")]
    assert first.splitlines()[2] == "| rl | 1 | sums | 1 + 1 \\| 2? | <b>2 | 2 | 1.0 |"
    [start] = [v for v in found if v.tag == "_hparams_/session_start_info"]
    fields = plugin.FromString(start.metadata.plugin_data.content).session_start_info.hparams
    assert fields["num_steps"].number_value == 7 and fields["policy.name"].string_value == "x"


def pieces(content: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: blocks of 32 KiB as LevelDB's log has them, after seven bytes."""
    at, data = 7, b""
    while at + 7 <= len(content):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        data += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its end
            yield data
            data = b""


def test_wandb_gets_config_answers_and_alarms(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = WeightsAndBiases.Config(project="p").build(run_dir=run_dir, resume_step=0)
    told(writer, run_dir)
    writer.close()
    [path] = run_dir.glob("wandb/offline-*/*.wandb")
    found, until = list[Any](), time.monotonic() + 30
    while not any(r.HasField("exit") for r in found) and time.monotonic() < until:  # its own process writes the file
        found = [wandb_internal_pb2.Record.FromString(data) for data in pieces(path.read_bytes())]
    config = {
        item.key or item.nested_key[0]: json.loads(item.value_json) for r in found for item in r.run.config.update
    }
    assert (config["num_steps"], config["policy.name"], config["sizes"]) == (7, "x", [1, 2])
    assert [r.alert.text for r in found if r.HasField("alert")] == [f"alarm ess at update {n}: few" for n in (1, 2)]
    rows = [
        {item.key or item.nested_key[0]: item.value_json for item in r.history.item} for r in found if r.history.item
    ]
    assert [json.loads(row["rl/reward"]) for row in rows] == [0.0, 1.0]
    tables = [json.loads(file.read_text()) for file in run_dir.glob("wandb/offline-*/files/media/table/*.json")]
    assert sorted(table["data"][0][:3] for table in tables) == [["rl", 1, "sums"], ["rl", 2, "sums"]]
    assert tables[0]["columns"][3:5] == ["question", "answer"] and tables[0]["data"][0][4] == "<b>2"


def test_answers_stay_here_if_that_is_asked_for(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = WeightsAndBiases.Config(project="p", answers=False).build(run_dir=run_dir, resume_step=0)
    told(writer, run_dir)
    writer.close()
    assert list(run_dir.glob("wandb/offline-*/*.wandb")) != [] and list(run_dir.rglob("*.table.json")) == []
    assert all(b"<b>2" not in path.read_bytes() for path in (run_dir / "wandb").rglob("*") if path.is_file())


def test_trackio_gets_config_answers_and_alarms(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    writer = Trackio.Config(project="p").build(run_dir=run_dir, resume_step=0)
    told(writer, run_dir)
    writer.close()
    [path] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as base:
        [(config,)] = base.execute("SELECT config FROM configs")
        rows = [(step, json.loads(text)) for step, text in base.execute("SELECT step, metrics FROM metrics")]
        alarms = [text for (text,) in base.execute("SELECT text FROM alerts")]
    assert json.loads(config)["policy.name"] == "x"
    assert [(step, row["rl/reward"]) for step, row in rows] == [(1, 0.0), (2, 1.0)]
    assert [row["answers"]["_value"][0]["answer"] for _, row in rows] == ["<b>2"] * 2
    assert alarms == [f"alarm ess at update {n}: few" for n in (1, 2)]
