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
from collections.abc import Iterator, Mapping
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
        for name, value in self.attributes.items():
            if not name.startswith("_"):  # torch's own, and ours
                setattr(whole, name, value)
        for name in self.data:
            setattr(whole, name, whole.view(whole.shape))


def carried_by(param: nn.Parameter) -> Carried | None:
    """What a parameter carries if it is packed; None if it is not.

    Packed are frozen parameters that have no gradient by their dtype (integers), and those of a class of their own that
    carry tensors. Tensor subclasses that are made of other tensors say themselves how they are gathered.
    """
    if param.requires_grad or hasattr(param, "__tensor_flatten__") or hasattr(param, "fsdp_pre_all_gather"):
        return None
    numbers = param.dtype.is_floating_point or param.dtype.is_complex
    attributes = param.__dict__
    holding = [name for name, value in attributes.items() if _holds_tensors(value)]
    if numbers and (type(param) is nn.Parameter or not holding):
        return None
    data = tuple(name for name in holding if _is_data_of(param, attributes[name]))
    return Carried(
        type(param),
        {name: value for name, value in attributes.items() if name not in data},
        data,
        tuple(name for name in holding if not isinstance(attributes[name], torch.Tensor)),
    )


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
