"""Docstrings open with an imperative or a noun phrase, in the vocabulary of the field (CONTRIBUTING.md, "English").

Messages, help texts and pages use that vocabulary too.

Run as a script for the list of one folder: `python tests/test_english.py rl/rollout`.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_files import statements

ROOT = Path(__file__).parent.parent
ROOMS = ("mesh", "axlearn_like", "models", "rl", "experiments", "tools")

# Prepositions, pronouns and conjunctions: a summary that opens on one is a fragment.
FRAGMENTS = frozenset(
    """of to them it its itself as whether where whoever whose who whom that this these those they their so what which
    for in into by from with without at on upon if when while until till because since than and or but nor not
    he she his her him we us our there then thus hence also""".split()
)
# Third person where the imperative is meant ("Return the mean", not "Returns the mean").
THIRD_PERSON = frozenset(
    """accepts adds appends applies asks asserts attends begins brings builds calls cancels casts chooses cleans
    clears closes collects combines compares compiles computes connects constructs contains converts copies creates
    cuts decides decodes deletes describes determines disables discards divides does draws drops enables encodes
    ensures evaluates executes expands extracts fetches fills finds finishes formats frees gathers generates gets
    gives goes handles has holds imports initialises initializes inserts is iterates joins keeps kills knows lets
    listens loads looks lowers makes merges moves multiplies needs normalises normalizes opens parses picks plans pops
    posts prepares prints publishes pulls pushes puts raises reads receives refuses registers releases removes
    renames repeats replaces reports resets resolves restores returns rounds saves says selects sends serves sets
    shows skips spawns splits stores swaps switches takes tells traces trains transfers undoes unpacks uses validates
    verifies waits walks warns wraps writes yields""".split()
)
# A help text of an option says what the thing is.
OPEN_ENDED = frozenset("of to that them its whose on from".split())
# In `Args:` a description is read without its name, too: "seed: seed of the draws".
UNNAMED = frozenset("of that to whose".split())
# A trailing comment says what its line is, too.
COMMENT_FRAGMENTS = FRAGMENTS | set(
    "after before behind below above beyond between within under over through among about against during how".split()
)
_TRAILING = re.compile(r"\S  # ((\w+)(?![\w-]).*)")
# Words of a private vocabulary, in docstrings and comments.
PRIVATE = re.compile(r"\b(whence|anew|whoever|meanwhile|is made so|are made so|mends?|mended|mending)\b", re.IGNORECASE)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, docstring) of the module, and of every class and function in it."""
    for node in (tree, *statements(tree)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield getattr(node, "lineno", 1), text


def strings_under_fields(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each string that stands below an assignment of a class or module."""
    for node in (tree, *statements(tree)):
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in itertools.pairwise(node.body):
                match before, after:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str())):
                        yield after.lineno


def described(text: str) -> Iterator[str]:
    """Yield the entries `name: description` of `Args:` and `Attributes:` in a docstring."""
    for section in re.finditer(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n?|\n)*)", text, re.MULTILINE):
        yield from re.findall(rf"^{section[1]}    (\*{{0,2}}[\w, ]+: .*)", section[2], re.MULTILINE)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, comment) of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def loose_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, comment) of each trailing comment that opens on a fragment."""
    for number, line in enumerate(source.splitlines(), 1):
        if (match := _TRAILING.search(line)) and match[2].lower() in COMMENT_FRAGMENTS:
            yield number, match[1]


_ABOVE = re.compile(r"# (Of|What|Who|Whose|Which|Whether|That|Those) ")


def fragments_above(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, comment) of each comment above a line of code that opens on a pronoun, or on "Of"."""
    lines = ["", *(line.strip() for line in source.splitlines())]
    for number, (before, line) in enumerate(itertools.pairwise(lines), 1):
        if _ABOVE.match(line) and not before.startswith("#"):
            yield number, line


def field_comments(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, comment) of each comment that begins above a field or behind it, and opens on a fragment."""
    lines, loose = source.splitlines(), dict(loose_comments(source))
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            for field in (node for node in each.body if isinstance(node, ast.AnnAssign)):
                first = field.lineno
                while lines[first - 2].lstrip().startswith("#"):
                    first -= 1
                if first < field.lineno:  # read like a trailing one
                    yield from ((first, text) for _, text in loose_comments(f"x  {lines[first - 1].lstrip()}"))
                behind = range(field.lineno, (field.end_lineno or field.lineno) + 1)
                yield from ((line, loose[line]) for line in behind if line in loose)


def violations(source: str) -> list[str]:
    """Return `line: reason` of each docstring or comment that breaks a rule."""
    tree = ast.parse(source)
    found = [f"{line}: a string documents a field: make it a comment" for line in strings_under_fields(tree)]
    opened = field_comments(source, tree)
    found += [f"{line}: comment of a field opens on a fragment: {text!r}" for line, text in opened]
    for line, text in docstrings(tree):
        first = re.match(r"[A-Za-z]+(?:'s)?", text)
        word = first.group().lower() if first else ""
        if word in FRAGMENTS:
            found.append(f"{line}: opens on a fragment: {text.splitlines()[0]!r}")
        elif word in THIRD_PERSON:
            found.append(f"{line}: not imperative: {text.splitlines()[0]!r}")
        entries = [entry for entry in described(text) if _opens_with(entry.split(": ", 1)[1], UNNAMED)]
        found += [f"{line}: names no thing: {entry!r}" for entry in entries if ": that of " not in entry]
        found += [f"{line}: says {match.group()!r}" for match in PRIVATE.finditer(text)]
    if PRIVATE.search(source):  # few files: tokens are slow to read
        found += [f"{line}: says {m.group()!r}" for line, text in comments(source) for m in PRIVATE.finditer(text)]
    return found


def _opens_with(text: str, words: frozenset[str]) -> bool:
    first = re.match(r"\w+", text)
    return first is not None and first.group().lower() in words


def messages(source: str) -> list[str]:
    """Return `line: reason` of each private word in a text of the program: a message, a help text, a label."""
    if not PRIVATE.search(source):
        return []
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    pairs = ((node.lineno, node.value) for node in texts if isinstance(node.value, str))
    return [f"{line}: says {match.group()!r}" for line, text in pairs for match in PRIVATE.finditer(text)]


def help_violations(source: str) -> list[str]:
    """Return `line: reason` of each `help="..."` that opens on a fragment."""
    if "help=" not in source:
        return []
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    texts = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "help"]
    return [
        f"{text.lineno}: help opens on a fragment: {ast.unparse(text)}"
        for text in texts
        if (first := re.match(r"f?['\"](\w+)", ast.unparse(text))) and first.group(1).lower() in OPEN_ENDED
    ]


def violations_below(folder: Path) -> list[str]:
    """Return `path:line: reason` for every Python file below a folder."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    return [f"{path}:{line}" for path in files for line in violations(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Whether it is empty.", "opens on a fragment"),
        ("Returns the mean.", "not imperative"),
        ("Draw the row anew.", "says 'anew'"),
    ],
)
def test_a_bad_docstring_is_found(text: str, reason: str):
    (found,) = violations(f'def f():\n    """{text}"""\n')
    assert found.startswith(f"1: {reason}")


def test_a_string_that_documents_a_field_is_found():
    source = 'class Config:\n    depth: int = 2\n    """Depth of the tree."""\n'
    assert violations(source) == ["3: a string documents a field: make it a comment"]


def test_a_description_of_an_argument_that_names_no_thing_is_found():
    text = (
        "Draw.\n\n    Args:\n        seed: of the draws.\n        count: that of rows.\n        rows: rows of them.\n"
    )
    (found,) = violations(f'def f():\n    """{text}    """\n')
    assert found == "1: names no thing: 'seed: of the draws.'"


def test_a_private_word_in_a_comment_is_found():
    assert violations("x = 1\ny = 2  # mended below\n") == ["2: says 'mended'"]


@pytest.mark.parametrize(
    "text", ["Return the mean.", "Mean of a row; whether it is empty.", "Versions of the weights."]
)
def test_a_good_docstring_is_not(text: str):
    assert violations(f'def f():\n    """{text}"""  # the usual case\n') == []


@pytest.mark.parametrize("comment", ["of a row", "What is read", "whether it is on", "beyond which it ends"])
@pytest.mark.parametrize("name", ["XConfig", "Row"])
def test_a_comment_of_a_field_that_opens_on_a_fragment_is_found(name: str, comment: str):
    (found,) = violations(f"class {name}:\n    depth: int = 2  # {comment}\n")
    assert found == f"2: comment of a field opens on a fragment: {comment!r}"
    (found,) = violations(f"class {name}:\n    # {comment}\n    # a tree\n    depth: int = 2\n")
    assert found == f"2: comment of a field opens on a fragment: {comment!r}"
    assert list(loose_comments(f"depth = 2  # {comment}\n")) == [(1, comment)]


@pytest.mark.parametrize("comment", ["depth of the tree", "on-demand or spot", "None: no limit", "ofs"])
def test_a_comment_that_says_what_a_field_is_is_not(comment: str):
    assert violations(f"class XConfig:\n    depth: int = 2  # {comment}\n    # of both\n") == []
    assert violations(f"class XConfig:\n    # {comment}\n    # of both\n    depth: int = 2\n") == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_trailing_comment_opens_on_a_fragment(room: str):
    sources = {path: path.read_text("utf-8") for path in sorted((ROOT / room).rglob("*.py"))}
    loose = [
        f"{path}:{line}: {text!r}: open on a noun or an imperative"
        for path, source in sources.items()
        if (found := list(loose_comments(source)))
        for line, text in set(found) & {(line, text.lstrip("# ")) for line, text in comments(source)}
    ]
    assert loose == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_comment_above_code_opens_on_a_fragment(room: str):
    loose = [
        f"{path}:{line}: {text!r}: open on a noun or an imperative"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, text in fragments_above(path.read_text("utf-8"))
    ]
    assert loose == []


@pytest.mark.parametrize("room", [*ROOMS, "examples", "tests"])
def test_docstrings_and_comments_are_in_plain_english(room: str):
    assert violations_below(ROOT / room) == []


def test_a_help_text_that_opens_on_a_fragment_is_found():
    source = 'option("--seed", help="Of the draws.")\noption("--k", help=f"Of {n} draws.")\noption("-j", help="Jobs.")'
    assert [line[:2] for line in help_violations(source)] == ["1:", "2:"]


def test_help_texts_say_what_an_option_is():
    files = sorted((ROOT / "tools").rglob("*.py"))
    assert [f"{path}:{line}" for path in files for line in help_violations(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("room", ROOMS)
def test_messages_and_help_are_in_the_vocabulary_of_the_field(room: str):
    files = sorted((ROOT / room).rglob("*.py"))
    assert [f"{path}:{line}" for path in files for line in messages(path.read_text(encoding="utf-8"))] == []


def test_pages_are_in_the_vocabulary_of_the_field():
    pages = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *(ROOT / "docs").rglob("*.md")]
    found = {path.name: page_violations(path.read_text(encoding="utf-8")) for path in pages}
    assert len(found) > 50 and {name: words for name, words in found.items() if words} == {}


def page_violations(text: str) -> list[str]:
    """Return the private words of a page, and the fragments that a paragraph or an item opens on."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    openings = re.findall(r"(?:\n\n|\n *[*-] )((?:Of|Them|Whose|Whom|Whether)\b.{0,30})", prose)
    return [*PRIVATE.findall(text), *openings]


@pytest.mark.parametrize("text", ["# A\n\nOf 500 steps ten count.", "# A\n\n* Them it keeps.", "A run is mended."])
def test_a_page_that_opens_on_a_fragment_is_found(text: str):
    assert len(page_violations(text)) == 1


def test_an_entry_of_the_changelog_is_one_short_line():
    advice = "take the file as it is on main, and add your lines: it merges by union, which can bring old lines back"
    assert changelog_violations((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) == [], advice


def changelog_violations(text: str) -> list[str]:
    """Return what makes a changelog long: entries that are not one line of 15 words, repeated lines, over 300 lines."""
    lines = text.splitlines()
    entries = [line for line in lines if line.startswith("* ")]
    return [
        *(f"{len(lines)} lines, at most 300: merge entries of one subject" for _ in range(len(lines) > 300)),
        *(f"over 15 words: {line}" for line in entries if len(line.split()) > 16),
        *(f"a second line: {line}" for line in lines if re.match(r"\s+\S", line)),
        *(f"twice: {line}" for line in sorted(set(entries)) if entries.count(line) > 1),
    ]


@pytest.mark.parametrize("text", ["* One" + " more" * 15, "* One,\n  and more", "* One\n* One", "# A\n" * 301])
def test_a_changelog_that_grows_is_found(text: str):
    assert len(changelog_violations(text)) == 1
    assert changelog_violations("* One" + " more" * 14 + "\n* Two\n" + "\n" * 298) == []


def test_a_private_word_in_a_message_is_found():
    assert messages('def f():\n    raise ValueError(f"{x} is made so")\n') == ["2: says 'is made so'"]


if __name__ == "__main__":
    lines = [line for folder in sys.argv[1:] or ROOMS for line in violations_below(Path(folder))]
    print("\n".join(lines))
    print(f"{len(lines)} violations")
