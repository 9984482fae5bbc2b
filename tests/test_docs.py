"""Pages hold together: links lead to headings that are there, and the page on one run names classes of the code."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return {
        re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_to_a_heading(page):
    wrong = []
    for place, anchor in LINK.findall(page.read_text()):
        target = page.parent / place if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{place}#{anchor}")
    assert wrong == []


def test_one_run_is_followed_in_sixty_lines_and_twenty_classes_that_are_there():
    text = (ROOT / "docs" / "one-run.md").read_text()
    code = {path: path.read_text() for path in (ROOT / "pipeline").rglob("*.py")}
    classes = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", text))
    assert len(text.splitlines()) <= 60
    assert 10 <= len(classes) <= 20
    missing = [
        name for name in classes if not any(re.search(rf"^class {name}\b", each, re.M) for each in code.values())
    ]
    assert missing == []
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert [name for name in files if not any(path.as_posix().endswith(f"/{name}") for path in code)] == []
