"""Every torch-private name that the runtime needs, one shim each. Holds for torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
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
GRAPHS_GIVE_NONE = torch.__version__ >= "2.13"  # a missing gradient; compiled backward graphs of 2.11 give zeros
Hook = Callable[[torch.Tensor], torch.Tensor | None]
SavedTensorsHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def run_while_tracing(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of constants that Dynamo shall call, not trace; its result is a constant of the graph.

    This is `torch.compiler.assume_constant_result`, which would load all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compile(code: types.CodeType) -> None:
    """Keep Dynamo from compiling a function, and those within, when they are called under compiled code.

    Functions that they call can be compiled, and code that is traced may still inline them. It costs nothing at a call.
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
    """Decorate a function that Dynamo shall call between two graphs. `torch.compiler.disable` would load Dynamo."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def between_graphs(function: Callable[..., T]) -> Callable[..., T]:
    """The function, of which Dynamo compiles nothing, nor of what it calls; without Dynamo in this process, itself."""
    loaded = "torch._dynamo" in sys.modules  # to ask for `torch.compiler.disable` would load it
    return torch.compiler.disable(function) if loaded else function  # type: ignore[no-untyped-call]


has_side_effect: Callable[[Any], Any] = torch.fx.has_side_effect  # keeps calls of an operator that nothing reads


def with_side_effects(function: Callable[[], None]) -> None:
    """Call `function`; while Dynamo traces, also let it change objects inside of a user's checkpointed region.

    Dynamo refuses that, because a recomputation will not repeat the change; here each is taken back before the end.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function)
    else:
        function()


# What AOTAutograd knows of the graph that is being compiled; one object for its forward and its backward.
tracing_context: Callable[[], Any] = torch._guards.TracingContext.try_get


def forward_outputs(outputs: int) -> int | None:
    """How many of the outputs of the graph being compiled are not there for backward; None if it has no backward.

    What torch knows of a graph over tensor subclasses has no tangents, but more outputs than the forward returns.
    """
    facts = getattr(tracing_context(), "fw_metadata", None)
    returned = 0 if facts is None else int(facts.num_forward_returns)
    return returned if facts is not None and (facts.traced_tangents or outputs > returned) else None


def size_hint(size: int | torch.SymInt) -> int:
    """A size as it was when the graph was made. To ask for the number itself would make the graph good for it alone."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def fix_sizes(tensor: torch.Tensor) -> None:
    """Have Dynamo take the sizes of a tensor for constants, as it does with parameters that are no tensor subclass.

    This is `torch._dynamo.mark_static`, which would load all of Dynamo. With ``dynamic=True`` the sizes of a parameter
    would else be symbols, shared with inputs that happen to be as large: these were bound to the parameter's size then.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]


def current_compilation() -> str:
    """Name of the compilation that runs now, the same for all that becomes one graph; empty if there is none."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return "" if compile_id is None else str(compile_id)


# What stands for the compilation that runs now; None if there is none.
compilation: Callable[[], object | None] = torch._guards.CompileContext.try_get


# Number of the backward pass that runs on this thread, -1 if none does. Nested passes have larger numbers.
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# Calls a function at the end of the backward pass that runs now; it is dropped uncalled if the pass fails.
queue_backward_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# The autograd node that runs now on this thread, hooks on it included; None if none does.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# Whether the backward pass that runs now executes an autograd node.
node_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


class Fate(Enum):
    """What becomes of a leaf's gradient in the backward pass that runs now."""

    ADDED = "added to .grad"
    RETURNED = "given to the caller of torch.autograd.grad"
    DROPPED = "asked for by nobody"


_LEAF_WAS_ASKED_FOR = RuntimeError  # torch raises it for a leaf that was given to `torch.autograd.grad`


def gradient_fates(leaf_nodes: Sequence[Any]) -> list[Fate] | None:
    """What becomes of the gradients of some leaves, by their nodes (None for a leaf that wants none).

    Returns:
        a fate for each, or None if all are added, as they are in an ordinary backward.
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
    """`function.apply` without the search of its arguments for dead wrappers of functorch."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def called_directly(function: type[torch.autograd.Function]) -> None:
    """Let autograd call a function's `backward` itself, past torch's look at which methods the class has."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]


class NotForCompiledAutograd(torch.autograd.Function):
    """A function whose nodes compiled autograd does not trace: it asks each for a key of its cache first."""

    @staticmethod
    def refusal(node: Any) -> Exception:
        """What is raised then."""
        raise NotImplementedError

    @staticmethod
    def _compiled_autograd_key(node: Any) -> Any:
        raise node._forward_cls.refusal(node)


def outputs_pass_for_leaves(function: type[torch.autograd.Function]) -> None:
    """Let `nn.Module` register outputs of the function as parameters; it asks by `if tensor.grad_fn:` for leaves."""
    function._backward_cls.__bool__ = lambda _: False  # type: ignore[attr-defined]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not one of torch's fake ones, which have shapes alone."""
    return not isinstance(tensor, FakeTensor)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under a storage, and a version counter, of its own; it holds the memory."""
    if not has_memory(tensor):
        return tensor.detach()  # of the same storage
    return torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(tensor))


def storage_id(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor from all that live."""
    return int(tensor.untyped_storage()._cdata)


def address_of(tensor: torch.Tensor) -> int:
    """Where the data of a tensor begins, made up for a fake one; 0 if nowhere, as of sparse and functorch's tensors."""
    if isinstance(tensor, FakeTensor):
        return (storage_id(tensor) << 48) + int(tensor.storage_offset()) * tensor.element_size()
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


# How many tensors and other objects share a storage, by its id; some tensor must hold it.
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count


# A context in which subclasses of tensors are not asked for a `__torch_function__`.
without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


# `chunk_cat(tensors, 0, chunks, out=out)` cuts each tensor along dim 0 into so many equal chunks; row r of `out`,
# (chunks, n), gets the r-th of each.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat

# The innermost saved-tensor hooks of this thread, or None; torch applies no others.
active_saved_tensors_hooks: Callable[[], SavedTensorsHooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
saved_tensors_hooks_are_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


@contextlib.contextmanager
def saved_tensors_hooks_set_aside() -> Iterator[None]:
    """Without the innermost saved-tensor hooks of this thread, of which there must be some."""
    hooks = active_saved_tensors_hooks()
    assert hooks is not None
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


@functools.cache  # once in a process
def give_way_to_transforms(ours: Callable[[SavedTensorsHooks], bool]) -> None:
    """From now on, set our saved-tensor hooks aside where a transform of `torch.func` would refuse to run under any.

    For as long as it runs. Others' hooks are refused as before. The function that transforms call stays the same
    object, with another body, for Dynamo knows it by identity and would not trace one in its place.
    """
    refuse: Any = torch.autograd.graph.disable_saved_tensors_hooks
    cells = dict(zip(refuse.__code__.co_freevars, refuse.__closure__ or (), strict=True))
    if "func" not in cells:  # made otherwise than by `contextlib.contextmanager`: then transforms refuse, and say so
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
    """The `pack` of saved-tensor hooks, a bound method, as a checkpoint is to see it: not one that the user has set.

    From torch 2.15 on a selective checkpoint warns of a user's hooks around it and, if told to, has them pack what it
    saves. Ours are then passed over, in favour of `outer`, those in force outside of them.
    """
    return _CheckpointsOwn(pack, outer) if _CHECKPOINTS_LOOK_FOR_HOOKS else pack


class _CheckpointsOwn(partial[Any]):
    """A method that checkpoints take for their own, and in whose place they use other hooks."""

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
    """Whether a tensor may lie where the next replay of a CUDA graph of `torch.compile` writes.

    Outputs of a replay are marked. Those of a graph's first runs, which warm up and record, are not, but later runs
    take their memory, too. So where there are such graphs, every tensor on their device may be one of these.
    """
    if _is_cached(tensor):
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees") if tensor.is_cuda else None
    if trees is None:
        return False
    if not torch._C._is_key_in_tls("tree_manager_containers"):  # this thread cannot see them, and must make no others
        return True
    return trees.get_manager(tensor.get_device(), create_if_none_exists=False) is not None


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Whether a transform of `torch.func` runs. To ask functorch itself makes a state in each thread, which autograd then
# copies for every node that it runs.
is_transforming: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
)


def transforms_set_aside() -> contextlib.AbstractContextManager[Any]:
    """Without the transforms of `torch.func` that run."""
    return temporarily_clear_interpreter_stack() if is_transforming() else contextlib.nullcontext()


def apart_from_checkpoints(method: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """A method whose operations selective checkpoints around it do not see: they are not run when it recomputes.

    Nor are they transformed, as by `torch.func.vmap`: sharded parameters are constants to every transform around.
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
    """Without the modes of selective checkpoints, of those that are in force."""
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
    """The dtype that a `MixedPrecisionPolicy` without ``reduce_dtype`` means, which torch 2.15 has changed.

    There gradients are reduced in the dtype in which their parameters are stored, before in that of compute.
    """
    return stored if _REDUCES_AS_STORED else compute


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a leaf with its hooks of both kinds
_tensor_hooks, _post_accumulate_hooks = map(attrgetter, _HOOKS)


def any_gradient_hooks(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether a leaf has tensor hooks or post-accumulate hooks that autograd would call."""
    with without_torch_function():
        return any(map(_tensor_hooks, leaves)) or any(map(_post_accumulate_hooks, leaves))


def has_post_accumulate_hooks(leaf: torch.Tensor) -> bool:
    """Whether autograd would call somebody once a leaf has a gradient."""
    with without_torch_function():
        return bool(_post_accumulate_hooks(leaf))


def take_gradient_hooks(
    leaf: torch.Tensor, but: int | None = None
) -> tuple[dict[int, Hook] | None, dict[int, Hook] | None]:
    """Take the tensor hooks and the post-accumulate hooks of a leaf away, so that autograd does not call them.

    Handles of the hooks stay valid: they remove from the dictionaries that are returned (None if there is no hook). The
    hook whose handle has the id `but` stays.
    """
    tensor_hooks, post_hooks = _tensor_hooks(leaf), _post_accumulate_hooks(leaf)
    for name, hooks in zip(_HOOKS, (tensor_hooks, post_hooks), strict=True):
        if hooks:
            setattr(leaf, name, OrderedDict({} if but not in hooks else {but: hooks.pop(but)}))
    return tensor_hooks or None, post_hooks or None


def return_gradient_hooks(
    leaf: torch.Tensor, tensor_hooks: list[dict[int, Hook]], post_hooks: list[dict[int, Hook]]
) -> tuple[list[dict[int, Hook]], list[dict[int, Hook]]]:
    """Give a leaf the hooks that were taken from it, in dictionaries in the order of the taking; returns what is left.

    A leaf has room for one dictionary of each kind, and handles know theirs: what was registered meanwhile stays taken.
    """
    if tensor_hooks and not leaf._backward_hooks:
        leaf._backward_hooks, tensor_hooks = tensor_hooks[0], tensor_hooks[1:]
    if post_hooks and not leaf._post_accumulate_grad_hooks:
        leaf._post_accumulate_grad_hooks, post_hooks = post_hooks[0], post_hooks[1:]
    return tensor_hooks, post_hooks


class _Handles:
    """Counts the handles of hooks of all kinds, to notice cheaply that somebody may have registered some.

    Attributes:
        ours: how many were given to this library, for hooks that it registers while a model is trained or sharded.
    """

    __slots__ = ("ours",)

    def __init__(self) -> None:
        self.ours = 0

    def give(self, count: int = 1) -> None:
        """Count some that were given to this library."""
        self.ours += count

    def of_others(self) -> int:
        """How many were given to others, since the process began."""
        return RemovableHandle.next_id - self.ours


HANDLES = _Handles()


class _Behind(torch.autograd.Function):
    """Gives a graph in which a leaf's node is next, without an operation on the leaf, which may be of any subclass."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> None:
        return None


def leaf_node(leaf: torch.Tensor) -> Any:
    """The autograd node that adds gradients to a leaf's `.grad`; it lives as long as anybody holds it."""
    with torch.inference_mode(False), torch.enable_grad():
        made: Any = _Behind.apply(leaf)  # type: ignore[no-untyped-call]
    return made.grad_fn.next_functions[0][0]


def passes_through(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the backward pass that runs now has a gradient for any of these leaves."""
    return any(_fate(leaf_node(leaf)) is not Fate.DROPPED for leaf in leaves if leaf.requires_grad)


def hooks_of_node(node: Any) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """The hooks that are registered on an autograd node, to run before it and after; later ones will be in there, too.

    Only the handle of a hook knows where it is kept.
    """
    handles = node.register_prehook(print), node.register_hook(print)
    HANDLES.give(2)
    before, after = (handle.hooks_dict_ref() for handle in handles)
    for handle in handles:
        handle.remove()
    return before, after


def carry_gradient_hooks(leaf: torch.Tensor, to: torch.Tensor) -> None:
    """Let a leaf have the tensor hooks and the post-accumulate hooks of another; handles are good for both."""
    for name in _HOOKS:
        if hooks := getattr(leaf, name):
            setattr(to, name, hooks)


def _is_below_autograd() -> bool:
    """Whether autograd sees no operations now, not even to count versions, as in the body of a custom operator."""
    return any(map(torch._C._dispatch_tls_is_dispatch_key_excluded, _AUTOGRAD_KEYS))


_AUTOGRAD_KEYS = torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.ADInplaceOrView


@contextlib.contextmanager
def _all_set_aside() -> Iterator[None]:
    with transforms_set_aside(), _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def plainly() -> contextlib.AbstractContextManager[None]:
    """What is made within is an ordinary view without a history, to be kept, whatever is in force around it.

    Inference mode, transforms of `torch.func` and all dispatch modes are set aside; a view of a fake tensor is fake.
    """
    modes = modes_in_force() or _pre_dispatch_modes_in_force()
    if modes or is_transforming() or torch.is_inference_mode_enabled() or _is_below_autograd():
        return _all_set_aside()
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def to_keep() -> Iterator[None]:
    """The same for memory: modes that tell what memory there is see it, and where tensors are fake, so is it."""
    with transforms_set_aside(), checkpoints_set_aside(), torch.inference_mode(False), torch.no_grad():
        yield


# A context in which operations are seen by no mode of users or of torch (selective checkpoints, fake tensors).
without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes


def forward_hooks(module: torch.nn.Module, before: bool) -> dict[int, Callable[..., Any]]:
    """The hooks that run before, or after, the forward of a module, by the ids of their handles."""
    return module._forward_pre_hooks if before else module._forward_hooks


# Whether hooks listen to the calls of all modules.
any_global_hook: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
# What `torch.jit` traces now; None if it traces nothing.
is_traced_by_jit: Callable[[], object] = torch._C._get_tracing_state


# Sets grad mode; a tenth of the cost of `torch.no_grad`.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def tree_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order, including those containers that `map_tensors` leaves alone."""
    tensors: list[torch.Tensor] = []
    _collect(tree, tensors, {})
    return tensors


def _collect(tree: Any, tensors: list[torch.Tensor], visited: dict[int, Any]) -> None:
    """Append the tensors in `tree`; `visited` holds the containers seen so far that may contain themselves, by id."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return
    if isinstance(tree, _ATOMS):
        return
    kind = type(tree)
    children = tree.values() if kind is dict else tree if kind is tuple or kind is list else _parts(tree).values()
    if not children and id(tree) not in visited:
        visited[id(tree)] = tree  # held, because a node may make new objects for its children, whose ids are reused
        children = _hidden_parts(tree)
    for child in children:
        _collect(child, tensors, visited)


def _hidden_parts(tree: Any) -> Sequence[Any]:
    """What is in a container that is passed to and from forward as it is; nothing for other objects."""
    if isinstance(tree, UserDict):
        return list(tree.values())
    if isinstance(tree, (UserList, deque)):
        return list(tree)
    if pytree.tree_is_leaf(tree):
        return ()
    return pytree.tree_flatten(tree, is_leaf=lambda each: each is not tree)[0]


_ATOMS = (int, float, str, type(None), type, torch.dtype, torch.device, torch.nn.Module)


def _parts(tree: Any) -> dict[Any, Any]:
    """What is in a container whose tensors may be exchanged, by field, key or index; nothing for other objects.

    The kinds are those of FSDP2. It passes all others as they are: a registered pytree node (a cache of keys and
    values, say), a `UserDict`, a `UserList` or a `deque` may be written into, and may contain itself.
    """
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    if isinstance(tree, dict):
        return dict(tree.items())
    return dict(enumerate(tree)) if isinstance(tree, (list, tuple, set, frozenset)) else {}


def _with_parts(tree: Any, parts: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of a container, which has `parts`, with other things under some of its keys.

    A dict or a list of a user's class keeps the class, its attributes and what they do about missing keys. If the class
    refuses items, the copy is made as FSDP2 makes all: an ordinary dict, or what the list's class makes of the items.
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
    except Exception:  # classes that refuse items (diffusers' FrozenDict, say) raise anything, Exception itself too
        return whole if isinstance(tree, dict) else kind(whole.values())
    return made


def _dataclass_with(tree: Any, changed: dict[Any, Any]) -> Any:
    made = copy.copy(tree)
    for key, part in changed.items():
        object.__setattr__(made, key, part)  # past `frozen`, and without `__init__`, which may want other things
        if isinstance(tree, dict) and key in tree:  # as outputs of Transformers' models are
            made[key] = part
    return made


def _exchanged(part: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The second of the pair whose first is `part`; `part` itself if there is none."""
    for first, second in pairs:
        if _same(first, part):
            return second
    return part


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The ordinary tensors that a tensor of a subclass is made of (a DTensor's local one, say); else the tensor."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for each in inner if isinstance(each, torch.Tensor) for part in plain_parts(each)]


class ContainerCopy(NamedTuple):
    """A mutable container that was copied because something in it had to change.

    Attributes:
        owner: the container that was copied.
        made: the copy.
        parts: what was in `owner`, by field, key or index.
        changed: what is in the copy instead, under some of these.
    """

    owner: Any
    made: Any
    parts: dict[Any, Any]
    changed: dict[Any, Any]


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], tree: Any, copies: list[ContainerCopy] | None = None
) -> Any:
    """The same tree with `function` applied to each tensor in dataclasses, dicts, lists, tuples and sets; see `_parts`.

    A container in which `function` changes no tensor is not copied: the result holds the same object, so that what is
    written into it is seen by all who have it. A container in which a tensor changes is copied; the containers within
    it that need no copy are shared.

    Args:
        function: gives the tensor itself where nothing is to change.
        tree: a tensor, a container, or any other object, which stays as it is.
        copies: gets a `ContainerCopy` for each mutable container that was copied, for `return_writes`.
    """
    made = _changed(function, tree, copies)
    return tree if made is None else made


def _changed(function: Callable[[torch.Tensor], Any], tree: Any, copies: list[ContainerCopy] | None) -> Any:
    """`map_tensors`, but None where nothing changes: Dynamo does not compare tuples by identity."""
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
    """A copy of a container in which something has changed; the same one as before if it was copied before."""
    for each in copies or ():
        if each.owner is tree:  # it was passed twice: forward must see through one name what it writes through another
            return each.made
    parts = dict(parts)  # the owner may change by the time writes are returned
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
    """Write into containers what was written into their copies since these were made.

    What a copy still has is left alone in its owner, which keeps the float32 tensor that the copy has in bfloat16.

    Args:
        copies: what `map_tensors` has listed.
    """
    pairs = [(part, copied.parts[key]) for copied in copies for key, part in copied.changed.items()]
    for copied in reversed(copies):  # a copy of a copy is listed behind the latter
        _return_from(copied, pairs)


def _return_from(copied: ContainerCopy, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Write into one container what was written into its copy; `pairs` has what copies hold for what owners hold."""
    owner, made, parts, changed = copied
    given, now = parts | changed, _parts(made)
    writes = {key: part for key, part in now.items() if key not in given or not _same(part, given[key])}
    gone = [key for key in given if key not in now]
    if writes or gone:
        _write(owner, now, writes, gone, pairs)


def _same(first: Any, second: Any) -> bool:
    """Whether two objects are one, or tuples of the same objects, which Dynamo cannot tell apart."""
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


# Whether torch's profiler runs.
is_profiled: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")

# Keeps the current stream of a GPU busy for so many cycles of its clock.
cuda_sleep: Callable[[int], None] = torch.cuda._sleep
