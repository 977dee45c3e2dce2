"""One module per subcommand of ``axl``, which defines ``command``, a ``click.Command``.

A module is imported only when its subcommand is used, so that ``axl --help`` stays fast; ``COMMANDS`` lists all of
them. The module of ``fit-scaling`` is ``fit_scaling``.
"""

COMMANDS: dict[str, str] = {
    "config": "List, show and compare the configs of experiments.",
    "train": "Train a model by an experiment's trainer.",
    "rl": "Improve a policy by reinforcement learning.",
    "worker": "Join an active run with one more rollout worker.",
    "eval": "Evaluate a policy on held-out problems: pass@k, maj@k, pairs.",
    "verify": "Show how a mathematical answer and its reference are read, and why they are equal or not.",
    "serve": "Answer over HTTP, in OpenAI's protocol, by a run's policy.",
    "convert": "Convert checkpoints from and to Hugging Face's form.",
    "models": "List the published models that are built in, and show what one costs.",
    "data": "Prepare data: train a tokenizer, filter, dedup, decontaminate, split rows.",
    "aot": "Compile a step for TPUs that are not there: does it fit, and how fast could it be.",
    "launch": "Plan a run on TPUs, and submit it: to GKE, as a queued resource, or on this machine.",
    "bench": "Run a benchmark and print its result as JSON.",
    "fit-scaling": "Fit the sigmoid of ScaleRL to the rewards of runs.",
    "report": "Rebuild the report of a run directory.",
}
