"""Information for a bug report: versions, devices, backends, environment variables, and which features work here.

Nothing is changed, and optional packages are not imported.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from . import host

JSON_VERSION = 1
LEAST_TORCH, LAST_TESTED_TORCH = (2, 11), (2, 15)
PACKAGES = ("rich", "matplotlib", "safetensors", "xxhash", "transformers", "accelerate", "lightning", "peft", "ray")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_PREFIXES = (
    "COMPOSABLE_SHARD_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "UCC_",
)  # fmt: skip
_NAMES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CXX",
    "TP_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
)  # fmt: skip
HIDDEN = "(hidden: it may be a secret)"
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|(^|_)(API)?(KEY|AUTH|PWD)S?(_|$)", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"://[^/\s]*@"  # user name and password in a URL
    r"|-----BEGIN|\b(hf_|sk-|gh[a-z]_|github_pat_|xox[a-z]-|AKIA|eyJ)"  # prefixes of keys
    r"|(?=[\w+=-]*\d)(?=[\w+=-]*[A-Za-z])(?<![\w+=-])[\w+=-]{20,}"  # long words with digits and letters
)

State = Literal["yes", "untested", "falls back", "no"]


@dataclass(frozen=True)
class Device:
    """A device that can compute.

    Attributes:
        kind: its device type in torch ("cpu", "cuda").
        name: its name.
        memory: its memory in bytes; None if unknown.
        free: bytes that can be allocated now; None if unknown.
    """

    kind: str
    name: str
    memory: int | None
    free: int | None


@dataclass(frozen=True)
class Support:
    """Whether a feature works here.

    Attributes:
        what: name of the feature.
        state: "yes"; "untested"; "falls back", if a replacement is used; or "no".
        why: the versions in use, or what is missing and what to do.
    """

    what: str
    state: State
    why: str


@dataclass(frozen=True)
class Environment:
    """The environment of this process.

    Attributes:
        versions: versions by package; None for packages that are not installed.
        torch_build: properties of the torch build.
        platform: properties of the system and its processor.
        devices: the processors, then the accelerators.
        backends: by name, whether this torch build has the torch.distributed backend.
        tools: by name, the path of each tool that compilation needs; None if it is missing.
        variables: the environment variables that affect the library. Values that may be secrets are hidden.
    """

    versions: Mapping[str, str | None]
    torch_build: Mapping[str, str]
    platform: Mapping[str, str]
    devices: tuple[Device, ...]
    backends: Mapping[str, bool]
    tools: Mapping[str, str | None]
    variables: Mapping[str, str]

    @property
    def support(self) -> tuple[Support, ...]:
        """Which features work here, and which fall back."""
        return (
            _torch(self),
            _system(self),
            _transports(self),
            _compiling(self),
            _checksums(self),
            _package(self, "safetensors", "checkpoints for other programs", "falls back", _NO_SAFETENSORS),
            _package(self, "rich", "tables and progress on a terminal", "falls back", "plain text, no progress"),
            _package(self, "matplotlib", "figures", "no", "composable_shard.report cannot draw"),
        )

    def as_json(self) -> dict[str, Any]:
        """The environment as JSON types."""
        return {
            "environment": JSON_VERSION,
            **dataclasses.asdict(self),
            "support": [dataclasses.asdict(each) for each in self.support],
        }


def environment() -> Environment:
    """Inspect this process and its machine."""
    return Environment(
        versions=_versions(),
        torch_build=_torch_build(),
        platform={
            "system": platform.platform(),
            "processor": host.processor_name(),
            "cores": str(host.cores()),
            "threads of torch": str(torch.get_num_threads()),
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
        },
        devices=_devices(),
        backends={name: _has_backend(name) for name in BACKENDS},
        tools=_tools(),
        variables=_shown(os.environ),
    )


# ----------------------------------------------------------------------------------------------------- inspection


def _versions() -> dict[str, str | None]:
    nccl = _has_backend("nccl") and torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "composable_shard": _version("composable-shard") or "not installed, run from source",
        "torch": str(torch.__version__),
        "numpy": _version("numpy"),
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,  # type: ignore[no-untyped-call]
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> dict[str, str]:
    hip = getattr(torch.version, "hip", None)
    return {
        "commit": str(torch.version.git_version),
        "for": f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU",
        "debug": "yes" if torch.version.debug else "no",
        "MKL": "yes" if _available(torch.backends.mkl) else "no",
        "oneDNN": "yes" if _available(torch.backends.mkldnn) else "no",
        "OpenMP": "yes" if _available(torch.backends.openmp) else "no",
        "distributed": "yes" if dist.is_available() else "no",
    }


def _available(part: Any) -> bool:
    return bool(part.is_available())


def _devices() -> tuple[Device, ...]:
    processors = Device("cpu", host.processor_name(), host.total_memory(), host.available_memory())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (processors,)
    count = torch.accelerator.device_count()
    return (processors, *(_accelerator(accelerator.type, index) for index in range(count)))


def _accelerator(kind: str, index: int) -> Device:
    module = torch.get_device_module(kind)
    name, memory, free = f"{kind} {index}", None, None
    try:
        name = module.get_device_name(index)
        free, memory = module.mem_get_info(index)
    except (AttributeError, AssertionError, RuntimeError) as error:  # list broken and full devices, too
        name = f"{name} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    return Device(kind, name, memory, free)


def _has_backend(name: str) -> bool:
    asked = getattr(dist, f"is_{name}_available", None)
    return dist.is_available() and asked is not None and bool(asked())


def _tools() -> dict[str, str | None]:
    path = shutil.which(os.environ.get("CXX") or "g++")  # the compiler that Inductor calls
    header = Path(sysconfig.get_path("include")) / "Python.h"
    triton = importlib.util.find_spec("triton")
    return {
        "C++ compiler": None if path is None else _without_home(path),
        "Python.h": _without_home(str(header)) if header.exists() else None,
        "triton": None if triton is None else _version("triton") or str(triton.origin),
    }


def _shown(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that affect the library, by name. Values that look like secrets are hidden."""
    names = sorted(name for name in variables if name in _NAMES or name.startswith(_PREFIXES))
    return {name: _value(name, variables[name]) for name in names}


def _value(name: str, value: str) -> str:
    if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value):
        return HIDDEN
    return _without_home(value)


def _without_home(text: str) -> str:
    """Replace the user's home directory, which contains the user's name, by ``~``."""
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


# ------------------------------------------------------------------------------------------------------- features


_NO_SAFETENSORS = "only other programs need it"


def _torch(seen: Environment) -> Support:
    version = seen.versions["torch"] or ""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    least, last = (".".join(map(str, each)) for each in (LEAST_TORCH, LAST_TESTED_TORCH))
    if numbers < LEAST_TORCH:
        return Support("torch", "no", f"{version} is older than {least}; install a later one")
    if numbers > LAST_TESTED_TORCH:
        return Support("torch", "untested", f"{version}: the library was tested with {least} to {last}")
    return Support("torch", "yes", f"{version} (tested with {least} to {last})")


def _system(seen: Environment) -> Support:
    if sys.platform == "linux":
        return Support("operating system", "yes", "Linux")
    if sys.platform == "darwin":
        return Support("operating system", "untested", "macOS: only on CPUs, and without offload to disk")
    return Support("operating system", "no", f"{seen.platform['system']}: the library needs Linux")


def _accelerators(seen: Environment) -> list[str]:
    """The device types, other than the CPU, that ranks can train on."""
    return sorted({device.kind for device in seen.devices} - {"cpu", "mps"})


def _transports(seen: Environment) -> Support:
    kinds = _accelerators(seen)
    backend = {"cuda": "nccl", "xpu": "xccl"}.get(kinds[0] if kinds else "", "gloo")
    forced = seen.variables.get("COMPOSABLE_SHARD_TRANSPORT")
    ending = f"; COMPOSABLE_SHARD_TRANSPORT is set to {forced!r}" if forced else ""
    if not seen.backends[backend]:
        of = kinds[0] if kinds else "CPU"
        return Support("communication", "no", f"this build of torch lacks {backend}, the backend for {of}")
    if kinds and backend == "gloo":
        return Support("communication", "untested", f"{kinds[0]}: the library has not been tested with it{ending}")
    if kinds:
        return Support("communication", "yes", f"{backend}: gathers directly into the memory of the weights{ending}")
    why = "no accelerator: gloo, with broadcasts, messages and local sums"
    return Support("communication", "falls back", f"{why}{ending}")


def _compiling(seen: Environment) -> Support:
    needed = ["C++ compiler", "Python.h", *(["triton"] if _accelerators(seen) else [])]
    missing = [name for name in needed if seen.tools[name] is None]
    if missing:
        where = "" if "triton" in missing else " on CPU"
        why = f"no {' and no '.join(missing)}: Inductor does not work{where}; 'aot_eager' does"
        return Support("torch.compile", "no", why)
    return Support("torch.compile", "yes", ", ".join(str(seen.tools[name]) for name in needed))


def _checksums(seen: Environment) -> Support:
    missing = "CRC32, about six times slower than xxhash's"
    return _package(seen, "xxhash", "checksums of checkpoints", "falls back", missing)


def _package(seen: Environment, name: str, what: str, state: State, missing: str) -> Support:
    version = seen.versions[name]
    if version is None:
        return Support(what, state, f"{name} is not installed: {missing}")
    return Support(what, "yes", f"{name} {version}")
