"""Words of the package: names are descriptive, and the glossary stays short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "composable_shard"
MODULES = sorted(PACKAGE.rglob("*.py"))
EMPTY_NAMES = {"found", "its", "theirs", "there", "told"}
MOST_TERMS = 25


def names_of(node: ast.AST) -> list[str]:
    """The names that a node defines: variables, arguments, attributes, functions, classes and imports."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.alias):
        return [node.asname or node.name]
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return [node.name] if node.name else []
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    return []


def empty_names(source: str, file: str) -> list[str]:
    """Each name of the source that is not descriptive, as `file:line: name`."""
    return [
        f"{file}:{node.lineno}: {name}"
        for node in ast.walk(ast.parse(source))
        for name in names_of(node)
        if name.strip("_") in EMPTY_NAMES
    ]


def terms(page: str) -> list[str]:
    """The rows of the table under the heading `Glossary`. A row can explain several words."""
    section = page.split("\n## Glossary\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    assert rows[0] == "term"
    assert set(rows[1]) == {"-"}
    return rows[2:]


def test_names_in_the_package_are_descriptive():
    assert len(MODULES) > 50
    empty = [line for file in MODULES for line in empty_names(file.read_text(), file.relative_to(ROOT).as_posix())]
    assert empty == []


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "found: int = 1",
        "for there, _ in pairs: pass",
        "made = [its for its in groups]",
        "def f(*, told=None): pass",
        "def there(self): pass",
        "self.told = set()",
        "self._theirs = {}",
        "if (theirs := f()): pass",
        "with f() as found: pass",
        "import torch as theirs",
        "try: pass\nexcept OSError as found: pass",
    ],
)
def test_a_name_that_is_not_descriptive_is_reported_with_file_and_line(source):
    [seen] = empty_names("\n" + source, "a.py")
    assert re.fullmatch(r"a\.py:[23]: _?(found|its|theirs|there|told)", seen)


def test_names_that_are_only_read_or_contain_such_words_are_allowed():
    assert empty_names("print(spec.found); founder = 1; x = 'found'; f(found=1); found_by = 1", "a.py") == []


def test_the_glossary_is_short():
    explained = terms((ROOT / "CONTRIBUTING.md").read_text())
    assert "group" in explained
    assert len(explained) == len(set(explained))
    assert len(explained) <= MOST_TERMS


def test_the_rows_of_a_glossary_are_counted():
    rows = "".join(f"| term {number} | a meaning |\n" for number in range(26))
    page = f"# Page\n\n## Glossary\n\nWords.\n\n| term | meaning |\n|---|---|\n{rows}\n## Next\n\n| a | b |\n"
    assert len(terms(page)) == 26
