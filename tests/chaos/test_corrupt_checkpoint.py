"""Bytes of the newest checkpoint flip before a restart: it is refused with advice; after that the run resumes."""

import re
import shutil
from pathlib import Path

import pytest

from rl.audit.invariants import check_run
from tests.benches.recovery.compare import compare, make_undisturbed
from tests.benches.recovery.run import COMMAND, PATIENCE_S, WatchedRun
from tests.chaos.experiments import calm
from tests.chaos.faults import flip_bytes

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.full
@pytest.mark.parametrize("target", ["trainer", COMMAND])
def test_a_damaged_checkpoint_is_refused_and_the_run_resumes_from_the_one_before(target: str, tmp_path: Path) -> None:
    with WatchedRun(tmp_path / "run", "tests.chaos.experiments:endless") as run:
        run.start()
        run.wait_for("two checkpoints", lambda: run.saved() >= 6, PATIENCE_S)
        if target == COMMAND:
            run.kill(COMMAND)
            run.wait_for_end(PATIENCE_S)
            run.end()  # its orphans save no more
            damaged = flip_bytes(run.run_dir / "checkpoints" / "rl" / str(run.saved()))
            run.start()
        else:  # the newest one before the trainer can make another
            damaged = flip_bytes(run.run_dir / "checkpoints" / "rl" / str(run.saved()))
            run.kill("trainer")
        assert run.wait_for_end(PATIENCE_S) == 2
        said = run.said()
        found = re.search(r"checkpoint (\S+) is damaged .* older good step is \d+\. Move (\S+) away to go on", said)
        assert found and found[1] == found[2] and damaged.is_relative_to(found[1]), said
        assert "Traceback" not in said
        shutil.rmtree(found[2])  # as it says
        run.start()
        goal = run.step + 5
        run.wait_for(f"update {goal}", lambda: run.step >= goal, PATIENCE_S)
        assert run.stop() == 0
        findings = [finding for finding in check_run(run.run_dir) if "lost" not in finding.invariant]  # it was deleted
        assert [line for finding in findings for line in finding.broken] == []
        assert compare(run.run_dir, make_undisturbed(tmp_path / "calm", calm(run.step)), run.step)["bit_identical"]
