"""Run an entry of the GPU queue: its parts are processes with hard limits, and their outcomes are stored in a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from _queue_entries import GRACE_S, Entry, Part, QueueError
from _queue_results import (
    CPU,
    ROOT,
    Document,
    Gpu,
    describe_machine,
    read_document,
    read_release_line,
    read_sources,
    write_document,
)

WHEELS = ROOT / ".wheels"  # git ignores it
DRY_LIMIT_S = 250  # time limit of a part in a dry run
OUTPUT_LINES = 40  # The outcome of a part that failed or has no figures contains its last lines of output,
RESULT_LINE = re.compile(r"^(real|stress|fault) | per group: ")  # and result lines of scripts without figures.
NO_FIGURES = 3  # exit status of a part that succeeded, but did not write its figures
# All ranks are on one machine: use loopback, and limit the compiler's processes, which share the cores.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # so that the output of a crash shows where Python was
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
}
DRY_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Variables of the caller that would change the measurement, or make a script run as a rank, are removed.
DROPPED = ("COMPOSABLE_SHARD_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WIDTH", "BENCH_")
# Other variables of the caller that can affect the measurement are kept, and stored with the outcome.
NOTED = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH")
CHECK_GPU = "import torch; print(torch.cuda.get_device_name())"


def check_gpu() -> None:
    """Check that torch finds a GPU, because scripts would fall back to the CPU.

    Raises:
        QueueError: it finds none.
    """
    done = subprocess.run([sys.executable, "-c", CHECK_GPU], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise QueueError(f"nvidia-smi finds a GPU, but torch cannot use it: {last}")


def find_wheel(requirement: str) -> Path | None:
    """Return the wheel in `.wheels/` for a requirement such as "torchao==0.18.0"."""
    return next(iter(sorted(WHEELS.glob(f"{requirement.replace('==', '-')}-*.whl"))), None)


def find_missing(parts: Iterable[Part]) -> list[str]:
    """Return the requirements of the parts that are neither installed in this version nor in `.wheels/`."""

    def is_installed(requirement: str) -> bool:
        name, _, version = requirement.partition("==")
        try:
            return metadata.version(name) == version
        except metadata.PackageNotFoundError:
            return False

    wanted = dict.fromkeys(requirement for part in parts for requirement in part.wheels)
    return [each for each in wanted if not find_wheel(each) and not is_installed(each)]


def download_command(requirements: Sequence[str]) -> str:
    """Return the command that downloads wheels for the usual machine with a GPU."""
    target = "--only-binary=:all: --platform manylinux_2_28_x86_64"
    return f"python -m pip download --no-deps {target} --dest {WHEELS.name} {' '.join(requirements)}"


class Run:
    """Executes parts and rewrites the result file after each part, so an interrupted run keeps finished parts.

    Args:
        entry: the entry to run.
        out: output folder, for `<entry>.json` (outcomes), `<entry>-logs.tgz`, and `<entry>-files.tgz` if parts wrote
            other files. If only some parts run, their names are added to the names of the archives, and outcomes of
            other parts stay in `<entry>.json` if they are from the same sources.
        dry: use tiny settings on the CPU.
        gpu: the GPU of this machine; None for a dry run.
    """

    def __init__(self, entry: Entry, out: Path, dry: bool, gpu: Gpu | None) -> None:
        self._entry, self._out, self._dry = entry, out, dry
        self._machine, self._release = describe_machine(gpu), read_release_line()
        self._document: Document = {
            "entry": entry.name,
            "dry": dry,
            "kind": gpu.kind if gpu else CPU,
            "sources": read_sources(),
            "parts": {},
        }
        if self.file.exists():
            earlier = read_document(self.file)
            if all(earlier.get(key) == self._document[key] for key in ("entry", "dry", "kind", "sources")):
                self._document["parts"] = earlier["parts"]
        self._work = Path(tempfile.mkdtemp(prefix="gpu_queue_"))
        self._logs, self._files = self._work / f"{entry.name}-logs", self._work / f"{entry.name}-files"
        self._logs.mkdir()
        self._files.mkdir()
        self._packages = self._work / "packages"
        out.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    @property
    def file(self) -> Path:
        return self._out / f"{self._entry.name}.json"

    def perform(self, names: Iterable[str]) -> bool:
        """Run the named parts and pack their files. Return whether all of them succeeded.

        Raises:
            QueueError: a part needs a package that is missing here. A dry run leaves out what needs it.
        """
        names = list(names)
        parts = [part for part in self._entry.parts if part.name in names]
        threads = [threading.Thread(target=self._run, args=(part,)) for part in parts]
        try:
            self._prepare_packages(parts)
            for thread in threads:
                thread.start()
                if not self._entry.parallel:
                    thread.join()
            for thread in threads:
                thread.join()
        finally:  # also when this process is terminated
            with self._lock:
                self._stopped = True
                running = list(self._running)
            for process in running:
                end_group(process)
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            self._pack("" if len(parts) == len(self._entry.parts) else "-".join(["", *names]))
        return all(self._document["parts"].get(name, {}).get("exit") == 0 for name in names)

    def _prepare_packages(self, parts: Sequence[Part]) -> None:
        missing = find_missing(parts)
        if missing and not self._dry:
            raise QueueError(
                f"{self._entry.name} needs {', '.join(missing)}. On a machine with a network, run "
                f"`{download_command(missing)}` in the repository, then copy {WHEELS.name}/ with it"
            )
        for wheel in filter(None, map(find_wheel, {each for part in parts for each in part.wheels})):
            with zipfile.ZipFile(wheel) as archive:  # Nothing is installed: pip can be absent, or need permissions.
                archive.extractall(self._packages)

    def _run(self, part: Part) -> None:
        figures, folder, log = (
            self._logs / f"{part.name}.json",
            self._files / part.name,
            self._logs / f"{part.name}.log",
        )
        folder.mkdir()
        command = part.command(self._dry)
        words = [word.replace("{json}", str(figures)).replace("{folder}", str(folder)) for word in command]
        environment = self._environment(part)
        limit = DRY_LIMIT_S if self._dry else part.limit_s
        begin = time.monotonic()
        with log.open("wb") as output:
            with self._lock:
                if self._stopped:
                    return
                process = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # a new group, so that all processes of the part can be ended together
                )
                self._running.add(process)
            timed_out = not ends_within(process, limit)
            end_group(process)
            with self._lock:
                self._running.discard(process)
        if self._stopped:
            return
        found = read_figures(figures)
        status = -signal.SIGKILL if process.returncode is None else process.returncode  # None: stuck in the kernel
        if status == 0 and (timed_out or (part.has_figures and found is None)):
            status = NO_FIGURES
        text = f"limit of {limit} s reached" if timed_out else f"exit status {status}"
        lines = excerpt(log.read_text(errors="replace")) if status or found is None else []
        self._save(
            part.name,
            {
                "command": command,
                "env": part.variables(self._dry),
                "inherited": {name: value for name, value in environment.items() if name.startswith(NOTED)},
                "date": datetime.now(UTC).date().isoformat(),
                "seconds": round(time.monotonic() - begin, 1),
                "limit_s": limit,
                "timed_out": timed_out,
                "exit": status,
                **self._machine,
                "release": self._release,
                "figures": found,
                "output": lines,
            },
        )
        print(f"== {self._entry.name} {part.name}: {text}, {time.monotonic() - begin:.1f} s", flush=True)
        if status:
            print("\n".join(lines[-25:]), flush=True)

    def _environment(self, part: Part) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
        paths = [str(ROOT), str(ROOT / "bench"), str(self._packages), inherited.get("PYTHONPATH", "")]
        own = {**ENVIRONMENT, **part.variables(self._dry), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return inherited | own | (DRY_ENVIRONMENT if self._dry else {})

    def _save(self, name: str, outcome: Document) -> None:
        with self._lock:
            self._document["parts"][name] = outcome
            write_document(self.file, self._document)

    def _pack(self, suffix: str) -> None:
        """Pack logs and other files into separate archives, because the latter can be too large to copy."""
        for folder in (self._logs, self._files):
            if any(path.is_file() for path in folder.rglob("*")):
                with tarfile.open(self._out / f"{folder.name}{suffix}.tgz", "w:gz", compresslevel=1) as archive:
                    archive.add(folder, arcname=folder.name)
        shutil.rmtree(self._work)


def read_figures(file: Path) -> Any:
    """Return the figures that a part wrote; None if it wrote none."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def excerpt(text: str) -> list[str]:
    """Return the result lines and the last lines of a log, without local path prefixes."""
    for path in (ROOT, tempfile.gettempdir(), Path.home()):
        text = text.replace(f"{path}{os.sep}", "")
    lines = text.splitlines()
    return [line for line in lines[:-OUTPUT_LINES] if RESULT_LINE.search(line)] + lines[-OUTPUT_LINES:]


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and all processes of its group, with SIGTERM and after `GRACE_S` seconds with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            process.poll()  # reaps it
            if not is_group_alive(process.pid):
                return
            time.sleep(0.05)


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, but belongs to another user
        pass
    return True
