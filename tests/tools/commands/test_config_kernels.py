"""`axl config kernels`: which attention kernel an experiment gets where, and why not another."""

import pytest

from tools import cli


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["config", "kernels", "demo_sft", *arguments]) == 0
    return capsys.readouterr().out.strip()


def test_the_choice_is_told_with_its_reasons(capsys):
    assert told(capsys) == "model.block.attention: Splash"
    reasons = "not Splash: for TPUs, not for cpu; not Cudnn: for NVIDIA GPUs, not for cpu"
    assert told(capsys, "--platform", "cpu") == f"model.block.attention: Xla ({reasons})"
    assert "not Cudnn: expects bfloat16 or float16, not float32" in told(capsys, "--platform", "gpu")
    window = ("--set", "model.block.attention.window=8", "--sequence", "4")
    ring = ("--set", "model.block.attention.context_parallel=axlearn_like.kernels.attention.context_parallel.ring:Ring")
    assert told(capsys, *window) == "model.block.attention: Splash"
    assert "Xla (not Splash: cannot have a window in a ring" in told(capsys, *window, *ring)


def test_a_policy_has_a_line_for_each_context_of_rl(capsys):
    assert cli.main(["config", "kernels", "qwq_32b_rl", "--platform", "gpu", "--length", "2048"]) == 0
    packed, rows, scoring, decoding = capsys.readouterr().out.splitlines()
    assert packed == "policy.block.attention: Cudnn (not Splash: for TPUs, not for gpu)"
    assert rows.startswith("policy.block.attention, prompts with completions (4096 + 32768 tokens): Cudnn (")
    assert scoring.startswith("policy.block.attention, scoring (20481 tokens): Cudnn (")
    assert decoding.endswith("decoding: XLA, from the pages, 256 keys of a row at a time")
    windows = ("--set", "engine.decode_from=windows")
    assert cli.main(["config", "kernels", "qwq_32b_rl", "--platform", "gpu", *windows]) == 0
    assert capsys.readouterr().out.endswith("decoding: XLA, from windows: copies of the pages, a second cache\n")
    assert cli.main(["config", "kernels", "demo", "--platform", "gpu"]) == 0  # float32
    assert capsys.readouterr().out.count("; all scores are stored\n") == 2
    assert cli.main(["config", "kernels", "qwen25_0_5b_rl", "--set", "trainer.mesh={'sequence': 2}"]) == 0
    assert "prompts with completions (512 + 2048 tokens over 2 devices): Splash\n" in capsys.readouterr().out


def test_exact_numerics_of_a_policy_are_shown_or_refused_by_name(capsys):
    exact = ("--set", "policy.numerics=exact")
    assert cli.main(["config", "kernels", "qwen25_1_5b_rl", *exact]) == 0
    _, _, attention, others = capsys.readouterr().out.splitlines()
    assert attention.endswith(", scoring (769 tokens) and decoding: paged attention in fixed blocks")
    assert others.endswith(", products, norms and head of both: kernels of fixed tiles")
    assert cli.main(["config", "kernels", "qwen25_1_5b_rl", *exact, "--platform", "gpu"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith('numerics="exact" is refused: there are no kernels of fixed order for GPUs')
    assert cli.main(["config", "kernels", "demo", *exact, "--platform", "cpu"]) == 0
    assert "scoring and decoding: by XLA, the order fixed by the layers" in capsys.readouterr().out


def test_a_forced_kernel_that_cannot_is_refused(capsys):
    forced = "model.block.attention.kernel=axlearn_like.kernels.attention.splash:Splash"
    assert cli.main(["config", "kernels", "demo_sft", "--set", forced, "--platform", "cpu"]) == 2
    assert "no kernel can do this attention (Splash: for TPUs, not for cpu)" in capsys.readouterr().err
    assert cli.main(["config", "kernels", "demo_sft", "--length", "20", "--sequence", "4"]) == 2
    assert "rows of 20 tokens do not divide over the mesh axis sequence 4" in capsys.readouterr().err
