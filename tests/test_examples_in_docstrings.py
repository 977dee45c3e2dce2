"""Examples in docstrings run and print what they say; the classes that users meet first have one."""

import ast
import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("mesh", "axlearn_like", "models", "rl", "experiments", "tools")
FIRST_MET = (
    "axlearn_like.config.base.Configurable",
    "axlearn_like.layers.decoder.Decoder",
    "axlearn_like.layers.attention.grouped_query.Attention",
    "axlearn_like.layers.moe.layer.MoE",
    "axlearn_like.layers.wrappers.lora.LoRA",
    "axlearn_like.learner.learner.Learner",
    "axlearn_like.learner.groups.ParameterGroup",
    "axlearn_like.input.supervised.SupervisedInput",
    "axlearn_like.tokenizers.bytes.ByteTokenizer",
    "axlearn_like.tokenizers.phrases.PhraseTokenizer",
    "axlearn_like.checkpoint.checkpointer.Checkpointer",
    "axlearn_like.training.trainer.Trainer",
    "rl.tasks.mixture.TaskMixture",
    "rl.objective.objective.Objective",
    "rl.rollout.sampling.Sampler",
    "rl.rollout.engine.RolloutEngine",
    "rl.controller.controller.Controller",
    "rl.verification.service.Verifier",
    "rl.parameter_server.client.ParameterServerClient",
    "rl.experiment.experiment.RLExperiment",
)


def documented(path: Path) -> list[str]:
    """Return the dotted names of the classes and functions of a file whose docstrings have examples."""
    text = path.read_text()
    if ">>> " not in text:  # to parse all files takes each process of the tests half a second
        return []
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [f"{module}.{node.name}" for node in nodes if ">>> " in (ast.get_docstring(node) or "")]


EXAMPLES = [name for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for name in documented(path)]


def test_what_users_meet_first_has_an_example() -> None:
    assert [name for name in FIRST_MET if name not in EXAMPLES] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it in an empty folder, with the names that it imports and no others."""
    module, _, member = name.rpartition(".")
    source = importlib.import_module(module)
    test = doctest.DocTestParser().get_doctest(getattr(source, member).__doc__, {}, name, source.__file__, None)
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    sys.stdout.flush()
    assert results.attempted > 0
    assert results.failed == 0, "".join(printed)
