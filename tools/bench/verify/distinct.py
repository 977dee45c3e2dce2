"""Mathematics of which no two texts are equal, so that no cache of texts helps: templates filled with numbers."""

from collections.abc import Iterator

from rl.verification.verifiers.self_test import Case

__all__ = ["distinct"]

# Reference, a right answer, a wrong one, of the numbers a, b = a + 1 and c = a + 2.
_TEMPLATES = (
    (r"<a>", r"$\frac{<2a>}{2}$", r"$\frac{<2b>}{2}$"),
    (r"\frac{<a>}{<b>}", r"$\frac{<2a>}{<2b>}$", r"$\frac{<b>}{<a>}$"),
    (r"<a>\sqrt{3}", r"$\sqrt{<3aa>}$", r"$\sqrt{<3a>}$"),
    (r"[<a>,<c>)", r"$\left[<a>, <c>\right)$", r"$(<a>, <c>]$"),
    (r"\{<a>, <b>, <c>\}", r"$\{<c>, <b>, <a>\}$", r"$\{<a>, <b>\}$"),
    (r"x^2+<2a>x+<aa>", r"$(x+<a>)^2$", r"$(x-<a>)^2$"),
    (r"\frac{<a>\pi}{3}", r"$\frac{<2a>}{6}\pi$", r"$\frac{<b>\pi}{3}$"),
    (r"<a>\%", r"$<a>\%$", r"$<b>\%$"),
    (r"<a>\text{ cm}", r"$<a>\mathrm{cm}$", r"$<b>\text{ cm}$"),
    (r"x=<a>", r"$x = <a>$", r"$x = <b>$"),
    (r"<a>", r"The answer is <a>.", r"The answer is <b>."),
    (r"\frac{x+<a>}{x-<a>}", r"$\frac{2x+<2a>}{2x-<2a>}$", r"$\frac{x-<a>}{x+<a>}$"),
)
_AROUND = ("{}", "So it is {}", "It is {}, I think.", "Hence: {}")  # four right and four wrong answers each


def distinct(answers: int) -> list[Case]:
    """Return cases with so many answers in all, or a few more: eight to each reference, half of them right."""
    return [case for case, _ in zip(_cases(), range(-(-answers // 8)), strict=False)]


def _cases() -> Iterator[Case]:
    a = 2
    while True:
        values = {"a": a, "b": a + 1, "c": a + 2, "2a": 2 * a, "2b": 2 * a + 2, "3a": 3 * a, "aa": a * a}
        values["3aa"] = 3 * a * a
        for texts in _TEMPLATES:
            reference, right, wrong = (_filled(text, values) for text in texts)
            yield Case({"answer": reference}, _around(right), _around(wrong))
        a += 1


def _around(text: str) -> list[str]:
    return [around.replace("{}", text) for around in (_AROUND if text.startswith("$") else ("{}", *_PROSE))]


_PROSE = ("We add. {}", "We subtract. {}", "We count. {}")


def _filled(text: str, values: dict[str, int]) -> str:
    for name, value in values.items():
        text = text.replace(f"<{name}>", str(value))
    return text
