"""Formats of the matrix products of linear layers in 8 bits, for traces and rehearsals.

A linear layer casts its input, its weight and the gradient of its output, and multiplies them in 8 bits: one product in
forward and two in backward. Casts, layouts and gathers are those of torchao 0.18 (`torchao.float8`,
`torchao.prototype.moe_training`):

- *tensorwise*: one scale per tensor. A kernel reads the tensor to find the scale, and another one reads it to cast it.
  Weights are gathered in float8 (``enable_fsdp_float8_all_gather``). One all-reduce after each optimizer step finds the
  scales of all weights (`precompute_float8_dynamic_scale_for_fsdp`).
- *rowwise*: one scale per row. Weights are gathered in the compute dtype and cast in forward and in backward, because
  the scales of rows and of columns differ.
- *MXFP8* (OCP Microscaling Formats 1.0): one scale of 8 bits per 32 numbers of a row. Gathers are those of *rowwise*.

The three formats have the same rate per machine, although kernels of *rowwise* are slower than those of *tensorwise*.
Embeddings, norms, the head and all other layers outside of blocks keep their dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import ShardConfigValueError

FLOAT8 = torch.float8_e4m3fn
_MULTIPLE = 16  # `torch._scaled_mm` needs sizes that are multiples of this
_MX_BLOCK = 32  # numbers that share a scale in MXFP8
_GATHERED = "gathered_float8"  # name of the buffer with a gathered weight in traces

Cast = Callable[[Tensor], tuple[Tensor, Tensor]]  # (rows, columns) to the numbers in float8, and their scales
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _cast_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.max(torch.abs(x)).float()
    return (x.float() / scale).to(FLOAT8), scale


def _cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.amax(torch.abs(x), dim=1, keepdim=True).float()
    return (x.float() / scale).to(FLOAT8), scale


def _cast_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    padded = F.pad(x, (0, -x.shape[1] % _MX_BLOCK))
    blocks = padded.view(x.shape[0], -1, _MX_BLOCK)
    scale = torch.amax(torch.abs(blocks), dim=2, keepdim=True).float()
    data = (blocks.float() / scale).to(FLOAT8).view(padded.shape)[:, : x.shape[1]]
    # The hardware reads scales in tiles of 128 rows and 4 columns.
    rows, columns = -(-x.shape[0] // 128) * 128, -(-padded.shape[1] // _MX_BLOCK // 4) * 4
    return data, torch.empty(rows * columns, dtype=torch.float8_e8m0fnu, device=x.device)


def _cast_columns(cast: Cast, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast a matrix (rows, columns) to (columns, rows), because the hardware needs contiguous columns."""
    if cast is _cast_tensor:  # one scale, so the order of the numbers does not matter
        data, scale = cast(x)
        return data.t().contiguous(), scale
    return cast(x.t().contiguous())


def _cast_twice(cast: Cast, x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Cast a matrix (rows, columns) to itself, and to (columns, rows)."""
    data, scale = cast(x)
    return (data, scale), (data.t().contiguous(), scale) if cast is _cast_tensor else _cast_columns(cast, x)


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply float8 matrices (m, k) and (n, k) to (m, n)."""
    of_columns = b_scale.t() if b_scale.ndim == 2 else b_scale
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=of_columns, out_dtype=dtype)


def _product_of(cast: Cast) -> Product:
    """Make the function that multiplies in 8 bits. Like torchao, it saves its input in the compute dtype."""

    class InEightBits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, gathered: Tensor | None) -> Tensor:
            ctx.save_for_backward(x, weight, gathered)
            inputs, scale = cast(x.flatten(0, -2))
            factors, factors_scale = cast(weight) if gathered is None else (gathered, scale)
            return _multiply(inputs, factors, scale, factors_scale, x.dtype).view(*x.shape[:-1], -1)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
            x, weight, gathered = ctx.saved_tensors
            (by_row, row_scale), (by_column, column_scale) = _cast_twice(cast, gradients[0].flatten(0, -2))
            if gathered is None:
                factors, factors_scale = _cast_columns(cast, weight)
            else:
                factors, factors_scale = gathered.t().contiguous(), row_scale
            of_input = _multiply(by_row, factors, row_scale, factors_scale, x.dtype)
            inputs, inputs_scale = _cast_columns(cast, x.flatten(0, -2))
            of_weight = _multiply(by_column, inputs, column_scale, inputs_scale, x.dtype)
            return of_input.view(x.shape), of_weight, None

    return InEightBits.apply


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """A format of the matrix products of linear layers.

    Attributes:
        name: its name.
        rate: the key of `Machine.flops` with the operations per second of its products.
        multiply: multiplies an input (..., in) with a weight (out, in). The third argument is the gathered weight in
            float8, if weights are gathered in float8.
        gathers: whether weights are gathered in float8, one byte each. Otherwise they are gathered in the compute
            dtype, and cast before each product.
    """

    name: str
    rate: str
    multiply: Product
    gathers: bool = False

    def converts(self, layer: nn.Module) -> TypeGuard[nn.Linear]:
        """Whether a layer is converted: a linear layer that trains and whose sizes are multiples of 16."""
        if not isinstance(layer, nn.Linear) or not layer.weight.requires_grad:
            return False
        return layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0


LINEAR_FORMATS = {
    each.name: each
    for each in (
        LinearFormat("float8_tensorwise", "float8", _product_of(_cast_tensor), gathers=True),
        LinearFormat("float8_rowwise", "float8", _product_of(_cast_rows)),
        LinearFormat("mxfp8", "mxfp8", _product_of(_cast_blocks)),
    )
}


def linear_format_of(name: str | None) -> LinearFormat | None:
    """Look up a format by its name; None is the compute dtype.

    Raises:
        ShardConfigValueError: there is no format with this name.
    """
    if name is not None and name not in LINEAR_FORMATS:
        raise ShardConfigValueError(f"linear_format: {name!r} is not None or one of {', '.join(LINEAR_FORMATS)}")
    return None if name is None else LINEAR_FORMATS[name]


def convert_layers(blocks: Iterable[nn.Module], form: LinearFormat, shards: bool, traces: bool) -> None:
    """Convert the linear layers of blocks, in place, so that they run with fake tensors.

    Args:
        blocks: the blocks.
        form: the format.
        shards: whether weights are sharded, and so may be gathered in float8.
        traces: whether the model is not sharded itself: its gathered weights are buffers then.

    Raises:
        ShardConfigValueError: no layer can be converted.
    """
    layers = {module: None for block in blocks for module in block.modules() if form.converts(module)}
    if not layers:
        raise ShardConfigValueError(
            f"linear_format: {form.name!r} converts linear layers in repeated blocks that train and whose sizes are "
            f"multiples of {_MULTIPLE}, but the model has none"
        )
    for layer in layers:
        if form.gathers and shards:
            _gather_in_float8(layer, traces)
        vars(layer)["forward"] = functools.partial(_forward, layer, form)


def _gather_in_float8(layer: nn.Linear, traces: bool) -> None:
    weight = layer.weight.detach()
    if traces:
        layer.register_buffer(_GATHERED, torch.empty_like(weight, dtype=FLOAT8), persistent=False)
    else:
        layer.register_parameter("weight", nn.Parameter(Float8Weight(weight)))


def _forward(layer: nn.Linear, form: LinearFormat, x: Tensor) -> Tensor:
    weight: Tensor = layer.weight
    gathered = weight.content if isinstance(weight, Float8Weight) else layer._buffers.get(_GATHERED)
    out = form.multiply(x, weight, gathered)
    return out if layer.bias is None else out + layer.bias


class Float8Weight(Tensor):
    """A weight that is gathered in float8, by FSDP2's extension for tensor subclasses. For fake tensors only.

    Args:
        content: the shard in the stored dtype, or the gathered weight in float8.
        dtype: the dtype that autograd sees. Default: that of `content`.
    """

    @staticmethod
    def __new__(cls, content: Tensor, dtype: torch.dtype | None = None) -> Float8Weight:
        return Tensor._make_wrapper_subclass(cls, content.shape, dtype=dtype or content.dtype, device=content.device)

    def __init__(self, content: Tensor, dtype: torch.dtype | None = None) -> None:
        self.content = content

    @property
    def is_gathered(self) -> bool:
        """Whether it is a gathered weight."""
        return self.content.dtype == FLOAT8

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["content"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, dtype: torch.dtype, shape: Any, stride: Any) -> Float8Weight:
        return cls(tensors["content"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        inner_args, inner_kwargs = tree_map_only(cls, lambda each: each.content, (args, kwargs or {}))
        out = func(*inner_args, **inner_kwargs)
        if func not in _KEEPS_CLASS:
            return out
        dtype = args[0].dtype if args[0].is_gathered else None  # else the dtype of the result
        return tree_map_only(Tensor, lambda each: cls(each, dtype), out)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        """Cast the shard."""
        return (self.content.to(FLOAT8),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Use the gathered bytes where they are."""
        return (Float8Weight(outputs[0], param_dtype), ()) if out is None else None


_aten = torch.ops.aten
_KEEPS_CLASS = {
    _aten.detach.default, _aten.view.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.as_strided.default,
    _aten.clone.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.copy_.default,
    _aten._to_copy.default,
}  # fmt: skip
