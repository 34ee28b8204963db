"""Packed parameters: frozen ones whose bytes are not numbers of their dtype, such as quantized weights.

They are gathered as bytes, with any mixed-precision policy. The rest of their state (scales, code books, the
shape of the layer) is in attributes of the parameter. `fully_shard` keeps these on the sharded parameter and sets them
on the unsharded one. An attribute may also refer to the parameter's own data. It is left out on the sharded parameter,
where it would keep the full data alive on every rank. On the unsharded one it refers to the gathered data.

Layers for such weights keep views of them that autograd does not see: on the ``ctx`` of a function, or in an object of
the module. So their memory is freed and allocated again while all views of it stay (`Request.refills`). Because the
parameters are frozen, each gather restores the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .._torch.core import storage_id


@dataclass(frozen=True, eq=False)
class Carried:
    """The state of a packed parameter besides its data.

    Attributes:
        kind: the parameter's class.
        attributes: by name, the attributes that are kept.
        data: names of attributes that are the parameter's own data.
        states: names of those `attributes` that are objects which hold tensors. Each forward gets a copy, because a
            layer may change them together with the parameter, for example when it converts the layout.
    """

    kind: type
    attributes: Mapping[str, Any]
    data: tuple[str, ...]
    states: tuple[str, ...]

    def of(self, sharded: torch.Tensor) -> Carried:
        """Return this state with the attributes that a sharded parameter has; in a copied module, these are copies."""
        kept = {name: sharded.__dict__[name] for name in self.attributes if name in sharded.__dict__}
        return replace(self, attributes=kept)

    def keep(self, sharded: torch.Tensor) -> None:
        """Set missing attributes on the sharded parameter, for example after a conversion of the module."""
        for name in self.attributes.keys() - sharded.__dict__.keys():
            sharded.__dict__[name] = self.attributes[name]

    def lend(self, whole: torch.Tensor) -> None:
        """Give an unsharded parameter, which has the sharded one's attributes, its own `states` and `data`."""
        for name in self.states:
            whole.__dict__[name] = copy.copy(whole.__dict__[name])
        for name in self.data:
            whole.__dict__[name] = whole.data

    def whole(self, data: torch.Tensor, sharded: torch.Tensor) -> nn.Parameter:
        """Make the full parameter as it was before it was sharded, of its class."""
        made: nn.Parameter = torch.Tensor._make_subclass(self.kind, data, False)
        made.__dict__.update({name: sharded.__dict__[name] for name in self.attributes if name in sharded.__dict__})
        self.lend(made)
        return made

    def take(self, sharded: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy the attributes of a full parameter, whose data is already sharded, to the sharded parameter."""
        sharded.__dict__.update({name: whole.__dict__[name] for name in self.attributes if name in whole.__dict__})

    def lend_in_graph(self, whole: torch.Tensor) -> None:
        """Like `lend`, but while Dynamo traces, and for a tensor that has no attributes yet."""
        public = {name: value for name, value in self.attributes.items() if not name.startswith("_")}
        for name, value in {**public, **{name: whole.view(whole.shape) for name in self.data}}.items():
            setattr(whole, name, value)


def carried_by(param: nn.Parameter) -> Carried | None:
    """Return the state that a parameter carries if it is packed; None if it is not.

    Two types of frozen parameters are packed: those whose dtype allows no gradient (integers), and those of a subclass
    that carry tensors. Not packed are DTensors and other subclasses that are made of tensors (`__tensor_flatten__`),
    and those that gather themselves (`fsdp_pre_all_gather`).
    """
    holding = [name for name, value in param.__dict__.items() if _holds_tensors(value)]
    if param.requires_grad or _gathers_itself(param) or not (_is_no_number(param.dtype) or _is_own(param, holding)):
        return None
    return _carried(param, holding)


def _carried(param: nn.Parameter, holding: Sequence[str]) -> Carried:
    """Return what a parameter carries; `holding` are the names of attributes that are tensors or hold tensors."""
    attributes = param.__dict__
    data = tuple(name for name in holding if _is_data_of(param, attributes[name]))
    kept = {name: value for name, value in attributes.items() if name not in data}
    states = tuple(name for name in holding if not isinstance(attributes[name], torch.Tensor))
    return Carried(type(param), kept, data, states)


def _gathers_itself(param: nn.Parameter) -> bool:
    return hasattr(param, "__tensor_flatten__") or hasattr(param, "fsdp_pre_all_gather")


def _is_no_number(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_own(param: nn.Parameter, holding: Sequence[str]) -> bool:
    """Whether a parameter is of a subclass and carries tensors under these names."""
    return type(param) is not nn.Parameter and bool(holding)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(each, torch.Tensor) for each in _within(value))


def _within(value: Any) -> Iterator[Any]:
    """Yield a value and, unless it is a tensor or module, its attributes."""
    yield value
    if not isinstance(value, torch.Tensor | nn.Module | type):
        yield from getattr(value, "__dict__", {}).values()


def _is_data_of(param: torch.Tensor, value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == param.shape
        and value.dtype == param.dtype
        and storage_id(value) == storage_id(param)
    )
