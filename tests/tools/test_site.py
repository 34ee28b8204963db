"""The documentation site lists all pages and all public names, and builds without warnings."""

from __future__ import annotations

import importlib.util
import inspect
import pydoc
import re
import tempfile
from importlib import import_module
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "build_site.py"
REFERENCE = ROOT / "docs" / "reference"
SPACES = sorted(page.stem for page in REFERENCE.glob("*.md"))


def load():
    spec = importlib.util.spec_from_file_location("build_site", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = load()


def test_the_navigation_contains_every_page_once():
    named = site.pages(ROOT)
    assert len(named) == len(set(named))
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert written - set(named) == set()
    assert [page for page in named if not (ROOT / page).is_file()] == []
    assert named[:3] == ["README.md", "docs/getting_started.md", "docs/faq.md"]


def space(page):
    name = page if page == "composable_shard" else f"composable_shard.{page}"
    return name, import_module(name)


def public(module):
    """The names in a module's `__all__`, or all its names without an underscore, except modules."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return {name for name in names if not inspect.ismodule(getattr(module, name))}


def test_the_reference_has_every_public_name():
    for page in SPACES:
        name, module = space(page)
        text = (REFERENCE / f"{page}.md").read_text()
        shown = re.findall(rf"^::: {re.escape(name)}\.(\w+)$", text, flags=re.MULTILINE)
        assert len(shown) == len(set(shown)), page
        torchs = {word for word in re.findall(r"`(\w+)`", text) if word in public(module)} - set(shown)
        assert set(shown) | torchs == public(module), page
        assert all(getattr(module, each).__module__.startswith("torch.") for each in torchs), page


def test_public_data_has_a_docstring():
    package = griffe.load("composable_shard", search_paths=[ROOT])
    for page in SPACES:
        name, module = space(page)
        data = [each for each in public(module) if not callable(getattr(module, each))]
        lacking = [each for each in data if not griffe_member(package, f"{name}.{each}").has_docstring]
        assert lacking == [], page


def griffe_member(package, name):
    member = package[name.removeprefix("composable_shard.")]
    return member.final_target if member.is_alias else member


def test_every_public_namespace_has_a_page_of_reference():
    folders = {path.parent.name for path in (ROOT / "composable_shard").glob("[!_]*/__init__.py")}
    assert folders - set(SPACES) == {"cli"}  # docs/command_line.md


def test_the_site_builds_without_warnings(tmp_path):
    site.build(ROOT, tmp_path / "work", tmp_path / "site")
    built = tmp_path / "site"
    assert [page for page in site.pages(ROOT) if not pages_of(built, page).is_file()] == []
    reference = (built / "docs" / "reference" / "composable_shard.html").read_text()
    anchors = set(re.findall(r'id="composable_shard\.([\w.]+)"', reference))
    assert {
        "fully_shard",
        "make_plan",
        "ShardPlan.to_json",
        "FSDPModule.unshard",
        "FSDPModule.set_pool_policy",
    } <= anchors
    assert (built / "tutorials" / "train.py").read_text() == (ROOT / "tutorials" / "train.py").read_text()
    texts = [path.read_text() for path in built.rglob("*.html")]
    loaded = {
        url for text in texts for url in re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="(\w+://[^"]*)', text)
    }
    assert loaded == set(), "a page loads something from the network"


def pages_of(built, page):
    return built / ("index.html" if page == "README.md" else re.sub(r"README\.md$", "index.md", page)[:-3] + ".html")


GOOD = (
    '"""A package."""\n\n\ndef add(first: int) -> None:\n    """Add.\n\n    Args:\n        first: a number.\n    """\n'
)


@pytest.fixture
def small(tmp_path):
    """A repository with two pages and one function."""
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (root / "composable_shard").mkdir()
    (root / "composable_shard" / "__init__.py").write_text(GOOD)
    config = (ROOT / "mkdocs.yml").read_text()
    short = re.sub(r"^nav:\n(?:  .*\n)+", "nav:\n  - README.md\n  - docs/other.md\n", config, flags=re.MULTILINE)
    assert short != config
    (root / "mkdocs.yml").write_text(short)
    (root / "README.md").write_text("# Home\n\n[other](docs/other.md#a-part), `[not](a_link.md)`\n")
    (root / "docs" / "other.md").write_text(
        "# Other\n\n## A part\n\n[home](../README.md)\n\n::: composable_shard.add\n"
    )
    return root


def test_building_a_small_site_replaces_the_existing_one(small, tmp_path):
    out = tmp_path / "site"
    out.mkdir()
    (out / "old.html").write_text("")
    site.build(small, tmp_path / "work", out)
    assert sorted(path.name for path in out.glob("*.html")) == ["404.html", "index.html"]
    assert 'href="docs/other.html#a-part"' in (out / "index.html").read_text()
    assert 'id="composable_shard.add"' in (out / "docs" / "other.html").read_text()


def test_code_that_is_not_tested_is_shown_as_code(small, tmp_path):
    (small / "README.md").write_text("# Home\n\n```python notest\n# a comment\n```\n")
    site.build(small, tmp_path / "work", tmp_path / "site")
    page = (tmp_path / "site" / "index.html").read_text()
    assert "notest" not in page
    assert "# a comment" in re.sub("<[^>]*>", "", page)


def refused(small, tmp_path, file, text, message):
    """Check that building the small site with a changed file raises this error and keeps the existing site."""
    before = (small / file).read_text()
    (small / file).write_text(text)
    out = tmp_path / "before"
    out.mkdir(exist_ok=True)
    (out / "old.html").write_text("")
    with pytest.raises(site.SiteError, match=re.escape(message)):
        site.build(small, Path(tempfile.mkdtemp(dir=tmp_path)) / "work", out)
    assert [path.name for path in out.iterdir()] == ["old.html"]
    (small / file).write_text(before)


def test_a_missing_file_is_an_error(small, tmp_path):
    refused(small, tmp_path, "README.md", "# Home\n\n[other](docs/others.md)\n", "README.md links to docs/others.md")
    refused(small, tmp_path, "README.md", "# Home\n\n![other](docs/a.png)\n", "README.md links to docs/a.png")
    refused(small, tmp_path, "README.md", "# Home\n\n[out](../root.md)\n", "README.md links to ../root.md")
    refused(small, tmp_path, "mkdocs.yml", "nav:\n  - docs/nothing.md\n", "do not exist: docs/nothing.md")


def test_missing_anchors_and_names_are_errors(small, tmp_path):
    page = "# Home\n\n[other](docs/other.md#no-part)\n"
    refused(small, tmp_path, "README.md", page, "anchor does not exist")
    page = "# Other\n\n## A part\n\n::: composable_shard.subtract\n"
    refused(small, tmp_path, "docs/other.md", page, "composable_shard.subtract")


def test_a_docstring_with_an_unknown_argument_is_an_error(small, tmp_path):
    text = GOOD.replace("first: a", "second: a")
    refused(small, tmp_path, "composable_shard/__init__.py", text, "'second' does not appear")


def test_help_for_a_namespace_lists_every_public_name():
    for page in SPACES:
        name, module = space(page)
        text = pydoc.plain(pydoc.render_doc(module))
        assert public(module) <= set(re.findall(r"^    (?:class )?(\w+)\b", text, flags=re.MULTILINE)), name
