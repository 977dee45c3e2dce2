"""Optimizers on eight devices: the same parameters as on one, and state sharded as the parameters are."""

import json
from typing import Any

import numpy as np
import optax
import pytest

from axlearn_like.config import config_for, to_text
from axlearn_like.learner import EMA, Adafactor, ClipByBlockRMS, Matrixwise, Muon, ParameterGroup, scale_by_soap
from tests.axlearn_like.learner.parameters import DEVICES, learner, sharded_differences
from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

MESHES = ({"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 8})
MATRICES = "inner_states/matrices/inner_state/0"


def several(text: str, soap: str) -> list[Any]:
    # SOAP: updates 2-4 from one state, since null vectors of the first sums are arbitrary; the third turns the bases.
    after_bases = sharded_differences(soap, MESHES[0], updates=4, same_from=1)
    return [*(sharded_differences(text, mesh) for mesh in MESHES), after_bases]


def check_eigenbases(reached: dict[str, Any], given: dict[str, Any]) -> None:
    """Assert that both have the same state, bases being the same up to rotations inside equal eigenvalues."""
    assert reached.keys() == given.keys()
    bases = {path for path in given if path.endswith("/basis")}
    assert len(bases) == 6
    for path in given.keys() - bases:
        np.testing.assert_allclose(reached[path], given[path], atol=1e-5)
    for path in bases:
        gram = np.asarray(given[path.replace("/basis", "/gram")])
        for basis in (np.asarray(reached[path]), np.asarray(given[path])):
            np.testing.assert_allclose(basis.mT @ basis, np.broadcast_to(np.eye(gram.shape[-1]), gram.shape), atol=1e-4)
            diagonal = np.linalg.eigvalsh(gram)[..., ::-1, None] * np.eye(gram.shape[-1])
            np.testing.assert_allclose(basis.mT @ gram @ basis, diagonal, atol=1e-4 * float(diagonal.max()))


@pytest.mark.full
def test_eight_devices_update_as_one_does():
    matrixwise = Matrixwise.Config(direction=config_for(optax.contrib.scale_by_muon))
    cfg = learner(
        Muon.Config(),
        clip_norm=1.0,
        clip=ClipByBlockRMS.Config(limit=0.01),
        ema=EMA.Config(),
        groups=(
            ParameterGroup.Config(match="*moe*", optimizer=Adafactor.Config(min_size=4)),
            ParameterGroup.Config(match="*out_kqhd", optimizer=matrixwise),
        ),
    )
    # By 8 neither stacks of 4 layers nor heads of width 4 can be shared out: there q is gathered.
    second_order = learner(Matrixwise.Config(direction=config_for(scale_by_soap, every=2)))
    texts = [json.dumps(to_text(one)) for one in (cfg, second_order)]
    three_axes, fsdp, soap = elsewhere(several, *texts, environ=DEVICES)
    assert within(three_axes["apart"], 5e-6) and within(fsdp["apart"], 5e-6)
    check_eigenbases(soap["reached"], soap["given"])
    assert within(soap["apart"], 1e-4)  # 5e-7 measured
    first = f"optax/0/{MATRICES}/layers/moe/up_edf"
    assert {soap["spread"][f"{first}/{name}"] for name in ("nu", "left/gram", "right/basis")} == {
        soap["spread"][f"{first}/mu"]
    }
    spread = three_axes["spread"]
    assert spread["ema/layers/attention/q_dkqh"] == "(None, 'fsdp', 'tensor', None, None)"
    assert spread[f"optax/2/inner_states/rest/inner_state/{MATRICES}/mu/layers/attention/q_dkqh"] == (
        "(None, 'fsdp', 'tensor', None, None)"
    )
    factored = "optax/2/inner_states/group0/inner_state/0/0/nu/layers/moe/up_edf"
    assert spread[f"{factored}/inputs"] == "(None, 'expert', 'fsdp')"
    assert spread[f"{factored}/outputs"] == "(None, 'expert', 'tensor')"
    of_matrices = f"optax/2/inner_states/group1/inner_state/0/{MATRICES}/layers/attention/out_kqhd/mu"
    assert spread[of_matrices] == "(('tensor', 'fsdp'), None, None)"
    assert three_axes["collectives"]["all-to-all"] and not three_axes["collectives"]["all-gather"]
    assert fsdp["collectives"]["all-gather"]
