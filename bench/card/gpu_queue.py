"""What to measure next on a GPU, in pieces of at most nine minutes.

    python bench/card/gpu_queue.py next           # the first entry without figures for this GPU and release line
    python bench/card/gpu_queue.py run            # runs it: on the machine with the GPU
    python bench/card/gpu_queue.py record FILE    # files the figures: in a checkout with git
    python bench/card/gpu_queue.py list           # all entries with their state

`run NAME --dry` tries an entry with tiny settings on the CPU, so that no time on a GPU is spent on mistakes. Entries
and their commands are in `_queue_entries.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import _queue_results
from _queue_entries import GRACE_S, QUEUE, Entry, Part, entry_named
from _queue_results import ROOT, QueueError

DRY_LIMIT_S = 150  # of a part of a dry run
COMMAND = "python bench/card/gpu_queue.py"
# Ranks on one machine talk over loopback, and compilers of several processes share the cores.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
}

DRY_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class Run:
    """One run of an entry: executes parts and keeps the result file up to date, so that an interrupted run loses only
    the parts that were running.

    Args:
        entry: what to run.
        out: a folder; `<entry>.json` and `<entry>.tgz` (logs and other files of the parts) are written there.
        dry: tiny settings on the CPU.
        gpu: the GPU of this machine, None for a dry run.
    """

    def __init__(self, entry: Entry, out: Path, dry: bool, gpu: _queue_results.Gpu | None) -> None:
        self._entry, self._out, self._dry = entry, out, dry
        self._machine = _queue_results.describe_machine(gpu)
        self._sources, self._release = _queue_results.digest_here(), _queue_results.release_line()
        self._work = out / f"{entry.name}-files"
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._parts: dict[str, dict[str, Any]] = {}

    def perform(self, names: tuple[str, ...]) -> bool:
        """Run the named parts and pack their files; True if all ended well."""
        parts = [part for part in self._entry.parts if part.name in names]
        try:
            if self._entry.together:
                threads = [threading.Thread(target=self._part, args=(part,)) for part in parts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                for part in parts:
                    self._part(part)
        finally:
            for process in self._processes:
                end(process)
            self._pack()
        return len(self._parts) == len(parts) and all(part["exit"] == 0 for part in self._parts.values())

    @property
    def file(self) -> Path:
        return self._out / f"{self._entry.name}.json"

    def _part(self, part: Part) -> None:
        figures, folder, log = (self._work / f"{part.name}{ending}" for ending in (".json", "", ".log"))
        folder.mkdir()
        words = words_of(part, self._dry)
        limit = DRY_LIMIT_S if self._dry else part.limit_s
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *(word.format(json=figures, folder=folder) for word in words)],
                cwd=ROOT,
                env=self._environment(part),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that `end` reaches its ranks too
            )
            self._processes.append(process)
            timed_out = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                timed_out = True
            end(process)
        seconds = round(time.monotonic() - begin, 1)
        failed = timed_out or process.returncode != 0
        kept = read_figures(figures)
        self._keep(
            part.name,
            {
                "command": shlex.join(["python", *words]),
                "env": dict(self._variables(part)),
                "date": datetime.now(UTC).date().isoformat(),
                "seconds": seconds,
                "limit_s": limit,
                "timed_out": timed_out,
                "exit": process.returncode or int(failed),
                **self._machine,
                "release": self._release,
                "sources": self._sources,
                "figures": kept,
                "output": _queue_results.tail(log.read_text(errors="replace")) if failed or kept is None else [],
            },
        )
        ending = f"ended after its limit of {limit} s" if timed_out else f"exit status {process.returncode}"
        print(f"== {self._entry.name} {part.name}: {ending}, {seconds:.1f} s", flush=True)
        if failed:
            print("\n".join(self._parts[part.name]["output"][-25:]), flush=True)

    def _variables(self, part: Part) -> dict[str, str]:
        return dict(part.dry_env if self._dry else part.env)

    def _environment(self, part: Part) -> dict[str, str]:
        paths = [str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
        variables = {
            **os.environ,
            **ENVIRONMENT,
            **self._variables(part),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        return variables | (DRY_ENVIRONMENT if self._dry else {})

    def _keep(self, name: str, part: dict[str, Any]) -> None:
        with self._lock:
            self._parts[name] = part
            document = {
                "entry": self._entry.name,
                "dry": self._dry,
                "kind": self._machine["kind"],
                "parts": self._parts,
            }
            self.file.write_text(json.dumps(document, indent=1) + "\n")

    def _pack(self) -> None:
        with tarfile.open(self._out / f"{self._entry.name}.tgz", "w:gz") as archive:
            archive.add(self._work, arcname=self._entry.name)
        shutil.rmtree(self._work)


def words_of(part: Part, dry: bool) -> list[str]:
    """The command line of a part behind `python`, with `{json}` and `{folder}` as they are."""
    return shlex.split(f"{part.script} {part.dry if dry else part.gpu}")


def read_figures(file: Path) -> Any:
    """The figures that a part wrote; None if it wrote none, or was ended while it wrote."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part and everything that it started."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):  # nothing of it runs
            os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM and not group_is_alive(process.pid):
            return


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def next_entry(
    kind: str | None, release: str, results: Path = _queue_results.RESULTS
) -> tuple[Entry, tuple[str, ...]] | None:
    """The first entry with parts that have no figures, and these parts."""
    for entry in QUEUE:
        if missing := _queue_results.missing_parts(entry, kind, release, results):
            return entry, missing
    return None


def show_next(kind: str | None) -> int:
    release = _queue_results.release_line()
    where = f"{'any GPU' if kind is None else kind.upper()} and release line {release}"
    found = next_entry(kind, release)
    if found is None:
        print(f"every entry has figures for {where}")
        return 0
    entry, missing = found
    every = len(missing) == len(entry.parts)
    limits = ", ".join(f"{part.name} {part.limit_s} s" for part in entry.parts if part.name in missing)
    file = _queue_results.result_file(entry, kind or "GPU").relative_to(ROOT)
    print(
        f"entry:     {entry.name}, {QUEUE.index(entry) + 1} of {len(QUEUE)}, the first without figures for {where}\n"
        f"question:  {entry.question}\n"
        f"command:   {COMMAND} run {entry.name}{'' if every else ' --parts ' + ','.join(missing)} --out OUT\n"
        f"time:      at most {minutes(entry.limit_s(missing))}: {limits}{', side by side' if entry.together else ''}\n"
        f"result:    {file}, by {COMMAND} record OUT/{entry.name}.json"
    )
    return 0


def show_list(kind: str | None) -> int:
    release = _queue_results.release_line()
    for number, entry in enumerate(QUEUE, 1):
        found = [each for each in _queue_results.measured(entry, release) if kind in (None, each.kind)]
        print(f"{number:2}. {entry.name} ({minutes(entry.limit_s())}): {entry.question}")
        for text in [each.text(entry) for each in found] or ["not measured"]:
            print(f"    {text}")
    return 0


def minutes(seconds: int) -> str:
    return f"{seconds // 60} min {seconds % 60} s"


def perform(options: argparse.Namespace) -> int:
    gpu = None if options.dry else _queue_results.gpu_here()
    if gpu is None and not options.dry:
        raise QueueError("nvidia-smi finds no GPU on this machine; use --dry for a dry run on the CPU")
    if options.name:
        entry, names = entry_named(options.name), ()
    else:
        found = next_entry(gpu and gpu.kind, _queue_results.release_line())
        if found is None:
            raise QueueError("every entry has figures; name the one to run again")
        entry, names = found
    names = _queue_results.ordered(options.parts.split(","), entry) if options.parts else names
    names = names or tuple(part.name for part in entry.parts)
    run = Run(entry, options.out, options.dry, gpu)
    print(f"{entry.name}: {', '.join(names)}; at most {minutes(entry.limit_s(names))}", flush=True)
    good = run.perform(names)
    print(f"{run.file}: file it with {COMMAND} record {run.file}" if not options.dry else f"{run.file}: a dry run")
    return int(not good)


def record(file: Path) -> int:
    try:
        run = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise QueueError(f"cannot read {file}: {error}") from None
    filed = _queue_results.file_result(run)
    write_table()
    print(f"{filed.relative_to(ROOT)} and {_queue_results.STATUS.relative_to(ROOT)} are written: commit both")
    failed = [name for name, part in run["parts"].items() if part["exit"]]
    if failed:
        print(f"without figures: {', '.join(failed)}; `next` prints them again")
    return 0


def write_table() -> None:
    """Bring the table on the page on status up to date."""
    page, table = _queue_results.STATUS.read_text(), _queue_results.status_table(_queue_results.release_line())
    _queue_results.STATUS.write_text(_queue_results.with_table(page, table))


def stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit("gpu_queue.py: terminated; finished parts are in the result file")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    kind = "kind of GPU, such as h100 (default: this machine's; without one, figures of any kind count)"
    commands.add_parser("next", help="the first entry without figures").add_argument("--gpu", help=kind)
    commands.add_parser("list", help="all entries with their state").add_argument("--gpu", help=kind)
    commands.add_parser("table", help="write the table in docs/status.md, after a change of the entries")
    running = commands.add_parser("run", help="run an entry on this machine's GPU")
    running.add_argument("name", nargs="?", help="(default: the next one)")
    running.add_argument(
        "--parts", help="some parts of it, with commas (default: all; of the next one, the missing ones)"
    )
    running.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or "runs/gpu"),
        help="folder (default: $OUT, or runs/gpu)",
    )
    running.add_argument("--dry", action="store_true", help="tiny settings on the CPU; cannot be recorded")
    recording = commands.add_parser("record", help="file the figures of a run, and update docs/status.md")
    recording.add_argument("file", type=Path, help="OUT/<entry>.json")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, stop)
    try:
        if options.command == "run":
            options.out = options.out.resolve()
            return perform(options)
        if options.command == "record":
            return record(options.file)
        if options.command == "table":
            write_table()
            return 0
        gpu = _queue_results.gpu_here()
        chosen = (options.gpu or (gpu.kind if gpu else "")).lower() or None
        return show_next(chosen) if options.command == "next" else show_list(chosen)
    except (QueueError, KeyError) as error:
        print(f"gpu_queue.py: {error.args[0]}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
