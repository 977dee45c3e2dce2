r"""The part of a text that is its answer, and plain mathematics as LaTeX: `pi/2` is `\pi/2`, `2√3` is `2\sqrt{3}`."""

import re

DOLLAR = "＄"  # a sign of money, apart from the dollars around mathematics
_THOUGHT = re.compile(r".*</think>|<think>.*", re.DOTALL)
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*\n]*[^\s*])\*\*(?![\w(])")  # no powers: x**2 + y**2
_UNBRACED = re.compile(r"\\boxed\s+([^\s{}$.,]+)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_SAID = re.compile(r"(?:\banswer\s*(?:is|:|=)\s*:?|####)\s*(?=\S)", re.IGNORECASE)
_SENTENCE = re.compile(  # mathematics only after its verb: "So it is $5$, I think.", "The speed is 5 mph."
    r"(?=[A-Za-z])[A-Za-z\s,.:;'’-]*?"
    r"(?:\b(?:is|are|was|equals|equal to|get|gets|has|have|makes?|so|thus|hence|therefore)|:)\s*"
    r"(\$[^$]+\$|(?<=\s)\$?-?\d[\d,]*(?:\.\d+)?[^\d$\\,.;!]*)(?:[,.;!][^\d$\\]*)?",
    re.IGNORECASE,
)
_REMARK = re.compile(r"(\$[^$]+\$|\*\*[^*]+\*\*)[.,;!]\s[^\d$\\]*")
_LONGEST_SENTENCE = 300
_ABOUT = re.compile(r"^(?:about|approximately|approx\.?|roughly|~|≈|\\approx)\s*(?=\S)", re.IGNORECASE)
_JOIN = re.compile(r"[\s$,;.]*(?:and|or)?[\s$,;]*", re.IGNORECASE)
_WRAPPERS = re.compile(
    r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*([^*]*)\*\*|\"([^\"]*)\""
    r"|\\(?:text|textbf|mathrm|mathbf|textit|mbox|displaystyle|underline)\s*\{([^{}]*)\}",
    re.DOTALL,
)
_SIGNS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "θ": r"\theta ",
    "²": "^2",
    "³": "^3",
    "°": r"^\circ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∪": r"\cup ",
    "∅": r"\emptyset ",
    "\u00a0": " ",
    "\u202f": " ",
    "\u2009": " ",
    "’": "'",
    DOLLAR: r"\$",
}
_SPACES = re.compile(r"\\[;!:]|\\quad|\\qquad|\\displaystyle|\\left(?![a-z])|\\right(?![a-z])|~")
FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|gcd|lcm|max|min"


def final_text(text: str) -> str:
    r"""Return what a text gives as its answer: its boxes, its answer tag, what "the answer is" says, or all of it."""
    text = _BOLD.sub(r"\1", _THOUGHT.sub("", text.replace("\\$", DOLLAR))).strip().removeprefix("**")
    if tags := _TAG.findall(text):
        text = tags[-1].strip()
    text = _UNBRACED.sub(r"\\boxed{\1}", text)
    if boxes := _boxes(text):
        apart = all(_JOIN.fullmatch(text[a[1] : b[0]]) for a, b in zip(boxes, boxes[1:], strict=False))
        inner = [text[begin:end] for _, _, begin, end in boxes]
        found = ", ".join(dict.fromkeys(map(str.strip, inner))) if apart else inner[-1]
        behind = text[boxes[-1][1] :].lstrip(" $").lower()
        if _BOX.search(found) and found != text:
            return final_text(found)
        return _exactly(found + ("%" if behind.startswith(("%", r"\%", "percent")) else ""))
    if said := list(_SAID.finditer(text)):
        text = text[said[-1].end() :].partition("\n")[0].rstrip("! ")
    for form in (_REMARK, _SENTENCE):
        if len(text) <= _LONGEST_SENTENCE and (found := form.fullmatch(text)) is not None:
            text = found[1]
    return _exactly(text)


def _exactly(text: str) -> str:
    return unwrapped(_ABOUT.sub("", unwrapped(text)))


def unwrapped(text: str) -> str:
    r"""Return a text without dollars, bold, `\text{}` and the full stop around all of it."""
    while True:
        text = text.strip()
        inner = text.removesuffix(".").rstrip() if not text.endswith("..") else text
        if (found := _WRAPPERS.fullmatch(inner)) is not None:
            inner = next(group for group in found.groups() if group is not None)
        if inner == text:
            return text
        text = inner


def latex_of(text: str) -> str:
    """Return a mathematical text with LaTeX's names for what has been written in plain characters."""
    for sign, name in _SIGNS.items():
        text = text.replace(sign, name)
    text = _SPACES.sub(" ", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace("**", "^")
    text = re.sub(r"\\(leq|geq|lt|gt|varnothing)(?![a-z])", lambda m: _SAME[m[1]], text)
    text = re.sub(r"√\s*\(([^()]*)\)|√\s*(\w+)", lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)|\\sqrt\(([^()]*)\)", lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    text = re.sub(r"(?<![\\A-Za-z])exp\s*\(([^()]*)\)", r"e^{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty", text)
    text = re.sub(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"\+\s*-", "-", text.replace("$", " ")).replace("+\\infty", "\\infty")
    text = re.sub(r"(?<![\d.])(\d+)\.0+(?!\d)", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


_SAME = {"leq": r"\le ", "geq": r"\ge ", "lt": "<", "gt": ">", "varnothing": r"\emptyset"}


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Return begin and end of each box, and of what is in it; one that is not closed holds nothing."""
    found: list[tuple[int, int, int, int]] = []
    place = 0
    while (box := _BOX.search(text, place)) is not None:
        depth, end = 1, box.end()
        while end < len(text) and depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        inner = end - 1 if not depth else box.end()
        found.append((box.start(), end, box.end(), inner))
        place = end
    return found
