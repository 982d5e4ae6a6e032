"""The documents are true: every file stands in the README's tree, every path that they name exists."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.front_door import REPOSITORY


def tracked() -> list[str]:
    """The files that git tracks; skips where this is no checkout."""
    listing = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listing.returncode != 0 or not listing.stdout:
        pytest.skip("not a git checkout")
    return listing.stdout.splitlines()


def test_the_readme_shows_every_file_once() -> None:
    tree = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("## The tree, in reading order")[2]
    shown = re.findall(r"^([\w./-]+)(?:  +\S.*)?$", tree.partition("```")[2].partition("```")[0], re.MULTILINE)
    assert sorted(shown) == sorted(tracked())


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/training.md", "docs/judging.md"])
def test_links_and_paths_lead_somewhere(page: str) -> None:
    path = REPOSITORY / page
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"`((?:docs|examples|prompts|bench|tests|sparta_api)/[\w./-]+\.\w+)`", text)
    missing += [name for name in named if not (REPOSITORY / name).exists()]
    assert missing == []


def test_no_page_holds_a_placeholder() -> None:
    pages = [REPOSITORY / name for name in tracked() if name.endswith(".md")]
    found = [
        page.name
        for page in pages
        if re.search(r"^[A-Z]+(_[A-Z]+)+$|\b[A-Z]+_PARAGRAPH\b", page.read_text("utf-8"), re.M)
    ]
    assert found == []
