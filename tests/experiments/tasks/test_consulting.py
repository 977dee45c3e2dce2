"""Rules and rewards of the games with frozen policies, against what follows from arithmetic alone."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from axlearn_like.config import from_text, to_text
from experiments.tasks.consulting import QUESTION, Delegate, NimAgainst, delegate, nim_against_itself
from experiments.tasks.expressions import expressions_rl
from rl.environments.environment import Consult
from rl.experiment import RLExperiment
from rl.runtime.policies.configs import check_policies

MOVES = (1, 2, 3)


@cache
def wins(pile: int) -> bool:
    """Return True if who is to move wins with the best play: by trying all moves, not by the rule."""
    return any(taken == pile or (taken < pile and not wins(pile - taken)) for taken in MOVES)


def played(pile: int, moves: tuple[str, ...]) -> tuple[list[str], float | None]:
    """Return what both sides are shown, and the reward of the policy once it is over."""
    game = NimAgainst.Config(consults=("p@-1",)).build()
    game.reset({"pile": pile})
    shown: list[str] = []
    for number, move in enumerate(moves):
        found: Any = game.step(move) if number % 2 == 0 else game.hear(move)
        if isinstance(found, Consult):
            assert (found.policy, found.max_new_tokens, found.reward) == ("p@-1", 1, 0.0)
            shown.append(found.prompt)
            continue
        shown.append(found[0])
        if found[2]:
            return shown, found[1]
        assert found[1] == 0.0
    return shown, None


@pytest.mark.parametrize("pile", range(1, 8))
def test_nim_pays_who_takes_the_last_one_whatever_is_played(pile: int) -> None:
    for moves in itertools.product(MOVES, repeat=pile):
        left, expected, shown = pile, None, list[str]()
        for number, taken in enumerate(moves):
            mover = 1.0 if number % 2 == 0 else -1.0
            if taken > left:
                expected = -mover
            elif taken == left:
                expected = mover
            left -= taken
            shown.append("" if expected is not None else f"{left} left:" if number % 2 == 0 else f" {left} left:")
            if expected is not None:
                break
        assert played(pile, tuple(map(str, moves))) == (shown, expected)


@pytest.mark.parametrize("pile", range(1, 20))
def test_best_moves_are_those_that_keep_a_win(pile: int) -> None:
    game = NimAgainst.Config().build()
    best = [taken for taken in MOVES if taken <= pile and (taken == pile or not wins(pile - taken))]
    assert bool(best) == wins(pile)
    for taken in MOVES:
        game = NimAgainst.Config().build()
        game.reset({"pile": pile})
        game.step(str(taken))
        assert game.figures() == ({"best_moves": float(taken in best)} if wins(pile) else {})


@pytest.mark.parametrize(("first", "second", "reward"), [("x", "1", -1.0), ("4", "1", -1.0), ("1", "?", 1.0)])
def test_what_is_no_move_loses(first: str, second: str, reward: float) -> None:
    assert played(9, (first, second))[1] == reward


def called(text: str) -> str:
    return f"<tool>calculator: {text}</tool>"


@pytest.mark.parametrize(
    ("actions", "reward", "handed_on"),
    [
        (["408"], 1.0, 0.0),
        (["407"], 0.0, 0.0),
        ([called("12 * 34"), "408"], 1.0, 1.0),
        ([called("12 * 34"), called("12 * 34")], 1.0, 1.0),
        ([called("12 * 34"), called("12 *")], 0.0, 1.0),
        ([called("12 * 43"), called("12 * 43")], 0.0, 1.0),
        (["<tool>12 * 34", ""], 0.0, 0.0),
    ],
)
def test_a_product_is_paid_if_it_is_right_whoever_has_found_it(
    actions: list[str], reward: float, handed_on: float
) -> None:
    game: Any = Delegate.Config().build()
    game.reset({"answer": str(12 * 34)})
    found = game.step(actions[0])
    if isinstance(found, Consult):
        expression = actions[0].removeprefix("<tool>calculator: ").removesuffix("</tool>")
        assert found.policy == "base" and found.prompt == QUESTION.format(expression=expression)
        found = game.hear(actions[1])
    assert found == ("", reward, True) and game.figures() == {"handed_on": handed_on}


@pytest.mark.parametrize("make", [nim_against_itself, delegate, expressions_rl])
def test_the_experiments_are_complete_and_read_again(make: Callable[[], RLExperiment.Config]) -> None:
    cfg = make().set(start_from=None)
    assert to_text(from_text(to_text(cfg))) == to_text(cfg)
    check_policies(cfg, "inprocess")
