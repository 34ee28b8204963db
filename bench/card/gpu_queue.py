"""A queue of GPU measurements, each of at most nine minutes.

    python bench/card/gpu_queue.py next           # the first entry that was not measured on this GPU and release line
    python bench/card/gpu_queue.py run            # on the machine with the GPU: runs that entry
    python bench/card/gpu_queue.py record FILE    # in a git checkout: stores the results in bench/results/gpu/
    python bench/card/gpu_queue.py list           # all entries and their measurements

`next --seconds 240` and `run --seconds 240` choose parts that fit into the remaining time. `run NAME --dry` runs an
entry with tiny settings on the CPU, to find mistakes before using a GPU. Entries and their commands are in
`_queue_entries.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from _queue_entries import LIMIT_S, QUEUE, QueueError, find_entry
from _queue_results import (
    RESULTS,
    ROOT,
    changed_files,
    detect_gpu,
    find_next,
    matches,
    read_document,
    read_outcomes,
    read_release_line,
    read_sources,
    result_file,
    sort_parts,
    store,
    write_table,
)
from _queue_run import Run, check_gpu, download_command, find_missing

PROGRAM = "python bench/card/gpu_queue.py"


def show_next(kind: str | None, seconds: float) -> int:
    release = read_release_line()
    where = f"{kind.upper() if kind else 'any GPU'} with release line {release}"
    found = find_next(kind, release, seconds)
    if found is None:
        print(f"every entry that fits into {format_time(seconds)} was measured on {where}")
        return 0
    entry, names = found
    some = "" if names == entry.part_names else f" --parts {','.join(names)}"
    limits = ", ".join(f"{part.name} {part.limit_s} s" for part in entry.parts if part.name in names)
    file = result_file(entry, kind or "GPU").relative_to(ROOT)
    print(
        f"entry:     {entry.name}, {QUEUE.index(entry) + 1} of {len(QUEUE)}: the first not measured on {where}\n"
        f"question:  {entry.question}\n"
        f"command:   {PROGRAM} run {entry.name}{some} --out OUT\n"
        f"time:      at most {format_time(entry.limit_s(names))}: {limits}{', in parallel' if entry.parallel else ''}\n"
        f"result:    {file}, written by {PROGRAM} record OUT/{entry.name}.json"
    )
    if missing := find_missing(part for part in entry.parts if part.name in names):
        print(f"wheels:    {download_command(missing)}")
    warn_of_changes()
    return 0


def warn_of_changes() -> None:
    """Print a note if sources are not committed, because `record` needs a commit with the measured sources."""
    try:
        changed = changed_files(read_sources())
    except QueueError:
        return  # no git on this machine; `record` checks this later
    if changed:
        print(f"note:      commit {', '.join(changed[:5])} before you measure: `record` needs a commit of the sources")


def show_list(kind: str | None) -> int:
    release = read_release_line()
    for number, entry in enumerate(QUEUE, 1):
        found = [each for each in read_outcomes(entry, release) if each.parts and matches(each.kind, kind)]
        print(f"{number:2}. {entry.name} ({format_time(entry.limit_s(entry.part_names))}): {entry.question}")
        for text in [each.describe() for each in found] or ["not measured"]:
            print(f"    {text}")
    return 0


def format_time(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def run_entry(options: argparse.Namespace) -> int:
    entry = find_entry(options.name) if options.name else None
    gpu = None if options.dry else detect_gpu()
    if not options.dry:
        if gpu is None:
            raise QueueError("nvidia-smi finds no GPU on this machine; --dry runs an entry on the CPU")
        check_gpu()
    if entry is None:
        # Results in the output folder are measured but not recorded yet. Do not measure them again.
        found = find_next(gpu and gpu.kind, read_release_line(), options.seconds, (RESULTS, options.out))
        if found is None:
            raise QueueError(
                f"every entry that fits into {format_time(options.seconds)} was measured; to repeat one, pass its name"
            )
        entry, names = found
    else:
        names = entry.fitting(entry.part_names, options.seconds)
    if options.parts:
        names = sort_parts(options.parts.split(","), entry)
    if not names:
        raise QueueError(f"no part of {entry.name} fits into {format_time(options.seconds)}")
    print(f"{entry.name}: {', '.join(names)}; at most {format_time(entry.limit_s(names))}", flush=True)
    run = Run(entry, options.out, options.dry, gpu)
    succeeded = run.perform(names)
    print(f"{run.file}: a dry run" if options.dry else f"{run.file}: store it with {PROGRAM} record {run.file}")
    return int(not succeeded)


def record(file: Path) -> int:
    run = read_document(file)
    stored = store(run)
    write_table()
    print(f"wrote {os.path.relpath(stored, ROOT)} and the table in bench/README.md: commit both")
    if failed := [name for name, part in run["parts"].items() if part["exit"]]:
        print(
            f"failed: {', '.join(failed)}. `next` shows failed parts after all others; fix them, then run them by name"
        )
    return 0


def stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit("gpu_queue.py: terminated; the result file has the finished parts")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    kind = "type of GPU, for example h100 (default: this machine's; without a GPU, results of all types count)"
    within = f"choose only parts that fit into this time, in seconds (default: {LIMIT_S})"
    following = commands.add_parser("next", help="show the first entry that was not measured")
    listing = commands.add_parser("list", help="show all entries and their measurements")
    for each in (following, listing):
        each.add_argument("--gpu", type=str.lower, help=kind)
    commands.add_parser("table", help="update the table in bench/README.md after entries were changed")
    running = commands.add_parser("run", help="run an entry on this machine's GPU")
    running.add_argument("name", nargs="?", help="entry to run (default: the next one)")
    running.add_argument("--parts", help="comma-separated names of parts (default: those that were not measured)")
    running.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT") or "runs/gpu",
        help="output folder (default: $OUT, or runs/gpu)",
    )
    running.add_argument("--dry", action="store_true", help="use tiny settings on the CPU; results cannot be recorded")
    for each in (following, running):
        each.add_argument("--seconds", type=float, default=LIMIT_S, help=within)
    recording = commands.add_parser("record", help="store the results of a run, and update bench/README.md")
    recording.add_argument("file", type=Path, help="OUT/<entry>.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, stop)
    try:
        if options.command == "run":
            options.out = options.out.resolve()
            return run_entry(options)
        if options.command == "record":
            return record(options.file)
        if options.command == "table":
            write_table()
            return 0
        gpu = detect_gpu()
        kind = options.gpu or (gpu.kind if gpu else None)
        return show_next(kind, options.seconds) if options.command == "next" else show_list(kind)
    except QueueError as error:
        print(f"gpu_queue.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
