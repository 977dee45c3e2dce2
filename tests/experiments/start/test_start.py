"""Runs that begin with a directory and a file: what is derived and written, and what a second command does."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from axlearn_like.config import to_text
from axlearn_like.input import PreferenceInput
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.training.alignment.preferences import DPO
from experiments.recipes.machines import find_machine
from experiments.registry import get
from experiments.start import StartOptions, plan_start, start_rl, start_sft
from experiments.start.base import hf_int8_lora
from experiments.start.card import model_card
from experiments.start.source import python_source, save_experiment
from mesh.errors import UserError
from mesh.files.bucket import Bucket
from rl.experiment import RLExperiment
from rl.fleet.devices import parse_devices
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.verifiers.math import MathVerifier
from tests.experiments.start.conftest import write_lines
from tools.cli import main
from tools.experiment.start import export, run_name
from tools.run import run

PAIRS = [{"prompt": f"{a}?", "chosen": str(a), "rejected": str(a + 1)} for a in range(40)]


@pytest.mark.slow
def test_lengths_batch_and_split_follow_from_the_rows(model: Path) -> None:
    found = plan_start("rl", StartOptions(model=model, data="rows.jsonl", reward="reward.py:score"))
    cfg: Any = found.config
    tokens = max(len(cfg.tokenizer.build().encode(f"{a} + {b} =\n")) for a in range(6) for b in range(6))
    assert tokens <= cfg.max_prompt_tokens < tokens + 8
    assert cfg.max_prompt_tokens + cfg.max_new_tokens <= 96
    problems = cfg.tasks.build().for_evaluation(None, 0)
    trained = 36 - len(problems)
    assert 0 < len(problems) == cfg.evaluation.problems_per_family
    assert cfg.prompts_per_step <= trained
    said = {what: (value, why) for what, value, why in found.plan.entries}
    assert (
        said["max_prompt_tokens"][0] == str(cfg.max_prompt_tokens)
        and f"{tokens} tokens" in said["max_prompt_tokens"][1]
    )
    assert said["reward"][1] == "tried on 3 rows: the rows' own answers got 1, 1, 1"
    assert found.examples[0] == ("0 + 0 =\n", "0")
    cfg.check("inprocess")


def test_the_split_is_the_same_in_every_process_and_no_prompt_is_on_both_sides(model: Path) -> None:
    first, second = (start_rl(model, "rows.jsonl") for _ in range(2))
    assert to_text(first) == to_text(second)
    cfg = start_sft(model, "rows.jsonl")
    train: Any = cfg.input.source.build()
    held: Any = cfg.evaluators[0].input.source.build()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(train) + len(held) == 36 and len(held)
    sides = [{tuple(one["tokens"][~one["loss_mask"]].tolist()) for one in source} for source in (train, held)]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("answers", "kind", "final"),
    [
        (["12", "-3.5", "1,000"], ReasoningGymScorer, "number"),
        (["so #### 12", "thus #### 3"], ReasoningGymScorer, "number"),
        ([r"\frac{1}{2}", "2"], MathVerifier, "text"),
        (["red", "blue"], ReasoningGymScorer, "text"),
    ],
)
def test_answers_are_compared_by_what_they_are(model: Path, answers: list[str], kind: Any, final: str) -> None:
    write_lines(Path("own.jsonl"), *({"prompt": f"{n}?", "answer": answers[n % len(answers)]} for n in range(24)))
    cfg: Any = start_rl(model, "own.jsonl")
    assert type(cfg.verifier.scorer) is kind.Config
    assert cfg.tasks.families[0].columns.final == final
    scorer = cfg.verifier.scorer.build()
    problem = cfg.tasks.build().problem(0)
    assert scorer.score(problem.id, problem.answer) == 1.0


def trained_on(memory: int) -> str:
    machine = dataclasses.replace(find_machine("v5e:1x1"), memory=memory)
    found = plan_start("train", StartOptions(model="small", data="rows.jsonl"), machine)
    cfg: Any = found.config
    lora = isinstance(cfg.model.block.attention, LoRA.Config)
    said = next(value for what, value, _ in found.plan.entries if what == "trained")
    assert lora == said.startswith("LoRA factors")
    assert to_text(cfg.model).count("base: 'int8'") == 2 * said.endswith("int8 base")
    return said


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_less_memory_trains_less_of_the_model_until_it_is_refused_with_what_would_fit() -> None:
    found = [trained_on(16 << 30)]
    memory = 4 << 20
    with pytest.raises(UserError, match=r"small is too large for this machine: .*does not fit: .*What would: "):
        while memory > 1000:
            found.append(trained_on(memory))
            memory = memory * 7 // 8
    ways = list(dict.fromkeys(found))
    assert ways[0] == "all parameters" and ways[-1].startswith("LoRA factors")


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("job", ["rl", "train"])
def test_a_cpus_devices_share_a_model_as_the_plan_counted_unless_it_is_small(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = dataclasses.replace(find_machine("v5e:2x4"), text="cpu:8", name="cpu-8", platform="cpu", topology=None)

    def mesh() -> dict[str, int]:
        cfg: Any = plan_start(job, StartOptions(model="small", data="rows.jsonl"), machine).config
        return (cfg.trainer if job == "rl" else cfg).mesh

    assert mesh() == {"data": -1}
    for place in ("rl", "sft"):
        monkeypatch.setattr(f"experiments.start.{place}.SMALL", 0)
    assert mesh() == {"fsdp": 8}


@pytest.mark.slow
@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("devices", ["v5e:2x4", "h100:8", "v6e:1x1"])
@pytest.mark.parametrize("job", ["rl", "train"])
def test_what_is_derived_for_accelerators_is_not_refused_by_what_runs_it(
    job: str, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("rl", "sft"):
        monkeypatch.setattr(f"experiments.start.{place}.SMALL", 0)
    write_lines(Path("many.jsonl"), *({"prompt": f"{n}?", "answer": str(n)} for n in range(64)))
    machine = find_machine(devices)
    found = plan_start(job, StartOptions(model="small", data="many.jsonl"), machine)
    cfg: Any = found.config
    whole = parse_devices(machine.text, "devices").described
    if job == "train":
        assert math.prod(cfg.mesh.values()) == len(whole)
        cfg.check()
    elif found.inprocess:
        cfg.check("inprocess", devices=whole)
    else:
        cfg.check("ray", devices=cfg.fleet.build().trainer.described)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("fleet", ["trainer=v5e:2x4,workers=8xv5e:1x1", "trainer=h100:8,workers=2xh100:1"])
def test_a_fleet_of_the_command_line_is_what_the_model_is_fitted_to(fleet: str) -> None:
    found = plan_start("rl", StartOptions(model="small", data="rows.jsonl", fleet=fleet))
    cfg: Any = found.config
    devices = next(entry for entry in found.plan.entries if entry[0] == "devices")
    assert devices[1] in fleet and "this machine" not in devices[2]
    assert cfg.trainer.mesh == {"fsdp": 8} and cfg.trainer.row_multiple == 8
    cfg.check("ray", devices=cfg.fleet.build().trainer.described)
    with pytest.raises(UserError, match=r"^fleet\.trainer='h1000:8': did you mean h100:8\?"):
        plan_start("rl", StartOptions(model="small", data="rows.jsonl", fleet="trainer=h1000:8"))


@pytest.mark.usefixtures("model")
def test_workers_on_cpus_have_one_device_whatever_the_heads() -> None:
    found = plan_start("rl", StartOptions(model="small", data="rows.jsonl", fleet="trainer=cpu:2,workers=2xcpu:2"))
    cfg: Any = found.config
    assert cfg.engine.mesh == {} and cfg.workers == 2


def test_a_start_from_a_bucket_has_the_same_config_on_every_machine(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Bucket("memory://start/model", "x").put({file.name: file for file in model.iterdir()})
    Bucket("memory://start/rows", "x").put({"rows.jsonl": Path("rows.jsonl")})
    texts = list[str]()
    for machine in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        texts.append(to_text(start_rl("memory://start/model", "memory://start/rows/rows.jsonl")))
    assert texts[0] == texts[1] and str(tmp_path) not in texts[0]


@pytest.mark.slow
def test_lora_is_trained_where_it_is_asked_for(model: Path) -> None:
    cfg: Any = start_sft(model, "rows.jsonl", lora=True, steps=3)
    assert isinstance(cfg.model.block.attention, LoRA.Config)
    done = run(cfg, "run", quiet=True)
    assert done.finished


@pytest.mark.slow
def test_factors_on_an_int8_base_are_trained_exported_and_written_as_python(model: Path) -> None:
    found = plan_start("train", StartOptions(model=model, data="rows.jsonl", lora=True, steps=3))
    cfg: Any = found.config
    cfg.model = hf_int8_lora(model, dtype=cfg.model.dtype)
    assert "hf_int8_lora(" in python_source(cfg, "mine", "about", {})
    assert run(cfg, "run", quiet=True).finished
    assert main(["convert", "export", "run", "taught", "--merge"]) == 0
    given, made = (load_file(folder / "model.safetensors") for folder in (model, Path("taught")))
    assert given.keys() == made.keys()
    for name, weight in given.items():
        gap = np.abs(made[name].astype(np.float32) - weight.astype(np.float32)).max()
        assert gap < 0.05 * np.abs(weight).max(), name


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("rl", {"data": "rows.jsonl", "reward": "reward.py:score"}),
        ("rl", {"data": "rows.jsonl", "lora": True, "seed": 3}),
        ("rl", {"data": "rows.jsonl", "fleet": "trainer=v5e:2x4,workers=8xv5e:1x1"}),
        ("train", {"data": "rows.jsonl", "heldout": "rows.jsonl"}),
        ("train", {"data": "pairs.jsonl", "pairs": True, "lora": True}),
    ],
)
def test_a_saved_experiment_has_the_text_of_what_is_run(model: Path, command: str, options: dict[str, Any]) -> None:
    write_lines(Path("pairs.jsonl"), *PAIRS)
    found = plan_start(command, StartOptions(model=model, **options))
    found.config.learner.set(clip_norm=0.5)  # pyright: ignore[reportAttributeAccessIssue]
    save_experiment(found, found.config, "mine.py")
    assert to_text(get("mine.py:mine")) == to_text(found.config)
    text = Path("mine.py").read_text()
    assert "num_steps=" in text and "# " in text and "clip_norm=0.5" in text
    assert len(text.splitlines()) < 100
    save_experiment(found, found.config, "mine.py")  # the same again
    found.config.set(num_steps=7)
    with pytest.raises(UserError, match="mine.py: the file exists, with another experiment"):
        save_experiment(found, found.config, "mine.py")


def test_names_of_files_are_no_code_of_the_saved_experiment(model: Path) -> None:
    """Rows and models may be a stranger's, and so are their names."""
    breaks = 'Path("ran").touch()'
    hostile = f'a"""\nfrom pathlib import Path\n{breaks}\n"""b.jsonl'
    Path("rows.jsonl").rename(hostile)
    found = plan_start("rl", StartOptions(model=model, data=hostile, reward="reward.py:score"))
    source = python_source(found.config, "mine", f"GRPO on {hostile}", {"num_steps": f"rows\n{breaks}\n#"})
    assert not Path("ran").exists()
    save_experiment(found, found.config, "mine.py")
    get("mine.py:mine")
    assert not Path("ran").exists() and f"\n{breaks}" not in source


def test_any_config_is_written_as_python() -> None:
    for name in ("demo", "demo_dpo", "gsm8k_small", "text_to_sql", "calculator_rl"):
        assert f"def {name}() -> " in python_source(get(name), name, "An experiment", {})


def test_pairs_are_learned_by_dpo(model: Path) -> None:
    write_lines(Path("pairs.jsonl"), *PAIRS)
    cfg = start_sft(model, "pairs.jsonl", pairs=True, steps=2)
    assert isinstance(cfg.loss, DPO.Config) and isinstance(cfg.input, PreferenceInput.Config)
    assert run(cfg, "run", quiet=True).finished


def test_a_run_is_exported_with_a_card_and_the_export_is_a_model_to_begin_with(model: Path) -> None:
    (model / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- x\n---\n# Small\n")
    found = plan_start("rl", StartOptions(model=model, data="rows.jsonl", reward="reward.py:score", steps=2))
    cfg: Any = found.config
    cfg.set(prompts_per_step=4)
    cfg.evaluation.set(problems_per_family=2)
    done = run(cfg, "run", quiet=True)
    assert done.finished
    for _ in range(2):  # the second finds the same bytes
        export(StartOptions(export="better"), found, done.path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {one.name for one in Path("better").iterdir()}
    card = Path("better/README.md").read_text()
    before = json.loads((done.path / "eval_before.json").read_text())
    share = f"{before['pass@1']:.1%} (95 % interval {before['pass@1_ci'][0]:.1%}"
    for part in ("license: apache-2.0", "base_model: small", "library_name: transformers", "rows.jsonl", share):
        assert part in card
    assert str(Path().absolute()) not in card  # a card is published
    again = start_rl("better", "rows.jsonl")
    assert to_text(again.tasks) == to_text(start_rl(model, "rows.jsonl").tasks)


def axl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.full
@pytest.mark.usefixtures("model")
def test_one_command_trains_exports_and_resumes_and_its_file_goes_on(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    command = "rl --model small --data rows.jsonl --reward reward.py:score --steps 2 --set prompts_per_step=4".split()
    command += ["--set", "evaluation.problems_per_family=2", "--save-experiment", "mine.py", "--export", "better"]
    first = axl(*command)
    assert first.returncode == 0, first.stderr
    assert "max_new_tokens" in first.stderr and r"example 1: '0 + 0 =\n'" in first.stderr
    assert "export: " in first.stdout and "axl rl --model small" in Path("better/README.md").read_text()
    assert (Path("runs/mine/config.txt")).read_text() == to_text(get("mine.py:mine"))
    for again in (command, ["rl", "mine.py:mine", "--runtime", "inprocess"]):
        done = axl(*again)
        assert done.returncode == 0 and "finished before" in done.stdout, done.stderr
    other = axl(*command[:-4], "--seed", "5", "--run-dir", "runs/mine")
    assert other.returncode == 2 and "+seed: 5" in other.stderr
    whole = [*"train --model small --data rows.jsonl --steps 2 --run-dir there --export".split(), "../taught"]
    os.mkdir("elsewhere")
    trained = subprocess.run(
        [sys.executable, "-m", "tools.cli", *(f"../{one}" if one in ("small", "rows.jsonl") else one for one in whole)],
        cwd="elsewhere",
        capture_output=True,
        text=True,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert "eval_loss" in Path("taught/README.md").read_text()


@pytest.mark.parametrize(
    ("command", "pairs", "name"),
    [("rl", None, "small-rows"), ("train", None, "small-rows-sft"), ("train", True, "small-rows-dpo")],
)
def test_each_way_of_learning_from_the_same_rows_has_a_run_of_its_own(
    command: str, pairs: bool | None, name: str
) -> None:
    assert run_name(command, StartOptions(model="small", data="rows.jsonl.gz", pairs=pairs)) == name


def test_a_yaml_file_has_the_options_and_the_command_line_goes_before_it(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(
        "model: small\ndata: rows.jsonl\nsteps: 9\nrun-dir: here\nset:\n  learner.clip_norm: 0.25\napply: [low_rank]\n"
    )
    assert main(["rl", "recipe.yaml", "--plan", "--steps", "2", "--save-experiment", "mine.py"]) == 0
    cfg: Any = get("mine.py:mine")
    assert type(cfg) is RLExperiment.Config and cfg.num_steps == 2
    policy: Any = cfg.policy
    assert cfg.learner.clip_norm == 0.25 and isinstance(policy.block.attention, LoRA.Config)
    for text, wanted in (
        ("model: small\ndatum: rows.jsonl\n", "there is no option 'datum'; did you mean 'data'?"),
        ("model: small\ndata: rows.jsonl\nsteps: many\n", "steps: expected a whole number, got 'many'"),
        ("model: !!python/object/apply:os.system [ls]\n", "cannot be read as YAML"),
        ("- model\n", "expected a mapping of options"),
    ):
        Path("recipe.yaml").write_text(text)
        assert main(["rl", "recipe.yaml", "--plan"]) == 2
        assert wanted in capsys.readouterr().err


def test_a_card_of_fine_tuning_has_loss_and_greedy_exact_match_before_and_after(model: Path) -> None:
    found = plan_start("train", StartOptions(model=model, data="rows.jsonl", steps=60))
    done = run(found.config, "run", quiet=True)
    card = model_card(found, done.path, "axl train")
    lines = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in card.splitlines() if line.startswith("| ")}
    loss, _ = ([float(each.strip(" |")) for each in lines[name]] for name in ("loss", "greedy exact match"))
    assert loss[1] < loss[0]
