"""Reduce buckets: the gradients of one dtype that one reduction communicates, each with a mark.

A parameter's mark is 1 if this rank has a gradient for it, else 0. The marks are at the end of each rank's chunk and
are reduced with the gradients. So no other collective is needed to determine which parameters had a gradient on any
rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from .._comm.collectives import All, Transport, Transports
from .._comm.copies import GradientCopies, Parts
from .._comm.lanes import Awaitable, Events, Job, Steps, WhenDone
from .._comm.lowbit import between_nodes, compressed
from .._comm.mesh import MeshInfo
from .._memory.pool import BufferPool
from .._memory.slots import Slot
from .._plan.layout import ReduceLayout, reduce_layout
from .._policies import AllReduceHook, Comms, GradDtype, Options, division, reduce_dtypes
from .._torch.core import has_memory, plainly
from ..errors import ShardConfigStateError
from .accumulation import Partial
from .refresh import node_shapes
from .setup import ReduceSetup

_AS_IT_IS = contextlib.nullcontext()


class Reducible(Protocol):
    """The facts about a parameter that a reduction needs, for example a `ShardedParam`; the object is not held."""

    @property
    def fqn(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dim(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def grad_dtype(self) -> GradDtype: ...

    def sum_dtype(self, options: Options, /) -> torch.dtype: ...


class Reduced:
    """The result of a reduction, split into pieces only when `parts` is called.

    Splitting many results in a row takes half the time of splitting each when its reduction ends.

    Args:
        copies: the object that splits the result.
        out: this rank's chunk of the reduced bucket, with the marks.
        divisor: the divisor by which `out` must still be divided; None if there is no division.
        others: copies of `out` in the dtypes of `.grad` that are not the dtype of the reduction.
        marks: a copy of the marks on the host.

    Attributes:
        marks: the reduced marks on the host, valid once the host has waited for the job; None if not requested.
        is_uncut: whether `parts` was not called yet.
    """

    __slots__ = ("_copies", "_divisor", "_others", "_out", "_parts", "is_uncut", "marks")

    def __init__(
        self,
        copies: GradientCopies,
        out: torch.Tensor,
        divisor: torch.Tensor | None = None,
        others: Mapping[torch.dtype, torch.Tensor] | None = None,
        marks: torch.Tensor | None = None,
    ) -> None:
        self._copies = copies
        self.marks = marks
        self._out: torch.Tensor | None = out
        self._divisor = divisor
        self._others = others
        self._parts: Parts | None = None
        self.is_uncut = True

    def parts(self) -> Parts:
        """Return this rank's pieces of the gradients, and the reduced marks."""
        if self._parts is None:
            assert self._out is not None
            if self._divisor is not None:
                torch.div(self._out, self._divisor, out=self._out)  # takes two thirds of `div_`'s time on the host
            self._parts = self._copies.cut(self._out, self._others or {})
            self._out = self._others = None
            self.is_uncut = False
        return self._parts


def _on_stream(comms: Comms) -> AllReduceHook | None:
    """Wrap the user's all-reduce hook to run on the user's stream, if there is one, in order with reductions."""
    hook, stream = comms.all_reduce_hook, comms.hook_stream
    if hook is None or stream is None:
        return hook

    def call(reduced: torch.Tensor) -> None:
        ours = torch.accelerator.current_stream()
        stream.wait_stream(ours)
        with stream:
            hook(reduced)
        ours.wait_stream(stream)

    return call


def _division(
    dtype: torch.dtype, info: MeshInfo, transports: Transports, options: Options
) -> tuple[bool, torch.Tensor | None, torch.Tensor | None]:
    """Return whether the collectives average, and the divisors of gradients before and after them."""
    sizes = ((transports.reduce, info.shard_size), (transports.replicate, info.replicate_size))
    axes = [(size, transport.averages) for transport, size in sizes if transport is not None]
    mean, before, after = division(options.divide_factor, options.only_sums, dtype, axes)
    return mean, _divisor(before), _divisor(after)


def _divisor(factor: float) -> torch.Tensor | None:
    """Make a divisor as a 0-dim CPU tensor. Results are bitwise identical to a number's, in 1/4 of the host time."""
    return torch.tensor(factor, dtype=torch.float64) if factor != 1 else None


class _AllReduce:
    """The all-reduce over replicas, in place, of a chunk that the shard axis has reduced.

    Args:
        transport: communicates over the replicas.
        copies: splits the result into this rank's pieces.
    """

    def __init__(self, transport: Transport, copies: GradientCopies) -> None:
        self.transport, self.copies = transport, copies

    def room(self, node: torch.Tensor) -> torch.Tensor:
        """Return the memory of the result."""
        return node

    def start(self, out: torch.Tensor, _node: torch.Tensor, mean: bool) -> Awaitable:
        """Begin to sum `out` over the replicas, or to average it if asked and if the transport can."""
        return self.transport.all_reduce(out, mean and self.transport.averages)


class _OuterReduce:
    """The reduce-scatter over the outer axis, of the node's pieces that the inner axis has reduced (`outer_sharding`).

    Its buffers are allocated when it begins, outside of the pool: the pool's memory of the inner reduction is free by
    then, and gathers may use it while this one runs.

    Args:
        node: the layout of the inner reduction.
        dtype: the dtype of the reduction.
        kept: for each parameter, the dtype of `.grad`.
        setup: the mesh, transports and options.
        transport: communicates over the outer axis.
        name: the name of the first parameter.
        inner: splits the result of the inner reduction.

    Attributes:
        copies: copies gradients into its bucket, and splits the result into this rank's pieces.
        transport: as given, or one in fewer bits.
    """

    def __init__(
        self,
        node: ReduceLayout,
        dtype: torch.dtype,
        kept: Sequence[torch.dtype],
        setup: ReduceSetup,
        transport: Transport,
        name: str,
        inner: GradientCopies,
    ) -> None:
        info, comm = setup.info, setup.options.comm_policy
        params = node.result.params
        shapes, dims = node_shapes(params, info.shard_rank), [at.dim for at in params]
        wire = comm.wire("replicas", dtype)
        self._layout = layout = reduce_layout(
            shapes, info.replicate_size, dtype.itemsize, dims, transport.route, (), None, wire
        )
        self.transport = between_nodes(transport, info, layout, setup.rounding, name)
        self._inner = inner
        self.copies = GradientCopies(layout, dtype, kept, info.outer_rank, info.device, setup.lane.streams)

    def room(self, node: torch.Tensor) -> torch.Tensor:
        """Allocate the memory of the result."""
        return node.new_empty(self._layout.numel)

    def start(self, out: torch.Tensor, node: torch.Tensor, mean: bool) -> Awaitable:
        """Begin to reduce the result of the inner reduction.

        Args:
            out: the result (`room`).
            node: the result of the inner reduction.
            mean: whether to average if the transport can.
        """
        pieces, used = self._inner.cut(node, {})
        world = self._layout.result.world
        bucket = out.new_empty(world * self._layout.numel)
        self.copies.fill_again(bucket.view(world, -1), pieces, used)
        scratch = out.new_empty(self._layout.scratch) if self._layout.scratch else None
        handle = self.transport.reduce_scatter(out, bucket, scratch, mean and self.transport.averages)
        return All([handle], held=(bucket, scratch))


class ReduceBucket:
    """Gradients of one group that are reduced in one dtype.

    Frozen parameters are not members, unless they required gradients when some were accumulated
    (`AccumulatedGradients.wanted`).

    Args:
        indices: the members' indices in the group.
        params: the members.
        dtype: the dtype of the reduction.
        setup: the meshes, transports, memory and options.

    Attributes:
        indices: as given.
        requests: the pool's requests of a reduction: for the bucket, and for scratch memory if the transport needs it.
        nbytes: bytes of all requests.
    """

    def __init__(
        self,
        indices: list[int],
        params: Sequence[Reducible],
        dtype: torch.dtype,
        setup: ReduceSetup,
    ) -> None:
        info, transports, options, pool, lane = setup.info, setup.transports, setup.options, setup.pool, setup.lane
        self.indices = indices
        self.dtype = dtype
        shapes, dims, rows = ([getattr(p, name) for p in params] for name in ("shape", "dim", "rows"))
        route = None if transports.reduce is None else transports.reduce.route
        wire = options.comm_policy.wire("reduce", dtype)
        self._layout = layout = reduce_layout(
            shapes, info.shard_size, dtype.itemsize, dims, route, setup.slots, rows, wire
        )
        transports = compressed(transports, info, layout, options.comm_policy, dtype, setup.rounding, params[0].fqn)
        self._has_all = indices == list(range(len(indices)))
        of_grads = [param.grad_dtype.kept(param.dtype, dtype) for param in params]
        self._copies = GradientCopies(layout, dtype, of_grads, info.shard_rank, info.device, lane.streams)
        self._shard = transports.reduce
        self._second: _AllReduce | _OuterReduce | None = None
        if transports.replicate is not None:
            what = layout, dtype, of_grads, setup, transports.replicate, params[0].fqn, self._copies
            self._second = _OuterReduce(*what) if info.shards_outer else _AllReduce(transports.replicate, self._copies)
            transports = replace(transports, replicate=self._second.transport)
        self._mean, self._divide_before, self._divide_after = _division(dtype, info, transports, options)
        self._others = {*of_grads} - {dtype}
        self._hook = _on_stream(options.comms)
        # If the reduce-scatter is the only collective (`scatters`), and nothing follows it on the lane (`kept`), it is
        # launched without the machinery for several steps. A division after it needs no step on a CPU, which divides
        # when it splits the result. On an accelerator it is a step, which runs on the lane's stream, concurrently with
        # compute.
        scatters = self._shard is not None and self._second is None and self._hook is None
        kept = not self._others and not info.offloads and (self._divide_after is None or not lane.streams)
        self._is_launched = scatters and kept
        # The all-reduce over replicas runs concurrently with the reduce-scatters that follow this one.
        self._is_apart = lane.streams and self._shard is not None and self._second is not None
        whole = layout.nbytes if self._shard is not None else 0
        wanted = (("reduction", whole), ("scratch", layout.scratch * dtype.itemsize))
        self.requests = [pool.request(f"{purpose} {params[0].fqn}", nbytes) for purpose, nbytes in wanted if nbytes]
        self.nbytes = sum(request.nbytes for request in self.requests)
        self._pool, self._lane, self._info = pool, lane, info
        self._seen: dict[Slot, tuple[torch.Tensor, torch.Tensor]] = {}

    def start(
        self,
        gradients: Sequence[torch.Tensor | None],
        partial: Partial | None = None,
        whole: bool = True,
        asks: bool = False,
        frees: bool = False,
    ) -> Job[Reduced]:
        """Begin to average unsharded gradients over the ranks; `free_queued` must follow.

        Args:
            gradients: the gradients of all parameters of the group; None counts as zeros.
            partial: pieces, by index, of earlier reductions that stopped after the reduce-scatter; they are added.
            whole: False to stop after the reduce-scatter, without the all-reduce over replicas.
            asks: whether to copy the marks to the host.
            frees: whether its memory is to be released as soon as it is queued, by `free_queued`; only on a stream.
                Otherwise it stays leased until the wait for it.
        """
        # The result outlives the step as `.grad`, so it is allocated here, on the stream that will read it. The lane's
        # stream writes it. That is safe: the lane waits for this stream first, and the job holds the result until this
        # stream has waited for the lane.
        numel, like = self._layout.numel, self._copies.ones
        out = like.new_empty(numel)
        slots: list[Slot] = []  # filled below; `when_done` has the list itself
        when_done = functools.partial(self._pool.finish_queued if frees else self._pool.release_all, slots)
        try:
            for request in self.requests:
                slots.append(self._pool.lease(request))
            # Packed here, on the current stream, so autograd's gradients can be freed before the collective is done.
            with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
                self._pack(gradients, out, slots)
            job, scattered = self._queued(out, slots, partial, whole, asks, when_done)
            if frees:
                (after,) = scattered.end_events()
                job.occupy([(slot, after) for slot in slots])
            return job
        except BaseException:
            self._pool.release_failed(slots)
            raise

    def _queued(
        self,
        out: torch.Tensor,
        slots: list[Slot],
        partial: Partial | None,
        whole: bool,
        asks: bool,
        when_done: WhenDone,
    ) -> tuple[Job[Reduced], Job[Any]]:
        """Queue the reduction; returns its job, and the job after which its slots are no longer used."""
        # The lane waits for the packing, and for earlier uses of scratch memory. `_pack` has made the current stream
        # wait for earlier uses of the bucket's slot.
        after = [self._lane.record_current_stream()]
        for slot in slots[1:]:
            after += slot.free_after
        if self._is_launched and whole and not (partial or asks):
            assert self._shard is not None
            result, arguments = Reduced(self._copies, out, self._divide_after), self._scattered(out, slots)
            job = self._lane.launch(self._shard.reduce_scatter, arguments, after, result, when_done)
            return job, job
        # The result is allocated here, like `out` in `start`: on the stream that will read it.
        node, out = out, self._room(out, whole)
        others = {dtype: torch.empty_like(out, dtype=dtype) for dtype in self._others}
        held, steps = (node, out, others, partial), self._steps(partial, whole, node, out, others, asks)
        if whole and self._is_apart:
            return self._start_apart(node, slots, after, steps, held, when_done)
        job = self._lane.start(self._after_scatter(node, slots, steps), after, held, when_done)
        return job, job

    def _start_apart(
        self,
        out: torch.Tensor,
        slots: list[Slot],
        after: Events,
        steps: Steps[Reduced],
        held: tuple[Any, ...],
        when_done: WhenDone,
    ) -> tuple[Job[Reduced], Job[Any]]:
        """Queue the reduce-scatter on the lane, and the following steps on its second lane."""
        scattered = self._lane.start(self._scatter(out, slots), after, out)
        try:
            job = self._lane.second().start(steps, scattered.end_events(), (*held, scattered), when_done)
        except BaseException:
            scattered.finish()
            raise
        return job, scattered

    def _pack(self, gradients: Sequence[torch.Tensor | None], out: torch.Tensor, slots: Sequence[Slot]) -> None:
        """Copy the gradients into the bucket, or directly into the result if the shard axis has only this rank."""
        if not slots:
            bucket, chunks = out, out.view(1, -1)
        else:
            slots[0].wait_until_free()
            bucket, chunks = self._views_of(slots[0])
        if not self._has_all or len(gradients) != len(self.indices):
            gradients = [gradients[index] for index in self.indices]
        self._copies.fill(chunks, gradients)
        if self._divide_before is not None:
            torch.div(bucket, self._divide_before, out=bucket)

    def _steps(
        self,
        partial: Partial | None,
        whole: bool,
        node: torch.Tensor,
        out: torch.Tensor,
        others: dict[torch.dtype, torch.Tensor],
        asks: bool,
    ) -> Steps[Reduced]:
        """Run the steps after the reduce-scatter.

        Args:
            partial, whole, asks: as for `start`.
            node: the result of the reduce-scatter.
            out: the result of all steps: `node` itself, except with an outer axis that shards as well.
            others: copies of `out` in other dtypes.
        """
        if partial:
            self._add(partial, node)
        if not whole:
            return Reduced(self._copies, node)
        if self._second is not None:
            yield self._second.start(out, node, self._mean)
        if self._divide_after is not None:
            torch.div(out, self._divide_after, out=out)
        if self._hook is not None:
            self._hook(out[: self._result_copies.numel])
        return self._result(out, others, asks)

    def _result(self, out: torch.Tensor, others: dict[torch.dtype, torch.Tensor], asks: bool) -> Reduced:
        """Make the result for `.grad`: in its dtypes, and offloaded if the parameters are."""
        converted = {dtype: self._at_home(other.copy_(out)) for dtype, other in others.items()}
        copies = self._result_copies
        marks = copies.marks_on_host(out) if asks else None
        done = Reduced(copies, self._at_home(out), others=converted, marks=marks)
        if others:
            done.parts()  # split now, so that `out` can be freed if no piece has its dtype
        return done

    def _room(self, node: torch.Tensor, whole: bool) -> torch.Tensor:
        """Return the memory of the result of all steps, or with `whole=False` of the reduce-scatter, which is given."""
        return node if self._second is None or not whole else self._second.room(node)

    @property
    def _result_copies(self) -> GradientCopies:
        """Splits the result of all steps into this rank's pieces."""
        return self._copies if self._second is None else self._second.copies

    def _scatter(self, out: torch.Tensor, slots: list[Slot]) -> Steps[None]:
        if self._shard is not None:
            yield self._shard.reduce_scatter(*self._scattered(out, slots))

    def _after_scatter(self, out: torch.Tensor, slots: list[Slot], steps: Steps[Reduced]) -> Steps[Reduced]:
        yield from self._scatter(out, slots)
        return (yield from steps)

    def _scattered(self, out: torch.Tensor, slots: list[Slot]) -> tuple[Any, ...]:
        """Return the arguments of the reduce-scatter."""
        assert self._shard is not None
        scratch = self._scratch_in(slots[1]) if len(slots) > 1 else None
        return out, self._seen[slots[0]][0], scratch, self._mean and self._shard.averages

    def _add(self, partial: Partial, out: torch.Tensor) -> None:
        now = self._copies.cut(out, {})
        for position, index in enumerate(self.indices):
            if index in partial:
                piece, used = partial[index]
                now.pieces[position].add_(piece)
                now.used[position].add_(used)

    def _at_home(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the result to the device where shards are stored; the copy may run until the job is finished."""
        if not self._info.offloads:
            return out
        home = torch.empty(out.shape, dtype=out.dtype, device=self._info.home, pin_memory=self._info.pins)
        return home.copy_(out, non_blocking=self._info.pins)

    def _views_of(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """View a slot as the bucket, flat and as (world, chunk)."""
        views = self._seen.get(slot)
        if views is None:
            with plainly():
                world = self._layout.result.world
                flat = slot.typed(self.dtype, written=True)[: world * self._layout.numel]
                views = self._seen[slot] = (flat, flat.view(world, -1))
        return views

    def _scratch_in(self, slot: Slot) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return slot.typed(self.dtype, written=True)[: self._layout.scratch]


def free_queued(pool: BufferPool, jobs: Iterable[tuple[ReduceBucket, Job[Reduced]]]) -> int:
    """Release, on a stream, the memory of these reductions for work queued after them, such as the next gather.

    The slots of all reductions are released with one event, that of the last reduction: it is queued after the others
    on the same lane. A plan also counts the memory as free at the end of the last reduction.

    Returns:
        the size of this memory in bytes.
    """
    leased = [each for _, job in jobs for each in job.occupied]
    if not leased:
        return 0
    for slot, _ in leased:
        pool.release_queued(slot, leased[-1][1])
    return sum(slot.nbytes for slot, _ in leased)


@dataclass
class Reduction:
    """A reduction of a group in flight.

    Attributes:
        jobs: the job of each bucket.
        asked: indices of parameters without a gradient on this rank whose `.grad` stays None if no rank has one.
        whole: whether it includes the all-reduce over replicas, if any, so that its result is added to `.grad`.
        queued_bytes: bytes of the pool that were leased while it was being queued, and are released already
            (`free_queued`).
        leased_bytes: bytes of the pool that stay leased until the wait for it.
        captured: whether it is captured in a CUDA graph, so that the host cannot read a result.
    """

    jobs: list[tuple[ReduceBucket, Job[Reduced]]]
    asked: list[int]
    whole: bool
    queued_bytes: int
    leased_bytes: int
    captured: bool = False


# By the parameters of a group that had no gradient on this rank: those that had none on any rank, at the last reduction
# that was not captured.
UnusedBefore = dict[tuple[int, ...], list[int]]
UNUSED_ELSEWHERE = (
    "composable_shard: a captured step found that other ranks have a gradient for other parameters than in the last "
    "eager step. .grad of the parameters that no rank uses is decided by the eager step; run it with the same code on "
    "all ranks, right before the capture"
)


class GroupReduced:
    """The reduced gradients of a group.

    Args:
        done: the result of each bucket, with the indices of its members in the group.
        asked: indices of parameters that are left out if they had no gradient on any rank.
        jobs: those that the host must wait for before it reads a result.
        before: what earlier reductions have shown; updated.
        captured: whether the reduction is captured in a CUDA graph. Then `before` decides, and an assertion in the
            graph compares it with the marks.

    Attributes:
        is_uncut: whether no result was split into pieces. Then each result is one tensor, the memory of all pieces,
            so keeping it for a while costs no memory. (Results of several dtypes are split earlier.)
        host_may_read: whether the host can read a result without waiting for an accelerator.
        unused: those of `asked` that had no gradient; valid once `pieces` was called.
    """

    __slots__ = ("_asked", "_before", "_captured", "_done", "_jobs", "host_may_read", "is_uncut", "unused")

    def __init__(
        self,
        done: Sequence[tuple[list[int], Reduced]],
        asked: Sequence[int],
        jobs: Sequence[Job[Reduced]],
        before: UnusedBefore,
        captured: bool,
    ) -> None:
        self._done, self._asked, self._jobs = done, asked, jobs
        self._before, self._captured = before, captured
        self.unused: list[int] = []
        self.host_may_read = not jobs
        self.is_uncut = True
        for _, reduced in done:
            self.is_uncut &= reduced.is_uncut

    def pieces(self) -> dict[int, torch.Tensor]:
        """Return this rank's pieces of the gradients, by the index of the parameter."""
        for job in self._jobs:
            job.wait_on_host()
        self._jobs, self.host_may_read = (), True
        by_index: dict[int, torch.Tensor] = {}
        for indices, reduced in self._done:
            by_index.update(zip(indices, reduced.parts().pieces, strict=True))
        if self._asked:
            self.unused = self._assumed() if self._captured else self._unused()
        for index in self.unused:
            del by_index[index]
        return by_index

    def _unused(self) -> list[int]:
        """Return those of `asked` that had no gradient on any rank."""
        unused: list[int] = []
        for indices, reduced in self._done:
            marks = reduced.parts().used if reduced.marks is None else reduced.marks
            # Fake marks have no values. A gradient that is missing here then counts as missing on all ranks.
            values = marks.tolist() if has_memory(marks) else [0.0] * len(indices)
            unused += [
                index for index, value in zip(indices, values, strict=True) if index in self._asked and not value
            ]
        self._before[tuple(self._asked)] = unused
        return unused

    def _assumed(self) -> list[int]:
        """Return those of `asked` that had no gradient on any rank before, and let the device check that again."""
        unused = self._before.get(tuple(self._asked))
        if unused is None:
            raise ShardConfigStateError(
                f"a captured step computes no gradient for {len(self._asked)} parameters of a group, unlike the eager "
                "steps before it; run one step eagerly before the capture, with the same code"
            )
        marks: dict[int, torch.Tensor] = {}
        for indices, reduced in self._done:
            marks.update(zip(indices, reduced.parts().used, strict=True))
        if absent := [marks[index] for index in unused]:
            torch._assert_async((torch.stack(absent) == 0).all(), UNUSED_ELSEWHERE)
        if present := [marks[index] for index in self._asked if index not in unused]:
            torch._assert_async((torch.stack(present) != 0).all(), UNUSED_ELSEWHERE)
        return unused


def reduce_buckets(
    params: Sequence[Reducible],
    wanted: Sequence[int],
    setup: ReduceSetup,
) -> list[ReduceBucket]:
    """Make the buckets of a group's gradients, one for each dtype of the reduction.

    Args:
        params: the group's parameters.
        wanted: indices of those whose gradients are reduced.
        setup: the meshes, transports, memory and options.
    """
    members: dict[torch.dtype, list[int]] = {}
    sums, asked = [params[i].sum_dtype(setup.options) for i in wanted], [params[i].grad_dtype for i in wanted]
    for index, dtype in zip(wanted, reduce_dtypes(sums, asked), strict=True):
        members.setdefault(dtype, []).append(index)
    return [ReduceBucket(indices, [params[i] for i in indices], dtype, setup) for dtype, indices in members.items()]
