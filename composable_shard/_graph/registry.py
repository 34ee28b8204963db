"""Which group a shard belongs to, by the address of its memory: a graph knows tensors, and no groups."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from .._comm.copies import Gradients
from .._errors import ShardConfigStateError
from .._group.exchange import Exchange
from .._torch.core import has_memory


class Owner(Protocol):
    """A group, as a graph that runs finds it."""

    def anchors(self) -> Sequence[torch.Tensor]:
        """The tensors whose memory stands for it."""

    def exchange(self) -> Exchange | None:
        """Its gathers and reductions; None if the group of the eager runtime is gone."""

    def before_gather(self) -> None:
        """A graph is about to gather it."""

    def keep(self, gradients: Gradients) -> None:
        """Keep these, or rather what is in them now, for a later backward; the graph may reuse their memory."""

    def take(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """These and those that were kept, added; the latter are kept no longer."""

    def settle(self, index: int, piece: torch.Tensor, complete: bool = True) -> None:
        """Add a reduced gradient to `.grad`."""

    @property
    def zeros_for_unused(self) -> bool:
        """Whether a parameter that got no gradient on any rank gets zeros."""


class Known:
    """The group that some memory stands for.

    Args:
        anchor: the tensor with that memory.
        owner: the group.

    Attributes:
        owner: returns it; None if it is gone.
    """

    __slots__ = ("_anchor", "_exchange", "owner")

    def __init__(self, anchor: torch.Tensor, owner: Owner) -> None:
        self._anchor = weakref.ref(anchor, functools.partial(_forget, anchor.data_ptr()))
        self.owner = weakref.ref(owner)
        self._exchange: Exchange | None = None

    def exchange(self) -> Exchange:
        """The gathers and reductions of the group, as they are now or, if it is gone, as they were last."""
        owner = self.owner()
        if owner is not None:
            self._exchange = owner.exchange() or self._exchange
        assert self._exchange is not None
        return self._exchange

    def has(self, anchor: object) -> bool:
        """Whether this is the weak reference to its tensor."""
        return anchor is self._anchor

    def is_at(self, address: int) -> bool:
        """Whether the memory at an address is still that of the group."""
        anchor = self._anchor()
        return anchor is not None and anchor.data_ptr() == address


# By id, and no WeakSet: its references can be listed at once while another thread adds an owner.
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
_by_address: dict[int, Known] = {}


def _forget(address: int, anchor: object) -> None:
    """A tensor is gone: nothing may stand for its group's memory any more, so that the pool can be freed."""
    entry = _by_address.get(address)
    if entry is not None and entry.has(anchor):
        _by_address.pop(address, None)


def add(owner: Owner) -> None:
    """Let graphs find a group while it lives, and later for as long as its shards do."""
    _owners[id(owner)] = owner


def known(anchor: torch.Tensor) -> Known:
    """The group that this memory stands for.

    Raises:
        ShardConfigStateError: it is that of no sharded module.
    """
    address = anchor.data_ptr()
    entry = _by_address.get(address)
    if entry is None or not entry.is_at(address):
        _look_again()
        entry = _by_address.get(address)
        if entry is None or not entry.is_at(address):
            raise ShardConfigStateError(
                f"a compiled graph runs on parameters of shape {tuple(anchor.shape)} that belong to no sharded module "
                "now; if they were replaced since it was compiled (by torch.func.functional_call, say), run the model "
                "that is not compiled"
            )
    return entry


def _look_again() -> None:
    """Note the addresses of all groups, and forget memory that is gone."""
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
