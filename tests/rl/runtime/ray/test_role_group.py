"""The driver's view of the processes of one role: when they can join, and which of them died first."""

from typing import Any, cast

from rl.runtime.supervision.role_group import RoleGroup


def test_they_begin_when_all_have_started_and_one_that_is_lost_before_has_to_restart() -> None:
    actors: dict[str, Any] = dict.fromkeys(("trainer", "trainer-1", "trainer-2"))
    group = RoleGroup(cast(Any, None), actors)
    assert group.leader == "trainer" and group.several
    assert not group.started("trainer", "a") and not group.started("trainer-2", "b")
    assert group.lost("trainer-2") and not group.lost("trainer-2")
    assert not group.started("trainer-1", "c") and group.started("trainer-2", "d")
    group.begin()
    assert not group.lost("trainer"), "the end of its loop is recorded"
    assert group.reset() == {"trainer": "a", "trainer-1": "c", "trainer-2": "d"}
    assert not group.started("trainer", "e")


def test_the_death_of_the_leader_is_that_of_the_others_too() -> None:
    group = RoleGroup(cast(Any, None), dict.fromkeys(("trainer", "trainer-1", "trainer-2")))
    assert group.first(["trainer-2", "trainer"]) == ["trainer"]
    assert group.first(["trainer-2", "trainer-1"]) == ["trainer-2", "trainer-1"]
