"""Properties of torch's operators for traces (FLOPs, bytes, collectives), and fake tensors that run whole programs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

from .core import address_of, has_memory

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Attention operators whose FLOPs torch does not count, with the index of the queries among the arguments.
_ATTENTION = {_FLASH: 0, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: 1}

_COLLECTIVES = {  # bytes that a rank sends, as a multiple of the bytes of the result
    "all_reduce": 2.0,
    "all_gather_into_tensor": 1.0,
    "reduce_scatter_tensor": 1.0,
    "all_to_all_single": 1.0,
}
# Operators that read as many bytes of their first argument as they return.
_ROWS = ("aten::embedding", "aten::index_select", "aten::gather")


def flops_of_operator(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of matrix products and attention, where a multiply-add is two operations; 0 for other operators.

    Like in torch, attention counts the full square of queries and keys. Causal kernels skip half of it, and run at
    about half the rate of other products (https://arxiv.org/abs/2407.08608).
    """
    if func._overloadpacket in _ATTENTION:
        query, key = args[_ATTENTION[func._overloadpacket] :][:2]
        products = 2 if func._overloadpacket is _FLASH else 5
        return int(2 * products * query.numel() * key.shape[-2])
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def bytes_of_operator(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes that an operator reads and writes in memory; 0 if it only returns views."""
    name = func._schema.name
    if name.startswith(_ROWS):
        return 2 * sum(tensor.nbytes for tensor in outputs)
    if not func._schema.is_mutable:
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in given]
        if not outputs:
            return 0
    return sum(tensor.nbytes for tensor in (*inputs, *outputs))


def collective_bytes(func: Any, outputs: Sequence[torch.Tensor]) -> int:
    """Bytes of a functional collective, to be multiplied by ``(ranks - 1) / ranks``; 0 for other operators.

    An all-reduce counts twice, as a reduce-scatter and an all-gather.
    """
    space, _, name = func._schema.name.partition("::")
    if space != "_c10d_functional" or name not in _COLLECTIVES:
        return 0
    scale = _COLLECTIVES[name]
    return int(scale * sum(tensor.nbytes for tensor in outputs))


_KNOWN_NUMBERS, _KNOWN_INTEGERS = 16, 1 << 16  # largest sizes of floating-point and other tensors that keep values
CONSTRUCTORS = {
    getattr(torch.ops.aten, name)
    for name in ("arange", "eye", "full", "ones", "randint", "randperm", "scalar_tensor", "zeros")
}


def _is_small(tensor: torch.Tensor) -> bool:
    most = _KNOWN_NUMBERS if tensor.is_floating_point() or tensor.is_complex() else _KNOWN_INTEGERS
    return tensor.device.type == "cpu" and tensor.numel() <= most


class _Converter(FakeTensorConverter):
    """Keeps no weak references to the tensors that it makes, because ``nn.Module.to`` cannot move such tensors."""

    def from_meta_and_device(self, fake_mode: Any, t: Any, device: Any, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(fake_mode, t, device, *args, **kwargs)


class ProgramMode(FakeTensorMode):
    """A fake-tensor mode in which a whole program can run.

    The program may use real tensors and may move modules. Small tensors that do not depend on parameters (ranks,
    lengths, flags) keep their values. Other tensors have no values.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.fake_tensor_converter = _Converter()

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Whether a real tensor keeps its values when it becomes a fake one."""
        return _is_small(t) and t.layout is torch.strided and has_memory(t)

    def constructed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call one of `CONSTRUCTORS`; the result keeps its values if it is small."""
        out = func(*args, **kwargs)
        if has_memory(out) or not _is_small(out):
            return out
        with _disable_current_modes():
            real = func(*args, **kwargs)
        return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)


def without_data() -> FakeTensorMode:
    """A context in which operators compute only shapes and dtypes, also those of real tensors, and communicate nothing.

    Results are fake tensors. In-place operators do not change real tensors.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def with_values(function: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Call a function with a real version of a fake tensor: with its values if it has kept them, else with ones."""
    with _disable_current_modes():
        known = tensor.constant if isinstance(tensor, FakeTensor) else None
        return function(torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known)


class Guesses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns made-up values when a program reads values of fake tensors.

    Numbers are 1, conditions are False, and masks select everything.

    Args:
        mode: the mode in which the program runs.

    Attributes:
        operators: names of operators whose output size depends on values; the largest possible size was used.
    """

    def __init__(self, mode: ProgramMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket in CONSTRUCTORS:
            return self._mode.constructed(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            pass
        if func is torch.ops.aten._local_scalar_dense.default:
            return _value(args[0])
        self.operators.add(str(func._overloadpacket))
        return _with_ones(func, args, kwargs)


def _value(tensor: torch.Tensor) -> bool | int | float | complex:
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1 + 0j if tensor.is_complex() else 1


def _with_ones(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on real tensors of ones instead of the fake ones, and return fake results.

    Masks of ones select everything, so outputs whose size depends on values have the largest possible size.
    """
    with _disable_current_modes():
        given = tree_map_only(torch.Tensor, lambda each: torch.ones(each.shape, dtype=each.dtype), (args, kwargs))
        out = func(*given[0], **given[1])
    return tree_map_only(torch.Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype), out)


@contextlib.contextmanager
def shapes_apart() -> Iterator[None]:
    """Hide from dispatch modes the full-size meta tensors by which `DTensor` computes the shapes of results."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def apart(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args, **kwargs)

    with mock.patch.object(ShardingPropagator, name, apart):
        yield


class _SeenByTorch(type):
    """Metaclass of a class of which fake tensors are instances, but only in `isinstance` calls by torch itself."""

    def __instancecheck__(cls, value: object) -> bool:
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return isinstance(value, FakeTensor) and asks.partition(".")[0] == "torch"


class _Unseen(metaclass=_SeenByTorch):
    """Replaces `FakeTensor` while a program runs in `seen_as_real`."""


_data_ptr, _iterator = torch.Tensor.data_ptr, DataLoader._get_iterator


def _address(tensor: torch.Tensor) -> int:
    return _data_ptr(tensor) if has_memory(tensor) else address_of(tensor)


def _iterator_without_workers(loader: DataLoader[Any]) -> Any:
    with mock.patch.multiple(loader, num_workers=0, timeout=0):
        return _iterator(loader)


@contextlib.contextmanager
def seen_as_real() -> Iterator[None]:
    """Make a program treat fake tensors like real ones, even if it checks for them.

    - It cannot detect that they are fake. Transformers checks this, to choose its attention without reading masks.
    - They have distinct addresses, by which Accelerate finds parameters again.
    - `DataLoader` makes batches in this process, because fake tensors cannot be sent from a worker process.
    """
    with (
        shapes_apart(),
        mock.patch.object(torch._subclasses, "FakeTensor", _Unseen),
        mock.patch.object(torch.Tensor, "data_ptr", _address),
        mock.patch.object(DataLoader, "_get_iterator", _iterator_without_workers),
    ):
        yield
