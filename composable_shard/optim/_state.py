"""Optimizer state as trees: make sketches without tensor data, list tensors by path, and fill sketches again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch

Path = tuple[Any, ...]


class Sketch(NamedTuple):
    """Shape and dtype of a tensor with one or more dimensions."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Number(NamedTuple):
    """Value and dtype of a 0-dim tensor, which is equal for all matrices of a parameter."""

    value: Any
    dtype: torch.dtype
    on_host: bool

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Make a tensor of this value, on `device` or on the CPU."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu" if self.on_host else device)


def mapped(tree: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Replace each leaf of a tree by the result of `function(path, leaf)`."""
    if isinstance(tree, dict):
        return {key: mapped(value, function, (*path, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([mapped(value, function, (*path, index)) for index, value in enumerate(tree)])
    return function(path, tree)


def sketched(tree: Any) -> Any:
    """A state without tensor data, which can be compared and sent to other ranks."""
    return mapped(tree, lambda _, leaf: _sketch(leaf))


def _sketch(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.ndim:
        return Sketch(tuple(leaf.shape), leaf.dtype)
    return Number(leaf.item(), leaf.dtype, leaf.device.type == "cpu")


def tensors_in(sketch: Any) -> dict[Path, Sketch]:
    """The tensors of a sketch, by path."""
    return {path: leaf for path, leaf in _leaves(sketch) if isinstance(leaf, Sketch)}


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree


def leaf_at(tree: Any, path: Path) -> Any:
    """The leaf at a path."""
    for key in path:
        tree = tree[key]
    return tree


def filled(sketch: Any, tensors: Mapping[Path, Any], device: torch.device) -> Any:
    """Make a state from its sketch and its tensors. Numbers and values are copied."""

    def leaf_of(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Sketch):
            return tensors[path]
        return leaf.tensor(device) if isinstance(leaf, Number) else deepcopy(leaf)

    return mapped(sketch, leaf_of)
