"""``measure-links``: measure this machine for the planner."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from .._plan.text import count
from ..errors import ComposableShardError, ShardConfigError, ShardConfigValueError
from ..planner import measuring, ranks
from ..planner.link_fit import LinkFit
from ..planner.measuring import QUICK, Collective, Figure, Measurement, Settings
from ..planner.ranks import Place, Progress
from .terminal import Table, add_debug, in_bytes, in_seconds, printable, progress, say_error, show

NAME = "measure-links"
DESCRIPTION = """\
Measure this machine for the planner: links between ranks (with the collectives of this library), matrix products by
dtype, memory bandwidth, and the time to launch an operator. All ranks measure at the same time. Each value is the
median time of the slowest rank.

The command starts the ranks on this node. Under torchrun, each process is one of the ranks. If there are several nodes,
the links between them are measured, too.
"""
EXAMPLE = """\
examples:
  python -m composable_shard measure-links --ranks 2 --json machine.json
  torchrun --nnodes 2 --nproc-per-node 8 ... -m composable_shard measure-links --json machine.json

exit codes: 0 done; 1 a rank failed, --timeout was reached, or the file could not be written; 2 the arguments are
wrong; 130 interrupted. No process is left running.
"""
_INTERRUPTED = 130
_DAY_S = 86_400


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="measure this machine, and write it as JSON for the planner",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="number of processes to start (default: 2, or one per accelerator)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="file to write or replace")
    parser.add_argument("--name", help="name of the machine (default: name of its device)")
    parser.add_argument("--device", default="auto", help='"cpu", "cuda", ... (default: the accelerator, if any)')
    parser.add_argument("--quick", action="store_true", help="measure for a few seconds, less precisely")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600.0, help="end all ranks after this time (default: 600)"
    )
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if not 0 < parsed.timeout <= _DAY_S:
        parser.error("--timeout: expected seconds above 0, and at most a day")
    try:
        place = ranks.place_of_launcher()
        if place is None or place.rank == 0:
            _check_writable(parsed.json)
            _report(_in_new_ranks(parsed) if place is None else _in_this_rank(place, parsed), parsed.json)
        else:
            _in_this_rank(place, parsed)
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted\n")
        return _INTERRUPTED
    except (ComposableShardError, OSError) as error:
        say_error(parser, parsed, error)
        return 2 if isinstance(error, ShardConfigError) else 1
    return 0


def _in_new_ranks(parsed: argparse.Namespace) -> Measurement:
    number = ranks.default_ranks(parsed.device) if parsed.ranks is None else parsed.ranks
    ranks.check_ranks(number)
    asked = ranks.device_kind(parsed.device, number), _settings(parsed), parsed.name, parsed.timeout
    with progress() as bar:
        measurements = ranks.on_ranks(measuring.ON_RANK, number, *asked, timeout=parsed.timeout, progress=bar)
    measurement: Measurement = measurements[0]
    return measurement


def _in_this_rank(place: Place, parsed: argparse.Namespace) -> Measurement:
    if parsed.ranks not in (None, place.ranks):
        raise ShardConfigValueError(
            f"--ranks {parsed.ranks}: a launcher has started {place.ranks} ranks; omit the argument"
        )
    ranks.check_ranks(place.ranks)
    kind = ranks.device_kind(parsed.device, place.local_ranks)
    shown: AbstractContextManager[Progress | None] = progress() if place.rank == 0 else nullcontext()
    with ranks.time_limit(parsed.timeout, f"rank {place.rank} of {NAME}"), shown as bar:
        return measuring.measure_rank(place, kind, _settings(parsed), parsed.name, parsed.timeout, bar or ranks.silent)


def _settings(parsed: argparse.Namespace) -> Settings:
    return QUICK if parsed.quick else Settings()


def _check_writable(path: Path | None) -> None:
    """Check, before measuring, that the result can be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise NotADirectoryError(f"--json {path}: give a file in a directory that exists")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"--json {path}: the directory is not writable")


# ---------------------------------------------------------------------------------------------------------- text


def _report(measurement: Measurement, path: Path | None) -> None:
    show(tables(measurement))
    for warning in measurement.warnings:
        sys.stderr.write(f"warning: {printable(warning)}\n")
    if path is not None:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(measurement.machine.to_json())
        partial.replace(path)
        print(f"\n{path}: written")


def tables(measurement: Measurement) -> list[Table]:
    """A measurement as tables."""
    machine = measurement.machine
    by = f"{count(measurement.ranks, 'rank')} on {measurement.device}, {count(measurement.threads, 'thread')} each"
    figures = [(figure.name, _speed(figure)) for figure in measurement.figures]
    return [
        Table(f"{machine.name}: {by}", [*figures, ("memory per rank", in_bytes(machine.memory))]),
        Table(
            "Links: a collective takes latency + (ranks - 1) / ranks * bytes / bandwidth",
            [(name, *_fitted(fit)) for name, fit in measurement.links.items()],
            ("", "latency", "bandwidth", "largest error"),
        ),
        Table(
            "Collectives: median times of the slowest rank, and the transport",
            list(_collectives(measurement.collectives)),
            ("", "bytes", measuring.GATHER, measuring.REDUCTION, "formula"),
        ),
        *([Table("Notes", [(note,) for note in measurement.notes])] if measurement.notes else []),
    ]


def _fitted(fit: LinkFit) -> tuple[str, str, str]:
    return in_seconds(fit.link.latency), f"{in_bytes(fit.link.bandwidth)}/s", f"{fit.error:.0%}"


def _speed(figure: Figure) -> str:
    if figure.name == measuring.OPERATOR:
        return in_seconds(figure.seconds)
    if figure.name.startswith(measuring.PRODUCT):
        return f"{figure.rate / 1e9:,.4g} GFLOP/s"
    return f"{in_bytes(figure.rate)}/s"


def _collectives(collectives: Sequence[Collective]) -> Iterator[tuple[str, ...]]:
    """One row per size and link: a gather, and the reduction that follows it in the list."""
    for gather, reduction in zip(collectives[::2], collectives[1::2], strict=True):
        times = [f"{in_seconds(each.figure.seconds)} {each.transport}" for each in (gather, reduction)]
        yield gather.link, f"{gather.nbytes >> 10:,} KiB", *times, in_seconds(gather.seconds)
