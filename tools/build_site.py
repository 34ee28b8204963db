"""Build the documentation site of the Markdown pages and the docstrings; `make docs` runs this.

Pages link to each other, and to scripts and tests of the repository, by relative paths, as a git host wants them. So
the site is made of a tree in which everything that is linked lies where it lies in the repository: the pages that
`mkdocs.yml` names, and the files to which they lead. Warnings are errors, those about docstrings too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "mkdocs.yml"
PAGES = "pages"
CODE = re.compile(r"^( *)(```|~~~).*?^\1\2|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(?:#[\w-]*)?\)")
NOTEST = re.compile(r"^```python notest$", re.MULTILINE)  # marks code for the tests, not for the site
WARNING = re.compile(r"^(?:WARNING|ERROR|griffe\b|mkdocs_?\w*:).*$", re.MULTILINE)


class SiteError(Exception):
    """The site cannot be built; the message lists what is wrong."""


def listed(nav: Any) -> Iterator[str]:
    """The pages of a `nav` in their order: strings, in lists and in the values of dictionaries."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(part)


def pages(root: Path) -> list[str]:
    """The pages that the configuration below `root` names, as paths from there."""
    return list(listed(yaml.safe_load((root / CONFIG).read_text())["nav"]))


def linked(root: Path, page: str) -> Iterator[str]:
    """The files below `root` to which a page leads, as paths from there; code is not looked at.

    Raises:
        SiteError: one that does not exist, or lies outside of `root`.
    """
    for target in LINK.findall(CODE.sub("", (root / page).read_text())):
        path = (root / page).parent.joinpath(target).resolve()
        if not path.is_file() or not path.is_relative_to(root):
            raise SiteError(f"{page} leads to {target}, which is no file of the repository")
        yield path.relative_to(root).as_posix()


def lay_out(root: Path, work: Path) -> None:
    """Copy configuration, pages, and the files to which these lead, from `root` into the new directory `work`.

    Raises:
        SiteError: a page, or a file to which one leads, that does not exist.
    """
    named = pages(root)
    missing = [page for page in named if not (root / page).is_file()]
    if missing:
        raise SiteError(f"{CONFIG} names pages that do not exist: {', '.join(missing)}")
    shutil.copytree(root / "composable_shard", work / "composable_shard", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(root / CONFIG, work / CONFIG)
    for file in {*named, *(target for page in named for target in linked(root, page))}:
        copy = work / PAGES / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".md"):
            copy.write_text(NOTEST.sub("```python", (root / file).read_text()))
        else:
            shutil.copy(root / file, copy)


def build(root: Path, work: Path, out: Path) -> None:
    """Build the site of the repository `root` in the new directory `work`, and put it in the place of `out`.

    Raises:
        SiteError: a page that is missing, or any warning of the build; `out` is as it was then.
    """
    lay_out(root, work)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", CONFIG]
    run = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0 or WARNING.search(run.stdout):
        raise SiteError(run.stdout)
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(work / "site", out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site; warnings are errors.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder of the site, made anew")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "site", help="a folder for the build, made anew")
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    try:
        build(ROOT, options.work.resolve(), options.out.resolve())
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
