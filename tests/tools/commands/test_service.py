"""`axl service` as a process: it says how to use it, answers the client, keeps its key; wrong options are refused."""

import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

from mesh.errors import UserError
from tests.rl.tiny import tiny_experiment
from tests.tools.commands.test_serve import ROOT, save_run
from tools import cli


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("service") / "mine"
    save_run(path, tiny_experiment())
    return path


def start(run_dir: Path, state: Path) -> tuple["subprocess.Popen[str]", str, str]:
    """Start the command; returns the process, and the address and the key that it prints."""
    arguments = [str(run_dir), "--port", "0", "--slots", "2", "--rank", "3", "--state", str(state)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.cli", "service", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 240)
    lines = [process.stdout.readline() for _ in range(4)] if ready else []
    assert lines[:1] and re.match("serving 2 adapters of 'mine', of rank 3 at most, at http://127.0.0.1:", lines[0]), (
        lines
    )
    found = re.search(r'base_url="(\S+)", api_key="(tml-\S+)"', lines[2])
    assert found and 'base_model="mine", rank=3' in lines[3]
    return process, found[1], found[2]


@pytest.mark.slow
def test_what_it_prints_is_a_client_and_the_key_stays(run_dir: Path, tmp_path: Path) -> None:
    keys: list[str] = []
    for _ in range(2):
        process, url, key = start(run_dir, tmp_path / "state")
        try:
            keys.append(key)
            model = tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client("mine", rank=3).result()
            assert model.get_info().lora_rank == 3
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, out
            assert "Traceback" not in out
        finally:
            process.kill()
    assert keys[0] == keys[1]
    assert (tmp_path / "state" / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines need keys; see --key"),
        (["--key", "alice"], "--key number 1: expected NAME=tml-KEY"),
        (["--keys", "nowhere"], "'nowhere' does not exist"),
        (["--set", "server.session_timout=3"], "'session_timout'.* did you mean 'session_timeout'"),
        (["--set", "server.hold=60"], "ServiceServer.hold: expected seconds, more than 0 and less than 45"),
        (
            ["--key", "alice=tml-a", "--set", "server.shares={'alise': 2.0}"],
            r"server.shares\['alise'\]: there is no such tenant; did you mean 'alice'",
        ),
        (
            ["--key", "alice=tml-a", "--set", "server.quotas={'alice': {'tokens_per_second': 0}}"],
            r"server.quotas\['alice'\].tokens_per_second: expected a finite number above 0",
        ),
        (["--set", "max_new_toknes=3"], "'max_new_toknes'.* did you mean 'max_new_tokens'"),
        (["--seed", "x"], "'x' is not a valid integer"),
    ],
)
def test_a_wrong_option_is_refused(
    run_dir: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["service", str(run_dir), "--port", "0", "--state", str(tmp_path / "s"), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tools.commands.serving.service.find_spec", lambda name: None if name == "tinker" else name)
    assert cli.main(["service", "demo"]) == 2
    said = capsys.readouterr().err
    assert "axl service needs tinker; " in said and "[service]" in said


def test_a_codec_without_the_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl.serving.service.wire.protobuf import ProtobufCodec

    monkeypatch.setitem(sys.modules, "tinker.proto", None)
    with pytest.raises(UserError, match=r"axl service needs the package tinker .*\[service\]"):
        ProtobufCodec()
