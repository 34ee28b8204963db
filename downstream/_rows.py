"""Classes for the files in `rows/`: `Rows` collects the rows of a library, and `Run` records the results of one row.

A row is a function with an ordinary program that uses another library. The same program runs with two
implementations: with torch's FSDP2, and with `composable_shard.install()` called before anything else is imported.
The recorded values are compared; `_compare.py` defines the verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

TORCH, OURS = "torch", "ours"  # the two implementations
AGREES = "agrees with the unsharded model"  # name of the recorded list of values that passed `Run.agrees`


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        title: a description of the program, printed in the table.
        program: the function. Each rank calls it in its own process.
        world: the world size.
        timeout: seconds until a rank counts as hanging, with either implementation.
        tolerance: the largest difference allowed, relative to the largest magnitude of the tensor or number. 0 means
            bitwise identical.
        why: the reason for a tolerance.
        sharded: whether the program must call `Run.sharded` with a sharded model.
        uses_ours: whether the program uses this library with torch's models, too. If both implementations fail, this is
            a defect.
    """

    title: str
    program: Callable[[Run], None]
    world: int = 2
    timeout: float = 180.0
    tolerance: float = 0.0
    why: str = ""
    sharded: bool = True
    uses_ours: bool = False

    def __post_init__(self) -> None:
        if self.tolerance and not self.why:
            raise ValueError(f"row {self.title!r}: a tolerance needs a reason")


@dataclass
class Rows:
    """The rows of one library.

    Args:
        library: the heading of the library's table.
        environment: the name of a file of pinned requirements in environments/, without ``.txt``; "torch" means the
            project's own environment.
        versions: distributions whose versions are printed in the table.
        uses_ours: as in `Row`, for all rows.
    """

    library: str
    environment: str
    versions: tuple[str, ...] = ("torch",)
    uses_ours: bool = False
    all: list[Row] = field(default_factory=list)

    def __call__(self, title: str, **settings: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
        """Return a decorator that adds a program as a row; `settings` are fields of `Row`."""

        def add(program: Callable[[Run], None]) -> Callable[[Run], None]:
            self.add(title, program, **settings)
            return program

        return add

    def add(self, title: str, program: Callable[[Run], None], **settings: Any) -> None:
        """Add a row. Use this method instead of the decorator to add rows in a loop."""
        if any(row.title == title for row in self.all):
            raise ValueError(f"{self.library}: two rows have the title {title!r}")
        self.all.append(Row(title, program, **{"uses_ours": self.uses_ours, **settings}))


class Run:
    """One run of a row on one rank.

    Attributes:
        side: `TORCH` or `OURS`. Programs read it only where a library requires a difference.
        rank: this process's rank.
        world: the world size.
        folder: an empty folder that all ranks of this run share; the working directory.
        noted: the recorded values by name: tensors, numbers, strings and containers of them.
    """

    def __init__(self, side: str, rank: int, world: int, folder: Path) -> None:
        self.side, self.rank, self.world, self.folder = side, rank, world, folder
        self.noted: dict[str, Any] = {}

    def note(self, name: str, value: Any) -> None:
        """Record a value for the comparison. DTensors are gathered, so all ranks must call this method."""
        if name in self.noted:
            raise ValueError(f"a value named {name!r} is already recorded")
        self.noted[name] = plain(value)

    def sharded(self, model: nn.Module, name: str = "sharded") -> None:
        """Record the placements of DTensor parameters, and check that this run's implementation sharded the model."""
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        ours = [module for module in sharded if _is_ours(module)]
        if not sharded:
            raise AssertionError("the model is not sharded: none of its modules is an FSDPModule")
        if len(ours) != (len(sharded) if self.side == OURS else 0):
            raise AssertionError(f"{len(ours)} of {len(sharded)} sharded modules belong to composable_shard")
        placed = {n: str(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}
        if not placed:
            raise AssertionError("no parameter of the model is a DTensor")
        self.note(name, placed)

    def weights(self, model: nn.Module, name: str = "weights") -> None:
        """Record all unsharded parameters and buffers."""
        self.note(name, {**dict(model.named_parameters()), **dict(model.named_buffers())})

    def gradients(self, model: nn.Module, name: str = "gradients") -> None:
        """Record all unsharded gradients; None for a parameter without a gradient."""
        self.note(name, {n: p.grad for n, p in model.named_parameters()})

    def files(self, folder: str | Path, name: str = "files", ignore: Iterable[str] = ()) -> None:
        """Record the contents of all files below a folder on rank 0, after all ranks have called this method.

        Args:
            ignore: suffixes of files whose content differs between runs (logs, times). Only their names are compared.
        """
        torch.distributed.barrier()
        if self.rank == 0:
            self.note(name, dict(_contents(Path(folder), tuple(ignore))))
        torch.distributed.barrier()

    def agrees(self, name: str, value: Any, unsharded: Any, tolerance: float = 1e-5) -> None:
        """Check a value against that of the unsharded model, computed in the same process.

        Raises:
            AssertionError: a difference is greater than `tolerance`, relative to the largest magnitude.
        """
        from _compare import differences

        wrong = [each for each in differences(plain(unsharded), plain(value)) if each.size > tolerance]
        if wrong:
            raise AssertionError(f"{name} differ from the unsharded model's: {'; '.join(map(str, wrong[:3]))}")
        self.noted.setdefault(AGREES, []).append(name)


def plain(value: Any) -> Any:
    """Convert a value to types that `torch.load(weights_only=True)` accepts (no DTensors, subclasses, devices)."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            # NF4 tensors have both methods, and their `dequantize` does something else. Others have only `dequantize`.
            for name in ("get_original_weight", "dequantize"):
                if hasattr(value, name):
                    value = getattr(value, name)()
                    break
        return torch.clone(value.detach()).cpu()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in (sorted(value) if isinstance(value, set) else value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _is_ours(module: nn.Module) -> bool:
    return any(base.__module__.split(".")[0] == "composable_shard" for base in type(module).__mro__)


def _contents(folder: Path, ignore: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the relative name and the comparable content of each file and each distributed checkpoint."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            if (path / ".metadata").exists():
                yield f"{path.relative_to(folder)} (distributed checkpoint)", _distributed_checkpoint(path)
            continue
        name = str(path.relative_to(folder))
        if (path.parent / ".metadata").exists():
            continue
        yield name, "not compared" if name.endswith(ignore) else _content(path)
    if (folder / ".metadata").exists():
        yield "(distributed checkpoint)", _distributed_checkpoint(folder)


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return plain(load_file(path))
    if path.suffix in {".bin", ".pt", ".pth", ".ckpt"}:
        return plain(torch.load(path, map_location="cpu", weights_only=False))
    if path.suffix == ".json":
        return plain(json.loads(path.read_text()))
    return "not compared"


def _distributed_checkpoint(folder: Path) -> Any:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = folder.with_name(folder.name + ".whole.pt")
    try:
        dcp_to_torch_save(folder, whole)
        return plain(torch.load(whole, map_location="cpu", weights_only=False))
    finally:
        whole.unlink(missing_ok=True)
