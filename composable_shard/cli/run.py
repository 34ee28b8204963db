"""``run``: run an unchanged script or module with this library instead of torch's FSDP2."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .._integrations.install import install
from .program import NotFoundError, run_program

NAME = "run"
DESCRIPTION = """\
Run a script or a module as Python would, after composable_shard.install(). Wherever the script, or a library that it
uses, calls torch's fully_shard, this library shards. The script is not changed.

Processes that the script starts with multiprocessing also call install(). Processes that it starts with a command line
do not.
"""
EXAMPLE = """\
examples:
  python -m composable_shard run train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m composable_shard run train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m composable_shard run -m my_package.train --lr 3e-4
  accelerate launch --config_file fsdp2.yaml -m composable_shard run train.py
"""

_KEY = "composable_shard"  # in the configuration that multiprocessing passes to child processes


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        usage="%(prog)s [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        help="run a script that uses torch's FSDP2 with this library instead",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a file, or a directory or zip with __main__.py")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module, as for python -m")
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line that begins with this command's name into the command's arguments and the script's."""
    for at, word in enumerate(given[1:], start=1):
        if word == "-m":
            return list(given[: at + 2]), list(given[at + 2 :])
        if word.startswith("-m") or not word.startswith("-"):
            return list(given[: at + 1]), list(given[at + 1 :])
    return list(given), []


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if parsed.script is None and parsed.module is None:
        parser.error("give a SCRIPT, or -m MODULE")
    install()
    _keep_importable()
    multiprocessing.current_process()._config[_KEY] = _InstallInChild()  # type: ignore[attr-defined]
    try:
        run_program(parsed.module or parsed.script, parsed.passed_on, parsed.module is not None)
    except NotFoundError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


def _keep_importable() -> None:
    """Make this library importable in child processes, which get `sys.path` without this program's first entry."""
    home = Path(__file__).parents[1]
    others = 0 if sys.flags.safe_path else 1
    spec = PathFinder.find_spec(_KEY, sys.path[others:])
    if spec is None or spec.origin != str(home / "__init__.py"):  # for example, a checkout in the current directory
        sys.path.insert(others, str(home.parent))


class _InstallInChild:
    """Part of the configuration that multiprocessing passes to child processes. Unpickling it there calls `install`.

    A spawned process imports the script before that. If module-level code of the script calls a function of FSDP2,
    instead of only importing it, it therefore calls torch's own.
    """

    def __reduce__(self) -> tuple[Callable[[], _InstallInChild], tuple[()]]:
        return _install_in_child, ()


def _install_in_child() -> _InstallInChild:
    install()
    return _InstallInChild()
