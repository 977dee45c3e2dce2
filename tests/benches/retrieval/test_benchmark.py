"""`axl bench retrieval`: all parts run on a tiny job, and its reference is the nearest by brute force."""

import json

import numpy as np
from click.testing import CliRunner

from tests.benches.retrieval import data
from tests.benches.retrieval.benchmark import QUICK
from tools.commands.bench import command


def test_the_job_is_the_same_for_a_seed_and_its_tenants_have_what_is_said(tmp_path):
    one, other = data.make(QUICK), data.make(QUICK)
    data.write(tmp_path / "job.npz", one)
    for found in (other, data.read(tmp_path / "job.npz")):
        np.testing.assert_array_equal(found.best, one.best)
        assert all(np.array_equal(*pair) for pair in zip(found.seen, one.seen, strict=True))
    small = [len(one.seen[tenant]) for tenant in one.askers[: QUICK.queries]]
    assert max(small) <= 0.01 * QUICK.documents and len(one.seen) == QUICK.tenants
    assert all(np.isin(best, one.seen[tenant]).all() for tenant, best in zip(one.askers, one.best, strict=True))


def test_all_sections_run_on_a_tiny_job():
    done = CliRunner().invoke(command, ["retrieval", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    figures = json.loads(done.output.splitlines()[-1])
    assert figures["foreign_results"] == 0 and figures["foreign_found"] > 4000
    assert figures["systems"].keys() == {"ours", "ours_per_tenant"} and figures["errors"] == {}
    assert figures["systems"]["ours"]["small_recall"] >= 0.999  # exact: the job is below the border
    assert figures["vs_filtered_ivf"] is None and figures["vs_per_tenant_same_code"] > 0
    assert figures["missing"] == []
