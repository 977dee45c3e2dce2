import sys

import pytest

from axlearn_like.operations.writers import TensorBoard, WeightsAndBiases
from mesh import UserError

ROW = {"phase": "sft", "step": 3, "time": 1.5, "loss": 0.25, "note": "text", "gone": None}


@pytest.mark.parametrize(
    ("config", "module", "extra"),
    [(TensorBoard.Config(), "tensorboardX", "tensorboard"), (WeightsAndBiases.Config(project="p"), "wandb", "wandb")],
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
    values = [(e.step, v.tag, v.simple_value, e.wall_time) for e in events for v in e.summary.value]
    assert values == [(3, "sft/loss", 0.25, 1.5)] * 2
    assert [e.step for e in events if e.session_log.status == 1] == [3]  # rows from step 3 on are replaced


def records(content):
    """Yield the records of a TFRecord file; each is a length, its checksum, the record, its checksum."""
    while content:
        size = int.from_bytes(content[:8], "little")
        yield content[12 : 12 + size]
        content = content[16 + size :]
