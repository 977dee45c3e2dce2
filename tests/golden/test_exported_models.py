"""Every architecture's export has been loaded by transformers: the cases, and the recorded differences."""

import json

import pytest

from models.huggingface.architectures import ARCHITECTURES, architecture_for
from tests.golden import parity
from tests.golden.exported_models import cases

RECORDED = json.loads(parity.EXPORTED.read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("name", cases())
def test_a_case_is_of_its_architecture_and_its_export_agreed(name: str):
    architecture, cfg = cases()[name]
    assert architecture_for(cfg).name == architecture == RECORDED[name]["class"]
    assert 0 < RECORDED[name]["relative_difference"] < 1e-5 and RECORDED[name]["same_top_1"] == 1


def test_every_architecture_has_a_case():
    assert ARCHITECTURES.keys() <= {architecture for architecture, _ in cases().values()}
    assert RECORDED.keys() == cases().keys()
