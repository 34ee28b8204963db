"""Results of the GPU queue: store runs in `bench/results/gpu/`, and find parts that were not measured.

A file `<entry>-<gpu>.json` contains the entry's parts, each with its figures, GPU, driver, torch version, release line
and commit. Parts can be from different runs. The newest outcome counts.

A machine with a GPU may have no git. So a run stores git's hash of each source file, and `store` finds the commit with
these files.
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
PAGE = ROOT / "bench" / "README.md"  # It contains the table of measured entries.
SOURCES = ("bench", "composable_shard", "tests", "tutorials")  # Measurements depend on the *.py files of these folders.
MAX_COMMITS = 500  # Number of commits in which `store` looks for the sources of a run.
TABLE_MARKERS = "<!-- gpu queue: begin -->\n", "<!-- gpu queue: end -->\n"
CPU = "cpu"  # The type of GPU of a dry run.

Document = dict[str, Any]


# ------------------------------------------------------------------ the machine


@dataclass(frozen=True)
class Gpu:
    """A GPU: its full name, such as "NVIDIA H100 80GB HBM3", and the version of its driver."""

    name: str
    driver: str

    @property
    def kind(self) -> str:
        """The type of GPU for file names, such as "h100-80gb-hbm3"."""
        words = [word for word in re.split(r"[^A-Za-z0-9.]+", self.name) if word and word != "NVIDIA"]
        return "-".join(words).lower()


def matches(kind: str, wanted: str | None) -> bool:
    """Return whether a type of GPU is the wanted one. "h100" matches "h100-..." too, None matches all types."""
    return wanted is None or kind == wanted or kind.startswith(f"{wanted}-")


def detect_gpu() -> Gpu | None:
    """Return the first GPU of this machine according to `nvidia-smi`; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, driver = answer.partition("\n")[0].partition(",")
    return Gpu(name.strip(), driver.strip()) if name.strip() else None


def read_release_line() -> str:
    """Return major and minor version of the package. Figures of another release line do not count."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return ".".join(version.split(".")[:2])


def describe_machine(gpu: Gpu | None) -> Document:
    """Return the GPU and versions that are stored with each part.

    Raises:
        QueueError: torch is not installed.
    """
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise QueueError("this Python has no torch; use the environment of the benchmarks") from None
    return {
        "gpu": gpu.name if gpu else None,
        "driver": gpu.driver if gpu else None,
        "torch": torch,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


# ------------------------------------------------------------------ the commit of a run

Blobs = Mapping[str, str]  # git's hash of each file, by path


def read_sources(root: Path = ROOT) -> dict[str, str]:
    """Return the hashes of the source files in the working tree."""

    def blob(data: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    files = (file for folder in SOURCES for file in (root / folder).rglob("*.py"))
    return {file.relative_to(root).as_posix(): blob(file.read_bytes()) for file in files}


def read_sources_at(commit: str, root: Path = ROOT) -> dict[str, str]:
    entries = _git(root, "ls-tree", "-r", "-z", commit, "--", *SOURCES).split("\0")
    paths = (entry.split("\t", 1) for entry in entries if entry.endswith(".py"))
    return {path: about.split()[2] for about, path in paths}


def find_commit(sources: Blobs, root: Path = ROOT) -> str:
    """Return the newest commit with these sources.

    Raises:
        QueueError: none of the last commits has them. The message lists files that differ from HEAD.
    """
    for commit in _git(root, "rev-list", f"--max-count={MAX_COMMITS}", "HEAD").split():
        if read_sources_at(commit, root) == sources:
            return commit
    raise QueueError(
        f"none of the last {MAX_COMMITS} commits has the measured sources. These files differ from HEAD: "
        f"{', '.join(changed_files(sources, root)[:10])}. Commit the measured files, then record again"
    )


def changed_files(sources: Blobs, root: Path = ROOT) -> list[str]:
    """Return the paths of files that differ from HEAD, or that exist only in one of both."""
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
    """The newest outcome of each part of an entry, for one type of GPU and one release line.

    Outcomes of another command do not count, because the entry was edited since then.
    """

    entry: Entry
    kind: str
    parts: Mapping[str, Document]

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts that did not run."""
        return tuple(name for name in self.entry.part_names if name not in self.parts)

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(name for name in self.entry.part_names if self.parts.get(name, {}).get("exit"))

    def describe(self) -> str:
        """Describe the measured parts, GPUs and commits in one line."""
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
    """Read the outcomes for each type of GPU. Later folders take precedence."""
    found: dict[str, dict[str, Document]] = {}
    for folder in folders:
        for file in sorted(folder.glob(f"{entry.name}*.json")):
            document = read_document(file)
            if document["entry"] == entry.name and not document.get("dry"):  # the glob can match other entries
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
    """Return the outcomes for a type of GPU. If several types match, take the one with the fewest missing parts."""
    matching = [each for each in read_outcomes(entry, release, folders) if matches(each.kind, kind)]
    return min(matching, key=lambda each: len(each.missing), default=Outcomes(entry, kind or "", {}))


def find_next(
    kind: str | None, release: str, seconds: float, folders: Sequence[Path] = (RESULTS,)
) -> tuple[Entry, tuple[str, ...]] | None:
    """Return the first entry with parts that did not run and that fit into `seconds`, and these parts.

    Failed parts come after all others, because they need a fix first.
    """
    outcomes = [select_outcomes(entry, kind, release, folders) for entry in QUEUE]
    for wanted in ([each.missing for each in outcomes], [each.failed for each in outcomes]):
        for each, names in zip(outcomes, wanted, strict=True):
            if chosen := each.entry.fitting(names, seconds):
                return each.entry, chosen
    return None


# ------------------------------------------------------------------ storing


def read_document(file: Path) -> Document:
    """Read a stored result, or the result of a run.

    Raises:
        QueueError: the file cannot be read, or is not a result.
    """
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise QueueError(f"cannot read {file}: {error}") from None
    if not isinstance(document, dict) or not {"entry", "kind", "parts"} <= document.keys():
        raise QueueError(f"{file} is not a result of the queue")
    return document


def write_document(file: Path, document: Document) -> None:
    """Replace the file atomically, so that an interrupted write keeps the old one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(file)


def result_file(entry: Entry, kind: str, results: Path = RESULTS) -> Path:
    return results / f"{entry.name}-{kind}.json"


def store(run: Document, results: Path = RESULTS, root: Path = ROOT) -> Path:
    """Store the result of a run. Its outcomes replace older ones of the same parts. Return the file.

    Raises:
        QueueError: it is a dry run, it has figures of a CPU, it has no parts, or no commit has its sources.
    """
    entry = find_entry(run["entry"])
    if run.get("dry") or run["kind"] == CPU:
        raise QueueError("this is a dry run on a CPU; only results of a GPU are stored")
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
    """Return the names in the order of the entry.

    Raises:
        QueueError: a name is unknown.
    """
    names = list(names)
    if unknown := [name for name in names if name not in entry.part_names]:
        raise QueueError(f"{entry.name} has no part {', '.join(unknown)}; known: {', '.join(entry.part_names)}")
    return tuple(name for name in entry.part_names if name in names)


def measured_table(release: str, results: Path = RESULTS) -> str:
    """Return the table of `bench/README.md` with the measurements of each entry."""
    lines = ["| entry of the GPU queue | measured on |", "|---|---|"]
    for entry in QUEUE:
        texts = [each.describe() for each in read_outcomes(entry, release, (results,)) if each.parts]
        lines.append(f"| `{entry.name}` | {'<br>'.join(texts) or 'not yet'} |")
    return "\n".join(lines) + "\n"


def replace_table(page: str, table: str) -> str:
    """Return the page with the table between its markers replaced."""
    before, _, rest = page.partition(TABLE_MARKERS[0])
    _, end, after = rest.partition(TABLE_MARKERS[1])
    if not end:
        raise QueueError(f"the page has no lines {' and '.join(marker.strip() for marker in TABLE_MARKERS)}")
    return before + TABLE_MARKERS[0] + "\n" + table + "\n" + TABLE_MARKERS[1] + after


def write_table() -> None:
    """Update the table in `bench/README.md`."""
    PAGE.write_text(replace_table(PAGE.read_text(), measured_table(read_release_line())))
