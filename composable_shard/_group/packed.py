"""Packed parameters: frozen ones whose bytes are not numbers of their dtype, such as quantized weights.

They are gathered as the bytes that they are, whatever the mixed-precision policy says. What belongs to them besides
their data (scales, code books, the shape of the layer) are attributes of the parameter: `fully_shard` keeps them on the
sharded parameter, and lends them to the unsharded one. An attribute may also be the data itself under another name; on
the unsharded parameter it is the gathered data then, and on the sharded one it is left out, since it would keep the
whole parameter on every rank.

Layers for such weights keep views of them where autograd does not look: on the ``ctx`` of a function, or in an object
of the module. So their memory is emptied and filled again while all views of it stay (`Request.refills`): as they are
frozen, each gather brings the same bytes.
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
    """What a packed parameter has besides its data.

    Attributes:
        kind: the parameter's class.
        attributes: by name, what is kept.
        data: names under which it has its own data once more.
        states: names of the objects among `attributes` that hold tensors. Each forward is lent a copy, as a layer may
            change them together with the weights, to another layout, say.
    """

    kind: type
    attributes: Mapping[str, Any]
    data: tuple[str, ...]
    states: tuple[str, ...]

    def of(self, sharded: torch.Tensor) -> Carried:
        """The same, as the sharded parameter has it: that of a copied module has copies."""
        kept = {name: sharded.__dict__[name] for name in self.attributes if name in sharded.__dict__}
        return replace(self, attributes=kept)

    def keep(self, sharded: torch.Tensor) -> None:
        """Put what is missing on the sharded parameter, as after a conversion of the module."""
        for name in self.attributes.keys() - sharded.__dict__.keys():
            sharded.__dict__[name] = self.attributes[name]

    def lend(self, whole: torch.Tensor) -> None:
        """Let the unsharded parameter, which has the attributes of the sharded one, have what is its own."""
        for name in self.states:
            whole.__dict__[name] = copy.copy(whole.__dict__[name])
        for name in self.data:
            whole.__dict__[name] = whole.data

    def whole(self, data: torch.Tensor, sharded: torch.Tensor) -> nn.Parameter:
        """The full parameter as it was before it was sharded, of its class."""
        made: nn.Parameter = torch.Tensor._make_subclass(self.kind, data, False)
        made.__dict__.update({name: sharded.__dict__[name] for name in self.attributes if name in sharded.__dict__})
        self.lend(made)
        return made

    def take(self, sharded: torch.Tensor, whole: torch.Tensor) -> None:
        """Put what a full parameter has besides its data, whose piece is in the sharded one by now, on that."""
        sharded.__dict__.update({name: whole.__dict__[name] for name in self.attributes if name in whole.__dict__})

    def lend_in_graph(self, whole: torch.Tensor) -> None:
        """The same while Dynamo traces, for a tensor that has no attributes yet."""
        public = {name: value for name, value in self.attributes.items() if not name.startswith("_")}
        for name, value in {**public, **{name: whole.view(whole.shape) for name in self.data}}.items():
            setattr(whole, name, value)


def carried_by(param: nn.Parameter) -> Carried | None:
    """What a parameter carries if it is packed; None if it is not.

    Packed are frozen parameters that have no gradient by their dtype (integers), and those of a class of their own that
    carry tensors. Tensor subclasses that are made of other tensors say themselves how they are gathered.
    """
    holding = [name for name, value in param.__dict__.items() if _holds_tensors(value)]
    if param.requires_grad or _gathers_itself(param) or not (_is_no_number(param.dtype) or _is_own(param, holding)):
        return None
    return _carried(param, holding)


def _carried(param: nn.Parameter, holding: Sequence[str]) -> Carried:
    """What it carries; `holding` are the names of the attributes that are, or hold, tensors."""
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
    """Whether its class is its own, and it carries tensors under these names."""
    return type(param) is not nn.Parameter and bool(holding)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(each, torch.Tensor) for each in _within(value))


def _within(value: Any) -> Iterator[Any]:
    """A value, and what an object holds that is no module."""
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
