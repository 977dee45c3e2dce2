"""Names of the package, which are imported when they are first used."""

import pytest

import mesh


@pytest.mark.parametrize("name", mesh.__all__)
def test_a_name_is_there(name: str) -> None:
    assert getattr(mesh, name) is not None


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'mesh' has no attribute 'make_mash'"):
        mesh.make_mash  # noqa: B018
