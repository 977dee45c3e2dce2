"""Optimizers on eight devices: the same parameters as on one, and state sharded as the parameters are."""

import json
from typing import Any

import pytest

from axlearn_like.config import to_text
from axlearn_like.learner import EMA, Adafactor, ClipByBlockRMS, Muon, ParameterGroup
from tests.axlearn_like.learner.parameters import DEVICES, learner, sharded_differences
from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

MESHES = ({"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 8})
MATRICES = "inner_states/matrices/inner_state/0"


def several(text: str) -> list[Any]:
    return [sharded_differences(text, mesh) for mesh in MESHES]


@pytest.mark.full
def test_eight_devices_update_as_one_does():
    cfg = learner(
        Muon.Config(),
        clip_norm=1.0,
        clip=ClipByBlockRMS.Config(limit=0.01),
        ema=EMA.Config(),
        groups=(ParameterGroup.Config(match="*moe*", optimizer=Adafactor.Config(min_size=4)),),
    )
    # By 8 neither stacks of 4 layers nor heads of width 4 can be shared out: there q is gathered.
    three_axes, fsdp = elsewhere(several, json.dumps(to_text(cfg)), environ=DEVICES)
    assert within(three_axes["apart"], 5e-6) and within(fsdp["apart"], 5e-6)
    spread = three_axes["spread"]
    assert spread["ema/layers/attention/q_dkqh"] == "(None, 'fsdp', 'tensor', None, None)"
    assert spread[f"optax/2/inner_states/rest/inner_state/{MATRICES}/mu/layers/attention/q_dkqh"] == (
        "(None, 'fsdp', 'tensor', None, None)"
    )
    factored = "optax/2/inner_states/group0/inner_state/0/0/nu/layers/moe/up_edf"
    assert spread[f"{factored}/inputs"] == "(None, 'expert', 'fsdp')"
    assert spread[f"{factored}/outputs"] == "(None, 'expert', 'tensor')"
    assert three_axes["collectives"]["all-to-all"] and not three_axes["collectives"]["all-gather"]
    assert fsdp["collectives"]["all-gather"]
