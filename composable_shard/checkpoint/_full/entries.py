"""Identify each tensor of a state dict. Hooks may rename, remove or replace parameters and buffers in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..._module.state_dict import states_with_parameters_in
from ..._torch.core import storage_id
from ..._torch.distributed import local_part, local_tensor
from ...errors import CheckpointError
from .metadata import Metadata, metadata_of
from .names import plain_name


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that optimizers have, by name; tied ones under each name.

    These are the sharded parameters, even while modules have the unsharded ones installed.
    """
    sharded = {
        id(state.entries.installed(index)): param.sharded
        for state in states_with_parameters_in(model)
        if state.entries.are_replaced
        for index, param in enumerate(state.entries.params)
    }
    return {
        plain_name(name): sharded.get(id(param), param)
        for name, param in model.named_parameters(remove_duplicate=False)
    }


class Source(NamedTuple):
    """A parameter or a buffer of a model, and all its names in the model."""

    names: list[str]
    tensor: torch.Tensor
    is_param: bool


class Entry(NamedTuple):
    """A tensor of a state dict.

    Attributes:
        name: its key without the parts that wrappers add.
        key: its key in the state dict.
        value: the tensor, detached.
        first: first name of the same tensor in the state dict. It differs from `name` if weights are tied.
        source: the parameter or buffer that it is, under any name. None if a hook has made it.
        aliases: whether it shares memory with a parameter or a buffer of the model without being that tensor under its
            own or a new name. Examples are a view that a hook has made, and a name that belongs to another parameter in
            the model.
    """

    name: str
    key: str
    value: torch.Tensor
    first: str
    source: Source | None
    aliases: bool

    @property
    def is_extra(self) -> bool:
        """Whether `get_extra_state` returned it."""
        return self.name.rpartition(".")[2] == "_extra_state"


@dataclass(frozen=True)
class Entries:
    """Content of a model's state dict.

    Attributes:
        tensors: tensors by name, in the order of the state dict.
        others: values that are not tensors (`get_extra_state`), by key.
        order: keys of both, each name once.
        metadata: metadata of the state dict.
    """

    tensors: dict[str, Entry]
    others: dict[str, Any]
    order: list[str]
    metadata: Metadata | None

    def values(self) -> dict[str, Any]:
        """All values by name, in order."""
        names = ((key, plain_name(key)) for key in self.order)
        return {name: self.tensors[name].value if name in self.tensors else self.others[key] for key, name in names}

    def make_integers(self) -> bool:
        """Whether hooks have made integer tensors, for example to quantize weights."""
        made = (each.value for each in self.tensors.values() if each.source is None and not each.is_extra)
        return any(not (value.is_floating_point() or value.is_complex()) for value in made)

    @classmethod
    def of(cls, model: nn.Module) -> Entries:
        """Read the state dict of a model. This reshards its parameters.

        Raises:
            CheckpointError: two keys differ only in the parts that wrappers add, but have different values.
        """
        for shard_state in states_with_parameters_in(model):
            shard_state.show_sharded()  # so that hooks and get_extra_state see the same parameters on all ranks
        with torch.no_grad():
            state = model.state_dict()  # with torch's FSDP2, this call reshards
        names = {key: plain_name(key) for key in state}
        sources = _Sources(model, names.values())
        entries = cls({}, {}, [], metadata_of(state))
        firsts: dict[int, str] = {}
        seen: dict[str, int] = {}
        for key, value in state.items():
            name, source = names[key], sources.of(names[key], value) if isinstance(value, torch.Tensor) else None
            same = id(value) if source is None else id(source.tensor)
            if seen.setdefault(name, same) != same:
                raise CheckpointError(
                    f"{key}: the state dict of the model has two values of the name {name}; change its hooks so that "
                    "each value has a different name"
                )
            if name in entries.tensors:
                continue
            entries.order.append(key)
            if isinstance(value, torch.Tensor):
                first = firsts.setdefault(same, name)
                entries.tensors[name] = Entry(name, key, value, first, source, sources.are_aliased(name, value, source))
            else:
                entries.others[key] = value
        return entries


class _Sources:
    """Finds the parameter or buffer of a model for each value of its state dict.

    Args:
        model: the model.
        names: all names in the state dict.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._names = {*names}
        self._own: dict[str, Source] = {}
        known: dict[int, Source] = {}
        for name, tensor, is_param in _held(model):
            source = known.setdefault(id(tensor), Source([], tensor, is_param))
            source.names.append(name)
            self._own[name] = source

    def of(self, name: str, value: torch.Tensor) -> Source | None:
        """The parameter or buffer of a value; None if a hook has made the value."""
        own = self._own.get(name)
        if own is not None and _is_same(own.tensor, value):
            return own
        memory = memory_of(value)
        sources = [] if memory is None else self._by_memory.get(memory, [])
        # If several parameters share the memory, prefer one that is not in the state dict under its own name.
        absent = (each for each in sources if self._names.isdisjoint(each.names))
        return next(absent, sources[0] if sources else None)

    def are_aliased(self, name: str, value: torch.Tensor, source: Source | None) -> bool:
        """See `Entry.aliases`."""
        own = self._own.get(name)
        if source is not None:
            return own is not None and own.tensor is not source.tensor
        memory = memory_of(value)
        return memory is not None and not self._storages.isdisjoint(_storages(memory))

    @cached_property
    def _by_memory(self) -> dict[tuple[Any, ...], list[Source]]:
        sources: dict[tuple[Any, ...], list[Source]] = {}
        for source in {id(each): each for each in self._own.values()}.values():
            if (memory := memory_of(source.tensor)) is not None:
                sources.setdefault(memory, []).append(source)
        return sources

    @cached_property
    def _storages(self) -> set[int]:
        return {each for memory in self._by_memory for each in _storages(memory)}


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, param in parameters_of(model).items():
        yield name, param, True
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield plain_name(name), buffer, False


def _is_same(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value of a state dict is the model's own tensor, and not a tensor that a hook has made from it."""
    if own is value:
        return True
    memory = memory_of(own)
    if memory is None:  # without a memory key, compare only type, shape and dtype
        return (type(own), own.shape, own.dtype) == (type(value), value.shape, value.dtype)
    return memory == memory_of(value)


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """A key that is equal for a tensor and its `detach()` and differs for all other tensors; None if there is none.

    It ends with the id of the storage or, for a subclass, with the keys of its inner tensors.
    """
    layout: tuple[Any, ...] = (tuple(tensor.shape), tensor.dtype)
    if isinstance(tensor, DTensor):
        inner = [local_tensor(tensor)]
        layout += (tensor.device_mesh, tuple(tensor.placements))
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
        return None
    else:
        layout += (tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        return (layout, storage_id(tensor))
    memories = [memory_of(each) for each in inner]
    return None if None in memories else (layout, *memories)


def _storages(memory: tuple[Any, ...]) -> Iterator[int]:
    for part in memory[1:]:
        if isinstance(part, tuple):
            yield from _storages(part)
        else:
            yield part


def are_alike(value: Any, other: Any) -> bool:
    """Whether two values are equal on this rank, except for the rounding errors of hooks that convert dtypes."""
    if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
        return repr(value) == repr(other)
    one, two = local_part(value), local_part(other)
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    if not (one.is_floating_point() or one.is_complex()) or not one.numel():
        return torch.equal(one, two)
    return _are_close(one, two)


def _are_close(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two floating-point or complex tensors of one dtype differ by at most a few units in the last place."""
    close = 4 * torch.finfo(one.dtype).eps
    one, two = (each.detach().to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, two))
    return torch.allclose(one, two, rtol=close, atol=close * float(two.abs().max().nan_to_num(0)), equal_nan=True)
