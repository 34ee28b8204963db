"""Compare the results of a row with torch and with composable_shard, and determine the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _rows import AGREES, OURS, TORCH, Row

ROOT = Path(__file__).parents[1]
SAME, BETTER, BOTH_FAIL, DEFECT = "same", "better", "torch fails too", "DEFECT"


@dataclass(frozen=True)
class Difference:
    """Two values that are not equal.

    Attributes:
        where: the path of names and indices to the values.
        size: the largest absolute difference divided by the largest magnitude; infinite if not comparable.
        text: a description of the difference.
    """

    where: str
    size: float
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    """The result of a row.

    Attributes:
        word: `SAME`, `BETTER`, `BOTH_FAIL` or `DEFECT`.
        difference: the largest relative difference between the two implementations. 0 means bitwise identical; None
            means that at least one of them failed.
        text: a description of the failure or of the differences.
    """

    word: str
    difference: float | None
    text: str


def differences(before: Any, after: Any, where: str = "") -> Iterator[Difference]:
    """Yield every difference between two plain values (see `_rows.plain`)."""
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
    """Replace finite elements by 0 and NaN by 7, so that equal values compare equal (NaN does not equal itself)."""
    return torch.where(tensor.isfinite(), 0.0, tensor.nan_to_num(7.0, float("inf"), -float("inf")))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def judge(row: Row, folders: dict[str, Path]) -> Verdict:
    """Compare the values or errors that the ranks of the two implementations wrote to `folders`."""
    errors = {side: _error(row, folder) for side, folder in folders.items()}
    if errors[OURS] and errors[TORCH] and not row.uses_ours:
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
    """Return the first line of the error of the rank that failed first, or an empty string if no rank failed."""
    failed = sorted(folder.glob("error*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if failed:
        lines = failed[0].read_text().strip().splitlines()
        return lines[0].replace(f"{ROOT}/", "")[:300] if lines else "failed"
    missing = [rank for rank in range(row.world) if not (folder / f"noted{rank}.pt").exists()]
    return f"no result of rank {missing[0]}" if missing else ""
