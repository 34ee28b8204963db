"""Checks of an installed package. They run commands in an empty folder and check the output."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _distributions import ROOT, unpack

SMOKE = Path(__file__).parent / "smoke"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
TUTORIALS = {
    "01": "01_train_gpt.py --size tiny --steps 6 --sample 20 --evaluation 32 --precision float32 --out runs/01",
    "02": "02_compile.py --size tiny --steps 2 --backend aot_eager --device cpu",
    "03": "03_plan_memory_and_overlap.py",
    "04": "-m pytest -q -p no:cacheprovider 04_test_a_layer.py",
    "05": "05_checkpoint_and_resume.py",
    "06": "06_lora.py --shape layers=2,width=128,heads=4,vocabulary=512,sequence=2048 --devices 2 --memory 0.8 "
    "--size tiny --sequence 64 --rank 2 --base-steps 4 --steps 4 --evaluation 16 --out runs/06",
    "07": "07_launch.py --steps 4 --save-every 2",
    "09": "09_cuda_graphs.py --size tiny --steps 3",
    "10": "10_weights_to_inference.py --steps 4 --every 2 --sample 4",
    "train": "train.py --model tiny --sequence 16 --steps 6 --evaluation 16 --sample 0",
}
# Test files that take seconds. `make test` runs all tests in the checkout.
TESTS = ("tests/tools/test_words.py", "tests/plan/test_layout.py", "tests/planner/test_link_fit.py")
EXTRAS = "cli,plot,checkpoint,remote"
PASSED, FAILED = "passed", "failed"


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        name: name of the check.
        outcome: "passed" or "failed".
        seconds: duration.
        detail: last line of the output, or its last 2000 characters if the check failed.
    """

    name: str
    outcome: str
    seconds: float
    detail: str = ""


@dataclass
class Installation:
    """An environment with the package, and an empty folder.

    Attributes:
        python: interpreter of the environment.
        folder: working directory of commands. It contains only copies of the scripts that run, no package source.
        artifact: installed wheel or sdist.
        version: expected version of the package.
        pip: options of pip for later installations, such as the exact torch.
        limit_s: time limit of a command, in seconds.
    """

    python: Path
    folder: Path
    artifact: Path
    version: str
    pip: Sequence[str] = ()
    limit_s: float = 900.0
    environment: dict[str, str] = field(default_factory=lambda: clean_environment(os.environ))

    def run(self, *arguments: object, folder: Path | None = None) -> str:
        """Run the environment's Python. Return stdout and stderr.

        Raises:
            RuntimeError: the command failed or reached the limit. The message has the end of the output.
        """
        return self.call(str(self.python), *arguments, folder=folder)

    def call(self, *command: object, folder: Path | None = None) -> str:
        """Run any command, like `run`."""
        process = subprocess.Popen(
            [str(each) for each in command],
            cwd=folder or self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the whole process group, including ranks
            output, _ = process.communicate()
            raise RuntimeError(f"still running after {self.limit_s:.0f} s\n{output[-2000:]}") from None
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}\n{output[-2000:]}")
        return output

    def install(self, *packages: str) -> str:
        return self.run("-m", "pip", "install", "--quiet", *self.pip, *packages)


def clean_environment(variables: dict[str, str] | os._Environ[str]) -> dict[str, str]:
    """Return environment variables that exclude packages outside the environment, and that use loopback."""
    kept = {name: value for name, value in variables.items() if not name.startswith(("PYTHON", "COMPOSABLE_SHARD_"))}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    fixed = {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {"GLOO_SOCKET_IFNAME": loopback, **kept, **fixed}


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


# ------------------------------------------------------------------------------------------------------- the checks


def compiles(it: Installation) -> str:
    """Compile all files of the package without a warning. Needs no torch."""
    source = "import importlib.util; print(importlib.util.find_spec('composable_shard').submodule_search_locations[0])"
    folder = last_line(it.run("-c", source))
    it.run("-W", "error", "-m", "compileall", "-q", "-f", folder)
    return f"{sum(1 for _ in Path(folder).rglob('*.py'))} files"


def imports(it: Installation) -> str:
    return last_line(it.run("imports.py", it.version))


def training(it: Installation) -> str:
    here = ("--standalone", "--local-addr", "127.0.0.1")
    return last_line(it.run(*TORCHRUN, *here, "training.py"))


def command(it: Installation) -> str:
    for output in (it.run("-m", "composable_shard", "--help"), it.call(it.python.with_name("composable-shard"), "-h")):
        if "measure-links" not in output:
            raise RuntimeError(f"the help does not list the commands:\n{output}")
    return "both print their help"


def first_page(it: Installation) -> str:
    """Run the first script of the package's description (README) with torchrun."""
    source = "from importlib.metadata import metadata; print(metadata('composable-shard').get_payload())"
    it.folder.joinpath("train.py").write_text(script_of(it.run("-c", source)))
    output = it.run(*TORCHRUN, "train.py")
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", output, flags=re.MULTILINE)]
    if len(losses) < 2 or losses[-1] > losses[0] - 1:
        raise RuntimeError(f"the loss does not decrease:\n{output[-2000:]}")
    return f"loss {losses[0]} to {losses[-1]}"


def script_of(page: str) -> str:
    """Return the first Python code block of a page."""
    if not (match := re.search(r"^```python\n(.*?)^```$", page.replace("\r\n", "\n"), re.MULTILINE | re.DOTALL)):
        raise RuntimeError("the description of the package has no script")
    return match[1]


def types(it: Installation) -> str:
    """Run mypy on `typed.py`. It must know the package's types and reject only the last line."""
    it.install(next(each for each in project_extra(it, "dev") if each.startswith("mypy")))
    cache = it.folder / "mypy_cache"
    # mypy's exit code is 1, because the last line is wrong. The script ignores it.
    source = "import sys; from mypy import api; out, err, code = api.run(sys.argv[1:]); print(out, err)"
    output = it.run("-c", source, "--strict", f"--cache-dir={cache}", "typed.py")
    return verdict_of_mypy(output, last=len(it.folder.joinpath("typed.py").read_text().splitlines()))


def verdict_of_mypy(output: str, last: int) -> str:
    """Check the output of mypy for `typed.py`, in which only the last line is wrong."""
    errors = re.findall(r"^typed\.py:(\d+): error: .*\[([\w-]+)\]$", output, flags=re.MULTILINE)
    if errors != [(str(last), "arg-type")]:
        raise RuntimeError(f"mypy should reject only the last line:\n{output[-2000:]}")
    return "mypy rejects only the wrong line"


def extras(it: Installation) -> str:
    it.install(f"{it.artifact}[{EXTRAS}]")
    return last_line(it.run("imports.py", it.version))


def tutorials(it: Installation) -> str:
    """Run copies of all tutorials with small settings, except the one for Ray."""
    it.install(next(each for each in project_extra(it, "dev") if re.match(r"pytest[~=<>]", each)))
    folder = it.folder / "tutorials"
    shutil.copytree(ROOT / "tutorials", folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for name, arguments in TUTORIALS.items():
        try:
            it.run(*arguments.split(), folder=folder)
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}") from None
    return f"{len(TUTORIALS)} scripts"


def tests(it: Installation) -> str:
    """Collect all tests of the unpacked sdist, and run a few of them."""
    it.install(f"{it.artifact}[{EXTRAS},dev,docs]")
    inside = unpack(it.artifact, it.folder / "unpacked")
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    collected = last_line(it.run(*pytest, "--collect-only", "-m", "", "tests", folder=inside))
    return f"{collected}; {last_line(it.run(*pytest, *TESTS, folder=inside))}"


def project_extra(it: Installation, extra: str) -> list[str]:
    """Return the requirements of an extra of the installed package."""
    source = "from importlib.metadata import requires; print('\\n'.join(requires('composable-shard')))"
    lines = (line.partition(";") for line in it.run("-c", source).splitlines())
    return [name.strip() for name, _, marker in lines if re.search(rf"extra == ['\"]{extra}['\"]", marker)]


WITHOUT_TORCH = "compiles"
CHECKS: dict[str, Callable[[Installation], str]] = {
    WITHOUT_TORCH: compiles,
    "imports": imports,
    "training": training,
    "command": command,
    "first page": first_page,
    "types": types,
    "extras": extras,
    "tutorials": tutorials,
    "tests": tests,
}  # in this order: only torch and numpy are installed for the first five
SHOWS = {
    WITHOUT_TORCH: "the package can be installed, and this Python compiles every file",
    "imports": "version, py.typed, and imports of all modules with only torch and numpy",
    "training": "losses and weights of two gloo ranks equal the unsharded model's; save and load of a checkpoint",
    "command": "python -m composable_shard, and composable-shard",
    "first page": "the first script of the package's description",
    "types": "mypy --strict on a file that uses the package",
    "extras": f"imports again, with the extras {EXTRAS}",
    "tutorials": "all tutorials with small settings, except the one for Ray",
    "tests": "pytest collects all tests of the sdist and runs a few",
}


def checks_for(artifact: Path, chosen: Sequence[str]) -> list[str]:
    """Return the names of the checks for an artifact, in order."""
    return [name for name in CHECKS if name in chosen and (name != "tests" or artifact.name.endswith(".tar.gz"))]


def run_checks(it: Installation, names: Sequence[str]) -> Iterator[Result]:
    """Run the checks in order and yield their results. A failed check does not stop the others."""
    for file in SMOKE.glob("*.py"):
        shutil.copy(file, it.folder)
    for name in names:
        begun = time.monotonic()
        try:
            detail, outcome = CHECKS[name](it), PASSED
        except (RuntimeError, StopIteration, OSError) as error:
            detail, outcome = f"{error}" or type(error).__name__, FAILED
        yield Result(name, outcome, time.monotonic() - begun, detail)
