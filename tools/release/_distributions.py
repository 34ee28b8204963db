"""Build the wheel and the sdist, and check their contents."""

from __future__ import annotations

import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_THE_REPOSITORY = (".ci/", ".github/")  # tracked files that are not in the sdist


def project() -> dict[str, object]:
    """Return the table `[project]` of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def make_environment(folder: Path, python: Path) -> Path:
    """Create an empty environment with pip. Return its interpreter.

    Raises:
        subprocess.CalledProcessError: `python` cannot create an environment.
    """
    subprocess.run([str(python), "-m", "venv", "--clear", str(folder)], check=True, capture_output=True, text=True)
    return folder / "bin" / "python"


def build(out: Path, python: Path) -> tuple[Path, Path]:
    """Build both in a new environment with the build requirements of pyproject.toml. Return wheel and sdist.

    Raises:
        subprocess.CalledProcessError: the build tool cannot be installed, or the build fails.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        tools = tomllib.load(file)["build-system"]["requires"]
    builder = make_environment(out / "builder", python)
    for command in (
        ["-m", "pip", "install", "--quiet", *tools],
        ["-m", "hatchling", "build", "--directory", str(out / "dist")],
    ):
        subprocess.run([str(builder), *command], cwd=ROOT, check=True, capture_output=True, text=True)
    (wheel,), (sdist,) = (sorted((out / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def tracked_files() -> set[str]:
    """Return the files that git tracks and that exist."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def files_of_sdist(path: Path) -> set[str]:
    """Return the names of its files, without the common top folder."""
    with tarfile.open(path) as archive:
        return {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}


def files_of_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def faults_of_sdist(names: Collection[str], tracked: Collection[str]) -> list[str]:
    """Return a message for each tracked file that is missing, and for each file that is not tracked."""
    wanted = {name for name in tracked if not name.startswith(OF_THE_REPOSITORY)}
    faults = [f"missing: {name}" for name in sorted(wanted - set(names))]
    return faults + [f"not in the repository: {name}" for name in sorted(set(names) - wanted - {"PKG-INFO"})]


def faults_of_wheel(names: Collection[str], tracked: Collection[str]) -> list[str]:
    """Return a message for each missing file, and for each file that is neither of the packages nor metadata."""
    wanted = {name for name in tracked if name.startswith(("composable_shard/", "pytest_composable_shard/"))}
    (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    described = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    faults = [f"missing: {name}" for name in sorted((wanted | described) - set(names))]
    return faults + [f"not part of the packages: {name}" for name in sorted(set(names) - wanted - described)]


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist into a folder. Return its top folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside
