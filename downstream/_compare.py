"""What became of a row: the same on both sides, better than torch, failed on both, or a defect of ours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _rows import AGREES, OURS, TORCH, Row

SAME, BETTER, BOTH_FAIL, DEFECT = "same", "better", "torch fails too", "DEFECT"


@dataclass(frozen=True)
class Difference:
    """Two values that are not equal.

    Attributes:
        where: the names that lead to them.
        size: their largest difference over the largest magnitude; infinite if they cannot be compared.
        text: what differs.
    """

    where: str
    size: float
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    """What became of a row.

    Attributes:
        word: `SAME`, `BETTER`, `BOTH_FAIL` or `DEFECT`.
        difference: the largest one between the sides, relative; 0: all bits are equal; None if one of them failed.
        text: of a failure, or of what differs.
    """

    word: str
    difference: float | None
    text: str


def differences(before: Any, after: Any, where: str = "") -> Iterator[Difference]:
    """All places in which two plain values differ (see `_rows.plain`)."""
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        yield from _of_tensors(before, after, where)
    elif type(before) is not type(after):
        yield Difference(where, math.inf, f"{_short(before)} became {_short(after)}")
    elif isinstance(before, dict):
        for name in [*before, *(name for name in after if name not in before)]:
            inner = f"{where}.{name}" if where else name
            if name not in before or name not in after:
                yield Difference(inner, math.inf, "is missing" if name in before else "is there in addition")
            else:
                yield from differences(before[name], after[name], inner)
    elif isinstance(before, list):
        if len(before) != len(after):
            yield Difference(where, math.inf, f"{len(before)} values became {len(after)}")
        else:
            for index, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(before, float):
        if before != after and not (math.isnan(before) and math.isnan(after)):
            size = abs(before - after) / max(abs(before), abs(after))
            yield Difference(where, size if math.isfinite(size) else math.inf, f"{before!r} became {after!r}")
    elif before != after:
        yield Difference(where, math.inf, f"{_short(before)} became {_short(after)}")


def _of_tensors(before: torch.Tensor, after: torch.Tensor, where: str) -> Iterator[Difference]:
    if before.shape != after.shape or before.dtype != after.dtype:
        kinds = [f"{tuple(each.shape)} {each.dtype}" for each in (before, after)]
        yield Difference(where, math.inf, f"{kinds[0]} became {kinds[1]}")
        return
    if torch.equal(before, after):
        return
    one, other = before.double(), after.double()
    if not torch.equal(_without_finite(one), _without_finite(other)):
        yield Difference(where, math.inf, "other elements are infinite or not a number")
        return
    apart = (one - other).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    if apart:
        most = max(one.nan_to_num(0.0, 0.0, 0.0).abs().max().item(), other.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
        yield Difference(where, apart / most, f"differ by {apart / most:.1e} of the largest magnitude")


def _without_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Zero where it is finite; not a number becomes another value, which equals itself."""
    return torch.where(tensor.isfinite(), 0.0, tensor.nan_to_num(7.0, float("inf"), -float("inf")))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def judge(row: Row, folders: dict[str, Path]) -> Verdict:
    """Compare what the ranks of both sides have left in their folders."""
    errors = {side: _error(row, folder) for side, folder in folders.items()}
    if errors[OURS] and errors[TORCH]:
        return Verdict(BOTH_FAIL, None, f"torch: {errors[TORCH]} / ours: {errors[OURS]}")
    if errors[OURS]:
        return Verdict(DEFECT, None, errors[OURS])
    if errors[TORCH]:
        agreed = _noted(folders[OURS], 0).get(AGREES)
        shown = f"ours agrees with the unsharded model ({', '.join(agreed)})" if agreed else "ours runs"
        return Verdict(BETTER, None, f"{shown}; torch: {errors[TORCH]}")
    apart: list[Difference] = []
    for rank in range(row.world):
        theirs, ours = (_noted(folders[side], rank) for side in (TORCH, OURS))
        apart += differences(theirs, ours, f"rank {rank}" if row.world > 1 else "")
    worst = max((each.size for each in apart), default=0.0)
    if worst > row.tolerance:
        wrong = [each for each in apart if each.size > row.tolerance]
        return Verdict(DEFECT, worst, f"{len(wrong)} differ: " + "; ".join(map(str, wrong[:3])))
    return Verdict(SAME, worst, row.why if worst else "")


def _noted(folder: Path, rank: int) -> Any:
    return torch.load(folder / f"noted{rank}.pt", weights_only=True)


def _error(row: Row, folder: Path) -> str:
    """The error of the first rank that failed, in one line; empty if none did."""
    failed = sorted(folder.glob("error*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if failed:
        lines = failed[0].read_text().strip().splitlines()
        return lines[0][:300] if lines else "failed"
    missing = [rank for rank in range(row.world) if not (folder / f"noted{rank}.pt").exists()]
    return f"no result of rank {missing[0]}" if missing else ""
