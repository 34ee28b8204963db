"""Build the wheel and the sdist, install each where nothing else is, and try it: what a release must pass.

    make release-check                             # each Python and each torch once, as far as they can be had here
    make release-check RELEASE="--pair 3.11:2.13.0 --checks imports,training"
    make release-check RELEASE=--all               # nine pairs, wheel and sdist of each
    make release-check RELEASE="--torch-index URL" # where pip finds builds of torch for CPUs

Each pair of Python and torch gets an environment for the wheel and one for the sdist. Commands run in an empty folder,
so that what is imported is what was installed. A build of torch for CUDA would bring gigabytes along and is not taken
(--cuda takes it): there the package is installed without torch, and Python reads its files. The table says what
was not checked, and `--complete` makes that an error.
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
import _interpreters as interpreters
import _smoke_checks as smoke
from _interpreters import NotToBeHadError, TorchOffer

FOUND = (
    "import sys, numpy, torch; "
    "print(f'Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {numpy.__version__}')"
)
LENT = "the Python of an environment that has torch: it is lent, with numpy and what else lies beside it"
NO_RAY = "tutorials/08_ray_train.py: it needs Ray"


@dataclass
class Row:
    """One environment, and what was tried in it.

    Attributes:
        python: its version.
        torch: the version that was asked for.
        artifact: "wheel" or "sdist".
        found: exact versions of both, where they were installed.
        results: of the checks, in their order.
        not_checked: why no check was tried that needs torch; empty if they were.
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
    """All that was tried.

    Attributes:
        version: of the package.
        platform: of this machine.
        contents: faults of what is in the wheel and the sdist, by their names.
        rows: an environment each.
        left_out: what no row has tried, beside the rows that were not.
    """

    version: str
    platform: str
    contents: dict[str, list[str]]
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def exit_code(self, complete: bool = False) -> int:
        """0 if all that was tried has passed and something was; with `complete`, if also nothing was left out."""
        tried = [row for row in self.rows if not row.not_checked]
        failed = any(each.outcome == smoke.FAILED for row in self.rows for each in row.results)
        good = bool(tried) and not failed and not any(self.contents.values())
        return 0 if good and not (complete and len(tried) < len(self.rows)) else 1

    def text(self) -> str:
        """A table of the rows, the failures, and what was not checked."""
        names = [name for name in smoke.CHECKS if any(each.name == name for row in self.rows for each in row.results)]
        head = ["Python", "torch", "from", *names, ""]
        lines = [head, *([row.python, row.torch, row.artifact, *_cells(row, names)] for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        parts = [f"composable_shard {self.version} on {self.platform}; seconds of each check", *table, ""]
        for name, faults in self.contents.items():
            parts += [f"{name}: {'holds what it should' if not faults else ''}", *(f"  {fault}" for fault in faults)]
        parts += ["", *(f"{row.artifact}: {row.found}" for row in self.rows if row.found)]
        for row in self.rows:
            for each in row.results:
                if each.outcome == smoke.FAILED:
                    parts += ["", f"FAILED {row.python}, torch {row.torch}, {row.artifact}: {each.name}", each.detail]
        failed = {each.name for row in self.rows for each in row.results if each.outcome == smoke.FAILED}
        parts += ["", "Shown by the checks that passed:"]
        parts += [f"  {name}: {smoke.SHOWS[name]}" for name in names if name not in failed]
        reasons = dict.fromkeys((row.python, row.torch, row.not_checked) for row in self.rows if row.not_checked)
        parts += ["", "NOT CHECKED:", *(f"  Python {python}, torch {torch}: {why}" for python, torch, why in reasons)]
        return "\n".join([*parts, *(f"  {each}" for each in self.left_out)])

    def data(self) -> dict[str, object]:
        """The same for a program."""
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
    """All rows of a Python and a torch."""
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
                f"pip offers torch {offer.version} for CUDA, with {', '.join(offer.cuda_packages)} and what they need; "
                "--torch-index names an index with builds for CPUs, --cuda takes this one"
            )
        torch = offer
    except NotToBeHadError as error:
        for row in rows:
            row.not_checked = str(error)
    for row in rows:
        version_of_torch = torch.version if torch else f"{row.torch} not to be had"
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
    """Fill a row in: an environment is made, the artifact installed with its requirements, and checked.

    Without torch, which may be None, nothing else is installed, and one check is left.
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
            it.install()  # by its exact version, and before anything can ask for another one
            it.install(str(artifact))
            row.found = it.run("-c", FOUND).strip() + (" (torch and numpy lent)" if torch.lies_in else "")
        else:
            it.install(str(artifact))
            names = [name for name in names if name == smoke.WITHOUT_TORCH]
        for result in smoke.run_checks(it, names):
            row.results.append(result)
            note(f"  {result.name}: {result.outcome}, {result.seconds:.0f} s; {smoke.last_line(result.detail)}")
    except RuntimeError as error:
        row.results.append(smoke.Result(smoke.WITHOUT_TORCH, smoke.FAILED, 0.0, f"cannot be installed: {error}"))
    if not options.keep:
        shutil.rmtree(place)


def index_of(options: argparse.Namespace) -> list[str]:
    """Options of pip by which it finds torch."""
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
    add("--python", type=Path, action="append", default=[], metavar="PATH", help="an interpreter that may be used")
    add("--torch-from", type=Path, action="append", default=[], metavar="PATH", help=LENT)
    add("--torch-index", metavar="URL", help="where pip looks for torch as well; one with builds for CPUs")
    add("--cuda", action="store_true", help="take a build of torch for CUDA, too: gigabytes")
    add("--complete", action="store_true", help="fail if a pair could not be checked")
    add("--limit", type=float, default=900.0, metavar="SECONDS", help="of one command (900)")
    add("--folder", type=Path, help="where environments are made; a temporary one by default")
    add("--keep", action="store_true", help="leave the environments where they are")
    add("--json", type=Path, metavar="FILE", help="write what was found to FILE, too")
    options = parser.parse_args(arguments)
    options.pairs = list(interpreters.ALL if options.all else options.pair or interpreters.USUAL)
    return options


def _names_of(known: Sequence[str]):
    def names(text: str) -> list[str]:
        given = [each.strip() for each in text.split(",")]
        if wrong := [each for each in given if each not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not among {', '.join(known)}")
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
            note(f"cannot be built: {' '.join(map(str, error.cmd))}\n{error.stdout}{error.stderr}")
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
            report.left_out.append(f"by --checks: {', '.join(missing)}")
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
