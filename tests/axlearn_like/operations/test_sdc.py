import pytest

from axlearn_like.operations.sdc import SDCCheck
from mesh.errors import UserError
from tests.axlearn_like.operations.faulty import report
from tests.elsewhere import elsewhere


def test_one_wrong_bit_is_found_with_its_array_and_device():
    told = elsewhere(report, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert told["due"] == [3, 6]
    assert told["same"] and told["compiled"] == 1  # a checked step is the step, by the same program
    for name, device in (("w", 5), ("scale", 2)):  # of `scale` every device holds the whole
        step, [[array, [where]]], message = told[name]
        assert step == 6 and array == f"state/params/{name}" and where.endswith(str(device))
        assert "step 6, computed twice" in message and f"  {array} on {where}\n" in message


def test_never_is_refused():
    with pytest.raises(UserError, match="SDCCheck.every: expected 1 or more, got 0"):
        SDCCheck.Config(every=0).build(mesh=None)
