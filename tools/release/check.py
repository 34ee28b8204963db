"""Build the wheel and the sdist, install each in new environments, and run the checks of a release.

    make release-check                             # each available Python and torch version at least once
    make release-check RELEASE="--pair 3.11:2.13.0 --checks imports,training"
    make release-check RELEASE=--all               # all nine pairs, wheel and sdist
    make release-check RELEASE="--torch-index URL" # an index with CPU builds of torch

Each pair of Python and torch gets one environment for the wheel and one for the sdist. Commands run in an empty folder,
so they import the installed package. CUDA builds of torch are not installed, because they need gigabytes of packages
(--cuda installs them). In that case the package is installed without torch, and Python only compiles its files. The
table lists what was not checked. With `--complete`, a pair that was not checked is an error.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import _distributions as distributions
import _pythons as interpreters
import _smoke_checks as smoke
from _pythons import NotToBeHadError, TorchOffer

FOUND = (
    "import sys, numpy, torch; "
    "print(f'Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {numpy.__version__}')"
)
LENT = "Python of an environment with torch, whose site-packages are added to the new environments"
NO_RAY = "tutorials/08_ray_train.py: requires Ray"


@dataclass
class Row:
    """One environment and its results.

    Attributes:
        python: Python version.
        torch: requested torch version.
        artifact: "wheel" or "sdist".
        found: exact versions of the installed Python, torch and numpy; empty without torch.
        results: results of the checks, in order.
        not_checked: the reason why checks that need torch did not run; empty if they ran.
    """

    python: str
    torch: str
    artifact: str
    found: str = ""
    results: list[smoke.Result] = field(default_factory=list)
    not_checked: str = ""

    @property
    def passed(self) -> bool:
        return not self.not_checked and all(each.outcome == smoke.PASSED for each in self.results)


@dataclass
class Report:
    """All results.

    Attributes:
        version: version of the package.
        platform: platform of this machine.
        contents: errors in the contents of the wheel and the sdist, by file name.
        rows: one per environment.
        left_out: checks that did not run in any environment.
    """

    version: str
    platform: str
    contents: dict[str, list[str]]
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def exit_code(self, complete: bool = False) -> int:
        """Return 0 if at least one row was checked and all checks passed. With `complete`, all rows must be checked."""
        tried = [row for row in self.rows if not row.not_checked]
        failed = any(each.outcome == smoke.FAILED for row in self.rows for each in row.results)
        good = bool(tried) and not failed and not any(self.contents.values())
        return 0 if good and not (complete and len(tried) < len(self.rows)) else 1

    def text(self) -> str:
        """Format the report: a table of the rows, the failures, and what was not checked."""
        names = [name for name in smoke.CHECKS if any(each.name == name for row in self.rows for each in row.results)]
        head = ["Python", "torch", "from", *names, ""]
        lines = [head, *([row.python, row.torch, row.artifact, *_cells(row, names)] for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        parts = [f"composable_shard {self.version} on {self.platform}; times in seconds", *table, ""]
        for name, faults in self.contents.items():
            parts += [f"{name}: {'' if faults else 'contents are correct'}", *(f"  {fault}" for fault in faults)]
        parts += ["", *(f"{row.artifact}: {row.found}" for row in self.rows if row.found)]
        for row in self.rows:
            for each in row.results:
                if each.outcome == smoke.FAILED:
                    parts += ["", f"FAILED {row.python}, torch {row.torch}, {row.artifact}: {each.name}", each.detail]
        failed = {each.name for row in self.rows for each in row.results if each.outcome == smoke.FAILED}
        parts += ["", "Passed checks:"]
        parts += [f"  {name}: {smoke.SHOWS[name]}" for name in names if name not in failed]
        reasons = dict.fromkeys((row.python, row.torch, row.not_checked) for row in self.rows if row.not_checked)
        parts += ["", "NOT CHECKED:", *(f"  Python {python}, torch {torch}: {why}" for python, torch, why in reasons)]
        return "\n".join([*parts, *(f"  {each}" for each in self.left_out)])

    def data(self) -> dict[str, object]:
        """Return the report as JSON data."""
        rows = [{**asdict(row), "passed": row.passed} for row in self.rows]
        return {**asdict(self), "rows": rows}


def _cells(row: Row, names: Sequence[str]) -> list[str]:
    results = {each.name: each for each in row.results}
    last = "not checked" if row.not_checked else "passed" if row.passed else "FAILED"
    return [*(_cell(results.get(name)) for name in names), last]


def _cell(result: smoke.Result | None) -> str:
    if result is None:
        return "-"
    return f"{result.seconds:.0f}" if result.outcome == smoke.PASSED else "FAILED"


# --------------------------------------------------------------------------------------------------- the environments


def try_pair(
    pair: tuple[str, str], artifacts: dict[str, Path], version: str, folder: Path, options: argparse.Namespace
) -> list[Row]:
    """Check a pair of Python and torch. Return a row per artifact."""
    rows = [Row(*pair, kind) for kind in artifacts]
    try:
        python = interpreters.interpreter(pair[0], options.python)
    except NotToBeHadError as error:
        for row in rows:
            row.not_checked = str(error)
        return rows
    torch: TorchOffer | None = None
    try:
        offer = interpreters.lent_torch(pair, options.torch_from)
        if offer is None:
            probe = distributions.make_environment(folder / "probe", python)
            offer = interpreters.torch_offer(probe, pair[1], index_of(options))
        if offer.cuda_packages and not options.cuda:
            raise NotToBeHadError(
                f"pip offers torch {offer.version} for CUDA, with {', '.join(offer.cuda_packages)} and dependencies; "
                "pass an index with CPU builds by --torch-index, or --cuda to install this build"
            )
        torch = offer
    except NotToBeHadError as error:
        for row in rows:
            row.not_checked = str(error)
    for row in rows:
        version_of_torch = torch.version if torch else f"{row.torch} not available"
        note(f"Python {row.python}, torch {version_of_torch}, {row.artifact}")
        try_artifact(row, python, torch, artifacts[row.artifact], version, folder, options)
    return rows


def try_artifact(
    row: Row,
    python: Path,
    torch: TorchOffer | None,
    artifact: Path,
    version: str,
    folder: Path,
    options: argparse.Namespace,
) -> None:
    """Create an environment, install the artifact with its requirements, run the checks, and fill in the row.

    If `torch` is None, the artifact is installed without requirements, and only one check runs.
    """
    place = folder / f"{row.python}-{row.torch}-{row.artifact}"
    inside = distributions.make_environment(place / "environment", python)
    empty = place / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    keep = [*index_of(options), f"torch=={torch.version}"] if torch else ["--no-deps"]
    it = smoke.Installation(inside, empty, artifact, version, keep, options.limit)
    names = smoke.checks_for(artifact, options.checks)
    try:
        if torch and torch.lies_in:
            (site,) = (place / "environment").glob("lib/python*/site-packages")
            site.joinpath("lent.pth").write_text(f"{torch.lies_in}\n")
        if torch:
            it.install()  # the exact torch first, before requirements of the artifact could choose another one
            it.install(str(artifact))
            row.found = it.run("-c", FOUND).strip() + (" (torch of another environment)" if torch.lies_in else "")
        else:
            it.install(str(artifact))
            names = [name for name in names if name == smoke.WITHOUT_TORCH]
        for result in smoke.run_checks(it, names):
            row.results.append(result)
            note(f"  {result.name}: {result.outcome}, {result.seconds:.0f} s; {smoke.last_line(result.detail)}")
    except RuntimeError as error:
        row.results.append(smoke.Result(smoke.WITHOUT_TORCH, smoke.FAILED, 0.0, f"installation failed: {error}"))
    if not options.keep:
        shutil.rmtree(place)


def index_of(options: argparse.Namespace) -> list[str]:
    """Return the options of pip for the index of torch."""
    return ["--extra-index-url", options.torch_index] if options.torch_index else []


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------- the command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pair", type=interpreters.pair_of, action="append", metavar="PYTHON:TORCH", help="for example 3.12:2.13.0")
    add("--all", action="store_true", help=f"Python {', '.join(interpreters.PYTHONS)} with each torch")
    add("--artifacts", type=_names_of(("wheel", "sdist")), default=["wheel", "sdist"], help="wheel, sdist or both")
    add("--checks", type=_names_of(tuple(smoke.CHECKS)), default=list(smoke.CHECKS), help=", ".join(smoke.CHECKS))
    add("--python", type=Path, action="append", default=[], metavar="PATH", help="additional interpreter")
    add("--torch-from", type=Path, action="append", default=[], metavar="PATH", help=LENT)
    add("--torch-index", metavar="URL", help="additional index for torch, for example with CPU builds")
    add("--cuda", action="store_true", help="also install CUDA builds of torch (gigabytes)")
    add("--complete", action="store_true", help="fail if a pair could not be checked")
    add("--limit", type=float, default=900.0, metavar="SECONDS", help="time limit of a command (900)")
    add("--folder", type=Path, help="directory of the environments; by default a temporary one")
    add("--keep", action="store_true", help="keep the environments")
    add("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args(arguments)
    options.pairs = list(interpreters.ALL if options.all else options.pair or interpreters.USUAL)
    return options


def _names_of(known: Sequence[str]):
    def names(text: str) -> list[str]:
        given = [each.strip() for each in text.split(",")]
        if wrong := [each for each in given if each not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(wrong)}; choose from {', '.join(known)}")
        return given

    return names


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    version = str(distributions.project()["version"])
    with tempfile.TemporaryDirectory(prefix="release-check-", ignore_cleanup_errors=True) as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        note("building the wheel and the sdist")
        try:
            wheel, sdist = distributions.build(folder, Path(sys.executable))
        except subprocess.CalledProcessError as error:
            note(f"build failed: {' '.join(map(str, error.cmd))}\n{error.stdout}{error.stderr}")
            return 1
        tracked = distributions.tracked_files()
        contents = {
            wheel.name: distributions.faults_of_wheel(distributions.files_of_wheel(wheel), tracked),
            sdist.name: distributions.faults_of_sdist(distributions.files_of_sdist(sdist), tracked),
        }
        report = Report(version, platform.platform(), contents)
        if "tutorials" in options.checks:
            report.left_out.append(NO_RAY)
        if missing := [name for name in smoke.CHECKS if name not in options.checks]:
            report.left_out.append(f"not selected by --checks: {', '.join(missing)}")
        known = {"wheel": wheel, "sdist": sdist}
        artifacts = {kind: known[kind] for kind in options.artifacts}
        for pair in options.pairs:
            report.rows += try_pair(pair, artifacts, version, folder, options)
    print(report.text())
    if options.json:
        options.json.write_text(json.dumps(report.data(), indent=1) + "\n")
    return report.exit_code(options.complete)


if __name__ == "__main__":
    sys.exit(main())
