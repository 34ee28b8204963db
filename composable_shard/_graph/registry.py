"""Finds the group that a shard belongs to by the address of its memory: a graph has tensors, but no groups."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from .._comm.copies import Gradients
from .._group.exchange import Exchange
from .._torch.core import has_memory
from ..errors import ShardConfigStateError


class Owner(Protocol):
    """A group, in the form in which a running graph finds it."""

    def anchors(self) -> Sequence[torch.Tensor]:
        """The tensors whose memory identifies the group."""

    def exchange(self) -> Exchange | None:
        """Its gathers and reductions; None if the group of the eager runtime was freed."""

    def before_gather(self, with_gradients: bool) -> bool:
        """Prepare for a graph that is about to gather the group, and was compiled with or without gradients.

        Returns:
            whether the gradients of a forward that runs now will wait for a later reduction.
        """

    def trace_again(self) -> None:
        """Make the next call of the model trace its groups again."""

    def keep(self, gradients: Gradients) -> None:
        """Keep the current values of these gradients for a later backward; the graph may reuse their memory."""

    def take(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Return the sums of these gradients and the kept ones, which are no longer kept."""

    def settle(self, index: int, piece: torch.Tensor, complete: bool = True) -> None:
        """Add a reduced gradient to `.grad`."""

    def marks_of_unused(self, indices: Sequence[int], marks: torch.Tensor) -> list[float]:
        """The reduced marks of these parameters: positive if any rank had a gradient."""

    @property
    def zeros_for_unused(self) -> bool:
        """Whether a parameter that got no gradient on any rank gets zeros as its gradient."""


class Known:
    """A group that is identified by the memory of a tensor.

    Args:
        anchor: the tensor with that memory.
        owner: the group.

    Attributes:
        owner: returns the group; None if it was freed.
    """

    __slots__ = ("_anchor", "_exchange", "owner")

    def __init__(self, anchor: torch.Tensor, owner: Owner) -> None:
        self._anchor = weakref.ref(anchor, functools.partial(_forget, anchor.data_ptr()))
        self.owner = weakref.ref(owner)
        self._exchange: Exchange | None = None

    def exchange(self) -> Exchange:
        """The current gathers and reductions of the group; if it was freed, the last ones."""
        owner = self.owner()
        if owner is not None:
            self._exchange = owner.exchange() or self._exchange
        assert self._exchange is not None
        return self._exchange

    def has(self, anchor: object) -> bool:
        """Whether `anchor` is the weak reference to this group's tensor."""
        return anchor is self._anchor

    def is_at(self, address: int) -> bool:
        """Whether the memory at an address still belongs to the group."""
        anchor = self._anchor()
        return anchor is not None and anchor.data_ptr() == address


# Keyed by id instead of a WeakSet, because the references can be copied atomically while another thread adds an owner.
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
_by_address: dict[int, Known] = {}


def _forget(address: int, anchor: object) -> None:
    """Remove the entry of a freed tensor, so that the pool of its group can be freed."""
    entry = _by_address.get(address)
    if entry is not None and entry.has(anchor):
        _by_address.pop(address, None)


def add(owner: Owner) -> None:
    """Let graphs find a group during its lifetime, and afterwards as long as its shards are alive."""
    _owners[id(owner)] = owner


def owners() -> list[Owner]:
    """All groups that are alive."""
    return list(_owners.values())


def known(anchor: torch.Tensor) -> Known:
    """The group that this memory identifies.

    Raises:
        ShardConfigStateError: the memory does not belong to a sharded module.
    """
    address = anchor.data_ptr()
    entry = _by_address.get(address)
    if entry is None or not entry.is_at(address):
        _look_again()
        entry = _by_address.get(address)
        if entry is None or not entry.is_at(address):
            raise ShardConfigStateError(
                f"a compiled graph runs on parameters of shape {tuple(anchor.shape)} that do not belong to any sharded "
                "module now; if they were replaced since it was compiled (for example by torch.func.functional_call), "
                "run the uncompiled model"
            )
    return entry


def _look_again() -> None:
    """Note the addresses of all groups, and remove the entries of freed memory."""
    for address, entry in list(_by_address.items()):
        if not entry.is_at(address):
            _by_address.pop(address, None)
    for ref in _owners.valuerefs():
        owner = ref()
        for anchor in owner.anchors() if owner is not None else ():
            if owner is not None and anchor.numel() and has_memory(anchor):
                seen = _by_address.get(anchor.data_ptr())
                if seen is None or seen.owner() is not owner:
                    _by_address[anchor.data_ptr()] = Known(anchor, owner)
