"""The state of an optimizer as trees: sketched, taken apart by path, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch

Path = tuple[Any, ...]


class Sketch(NamedTuple):
    """A tensor of one dimension or more."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Number(NamedTuple):
    """A tensor without dimensions, which is equal for all matrices of a parameter."""

    value: Any
    dtype: torch.dtype
    on_host: bool

    def tensor(self, device: torch.device) -> torch.Tensor:
        """A new tensor of it."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu" if self.on_host else device)


def mapped(tree: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The tree with each leaf replaced by what the function gives for its path and itself."""
    if isinstance(tree, dict):
        return {key: mapped(value, function, (*path, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([mapped(value, function, (*path, index)) for index, value in enumerate(tree)])
    return function(path, tree)


def sketched(tree: Any) -> Any:
    """A state without its tensors: it can be sent to other ranks, and compared."""
    return mapped(tree, lambda _, leaf: _sketch(leaf))


def _sketch(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.ndim:
        return Sketch(tuple(leaf.shape), leaf.dtype)
    return Number(leaf.item(), leaf.dtype, leaf.device.type == "cpu")


def tensors_in(sketch: Any) -> dict[Path, Sketch]:
    """By path, the tensors of a sketch."""
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
    """A state from its sketch, with these tensors, and with numbers and values of its own."""

    def leaf_of(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Sketch):
            return tensors[path]
        return leaf.tensor(device) if isinstance(leaf, Number) else deepcopy(leaf)

    return mapped(sketch, leaf_of)
