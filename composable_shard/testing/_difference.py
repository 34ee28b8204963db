"""How two tensors differ, in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def difference(
    ours: torch.Tensor | None, theirs: torch.Tensor | None, atol: float, rtol: float, offsets: Sequence[int] = ()
) -> str:
    """How `ours` differs from `theirs` by more than ``atol + rtol * |theirs|``; empty if it does not.

    Args:
        offsets: where, in a larger tensor, these begin; the index that is named is of that one.
    """
    if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return "" if ours is theirs else f"is {_brief(ours)}, should be {_brief(theirs)}"
    if torch.equal(ours, theirs):
        return ""
    kind = torch.complex128 if ours.is_complex() else torch.float64
    is_, should = ours.detach().to(kind), theirs.detach().to(kind)
    gap = (is_ - should).abs()
    same = (is_ == should) | (is_.isnan() & should.isnan())
    wrong = ~(same | (gap <= atol + rtol * should.abs()))
    if not wrong.any():
        return ""
    first = wrong.nonzero()[0].tolist()
    place = [at + by for at, by in zip(first, offsets or [0] * len(first), strict=True)]
    at = tuple(first)
    scale = should.abs().clamp_min(torch.finfo(torch.float64).tiny)
    text = (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, max abs {_most(gap[wrong]):.3g}, "
        f"max rel {_most((gap / scale)[wrong]):.3g}; first at {place}: is {ours[at].item():.9g}, "
        f"should be {theirs[at].item():.9g}"
    )
    return text + _guess(is_, should)


def _most(values: torch.Tensor) -> float:
    return float(values.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _guess(is_: torch.Tensor, should: torch.Tensor) -> str:
    """What is behind it, if that is plain to see."""
    if is_.isnan().any() and not should.isnan().any():
        return " (NaN: read before its collective was waited for, or never written?)"
    there = should != 0
    if is_.is_complex() or not there.any() or (is_[~there] != 0).any():
        return ""
    factor = (is_[there] / should[there]).median()
    if abs(factor - 1) > 1e-2 and torch.allclose(is_, factor * should, rtol=1e-4, atol=0.0):
        return f" (everywhere {factor:.4g} times what it should be: a sum for a mean, or a wrong divide factor?)"
    return ""


def _brief(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')} of {list(value.shape)}"
