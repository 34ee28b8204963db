"""Which Python and which torch can be had on this machine: interpreters, and what pip would install."""

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
# Each Python and each torch once, and first the pair that `make test` runs on.
USUAL = (("3.11", "2.13.0"), ("3.11", "2.11.0"), ("3.12", "2.13.0"), ("3.13", "2.15.0"))
ALL = tuple((python, torch) for python in PYTHONS for torch in TORCHS)
_CUDA = re.compile(r"(nvidia|cuda)[-_]", re.IGNORECASE)


class NotToBeHadError(Exception):
    """A Python or a torch that this machine does not have; the message says why."""


@dataclass(frozen=True)
class TorchOffer:
    """What would be taken as torch.

    Attributes:
        version: of it, with what stands behind a plus sign.
        cuda_packages: names of packages for CUDA that pip would bring along.
        lies_in: where another environment has it; None if pip is to install it.
    """

    version: str
    cuda_packages: tuple[str, ...] = ()
    lies_in: Path | None = None


def pair_of(text: str) -> tuple[str, str]:
    """``3.12:2.13.0`` as Python and torch.

    Raises:
        ValueError: it is not written so.
    """
    if not (match := re.fullmatch(r"(3\.\d+):(\d+\.\d+\.\d+)", text)):
        raise ValueError(f"{text!r} is no pair of Python and torch; write it as 3.12:2.13.0")
    return match[1], match[2]


def interpreter(version: str, given: Iterable[Path] = ()) -> Path:
    """An interpreter of this version: one of those that are given, this one, of the path, or of pyenv.

    A name on the path may be one that pyenv refuses to run, so each is asked for its version.

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
    raise NotToBeHadError(f"no python{version} on this machine; --python PATH names one")


def _version_of(python: Path) -> str | None:
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def torch_offer(python: Path, version: str, options: Sequence[str] = ()) -> TorchOffer:
    """Ask pip, which installs nothing, what it would take as this torch.

    Args:
        python: of an environment with pip.
        version: of torch.
        options: of pip, such as an index of its own.

    Raises:
        NotToBeHadError: pip knows none, or may not take it.
    """
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--report", "-", *options, f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise NotToBeHadError(f"pip offers no torch {version}: {errors[0][7:] if errors else 'it says not why'}")
    return offer_of(json.loads(done.stdout), sys.platform)


def lent_torch(pair: tuple[str, str], pythons: Iterable[Path]) -> TorchOffer | None:
    """The torch of another environment, if one of these is of this Python and has this torch."""
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
    """What a report of pip says of torch.

    Args:
        report: of ``pip install --report``, of torch alone.
        platform: as `sys.platform`; torch asks for CUDA's packages on Linux alone.
    """
    (item,) = report["install"]  # type: ignore[misc]
    metadata = item["metadata"]
    needed = [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in metadata.get("requires_dist", ())]
    cuda = [name for name in needed if _CUDA.match(name)] if platform == "linux" else []
    return TorchOffer(metadata["version"], tuple(cuda))
