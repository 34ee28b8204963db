"""One parameter: the sharded DTensor that users and optimizers see, and its gradient."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._comm.mesh import MeshInfo
from .._errors import ShardConfigStateError
from .._plan.layout import bucket_layout
from .._policies import Options
from .._torch.core import (
    HANDLES,
    Hook,
    any_gradient_hooks,
    carry_gradient_hooks,
    hooks_of_node,
    leaf_node,
    return_gradient_hooks,
    take_gradient_hooks,
    without_torch_function,
)
from .._torch.distributed import dtensor_like, local_tensor, new_dtensor, spec_of
from .parallel import Parallel

SHARDED_IN = "_sharded_in"  # the attribute with its name, of a parameter that was sharded and of the DTensor it became


def _cut(whole: torch.Tensor, info: MeshInfo, dim: int) -> torch.Tensor:
    """This rank's piece of a parameter, with storage of its own, on the device where shards are kept (or on meta)."""
    layout = bucket_layout([tuple(whole.shape)], info.shard_size, whole.element_size(), [dim]).params[0]
    rows = layout.rows_of(info.shard_rank)
    first = min(info.shard_rank * layout.chunk, whole.shape[dim])
    if hasattr(whole, "fsdp_pre_all_gather"):  # of a subclass: with no other operations than torch's FSDP2 uses here
        chunks = torch.chunk(whole, info.shard_size, dim)
        padded = whole.new_zeros(chunks[0].shape)
        piece = padded.narrow(dim, 0, rows)
        if rows:
            piece.copy_(chunks[info.shard_rank])
        piece = piece if piece.device.type in ("meta", info.home.type) else piece.to(info.home)
        return piece.pin_memory() if info.pins and piece.device.type == "cpu" else piece
    piece = whole.narrow(dim, first, rows)
    device = piece.device if piece.device.type == "meta" else info.home
    pins = info.pins and device.type == "cpu"
    return torch.empty(piece.shape, dtype=piece.dtype, device=device, pin_memory=pins).copy_(piece)


def shard_parameter(
    param: nn.Parameter, info: MeshInfo, dim: int = 0, parallel: Parallel | None = None
) -> nn.Parameter:
    """This rank's piece of `param`, cut along `dim`, as a DTensor parameter with storage of its own."""
    mesh, placements = (info.mesh, info.placements(dim)) if parallel is None else parallel.placed(info, dim)
    with torch.no_grad():
        whole = param.detach() if parallel is None else local_tensor(param).detach()
        dtensor = DTensor.from_local(
            _cut(whole, info, dim), mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    sharded = nn.Parameter(dtensor, requires_grad=param.requires_grad)
    lend_attributes(sharded, param)
    return sharded


_PLAIN = (torch.Tensor, nn.Parameter, DTensor)  # classes that keep nothing of their own in `__dict__`


def lend_attributes(tensor: torch.Tensor, param: torch.Tensor) -> None:
    """Copy the attributes that users set on a parameter (tags for optimizers, say), but none that its class sets."""
    written = param.__dict__
    owned = _of_the_class(param) | _of_the_class(tensor)
    tensor.__dict__.update({k: v for k, v in written.items() if k not in owned} if owned else written)


def _of_the_class(tensor: torch.Tensor) -> set[str]:
    """Names in a tensor's `__dict__` that belong to its class: inner tensors, what `__init__` sets, caches."""
    kind: Any = type(tensor)
    if kind in _PLAIN:
        return set()
    if hasattr(tensor, "__tensor_flatten__"):
        inner, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in inner}
        made = kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
        owned = {*inner, *(context if isinstance(context, Mapping) else ())}
    else:
        made, owned = tensor.detach(), set()
    static = {name: inspect.getattr_static(kind, name, None) for name in tensor.__dict__}
    return {*owned, *made.__dict__, *(name for name, value in static.items() if hasattr(value, "__get__"))}


# Exhausts an iterator, such as a `map` with side effects: a loop over a group's parameters without bytecode.
run_all = deque[Any](maxlen=0).extend
_sharded, _grad = attrgetter("sharded"), attrgetter("grad")


def any_gradient(shards: Sequence[torch.Tensor]) -> bool:
    """Whether any of these sharded parameters has a `.grad`."""
    with without_torch_function():  # else each DTensor is asked for a `__torch_function__`
        return any(map(is_not, map(_grad, shards), repeat(None)))


def accumulate(params: Sequence[ShardedParam], pieces: Mapping[int, torch.Tensor], hooked: bool) -> None:
    """Add this rank's pieces of reduced gradients to `.grad`, and call the users' hooks.

    Args:
        params: all parameters of a group.
        pieces: the pieces, by the index of the parameter.
        hooked: whether there may be hooks to call.
    """
    reduced = list(map(params.__getitem__, pieces))
    if not hooked:
        with without_torch_function():
            shards = list(map(_sharded, reduced))
            if all(map(is_, map(_grad, shards), repeat(None))):
                run_all(map(setattr, shards, repeat("grad"), map(new_dtensor, pieces.values(), map(spec_of, shards))))
                return
    for param, piece in zip(reduced, pieces.values(), strict=True):
        param.accumulate(piece)


class _AfterReduction:
    """A user's hook on the autograd node of a sharded parameter, to be called with reduced gradients only.

    In an eager backward, autograd runs the node with None before the gradient is reduced: that call is ignored. In a
    compiled step, autograd passes a gradient, which is reduced already.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *gradients: Sequence[torch.Tensor | None]) -> Any:
        return None if all(each is None for each in gradients[-1]) else self._hook(*gradients)


class _NodeHooks:
    """The users' hooks on the autograd node of one sharded parameter; optimizers that step in backward use such hooks.

    The hooks stay in the node's own dictionaries, so that users' handles can remove them at all times.
    """

    def __init__(self, leaf: torch.Tensor) -> None:
        self._node = leaf_node(leaf)  # held, for a leaf does not: the node would be freed with its hooks
        self.both = self._before, self._after = hooks_of_node(self._node)

    def __bool__(self) -> bool:
        return any(self.both)

    def take(self) -> None:
        """Have the hooks called with reduced gradients only, from now on."""
        for hooks in self.both:
            for key, hook in hooks.items():
                if not isinstance(hook, _AfterReduction):
                    hooks[key] = _AfterReduction(hook)

    def are_of(self, leaf: torch.Tensor) -> bool:
        """Whether the node is still the leaf's; converting the module (`.to`) gives the leaf another one."""
        return self._node.variable is leaf

    def carry(self, others: _NodeHooks) -> None:
        """Call the hooks of another node, too; users' handles can still remove them."""
        if others._before:
            self._node.register_prehook(partial(_call_before, others._before))
        if others._after:
            self._node.register_hook(partial(_call_after, others._after))

    def before(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient after the hooks that run before the node."""
        (gradient,) = _call_before(self._before, (gradient,))
        return gradient

    def after(self, gradient: torch.Tensor) -> None:
        """Call the hooks that run after the node."""
        _call_after(self._after, (), (gradient,))


def _call_before(
    hooks: Mapping[int, Callable[..., Any]], gradients: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    for hook in tuple(hooks.values()):
        changed = hook(gradients)
        if changed is not None:
            gradients = changed if isinstance(changed, tuple) else (changed,)
    return gradients


def _call_after(hooks: Mapping[int, Callable[..., Any]], *gradients: tuple[torch.Tensor, ...]) -> None:
    for hook in tuple(hooks.values()):
        hook(*gradients)


class ShardedParam:
    """A parameter of a group.

    Attributes:
        fqn: its name, for messages: within the sharded module at first, within the root once that is known.
        sharded: the DTensor parameter. Loading with ``assign=True`` or converting a module may replace it by another,
            which the group then adopts.
        shape: the unsharded shape; that of the local tensor if the parameter was a DTensor before.
        dim: the dim along which it is cut.
        parallel: how it was placed before, if it was a DTensor.
        keeps_dtype: whether it is gathered in the dtype in which it is stored, whatever the policy says of others.
        handles_seen: how many hook handles torch had given to others when it was sharded; -1 if it had hooks then.
        module: a weak reference to the module that holds it; None until the root is known.
    """

    __slots__ = (
        "__weakref__",
        "_accumulated_in",
        "_node_hooks",
        "_node_was_asked",
        "_post_hooks",
        "_tensor_hooks",
        "dim",
        "fqn",
        "handles_seen",
        "keeps_dtype",
        "module",
        "parallel",
        "shape",
        "sharded",
    )

    def __init__(
        self,
        fqn: str,
        sharded: nn.Parameter,
        dim: int = 0,
        parallel: Parallel | None = None,
        shape: tuple[int, ...] | None = None,
        keeps_dtype: bool = False,
    ) -> None:
        self.dim = dim
        self.parallel = parallel
        self.fqn = fqn
        self.sharded = sharded
        self.shape = tuple(sharded.shape) if shape is None else shape
        self.keeps_dtype = keeps_dtype
        self.module: weakref.ref[nn.Module] | None = None
        self._accumulated_in: weakref.ref[torch.Tensor] | None = None
        self._tensor_hooks: list[dict[int, Hook]] = []
        self._post_hooks: list[dict[int, Hook]] = []
        self._node_hooks: _NodeHooks | None = None
        self._node_was_asked = False  # for hooks; at the second search the node is kept, as hooks may come at any time
        self.handles_seen = HANDLES.of_others()
        _all.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        sharded = self.sharded
        if "fsdp_pre_all_gather" in getattr(self.local, "__dict__", ()):
            raise ShardConfigStateError(
                f"parameter {self.fqn}: fsdp_pre_all_gather was put on its shard, and cannot be copied with it; "
                "define a class of tensors with these methods"
            )
        if id(sharded) not in memo:  # torch's own copy of a DTensor fails if it has a gradient
            with torch.no_grad():
                twin = nn.Parameter(dtensor_like(sharded, self.local.clone()), sharded.requires_grad)
                if sharded.grad is not None:
                    twin.grad = dtensor_like(sharded, local_tensor(sharded.grad).clone())
            twin.__dict__.update(copy.deepcopy(sharded.__dict__, memo))
            memo[id(sharded)] = twin
        made = ShardedParam(self.fqn, memo[id(sharded)], self.dim, self.parallel, self.shape, self.keeps_dtype)
        memo[id(self)] = made
        return made

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece."""
        return local_tensor(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is stored."""
        return self.sharded.dtype

    def compute_dtype(self, options: Options) -> torch.dtype:
        """The dtype in which it is gathered and used."""
        return self.dtype if self.keeps_dtype else options.compute_dtype(self.dtype)

    def piece_of(self, whole: torch.Tensor, info: MeshInfo) -> DTensor:
        """This rank's piece of an unsharded value of this parameter (or of its local tensor), placed like it."""
        with torch.no_grad():
            if self.parallel is not None and tuple(whole.shape) != self.shape:
                whole = self.parallel.local_of(whole.detach())
            return dtensor_like(self.sharded, _cut(whole.detach(), info, self.dim))

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add this rank's piece of a reduced gradient to `.grad`, and call the hooks."""
        sharded, on_node = self.sharded, self._node_hooks
        if self._tensor_hooks:
            gradient = local_tensor(self.hooked(gradient))
        if on_node:
            gradient = local_tensor(on_node.before(dtensor_like(sharded, gradient)))
        grad = sharded.grad
        if grad is None:
            sharded.grad = dtensor_like(sharded, gradient)
        else:
            local_tensor(grad).add_(gradient)
        for hooks in self._post_hooks:
            for hook in tuple(hooks.values()):
                hook(self.sharded)
        if on_node:
            on_node.after(dtensor_like(sharded, gradient))

    # Autograd calls the hooks of a leaf when a gradient reaches the leaf. Here that is too early: the gradient is not
    # reduced yet. So the hooks are taken from autograd before it can call them, and called with the reduced gradient.
    # After the backward pass they are given back, since in a compiled step autograd passes reduced gradients itself.

    @property
    def has_hooks(self) -> bool:
        """Whether any hooks are to be called with reduced gradients."""
        return any(self._tensor_hooks) or any(self._post_hooks) or self.has_node_hooks

    @property
    def has_node_hooks(self) -> bool:
        """Whether there are hooks on its autograd node, from which they are never taken."""
        return bool(self._node_hooks)

    @property
    def hooks_on_node(self) -> tuple[dict[int, Hook], dict[int, Hook]] | None:
        """The node's own dictionaries of hooks (before it, after it), which change with it; None if it is not kept."""
        return None if self._node_hooks is None else self._node_hooks.both

    def carry_hooks(self, before: torch.Tensor) -> None:
        """Take over the hooks of the parameter as it was before sharding; they will get pieces of reduced gradients."""
        carry_gradient_hooks(before, self.sharded)
        if before.requires_grad and before.is_leaf and (carried := _NodeHooks(before)):
            self._node_hooks = _NodeHooks(self.sharded)
            self._node_hooks.carry(carried)
        if self._node_hooks or any_gradient_hooks([self.sharded]):
            self.handles_seen = -1

    def take_hooks(self) -> bool:
        """Take the hooks that users have registered since the last call from autograd; returns whether any are held."""
        tensor_hooks, post_hooks = take_gradient_hooks(self.sharded)
        if tensor_hooks is not None:
            self._tensor_hooks.append(tensor_hooks)
        if post_hooks is not None:
            self._post_hooks.append(post_hooks)
        if self._node_hooks is None or not self._node_hooks.are_of(self.sharded):
            self._node_hooks = _NodeHooks(self.sharded) if self.sharded.requires_grad else None
            if not self._node_hooks and not self._node_was_asked:
                self._node_hooks = None  # drop the node: while it lives, autograd visits its empty dictionaries
            self._node_was_asked = True
        if self._node_hooks:
            self._node_hooks.take()
        return bool(self._tensor_hooks or self._post_hooks or self._node_hooks)

    def give_hooks_back(self) -> bool:
        """Give autograd the hooks back; returns whether any could not be given back."""
        self._tensor_hooks, self._post_hooks = return_gradient_hooks(self.sharded, self._tensor_hooks, self._post_hooks)
        return bool(self._tensor_hooks or self._post_hooks)

    def hooked(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a reduced gradient as a DTensor, after the tensor hooks."""
        full: torch.Tensor = dtensor_like(self.sharded, gradient)
        for hooks in self._tensor_hooks:
            for hook in tuple(hooks.values()):
                changed = hook(full)
                full = full if changed is None else changed
        return full

    # Accumulated gradients must vanish with `zero_grad`, be it by setting `.grad` to None or to zero. Version counters
    # do not show the latter (`zero_grad` uses foreach functions, which bump none on a DTensor). So `.grad` exists from
    # the first accumulated gradient on, and its first element is -0.0 where it would be 0: adding to -0.0 changes no
    # bit of the sum, and `zero_` clears the sign.

    def nothing(self) -> DTensor:
        """A gradient piece of -0.0: adding it changes no bit of a sum, nor the mark that `mark_accumulated` has set."""
        local = self.local
        return dtensor_like(self.sharded, torch.full(local.shape, -0.0, dtype=local.dtype, device=local.device))

    def mark_accumulated(self) -> None:
        """A gradient is accumulated: mark `.grad`, so that it later shows whether `zero_grad` was called."""
        grad = self.sharded.grad
        if grad is None:
            grad = self.sharded.grad = self.nothing()
        elif grad.numel() and (first := local_tensor(grad).view(-1)[:1]).numel():
            first.copy_(torch.where(first == 0, -0.0, first))
        self._accumulated_in = weakref.ref(grad)

    def accumulated_is_gone(self) -> bool:
        """Whether `.grad` was removed or replaced since `mark_accumulated`."""
        grad = self.sharded.grad
        return grad is None or self._accumulated_in is None or self._accumulated_in() is not grad

    def accumulated_survives(self) -> torch.Tensor | None:
        """A boolean tensor of one element: False if `.grad` was set to zero since `mark_accumulated`.

        None if this rank's piece is empty and cannot tell.
        """
        assert self.sharded.grad is not None
        first = local_tensor(self.sharded.grad).view(-1)[:1]
        return ((first != 0) | torch.signbit(first)) if first.numel() else None


_all: weakref.WeakSet[ShardedParam] = weakref.WeakSet()


def is_sharded_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the sharded parameter of any living group."""
    return any(param.sharded is tensor for param in _all)
