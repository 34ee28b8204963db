"""What one reduction moves: gradients of one dtype, and for each parameter whether this rank had one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._comm.collectives import Transports
from .._comm.copies import GradientCopies, Parts
from .._comm.lanes import Job, Lane, Steps
from .._comm.mesh import MeshInfo
from .._memory.pool import BufferPool
from .._memory.slots import Slot
from .._plan.layout import reduce_layout
from .._policies import AllReduceHook, Comms, Options, division
from .._torch.core import has_memory, plainly
from .accumulation import Partial
from .param import ShardedParam


class Reduced:
    """The result of a reduction, which is cut when somebody looks: many in a row take half the time of each alone.

    Args:
        copies: that cut it.
        out: this rank's part of the sum.
        divisor: what is still to divide it by.
        others: the same in other dtypes in which members are stored.

    Attributes:
        is_uncut: whether nobody has looked.
    """

    __slots__ = ("_copies", "_divisor", "_others", "_out", "_parts", "is_uncut")

    def __init__(
        self,
        copies: GradientCopies,
        out: torch.Tensor,
        divisor: torch.Tensor | None = None,
        others: Mapping[torch.dtype, torch.Tensor] | None = None,
    ) -> None:
        self._copies = copies
        self._out: torch.Tensor | None = out
        self._divisor = divisor
        self._others = others
        self._parts: Parts | None = None
        self.is_uncut = True

    def parts(self) -> Parts:
        """The pieces, and who had any."""
        if self._parts is None:
            assert self._out is not None
            if self._divisor is not None:
                torch.div(self._out, self._divisor, out=self._out)  # two thirds of the host's time of `div_`
            self._parts = self._copies.cut(self._out, self._others or {})
            self._out = self._others = None
            self.is_uncut = False
        return self._parts


def _on_stream(comms: Comms) -> AllReduceHook | None:
    """The user's hook, to be called on the stream of reductions."""
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


def _divisor(factor: float) -> torch.Tensor | None:
    """A tensor of no dims, on the CPU, divides to the same bits as a number does, at a quarter of the host's time."""
    return torch.tensor(factor, dtype=torch.float64) if factor != 1 else None


class ReduceBucket:
    """Gradients of one group that are reduced in one dtype. Frozen parameters are not members.

    Attributes:
        indices: of its members, in the group.
        requests: what a reduction asks the pool for.
        nbytes: of all of that.
    """

    def __init__(
        self,
        members: Sequence[tuple[int, ShardedParam]],
        dtype: torch.dtype,
        info: MeshInfo,
        transports: Transports,
        options: Options,
        pool: BufferPool,
        lane: Lane,
        slots: Sequence[int] = (),
    ) -> None:
        self.dtype = dtype
        self._shard, self._replicate = transports.reduce, transports.replicate
        sizes = ((self._shard, info.shard_size), (self._replicate, info.replicate_size))
        axes = [(size, transport.averages) for transport, size in sizes if transport is not None]
        self._mean, before, after = division(options.divide_factor, options.only_sums, dtype, axes)
        self._divide_before, self._divide_after = _divisor(before), _divisor(after)
        shapes, dims = [p.shape for _, p in members], [p.dim for _, p in members]
        route = None if self._shard is None else self._shard.route
        self._layout = layout = reduce_layout(shapes, info.shard_size, dtype.itemsize, dims, route, slots)
        self.indices = [index for index, _ in members]
        self._first = self.indices == list(range(len(members)))
        stored = [param.dtype for _, param in members]
        self._copies = GradientCopies(layout.result, dtype, stored, info.shard_rank, info.device)
        self._others = {*stored} - {dtype}
        self._hook = _on_stream(options.comms)
        # Then a collective is all there is to a reduction, and the rest is done when its result is cut: by the host,
        # in one loop over many. On an accelerator the lane divides, beside what is computed.
        scatters = self._shard is not None and self._replicate is None and self._hook is None
        kept = not self._others and not info.offloads and (self._divide_after is None or not lane.streams)
        self._is_launched = scatters and kept
        name = members[0][1].fqn
        self.requests = [pool.request(f"reduction {name}", layout.nbytes)] if self._shard is not None else []
        if layout.scratch:
            self.requests.append(pool.request(f"scratch {name}", layout.scratch * dtype.itemsize))
        self.nbytes = sum(request.nbytes for request in self.requests)
        self._pool, self._lane, self._info = pool, lane, info
        self._seen: dict[Slot, tuple[torch.Tensor, torch.Tensor]] = {}

    def chosen(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Of the gradients of a group, those of the members."""
        if self._first and len(gradients) == len(self.indices):
            return gradients
        return [gradients[index] for index in self.indices]

    def start(
        self, gradients: Sequence[torch.Tensor | None], partial: Partial | None = None, whole: bool = True
    ) -> Job[Reduced]:
        """Begin to average `gradients`, unsharded and in the order of the members (None stands for zeros).

        Args:
            gradients: of this use, in the order of `indices`.
            partial: what earlier calls have left unfinished, by index; it joins these.
            whole: on a mesh of replicas, finish; else stop after the reduce-scatter.
        """
        # What outlives the step as `.grad` is allocated here, on the stream that will read it.
        numel, like = self._layout.numel, self._copies.ones
        out = like.new_empty(numel)
        others = {d: like.new_empty(numel, dtype=d) for d in self._others} if self._others else {}
        slots = list(map(self._pool.lease_for, self.requests))
        try:
            # Packed here, too: then nobody has to hold autograd's gradients until the collective is done.
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._pack(gradients, out, slots)
            else:
                self._pack(gradients, out, slots)
            after = [self._lane.mark()]
            for slot in slots[1:]:
                after += slot.free_after
            pool, bind = self._pool, functools.partial
            when_done = bind(pool.release, slots[0]) if len(slots) == 1 else bind(pool.release_all, slots)
            if self._is_launched and whole and not partial:
                assert self._shard is not None
                result = Reduced(self._copies, out, self._divide_after)
                return self._lane.launch(
                    self._shard.reduce_scatter, self._scattered(out, slots), after, result, when_done
                )
            steps = self._steps(partial, whole, out, others, slots)
            return self._lane.start(steps, after, (out, others, partial), when_done)
        except BaseException:
            self._pool.give_up(slots)
            raise

    def _pack(self, gradients: Sequence[torch.Tensor | None], out: torch.Tensor, slots: Sequence[Slot]) -> None:
        """Fill the bucket, or the result if there is nobody to reduce with over the shard axis."""
        if not slots:
            bucket, chunks = out, out.view(1, -1)
        else:
            for event in slots[0].free_after:
                event.wait()
            bucket, chunks = self._views_of(slots[0])
        self._copies.fill(chunks, gradients)
        if self._divide_before is not None:
            torch.div(bucket, self._divide_before, out=bucket)

    def _steps(
        self,
        partial: Partial | None,
        whole: bool,
        out: torch.Tensor,
        others: dict[torch.dtype, torch.Tensor],
        slots: list[Slot],
    ) -> Steps[Reduced]:
        if self._shard is not None:
            yield self._shard.reduce_scatter(*self._scattered(out, slots))
        if partial:
            self._add(partial, out)
        if not whole:
            return Reduced(self._copies, out)
        if self._replicate is not None:
            yield self._replicate.all_reduce(out, self._mean and self._replicate.averages)
        if self._divide_after is not None:
            torch.div(out, self._divide_after, out=out)
        if self._hook is not None:
            self._hook(out[: self._layout.result.numel])
        for converted in others.values():
            converted.copy_(out)
        theirs = {dtype: self._at_home(t) for dtype, t in others.items()}
        done = Reduced(self._copies, self._at_home(out), others=theirs)
        if others:
            done.parts()  # whoever takes the pieces alone lets `out` go
        return done

    def _scattered(self, out: torch.Tensor, slots: list[Slot]) -> tuple[Any, ...]:
        """What the reduce-scatter is given."""
        assert self._shard is not None
        scratch = self._scratch_in(slots[1]) if len(slots) > 1 else None
        return out, self._seen[slots[0]][0], scratch, self._mean and self._shard.averages

    def _add(self, partial: Partial, out: torch.Tensor) -> None:
        now = self._copies.cut(out, {})
        for place, index in enumerate(self.indices):
            if index in partial:
                piece, used = partial[index]
                now.pieces[place].add_(piece)
                now.used[place].add_(used)

    def _at_home(self, out: torch.Tensor) -> torch.Tensor:
        """The result where shards are kept; whoever finishes the job waits for the copy."""
        if not self._info.offloads:
            return out
        home = torch.empty(out.shape, dtype=out.dtype, device=self._info.home, pin_memory=self._info.pins)
        return home.copy_(out, non_blocking=self._info.pins)

    def _views_of(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """A slot as the bucket, flat and as (world, chunk)."""
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


@dataclass
class Reduction:
    """A reduction in flight.

    Attributes:
        jobs: one a bucket.
        missing: which parameters had no gradient on this rank.
        whole: whether it will be finished, so that its result can be added to `.grad`.
    """

    jobs: list[tuple[ReduceBucket, Job[Reduced]]]
    missing: list[int]
    whole: bool


class GroupReduced:
    """What the reduction of a group has given.

    Args:
        done: by bucket, with the indices of its members in the group.
        without: indices of members that have no gradient.

    Attributes:
        is_uncut: whether no part was looked at, so that the pieces will hold all the memory that this holds.
    """

    __slots__ = ("_done", "_without", "is_uncut")

    def __init__(self, done: Sequence[tuple[list[int], Reduced]], without: Sequence[int] = ()) -> None:
        self._done = done
        self._without = without
        self.is_uncut = all([reduced.is_uncut for _, reduced in done])  # noqa: C419  # once for most

    def pieces(self) -> dict[int, torch.Tensor]:
        """This rank's piece of each gradient that there is, by the index of the parameter."""
        found: dict[int, torch.Tensor] = {}
        for indices, reduced in self._done:
            found.update(zip(indices, reduced.parts().pieces, strict=True))
        for index in self._without:
            del found[index]
        return found


def unused(done: Sequence[tuple[list[int], Reduced]], asked: Sequence[int]) -> list[int]:
    """Of these parameters, those that had no gradient on any rank. An accelerator is waited for."""
    found: list[int] = []
    for indices, reduced in done:
        places = {index: place for place, index in enumerate(indices)}
        seen = [(index, reduced.parts().used[places[index]]) for index in asked if index in places]
        # Fake ones do not say what other ranks had: then this rank's own word counts.
        found += [index for index, mark in seen if not has_memory(mark) or mark.item() == 0]
    return found


def reduce_buckets(
    params: Sequence[ShardedParam],
    trains: Sequence[bool],
    info: MeshInfo,
    transports: Transports,
    options: Options,
    pool: BufferPool,
    lane: Lane,
    slots: Sequence[int],
) -> list[ReduceBucket]:
    """The buckets of a group's gradients, one for each dtype of reduction.

    Args:
        params: of the group.
        trains: which of them want gradients.
        info, transports, options, pool, lane: of the group.
        slots: bytes of the slots that its weights leave.
    """
    dtypes = [options.reduce_dtype(p.dtype) if t else None for p, t in zip(params, trains, strict=True)]
    members: dict[torch.dtype, list[tuple[int, ShardedParam]]] = {}
    for place, (param, dtype) in enumerate(zip(params, dtypes, strict=True)):
        if dtype is not None:
            members.setdefault(dtype, []).append((place, param))
    return [ReduceBucket(m, d, info, transports, options, pool, lane, slots) for d, m in members.items()]
