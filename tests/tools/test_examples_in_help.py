"""Each command's help ends in two examples or more. They parse, their experiments and edits are there, some run."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tools.cli import cli, main
from tools.commands.examples import EXAMPLES
from tools.experiment import load_experiment

# Examples that take no time and need nothing; they run.
RUN = (
    "axl config list",
    "axl config show demo trainer.checkpoint",
    "axl config diff demo_sft demo_dpo",
    "axl doctor --only clock,open_files --json",
    "axl models list Qwen3 gemma",
    "axl models show Qwen3-8B",
    "axl verify explain --reference 1.5 --answer 'it is 1 1/2'",
    r"axl verify explain --reference '10\text{ cm}' --answer '10 m' --json",
    "axl data filter rows.csv --longest 2000 --out short.jsonl",
    "axl data dedup rows.jsonl --out once.jsonl",
    "axl data split a.jsonl --every 10 --train b.jsonl --test c.jsonl",
    "axl data train-tokenizer books.txt --vocab-size 2048 --out o",
    "axl runs",
)


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """All commands by name."""
    context = click.Context(command)
    if not isinstance(command, click.Group):
        yield name, command
        yield from ((f"{name} {inner}", other) for inner, other in getattr(command, "commands", {}).items())  # axl rl
        return
    for inner in command.list_commands(context):
        other = command.get_command(context, inner)
        assert other is not None
        yield from leaves(other, f"{name} {inner}")


LEAVES = dict(leaves(cli, "axl"))


def examples(name: str) -> list[str]:
    """The examples at the end of a command's help."""
    command = LEAVES[name]
    shown = command.get_help(click.Context(command, info_name=name, terminal_width=200, max_content_width=200))
    head, _, tail = shown.rpartition("\n  Examples:\n")
    assert head, f"{name}: its help does not end in examples; tools/commands/examples.py has a line for each command"
    return [line.strip() for line in tail.splitlines()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of somebody who has rows and runs."""
    rows = "".join(f'{{"prompt": "What is {n} + {n} and {n * n} more?", "answer": "{2 * n}"}}\n' for n in range(40))
    for name in ("rows.jsonl", "a.jsonl", "books.txt", "keys.txt", "demo.axlrun"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "rows.csv").write_text("prompt,answer\nWhat is 1 + 1?,2\n")
    for run in ("demo", "seed0", "seed1"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_help_ends_in_two_examples_that_parse(name: str) -> None:
    lines = examples(name)
    assert len(lines) >= 2 and len(set(lines)) == len(lines)
    for line in lines:
        assert f"{line} ".startswith(f"{name} ")
        words = shlex.split(line.partition(" | ")[0])[1:]
        context, command = click.Context(cli, info_name="axl"), cli
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None
            command = found
        with command.make_context(name, list(words), parent=context) as parsed:  # refuses what does not parse
            _check_experiment(parsed.params)


def _check_experiment(given: dict[str, object]) -> None:
    """Experiments and edits that an example names are there."""
    if isinstance(name := given.get("experiment"), str):
        load_experiment(name, given.get("sets") or (), applied=given.get("applied") or ())  # pyright: ignore


def test_the_table_has_commands_alone() -> None:
    assert {f"axl {name}" for name in EXAMPLES} <= LEAVES.keys()
    assert set(RUN) <= {line for name in LEAVES for line in examples(name)}


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN)
def test_an_example_runs(line: str) -> None:
    assert main(shlex.split(line)[1:]) == 0
