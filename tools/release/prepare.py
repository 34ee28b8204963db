"""Make the working tree that of a release: its version in pyproject.toml, and its section in CHANGELOG.md.

    make release VERSION=0.1.0        # the fragments in changelog.d become the section, and are removed
    make release VERSION=0.2.0.dev0   # afterwards: the version alone

Nothing is committed, tagged or uploaded. CONTRIBUTING.md says what comes before and after.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINE = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.dev(\d+)|rc(\d+))?")


def order_of(version: str) -> tuple[int, ...]:
    """What versions are compared by: ``0.1.0.dev0`` comes before ``0.1.0rc1``, and that before ``0.1.0``.

    Raises:
        ValueError: it is not written as one of these.
    """
    if not (match := _VERSION.fullmatch(version)):
        raise ValueError(f"{version!r} is no version; write it as 0.1.0, 0.1.0rc1 or 0.2.0.dev0")
    major, minor, patch, dev, candidate = match.groups()
    stage = (0, int(dev)) if dev else (1, int(candidate)) if candidate else (2, 0)
    return int(major), int(minor), int(patch), *stage


def with_version(text: str, version: str) -> str:
    """The text of a pyproject.toml with another version.

    Raises:
        ValueError: it is not later than the one that is there, which must stand there once.
    """
    written = _LINE.findall(text)
    if len(written) != 1:
        raise ValueError(f"pyproject.toml: `version = ` stands there {len(written)} times, and should once")
    if order_of(version) <= order_of(written[0]):
        raise ValueError(f"{version} is not later than {written[0]}")
    return _LINE.sub(f'version = "{version}"', text)


def prepare(root: Path, version: str) -> None:
    """Change the files below `root`.

    Raises:
        ValueError: that cannot be the next version, or a release has no fragments.
        subprocess.CalledProcessError: towncrier has failed; the version is as it was.
    """
    page = root / "pyproject.toml"
    text = with_version(page.read_text(), version)
    if ".dev" not in version:
        if not list((root / "changelog.d").glob("*.*.md")):
            raise ValueError("changelog.d has no fragments: nothing that a user can notice has changed")
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
    print(f"{version}: look at `git diff HEAD`, then go on as CONTRIBUTING.md says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
