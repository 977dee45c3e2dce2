"""A text that came from elsewhere: what it reaches outside of its run needs the user's consent."""

import dataclasses
import importlib
import json
import pkgutil
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import ConfigBase, ConfigError, from_text, reach, to_text
from axlearn_like.config import consent as consents
from axlearn_like.config.consent import VARIABLE, allow, allowed, passed_on, remember_consent
from axlearn_like.input.line_formats import PlainText
from axlearn_like.operations.writers import WeightsAndBiases
from rl.environments.openenv import OpenEnvEnvironment
from rl.environments.tools.mcp import MCPServer
from rl.experiment import RLExperiment
from rl.parameter_server.server import ParameterServer
from rl.serving.agents.program import AgentProgram
from rl.training.trainer import PolicyTrainer
from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier
from rl.verification.verifiers.cache import Cached
from rl.verification.verifiers.judge import LLMJudge
from tests.rl.serving.test_policy import policy_params, save
from tests.rl.tiny import tiny_experiment, tiny_run, tiny_tasks
from tests.test_floors import FLOORS
from tools.cli import main
from tools.experiment import load_experiment

KEY = "AWS_SECRET_ACCESS_KEY"
# Fields with which a config makes a user's own program read local files, and nothing more.
READ_ONLY = re.compile(
    r"""(\w+)\.files | StartFrom\.path | HuggingFaceTokenizer\.path | JsonLines\.origin | PlainText\.origin
    | Tls\.(cert|key|ca) | EhrsqlRows\.\w+ | SQLTool\.database | SqlAttempts\.database
    | Server\.allowed_hosts""",
    re.VERBOSE,
)
OUTWARD = re.compile(
    r"url|path|file|folder|dir|cache$|host|database|endpoint|variable|entity|bucket|offload|command|port$"
)

# Packages whose flags change what is computed, and reach nothing.
COMPUTE = ("axlearn_like.layers", "axlearn_like.kernels", "axlearn_like.learner", "rl.objective", "rl.rollout")
# Flags elsewhere that only change numbers, order, what is asked of the run's own processes, or what the user's own
# account at a tracker is shown (another account needs consent as a whole). The text of a run could leave out the
# encryption (`Tls`) as a whole; addresses that other machines reach need `listen:HOST`.
HARMLESS = set(
    """AgentProgram.pure AgentProgram.verify Agents.pure Agents.verify Delegate.pure Delegate.verify Nim.pure Nim.verify
    NimAgainst.pure NimAgainst.verify PlanAndSolve.pure PlanAndSolve.verify
    RoleEnvironment.pure RoleEnvironment.verify PromptPool.same_noise
    Calculator.pure Environment.pure Environment.verify FunctionTool.pure GymEnvironment.pure GymEnvironment.verify
    MCPTool.pure PlainEnvironment.pure PlainEnvironment.verify PythonTool.pure RetrievalTool.pure SQLTool.pure Tool.pure
    SQLTool.writable
    PartialExecution.abort_invalid SqlAttempts.pure SqlAttempts.verify EhrsqlRows.tries
    ToolEnvironment.pure ToolEnvironment.verify OpenEnvEnvironment.pure OpenEnvEnvironment.verify OpenRetrieval.pure
    _Interpreter.pure
    Checkpointer.asynchronous DPO.robust Document.bos Document.eos EhrsqlRows.steps Fleet.allow_idle
    Format.gate Function.gate HeldOutSplit.heldout
    IPO.length_normalised JsonMatch.compare JudgedSource.heldout Length.gate
    HeldOutEvaluator.averaged LossEvaluator.averaged MathVerifier.strict Packing.tree
    ParameterServer.peer_to_peer ParameterServer.shared_memory ParameterServer.verify PolicyTrainer.replay_routing
    PolicyTrainingConfig.replay_routing Preference.chat PreferenceSource.heldout ProcessRewardModel.probabilities
    RLExperiment.stop_at_eos RLExperimentConfig.stop_at_eos SqlQuestions.steps TaskRows.shuffle Term.gate
    SharedCritic.detach TensorBoard.answers TextCalls.described Tls.check_host Tls.verify_clients Trackio.answers
    Verified.gate WeightsAndBiases.answers""".split()
)


class Endpoint(ThreadingHTTPServer):
    """A judge that gives every answer 1, or sends those who ask elsewhere; and what it was sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, str]] = []
        self.elsewhere = ""

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(dict(self.headers))
        if self.server.elsewhere:
            self.send_response(302)
            self.send_header("Location", self.server.elsewhere)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": "SCORE: 1"}}]}).encode())

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def endpoints() -> Iterator[tuple[Endpoint, Endpoint]]:
    with Endpoint() as one, Endpoint() as other:
        threads = [threading.Thread(target=e.serve_forever, kwargs={"poll_interval": 0.02}) for e in (one, other)]
        for thread in threads:
            thread.start()
        yield one, other
        one.shutdown()
        other.shutdown()
        for thread in threads:
            thread.join()


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's memory and environment for each test, put back afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(consents, "_from_text", set())
    monkeypatch.setenv(KEY, "the secret of somebody")


def judged(endpoint: Endpoint) -> RLExperiment.Config:
    """An experiment whose verifier asks an endpoint, with the key of another service."""
    mixture = tiny_tasks()
    judge = LLMJudge.Config(mixture=mixture, url=f"{endpoint.origin}/v1", model="m", key_variable=KEY)
    return tiny_experiment(verifier=Verifier.Config(processes=1, scorer=judge))


@pytest.mark.slow
def test_eval_of_a_strangers_run_sends_nothing_unless_the_user_allows_it(
    endpoints: tuple[Endpoint, Endpoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    endpoint, _ = endpoints
    with tiny_run(tmp_path / "run", judged(endpoint)) as run:
        save(run.checkpoints / "rl", 2, policy_params(2))
    arguments = ["eval", str(run.path), "--problems", "1", "--samples", "1", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    item = f"{KEY}@{endpoint.origin}"
    said = capsys.readouterr().err
    assert f"sends questions, answers and the key in ${KEY} to {endpoint.origin}" in said and f"--allow {item}" in said
    assert endpoint.seen == []
    assert main([*arguments, "--allow", endpoint.origin]) == 2, "the host alone is not the key"
    assert endpoint.seen == []
    assert main([*arguments, "--allow", item]) == 0
    assert [sent["Authorization"] for sent in endpoint.seen] == ["Bearer the secret of somebody"] * 2


def test_a_users_own_program_asks_as_simply_as_ever_and_no_redirect_is_followed(endpoints: tuple[Endpoint, Endpoint]):
    one, other = endpoints
    verifier: Any = judged(one).verifier
    with verifier.build() as service:  # a process of its own reads the config as text
        assert [score.reward for score in service.score([0], ["an answer"])] == [1.0]
    one.elsewhere = f"{other.origin}/v1/chat/completions"
    with pytest.raises(RuntimeError, match="status 302"):
        verifier.scorer.build().score(0, "an answer")
    assert len(one.seen) == 2 and other.seen == []


def outward() -> list[tuple[ConfigBase[Any], str]]:
    """Return configs that reach outside of a run, each with its item."""
    tasks = tiny_tasks()
    scorer = ReasoningGymScorer.Config(mixture=tasks)
    judge = LLMJudge.Config(mixture=tasks, url="https://Judge.example:8443/v1", model="m")
    trainer = PolicyTrainer.Config
    return [
        (judge, "https://judge.example:8443"),
        (judge.clone(key_variable=KEY), f"{KEY}@https://judge.example:8443"),
        (WeightsAndBiases.Config(project="p", entity="theirs"), "wandb:theirs/p"),
        (ParameterServer.Config(offload="s3://theirs/x"), "s3://theirs/x"),
        (ParameterServer.Config(host="0.0.0.0"), "listen:0.0.0.0"),
        (Cached.Config(scorer=scorer, path="/home/somebody/.bashrc"), "/home/somebody/.bashrc"),
        (PlainText.Config(files="x", tokenizer=None, cache="/home/somebody"), "/home/somebody"),
        (Sandbox.Config(allow_unisolated=True), "unisolated"),
        (MCPServer.Config(command=("npx", "server")), "run:npx server"),
        (MCPServer.Config(command=("npx", "server"), variables=(KEY,)), f"{KEY}@run:npx server"),
        (OpenEnvEnvironment.Config(url="https://Games.example/x"), "https://games.example"),
        (AgentProgram.Config(command=("python", "agent.py")), "run:python agent.py"),
        (MCPServer.Config(url="http://127.0.0.1:8000/mcp"), "http://127.0.0.1:8000"),
        (PlainText.Config(files=("a", "gs://theirs/rows.txt"), tokenizer=None), "gs://theirs/rows.txt"),
        (trainer(compiler_options={"xla_dump_to": "folder"}), "xla:xla_dump_to=folder"),
        (trainer(compiler_options={"xla_gpu_cuda_data_dir": "/evil"}), "xla:xla_gpu_cuda_data_dir=/evil"),
    ]


@pytest.mark.parametrize(("cfg", "item"), outward(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_text_reaches_is_refused_before_its_owner_is_made(cfg: ConfigBase[Any], item: str):
    assert passed_on(reach(cfg)) == passed_on([item]), "a program's own"
    cfg = from_text(to_text(cfg))
    assert passed_on(reach(cfg)) == "", "a text's are not passed on to other processes"
    values = {name: 1 for name, value in vars(cfg).items() if repr(value) == "REQUIRED"}
    with pytest.raises(ConfigError, match="only with your consent") as caught:
        cfg.clone().build(**values) if not isinstance(cfg, PolicyTrainer.Config) else consents.check_consent(
            cfg.reaches(), "trainer"
        )
    assert "--allow" in str(caught.value) and item in str(caught.value)
    allow([item])
    consents.check_consent(cfg.reaches(), "here")


def test_what_mesh_rules_of_a_text_would_set_counts_too():
    rules = ((".*", {"trainer.compiler_options": {"xla_dump_to": "x"}, "verifier.scorer": None}),)
    text = to_text(tiny_experiment(mesh_rules=rules))
    assert list(reach(from_text(text))) == ["xla:xla_dump_to=x"]
    with pytest.raises(ConfigError, match=r"--allow xla:xla_dump_to=x"):
        consents.check_consent(["xla:xla_dump_to=x"], "trainer")


def own_experiment() -> RLExperiment.Config:
    judge = LLMJudge.Config(mixture=tiny_tasks(), url="https://own.example/v1", model="m", key_variable="OWN_KEY")
    return tiny_experiment(verifier=Verifier.Config(scorer=judge))


def test_what_an_experiment_of_the_command_line_reaches_is_allowed_in_later_commands(monkeypatch: pytest.MonkeyPatch):
    cfg = load_experiment("tests.tools.commands.test_consent:own_experiment")
    monkeypatch.setenv(VARIABLE, "")  # the next command, `axl eval RUN`
    read: Any = from_text(to_text(cfg))
    consents.check_consent(reach(read), "config")
    assert passed_on(reach(read)) == "OWN_KEY@https://own.example"
    read.verifier.scorer.url = "https://other.example/v1"
    with pytest.raises(ConfigError, match=r"OWN_KEY@https://other.example"):
        other: Any = from_text(to_text(read))
        other.verifier.build()


def test_what_an_own_experiment_reaches_is_remembered_but_never_code_without_a_sandbox(monkeypatch: pytest.MonkeyPatch):
    remember_consent(["https://judge.example", "unisolated"])
    assert allowed() == {"https://judge.example", "unisolated"}
    monkeypatch.setenv(VARIABLE, "")  # the next command
    assert allowed() == {"https://judge.example"}


def config_classes(cls: type = ConfigBase) -> Iterator[type]:
    for found in cls.__subclasses__():
        yield found
        yield from config_classes(found)


def our_config_classes() -> list[type]:
    """Return the config classes of all packages but `tools`, once their modules are imported."""
    rooms = FLOORS.keys() - {"tools"}
    for room in sorted(rooms):
        for module in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
            importlib.import_module(module.name)
    return [cls for cls in config_classes() if cls.__module__.partition(".")[0] in rooms]


def title(cls: type, field: dataclasses.Field[Any]) -> str:
    return f"{cls.__qualname__.removesuffix('.Config')}.{field.name}"


def test_every_field_that_sounds_as_if_it_led_outside_has_an_answer():
    """Ask for `reaches` of its class, or for a field that names what is only read on this machine."""
    found, unanswered = 0, []
    for cls in our_config_classes():
        for field in dataclasses.fields(cls):
            if "str" in str(field.type) and OUTWARD.search(field.name) and field.name != "messages":
                found += 1
                if cls.reaches is ConfigBase.reaches and not READ_ONLY.fullmatch(title(cls, field)):
                    unanswered.append(f"{cls.__module__}: {title(cls, field)}")
    assert found >= 15
    assert unanswered == []


def test_a_flag_of_a_text_only_computes_or_needs_consent():
    """A new flag is told of by `reaches` when it is switched, or listed here once somebody has looked at it."""
    flags = {
        title(cls, field): (cls, field)
        for cls in our_config_classes()
        for field in dataclasses.fields(cls)
        if "bool" in str(field.type) and not cls.__module__.startswith(COMPUTE)
    }
    reaching = set()
    for name, (cls, field) in flags.items():
        cfg: Any = cls()
        before = set(reach(cfg))
        setattr(cfg, field.name, not getattr(cfg, field.name))
        if set(reach(cfg)) != before:
            reaching.add(name)
    assert reaching == {"Limits.allow_unisolated", "Sandbox.allow_unisolated"}  # the fields, and who has them
    assert set(flags) - reaching == HARMLESS
