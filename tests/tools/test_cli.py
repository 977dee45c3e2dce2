"""The command line starts fast and answers mistakes with one message."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from mesh.errors import UserError
from tools import cli


def run_and_list_modules(code: str, checkout: Path) -> tuple[int, set[str]]:
    """Run `code` in a fresh interpreter; return its exit status and the imported modules."""
    script = f"import sys\n{code}\nprint('MODULES', *sorted(sys.modules))\nsys.exit(status)"
    done = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert "MODULES" in done.stdout, done.stderr
    return done.returncode, set(done.stdout.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"]])
def test_nothing_heavy_is_imported_for_a_glance(arguments: list[str], checkout: Path) -> None:
    code = f"from tools.cli import main\nstatus = main({arguments!r})"
    _, modules = run_and_list_modules(code, checkout)
    assert not modules & {"jax", "flax", "ray", "numpy", "orbax.checkpoint", "reasoning_gym"}


def test_help_names_every_command_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    context = click.Context(cli.cli)
    for name in cli.cli.list_commands(context):
        assert f"\n  {name} " in text
        assert isinstance(cli.cli.get_command(context, name), click.Command)


def test_without_arguments_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    assert "Usage: axl" in printed.out and printed.err == ""


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["confg", "list"]) == 2
    assert "'confg'; did you mean 'config'?" in capsys.readouterr().err


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--frobnicate"]) == 2
    assert "--frobnicate" in capsys.readouterr().err


class Broken(UserError, ValueError):
    """An error of any package, for the tests."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the commands `refuse` (a user's mistake), `unopened`, `crash` (a bug) and `interrupt` to axl."""
    monkeypatch.delenv("AXL_DEBUG", raising=False)
    errors = {
        "refuse": Broken("no mesh axis 'fdsp'"),
        "crash": ValueError("a bug"),
        "unopened": RuntimeError("Unable to initialize backend 'tpu': INTERNAL: no libtpu.so"),
        "interrupt": KeyboardInterrupt(),
    }

    def command(name: str) -> click.Command:
        @click.command(name)
        def raises() -> None:
            raise errors[name]

        return raises

    for name in errors:
        monkeypatch.setitem(cli.cli.commands, name, command(name))


@pytest.mark.usefixtures("failing")
def test_a_user_error_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["refuse"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "axl: error: no mesh axis 'fdsp'\n"
    assert captured.out == ""


@pytest.mark.usefixtures("failing")
def test_debug_shows_the_traceback_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXL_DEBUG", "0")
    assert cli.main(["--debug", "refuse"]) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert captured.err.endswith("axl: error: no mesh axis 'fdsp'\n")


@pytest.mark.usefixtures("failing")
def test_devices_that_cannot_be_opened_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["unopened"]) == 2
    assert capsys.readouterr().err.startswith("axl: error: jax cannot open the devices of this machine: Unable to")


@pytest.mark.usefixtures("failing")
def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["crash"])


@pytest.mark.usefixtures("failing")
def test_an_interrupt_has_its_own_status() -> None:
    assert cli.main(["interrupt"]) == 130
