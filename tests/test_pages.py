"""Pages of concepts are short, so that a reader gets through one; the site works without a network, its search too."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LIMIT = 1500
# Longer pages, by words: a list to be shortened, never added to.
LONGER: dict[str, int] = {}


@pytest.mark.parametrize("folder", ["concepts", "inside"])
def test_pages_are_at_most_1500_words_long(folder: str) -> None:
    words = {f"{folder}/{path.name}": len(path.read_text().split()) for path in (DOCS / folder).glob("*.md")}
    assert len(words) > 10
    assert {page: count for page, count in words.items() if count > LONGER.get(page, LIMIT)} == {}
    assert [page for page in LONGER if words.get(page, LIMIT + 1) <= LIMIT] == [], "short now: remove them from LONGER"


def test_search_works_from_the_file() -> None:
    """The plugin would take the worker's stand-in from elsewhere if ours were not named."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert "offline" in site["plugins"]
    [shim] = [path for path in site["extra"]["polyfills"] if "iframe-worker" in path]
    assert "window.IFrameWorker" in (DOCS / shim).read_text()
