"""Results of the GPU queue: what a run leaves, and how it is filed under `bench/results/gpu/`.

A file is `<entry>-<gpu>.json`: the entry's parts, each with its figures and with the GPU, driver, torch version,
release line and commit that they belong to. Parts can come from different runs.

A machine with a GPU may have no git. So a run notes a digest of the sources, and filing finds the commit that has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from _queue_entries import QUEUE, Entry

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "gpu"
STATUS = ROOT / "docs" / "status.md"
SOURCES = ("bench", "composable_shard", "tests", "tutorials")  # whose *.py files a measurement depends on
COMMITS = 500  # how far back filing looks for the sources of a run
MARKS = "<!-- gpu queue: begin -->\n", "<!-- gpu queue: end -->\n"


class QueueError(Exception):
    """The queue was used wrongly; the message tells what to do."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its full name, such as "NVIDIA H100 80GB HBM3", and its driver's version."""

    name: str
    driver: str

    @property
    def kind(self) -> str:
        return kind_of(self.name)


def kind_of(name: str) -> str:
    """What figures are filed under: "h100" for "NVIDIA H100 80GB HBM3"."""
    model = re.search(r"\b[A-Z]*\d{2,4}[A-Z]*\b", name)
    return (model.group() if model else name.replace(" ", "-")).lower()


def gpu_here() -> Gpu | None:
    """The first GPU of this machine, as `nvidia-smi` names it; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, driver = answer.partition("\n")[0].partition(",")
    return Gpu(name.strip(), driver.strip()) if name.strip() else None


def release_line() -> str:
    """Major and minor version of the package: figures of another line do not count."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return ".".join(version.split(".")[:2])


def describe_machine(gpu: Gpu | None) -> dict[str, Any]:
    """What every part of a result names. Without a GPU (a dry run) the kind is "cpu"."""
    return {
        "gpu": gpu.name if gpu else None,
        "kind": gpu.kind if gpu else "cpu",
        "driver": gpu.driver if gpu else None,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


# ------------------------------------------------------------------ the commit of a run


def digest(blobs: Mapping[str, str]) -> str:
    """One digest of files, given git's digest of each."""
    return hashlib.sha256(json.dumps(sorted(blobs.items())).encode()).hexdigest()


def digest_here(root: Path = ROOT) -> str:
    """Of the sources in the working tree."""

    def blob(data: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as git names the content of a file

    files = (file for folder in SOURCES for file in (root / folder).rglob("*.py"))
    return digest({file.relative_to(root).as_posix(): blob(file.read_bytes()) for file in files})


def digest_at(commit: str, root: Path = ROOT) -> str:
    """Of the sources at a commit."""
    entries = _git(root, "ls-tree", "-r", "-z", commit, "--", *SOURCES).split("\0")
    blobs = dict(entry.split("\t", 1)[::-1] for entry in entries if entry.endswith(".py"))
    return digest({path: about.split()[2] for path, about in blobs.items()})


def commit_of(sources: str, root: Path = ROOT) -> str:
    """The newest commit with these sources.

    Raises:
        QueueError: none of the last commits has them.
    """
    for commit in _git(root, "rev-list", f"--max-count={COMMITS}", "HEAD").split():
        if digest_at(commit, root) == sources:
            return commit
    raise QueueError(
        "no commit has the sources that were measured: commit them as they were, then record the result again "
        f"(compared: *.py in {', '.join(SOURCES)}; the last {COMMITS} commits)"
    )


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise QueueError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


# ------------------------------------------------------------------ what has been measured


@dataclass(frozen=True)
class Measured:
    """What is filed of an entry for one kind of GPU.

    Attributes:
        kind: "h100", for example.
        parts: the filed parts that belong to the release line, by name; failed ones too.
    """

    kind: str
    parts: dict[str, dict[str, Any]]

    def missing(self, entry: Entry) -> tuple[str, ...]:
        """Parts without figures, in order."""
        return tuple(part.name for part in entry.parts if self.parts.get(part.name, {}).get("exit") != 0)

    def text(self, entry: Entry) -> str:
        """For people: where and with what, and which parts are missing."""
        good = [part for name, part in self.parts.items() if part["exit"] == 0]
        if not good:
            return f"{self.kind.upper()}: every part failed"
        versions = sorted({f"torch {part['torch']}, driver {part['driver']}" for part in good})
        dates = sorted({part["date"] for part in good})
        commits = sorted({part["commit"][:9] for part in good})
        text = f"{good[0]['gpu']}, {'; '.join(versions)}, {' and '.join(dates)}, commit {' and '.join(commits)}"
        missing = self.missing(entry)
        return text + (f"; without {', '.join(missing)}" if missing else "")


def measured(entry: Entry, release: str, results: Path = RESULTS) -> list[Measured]:
    """What is filed of an entry for each kind of GPU."""
    found = []
    for file in sorted(results.glob(f"{entry.name}-*.json")):
        document = json.loads(file.read_text())
        if document["entry"] == entry.name:  # another entry's name can begin alike
            parts = {name: part for name, part in document["parts"].items() if part["release"] == release}
            if parts:
                found.append(Measured(document["kind"], parts))
    return found


def missing_parts(entry: Entry, kind: str | None, release: str, results: Path = RESULTS) -> tuple[str, ...]:
    """Parts of an entry without figures of that kind of GPU; with None, of the kind that has most of them."""
    every = tuple(part.name for part in entry.parts)
    missing = [each.missing(entry) for each in measured(entry, release, results) if kind in (None, each.kind)]
    return min(missing, key=len, default=every)


def result_file(entry: Entry, kind: str, results: Path = RESULTS) -> Path:
    return results / f"{entry.name}-{kind}.json"


# ------------------------------------------------------------------ filing


def file_result(run: dict[str, Any], results: Path = RESULTS, root: Path = ROOT) -> Path:
    """File what a run left; a part that failed does not replace one that has figures.

    Raises:
        QueueError: it is a dry run, or its sources are in no commit.
    """
    entry = next((entry for entry in QUEUE if entry.name == run["entry"]), None)
    if entry is None:
        raise QueueError(f"the result is of {run['entry']}, which is no entry of the queue")
    if run["dry"] or not all(part["gpu"] for part in run["parts"].values()):
        raise QueueError("this is a dry run on a CPU: only figures of a GPU are filed")
    kind = run["kind"]
    commits = {sources: commit_of(sources, root) for sources in {part["sources"] for part in run["parts"].values()}}
    file = result_file(entry, kind, results)
    document = {"entry": entry.name, "question": entry.question, "kind": kind, "parts": {}}
    if file.exists():
        document["parts"] = json.loads(file.read_text())["parts"]
    for name, part in run["parts"].items():
        if part["exit"] == 0 or document["parts"].get(name, {}).get("exit") != 0:
            commit = commits[part["sources"]]
            document["parts"][name] = {key: value for key, value in part.items() if key != "sources"} | {
                "commit": commit
            }
    results.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")
    return file


def status_table(release: str, results: Path = RESULTS) -> str:
    """The table on the page on status: which entries were measured on what."""
    lines = ["| entry of the GPU queue | measured on |", "|---|---|"]
    for entry in QUEUE:
        found = measured(entry, release, results)
        lines.append(f"| `{entry.name}` | {'<br>'.join(each.text(entry) for each in found) or 'not yet'} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, table: str) -> str:
    """The page with the table between its marks replaced."""
    before, _, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise QueueError(f"the page has no lines {MARKS[0].strip()} and {MARKS[1].strip()}")
    return before + MARKS[0] + "\n" + table + "\n" + MARKS[1] + after


def tail(text: str, lines: int = 80) -> list[str]:
    """The end of what a command printed, without the paths of this machine."""
    return text.replace(f"{ROOT}{os.sep}", "").splitlines()[-lines:]


def ordered(parts: Iterable[str], entry: Entry) -> tuple[str, ...]:
    """Names of parts in the order of the entry.

    Raises:
        QueueError: one is unknown.
    """
    known = [part.name for part in entry.parts]
    if unknown := [name for name in parts if name not in known]:
        raise QueueError(f"{entry.name} has no part {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(name for name in known if name in parts)
