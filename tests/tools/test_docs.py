"""What the documents say of tests is true: the files exist, and every line of the migration page has one or says no."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page):
    text = page.read_text()
    named = set(re.findall(r"(?:tests|bench|tutorials|docs)/[\w./-]+\.(?:py|md|json)", text))
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def rows(page):
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] != "shown by"]


def test_every_line_of_the_migration_page_names_a_test_or_says_that_there_is_none():
    found = rows(ROOT / "docs" / "migration.md")
    assert len(found) > 50
    untested = [" ".join(row) for row in found if "tests/" not in row[-1]]
    assert [row for row in untested if not re.search("not supported|never run", row)] == []


def test_the_map_of_the_files_in_the_readme_is_whole():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("## A map of the files") : text.index("## Status")]
    package = ROOT / "composable_shard"
    files = {path.name for path in package.glob("_*.py")} | {
        f"{wing.name}/{path.name}" for wing in package.glob("_*/") for path in wing.glob("*.py")
    }
    known = {name for name in files if not name.endswith("__init__.py") and not name.startswith("_integrations")}
    assert {name for name in known if f"`{name}`" not in table} == set()
