"""Prepare a release in the working tree: set the version in pyproject.toml and write the section in CHANGELOG.md.

    make release VERSION=0.1.0        # moves the fragments of changelog.d into CHANGELOG.md, or dates a written section
    make release VERSION=0.2.0.dev0   # after the release: sets only the version

Nothing is committed, tagged or uploaded. CONTRIBUTING.md describes all steps of a release.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINE = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.dev(\d+)|rc(\d+))?")


def order_of(version: str) -> tuple[int, ...]:
    """Return a sort key: ``0.1.0.dev0`` is before ``0.1.0rc1``, which is before ``0.1.0``.

    Raises:
        ValueError: the version has another format.
    """
    if not (match := _VERSION.fullmatch(version)):
        raise ValueError(f"{version!r} is not a version; write it as 0.1.0, 0.1.0rc1 or 0.2.0.dev0")
    major, minor, patch, dev, candidate = match.groups()
    stage = (0, int(dev)) if dev else (1, int(candidate)) if candidate else (2, 0)
    return int(major), int(minor), int(patch), *stage


def with_version(text: str, version: str) -> str:
    """Return the text of pyproject.toml with a new version.

    Raises:
        ValueError: the version is not later than the current one, or the text does not have exactly one version.
    """
    written = _LINE.findall(text)
    if len(written) != 1:
        raise ValueError(f"pyproject.toml: expected one line `version = `, found {len(written)}")
    if order_of(version) <= order_of(written[0]):
        raise ValueError(f"{version} is not later than {written[0]}")
    return _LINE.sub(f'version = "{version}"', text)


def with_date(page: str, version: str) -> str | None:
    """Return CHANGELOG.md with today's date in a section "VERSION (unreleased)". None if there is no such section."""
    heading = f"## {version} (unreleased)\n"
    return page.replace(heading, f"## {version} ({date.today()})\n") if heading in page else None


def prepare(root: Path, version: str) -> None:
    """Set the version, and for a release also write the changelog, in the files of `root`.

    A release needs either fragments in changelog.d, or a section "VERSION (unreleased)" in CHANGELOG.md.

    Raises:
        ValueError: this cannot be the next version, or a release has neither fragments nor a section, or both.
        subprocess.CalledProcessError: towncrier failed. The version is unchanged.
    """
    page = root / "pyproject.toml"
    text = with_version(page.read_text(), version)
    if ".dev" not in version:
        changelog, fragments = root / "CHANGELOG.md", sorted((root / "changelog.d").glob("*.*.md"))
        if dated := with_date(changelog.read_text(), version):
            if fragments:
                names = ", ".join(fragment.name for fragment in fragments)
                raise ValueError(f"CHANGELOG.md has a section for {version}: move these fragments into it: {names}")
            changelog.write_text(dated)
            page.write_text(text)
            return
        if not fragments:
            raise ValueError("changelog.d has no fragments, so there is no change to release")
        command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", version]
        subprocess.run(command, cwd=root, check=True, stdout=sys.stderr)
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="0.1.0, 0.1.0rc1 or 0.2.0.dev0")
    version = parser.parse_args(arguments).version
    try:
        prepare(ROOT, version)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    print(f"{version}: review `git diff HEAD`, then continue with the steps in CONTRIBUTING.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
