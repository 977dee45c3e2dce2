"""The cookbook's own loops on a service, in an environment of theirs (tests/peers/README.md)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.elsewhere import ROOT
from tests.rl.serving.service.real import BASE, TOKENIZER, real_service
from tests.rl.serving.service.wire.running import KEYS

PYTHON = os.environ.get("AXL_COOKBOOK_PYTHON", "")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="AXL_COOKBOOK_PYTHON names no interpreter with tinker-cookbook")
def test_its_supervised_and_its_rl_loop_run_unchanged_but_for_the_address(tmp_path: Path):
    tokenizer = TOKENIZER.build()
    words = [[tokenizer.bos, *tokenizer.encode("2+2?")], [*tokenizer.encode("4"), tokenizer.eos]]
    with real_service(tmp_path / "service") as served:
        command = [PYTHON, str(ROOT / "tests/peers/cookbook_loops.py"), served.url, BASE, str(tmp_path)]
        environment = {**os.environ, "TINKER_API_KEY": KEYS["alice"], "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        done = subprocess.run(
            [*command, *(",".join(map(str, word)) for word in words)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    losses = [row["train_mean_nll"] for row in found["supervised"] if "train_mean_nll" in row]
    assert losses[0] > 4 and losses[-1] < losses[0] / 2
    rewards = [row["env/all/reward/total"] for row in found["rl"] if "env/all/reward/total" in row]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
