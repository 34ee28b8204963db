"""Shared parts of commands: tables, progress, and text for bytes and seconds, on a terminal and elsewhere."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .._plan.text import count, table


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title. All rows, and the heads if there are any, have the same number of cells.

    Attributes:
        right: indices of the right-aligned columns.
        styles: the style of each row in rich; empty if no row has one.
        note: a line below the table.
    """

    title: str
    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    right: Collection[int] = ()
    styles: Sequence[str] = ()
    note: str = ""


def show(tables: Sequence[Table]) -> None:
    """Print tables: with rich on a terminal, if it is installed, else as plain text."""
    if not draw(tables):
        sys.stdout.write("\n".join(_plain(table) for table in tables))


def draw(tables: Sequence[Table]) -> bool:
    """Print tables with rich. Without a terminal or rich, print nothing and return False."""
    return sys.stdout.isatty() and _show_by_rich(tables)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """The lines of a table with aligned columns. Empty columns are left out.

    Args:
        rows: rows of cells.
        right: indices of the right-aligned columns.
    """
    columns = [(number, column) for number, column in enumerate(zip(*rows, strict=True)) if any(column)]
    left = [at for at, (number, _) in enumerate(columns) if number not in right]
    lines = table(zip(*(column for _, column in columns), strict=True), left)
    yield from (f"  {line}".rstrip() for line in lines)


def printable(text: str) -> str:
    """Replace control characters, which could control the terminal, by their escape sequences."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def in_bytes(size: float) -> str:
    """Format a number of bytes."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return count(int(size), "byte")


def in_seconds(seconds: float) -> str:
    """Format a time, with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--debug``, which `say_error` reads."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def say_error(parser: argparse.ArgumentParser, parsed: argparse.Namespace, error: Exception, text: str = "") -> None:
    """Print why a command failed, as one line or as a JSON object. Call it where the error is caught.

    Args:
        parser: parser of the command.
        parsed: the parsed arguments. With ``--debug`` the error is raised again.
        error: the error, whose text is printed.
        text: text to print instead.
    """
    if parsed.debug:
        raise error
    message = printable(text or str(error))
    if getattr(parsed, "json", False) is True:
        print(json.dumps({"error": type(error).__name__, "message": message}))
    else:
        sys.stderr.write(f"{parser.prog}: {message}\n")


def size(text: str) -> int:
    """Parse a size such as 5GB or 40GiB, for arguments of a command. Return bytes."""
    written = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(I?)B?", text.strip().upper())
    nbytes = 0
    if written is not None:
        nbytes = int(float(written[1]) * (1024 if written[3] else 1000) ** " KMGT".index(written[2] or " "))
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one such as 5GB or 40GiB")
    return nbytes


@contextmanager
def progress(of_bytes: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """Context with a progress bar on stderr. It is None if stderr is not a terminal or rich is not installed.

    The bar is called with the current task, the number of steps done, and the total number of steps.

    Args:
        of_bytes: whether steps are bytes, which are shown with the remaining time.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield None
        return
    if not sys.stderr.isatty():
        yield None
        return
    more = (DownloadColumn(), TimeRemainingColumn()) if of_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *more)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _plain(given: Table) -> str:
    rows = [given.heads, *given.rows] if given.heads else given.rows
    lines = aligned([[printable(cell) for cell in row] for row in rows], given.right)
    return "".join(f"{line}\n" for line in (given.title, *lines, *filter(None, [given.note])))


def _show_by_rich(tables: Sequence[Table]) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as Grid
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    for each in tables:
        grid = Grid(
            title=Text(each.title, "bold"),
            caption=Text(each.note) if each.note else None,
            title_justify="left",
            caption_justify="left",
            show_header=bool(each.heads),
            box=box.SIMPLE,
        )
        for number, head in enumerate(each.heads or [""] * len(each.rows[0])):
            grid.add_column(Text(head), overflow="fold", justify="right" if number in each.right else "left")
        for row, style in zip(each.rows, each.styles or [""] * len(each.rows), strict=True):
            grid.add_row(*(Text(printable(cell)) for cell in row), style=style)
        console.print(grid)
    return True
