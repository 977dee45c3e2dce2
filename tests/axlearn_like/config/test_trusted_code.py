"""Names in a config's text: nothing runs unless it is of this project or of code that the user has named."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from axlearn_like.config import ConfigError, from_text, get_path, set_path, to_text, trust
from axlearn_like.config.trusted_code import VARIABLE, import_place, remember
from mesh.errors import UserError
from tests.axlearn_like.config.zoo import Model
from tests.test_floors import FLOORS

MINE = """
from axlearn_like.config import ConfigBase, Configurable

class Own(Configurable):
    class Config(ConfigBase["Own"]):
        size: int = 3

    def __init__(self, cfg: Config): ...

def helper(): ...
"""


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's memory and environment for each test, put back afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(VARIABLE, "tests")
    monkeypatch.setattr("axlearn_like.config.trusted_code._files", {})
    monkeypatch.setattr("axlearn_like.config.trusted_code._offered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))


def text_naming(name: str, *fields: str) -> str:
    """A config whose `extra` is what `name` makes."""
    head, *lines = to_text(Model.Config()).splitlines()
    kept = [line for line in lines if not line.startswith("extra:")]
    return "\n".join([head, *kept, f"extra: {name}", *(f"extra.{field}" for field in fields)])


@pytest.mark.parametrize(
    "name",
    [
        "subprocess:getoutput()",
        "os:system",
        "class subprocess:Popen",
        "builtins:exec()",
        "axlearn_like.run.directory:os.unlink()",  # a module within a trusted one
        "axlearn_like.run.directory:Path.unlink()",  # a class of another within a trusted module
        "mesh.errors:did_you_mean()",  # our own functions are called by our own code only
        "jax.numpy:save()",
        "optax:jax.numpy.save()",
    ],
)
def test_the_name_of_foreign_code_is_refused(name: str):
    with pytest.raises(ConfigError) as caught:
        from_text(text_naming(name))
    assert caught.value.path == "extra"
    assert str(caught.value).startswith("extra: ")
    assert "--code" not in str(caught.value), "no advice to trust the standard library"


def test_a_call_in_a_text_runs_nothing_and_imports_nothing(tmp_path: Path):
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef run(): ...\n")
    sys.path.append(str(tmp_path))
    for name, fields in (("subprocess:getoutput()", [f"cmd: 'touch {tmp_path}/called'"]), ("evil_module:run()", [])):
        with pytest.raises(ConfigError, match="a config may not name"):
            from_text(text_naming(name, *fields)).build()
    assert "evil_module" not in sys.modules
    assert not (tmp_path / "imported").exists() and not (tmp_path / "called").exists()


def test_an_edit_within_a_mesh_rule_is_refused_too():
    with pytest.raises(ConfigError, match="a config may not name 'subprocess:getoutput"):
        set_path(Model.Config(), "blocks.0.norm", "subprocess:getoutput()")


def test_calls_of_optax_are_read():
    text = text_naming("optax:clip_by_global_norm()", "max_norm: 1.0")
    assert get_path(from_text(text), "extra.max_norm") == 1.0


def test_a_users_file_is_named_in_the_text_and_trusted_once_named(tmp_path: Path):
    place = tmp_path / "own_code_a.py"
    place.write_text(MINE)
    own = import_place(str(place)).Own
    text = to_text(Model.Config(extra=own.Config(size=4)))
    assert text.splitlines()[-1] == f"# code: {place}"
    assert from_text(text) == Model.Config(extra=own.Config(size=4))


def run(code: str, checkout: Path, *, trusted: str = "tests") -> str:
    """The last line of stderr of another process, or "" if all went well."""
    environment = {"PATH": "", "PYTHONPATH": str(checkout), VARIABLE: trusted, "XDG_STATE_HOME": state(checkout)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def state(_: Path) -> str:
    import os

    return os.environ["XDG_STATE_HOME"]


@pytest.mark.slow
def test_another_process_reads_it_if_the_user_has_named_the_file(tmp_path: Path, checkout: Path):
    place = tmp_path / "own_code_b.py"
    place.write_text(MINE)
    (tmp_path / "config.txt").write_text(to_text(Model.Config(extra=import_place(str(place)).Own.Config())))
    read = f"from axlearn_like.config import from_text; from_text(open({str(tmp_path / 'config.txt')!r}).read())"
    assert f"it is from {place}; if you trust that file, add --code {place}" in run(read, checkout)
    assert run(read, checkout, trusted=f"tests:{place}") == ""  # a child of the command that named it
    remember(str(place))
    assert run(read, checkout) == ""
    moved = place.rename(tmp_path / "elsewhere.py")
    assert f"{place} is not there any more; say where it is now: --code PATH/own_code_b.py" in run(read, checkout)
    (tmp_path / "other").mkdir()
    again = moved.rename(tmp_path / "other" / "own_code_b.py")
    assert run(read, checkout, trusted=f"tests:{again}") == ""


def test_a_home_that_cannot_be_written_to_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    place = tmp_path / "own_code_c.py"
    place.write_text(MINE)
    remember(str(place))
    assert trust(place) == "own_code_c"


def test_a_file_with_the_name_of_a_module_is_refused(tmp_path: Path):
    place = tmp_path / "json.py"
    place.write_text(MINE)
    with pytest.raises(UserError, match=rf"already a module 'json' \({re.escape(json.__file__)}\); rename the file"):
        trust(place)


@pytest.mark.parametrize("room", [room for room in FLOORS if room != "axlearn_like"])
def test_a_folder_beside_the_file_that_has_the_name_of_one_of_ours_is_named(tmp_path: Path, room: str):
    (tmp_path / room).mkdir()
    (tmp_path / room / "my_own_part.py").write_text("x = 1\n")
    place = tmp_path / f"own_code_with_{room}.py"
    place.write_text(f"from {room}.my_own_part import x\n")
    with pytest.raises(UserError, match=rf"imports '{room}.my_own_part', .*rename your folder {tmp_path}/{room}"):
        import_place(str(place))
