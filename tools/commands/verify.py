"""`axl verify explain`: how the verifier of mathematical answers reads a reference and an answer, and its verdict."""

from __future__ import annotations

import json

import click


@click.group("verify")
def command() -> None:
    """Try verifiers on single answers."""


@command.command("explain")
@click.option("--reference", required=True, metavar="TEXT", help="The right answer, as rows of data have it.")
@click.option("--answer", required=True, metavar="TEXT", help="What a policy wrote.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _explain(reference: str, answer: str, as_json: bool) -> None:
    """Print how MathVerifier reads REFERENCE and ANSWER, and why they are equal or not."""
    from rl.verification.verifiers.math import MathVerifier
    from rl.verification.verifiers.self_test import Rows

    rows = Rows.Config(rows=({"question": "", "answer": reference},))
    found, wanted, verdict = MathVerifier(MathVerifier.Config(mixture=rows)).explain(answer, reference)
    if as_json:
        read = {"reference": str(wanted), "answer": str(found)}
        click.echo(json.dumps({**read, "equal": verdict.equal, "reason": verdict.reason}))
        return
    click.echo(f"reference: {wanted}\nanswer:    {found}")
    click.echo(f"{'equal' if verdict.equal else 'not equal'}: {verdict.reason}")
