"""Golden texts of the configs of all registered experiments, compared by tests/experiments/test_golden_configs.py.

    python -m tests.golden.configs

A change of any default that an experiment uses shows as a changed line. Look at the difference, then commit it.
"""

from pathlib import Path

from axlearn_like.config import to_text
from experiments.registry import entries, get

DIRECTORY = Path(__file__).parents[1] / "experiments" / "golden"


def golden_texts() -> dict[str, str]:
    """Return the text of every experiment without arguments, by name."""
    return {name: to_text(get(name)) for name in entries()}


def main() -> None:
    """Write the texts, and delete those of experiments that are gone."""
    DIRECTORY.mkdir(exist_ok=True)
    texts = golden_texts()
    for path in DIRECTORY.glob("*.txt"):
        if path.stem not in texts:
            path.unlink()
    for name, text in texts.items():
        (DIRECTORY / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
