"""Commands on runs, models and data in a bucket."""

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import to_text
from axlearn_like.input.line_formats import JsonLines
from axlearn_like.input.rows.tables import find_tables, read_rows
from axlearn_like.run import mirror
from axlearn_like.run.directory import RunDirectory
from experiments import registry
from mesh.errors import UserError
from mesh.files.bucket import Bucket
from models.huggingface import hf
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from rl.experiment import RLExperiment
from rl.parameter_server.store.offload import OffloadStore
from rl.runtime.run import RLRun
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.datasets import rows
from rl.tasks.rows.sources import with_fetched_files
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier
from tests.axlearn_like.input.data import BYTES
from tests.axlearn_like.tiny import tiny_trainer
from tests.bucket_server import BucketServer, bucket_server
from tools import cli
from tools.watch.live import Follower
from tools.watch.serve import ReportServer

RUN, MODEL = "gs://bucket/runs/one", "gs://bucket/models/one"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with pytest.MonkeyPatch.context() as patch, bucket_server(patch) as found:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(mirror, "_POLL", 0.05)
        yield found


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(server: BucketServer) -> dict[str, Any]:
    """A run in the bucket whose best checkpoint, of step 4, is not its newest."""
    best = KeepBest.Config(metric="lr", order="lowest")
    return tiny_trainer(8, keep_best=best).build().run(RUN, progress=False)


@pytest.mark.slow
def test_a_run_is_read_by_its_url(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    elsewhere(monkeypatch, tmp_path)
    assert trained["step"] == 8
    assert cli.main(["report", RUN]) == 0
    printed = capsys.readouterr()
    assert f"report: {tmp_path}/home" in printed.out and "SFT step 8" in printed.out
    assert cli.main(["compare", RUN, f"{RUN}/"]) == 2
    assert "the same run twice" in capsys.readouterr().err, "it was read"
    newest, four = restore_params(RUN), restore_params(f"{RUN}@4")
    assert not np.array_equal(newest["embedding"]["weight_vd"], four["embedding"]["weight_vd"])
    with pytest.raises(UserError, match=r"one@7 is no checkpoint"):
        restore_params(f"{RUN}@7")


@pytest.mark.slow
def test_runs_are_listed_and_watched_by_their_urls_and_nothing_is_written(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(mirror, "_LOGS", 0.05)
    live, there = "gs://bucket/runs/sweep/live", Bucket("gs://bucket/runs", "x")

    def shown(*words: str) -> str:
        assert cli.main(list(words)) == 0, capsys.readouterr().err
        printed = capsys.readouterr()
        assert not printed.err
        return " ".join(printed.out.split())

    def wait(text: str) -> None:
        for _ in range(100):
            if text.encode() in b"".join(there.read(n) for n in there.files() if n == "sweep/live/metrics.jsonl"):
                return
            time.sleep(0.1)

    with RunDirectory.open(live, to_text(tiny_trainer(30))) as run:
        run.metrics_path.write_text('{"phase": "sft", "step": 7, "loss": 0.5}\n')
        wait('"step": 7')
        elsewhere(monkeypatch, tmp_path)
        before = there.files()
        listing = shown("runs", "gs://bucket/runs")
        assert f"{live} running sft 7 of 30 loss 0.5" in listing and f"{RUN} finished sft 8 of 8" in listing
        assert listing.count("gs://") == 2, "each once"
        assert f"live running sft step 7 of 30 process {os.getpid()}" in shown("watch", live, "--once")
        follower = Follower(mirror.fetch_logs(live), partial(mirror.fetch_logs, live))
        monkeypatch.setattr("tools.watch.live.FETCHES", 0.0)
        assert follower.read().metrics[-1]["step"] == 7
        assert there.files().keys() == before.keys(), "no owner, no lock"
        with open(run.metrics_path, "a") as file:
            file.write('{"phase": "sft", "step": 8, "loss": 0.4}\n')
        wait('"step": 8')
        assert follower.read().metrics[-1]["step"] == 8
        with ReportServer(follower.read().path, 0, partial(mirror.fetch_logs, live)) as page:
            asked = f"/{page.url.rpartition('/')[2]}", f"127.0.0.1:{page.server_port}"
            run.metrics_path.write_text('{"phase": "sft", "step": 9, "loss": 0.25}\n')
            wait('"step": 9')
            status, body = page.answer(*asked)
            assert status == 200 and b"running" in body and b"0.25" in body
    assert "live stopped" in shown("watch", live), "it ends with the run"
    assert not list((tmp_path / "home").rglob("checkpoints")), "weights are not fetched"
    assert cli.main(["watch", "gs://bucket/runs/none"]) == 2
    assert "gs://bucket/runs/none holds nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_the_policies_of_a_run_in_a_bucket_are_listed_and_reported(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    elsewhere(monkeypatch, tmp_path)
    for folder in ("", "policies/lr=1", "policies/lr=2", "warm_start", "policies/lr=2/warm_start"):
        path = tmp_path / "many" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "metrics.jsonl").write_text('{"phase": "rl", "step": 3, "reward": 0.25}\n')
    files = [file for file in (tmp_path / "many").rglob("*") if file.is_file()]
    Bucket("gs://bucket/many", "x").put({str(file.relative_to(tmp_path / "many")): file for file in files})
    assert cli.main(["runs", "gs://bucket/many"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "gs://" in line]
    assert rows == [f"gs://bucket/many{name}" for name in ("", "/policies/lr=1", "/policies/lr=2")]
    assert cli.main(["report", "gs://bucket/many"]) == 0
    printed = capsys.readouterr().out
    assert "2 policies" in printed and "lr=1" in printed and "lr=2" in printed


@pytest.mark.slow
def test_a_finished_run_is_not_done_again_on_another_machine(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    elsewhere(monkeypatch, tmp_path)
    best = KeepBest.Config(metric="lr", order="lowest")
    again = tiny_trainer(8, keep_best=best).build().run(RUN, progress=False)
    assert again["before"] and again["loss"] == trained["loss"]


@pytest.mark.slow
def test_models_are_exported_to_a_bucket_and_read_from_it(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    elsewhere(monkeypatch, tmp_path)
    assert cli.main(["convert", "export", RUN, "local"]) == 0, capsys.readouterr().err
    assert cli.main(["convert", "export", RUN, MODEL]) == 0, capsys.readouterr().err
    there = Bucket(MODEL, "x")
    assert set(there.files()) == set(os.listdir("local"))
    assert there.read("model.safetensors") == Path("local/model.safetensors").read_bytes()
    assert cli.main(["convert", "export", RUN, MODEL]) == 2
    assert f"{MODEL} holds files already; expected a folder that is not there yet" in capsys.readouterr().err
    policy, same = hf(MODEL), hf("local")
    assert to_text(policy).replace(MODEL, str(tmp_path / "local")) == to_text(same), "the config keeps the URL"
    assert not list((tmp_path / "home").rglob("models/one/*.safetensors")), "weights are not fetched yet"
    assert cli.main(["models", "show", MODEL]) == 0
    assert set(HuggingFaceDirectory.open(MODEL).tensors) == set(HuggingFaceDirectory.open("local").tensors)


def test_data_are_read_by_urls(server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    elsewhere(monkeypatch, tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["three"]}), "c.parquet")
    there = Bucket("gs://bucket/data", "x")
    there.put({"train/c.parquet": Path("c.parquet")})
    for name, text in (("a", "one"), ("b", "two")):
        there.write(f"{name}.jsonl", json.dumps({"text": text}).encode())
    source = JsonLines.Config(files="gs://bucket/data/?.jsonl", tokenizer=BYTES).build()
    assert len(source) == 2
    monkeypatch.setenv("HERE", "gs://bucket/data")
    (path,) = find_tables("$HERE/train", "c")
    assert [row for row, _ in read_rows(path)] == [{"text": "three"}]


def rewards_of_a_bucket() -> Verifier.Config:
    Bucket("gs://bucket/rows", "x").write("r.jsonl", json.dumps({"question": "2 + 3?", "answer": "5"}).encode())
    mixture = TaskMixture.Config(families=(rows("gs://bucket/rows/*.jsonl").set(label="sums"),))
    return Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=mixture), processes=1)


def test_rows_of_a_bucket_are_copies_for_processes_without_its_rights(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    elsewhere(monkeypatch, tmp_path)
    cfg = rewards_of_a_bucket()
    here = with_fetched_files(cfg)
    assert "gs://" in to_text(cfg) and "gs://" not in to_text(here)
    server.requests.clear()
    assert cast(Any, here.scorer).mixture.build().train(0).answer == "5" and not server.requests
    local = cfg.clone()
    cast(Any, local.scorer).mixture.families[0].rows.set(files="r.jsonl")
    assert with_fetched_files(local) is local, "nothing to fetch"


@pytest.mark.full
def test_rewards_of_rows_in_a_bucket_are_computed_in_processes_without_its_rights(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    elsewhere(monkeypatch, tmp_path)
    cfg = registry.get("demo").set(verifier=rewards_of_a_bucket())
    with RLExperiment.make_verifier(cast(Any, SimpleNamespace(cfg=cfg))) as verifier:
        assert [one.reward for one in verifier.score([0, 0], ["5", "6"])] == [1.0, 0.0]


def test_offloaded_versions_go_to_a_bucket(server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    elsewhere(monkeypatch, tmp_path)
    store = OffloadStore("gs://bucket/versions", 2)
    store.save(3, "manifest", [("w", ((0, 4),), np.arange(4.0))])
    text, shards = store.load(3)
    assert text == "manifest" and [array.tolist() for _, _, array in shards] == [[0.0, 1.0, 2.0, 3.0]]


@pytest.mark.slow
def test_roles_on_other_machines_need_a_common_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    job = RLRun(registry.get("demo").build())
    with pytest.raises(UserError, match=r"gs://bucket/x: roles on other machines.*RAY_ADDRESS.*gcsfuse"):
        job.check("ray", "gs://bucket/x")  # before the cluster is asked
    job.check("inprocess", "gs://bucket/x")  # one process, whatever the environment says
    monkeypatch.delenv("RAY_ADDRESS")
    apart: Any = registry.get("demo")
    apart.fleet = apart.fleet.edited("trainer=cpu:1,workers=2xcpu:1")  # of this machine, without a cluster
    RLRun(apart.build()).check("ray", "gs://bucket/x")
