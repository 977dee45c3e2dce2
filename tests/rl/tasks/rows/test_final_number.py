"""The final number of an answer, as chat models write it."""

import gzip
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.tasks.rows.final_number import final_number

RIGHT = {
    "#### 5": "####",
    "2+3=5\n#### 5": "####",
    "#### 5 apples are left": "####",
    "#### $5.00": "####",
    "#### \\$5": "####",
    "#### x = 5": "####",
    "#### 4\nwait\n#### 5": "####",
    "#### **5**": "####",
    "\\boxed{5}": "boxed",
    "first \\boxed{7}, no: $\\boxed{5}$.": "boxed",
    "\\boxed{\\text{5 dollars}}": "boxed",
    "\\boxed{2+3=5}": "boxed",
    "\\boxed{\\frac{10}{2}}": "boxed",
    "\\boxed{\\$5}": "boxed",
    "The answer is 5.": "said",
    "The answer is: 5": "said",
    "Answer: $5": "said",
    "the final answer is therefore 5 dollars. It took 3 days.": "said",
    "**Answer: 5**": "said",
    "The answer is\n\n**5**": "said",
    "So Ann has **5** apples, of 12.": "bold",
    "**2 + 3 = 5**": "bold",
    "5": "last number",
    "5 dollars": "last number",
    "$5": "last number",
    "x=5": "last number",
    "\\$5": "last number",
    "12 - 7 = 5 eggs.": "last number",
    "5.0": "last number",
    "€5": "last number",
    "It costs 5%": "last number",
}
WRONG = {
    "": "none",
    "five": "none",
    "It is 5.\n#### unknown": "####",
    "5 #### ": "####",
    "#### 5 or 6": "####",
    "#### 55": "####",
    "\\boxed{5 or 6}": "boxed",
    "\\boxed{5, 6}": "boxed",
    "5, so \\boxed{}": "boxed",
    "\\boxed{5": "boxed",
    "The answer is 5 or 6": "said",
    "5 or 6": "last number",
    "-5": "last number",
    "1/5": "last number",
    "0.5": "last number",
    "5,000": "last number",
    "9" * 400: "none",
}


@pytest.mark.parametrize("text", RIGHT)
def test_usual_forms_are_read(text: str):
    assert final_number(text) == (Fraction(5), RIGHT[text])


@pytest.mark.parametrize("text", WRONG)
def test_what_gives_no_5_is_none(text: str):
    found = final_number(text)
    assert found.value != 5 and found.form == WRONG[text]


@pytest.mark.slow
@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "#### {}", "\\\\boxed{{{}}}", "The answer is {}.", "**{}**", "${}"]),
)
def test_every_number_is_read_in_every_form(number: int, form: str):
    for text in (f"{number}", f"{number:,}", f"{number}.00"):
        assert final_number("7 days later: " + form.format(text)).value == number


@pytest.mark.slow
@given(st.text(max_size=80))
def test_no_text_raises(text: str):
    final_number(text)


@pytest.mark.slow
def test_references_of_gsm8k_are_read(shared_data: Path):
    for part in ("train", "test"):
        with gzip.open(shared_data / "gsm8k" / f"{part}.jsonl.gz", "rt") as file:
            for line in file:
                answer = json.loads(line)["answer"]
                final = answer.rpartition("####")[2].strip()
                wanted = Fraction(final.replace(",", ""))
                assert final_number(answer) == (wanted, "####")
                for text in (final, f"\\boxed{{{final}}}", f"The answer is ${final}.", f"So it is **{final}** in all."):
                    assert final_number(text).value == wanted
