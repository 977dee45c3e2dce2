"""The command line ``axl``.

Subcommands are imported when used. An error that a user can cause and fix is printed as one message on
stderr with exit status 2; ``axl --debug ...`` (or ``AXL_DEBUG=1``) shows the traceback as well.
Other exceptions are bugs and always show theirs.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click

from mesh.errors import MachineError, UserError, did_you_mean, printable
from tools.commands import COMMANDS, PLACES
from tools.commands.examples import with_examples

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
_RUN_ARGUMENTS = ("run", "runs", "run_dir", "name", "source", "folder")
_RUN_OPTIONS = ("--run-dir", "--run", "--dir", "--run-directory")


class LazyGroup(click.Group):
    """A group that imports the module of a subcommand only when that subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of ``COMMANDS``, then any that were added at run time."""
        return [*COMMANDS, *(name for name in self.commands if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return its ``command``."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name not in self.list_commands(ctx):
            hint = did_you_mean(cmd_name, self.list_commands(ctx))
            raise UserError(f"axl has no command {cmd_name!r}{hint}")
        return with_examples(import_module(f"tools.commands.{PLACES.get(cmd_name, cmd_name)}").command, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and summaries from the table: no module is imported for ``--help``."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="axlearn-like", prog_name="axl")
@click.option("--debug", is_flag=True, help="Show tracebacks of user errors too.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Train language models and improve them by reinforcement learning, from configs."""
    if debug:
        os.environ["AXL_DEBUG"] = "1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; those of the process if None.

    Returns:
        The exit status: 0 done, 2 a user error, 130 interrupted. Other exceptions pass through.
    """
    status = _status(list(sys.argv[1:] if argv is None else argv) or ["--help"])
    if argv is None and (background := sys.modules.get("mesh.programs.background")):
        background.leave(status)
    return status


def _status(arguments: list[str]) -> int:
    """Run a command; returns the exit status."""
    try:
        result = cli.main(args=arguments, prog_name="axl", standalone_mode=False)
        return result if isinstance(result, int) and not isinstance(result, bool) else 0
    except UserError as error:
        return _refuse(_with_place(error))
    except click.UsageError as error:
        # Click's message may not show the command; its usage line does.
        where = f"\nTry '{error.ctx.command_path} --help'." if error.ctx else ""
        return _refuse(error.format_message() + _right_form(error) + where)
    except click.ClickException as error:
        return _refuse(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        if _debugging():
            traceback.print_exc()
        print("axl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (RuntimeError, AssertionError) as error:
        from mesh.devices import unopened

        if (said := unopened(error)) is None:
            raise
        return _refuse(said)
    except BrokenPipeError:
        # The reader closed the pipe (`axl config show demo | head`); flushing at exit must not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _with_place(error: UserError) -> str:
    """Return the message, with the path of the config that was being built where it does not say so itself."""
    path, said = error.__dict__.get("config_path", ""), str(error)
    return said if isinstance(error, MachineError) or "." not in path or path in said else f"{path}: {said}"


def _right_form(error: click.UsageError) -> str:
    """Return how a run directory is named: by `--run-dir` where a run is made, as an argument where one is read."""
    if error.ctx is None:
        return ""
    parameters = error.ctx.command.params
    option = any("--run-dir" in parameter.opts for parameter in parameters)
    if isinstance(error, click.NoSuchOption) and error.option_name.replace("_", "-") in _RUN_OPTIONS:
        named = next((one.make_metavar(error.ctx) for one in parameters if one.name in _RUN_ARGUMENTS), None)
        right = "--run-dir DIR" if option else named and f"{error.ctx.command_path} {named}"
        return f" A run is named so: {right}" if right else ""
    extra = "unexpected extra argument" in error.message
    return ". A run directory is an option here: --run-dir DIR" if extra and option else ""


def _refuse(message: str) -> int:
    if _debugging():
        traceback.print_exc()
    print(f"axl: error: {printable(message)}", file=sys.stderr)
    return EXIT_USER_ERROR


def _debugging() -> bool:
    return os.environ.get("AXL_DEBUG", "0") not in ("", "0")


if __name__ == "__main__":
    sys.exit(main())
