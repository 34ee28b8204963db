"""One parameter: the sharded DTensor that users and optimizers see, and its gradient."""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._comm.copies import own_rows
from .._comm.mesh import MeshInfo
from .._plan.layout import bucket_layout
from .._policies import GradDtype, Options, reduce_dtypes
from .._torch.core import fix_sizes, grad_dtype_of, set_grad_dtype, unflattened
from .._torch.distributed import dtensor_at, dtensor_like, local_tensor
from .._torch.ragged import RaggedTensor
from ..errors import ShardConfigStateError, ShardConfigValueError
from .hooks import ParamHooks
from .placement import Cut

# Attribute of a parameter that was sharded, and of the DTensor that replaced it: the parameter's name.
SHARDED_IN = "_sharded_in"


def _cut(whole: torch.Tensor, info: MeshInfo, dim: int, rows: int = 1) -> torch.Tensor:
    """Copy this rank's piece of a parameter to new memory on the device where shards are stored (or on meta)."""
    layout = bucket_layout([tuple(whole.shape)], info.shard_size, whole.element_size(), [dim], [rows]).params[0]
    device = whole.device if whole.device.type == "meta" else info.home
    pins = info.pins and device.type == "cpu"
    if not hasattr(whole, "fsdp_pre_all_gather"):
        piece = own_rows(whole, layout, info.shard_rank)
        if info.shards_outer:  # the node's piece is split over the outer axis
            outer = bucket_layout([tuple(piece.shape)], info.replicate_size, dims=[dim]).params[0]
            piece = own_rows(piece, outer, info.outer_rank)
        return torch.empty(piece.shape, dtype=piece.dtype, device=device, pin_memory=pins).copy_(piece)
    # Use only the operations that torch's FSDP2 uses here, because a subclass may support no others.
    own = layout.rows_of(info.shard_rank)
    chunks = torch.chunk(whole, info.shard_size, dim)
    piece = whole.new_zeros(chunks[0].shape).narrow(dim, 0, own)
    if own:
        piece.copy_(chunks[info.shard_rank])
    piece = piece if piece.device.type == device.type else piece.to(device)
    return piece.pin_memory() if pins else piece


def shard_parameter(name: str, param: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Return this rank's piece of `param`, which has this name, as a DTensor parameter with its own storage."""
    mesh, placements = cut.placements(name)
    with torch.no_grad():
        whole = param.detach() if cut.parallel is None else local_tensor(param).detach()
        dtensor = dtensor_at(_cut(whole, cut.info, cut.dim, cut.rows), mesh, placements, param)
    sharded = nn.Parameter(dtensor, requires_grad=param.requires_grad)
    lend_attributes(sharded, param)
    for attribute in cut.carried.data if cut.carried is not None else ():
        sharded.__dict__.pop(attribute, None)
    return sharded


_PLAIN = (torch.Tensor, nn.Parameter, DTensor, RaggedTensor)  # classes that store nothing in `__dict__`


# Attributes by which functions that fuse gradient accumulation (Megatron's, TransformerEngine's) find a tensor to add a
# parameter's gradient to, instead of returning it to autograd. They would add this rank's unsharded gradient, which is
# never reduced. Without these attributes they return the gradient to autograd.
FUSED_ACCUMULATION = frozenset(("main_grad", "get_main_grad", "grad_added_to_main_grad", "zero_out_wgrad"))


def lend_attributes(tensor: torch.Tensor, param: torch.Tensor) -> None:
    """Copy the attributes that users set on a parameter, for example tags for optimizers.

    Attributes that its class sets and those of `FUSED_ACCUMULATION` are not copied.
    """
    owned = _of_the_class(param) | _of_the_class(tensor) | FUSED_ACCUMULATION
    tensor.__dict__.update({name: value for name, value in param.__dict__.items() if name not in owned})


def lent_attributes(params: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
    """Return the attributes that `lend_attributes` copies, for many parameters whose classes set none themselves."""
    attributes = list(map(dict.copy, map(_attributes, params)))
    # Their number shows whether users set any. Comparing names would take several times the host time.
    if set(map(len, attributes)) != _ONLY_OWN and not FUSED_ACCUMULATION.isdisjoint(chain.from_iterable(attributes)):
        for names in attributes:
            for name in FUSED_ACCUMULATION.intersection(names):
                del names[name]
    return attributes


def _of_the_class(tensor: torch.Tensor) -> set[str]:
    """Return the names in a tensor's `__dict__` that its class sets: inner tensors, caches, those of `__init__`."""
    kind: Any = type(tensor)
    if kind in _PLAIN:
        return set()
    if hasattr(tensor, "__tensor_flatten__"):
        inner, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in inner}
        try:
            made = unflattened(kind, parts, context, tensor.shape, tensor.stride())
        except Exception:  # FSDP2 does not call it, so a class works there even if its method does not
            made = tensor.detach()
        owned = {*inner, *(context if isinstance(context, Mapping) else ())}
    else:
        made, owned = tensor.detach(), set()
    static = {name: inspect.getattr_static(kind, name, None) for name in tensor.__dict__}
    return {*owned, *made.__dict__, *(name for name, value in static.items() if hasattr(value, "__get__"))}


_attributes = attrgetter("__dict__")
# Number of attributes if users set none: torch's `_is_param`, our name (`rename`), and torch's mark for static sizes
# (`fix_sizes`).
_ONLY_OWN = {3}
# Exhausts an iterator, such as a `map` with side effects: a loop over a group's parameters without bytecode.
run_all = deque[Any](maxlen=0).extend


class ShardedParam:
    """A parameter of a group.

    Attributes:
        fqn: its name, for messages: within the sharded module at first, within the root once the root is known.
        sharded: the DTensor parameter. Loading with ``assign=True`` or converting a module may replace it by another
            one, which the group then adopts.
        shape: the unsharded shape; that of the local tensor if the parameter was a DTensor before.
        dim, rows: the dim along which it is sharded; boundaries between shards are multiples of this number of rows.
        parallel: how it was placed before, if it was a DTensor.
        keeps_dtype: whether it is gathered in the dtype in which it is stored, whatever the policy sets for others.
        carried: its state besides its data if it is packed (see `packed.py`); None if it is not.
        kept: weak references to unsharded copies of it that user code has kept after a forward. Later gathers make
            these copies show the gathered values again (see `faces.py`).
        hooks: the users' hooks on it.
        grad_dtype: the `grad_dtype` that users have set on it or on the parameter from before sharding.
        in_pre_all_gather: whether its `fsdp_pre_all_gather` is running.
        in_graph: whether a compiled graph has called it.
        module: a weak reference to the module that has it; None until the root is known.
    """

    __slots__ = (
        "__weakref__", "_cut", "_whole", "carried", "dim", "fqn", "grad_dtype", "hooks", "in_graph",
        "in_pre_all_gather", "keeps_dtype", "kept", "module", "parallel", "rows", "shape", "sharded",
    )  # fmt: skip

    def __init__(self, fqn: str, sharded: nn.Parameter, cut: Cut, shape: tuple[int, ...]) -> None:
        self.fqn, self.sharded, self.shape = fqn, sharded, shape
        self._cut = cut
        self.dim, self.parallel, self.keeps_dtype, self.rows = cut.dim, cut.parallel, cut.keeps_dtype, cut.rows
        self.carried = None if cut.carried is None else cut.carried.of(sharded)
        self.module: weakref.ref[nn.Module] | None = None
        self.kept: list[weakref.ref[torch.Tensor]] = []
        self.hooks = ParamHooks()
        self.in_pre_all_gather = self.in_graph = False
        self._whole: weakref.ref[nn.Parameter] | None = None
        self.grad_dtype = GradDtype()
        self.prepare()
        _all.add(self)

    def note_kept(self, copy: torch.Tensor) -> None:
        """Note that user code keeps this unsharded copy."""
        if all(each is not copy for each in self.kept_ones()):
            self.kept.append(weakref.ref(copy))

    def forget_kept(self, copy: torch.Tensor) -> None:
        """Note that user code no longer keeps this unsharded copy."""
        self.kept = [each for each in self.kept if each() is not copy]

    def kept_ones(self) -> list[torch.Tensor]:
        """Return the unsharded copies that still exist, and forget the others."""
        alive = [copy for each in self.kept if (copy := each()) is not None]
        if len(alive) < len(self.kept):
            self.kept = [each for each in self.kept if each() is not None]
        return alive

    def replace(self, whole: nn.Parameter) -> None:
        """Note that this parameter has replaced `whole`, which an optimizer may still hold.

        Both get the name that errors show. `whole` is held weakly.
        """
        self._whole = weakref.ref(whole)
        self.rename(self.fqn)

    @property
    def is_empty_on_a_rank(self) -> bool:
        """Whether a rank has no rows of it."""
        info = self._cut.info
        layout = bucket_layout([self.shape], info.shard_size, dims=[self.dim], rows=[self.rows]).params[0]
        pieces = {layout.local_shape(rank) for rank in range(info.shard_size)}
        if info.shards_outer:  # each node's piece is split again, see `_cut`
            outer = [bucket_layout([piece], info.replicate_size, dims=[self.dim]).params[0] for piece in pieces]
            pieces = {each.local_shape(info.replicate_size - 1) for each in outer}
        return any(piece[self.dim] == 0 for piece in pieces)

    @property
    def replaced(self) -> nn.Parameter | None:
        """The parameter from before sharding, if it still exists."""
        return self._whole() if self._whole is not None else None

    def rename(self, fqn: str) -> None:
        """Set the name."""
        self.fqn = fqn
        for tensor in (self.sharded, self.replaced):
            if tensor is not None:
                tensor.__dict__[SHARDED_IN] = fqn

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        sharded = self.sharded
        if "fsdp_pre_all_gather" in getattr(self.local, "__dict__", ()):
            raise ShardConfigStateError(
                f"parameter {self.fqn}: fsdp_pre_all_gather is an attribute of its local tensor, and the copy would "
                "lose it; define a tensor subclass with these methods"
            )
        if id(sharded) not in memo:  # torch's own copy of a DTensor fails if it has a gradient
            with torch.no_grad():
                twin = nn.Parameter(dtensor_like(sharded, self.local.clone()), sharded.requires_grad)
                if self.grad_dtype.is_set:
                    set_grad_dtype(twin, self.grad_dtype.dtype)
                if sharded.grad is not None:
                    twin.grad = dtensor_like(sharded, local_tensor(sharded.grad).clone())
            twin.__dict__.update(copy.deepcopy(sharded.__dict__, memo))
            memo[id(sharded)] = twin
        made = ShardedParam(self.fqn, memo[id(sharded)], self._cut, self.shape)
        memo[id(self)] = made
        whole = self.replaced
        if type(whole) is nn.Parameter:  # a module that still holds it may be part of the same copy
            made.replace(copy.deepcopy(whole, memo))
        return made

    def prepare(self) -> None:
        """Set the name of the sharded parameter, and make its sizes static, because graphs are compiled for them."""
        self.rename(self.fqn)
        for tensor in (self.sharded, self.local):
            fix_sizes(tensor)
        self.adopt_grad_dtype()

    def adopt_grad_dtype(self, source: torch.Tensor | None = None, on: torch.Tensor | None = None) -> None:
        """Adopt the `grad_dtype` that users have set.

        A parameter that replaces the sharded one usually has none set. It gets that of the replaced one, as in FSDP2.

        Args:
            source: the parameter on which it may be set; by default `on`.
            on: the parameter that gets it; by default the sharded one.

        Raises:
            ShardConfigValueError: it is not a dtype for gradients.
        """
        on = self.sharded if on is None else on
        asked = GradDtype(*grad_dtype_of(on if source is None else source))
        if not asked.is_set:
            asked = self.grad_dtype
        elif asked.dtype is not None and not (asked.dtype.is_floating_point or asked.dtype.is_complex):
            raise ShardConfigValueError(
                f"parameter {self.fqn}: has grad_dtype {asked.dtype}; set it to a floating-point dtype, or to None for "
                "the dtype in which the gradient is computed"
            )
        if asked.is_set and grad_dtype_of(on) != asked:
            set_grad_dtype(on, asked.dtype)
        self.grad_dtype = asked

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece."""
        return local_tensor(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is stored."""
        return self.sharded.dtype

    def compute_dtype(self, options: Options) -> torch.dtype:
        """Return the dtype in which it is gathered and used."""
        stored = self.sharded.dtype
        return stored if self.keeps_dtype else options.compute_dtype(stored)

    def sum_dtype(self, options: Options) -> torch.dtype:
        """Return the dtype in which its gradients are accumulated."""
        stored = self.sharded.dtype
        return options.sum_dtype(stored, self.compute_dtype(options), self.grad_dtype)

    def local_gradient(self, gradient: torch.Tensor, options: Options) -> torch.Tensor:
        """Return the gradient of the gathered tensor, from that of the unsharded parameter as modules see it."""
        if self.parallel is None:
            return gradient
        return self.parallel.local_gradient(gradient, self.sum_dtype(options))

    def piece_of(self, whole: torch.Tensor, info: MeshInfo) -> DTensor:
        """Return this rank's piece of an unsharded value of this parameter (or of its local tensor), placed like it."""
        with torch.no_grad():
            if self.parallel is not None and tuple(whole.shape) != self.shape:
                whole = self.parallel.local_of(whole.detach())
            return dtensor_like(self.sharded, _cut(whole.detach(), info, self.dim, self.rows))

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add this rank's piece of a reduced gradient to `.grad`, and call the hooks."""
        sharded, hooks = self.sharded, self.hooks
        if hooks:
            gradient = local_tensor(hooks.before(dtensor_like(sharded, gradient), self.fqn))
        self.add_without_hooks(gradient)
        if hooks:
            hooks.after(sharded, dtensor_like(sharded, gradient), self.fqn)

    def add_without_hooks(self, gradient: torch.Tensor) -> None:
        """Add this rank's piece of a reduced gradient to `.grad`, without calling hooks: another one will follow.

        A parameter that a graph uses several times gets several reductions.
        """
        grad = self.sharded.grad
        if grad is None:
            self.set_gradient(dtensor_like(self.sharded, gradient))
        else:
            local_tensor(grad).add_(gradient)

    def set_gradient(self, gradient: torch.Tensor | None, on: torch.Tensor | None = None) -> None:
        """Set `.grad` of the sharded parameter, or of `on`, a parameter that is about to replace it."""
        (self.sharded if on is None else on).grad = gradient

    def set_module(self, module: weakref.ref[nn.Module] | None) -> None:
        """Set the module that has the parameter."""
        self.module = module

    @contextlib.contextmanager
    def during_pre_all_gather(self, in_graph: bool) -> Iterator[None]:
        """In this context, `in_pre_all_gather` is True, and `in_graph` is as given."""
        self.in_pre_all_gather, self.in_graph = True, in_graph
        try:
            yield
        finally:
            self.in_pre_all_gather = self.in_graph = False

    def check_grad_dtype(self) -> None:
        """Check that `grad_dtype` was not changed since it was adopted.

        Raises:
            ShardConfigStateError: it was changed.
        """
        is_set, dtype = grad_dtype_of(self.sharded)
        if is_set and (is_set, dtype) != self.grad_dtype:
            raise ShardConfigStateError(
                f"parameter {self.fqn}: grad_dtype was set to {dtype} after the first forward; set it before"
            )

    def nothing(self, options: Options) -> DTensor:
        """Return a gradient piece of -0.0: adding it changes no bit of a sum and no mark (see `marks.py`)."""
        local, dtype = self.local, self.grad_dtype.kept(self.dtype, self.sum_dtype(options))
        return dtensor_like(self.sharded, torch.full(local.shape, -0.0, dtype=dtype, device=local.device))


def reduced_as(params: Sequence[ShardedParam], options: Options) -> list[torch.dtype]:
    """Return the dtypes in which the gradients of a group's parameters are reduced."""
    sums = [param.sum_dtype(options) for param in params]
    trained = [index for index, param in enumerate(params) if param.sharded.requires_grad]
    dtypes = reduce_dtypes([sums[index] for index in trained], [params[index].grad_dtype for index in trained])
    for index, dtype in zip(trained, dtypes, strict=True):
        sums[index] = dtype
    return sums


_all: weakref.WeakSet[ShardedParam] = weakref.WeakSet()


def is_sharded_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the sharded parameter of any living group."""
    return any(param.sharded is tensor for param in _all)
