"""Words of the package: names are descriptive, and the glossary stays short."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
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


# Phrases that read like a translation, with what to write instead. They are refused in pages, comments and strings.
REFUSED = {
    r"bit by bit|to the bit": "bitwise identical, or bit for bit (bit by bit means gradually)",
    r"anew": "again, or re-create",
    r"beside": "next to, or compared with",
    r"but for": "except for",
    r"in the place of": "instead of",
    r"for (it|they|there|all|that) (is|are|was|were|has|have)": "because ...",
    r"(given?|gives|giving) up": "free, release or reshard",
    r"travel(s|led|ling|ing)?": "is sent, or is communicated",
    r"(lies|lie|lay|lying) (in|on|where|there|around|within|outside|whole|as)": "is stored in, or is located",
    r"(go(es)?|going|went) on": "continues, or resumes",
    r"gone": "freed, deleted, or no longer exists",
    r"(that|which|who) says?|says? (so|how|what|which|why|where|that|more)": "describes, specifies or reports",
    r"kinds? of": "types of",
    r"mend(s|ed|ing)?": "fix",
    r"nobody|somebody": "no tensor, no rank, or the user",
    r"what is (there|left|new|kept|held|gathered|reduced|leased|read|written|used|known|said)": "a noun",
    r"(is|are) to be (had|seen|found)": "is available, or is shown",
    r"(the (one|other)|both|the|all) sides?": "name the implementations",
    r"(a|the|no) card|on cards": "a GPU",
    r"(this|so) far as": "as far as",
    r"whole (again|ones?)": "unsharded, or full",
    r"(at|by) (once|hand)": "immediately, or manually",
    r"told (of|apart|by|to)|tells? of|hears? of": "is notified of, or distinguishes",
    r"put (back|together|out|in place|into force)": "restored, or assembled",
    r"neighbours?": "other libraries, or peers",
}
PATTERN = re.compile("|".join(rf"(?P<w{at}>\b(?:{words})\b)" for at, words in enumerate(REFUSED)), re.IGNORECASE)
FOLDERS = ("docs", "composable_shard", "pytest_composable_shard", "tests", "bench", "tutorials", "tools")
# Names of data in strings.
NAMES = {
    "steps beside": "a key of bench/results/checkpoint-*.json",
    "all ranks fail in a forward, and go on": "a case in bench/results/faults-*.json",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of prose of a Markdown page or of a Python file's comments and strings, without `code`."""
    source = path.read_text()
    if path.suffix == ".md":
        prose = re.sub(r"^ *(```|~~~).*?^ *\1", blank, source, flags=re.MULTILINE | re.DOTALL)
        for number, line in enumerate(prose.splitlines(), 1):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, re.sub(r"`[^`]*`|{[^}]*}", "", line)


def blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def refused(path: Path, root: Path) -> list[str]:
    """Each refused phrase of a file, as `file:line: phrase: write ...`."""
    places = []
    for number, line in texts(path):
        for name in NAMES:
            line = line.replace(name, "")
        for match in PATTERN.finditer(line):
            advice = list(REFUSED.values())[int(match.lastgroup[1:])]
            places.append(f"{path.relative_to(root)}:{number}: {match.group()}: write {advice}")
    return places


def test_no_page_comment_or_message_has_a_refused_phrase():
    files = [*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]
    files = [file for file in files if file.suffix in (".md", ".py") and file != Path(__file__).resolve()]
    files = [file for file in files if file.name != "integrations_table.md"]
    assert len(files) > 500
    assert [place for file in files for place in refused(file, ROOT)] == []


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [
        (
            "a.md",
            "It goes on\n\n```sh\ngo on\n```\n\nand `goes on` [x](goes on.md) beside.",
            ["1: goes on", "7: beside"],
        ),
        ("a.py", "# made anew\nanew = 'gone'\n", ["1: anew", "2: gone"]),
        ("a.py", 'def f():\n    """One.\n\n    Nobody.\n    """\n', ["4: Nobody"]),
    ],
)
def test_refused_phrases_are_reported_with_file_and_line(tmp_path, name, text, places):
    (tmp_path / name).write_text(text)
    reported = refused(tmp_path / name, tmp_path)
    assert [re.sub(r": write .*", "", place) for place in reported] == [f"{name}:{place}" for place in places]
