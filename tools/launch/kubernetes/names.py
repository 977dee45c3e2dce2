"""Names and texts of a submission as Kubernetes takes them, or refused with the rule and the nearest right form."""

import re
from collections.abc import Iterable

from mesh import UserError

LONGEST = 63  # characters of a DNS label
_RANDOM = 6  # a hyphen and five characters, which Kubernetes adds to the name of a Pod
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")  # value of a label
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY = re.compile(r"(?!\.\.?$)[-._a-zA-Z0-9]{1,253}")  # key of a Secret
# Source: https://github.com/distribution/reference, the grammar at the head of reference.go.
_HOST = r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"({_HOST}(\.{_HOST})*(:[0-9]+)?/)?{_PART}(/{_PART})*(:[A-Za-z0-9_][\w.-]{{0,127}})?"
    r"(@[A-Za-z][A-Za-z0-9]*([-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
NODE = "node"  # the only replicated job of a JobSet


def run_name(experiment: str) -> str:
    """Return the name of a run from its experiment: `qwq-32b-rl` of `qwq_32b_rl`, `mine` of `path/my.py:mine`."""
    return re.sub(r"[^a-z0-9]+", "-", experiment.rpartition(":")[2].lower()).strip("-")


def _check(rule: re.Pattern[str], text: str, what: str, expected: str, nearest: str = "", most: int = 1 << 20) -> None:
    """Refuse a text that is not of this form, with the nearest one that is (UserError); `what`: field and text."""
    if rule.fullmatch(text) is None or len(text) > most:
        hint = f"; did you mean {nearest!r}?" if nearest and rule.fullmatch(nearest) else ""
        raise UserError(f"{what}: expected {expected}{hint}")


def check_label(name: str, field: str) -> None:
    """Refuse a name that is no DNS label (UserError)."""
    form = f"a letter, then small letters, digits and hyphens, up to {LONGEST} in all, no hyphen at the end"
    _check(_LABEL, name, f"{field}={name!r}", f"a DNS label: {form}", run_name(name)[:LONGEST], LONGEST)


def check_texts(texts: Iterable[str]) -> None:
    """Refuse what no argument, variable or manifest can hold: NUL, and what is no Unicode text (UserError)."""
    for text in texts:
        if "\0" in text or text.encode(errors="ignore").decode() != text:
            raise UserError(f"{text!r}: expected a text of Unicode without NUL, which no argument or variable can hold")


def check_variable(name: str) -> None:
    """Refuse a name that is none of a variable of a container (UserError)."""
    nearest = re.sub(r"^(?=\d)", "_", re.sub(r"[^-._a-zA-Z0-9]+", "_", name))
    _check(_VARIABLE, name, f"variable {name!r}", "letters, digits, '_', '-' and '.', no digit first", nearest)


def check_value(text: str, what: str) -> None:
    """Refuse a text that is no value of a label (UserError)."""
    form = f"up to {LONGEST} letters, digits, '-', '_' and '.', a letter or digit at both ends"
    nearest = re.sub(r"[^-A-Za-z0-9_.]+", "-", text)[:LONGEST].strip("-_.")
    _check(_VALUE, text, f"{what}={text!r}", f"the value of a label: {form}", nearest)


def check_image(text: str) -> None:
    """Refuse a text that is no name of an image (UserError)."""
    nearest = re.sub(r"\s+", "", text).removeprefix("https://").removeprefix("docker://")
    nearest = nearest if _IMAGE.fullmatch(nearest) else nearest.lower()
    path = text.partition("@")[0].rpartition(":")[0] or text.partition("@")[0]
    most = len(text) if len(path) <= 255 else 0
    _check(_IMAGE, text, repr(text), "HOST/PATH:TAG, the path in small letters", nearest, most)


def check_reference(text: str, name: str) -> None:
    """Refuse a text that is no SECRET/KEY (UserError); `name`: of the variable."""
    owner, _, key = text.partition("/")
    expected = f"SECRET/KEY for {name}, the name of a Secret and of a key in it"
    _check(_SUBDOMAIN, owner, repr(text), expected, most=253)
    _check(_KEY, key, repr(text), expected)


def check_claim(name: str, field: str) -> None:
    """Refuse a name that is none of a claim (UserError)."""
    form = "small letters, digits, '-' and '.' in the name of a claim, a letter or digit at both ends of each part"
    nearest = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")
    _check(_SUBDOMAIN, name, f"{field}: {name!r}", form, nearest, 253)


def pod_name(jobset: str, job: int, pod: int) -> str:
    """Return the name under which a Pod is found, also after it was restarted."""
    return f"{jobset}-{NODE}-{job}-{pod}"


def check_pods(name: str, jobset: str, jobs: int, pods: int) -> None:
    """Refuse a run whose longest name of a Pod is no DNS label (UserError); `jobset` is its longest of a JobSet."""
    longest = pod_name(jobset, jobs - 1, pods - 1)
    length = len(longest) + _RANDOM
    if length > LONGEST:
        most = len(name) - (length - LONGEST)
        raise UserError(
            f"launch.name={name!r}: the Pod {longest}-xxxxx would have {length} characters, and a DNS label has at "
            f"most {LONGEST}; expected a name of at most {most}, by --name"
        )
