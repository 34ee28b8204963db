"""Shims for private names of torch that the runtime needs, one per name. Valid for torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
from sys import getrefcount
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import torch
import torch.utils.checkpoint
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_REDUCES_AS_STORED = torch.__version__ >= "2.15"
# Compiled backward graphs return None for a missing gradient. Those of torch 2.11 return zeros.
GRAPHS_GIVE_NONE = torch.__version__ >= "2.13"
# Dynamo traces the deletion of a key from a module's `__dict__`. That of torch 2.11 does not.
DELETES_ATTRIBUTES = torch.__version__ >= "2.13"
Hook = Callable[[torch.Tensor], torch.Tensor | None]
SavedTensorsHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def run_while_tracing(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of constants, so that Dynamo calls it instead of tracing it; its result is a constant.

    This is `torch.compiler.assume_constant_result`, which would import all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compile(code: types.CodeType) -> None:
    """Keep Dynamo from compiling a function, and its inner functions, when compiled code calls them.

    Functions that they call can be compiled, and traced code may still inline them. This adds no cost to calls.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(code, skipped)
    else:
        frames.skip_code(code)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            never_compile(inner)


def never_trace(function: Callable[..., T]) -> Callable[..., T]:
    """Make Dynamo call a function between two graphs. The decorator `torch.compiler.disable` would import Dynamo."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def between_graphs(function: Callable[..., T]) -> Callable[..., T]:
    """Keep Dynamo from compiling a function and everything that it calls; a no-op if Dynamo is not imported."""
    loaded = "torch._dynamo" in sys.modules  # `torch.compiler.disable` itself would import it
    return torch.compiler.disable(function) if loaded else function  # type: ignore[no-untyped-call]


has_side_effect: Callable[[Any], Any] = torch.fx.has_side_effect  # keeps calls of an operator whose result is unused


def with_side_effects(function: Callable[[], None]) -> None:
    """Call `function`; while Dynamo traces, also allow it to modify objects in an activation-checkpointed region.

    Dynamo refuses that, because a recomputation would not repeat the change. Here each change is undone before the end
    of the region.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function)
    else:
        function()


# AOTAutograd's context of the graph that is being compiled; one object for its forward and its backward.
tracing_context: Callable[[], Any] = torch._guards.TracingContext.try_get


def forward_outputs(outputs: int) -> int | None:
    """Number of outputs of the graph being compiled that are not saved for backward; None if it has no backward.

    For a graph over tensor subclasses, torch's metadata has no tangents. Such a graph has a backward if it has more
    outputs than the forward returns.
    """
    facts = getattr(tracing_context(), "fw_metadata", None)
    returned = 0 if facts is None else int(facts.num_forward_returns)
    return returned if facts is not None and (facts.traced_tangents or outputs > returned) else None


def size_hint(size: int | torch.SymInt) -> int:
    """The value of a size when the graph was traced. Converting the size itself to int would specialise the graph."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def fix_sizes(tensor: torch.Tensor) -> None:
    """Make Dynamo treat the sizes of a tensor as constants, as it does for parameters that are plain tensors.

    This is `torch._dynamo.mark_static`, which would import all of Dynamo. Otherwise, with ``dynamic=True``, the sizes
    of a parameter would be symbols. Inputs that have the same size by chance would share a symbol with the parameter,
    and would be limited to the parameter's size.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]


def current_compilation() -> str:
    """Name of the running compilation, the same for everything in one graph; empty if none runs."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return "" if compile_id is None else str(compile_id)


# The context object of the running compilation; None if none runs.
compilation: Callable[[], object | None] = torch._guards.CompileContext.try_get


# Number of the backward pass that runs on this thread; -1 if none runs. Nested passes have larger numbers.
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# Calls a function at the end of the running backward pass; if the pass fails, the function is dropped without a call.
queue_backward_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# The autograd node that runs on this thread, also while its hooks run; None if none runs.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# Whether the running backward pass will execute an autograd node.
node_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


class Fate(Enum):
    """What the running backward pass does with a leaf's gradient."""

    ADDED = "added to .grad"
    RETURNED = "returned to the caller of torch.autograd.grad"
    DROPPED = "not requested"


_LEAF_WAS_ASKED_FOR = RuntimeError  # torch raises it for a leaf that was passed to `torch.autograd.grad`


def gradient_fates(leaf_nodes: Sequence[Any]) -> list[Fate] | None:
    """The fates of leaves' gradients, for the nodes of the leaves (None for a leaf that requires no gradient).

    Returns:
        a fate for each, or None if all are added, as in an ordinary backward.
    """
    try:
        if all(map(node_will_run, filter(None, leaf_nodes))):
            return None
    except _LEAF_WAS_ASKED_FOR:
        pass
    return [_fate(node) for node in leaf_nodes]


def _fate(leaf_node: Any) -> Fate:
    try:
        runs = leaf_node is not None and node_will_run(leaf_node)
    except _LEAF_WAS_ASKED_FOR:
        return Fate.RETURNED
    return Fate.ADDED if runs else Fate.DROPPED


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`function.apply` without its check of the arguments for dead wrappers of functorch."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def called_directly(function: type[torch.autograd.Function]) -> None:
    """Make autograd call a function's `backward` directly, without torch's check of the methods of the class."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]


class NotForCompiledAutograd(torch.autograd.Function):
    """A function whose nodes raise an error in compiled autograd, when it asks them for a cache key before tracing."""

    @staticmethod
    def refusal(node: Any) -> Exception:
        """The error to raise."""
        raise NotImplementedError

    @staticmethod
    def _compiled_autograd_key(node: Any) -> Any:
        raise node._forward_cls.refusal(node)


def outputs_pass_for_leaves(function: type[torch.autograd.Function]) -> None:
    """Allow `nn.Module` to register outputs of the function as parameters: make `if tensor.grad_fn:` false for them."""
    function._backward_cls.__bool__ = lambda _: False  # type: ignore[attr-defined]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not one of torch's fake tensors, which have no memory."""
    return not isinstance(tensor, FakeTensor)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory with a separate storage and version counter; it keeps the memory alive."""
    if not has_memory(tensor):
        return tensor.detach()  # shares the storage
    return torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(tensor))


def unflattened(
    kind: Any, inner: dict[str, torch.Tensor], context: Any, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    """Call `__tensor_unflatten__` of a tensor subclass with the arguments that its signature accepts.

    Torch passes all four by position. FSDP2 never calls the method, so classes that it shards may differ.
    """
    given = inner, context, shape, stride
    positional, named = _accepted_by(kind)
    made: torch.Tensor = kind.__tensor_unflatten__(
        *given[:positional], **({"outer_size": shape, "outer_stride": stride} if named else {})
    )
    return made


@functools.cache
def _accepted_by(kind: Any) -> tuple[int, bool]:
    """How many arguments `__tensor_unflatten__` takes by position, and whether it takes the last two by name."""
    signature = inspect.signature(kind.__tensor_unflatten__)
    for positional, named in ((4, False), (2, True), (3, False)):
        with contextlib.suppress(TypeError):
            signature.bind(*range(positional), **({"outer_size": 0, "outer_stride": 0} if named else {}))
            return positional, named
    return 2, False


def storage_id(tensor: torch.Tensor) -> int:
    """An id of a tensor's storage, unique among living storages."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """Number of writes to a tensor in place; 0 for inference tensors, which do not count these."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's data; made up for a fake tensor; 0 if it has none, like sparse and functorch's tensors."""
    if isinstance(tensor, FakeTensor):
        return (storage_id(tensor) << 48) + int(tensor.storage_offset()) * tensor.element_size()
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def addresses_in(tensor: torch.Tensor) -> int | tuple[int, ...]:
    """Address of a tensor's data; for a subclass without memory of its own, those of the tensors in its attributes."""
    return address_of(tensor) or tuple([address_of(v) for v in vars(tensor).values() if isinstance(v, torch.Tensor)])


# Number of tensors and other objects that share a storage, given by its id; some tensor must keep it alive.
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
# Number of references to a tensor in C++, with the one of its Python object.
tensor_uses: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor's memory is used by this tensor object only, not by views of it or by torch.

    References to the object itself are not counted. If the tensor is a view, as gradients of linear layers are, nothing
    else may use its base.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and tensor_uses(tensor) == 1  # C++ code, such as a graph, has no reference
        and _holders(tensor) == _ALONE[tensor._base is not None]
    )


def _holders(tensor: torch.Tensor) -> tuple[int, ...]:
    base = tensor._base
    uses = storage_uses(storage_id(tensor))
    return (uses,) if base is None else (uses, tensor_uses(base), getrefcount(base))


# `_holders` of a tensor and of a view that own their memory. The counts depend on the versions of Python and torch.
with _disable_current_modes(), torch.inference_mode(False):  # a mode may keep tensors
    _ALONE = {False: _holders(torch.empty(1)), True: _holders(torch.empty(1).view(1))}


# A context in which `__torch_function__` of tensor subclasses is not called.
without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


# `chunk_cat(tensors, 0, chunks, out=out)` splits each tensor along dim 0 into `chunks` equal chunks. Row r of `out`,
# (chunks, n), gets the r-th chunk of each.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat

# The innermost saved-tensor hooks of this thread, or None; torch applies no others.
active_saved_tensors_hooks: Callable[[], SavedTensorsHooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
saved_tensors_hooks_are_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


@contextlib.contextmanager
def saved_tensors_hooks_set_aside() -> Iterator[None]:
    """Remove the innermost saved-tensor hooks of this thread for the body; there must be some."""
    hooks = active_saved_tensors_hooks()
    assert hooks is not None
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


@functools.cache  # once in a process
def give_way_to_transforms(ours: Callable[[SavedTensorsHooks], bool]) -> None:
    """Patch torch to remove our saved-tensor hooks while a `torch.func` transform runs that refuses all such hooks.

    Other hooks are still refused. The function that transforms call stays the same object, with another body, because
    Dynamo identifies it by identity and would not trace a replacement.
    """
    refuse: Any = torch.autograd.graph.disable_saved_tensors_hooks
    cells = dict(zip(refuse.__code__.co_freevars, refuse.__closure__ or (), strict=True))
    if "func" not in cells:  # not made by `contextlib.contextmanager`: leave it, then transforms raise torch's error
        return
    body = cells["func"].cell_contents
    refusing = contextlib.contextmanager(body)

    @functools.wraps(body)
    def give_way(error_message: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            while (active := active_saved_tensors_hooks()) is not None and ours(active):
                stack.enter_context(saved_tensors_hooks_set_aside())
            stack.enter_context(refusing(error_message))
            yield

    cells["func"].cell_contents = give_way


def refuses_saved_tensors_hooks(error: BaseException) -> bool:
    """Whether a transform of `torch.func` has raised this error because there are saved-tensor hooks."""
    return type(error) is RuntimeError and "torch.func" in str(error) and "saved tensor hooks" in str(error)


_CHECKPOINTS_LOOK_FOR_HOOKS = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")  # from torch 2.15


def passed_by_checkpoints(pack: Callable[[torch.Tensor], Any], outer: SavedTensorsHooks | None) -> Any:
    """Mark `pack`, a bound method of our saved-tensor hooks, so that checkpoints do not treat it as a user's hook.

    From torch 2.15 on, a selective checkpoint warns about user hooks around it and, as an option, packs its saved
    tensors with them. Our hooks are then skipped, and `outer`, the hooks outside of ours, are used.
    """
    return _CheckpointsOwn(pack, outer) if _CHECKPOINTS_LOOK_FOR_HOOKS else pack


class _CheckpointsOwn(partial[Any]):
    """A method that checkpoints treat as internal, with the hooks to use instead."""

    _checkpoint_internal = True
    _user_hooks: SavedTensorsHooks | None
    __self__: Any

    def __new__(cls, method: Any, others: SavedTensorsHooks | None) -> _CheckpointsOwn:
        made = partial.__new__(cls, method)
        made.__self__ = method.__self__
        made._user_hooks = others
        return made


modes_in_force: Callable[[], int] = torch._C._len_torch_dispatch_stack
_pre_dispatch_modes_in_force: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch


_is_cached: Callable[[torch.Tensor], bool] = torch._C._is_cached_tensor  # type: ignore[attr-defined]


def is_of_cuda_graph(tensor: torch.Tensor) -> bool:
    """Whether the next replay of a CUDA graph of `torch.compile` may overwrite a tensor's memory.

    Outputs of a replay are marked. Outputs of a graph's first runs, which warm up and record, are not marked, but later
    runs overwrite their memory, too. So if there are such graphs, every tensor on their device may be such an output.
    """
    if _is_cached(tensor):
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees") if tensor.is_cuda else None
    if trees is None:
        return False
    if not torch._C._is_key_in_tls("tree_manager_containers"):  # not visible in this thread; a query would create one
        return True
    return trees.get_manager(tensor.get_device(), create_if_none_exists=False) is not None


# Whether a transform of `torch.func` runs. Asking functorch itself would create a state in each thread, which autograd
# would then copy for every node that it runs.
is_transforming: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
)


def transforms_set_aside() -> contextlib.AbstractContextManager[Any]:
    """A context without the running transforms of `torch.func`."""
    return temporarily_clear_interpreter_stack() if is_transforming() else contextlib.nullcontext()


def apart_from_checkpoints(method: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Hide the operations of a method from enclosing selective checkpoints, because a recomputation does not run them.

    Also hide them from transforms such as `torch.func.vmap`: sharded parameters are constants for enclosing transforms.
    """

    @functools.wraps(method)
    def run(*args: *Ts) -> T:
        if not modes_in_force() and not is_transforming():
            return method(*args)
        with transforms_set_aside(), checkpoints_set_aside():
            return method(*args)

    return run


@contextlib.contextmanager
def checkpoints_set_aside() -> Iterator[None]:
    """Remove the modes of selective checkpoints from the active dispatch modes for the body."""
    modes = [_pop_mode() for _ in range(modes_in_force())]
    others = [mode for mode in modes if not isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode)]
    for mode in reversed(others):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


def default_reduce_dtype(stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype of reduction for a `MixedPrecisionPolicy` without ``reduce_dtype``.

    From torch 2.15 on, it is the dtype in which the parameter is stored; before, it is the dtype of compute.
    """
    return stored if _REDUCES_AS_STORED else compute


def grad_dtype_of(param: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether `grad_dtype` was set on a parameter, and its value.

    torch before 2.15 does not say whether it was set; there, the parameter's own dtype counts as not set.
    """
    with without_torch_function():
        dtype: torch.dtype | None = param.grad_dtype
        return getattr(param, "_has_grad_dtype_override", dtype is not param.dtype), dtype


def set_grad_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Set the dtype that `.grad` of a parameter must have; None for any."""
    with without_torch_function():
        param.grad_dtype = dtype


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a leaf with its two types of hooks
_tensor_hooks, _post_accumulate_hooks = map(attrgetter, _HOOKS)


def any_gradient_hooks(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether a leaf has tensor hooks or post-accumulate hooks that autograd would call."""
    with without_torch_function():
        return any(map(_tensor_hooks, leaves)) or any(map(_post_accumulate_hooks, leaves))


def has_post_accumulate_hooks(leaf: torch.Tensor) -> bool:
    """Whether a leaf has post-accumulate hooks."""
    with without_torch_function():
        return bool(_post_accumulate_hooks(leaf))


def take_gradient_hooks(
    leaf: torch.Tensor, but: int | None = None
) -> tuple[dict[int, Hook] | None, dict[int, Hook] | None]:
    """Remove the tensor hooks and the post-accumulate hooks of a leaf, so that autograd does not call them.

    Handles of the hooks stay valid: they remove hooks from the returned dictionaries (None if there is no hook). The
    hook whose handle has the id `but` stays on the leaf.
    """
    tensor_hooks, post_hooks = _tensor_hooks(leaf), _post_accumulate_hooks(leaf)
    for name, hooks in zip(_HOOKS, (tensor_hooks, post_hooks), strict=True):
        if hooks:
            setattr(leaf, name, OrderedDict({} if but not in hooks else {but: hooks.pop(but)}))
    return tensor_hooks or None, post_hooks or None


def return_gradient_hooks(
    leaf: torch.Tensor, tensor_hooks: list[dict[int, Hook]], post_hooks: list[dict[int, Hook]]
) -> tuple[list[dict[int, Hook]], list[dict[int, Hook]]]:
    """Restore hooks that were taken from a leaf. The dictionaries are in the order in which they were taken.

    Returns the dictionaries that could not be restored: a leaf has only one dictionary of each type, and a handle
    refers to its own dictionary, so hooks that were registered in the meantime stay taken.
    """
    if tensor_hooks and not leaf._backward_hooks:
        leaf._backward_hooks, tensor_hooks = tensor_hooks[0], tensor_hooks[1:]
    if post_hooks and not leaf._post_accumulate_grad_hooks:
        leaf._post_accumulate_grad_hooks, post_hooks = post_hooks[0], post_hooks[1:]
    return tensor_hooks, post_hooks


class _Handles:
    """Counts the handles of all hooks, for a cheap check whether other code may have registered hooks.

    Attributes:
        ours: number of handles that this library has received while it shards or trains models.
    """

    __slots__ = ("ours",)

    def __init__(self) -> None:
        self.ours = 0

    def give(self, count: int = 1) -> None:
        """Count handles that this library has received."""
        self.ours += count

    def of_others(self) -> int:
        """The number of handles that other code has received since the process began."""
        return RemovableHandle.next_id - self.ours


HANDLES = _Handles()


class _Behind(torch.autograd.Function):
    """Makes a graph that leads to a leaf's node, without an operation on the leaf, which may be of any subclass."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> None:
        return None


def leaf_node(leaf: torch.Tensor) -> Any:
    """The autograd node that adds gradients to a leaf's `.grad`; autograd does not keep it alive."""
    with torch.inference_mode(False), torch.enable_grad():
        made: Any = _Behind.apply(leaf)  # type: ignore[no-untyped-call]
    return made.grad_fn.next_functions[0][0]


def passes_through(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the running backward pass computes a gradient for any of these leaves."""
    return any(_fate(leaf_node(leaf)) is not Fate.DROPPED for leaf in leaves if leaf.requires_grad)


def hooks_of_node(node: Any) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """The dictionaries of an autograd node's pre-hooks and hooks, which will contain later hooks as well.

    Only the handle of a hook gives access to its dictionary, so register two hooks and remove them again.
    """
    handles = node.register_prehook(print), node.register_hook(print)
    HANDLES.give(2)
    before, after = (handle.hooks_dict_ref() for handle in handles)
    for handle in handles:
        handle.remove()
    return before, after


def carry_gradient_hooks(leaf: torch.Tensor, to: torch.Tensor) -> None:
    """Share the tensor hooks and post-accumulate hooks of a leaf with another leaf; handles remove them from both."""
    for name in _HOOKS:
        if hooks := getattr(leaf, name):
            setattr(to, name, hooks)


def _is_below_autograd() -> bool:
    """Whether autograd records no operations now, not even versions, as in the body of a custom operator."""
    return any(map(torch._C._dispatch_tls_is_dispatch_key_excluded, _AUTOGRAD_KEYS))


_AUTOGRAD_KEYS = torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.ADInplaceOrView


@contextlib.contextmanager
def _all_set_aside() -> Iterator[None]:
    with transforms_set_aside(), _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def plainly() -> contextlib.AbstractContextManager[None]:
    """A context in which views are ordinary tensors without autograd history, which can be kept, in any mode.

    Inference mode, transforms of `torch.func` and all dispatch modes are off in it. A view of a fake tensor is fake.
    """
    modes = modes_in_force() or _pre_dispatch_modes_in_force()
    if modes or is_transforming() or torch.is_inference_mode_enabled() or _is_below_autograd():
        return _all_set_aside()
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def to_keep() -> Iterator[None]:
    """The variant of `plainly` for allocations, which memory-tracking modes see and fake-tensor modes make fake."""
    with transforms_set_aside(), checkpoints_set_aside(), torch.inference_mode(False), torch.no_grad():
        yield


# A context without the dispatch modes of users and of torch (selective checkpoints, fake tensors).
without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes


def forward_hooks(module: torch.nn.Module, before: bool) -> dict[int, Callable[..., Any]]:
    """The hooks that run before (or after) the forward of a module, by the ids of their handles."""
    return module._forward_pre_hooks if before else module._forward_hooks


# Whether there are global module hooks.
any_global_hook: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
# The tracing state of `torch.jit`; None if it is not tracing.
is_traced_by_jit: Callable[[], object] = torch._C._get_tracing_state


# Sets grad mode; a tenth of the cost of `torch.no_grad`.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of containers that torch knows, and their structure, which is hashable."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The inverse of `flatten`."""
    return pytree.tree_unflatten(leaves, structure)


def autocast_state() -> tuple[object, ...]:
    """Return a value that is equal if autocast has the same settings."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.autocast_mode.is_autocast_available(kind)]
    return tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds])


@contextlib.contextmanager
def autocast_cache_off() -> Iterator[None]:
    """In this context, an active autocast casts weights each time, so that no cast from outside is used."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def tree_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order, including containers that `map_tensors` does not support."""
    tensors: list[torch.Tensor] = []
    _collect(tree, tensors, {})
    return tensors


def _collect(tree: Any, tensors: list[torch.Tensor], visited: dict[int, Any]) -> None:
    """Append the tensors in `tree`; `visited` contains, by id, the visited containers that may contain themselves."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return
    if isinstance(tree, _ATOMS):
        return
    kind = type(tree)
    children = tree.values() if kind is dict else tree if kind is tuple or kind is list else _parts(tree).values()
    if not children and id(tree) not in visited:
        visited[id(tree)] = tree  # kept alive, because pytree nodes may create temporary children, whose ids are reused
        children = _hidden_parts(tree)
    for child in children:
        _collect(child, tensors, visited)


def _hidden_parts(tree: Any) -> Sequence[Any]:
    """The items of a container that `map_tensors` does not support and passes unchanged; nothing for other objects."""
    if isinstance(tree, UserDict):
        return list(tree.values())
    if isinstance(tree, (UserList, deque)):
        return list(tree)
    if pytree.tree_is_leaf(tree):
        return ()
    return pytree.tree_flatten(tree, is_leaf=lambda each: each is not tree)[0]


_ATOMS = (int, float, str, type(None), type, torch.dtype, torch.device, torch.nn.Module)


def _parts(tree: Any) -> dict[Any, Any]:
    """The items of a container whose tensors may be replaced, by field, key or index; nothing for other objects.

    The container types are those of FSDP2, which passes all others unchanged: a registered pytree node (for example a
    key-value cache), a `UserDict`, a `UserList` or a `deque` may be written to, and may contain itself.
    """
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    if isinstance(tree, dict):
        return dict(tree.items())
    return dict(enumerate(tree)) if isinstance(tree, (list, tuple, set, frozenset)) else {}


def _with_parts(tree: Any, parts: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """Copy a container, whose items are `parts`, with the items in `changed` replaced.

    A dict or list of a user's class keeps its class, its attributes and its handling of missing keys. If the class
    refuses item assignment, the copy is made as in FSDP2: a plain dict, or the list's class called with the items.
    """
    kind, whole = type(tree), parts | changed
    if kind is dict:
        return whole
    if kind is tuple or kind is list:
        return kind(whole.values())
    if dataclasses.is_dataclass(tree):
        return _dataclass_with(tree, changed)
    if isinstance(tree, (tuple, set, frozenset)):
        return kind(*whole.values()) if hasattr(tree, "_fields") else kind(whole.values())
    try:
        made = copy.copy(tree)
        if getattr(tree, "__dict__", None) is tree:  # its attributes are its items
            made.__dict__ = made
        for key, part in changed.items():
            made[key] = part
    except Exception:  # classes that refuse item assignment (e.g. diffusers' FrozenDict) raise any type of exception
        return whole if isinstance(tree, dict) else kind(whole.values())
    return made


def _dataclass_with(tree: Any, changed: dict[Any, Any]) -> Any:
    made = copy.copy(tree)
    for key, part in changed.items():
        object.__setattr__(made, key, part)  # bypasses `frozen`, and `__init__`, which may take other arguments
        if isinstance(tree, dict) and key in tree:  # for example, outputs of Transformers' models are dicts, too
            made[key] = part
    return made


def _exchanged(part: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The second of the pair whose first is `part`; `part` itself if there is none."""
    for first, second in pairs:
        if _same(first, part):
            return second
    return part


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside of a tensor subclass (for example, a DTensor's local tensor); else the tensor itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for each in inner if isinstance(each, torch.Tensor) for part in plain_parts(each)]


def inner_values(tensor: torch.Tensor) -> tuple[list[str], torch.Tensor] | None:
    """The tensor inside of a subclass that holds its values, and the names of the other tensors inside of it.

    It is the only one with the shape and dtype of the subclass. None if there is no such tensor.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    alike = [name for name, each in inner.items() if (each.shape, each.dtype) == (tensor.shape, tensor.dtype)]
    return ([name for name in inner if name != alike[0]], inner[alike[0]]) if len(alike) == 1 else None


class ContainerCopy(NamedTuple):
    """A mutable container that was copied because some of its items had to change.

    Attributes:
        owner: the original container.
        made: the copy.
        parts: the items of `owner`, by field, key or index.
        changed: the items that differ in the copy, by the same keys.
    """

    owner: Any
    made: Any
    parts: dict[Any, Any]
    changed: dict[Any, Any]


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], tree: Any, copies: list[ContainerCopy] | None = None
) -> Any:
    """Apply `function` to each tensor in nested dataclasses, dicts, lists, tuples and sets (see `_parts`).

    A container in which `function` changes no tensor is not copied: the result contains the same object, so that writes
    to it are visible everywhere. A container in which a tensor changes is copied; inner containers without changes are
    shared with the original.

    Args:
        function: returns its argument itself if the tensor needs no change.
        tree: a tensor, a container, or any other object, which is returned unchanged.
        copies: a `ContainerCopy` is appended for each mutable container that was copied, for `return_writes`.
    """
    made = _changed(function, tree, copies)
    return tree if made is None else made


def _changed(function: Callable[[torch.Tensor], Any], tree: Any, copies: list[ContainerCopy] | None) -> Any:
    """`map_tensors`, but returns None if nothing changes, because Dynamo does not compare tuples by identity."""
    if isinstance(tree, torch.Tensor):
        made = function(tree)
        return None if made is tree else made
    if isinstance(tree, _ATOMS):
        return None
    kind = type(tree)
    parts = tree if kind is dict else dict(enumerate(tree)) if kind is tuple or kind is list else _parts(tree)
    changed = {}
    for key, part in parts.items():
        made = _changed(function, part, copies)
        if made is not None:
            changed[key] = made
    return _copied(tree, parts, changed, copies) if changed else None


def _copied(tree: Any, parts: dict[Any, Any], changed: dict[Any, Any], copies: list[ContainerCopy] | None) -> Any:
    """Copy a container in which an item has changed; return the existing copy if there is one."""
    for each in copies or ():
        if each.owner is tree:  # passed twice: writes through one name must be visible through the other
            return each.made
    parts = dict(parts)  # a snapshot, because the owner may change before writes are returned
    made = _with_parts(tree, parts, changed)
    if copies is not None and _can_be_written(tree):
        copies.append(ContainerCopy(tree, made, parts, changed))
    return made


def _can_be_written(tree: Any) -> bool:
    if dataclasses.is_dataclass(tree):
        kind: Any = type(tree)
        return not kind.__dataclass_params__.frozen
    return isinstance(tree, (dict, list, set))


def return_writes(copies: Sequence[ContainerCopy]) -> None:
    """Repeat in the original containers all writes to their copies.

    Items that were not replaced in a copy are unchanged in the original, which therefore keeps, for example, the
    float32 tensor that the copy has in bfloat16.

    Args:
        copies: the list that `map_tensors` has filled.
    """
    pairs = [(part, copied.parts[key]) for copied in copies for key, part in copied.changed.items()]
    for copied in reversed(copies):  # a copy of a copy comes after the first copy in the list
        _return_from(copied, pairs)


def _return_from(copied: ContainerCopy, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Repeat in one container the writes to its copy; `pairs` maps items of copies to items of the originals."""
    owner, made, parts, changed = copied
    given, now = parts | changed, _parts(made)
    writes = {key: part for key, part in now.items() if key not in given or not _same(part, given[key])}
    gone = [key for key in given if key not in now]
    if writes or gone:
        _write(owner, now, writes, gone, pairs)


def _same(first: Any, second: Any) -> bool:
    """Whether two objects are identical, or tuples of identical objects, which Dynamo cannot distinguish."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(_same, first, second))
    return first is second


def _write(
    owner: Any, now: dict[Any, Any], writes: dict[Any, Any], gone: Sequence[Any], pairs: Sequence[tuple[Any, Any]]
) -> None:
    put: Callable[[Any, Any], None]
    remove: Callable[[Any], object]
    if dataclasses.is_dataclass(owner):
        put, remove = partial(setattr, owner), partial(delattr, owner)
    elif isinstance(owner, dict):
        put, remove = owner.__setitem__, lambda key: owner.pop(key, None)
    else:
        wanted = [_exchanged(part, pairs) for part in now.values()]
        owner.clear()
        (owner.update if isinstance(owner, set) else owner.extend)(wanted)
        return
    for key in gone:
        remove(key)
    for key, part in writes.items():
        put(key, _exchanged(part, pairs))


# Whether torch's profiler is active.
is_profiled: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")
