"""Build the documentation site from Markdown pages and docstrings. Run it with `make docs`.

Pages use relative links to other pages, scripts and tests, which also work on a git host. So the site is built from a
copy of the repository's tree that contains the pages of `mkdocs.yml` and all files they link to. All warnings are
errors, including those about docstrings.
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
NOTEST = re.compile(r"^```python notest$", re.MULTILINE)  # a marker for the tests, removed for the site
WARNING = re.compile(r"^(?:WARNING|ERROR|griffe\b|mkdocs_?\w*:).*$", re.MULTILINE)


class SiteError(Exception):
    """The site cannot be built; the message lists what is wrong."""


def listed(nav: Any) -> Iterator[str]:
    """Yield the pages of a `nav` in order. They are strings in nested lists and dictionaries."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(part)


def pages(root: Path) -> list[str]:
    """Return the pages of the configuration in `root`, as paths relative to `root`."""
    return list(listed(yaml.safe_load((root / CONFIG).read_text())["nav"]))


def linked(root: Path, page: str) -> Iterator[str]:
    """Yield the files that a page links to, as paths relative to `root`. Links in code are ignored.

    Raises:
        SiteError: a link to a file that does not exist, or that is outside `root`.
    """
    for target in LINK.findall(CODE.sub("", (root / page).read_text())):
        path = (root / page).parent.joinpath(target).resolve()
        if not path.is_file() or not path.is_relative_to(root):
            raise SiteError(f"{page} links to {target}, which is not a file of the repository")
        yield path.relative_to(root).as_posix()


def lay_out(root: Path, work: Path) -> None:
    """Copy the configuration, the pages and all linked files from `root` into the new directory `work`.

    Raises:
        SiteError: a page or a linked file does not exist.
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
    """Build the site of the repository `root` in the new directory `work`, and replace `out` by it.

    Raises:
        SiteError: a page is missing, or the build printed a warning. `out` is unchanged then.
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
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="directory of the site; replaced")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "site", help="build directory; replaced")
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
