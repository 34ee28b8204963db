"""A group's gather and reduction as operators of a graph.

Dynamo records one call of `unshard`. AOTAutograd traces through its autograd kernel, down to pairs of operators that
stay visible in the graph. A launch returns a token, and the wait for that token returns the result.

    all_gather_into_tensor(shards) -> token     wait_weights(token, shards) -> unsharded parameters, mark
    reduce_scatter_tensor(gradients) -> token   wait_gradients(token) -> this rank's shards of the averages

On a mesh with replicas, `all_reduce` takes the token of a reduce-scatter and returns that of the all-reduce that
follows, or of the second reduce-scatter with `outer_sharding`. Launches and waits are functional: no result shares
memory with an argument. The wait of a gather also takes the shards, so the compiler keeps these alive. At run time the
operators do the same as eager steps, with the transports, the copies and the pool of the group (`Exchange`). They find
the group by the memory of one of its shards, the `anchor`.

An operator takes no Python objects. While it is traced, it gets the facts about its group from a frozen `Layout`, which
it finds by a digest of everything that determines the graph. So equal groups share compiled code, on all ranks if their
shards are equal, and a compile cache never returns code that was made for another layout.

Some decisions cannot be made when a graph is created. Further operators make them at run time:

    keep     keep unsharded gradients for a later backward (gradient sync is off)
    settle   a parameter got no gradient on this rank; if another rank had one, add the reduced gradient to `.grad`

Finally, `touch` does nothing, but in backward it takes the `mark`, an empty tensor that follows the weights. This makes
the rank gather again in backward even if its own graph does not need the weights. Ranks that use different parameters
of a group therefore still issue the same collectives. `touch` does not take a weight, because a compiler may put
`touch` at the end of a graph. All weights of a group share one slot of the pool, which would stay leased until then.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from .._group.exchange import Gather, Reduction
from .._plan import layout as layouts
from .._plan.layout import bucket_layout
from .._policies import GradDtype, Options, reduce_dtypes
from .._torch import compiler
from .._torch.core import alias, has_side_effect
from ..errors import ShardConfigStateError
from . import registry
from .extension import Parts

_FILES = *sorted(Path(__file__).parent.glob("*.py")), Path(layouts.__file__), Path(compiler.__file__)
CODE = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()  # of all code that makes a graph
REDUCE, KEEP, TAKE = 0, 1, 2  # what happens to gradients; TAKE: reduce them together with those that were kept
STEPS, ADDS = 4, 8  # flags: the graph itself adds gradients to `.grad`; complete (STEPS), or more may follow (ADDS)


@dataclass(frozen=True)
class Layout:
    """The facts about a group that a graph depends on.

    Attributes:
        shapes: the unsharded shapes.
        dims, rows: the dim along which each parameter is sharded, and the number of rows that shards are multiples of.
        keeps: whether each parameter is gathered in the dtype in which it is stored.
        grad_dtypes: the `grad_dtype` of each.
        world: number of shards of each parameter.
        rank: the first rank whose shards have the same shapes as this rank's: such ranks share compiled code.
        replicates: whether gradients are also reduced over the outer axis.
        outer: with `outer_sharding`, the size of the outer axis, and the first rank on it whose shards have the same
            shapes as this rank's; else (1, 0).
        device: the device on which weights are gathered, if shards are stored on another one; otherwise empty.
        ports: indices of the parameters whose gradients may have the dtype of reduction. For each, the operator
            `unshard` returns a further output without memory. Its value is not used, but backward receives the gradient
            of the parameter through it. Autograd would cast a gradient of the parameter itself.
        options: only their dtypes matter here.
        extended: the parts of parameters that define their own all-gather; None for the others (see `extension.py`).
    """

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    rows: tuple[int, ...]
    keeps: tuple[bool, ...]
    grad_dtypes: tuple[GradDtype, ...]
    world: int
    rank: int
    replicates: bool
    outer: tuple[int, int]
    device: str
    ports: tuple[int, ...]
    options: Options
    extended: tuple[Parts | None, ...]

    def register(self) -> str:
        """Register the layout for the operators; returns its key."""
        _layouts[self.key] = self
        return self.key

    @functools.cached_property
    def key(self) -> str:
        """A digest of everything that determines the graph: the same for equal layouts, in every process."""
        return hashlib.sha256(f"{CODE} {self!r}".encode()).hexdigest()[:16]

    def _shards_of(self, members: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """The offset in elements and the shape of this rank's shard of each of these parameters, in one bucket."""
        shapes = [self.shapes[index] for index in members]
        dims, rows = ([of[index] for index in members] for of in (self.dims, self.rows))
        pieces, rank = bucket_layout(shapes, self.world, dims=dims, rows=rows).params, self.rank
        if self.outer[0] > 1:
            nodes = [at.local_shape(rank) for at in pieces]
            pieces, rank = bucket_layout(nodes, self.outer[0], dims=dims).params, self.outer[1]
        return [(at.offset, at.local_shape(rank)) for at in pieces]

    def gradients_of(self, of_outputs: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """The gradients of the parameters, by index, from those of all outputs of `unshard`, without missing ones."""
        ports = of_outputs[len(of_outputs) - len(self.ports) :]
        gradients = dict(enumerate(of_outputs[: len(self.shapes)]))
        gradients.update({i: port for i, port in zip(self.ports, ports, strict=True) if port is not None})
        return {i: gradient for i, gradient in gradients.items() if gradient is not None}

    def room_for_weights(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors for the unsharded parameters, or for their parts."""
        like = torch.empty(0, device=self.device or shards[0].device)
        room: list[torch.Tensor] = []
        for index, (shape, parts) in enumerate(zip(self.shapes, self.extended, strict=True)):
            dtype = self._gathered(index, shards[index].dtype)
            room += [like.new_empty(shape, dtype=dtype)] if parts is None else parts.room(like)
        return room

    def outputs_of(self, arrived: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of `unshard`, from the tensors that have arrived.

        They are one tensor per parameter, and then all parts. For a parameter that consists of parts, the one tensor
        has no memory, and its gradient is that of the parameter.
        """
        waiting = iter(arrived)
        weights: list[torch.Tensor] = []
        all_parts: list[torch.Tensor] = []
        for shape, parts in zip(self.shapes, self.extended, strict=True):
            if parts is None:
                weights.append(next(waiting))
            else:
                own = [next(waiting) for _ in range(parts.count)]
                weights.append(own[0].new_empty((), dtype=parts.dtype).expand(shape))
                all_parts += own
        return weights + all_parts

    def _gathered(self, index: int, stored: torch.dtype) -> torch.dtype:
        return stored if self.keeps[index] else self.options.compute_dtype(stored)

    def sum_dtype(self, index: int, stored: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter stored as `stored` are accumulated."""
        return self.options.sum_dtype(stored, self._gathered(index, stored), self.grad_dtypes[index])

    def reduced(self, stored: Mapping[int, torch.dtype]) -> dict[int, torch.dtype]:
        """By index, the dtypes in which the gradients of parameters stored in these dtypes are reduced together."""
        sums = [self.sum_dtype(index, dtype) for index, dtype in stored.items()]
        return dict(zip(stored, reduce_dtypes(sums, [self.grad_dtypes[index] for index in stored]), strict=True))

    def room_for_pieces(
        self, like: torch.Tensor, wanted: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        """Tensors for this rank's shards of gradients, each at the memory offset that the reduction will use.

        Compilers rely on the resulting alignment.
        """
        shards: dict[int, tuple[int, tuple[int, ...]]] = {}
        reduced = self.reduced(dict(zip(wanted, dtypes, strict=True)))
        for bucket in {*reduced.values()}:
            members = [index for index in wanted if reduced[index] is bucket]
            shards.update(zip(members, self._shards_of(members), strict=True))
        pieces: list[torch.Tensor] = []
        for index, dtype in zip(wanted, dtypes, strict=True):
            offset, shape = shards[index]
            kept = self.grad_dtypes[index].kept(dtype, reduced[index])
            pieces.append(like.new_empty(offset + math.prod(shape), dtype=kept)[offset:].view(shape))
        return pieces


_layouts: dict[str, Layout] = {}


def is_sent(key: str) -> list[bool]:
    """For each tensor that a gather with this layout returns, whether ranks send it; they do not send metadata."""
    sent: list[bool] = []
    for parts in _layouts[key].extended:
        sent += [True] if parts is None else [True] * len(parts.gathered) + [False] * len(parts.metadata)
    return sent


def _names(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes in the form of an operator's argument."""
    return " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _dtypes(names: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names.split()]


# ---- traced code


def _gather(
    layout: Layout, shards: Sequence[torch.Tensor], anchor: torch.Tensor, with_gradients: bool
) -> list[torch.Tensor]:
    """All-gather the parameters of a group; an empty tensor follows them in the results (see `Layout.outputs_of`)."""
    ops = torch.ops.composable_shard
    launch = ops.all_gather_into_tensor if layout.world > 1 else ops.copy_weights
    token = launch(shards, anchor, layout.key, with_gradients)
    *arrived, mark = ops.wait_weights(token, shards, anchor, layout.key)
    return [*layout.outputs_of(arrived), mark]


@dataclass(frozen=True)
class _Use:
    """The facts about one use of a group that its backward depends on.

    Attributes:
        layout: the group's layout.
        fate: what happens to the gradients: `REDUCE`, `KEEP` or `TAKE`, possibly combined with `STEPS` or `ADDS`.
        factor, only_sums: the options `divide_factor` and `only_sums`.
        stored: by index, the dtypes of the parameters that require a gradient.
    """

    layout: Layout
    fate: int
    factor: float | None
    only_sums: bool
    stored: Mapping[int, torch.dtype]

    def reduce(self, given: Mapping[int, torch.Tensor], anchor: torch.Tensor) -> dict[int, torch.Tensor]:
        """Reduce gradients, by index, with zeros for missing ones. If any are missing, marks follow the results."""
        layout, ops = self.layout, torch.ops.composable_shard
        launch = (
            ops.reduce_scatter_tensor
            if layout.world > 1
            else ops.all_reduce
            if layout.replicates
            else ops.copy_gradients
        )
        wanted, gradients, indices = list(self.stored), list(given.values()), list(given)
        how = wanted, bool(self.fate & TAKE), self.factor, self.only_sums
        token = launch(gradients, anchor, layout.key, indices, *how)
        if layout.world > 1 and layout.replicates:
            token = ops.all_reduce.scattered(token, anchor)
        missing = [index for index in wanted if index not in given]
        dtypes = _names(list(self.stored.values()))
        results = ops.wait_gradients(token, anchor, layout.key, wanted, missing, dtypes)
        reduced = dict(zip(wanted, results, strict=False))
        if missing:
            ops.settle([reduced[index] for index in missing], results[-1], anchor, missing)
        return reduced


class _Unshard(torch.autograd.Function):
    """The operator's autograd kernel."""

    @staticmethod
    def forward(
        ctx: Any, how: tuple[str, int, bool, float | None, bool, bool], tag: torch.Tensor | None, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        key, fate, again, factor, only_sums, with_gradients = how
        anchor = _anchor(shards, tag)
        stored = {i: shard.dtype for i, shard in enumerate(shards) if shard.requires_grad}
        ctx.use = _Use(_layouts[key], fate, factor, only_sums, stored)
        ctx.set_materialize_grads(False)
        *outputs, mark = _gather(_layouts[key], shards, anchor, with_gradients)
        ctx.save_for_backward(anchor, *((mark,) if again else ()))
        ports = {i: _port(outputs[i], _layouts[key].sum_dtype(i, shards[i].dtype)) for i in _layouts[key].ports}
        members = [*enumerate(outputs[: len(shards)]), *ports.items()]
        apart = [out for i, out in members if i not in stored]
        ctx.mark_non_differentiable(*apart, *outputs[len(shards) :])
        return *outputs, *ports.values()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        use, (anchor, *marks), ops = ctx.use, ctx.saved_tensors, torch.ops.composable_shard
        given, count = use.layout.gradients_of(gradients), len(use.layout.shapes)
        for mark in marks:
            ops.touch(mark, next(iter(given.values())))
        if use.fate == KEEP:
            ops.keep(list(given.values()), anchor, list(given), count)
            return (None,) * (2 + count)
        reduced = use.reduce(given, anchor)
        if use.fate & (STEPS | ADDS):
            ops.hand_over([reduced[i] for i in given], anchor, list(given), bool(use.fate & STEPS), _IN_BACKWARD)
            return (None,) * (2 + count)
        # Autograd would cast a gradient in another dtype than that of the shard. The graph does not have all shards.
        extended = use.layout.extended
        if apart := [i for i in given if reduced[i].dtype is not use.stored[i] or extended[i] is not None]:
            why = _IN_OTHER_DTYPE if any(extended[i] is None for i in apart) else _OF_SUBCLASS
            ops.hand_over([reduced[i] for i in apart], anchor, apart, True, why)
        return (None, None, *(reduced[i] if i in given and i not in apart else None for i in range(count)))


def _port(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.new_empty((), dtype=dtype).expand(weight.shape)


def _anchor(shards: Sequence[torch.Tensor], tag: torch.Tensor | None) -> torch.Tensor:
    return tag if tag is not None else next(shard for shard in shards if shard.numel())


def _with_gradients(shards: list[torch.Tensor], tag: torch.Tensor | None, *how: Any) -> list[torch.Tensor]:
    return list(_Unshard.apply((*how, torch.is_grad_enabled()), tag, *shards))  # type: ignore[no-untyped-call]


def _without_gradients(shards: list[torch.Tensor], tag: torch.Tensor | None, key: str, *how: Any) -> list[torch.Tensor]:
    return _gather(_layouts[key], shards, _anchor(shards, tag), False)[:-1]


# ---- work in flight while a graph runs


class _Work(Protocol):
    def abandon(self) -> None:
        """Discard the work, because its result is not needed any more."""


W = TypeVar("W", bound=_Work)


class _Flights(Generic[W]):
    """Launched work that has not been waited for, by its token, which is a tensor of one number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._flying: dict[int, tuple[W, weakref.ref[torch.Tensor]]] = {}

    def launch(self, work: W) -> torch.Tensor:
        """Return a token for work that was started. If the token is freed before a wait, the work is abandoned."""
        number = next(self._numbers)
        token = torch.scalar_tensor(number, dtype=torch.int64, device="cpu")  # a third of the time of `torch.tensor`
        self._flying[number] = work, weakref.ref(token, functools.partial(self._lose, number))
        return token

    def _lose(self, number: int, _token: object) -> None:
        if (entry := self._flying.pop(number, None)) is not None:
            entry[0].abandon()

    def take(self, token: torch.Tensor) -> W | None:
        """Remove and return the work of a token, for a wait; None if it was waited for before."""
        entry = self._flying.pop(int(token.item()), None)
        return None if entry is None else entry[0]


_gathers: _Flights[Gather] = _Flights()
_reductions: _Flights[Reduction] = _Flights()


def _launch_gather(shards: list[torch.Tensor], anchor: torch.Tensor, key: str, with_gradients: bool) -> torch.Tensor:
    known = registry.known(anchor)
    pends = False
    if (owner := known.owner()) is not None:
        pends = owner.before_gather(with_gradients)
    return _gathers.launch(_begin(known, shards, key, with_gradients, pends))


def _begin(
    known: registry.Known, shards: list[torch.Tensor], key: str, with_gradients: bool = True, pends: bool = False
) -> Gather:
    gather = known.exchange().gather(shards, with_gradients, pends)
    try:
        for arriving in gather.arriving:
            parts = _layouts[key].extended[arriving.index]
            assert parts is not None
            parts.check(arriving)
    except BaseException as error:
        gather.abandon()
        if isinstance(error, ShardConfigStateError) and (owner := known.owner()) is not None:
            owner.trace_again()  # with the new tensors
        raise
    return gather


def _wait_weights(
    token: torch.Tensor, shards: list[torch.Tensor], anchor: torch.Tensor, key: str
) -> list[torch.Tensor]:
    gather = _gathers.take(token)
    if gather is None:  # the compiler has saved the token for backward, and waits for it a second time there
        gather = _begin(registry.known(anchor), shards, key)
    return [*gather.finish(), token.new_empty(0)]


def _launch_reduction(
    gradients: list[torch.Tensor],
    anchor: torch.Tensor,
    key: str,
    indices: list[int],
    wanted: list[int],
    takes: bool,
    factor: float | None,
    only_sums: bool,
) -> torch.Tensor:
    known = registry.known(anchor)
    given: list[torch.Tensor | None] = [None] * len(_layouts[key].shapes)
    for index, gradient in zip(indices, gradients, strict=True):
        given[index] = gradient
    if takes and (owner := known.owner()) is not None:
        given = owner.take(given)
    return _reductions.launch(known.exchange().reduce(given, wanted, factor, only_sums))


def _go_on(token: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    reduction = _reductions.take(token)
    assert reduction is not None, "a compiled graph continues one reduction twice"
    reduction.advance()
    return _reductions.launch(reduction)


def _wait_gradients(
    token: torch.Tensor, anchor: torch.Tensor, key: str, wanted: list[int], missing: list[int], dtypes: str
) -> list[torch.Tensor]:
    reduction = _reductions.take(token)
    assert reduction is not None, "a compiled graph waits twice for one reduction"
    done = reduction.finish()
    pieces = [done[index][0] for index in wanted]
    if compiler.results_are_checked():  # then results must not share a storage: for example, in a whole step
        pieces = list(map(alias, pieces))
    return [*pieces, torch.stack([done[index][1].to(torch.float32) for index in missing])] if missing else pieces


def _room_for_gradients(
    token: torch.Tensor, anchor: torch.Tensor, key: str, wanted: list[int], missing: list[int], dtypes: str
) -> list[torch.Tensor]:
    pieces = _layouts[key].room_for_pieces(anchor, wanted, _dtypes(dtypes))
    return [*pieces, anchor.new_empty(len(missing), dtype=torch.float32)] if missing else pieces


_IN_BACKWARD = "an optimizer inside of backward"
_IN_OTHER_DTYPE = "a parameter with a grad_dtype other than its own dtype"
_OF_SUBCLASS = "a parameter with fsdp_pre_all_gather"


def _check_sets_gradients(anchor: torch.Tensor, what: str) -> None:
    """Raise an error if torch would overwrite `.grad` after the graph has run."""
    if compiler.results_are_checked():
        name = registry.known(anchor).exchange().name
        raise ShardConfigStateError(
            f"group with {name}: {what} cannot be part of a compiled step that includes the backward, because "
            "torch sets .grad after such a step; compile only the model, or run this step with the uncompiled model"
        )


def _keep(gradients: list[torch.Tensor], anchor: torch.Tensor, indices: list[int], count: int) -> None:
    _check_sets_gradients(anchor, "a backward under set_requires_gradient_sync(False)")
    if (owner := registry.known(anchor).owner()) is not None:
        kept: list[torch.Tensor | None] = [None] * count
        for index, gradient in zip(indices, gradients, strict=True):
            kept[index] = gradient
        owner.keep(kept)


def _settle(pieces: list[torch.Tensor], marks: torch.Tensor, anchor: torch.Tensor, indices: list[int]) -> None:
    if (owner := registry.known(anchor).owner()) is not None:
        for piece, mark, index in zip(pieces, owner.marks_of_unused(indices, marks), indices, strict=True):
            if mark > 0:
                _check_sets_gradients(anchor, "a parameter that only other ranks have used")
            if owner.zeros_for_unused or mark > 0:
                owner.settle(index, piece.clone())


def _hand_over(pieces: list[torch.Tensor], anchor: torch.Tensor, indices: list[int], complete: bool, why: str) -> None:
    _check_sets_gradients(anchor, why)
    if (owner := registry.known(anchor).owner()) is not None:
        for piece, index in zip(pieces, indices, strict=True):
            owner.settle(index, piece.clone(), complete)


# ---- the operators

_library = torch.library.Library("composable_shard", "DEF")  # type: ignore[no-untyped-call]


def _outside_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        with torch.no_grad():
            return kernel(*args)

    return run


def _define(schema: str, kernel: Any, fake: Any, autograd: Any = None) -> None:
    """Define an operator.

    Every kernel does more than compute results, such as communication or leases, so none may be part of a CUDA graph.
    """
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, kernel if autograd is not None else _outside_autograd(kernel), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    if autograd is not None:
        _library.impl(name, autograd, "Autograd")  # type: ignore[no-untyped-call]
    if fake is not None:
        torch.library.register_fake(f"composable_shard::{name}", fake, lib=_library)


def _token(*_: object) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")  # not the default device, because the host reads it


def _nothing(*_: object) -> None:
    return None


_define(
    "unshard(Tensor[] shards, Tensor? tag, str key, int fate, bool again, float? factor, bool only_sums) -> Tensor[]",
    _without_gradients,
    None,
    autograd=_with_gradients,
)
for _name in ("all_gather_into_tensor", "copy_weights"):
    _define(f"{_name}(Tensor[] shards, Tensor anchor, str key, bool with_gradients) -> Tensor", _launch_gather, _token)
_define(
    "wait_weights(Tensor token, Tensor[] shards, Tensor anchor, str key) -> Tensor[]",
    _wait_weights,
    lambda token, shards, anchor, key: [*_layouts[key].room_for_weights(shards), token.new_empty(0)],
)
for _name in ("reduce_scatter_tensor", "all_reduce", "copy_gradients"):
    _define(
        f"{_name}(Tensor[] gradients, Tensor anchor, str key, int[] indices, int[] wanted, bool takes, float? factor, "
        "bool only_sums) -> Tensor",
        _launch_reduction,
        _token,
    )
_define("all_reduce.scattered(Tensor token, Tensor anchor) -> Tensor", _go_on, _token)
_define(
    "wait_gradients(Tensor token, Tensor anchor, str key, int[] wanted, int[] missing, str dtypes) -> Tensor[]",
    _wait_gradients,
    _room_for_gradients,
)
_define("keep(Tensor[] gradients, Tensor anchor, int[] indices, int count) -> ()", _keep, _nothing)
_define("settle(Tensor[] pieces, Tensor marks, Tensor anchor, int[] indices) -> ()", _settle, _nothing)
_define("hand_over(Tensor[] pieces, Tensor anchor, int[] indices, bool complete, str why) -> ()", _hand_over, _nothing)
_define("touch(Tensor mark, Tensor gradient) -> ()", _nothing, _nothing)
for _name in ("keep", "settle", "hand_over", "touch"):
    has_side_effect(getattr(torch.ops.composable_shard, _name).default)
