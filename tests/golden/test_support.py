"""Pages on what is supported have the tables that stored proofs and the kernels' own rules make."""

import pytest

from tests.golden.support import attention, pages, written


@pytest.mark.slow
def test_pages_are_as_the_proofs_say():
    for path, tables in pages().items():
        text = path.read_text(encoding="utf-8")
        assert written(text, tables) == text, f"{path.name}: `python -m tests.golden.support`, if this is meant"


@pytest.mark.slow
def test_soft_caps_and_sinks_get_no_cudnn():
    lines = {line.split("|")[1].split()[0]: line for line in attention("gpu").splitlines()[2:]}
    assert "| Cudnn |" in lines["Llama-2-7B"] and "Xla (not Cudnn" in lines["gpt-oss-20b"]
    assert any(
        line.startswith("gemma-2") and "Xla" in text for line, text in ((k.lower(), v) for k, v in lines.items())
    )
