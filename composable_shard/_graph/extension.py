"""Parameters that define their own all-gather (see `_group/extension.py`), in graphs.

A graph does not take such a shard as an input: its class may not support that, and some lose state on the way (for
example, torchao's float8 weights lose their scale). Instead:

- A *stand-in*, a tensor of one element, is the input. It requires a gradient if the parameter does, and its memory
  identifies the group.
- The launch of the gather calls `fsdp_pre_all_gather` when the graph runs, eagerly and under `no_grad`.
- The wait returns the *parts*: the gathered tensors, and the tensors of the metadata.
- `fsdp_post_all_gather` is traced. It makes the unsharded parameter from the parts.
- The gradient leaves through an output of `unshard` that has the shape of the parameter and no memory.

While a graph is traced, the shapes and dtypes of the parts must be known. They are determined with fake tensors when
the group is traced for the first time, without communication. Each gather compares them with those of the real tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._group.extension import POST, PRE, Extension, gathered_shapes
from .._group.extension_gathers import Arriving
from .._policies import Options
from .._torch.core import has_memory, unflattened
from .._torch.tracing import without_data
from ..errors import ShardConfigStateError

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


def _is_constant(value: object) -> bool:
    """Whether a value is equal wherever its text is equal, and contains no tensor."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return all(field.repr and _is_constant(getattr(value, field.name)) for field in fields)
    if isinstance(value, Mapping):
        return all(map(_is_constant, itertools.chain.from_iterable(value.items())))
    if isinstance(value, (tuple, list, frozenset)):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """The facts about a part that a graph depends on. `device` is a type, because ranks have different indices."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> _Tensor:
        return cls(tuple(tensor.shape if shape is None else shape), tensor.dtype, tensor.device.type)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor without data, on the device of `like` if that is of the right type."""
        device = like.device if like.device.type == self.device else self.device
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a parameter.

    Attributes:
        code: names the class of the shard and its state besides tensors. Parameters that share code have equal ones.
        gathered: the gathered tensors.
        metadata: the tensors of the metadata.
        constants: the text of the rest of the metadata.
        dtype: the dtype of the unsharded parameter, in which its gradient leaves.
    """

    code: str
    gathered: tuple[_Tensor, ...]
    metadata: tuple[_Tensor, ...]
    constants: str
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Number of tensors."""
        return len(self.gathered) + len(self.metadata)

    def room(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Tensors for the parts; `like` is on the device of the computation."""
        return [each.empty(like) for each in (*self.gathered, *self.metadata)]

    def check(self, arriving: Arriving) -> None:
        """Check that a gather has returned the expected parts.

        Raises:
            ShardConfigStateError: it has not.
        """
        gathered = tuple(map(_Tensor.of, arriving.outputs))
        leaves, constants = _split(arriving.metadata)
        metadata = tuple(map(_Tensor.of, leaves))
        if (gathered, metadata, constants) != (self.gathered, self.metadata, self.constants):
            raise ShardConfigStateError(
                f"{arriving.name}: {PRE} returned other tensors or metadata than when the graph was compiled: "
                f"{_text(gathered, metadata, constants)} instead of "
                f"{_text(self.gathered, self.metadata, self.constants)}; call the model again, and torch.compile will "
                "compile it again. If they change in every step, compile the layers one by one with module.compile()"
            )


def _text(gathered: Sequence[_Tensor], metadata: Sequence[_Tensor], constants: str) -> str:
    tensors = [f"{each.dtype} {list(each.shape)} on {each.device}" for each in (*gathered, *metadata)]
    return f"({', '.join(tensors)}; {constants})"


def _split(metadata: Any) -> tuple[list[torch.Tensor], str]:
    """The tensors in metadata, and the text of the rest."""
    leaves, spec = pytree.tree_flatten(metadata)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, f"{[None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]} in {spec}"


def _state_of(local: torch.Tensor) -> dict[str, Any]:
    """The attributes of a shard besides tensors, which `fsdp_post_all_gather` may read."""
    slots = itertools.chain.from_iterable(
        (names,) if isinstance(names, str) else names
        for names in (vars(cls).get("__slots__", ()) for cls in type(local).__mro__)
    )
    names = {*slots, *local.__dict__} - {"__dict__", "__weakref__"}
    state = {name: getattr(local, name, None) for name in sorted(names) if not name.startswith("_dynamo")}
    # A tensor may be None at first, for example a scale that is not computed yet.
    return {name: each for name, each in state.items() if each is not None and not isinstance(each, torch.Tensor)}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the attributes whose values differ."""
    return [name for name in {*before, *now} if not _are_equal(before.get(name), now.get(name))]


def _are_equal(one: Any, two: Any) -> bool:
    try:
        return bool(one is two or one == two)
    except Exception:  # values that cannot be compared
        return False


def _refuse(extension: Extension, method: str, why: str) -> ShardConfigStateError:
    return ShardConfigStateError(
        f"torch.compile: {extension.name}: {method} cannot be part of a graph: {why}; compile the modules that hold "
        "such parameters one by one with module.compile()"
    )


class Traced:
    """One parameter that defines its own all-gather, for tracing.

    Args:
        extension: its methods.
        options: for the dtypes of gradients.

    Attributes:
        parts: its parts.
        inner: number of tensors that `take_apart` returns.
        stand_in: the input of the graph.
        take_apart: a function of the parts. It makes the unsharded parameter and returns the tensors inside of it.
        make: a function of the output through which the gradient leaves, and of these tensors. It returns the unsharded
            parameter. Parameters that can share code have the same functions.

    Raises:
        ShardConfigStateError: a method cannot be part of a graph.
    """

    def __init__(self, extension: Extension, options: Options) -> None:
        param = self._param = extension.param
        self._extension = extension  # `make` needs one that is alive
        maker = self._maker = _maker_for(extension, options)
        maker.add(extension)
        self.parts, self.inner, self.take_apart, self.make = maker.parts, maker.inner, maker.take_apart, maker.make
        self.stand_in = torch.empty(1, dtype=param.dtype, device=param.local.device)
        self.stand_in.requires_grad_(param.sharded.requires_grad)
        self._version = param.local._version

    @property
    def name(self) -> str:
        """The parameter, for messages."""
        return f"parameter {self._param.fqn}"

    def fits(self) -> bool:
        """Whether the parameter, which was replaced, is like the one before."""
        local, facts = self._param.local, self._maker.facts
        same = type(local) is facts.kind and self._param.dtype is self.stand_in.dtype
        return same and not _changed(facts.state, _state_of(local))

    def changed_state(self) -> list[str]:
        """Names of the shard's attributes that have changed; the graph contains their old values as constants."""
        return sorted(_changed(self._maker.facts.state, _state_of(self._param.local)))

    def follow_freezing(self) -> bool:
        """Set `requires_grad` of the stand-in; returns whether the parameter requires a gradient only now."""
        wanted, before = self._param.sharded.requires_grad, self.stand_in.requires_grad
        if wanted is not before:
            self.stand_in.requires_grad_(wanted)
        return wanted and not before

    def follow_version(self) -> bool:
        """Whether the shard was edited since the last call, judging by versions."""
        version = self._param.local._version
        edited = version != self._version
        self._version = version
        return edited


class _Facts(NamedTuple):
    """All that decides which code makes an unsharded parameter from its parts.

    Attributes:
        kind: the class of the shard.
        state: its attributes besides tensors.
        shape, dtype: those of the unsharded parameter, or of its local tensor.
        wrapper: makes a DTensor of it, if it was one before.
        gathered, tensors: the gathered tensors, and those of the metadata.
        leaves: the leaves of the metadata, with None for tensors.
        where: which leaves are tensors.
        spec: the structure of the metadata.
        grad_dtype: the dtype in which the gradient leaves.
    """

    kind: type
    state: dict[str, Any]
    shape: torch.Size
    dtype: torch.dtype
    wrapper: object
    gathered: tuple[_Tensor, ...]
    tensors: tuple[_Tensor, ...]
    leaves: list[Any]
    where: list[bool]
    spec: pytree.TreeSpec
    grad_dtype: torch.dtype

    def match(self, others: _Facts) -> bool:
        """Whether the others are the same: by value, because values with equal texts may differ."""
        rest = self._replace(state={}), others._replace(state={})
        return not _changed(self.state, others.state) and all(map(_are_equal, *rest))

    def metadata(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The metadata with these tensors."""
        given = iter(tensors)
        filled = [next(given) if here else leaf for here, leaf in zip(self.where, self.leaves, strict=True)]
        return pytree.tree_unflatten(filled, self.spec)


_makers: weakref.WeakSet[_Maker] = weakref.WeakSet()
_numbers = itertools.count()


def _maker_for(extension: Extension, options: Options) -> _Maker:
    """The functions for a parameter. Parameters with the same facts share them, so that equal layers share code."""
    param, info = extension.param, extension.info
    with without_data(), torch.no_grad():
        inputs, metadata = _called_pre(extension)
        leaves, spec = pytree.tree_flatten(metadata)
        _check_plain(extension, inputs, leaves)
        shapes = gathered_shapes(inputs, info.shard_size)
        outputs = [
            torch.empty(shape, dtype=each.dtype, device=info.device) for shape, each in zip(shapes, inputs, strict=True)
        ]
        made = _called_post(extension, outputs, metadata)
    tensors, text = _split(metadata)
    facts = _Facts(
        kind=type(param.local),
        state=_state_of(param.local),
        shape=extension.shape,
        dtype=extension.dtype,
        wrapper=param.parallel and param.parallel.wrapper,
        gathered=tuple(map(_Tensor.of, outputs)),
        tensors=tuple(map(_Tensor.of, tensors)),
        leaves=[None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        where=[isinstance(leaf, torch.Tensor) for leaf in leaves],
        spec=spec,
        grad_dtype=made.dtype if param.parallel is None else param.sum_dtype(options),
    )
    known = next((maker for maker in list(_makers) if maker.facts.match(facts)), None)
    return known or _Maker(facts, text, len(_Form.of(made)[1]))


def _called_pre(extension: Extension) -> tuple[list[torch.Tensor], Any]:
    try:
        return extension.preview()
    except Exception as error:
        raise _refuse(extension, PRE, f"it failed with fake tensors: {type(error).__name__}: {error}") from error


def _called_post(extension: Extension, outputs: Sequence[torch.Tensor], metadata: Any) -> torch.Tensor:
    try:
        return extension.call_post(tuple(outputs), metadata)[0]
    except Exception as error:
        raise _refuse(extension, POST, f"it failed with fake tensors: {type(error).__name__}: {error}") from error


def _check_plain(extension: Extension, inputs: Sequence[torch.Tensor], leaves: Sequence[object]) -> None:
    if not inputs:
        raise _refuse(extension, PRE, "it returned no tensor to gather")
    for leaf in (*inputs, *leaves):
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter) and has_memory(leaf):
                raise _refuse(extension, PRE, f"it returned a {type(leaf).__name__}; return plain tensors")
        elif not _is_constant(leaf):
            why = f"it returned a {type(leaf).__name__} in its metadata; return tensors, numbers, strings and dtypes"
            raise _refuse(extension, PRE, f"{why} in tuples, lists or dicts")


class _Form(NamedTuple):
    """How a tensor subclass is made from the tensors inside of it."""

    kind: Any
    names: Sequence[str]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> tuple[_Form | None, tuple[torch.Tensor, ...]]:
        """The form of a tensor and the tensors inside of it; None and the tensor itself if it has no form."""
        if not is_traceable_wrapper_subclass(tensor):
            return None, (tensor,)
        names, context = tensor.__tensor_flatten__()
        form = cls(type(tensor), names, context, tensor.shape, tensor.stride())
        return form, tuple(getattr(tensor, name) for name in names)

    def make(self, inner: Sequence[torch.Tensor]) -> torch.Tensor:
        named = dict(zip(self.names, inner, strict=True))
        return unflattened(self.kind, named, self.context, self.shape, self.stride)


class _Maker:
    """Makes unsharded parameters of one kind from their parts, in a graph.

    This is done in two steps. `take_apart`, with `fsdp_post_all_gather`, is part of the region that backward repeats.
    `make` is not, so that its results can be used in a user's checkpoint: a tensor that leaves a region for another one
    would be saved.

    Args:
        facts: what decides about the code.
        constants: the text of the leaves of the metadata that are not tensors.
        inner: number of tensors inside of the unsharded parameter.

    Attributes:
        facts, inner: as given.
        parts, take_apart, make: see `Traced`.
    """

    def __init__(self, facts: _Facts, constants: str, inner: int) -> None:
        kind = facts.kind
        state = repr(facts.state) if _is_constant(facts.state) else f"number {next(_numbers)}"
        code = f"{kind.__module__}.{kind.__qualname__} {state}"
        self.facts, self.inner = facts, inner
        self.parts = Parts(code, facts.gathered, facts.tensors, constants, facts.grad_dtype)
        self._known: weakref.WeakSet[Extension] = weakref.WeakSet()
        self._form: _Form | None = None
        _makers.add(self)
        build, parallel_of, reduced = self._build, self._parallel, facts.grad_dtype

        class Make(torch.autograd.Function):
            """The port of a parameter and the tensors inside of it -> the unsharded parameter."""

            @staticmethod
            def forward(ctx: Any, port: torch.Tensor, *inner: torch.Tensor) -> torch.Tensor:
                return build(inner)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
                parallel, count = parallel_of(), len(ctx.needs_input_grad)
                local = gradient if parallel is None else parallel.local_gradient(gradient, reduced)
                return (local, *[None] * (count - 1))

        def make(port: torch.Tensor, *inner: torch.Tensor) -> Any:
            if torch.is_grad_enabled() and port.requires_grad:
                return Make.apply(port, *inner)  # type: ignore[no-untyped-call]
            return build(inner)

        def take_apart(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._take_apart(parts)

        # Dynamo must not trace these functions, because it cannot trace every class. AOTAutograd does.
        self.take_apart: Callable[..., Sequence[torch.Tensor]] = torch.compiler.allow_in_graph(take_apart)  # type: ignore[no-untyped-call]
        self.make: Callable[..., torch.Tensor] = torch.compiler.allow_in_graph(make)  # type: ignore[no-untyped-call]

    def add(self, extension: Extension) -> None:
        """Use the methods of a parameter of this kind as long as it is alive."""
        self._known.add(extension)

    def _extension(self) -> Extension:
        """A parameter of this kind that users have not replaced meanwhile."""
        return next(each for each in self._known if type(each.param.local) is self.facts.kind)

    def _take_apart(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        extension, count = self._extension(), len(self.facts.gathered)
        with torch.no_grad():
            made = _called_post(extension, parts[:count], self.facts.metadata(parts[count:]))
        self._form, inner = _Form.of(made)
        return inner

    def _parallel(self) -> Any:
        return self._extension().param.parallel

    def _build(self, inner: Sequence[torch.Tensor]) -> torch.Tensor:
        parallel = self._parallel()
        viewed = [each if is_traceable_wrapper_subclass(each) else each.view(each.shape) for each in inner]
        made = viewed[0] if self._form is None else self._form.make(viewed)
        return made if parallel is None else parallel.around(made)
