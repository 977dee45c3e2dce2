"""Attacks on the sandbox, each a program that turns to the right answer only if it has succeeded.

The task is to define `solve(x)`, the square of x, or to print the square of the number on standard input; so a score of
1 means that the attack got through. `axl bench verify` and the tests run them.
"""

from rl.verification.sandbox.attacks import exhaust, forge, kernel, leave, look
from rl.verification.sandbox.attacks.attack import STDIN, TESTS, Attack

__all__ = ["ATTACKS", "KINDS", "STDIN", "TESTS", "Attack"]

# Attacks by what they try.
KINDS: dict[str, dict[str, Attack]] = {
    "see": look.ATTACKS,
    "do": kernel.ATTACKS,
    "use up": exhaust.ATTACKS,
    "leave": leave.ATTACKS,
    "forge": forge.ATTACKS,
}

ATTACKS = {name: attack for kind in KINDS.values() for name, attack in kind.items()}
