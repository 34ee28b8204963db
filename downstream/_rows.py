"""What a file of rows is written with: `Rows` collects them, a `Run` notes what one of them has seen.

A row is an ordinary program around somebody else's library, in a function. It runs unchanged on two sides: with
torch's FSDP2, and with `composable_shard.install()` called before anything else was imported. What it notes on both
sides is compared; see `_compare.py` for the verdicts.
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

TORCH, OURS = "torch", "ours"  # the two sides
AGREES = "agrees with the unsharded model"  # under which a run lists what does


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        title: what it does, in the words of the table.
        program: the function; every rank calls it in a process of its own.
        world: the number of ranks.
        timeout: seconds until a rank is taken to hang, on either side.
        tolerance: the largest difference allowed, relative to the largest magnitude of the tensor or number; 0: bits.
        why: the reason for a tolerance.
        sharded: whether the program has a sharded model to show (`Run.sharded`).
    """

    title: str
    program: Callable[[Run], None]
    world: int = 2
    timeout: float = 180.0
    tolerance: float = 0.0
    why: str = ""
    sharded: bool = True

    def __post_init__(self) -> None:
        if self.tolerance and not self.why:
            raise ValueError(f"row {self.title!r}: a tolerance needs a reason")


@dataclass
class Rows:
    """The rows of one library.

    Args:
        library: the heading of its table.
        environment: the file of pinned requirements in environments/, without ``.txt``; "torch": the project's own.
        versions: distributions whose versions the table names.
    """

    library: str
    environment: str
    versions: tuple[str, ...] = ("torch",)
    all: list[Row] = field(default_factory=list)

    def __call__(self, title: str, **settings: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
        """Decorates the program of a row; `settings` are those of `Row`."""

        def add(program: Callable[[Run], None]) -> Callable[[Run], None]:
            self.add(title, program, **settings)
            return program

        return add

    def add(self, title: str, program: Callable[[Run], None], **settings: Any) -> None:
        """Adds a row, for those that are made in a loop."""
        if any(row.title == title for row in self.all):
            raise ValueError(f"{self.library}: two rows are called {title!r}")
        self.all.append(Row(title, program, **settings))


class Run:
    """One run of a row on one rank.

    Attributes:
        side: `TORCH` or `OURS`. Programs do not look at it, except to name where a library forces a difference.
        rank: this process's rank.
        world: how many there are.
        folder: an empty folder that all ranks of this run share; the working directory.
        noted: what is compared between the sides, by name: tensors, numbers, strings and containers of them.
    """

    def __init__(self, side: str, rank: int, world: int, folder: Path) -> None:
        self.side, self.rank, self.world, self.folder = side, rank, world, folder
        self.noted: dict[str, Any] = {}

    def note(self, name: str, value: Any) -> None:
        """Keep a value for the comparison. DTensors are gathered, so every rank has to call it."""
        if name in self.noted:
            raise ValueError(f"{name!r} was noted before")
        self.noted[name] = plain(value)

    def sharded(self, model: nn.Module, name: str = "sharded") -> None:
        """Note which parameters are DTensors, and make sure that this side's engine manages the model."""
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        ours = [module for module in sharded if _is_ours(module)]
        if not sharded:
            raise AssertionError("nothing is sharded: no module of the model is an FSDPModule")
        if len(ours) != (len(sharded) if self.side == OURS else 0):
            raise AssertionError(f"{len(ours)} of {len(sharded)} sharded modules are composable_shard's")
        placed = {n: str(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}
        if not placed:
            raise AssertionError("no parameter of the model is a DTensor")
        self.note(name, placed)

    def weights(self, model: nn.Module, name: str = "weights") -> None:
        """Note all parameters and buffers, whole."""
        self.note(name, {**dict(model.named_parameters()), **dict(model.named_buffers())})

    def gradients(self, model: nn.Module, name: str = "gradients") -> None:
        """Note all gradients, whole; None where there is none."""
        self.note(name, {n: p.grad for n, p in model.named_parameters()})

    def files(self, folder: str | Path, name: str = "files", ignore: Iterable[str] = ()) -> None:
        """Note the contents of all files below a folder, on rank 0, which others must have finished writing.

        Args:
            ignore: endings of names of files whose content differs from run to run (logs, times); names are compared.
        """
        torch.distributed.barrier()
        if self.rank == 0:
            self.note(name, dict(_contents(Path(folder), tuple(ignore))))
        torch.distributed.barrier()

    def agrees(self, name: str, value: Any, unsharded: Any, tolerance: float = 1e-5) -> None:
        """Compare with what the unsharded model gave in this very process.

        Raises:
            AssertionError: a difference above `tolerance`, relative to the largest magnitude.
        """
        from _compare import differences

        wrong = [each for each in differences(plain(unsharded), plain(value)) if each.size > tolerance]
        if wrong:
            raise AssertionError(f"{name} differ from the unsharded model's: {'; '.join(map(str, wrong[:3]))}")
        self.noted.setdefault(AGREES, []).append(name)


def plain(value: Any) -> Any:
    """The value without DTensors, subclasses of tensors and devices: what `torch.load` reads back safely."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            for name in (
                "get_original_weight",
                "dequantize",
            ):  # of NF4, where the other one is another function; of most
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
    """Names of files relative to the folder, with what is in them as far as it can be compared."""
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
