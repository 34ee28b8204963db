"""A group's gather and reduction as operators of a graph.

Dynamo records one call of `unshard`. AOTAutograd traces through its autograd kernel, down to functional collectives,
which stay visible in the graph. An operator takes no Python object: what it must know of a group is a frozen `Layout`,
found by a digest of all that decides the graph, so that equal groups share compiled code and a compile cache never
hands out code that was made for another layout.

The other operators are for what cannot be decided when a graph is made. They stand in the graph as they are, and act on
the group when it runs, which they find by the memory of one of its shards, the `anchor`:

    keep     keep unsharded gradients for a later backward (gradient sync is off)
    take     add the kept ones to these
    settle   a parameter got no gradient on this rank; if another rank had one, add the reduced one to `.grad`

and `touch` does nothing: it needs a weight in backward, so that this rank gathers again whether or not its own graph
has another need of it. Ranks that use different parameters of a group then still issue the same collectives.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .._comm import copies, functional
from .._comm.copies import Gradients
from .._comm.functional import Axis
from .._plan.layout import BucketLayout, bucket_layout
from .._policies import Options, division
from .._torch import compiler
from .._torch.core import has_side_effect

_CODE = hashlib.sha256(
    b"".join(Path(f).read_bytes() for f in (__file__, copies.__file__, functional.__file__, compiler.__file__))
).hexdigest()
ByIndex = Mapping[int, torch.Tensor]  # index of a parameter
REDUCE, KEEP, TAKE = 0, 1, 2  # what becomes of the gradients; the last: reduce them with those that were kept


@dataclass(frozen=True)
class Layout:
    """What a graph must know of a group.

    Attributes:
        shapes: the unsharded shapes.
        dims: along which dim each is cut.
        keeps: whether each is gathered in the dtype in which it is stored.
        rank: this rank's place on the shard axis.
        shard, replicate: the axes, None where they have one rank.
        options: of which only the dtypes count here.
    """

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    keeps: tuple[bool, ...]
    rank: int
    shard: Axis | None
    replicate: Axis | None
    options: Options

    @property
    def world(self) -> int:
        """Number of pieces of each parameter."""
        return self.shard.size if self.shard is not None else 1

    def register(self) -> str:
        """Make it known to the operators; returns its key."""
        _layouts[self.key] = self
        return self.key

    @functools.cached_property
    def key(self) -> str:
        """A digest of all that decides the graph: equal for equal layouts, and in every process."""
        return hashlib.sha256(f"{_CODE} {self!r}".encode()).hexdigest()[:16]

    def bucket(self, members: Sequence[int]) -> BucketLayout:
        """Where some of the parameters, by index, lie in a bucket."""
        return bucket_layout([self.shapes[i] for i in members], self.world, dims=[self.dims[i] for i in members])

    # ---- what is traced

    def gather(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All-gather, one collective per dtype."""
        out: dict[int, torch.Tensor] = {}
        stored = [shard.dtype for shard in shards]
        dtypes = [d if keep else self.options.compute_dtype(d) for d, keep in zip(stored, self.keeps, strict=True)]
        for dtype, members in _by_dtype(enumerate(dtypes)).items():
            flat = torch.ops.composable_shard.pack([shards[i] for i in members], self.key, members, dtype)
            if self.shard is not None:
                flat = functional.all_gather(flat, self.shard)
            out.update(zip(members, torch.ops.composable_shard.unpack(flat, self.key, members), strict=True))
        return [out[i] for i in range(len(shards))]

    def reduced(self, flat: torch.Tensor, factor: float | None, only_sums: bool) -> torch.Tensor:
        """Reduce-scatter, and all-reduce over replicas; the options are `divide_factor` and `only_sums`."""
        axes = [(axis.size, axis.averages) for axis in (self.shard, self.replicate) if axis is not None]
        mean, before, after = division(factor, only_sums, flat.dtype, axes)
        flat = flat / before if before != 1 else flat
        if self.shard is not None:
            flat = functional.reduce_scatter(flat, self.shard, mean and self.shard.averages)
        if self.replicate is not None:
            flat = functional.all_reduce(flat, self.replicate, mean and self.replicate.averages)
        return flat / after if after != 1 else flat


_layouts: dict[str, Layout] = {}


def _by_dtype(dtypes: Iterable[tuple[int, torch.dtype]]) -> dict[torch.dtype, list[int]]:
    """Indices of parameters by the dtype of their bucket."""
    members: dict[torch.dtype, list[int]] = {}
    for index, dtype in dtypes:
        members.setdefault(dtype, []).append(index)
    return members


def _names(dtypes: Iterable[torch.dtype]) -> str:
    """Dtypes as operators take them."""
    return " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _dtypes(names: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names.split()]


@dataclass(frozen=True)
class _Use:
    """One use of a group: what its backward must know.

    Attributes:
        layout: of the group.
        fate: what becomes of the gradients: `REDUCE`, `KEEP` or `TAKE`.
        factor, only_sums: the options `divide_factor` and `only_sums`.
        stored: by index, the dtypes of the parameters that want a gradient.
    """

    layout: Layout
    fate: int
    factor: float | None
    only_sums: bool
    stored: Mapping[int, torch.dtype]

    def totals(self, given: ByIndex, anchor: torch.Tensor) -> tuple[ByIndex, ByIndex]:
        """The gradients to reduce; and 1 or 0 where it is known only when the graph runs whether one exists."""
        if self.fate != TAKE:
            return given, {}
        wanted = list(self.stored)
        names = _names(map(self.layout.options.reduce_dtype, self.stored.values()))
        *totals, marks = torch.ops.composable_shard.take(
            list(given.values()), anchor, list(given), wanted, self.layout.key, names
        )
        return dict(zip(wanted, totals, strict=True)), {i: marks[position] for position, i in enumerate(wanted)}

    def reduce(self, given: ByIndex, anchor: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Reduce, one collective per dtype; zeros stand for missing gradients.

        Returns:
            by index, this rank's piece, and how much of the gradient exists, over all ranks (positive if any does).
        """
        layout, ops = self.layout, torch.ops.composable_shard
        totals, used = self.totals(given, anchor)
        like = next(iter(totals.values()))
        reduced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        dtypes = [(i, layout.options.reduce_dtype(dtype)) for i, dtype in self.stored.items()]
        for dtype, members in _by_dtype(dtypes).items():
            bucket = ops.pack_gradients(
                list(map(totals.get, members)), list(map(used.get, members)), like, layout.key, members, dtype
            )
            own = layout.reduced(bucket.view(-1), self.factor, self.only_sums)
            names = _names(self.stored[i] for i in members)
            *pieces, existing = ops.unpack_pieces(own, layout.key, members, names)
            reduced |= {i: (pieces[position], existing[position]) for position, i in enumerate(members)}
        return reduced


class _Unshard(torch.autograd.Function):
    """The operator's autograd kernel."""

    @staticmethod
    def forward(
        ctx: Any, how: tuple[str, int, bool, float | None, bool], anchor: torch.Tensor, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        key, fate, again, factor, only_sums = how
        stored = {i: shard.dtype for i, shard in enumerate(shards) if shard.requires_grad}
        ctx.use = _Use(_layouts[key], fate, factor, only_sums, stored)
        ctx.set_materialize_grads(False)
        outputs = tuple(_layouts[key].gather(shards))
        ctx.save_for_backward(anchor, *({out.dtype: out for out in outputs}.values() if again else ()))
        ctx.mark_non_differentiable(*[out for i, out in enumerate(outputs) if i not in stored])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        use, (anchor, *weights), ops = ctx.use, ctx.saved_tensors, torch.ops.composable_shard
        given = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        for weight in weights:
            ops.touch(weight, next(iter(given.values())))
        if use.fate == KEEP:
            ops.keep(list(given.values()), anchor, list(given))
            return (None,) * (2 + len(gradients))
        reduced = use.reduce(given, anchor)
        missing = sorted(reduced.keys() - given.keys())
        if missing:
            pieces, existing = zip(*(reduced[i] for i in missing), strict=True)
            ops.settle(list(pieces), list(existing), anchor, missing)
        return (None, None, *(reduced[i][0] if i in given else None for i in range(len(gradients))))


def _anchor(shards: Sequence[torch.Tensor], tag: torch.Tensor | None) -> torch.Tensor:
    return tag if tag is not None else next(shard for shard in shards if shard.numel())


def _with_gradients(shards: list[torch.Tensor], tag: torch.Tensor | None, *how: Any) -> list[torch.Tensor]:
    return list(_Unshard.apply(how, _anchor(shards, tag).detach(), *shards))  # type: ignore[no-untyped-call]


def _without_gradients(shards: list[torch.Tensor], tag: torch.Tensor | None, key: str, *how: Any) -> list[torch.Tensor]:
    return _layouts[key].gather(shards)


# ---- what acts on a group when the graph runs


class Owner(Protocol):
    """A group, as the operators find it."""

    def anchors(self) -> list[int]:
        """Addresses of the memory that stands for it."""

    def keep(self, gradients: Gradients) -> None:
        """Keep these for a later backward."""

    def take(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """These and those that were kept, added; the latter are kept no longer."""

    def settle(self, index: int, piece: torch.Tensor) -> None:
        """Add a reduced gradient to `.grad`."""

    @property
    def zeros_for_unused(self) -> bool:
        """Whether a parameter that got no gradient on any rank gets zeros."""


owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_by_address: dict[int, weakref.ref[Owner]] = {}


def _owner_of(anchor: torch.Tensor) -> Owner | None:
    """The group whose memory this is; None if it is gone."""
    address = anchor.data_ptr()
    if (owner := _known_owner(address)) is None:
        _by_address.clear()
        _by_address.update((start, weakref.ref(each)) for each in owners for start in each.anchors())
        owner = _known_owner(address)
    return owner


def _known_owner(address: int) -> Owner | None:
    owner = _by_address[address]() if address in _by_address else None
    return owner if owner is not None and address in owner.anchors() else None


def _spread(gradients: Sequence[torch.Tensor], indices: Sequence[int]) -> list[torch.Tensor | None]:
    out: list[torch.Tensor | None] = [None] * (max(indices, default=-1) + 1)
    for index, gradient in zip(indices, gradients, strict=True):
        out[index] = gradient
    return out


def _keep(gradients: list[torch.Tensor], anchor: torch.Tensor, indices: list[int]) -> None:
    owner = _owner_of(anchor)
    if owner is not None:
        with torch.no_grad():  # the graph may reuse the memory of its own tensors
            owner.keep(_spread([gradient.clone() for gradient in gradients], indices))


def _take(
    gradients: list[torch.Tensor], anchor: torch.Tensor, indices: list[int], wanted: list[int], key: str, dtypes: str
) -> list[torch.Tensor]:
    owner = _owner_of(anchor)
    given = _spread(gradients, indices) + [None] * (wanted[-1] - max(indices, default=-1))
    with torch.no_grad():
        totals = given if owner is None else owner.take(given)
        fresh = _room_for_totals(gradients, anchor, indices, wanted, key, dtypes)
        for position, index in enumerate(wanted):
            total = totals[index]
            _ = fresh[position].zero_() if total is None else fresh[position].copy_(total)
            fresh[-1][position] = total is not None
    return fresh


def _room_for_totals(
    gradients: list[torch.Tensor], anchor: torch.Tensor, indices: list[int], wanted: list[int], key: str, dtypes: str
) -> list[torch.Tensor]:
    """Tensors for the totals of the wanted gradients, and one for which of them exist."""
    pairs = zip(wanted, _dtypes(dtypes), strict=True)
    out = [anchor.new_empty(_layouts[key].shapes[i], dtype=dtype) for i, dtype in pairs]
    return [*out, anchor.new_empty(len(wanted), dtype=torch.float32)]


def _settle(pieces: list[torch.Tensor], used: list[torch.Tensor], anchor: torch.Tensor, indices: list[int]) -> None:
    owner = _owner_of(anchor)
    if owner is not None:
        with torch.no_grad():
            for piece, mark, index in zip(pieces, used, indices, strict=True):
                if owner.zeros_for_unused or mark.item() > 0:
                    owner.settle(index, piece.clone())


def _bucket(key: str, members: Sequence[int]) -> BucketLayout:
    return _layouts[key].bucket(members)


def _pieces(key: str, members: Sequence[int], dtypes: str) -> tuple[BucketLayout, int, list[torch.dtype]]:
    return _bucket(key, members), _layouts[key].rank, _dtypes(dtypes)


_library = torch.library.Library("composable_shard", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, kernels: dict[str, Any], fake: Any = None) -> None:
    _library.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    for key, kernel in kernels.items():
        _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    if fake is not None:
        torch.library.register_fake(f"composable_shard::{name}", fake, lib=_library)


_define(
    "unshard(Tensor[] shards, Tensor? tag, str key, int fate, bool again, float? factor, bool only_sums) -> Tensor[]",
    {"Autograd": _with_gradients, "CompositeExplicitAutograd": _without_gradients},
)
_define(
    "pack(Tensor[] shards, str key, int[] members, ScalarType dtype) -> Tensor",
    {
        "CompositeExplicitAutograd": lambda shards, key, at, dtype: copies.pack(
            shards, _bucket(key, at), _layouts[key].rank, dtype
        )
    },
    lambda shards, key, at, dtype: shards[0].new_empty(_bucket(key, at).numel, dtype=dtype),
)
_define(
    "unpack(Tensor bucket, str key, int[] members) -> Tensor[]",
    {"CompositeExplicitAutograd": lambda bucket, key, at: copies.unpack(bucket, _bucket(key, at))},
    lambda bucket, key, at: copies.room_for_wholes(bucket, _bucket(key, at)),
)
_define(
    "pack_gradients(Tensor?[] gradients, Tensor?[] used, Tensor like, str key, int[] members, ScalarType dtype)"
    " -> Tensor",
    {
        "CompositeExplicitAutograd": lambda g, used, like, key, at, dtype: copies.pack_gradients(
            g, used, like, _bucket(key, at), dtype
        )
    },
    lambda g, used, like, key, at, dtype: copies.room_for_bucket(like, _bucket(key, at), dtype),
)
_define(
    "unpack_pieces(Tensor chunk, str key, int[] members, str dtypes) -> Tensor[]",
    {"CompositeExplicitAutograd": lambda chunk, *how: copies.unpack_pieces(chunk, *_pieces(*how))},
    lambda chunk, *how: copies.room_for_pieces(chunk, *_pieces(*how)),
)
_define(
    "keep(Tensor[] gradients, Tensor anchor, int[] indices) -> ()",
    {"CompositeExplicitAutograd": _keep},
    lambda gradients, anchor, indices: None,
)
_define(
    "take(Tensor[] gradients, Tensor anchor, int[] indices, int[] wanted, str key, str dtypes) -> Tensor[]",
    {"CompositeExplicitAutograd": _take},
    _room_for_totals,
)
_define(
    "settle(Tensor[] pieces, Tensor[] used, Tensor anchor, int[] indices) -> ()",
    {"CompositeExplicitAutograd": _settle},
    lambda pieces, used, anchor, indices: None,
)
_define(
    "touch(Tensor weight, Tensor gradient) -> ()",
    {"CompositeExplicitAutograd": lambda weight, gradient: None},
    lambda weight, gradient: None,
)
for _name in ("keep", "take", "settle", "touch"):
    has_side_effect(getattr(torch.ops.composable_shard, _name).default)
