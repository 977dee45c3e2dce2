"""`axl bench`: benchmarks of everybody, and those of a checkout."""

import pytest

from tools.cli import main
from tools.commands.bench.group import OF_THE_CHECKOUT, command


def test_help_lists_both_kinds_apart(capfd: pytest.CaptureFixture[str]):
    assert main(["bench", "--help"]) == 0
    own, _, of_checkout = capfd.readouterr().out.partition("Commands of the checkout")
    names = {line.split()[0] for line in of_checkout.splitlines()[1:] if line.startswith("  ") and line[2] != " "}
    assert names == set(OF_THE_CHECKOUT) and "  weights " in own
    assert names < command.commands.keys()
