"""Results of the GPU queue: which parts were measured on which GPU, and how a run is stored in `bench/results/gpu/`.

A file is `<entry>-<gpu>.json`. It has the entry's parts, each with its figures and with the GPU, driver, torch version,
release line and commit that they belong to. Parts can come from different runs; the newest outcome counts.

A machine with a GPU may have no git. So a run notes the sources, as git's digest of each file, and `store` finds the
commit that has them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from _queue_entries import QUEUE, Entry, Part, QueueError, find_entry

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "gpu"
STATUS = ROOT / "docs" / "status.md"
SOURCES = ("bench", "composable_shard", "tests", "tutorials")  # A measurement depends on their *.py files.
MAX_COMMITS = 500  # How far back `store` looks for the sources of a run.
TABLE_MARKERS = "<!-- gpu queue: begin -->\n", "<!-- gpu queue: end -->\n"
CPU = "cpu"  # Instead of the type of GPU, in a dry run.

Document = dict[str, Any]


# ------------------------------------------------------------------ the machine


@dataclass(frozen=True)
class Gpu:
    """A GPU by its full name, such as "NVIDIA H100 80GB HBM3", and its driver's version."""

    name: str
    driver: str

    @property
    def kind(self) -> str:
        """Names the result's file: "h100-80gb-hbm3"."""
        words = [word for word in re.split(r"[^A-Za-z0-9.]+", self.name) if word and word != "NVIDIA"]
        return "-".join(words).lower()


def matches(kind: str, wanted: str | None) -> bool:
    """Whether a type of GPU is the wanted one: "h100" stands for each that begins so, None for every kind."""
    return wanted is None or kind == wanted or kind.startswith(f"{wanted}-")


def detect_gpu() -> Gpu | None:
    """The first GPU of this machine, as `nvidia-smi` names it; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, driver = answer.partition("\n")[0].partition(",")
    return Gpu(name.strip(), driver.strip()) if name.strip() else None


def read_release_line() -> str:
    """Major and minor version of the package. Figures of another line do not count."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return ".".join(version.split(".")[:2])


def describe_machine(gpu: Gpu | None) -> Document:
    """What every part of a result names.

    Raises:
        QueueError: torch is not installed.
    """
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise QueueError("this Python has no torch: use the environment that the benchmarks run in") from None
    return {
        "gpu": gpu.name if gpu else None,
        "driver": gpu.driver if gpu else None,
        "torch": torch,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


# ------------------------------------------------------------------ the commit of a run

Blobs = Mapping[str, str]  # git's digest of each file, by path


def read_sources(root: Path = ROOT) -> dict[str, str]:
    """Of the working tree."""

    def blob(data: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    files = (file for folder in SOURCES for file in (root / folder).rglob("*.py"))
    return {file.relative_to(root).as_posix(): blob(file.read_bytes()) for file in files}


def read_sources_at(commit: str, root: Path = ROOT) -> dict[str, str]:
    entries = _git(root, "ls-tree", "-r", "-z", commit, "--", *SOURCES).split("\0")
    paths = (entry.split("\t", 1) for entry in entries if entry.endswith(".py"))
    return {path: about.split()[2] for about, path in paths}


def find_commit(sources: Blobs, root: Path = ROOT) -> str:
    """The newest commit with these sources.

    Raises:
        QueueError: none of the last commits has them. Names files that differ from HEAD.
    """
    for commit in _git(root, "rev-list", f"--max-count={MAX_COMMITS}", "HEAD").split():
        if read_sources_at(commit, root) == sources:
            return commit
    raise QueueError(
        f"none of the last {MAX_COMMITS} commits has the sources that were measured. These differ from HEAD: "
        f"{', '.join(changed_files(sources, root)[:10])}. Commit them as they were measured, then record again"
    )


def changed_files(sources: Blobs, root: Path = ROOT) -> list[str]:
    """Paths whose content is another one at HEAD, or that exist in one place only."""
    head = read_sources_at("HEAD", root)
    return sorted(path for path in {*head, *sources} if head.get(path) != sources.get(path))


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError as error:
        raise QueueError(f"cannot run git: {error}") from None
    if done.returncode:
        raise QueueError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


# ------------------------------------------------------------------ which parts were measured


@dataclass(frozen=True)
class Outcomes:
    """The newest outcome of each part of an entry, on one type of GPU and in one release line.

    Outcomes of another command (the entry was edited since) do not count.
    """

    entry: Entry
    kind: str
    parts: Mapping[str, Document]

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts that were not run."""
        return tuple(name for name in self.entry.part_names if name not in self.parts)

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(name for name in self.entry.part_names if self.parts.get(name, {}).get("exit"))

    def describe(self) -> str:
        """What was measured where, for a line of a table."""
        runs: dict[str, list[str]] = {}
        for name in self.entry.part_names:
            if name in self.parts:
                runs.setdefault(_describe_run(self.parts[name]), []).append(name)
        text = "; ".join(run if len(runs) == 1 else f"{', '.join(names)}: {run}" for run, names in runs.items())
        text += f"; failed: {', '.join(self.failed)}" if self.failed else ""
        return text + (f"; missing: {', '.join(self.missing)}" if self.missing else "")


def _describe_run(part: Document) -> str:
    commit = f"commit {part['commit'][:9]}" if "commit" in part else "not recorded yet"
    return f"{part['gpu']}, torch {part['torch']}, driver {part['driver']}, {part['date']}, {commit}"


def read_outcomes(entry: Entry, release: str, folders: Sequence[Path] = (RESULTS,)) -> list[Outcomes]:
    """For each type of GPU, what is in the folders; a later folder takes precedence."""
    found: dict[str, dict[str, Document]] = {}
    for folder in folders:
        for file in sorted(folder.glob(f"{entry.name}*.json")):
            document = read_document(file)
            if document["entry"] == entry.name and not document.get("dry"):  # another entry's name can begin alike
                found.setdefault(document["kind"], {}).update(document["parts"])
    return [
        Outcomes(entry, kind, {part.name: parts[part.name] for part in entry.parts if _counts(part, parts, release)})
        for kind, parts in found.items()
    ]


def _counts(part: Part, parts: Mapping[str, Document], release: str) -> bool:
    outcome = parts.get(part.name)
    return (
        outcome is not None
        and outcome["release"] == release
        and outcome["command"] == part.command(dry=False)
        and outcome["env"] == part.variables(dry=False)
    )


def select_outcomes(entry: Entry, kind: str | None, release: str, folders: Sequence[Path] = (RESULTS,)) -> Outcomes:
    """The outcomes on that type of GPU; with None, on the kind with the fewest missing parts."""
    matching = [each for each in read_outcomes(entry, release, folders) if matches(each.kind, kind)]
    return min(matching, key=lambda each: len(each.missing), default=Outcomes(entry, kind or "", {}))


def find_next(
    kind: str | None, release: str, seconds: float, folders: Sequence[Path] = (RESULTS,)
) -> tuple[Entry, tuple[str, ...]] | None:
    """The first entry with parts that were not run and that fit into so many seconds, and these parts.

    Parts that failed come after all others: they need a fix first.
    """
    outcomes = [select_outcomes(entry, kind, release, folders) for entry in QUEUE]
    for wanted in ([each.missing for each in outcomes], [each.failed for each in outcomes]):
        for each, names in zip(outcomes, wanted, strict=True):
            if chosen := each.entry.fitting(names, seconds):
                return each.entry, chosen
    return None


# ------------------------------------------------------------------ storing


def read_document(file: Path) -> Document:
    """A stored result, or one that a run wrote.

    Raises:
        QueueError: the file cannot be read, or is neither.
    """
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise QueueError(f"cannot read {file}: {error}") from None
    if not isinstance(document, dict) or not {"entry", "kind", "parts"} <= document.keys():
        raise QueueError(f"{file} is no result of the queue")
    return document


def write_document(file: Path, document: Document) -> None:
    """Replace the file in one step, so that an interrupted write leaves the old one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(file)


def result_file(entry: Entry, kind: str, results: Path = RESULTS) -> Path:
    return results / f"{entry.name}-{kind}.json"


def store(run: Document, results: Path = RESULTS, root: Path = ROOT) -> Path:
    """Store what a run wrote; its outcomes replace older ones of the same parts. Returns the file.

    Raises:
        QueueError: it is a dry run, it has figures of a CPU, it has no parts, or no commit has its sources.
    """
    entry = find_entry(run["entry"])
    if run.get("dry") or run["kind"] == CPU:
        raise QueueError("this is a dry run on a CPU: only results of a GPU are stored")
    if not run["parts"] or "sources" not in run:
        raise QueueError(f"the run of {entry.name} has no finished part")
    for name in sort_parts(run["parts"], entry):
        figures = run["parts"][name]["figures"]
        if figures is not None and figures["about"]["device"] != "cuda":
            raise QueueError(
                f"{entry.name} {name} has figures of {figures['about']['device']}: not measured on the GPU"
            )
    commit = find_commit(run["sources"], root)
    file = result_file(entry, run["kind"], results)
    parts = read_document(file)["parts"] if file.exists() else {}
    parts |= {name: part | {"commit": commit} for name, part in run["parts"].items()}
    document = {"entry": entry.name, "question": entry.question, "kind": run["kind"], "parts": parts}
    write_document(file, document)
    return file


def sort_parts(names: Iterable[str], entry: Entry) -> tuple[str, ...]:
    """In the order of the entry. Raises QueueError if a name is unknown."""
    names = list(names)
    if unknown := [name for name in names if name not in entry.part_names]:
        raise QueueError(f"{entry.name} has no part {', '.join(unknown)}; known: {', '.join(entry.part_names)}")
    return tuple(name for name in entry.part_names if name in names)


def status_table(release: str, results: Path = RESULTS) -> str:
    """The table of `docs/status.md`: which entries were measured on what."""
    lines = ["| entry of the GPU queue | measured on |", "|---|---|"]
    for entry in QUEUE:
        texts = [each.describe() for each in read_outcomes(entry, release, (results,)) if each.parts]
        lines.append(f"| `{entry.name}` | {'<br>'.join(texts) or 'not yet'} |")
    return "\n".join(lines) + "\n"


def replace_table(page: str, table: str) -> str:
    """The page, with the table between its markers replaced."""
    before, _, rest = page.partition(TABLE_MARKERS[0])
    _, end, after = rest.partition(TABLE_MARKERS[1])
    if not end:
        raise QueueError(f"the page has no lines {' and '.join(marker.strip() for marker in TABLE_MARKERS)}")
    return before + TABLE_MARKERS[0] + "\n" + table + "\n" + TABLE_MARKERS[1] + after


def write_status() -> None:
    """Update the table in `docs/status.md`."""
    STATUS.write_text(replace_table(STATUS.read_text(), status_table(read_release_line())))
