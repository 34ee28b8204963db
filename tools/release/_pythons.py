"""Find Python interpreters on this machine, and the torch that pip would install for them.

The file is not called `_interpreters`, because Python 3.13 has a built-in module of that name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
TORCHS = ("2.11.0", "2.13.0", "2.15.0")
# Each Python and each torch at least once. The first pair is the one of `make test`.
USUAL = (("3.11", "2.13.0"), ("3.11", "2.11.0"), ("3.12", "2.13.0"), ("3.13", "2.15.0"))
ALL = tuple((python, torch) for python in PYTHONS for torch in TORCHS)
_CUDA = re.compile(r"(nvidia|cuda)[-_]", re.IGNORECASE)


class NotToBeHadError(Exception):
    """A Python or torch version is not available on this machine. The message gives the reason."""


@dataclass(frozen=True)
class TorchOffer:
    """A torch that can be used in an environment.

    Attributes:
        version: full version, including the local part after `+`.
        cuda_packages: names of CUDA packages that pip would install with it.
        lies_in: site-packages directory of another environment that contains it; None: pip installs it.
    """

    version: str
    cuda_packages: tuple[str, ...] = ()
    lies_in: Path | None = None


def pair_of(text: str) -> tuple[str, str]:
    """Parse ``3.12:2.13.0`` into versions of Python and torch.

    Raises:
        ValueError: the text has another format.
    """
    if not (match := re.fullmatch(r"(3\.\d+):(\d+\.\d+\.\d+)", text)):
        raise ValueError(f"{text!r} is not a pair of Python and torch; write it as 3.12:2.13.0")
    return match[1], match[2]


def interpreter(version: str, given: Iterable[Path] = ()) -> Path:
    """Return an interpreter of this version: from `given`, this one, from PATH, or from pyenv.

    Each candidate is run to check its version, because a shim of pyenv on PATH may not run.

    Raises:
        NotToBeHadError: there is none.
    """
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    named = shutil.which(f"python{version}")
    candidates = [*given, Path(sys.executable), *([Path(named)] if named else [])]
    candidates += sorted(root.glob(f"versions/{version}.*/bin/python"))
    for candidate in candidates:
        if _version_of(candidate) == version:
            return candidate
    raise NotToBeHadError(f"no python{version} on this machine; --python PATH adds an interpreter")


def _version_of(python: Path) -> str | None:
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def torch_offer(python: Path, version: str, options: Sequence[str] = ()) -> TorchOffer:
    """Ask pip which torch it would install. Nothing is installed.

    Args:
        python: interpreter of an environment with pip.
        version: version of torch.
        options: more options of pip, such as an index.

    Raises:
        NotToBeHadError: pip finds no such torch.
    """
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--report", "-", *options, f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise NotToBeHadError(f"pip offers no torch {version}: {errors[0][7:] if errors else 'pip gave no reason'}")
    return offer_of(json.loads(done.stdout), sys.platform)


def lent_torch(pair: tuple[str, str], pythons: Iterable[Path]) -> TorchOffer | None:
    """Return the torch of an environment in `pythons` with this Python and torch version, or None."""
    source = "from importlib.metadata import distribution as d; t = d('torch'); print(t.version, t.locate_file(''))"
    for python in pythons:
        if _version_of(python) != pair[0]:
            continue
        done = subprocess.run([str(python), "-c", source], capture_output=True, text=True, timeout=60)
        version, _, folder = done.stdout.strip().partition(" ")
        if done.returncode == 0 and version.partition("+")[0] == pair[1]:
            return TorchOffer(version, lies_in=Path(folder))
    return None


def offer_of(report: dict[str, object], platform: str) -> TorchOffer:
    """Read the torch offer from a report of pip.

    Args:
        report: output of ``pip install --report`` for torch alone.
        platform: as `sys.platform`. torch requires CUDA packages only on Linux.
    """
    (item,) = report["install"]  # type: ignore[misc]
    metadata = item["metadata"]
    needed = [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in metadata.get("requires_dist", ())]
    cuda = [name for name in needed if _CUDA.match(name)] if platform == "linux" else []
    return TorchOffer(metadata["version"], tuple(cuda))
