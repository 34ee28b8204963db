"""Describe how two tensors differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def difference(
    actual: torch.Tensor | None, expected: torch.Tensor | None, atol: float, rtol: float, offsets: Sequence[int] = ()
) -> str:
    """Describe where `actual` differs from `expected` by more than ``atol + rtol * |expected|``.

    Args:
        actual, expected: tensors of the same shape and dtype, or None.
        atol, rtol: absolute and relative tolerance.
        offsets: where these tensors begin in a larger one, for each dimension. The reported index is in the larger one.

    Returns:
        The description; empty if the tensors match.
    """
    if actual is None or expected is None or actual.dtype != expected.dtype or actual.shape != expected.shape:
        return "" if actual is expected else f"is {_brief(actual)}, should be {_brief(expected)}"
    if torch.equal(actual, expected):
        return ""
    kind = torch.complex128 if actual.is_complex() else torch.float64
    is_, should = actual.detach().to(kind), expected.detach().to(kind)
    gap = (is_ - should).abs()
    same = (is_ == should) | (is_.isnan() & should.isnan())
    wrong = ~(same | (gap <= atol + rtol * should.abs()))
    if not wrong.any():
        return ""
    first = wrong.nonzero()[0].tolist()
    index = [at + by for at, by in zip(first, offsets or [0] * len(first), strict=True)]
    at = tuple(first)
    scale = should.abs().clamp_min(torch.finfo(torch.float64).tiny)
    text = (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, max abs {_most(gap[wrong]):.3g}, "
        f"max rel {_most((gap / scale)[wrong]):.3g}; first at {index}: is {actual[at].item():.9g}, "
        f"should be {expected[at].item():.9g}"
    )
    return text + _guess(is_, should)


def _most(values: torch.Tensor) -> float:
    return float(values.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _guess(is_: torch.Tensor, should: torch.Tensor) -> str:
    """A likely cause of the difference, or an empty string."""
    if is_.isnan().any() and not should.isnan().any():
        return " (NaN: was it read before its collective was waited for, or never written?)"
    nonzero = should != 0
    if is_.is_complex() or not nonzero.any() or (is_[~nonzero] != 0).any():
        return ""
    factor = (is_[nonzero] / should[nonzero]).median()
    if abs(factor - 1) > 1e-2 and torch.allclose(is_, factor * should, rtol=1e-4, atol=0.0):
        return (
            f" (all elements are {factor:.4g} times the expected value: a sum instead of a mean, or a wrong divide "
            "factor?)"
        )
    return ""


def _brief(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')} of {list(value.shape)}"
