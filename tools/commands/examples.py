"""Two examples of each command, with which its help ends; tests parse all of them, and run those that take no time."""

import click

_RULES, _BY_DATE = "qwen25_1_5b_rl", "a.jsonl --field day --from 2026-01-01 --train b.jsonl --test c.jsonl"
_BY_TASK = "gsm8k.jsonl --task gsm8k --policy runs/demo@best --out rated.jsonl"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "config list": ("", "| grep demo"),
    "config show": ("demo trainer.checkpoint", "demo_sft --resolved"),
    "config kernels": ("demo", "llama31_8b --platform gpu --length 8192"),
    "config features": ("", "qwq_32b_rl"),
    "config diff": ("demo_sft demo_dpo", "demo --apply int8_rollouts --set learner.schedule.peak_lr=1e-4"),
    "train": (
        "--model models/Qwen3-0.6B --data chats.jsonl --export taught",
        "demo_sft --apply low_rank --set learner.schedule.peak_lr=1e-3",
        "demo_sft --set early_stopping=None --members 4",
    ),
    "rl": (
        "--model models/Qwen3-0.6B --data rows.jsonl --reward mine.py:score --export better",
        "demo --runtime inprocess",
        f"{_RULES} --plan --fleet trainer=v6e:2x2,workers=trainer",
    ),
    "rl sweep": (
        "--model models/Qwen3-0.6B --data rows.jsonl --lora --over learner.schedule.peak_lr=1e-4,3e-4 --over seed=0,1",
        "qwen25_0_5b_rl --apply low_rank --over objective.surrogate.high=0.2,0.28 --plan",
    ),
    "rl add": ("runs/demo-sweep seed=7 --set seed=7", "runs/demo-sweep high --set objective.surrogate.high=0.3"),
    "rl stop": ("runs/demo-sweep seed=0", "runs/demo-sweep peak_lr=1e-3+seed=0"),
    "rl resume": ("runs/demo-sweep seed=0", "runs/demo-sweep peak_lr=1e-3+seed=0"),
    "worker": ("runs/demo", "runs/demo --name extra"),
    "eval": ("runs/demo@best --samples 8", "runs/demo --tasks sums=rows.jsonl --against runs/eval/demo_sft"),
    "verify run": ("demo.axlrun", "demo.axlrun --checkpoint runs/demo@40 --rollouts 16 --json"),
    "verify explain": ("--reference 1.5 --answer 'it is 1 1/2'", r"--reference '10\text{ cm}' --answer '10 m' --json"),
    "serve": ("runs/demo --port 8731", "demo --random-weights --warmup background"),
    "service": ("models/Qwen3-0.6B --slots 16", "demo --random-weights --keys keys.txt --host 0.0.0.0"),
    "convert export": ("runs/demo exported", "runs/demo@best exported --dtype bfloat16"),
    "convert import": ("models/Qwen3-0.6B imported", "models/Qwen3-0.6B imported --dtype bfloat16"),
    "doctor": ("--quick", "--only clock,open_files --json"),
    "models list": ("", "Qwen3 gemma"),
    "models show": ("Qwen3-8B", "Llama-3.1-8B --topology v5e:2x4 --length 8192"),
    "data train-tokenizer": ("books.txt --vocab-size 2048 --out o", "a.jsonl --field text --vocab-size 512 --out o"),
    "data filter": ("rows.csv --longest 2000 --out short.jsonl", "a.jsonl --between pass_rate=0.1..0.9 --out b.jsonl"),
    "data dedup": ("rows.jsonl --out once.jsonl", "a.parquet b.parquet --field question --out once.jsonl"),
    "data decontaminate": (
        "a.jsonl --against gsm8k=test.jsonl --out b.jsonl",
        "a.jsonl --against x=x.csv --out b.json",
    ),
    "data split": ("a.jsonl --every 10 --train b.jsonl --test c.jsonl", _BY_DATE),
    "data difficulty": ("a.jsonl --policy runs/demo --out b.jsonl", _BY_TASK),
    "recipes": ("--model qwen3 --machine v5e:2x4", "llama31_8b_sft --machine h100:8"),
    "aot": ("llama31_8b --topology v5p-32", f"{_RULES} --topology v5e:2x4 --step decode --json"),
    "launch": ("demo --on local --wait", "llama31_8b --tpu v5p:4x4x4 --storage gs://BUCKET/runs --dry-run out"),
    "simulate": (
        "demo --workers 4 --duration decode_step=0.01 --rate worker=2 --advice",
        "qwq_32b_rl --fleet trainer=v5p:8x8x8,workers=64xv5p:2x2x2 --lengths lognormal:6000,0.8 --hours 1",
    ),
    "bench grpo_step": ("", "--steps 3 --json"),
    "bench rollout": ("", "--steps 3 --json"),
    "bench serve": ("--json", "demo --passes 2 --set engine.max_num_seqs=16"),
    "bench verify": ("", "--json"),
    "bench weights": ("--quick", "--json"),
    "publish": ("runs/demo", "runs/demo --out demo.axlrun --json"),
    "report": ("runs/demo", "runs/demo --check"),
    "runs": ("", "runs/sweep"),
    "watch": ("", "runs/demo --once"),
    "replay": ("runs/demo --update 40", "runs/demo --update 40 --set objective.surrogate.high=0.28 --reward 17:3=1.0"),
    "bisect": ("runs/seed0 runs/seed1", "runs/seed0 runs/seed1 --json"),
    "compare": ("runs/one runs/other", "runs/one runs/other --metric rl/reward --out both.html"),
}


def with_examples(command: click.Command, name: str) -> click.Command:
    """Give a command, and those of a group, the end of its help."""
    for inner, other in getattr(command, "commands", {}).items():
        with_examples(other, f"{name} {inner}")
    if (lines := EXAMPLES.get(name)) is not None:
        command.epilog = "\n".join(("\b", "Examples:", *(f"  axl {name} {line}".rstrip() for line in lines)))
    return command
