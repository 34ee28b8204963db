"""Send the weights of a model to ranks of another layout, and switch these to the new version when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._plan.boxes import Box, whole_box
from .._torch.fingerprint import fingerprints
from ..checkpoint._full.tensors import Holdings
from ..errors import RankMismatchError, ShardConfigTypeError, ShardConfigValueError
from ._adapters import adapters_in, merged
from ._channel import Channel, Place, Progress, channel_of
from ._describe import Parts, layout
from ._layout import LocalTensor, WeightLayout
from ._moves import Mover
from ._plan import Plan, check_patterns, plan_transfer
from ._targets import Into, Target, target_of, tensors_of

MAX_BYTES = 256 << 20

BeforeSwitch = Callable[[int], None]
Described = nn.Module | WeightLayout | Mapping[str, LocalTensor]


@dataclass(frozen=True)
class Update:
    """The result of `send` and of `receive`.

    Attributes:
        version: version of the weights that all receivers have now.
        sent, received: bytes of weights that this rank has sent to, and received from, other ranks.
        skipped: bytes that this rank did not send or receive because they have not changed.
    """

    version: int
    sent: int
    received: int
    skipped: int


# ---- plans


def plan_together(
    group: dist.ProcessGroup | None = None,
    *,
    sends: nn.Module | WeightLayout | None = None,
    receives: Described | None = None,
    unused: Sequence[str] = (),
) -> Plan:
    """Make a plan from what each rank of a process group sends or receives. A collective: all its ranks must call this.

    Of a layout, only the tensors of this rank are used. Its ranks are global ranks, or in a group of `connect` the
    ranks of that group. If ``layout(model)`` has other ranks, renumber them with its method `on`.

    Args:
        group: process group of senders and receivers. Default: the default process group.
        sends: what this rank sends: a model; or ``layout(model, ...)``, for other names or an adapter.
        receives: what this rank receives: a model, such as one of Transformers with tensor parallelism; its tensors by
            name; or a layout, such as one of `tensor_parallel`.
        unused: as in `plan_transfer`.

    Returns:
        The plan, equal on all ranks.

    Raises:
        LayoutMismatchError: see `plan_transfer`. Raised on all ranks.
        ShardConfigValueError: a layout has no tensors of this rank, or ranks describe a tensor differently.
        ShardConfigTypeError: `sends` is neither a model nor a layout, or `unused` is a string.
        RankMismatchError: another rank has raised one of these errors.
        PeerLostError: another rank is lost, or has failed.
    """
    channel = channel_of(group)

    def describe() -> tuple[WeightLayout | None, WeightLayout | None, tuple[str, ...]]:
        if not isinstance(sends, nn.Module | WeightLayout | None):
            raise ShardConfigTypeError(f"sends: is a {type(sends).__name__}; pass a model or a layout")
        check_patterns(unused)
        return _of_rank(sends, channel.rank), _of_rank(receives, channel.rank), tuple(unused)

    said = channel.together("plan how to send weights", describe)
    source = WeightLayout.merged(own for own, _, _ in said if own is not None)
    target = WeightLayout.merged(own for _, own, _ in said if own is not None)
    plan = plan_transfer(source, target, unused=sorted({each for _, _, some in said for each in some}))
    _check_all_have_roles(plan, channel)
    return plan


def _of_rank(given: Described | None, rank: int) -> WeightLayout | None:
    """The layout of one rank's tensors.

    Raises:
        ShardConfigValueError: it is about other ranks.
    """
    if given is None:
        return None
    if isinstance(given, nn.Module):
        here = dist.get_rank() if dist.is_initialized() else 0
        return layout(given).only(here).on({here: rank})
    if not isinstance(given, WeightLayout):
        return WeightLayout(ranks={rank: dict(given)})
    if rank not in given.ranks:
        raise ShardConfigValueError(
            f"the layout is about ranks {sorted(given.ranks)}, but this is rank {rank} of the process group; renumber "
            f"it with layout.on([{rank}])"
        )
    return given.only(rank)


# ---- updates


def send(
    model: nn.Module | Mapping[str, torch.Tensor],
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    *,
    version: int | None = None,
    skip_unchanged: bool = False,
    into: Into | None = None,
    refresh: bool = False,
    staging: torch.device | str | None = None,
    before_switch: BeforeSwitch | None = None,
    max_bytes_in_flight: int = MAX_BYTES,
) -> Update:
    """Send this rank's part of a model to the receivers. All ranks of the group call `send` or `receive`.

    Returns when all receivers have all weights. The weights must not change before that: call it between optimizer
    steps, in the thread that trains. It reshards the parameters of the model.

    Args:
        model: the model that the plan was made with, or its local tensors by name.
        plan: the plan.
        group: process group of senders and receivers. Default: the default process group.
        version: number of this version of the weights, such as the step; the same on all senders, and higher than the
            last one of this plan. Default: one more than the last version of any receiver.
        skip_unchanged: omit parts whose bytes are the same as in the last update of this plan. Parts are compared by
            fingerprints of 128 bits, which takes the time to read this rank's parameters once. The first such update,
            and the first one into other tensors, sends everything.
        into: as in `receive`, on a rank that receives, too.
        refresh: as in `receive`; needs `into`.
        staging: as in `receive`; needs `into`.
        before_switch: as in `receive`.
        max_bytes_in_flight: maximum bytes that a rank sends at a time, and that it receives at a time; the same on all
            ranks. A rank needs at most this much memory for messages.

    Raises:
        ShardConfigValueError: this rank has another role in the plan, a version is not higher than the last one, or
            `refresh` or `staging` is passed without `into`.
        StaleStateError: the model has other tensors, shapes or dtypes than in the plan.
        RankMismatchError: ranks have different plans or settings, or another rank has raised one of the errors above or
            an error in `before_switch`. If the message ends with "Nothing was sent" or "No receiver has changed", call
            `send` and `receive` again on all ranks.
        PeerLostError: another rank is lost, or has failed during the transfer. Either all receivers have the new
            weights or none, unless a rank was killed while they switched. Training can continue. To send weights again,
            make another process group.
    """
    channel = channel_of(group)
    progress = channel.progress(plan)

    def prepare() -> _Ready:
        _check_role(plan, channel, sends=True, receives=into is not None)
        values = _values(model, plan, channel.rank)
        if version is not None and version <= progress.version:
            raise ShardConfigValueError(f"version: {version} is not higher than the last one, {progress.version}")
        if into is None and (refresh or staging is not None):
            raise ShardConfigValueError("refresh, staging: only receivers have these; pass `into`, too, or neither")
        target = None if into is None else _target(channel, plan, into, refresh, staging)
        return _Ready(values, target, version, skip_unchanged)

    return _move(channel, plan, prepare, max_bytes_in_flight, before_switch)


def receive(
    plan: Plan,
    into: Into,
    group: dist.ProcessGroup | None = None,
    *,
    refresh: bool = False,
    staging: torch.device | str | None = None,
    before_switch: BeforeSwitch | None = None,
    max_bytes_in_flight: int = MAX_BYTES,
) -> Update:
    """Receive this rank's part of the weights. All ranks of the group call `send` or `receive`.

    New weights are received in separate memory. When all receivers have all of them, each receiver copies them into its
    tensors. If the transfer fails before that, no tensor has changed. Call it in the thread that computes with the
    tensors, or pass `Versions`.

    Args:
        plan: as in `send`.
        into: this rank's tensors by the names in the plan's target layout; a model with these names in its state dict;
            or `Versions`, which switches to the new tensors without a copy.
        group: as in `send`.
        refresh: request parts that senders would skip as unchanged, because other code has written to the tensors
            since the last update.
        staging: device on which new weights are kept until all have arrived. Default: that of the tensors.
        before_switch: called with the new version when all weights have arrived and no tensor has changed yet. Here an
            engine can finish or stop its running requests. If it raises, no receiver switches, and all ranks can try
            again.
        max_bytes_in_flight: as in `send`.

    Raises:
        ShardConfigValueError: this rank has another role in the plan, a tensor cannot be written to, or `staging` is
            passed with `Versions`.
        ShardConfigTypeError: `into` is a mapping with a DTensor.
        StaleStateError: the tensors do not have the shapes or dtypes of the layout.
        RankMismatchError, PeerLostError: as in `send`.
    """
    channel = channel_of(group)

    def prepare() -> _Ready:
        _check_role(plan, channel, sends=False, receives=True)
        return _Ready(None, _target(channel, plan, into, refresh, staging), None, False)

    return _move(channel, plan, prepare, max_bytes_in_flight, before_switch)


def _target(channel: Channel, plan: Plan, into: Into, refresh: bool, staging: torch.device | str | None) -> Target:
    if refresh:
        channel.progress(plan).forget_places()
    return target_of(into, plan, channel.rank, staging)


def _check_role(plan: Plan, channel: Channel, *, sends: bool, receives: bool) -> None:
    """Check that the plan expects of this rank what it does: otherwise, other ranks would wait for it.

    Raises:
        ShardConfigValueError: it expects something else.
    """
    rank = channel.rank
    _check_all_have_roles(plan, channel)
    if sends != (rank in plan.source.ranks) or receives != (rank in plan.target.ranks):
        raise ShardConfigValueError(
            f"plan: ranks {sorted(plan.source.ranks)} send and ranks {sorted(plan.target.ranks)} receive, and this is "
            f"rank {rank}; call send on senders, receive on receivers, and send(..., into=...) on ranks that do both"
        )


def _check_all_have_roles(plan: Plan, channel: Channel) -> None:
    """Check that the process group has the ranks of the plan, and no others.

    Raises:
        ShardConfigValueError: it has others.
    """
    if plan.ranks != sorted(channel.ranks):
        raise ShardConfigValueError(
            f"group: has ranks {sorted(channel.ranks)}, but ranks {plan.ranks} send or receive; pass a process group "
            "of exactly these ranks"
        )


def _values(model: nn.Module | Mapping[str, torch.Tensor], plan: Plan, rank: int) -> Values:
    """The weights that a rank sends.

    Raises:
        ShardConfigTypeError: a mapping was passed, but an adapter is to be merged.
    """
    given = Holdings(model) if isinstance(model, nn.Module) else model
    tensors = tensors_of(given, plan.source, rank, "layout(model)")
    if not plan.source.merges:
        return lambda: tensors
    if not isinstance(model, nn.Module) or not isinstance(given, Holdings):
        raise ShardConfigTypeError(f"model: pass the model itself to merge its adapter {plan.source.merges!r}")
    return partial(merged, given, adapters_in(model, plan.source.merges), tensors)


Values = Callable[[], dict[str, torch.Tensor]]


class _Ready(NamedTuple):
    """What a rank has prepared for an update.

    Attributes:
        values: function that returns the weights that it sends; None if it sends none. Called once all ranks are ready,
            because it may gather an adapter.
        target: where it puts new weights; None if it receives none.
        version: version of the weights, if the user has passed one.
        skips: whether it omits unchanged parts.
    """

    values: Values | None
    target: Target | None
    version: int | None
    skips: bool


class _Said(NamedTuple):
    """What a rank tells the others before an update.

    Attributes:
        settings: the plan and the limit, which must be equal on all ranks.
        sends: whether it sends.
        version: version of the weights, if it sends and the user has passed one.
        last: last version that it knows.
        skips: whether it omits unchanged parts.
        is_current: whether its tensors have the version of the last update.
    """

    settings: str
    sends: bool
    version: int | None
    last: int
    skips: bool
    is_current: bool


def _move(
    channel: Channel,
    plan: Plan,
    prepare: Callable[[], _Ready],
    most: int,
    before_switch: BeforeSwitch | None = None,
) -> Update:
    progress = channel.progress(plan)
    ready: list[_Ready] = []

    def say() -> _Said:
        ready.append(prepare())
        return _said(plan, progress, ready[0], most)

    said = channel.together(f"send or receive weights, update {channel.updates}", say)
    version = _version_of(channel, said)
    [own] = ready
    with channel.failures_told():
        parts = None if own.values is None else Parts(own.values(), plan.source.ranks[channel.rank])
        prints, unchanged = _changes(channel, plan, said, parts if own.skips else None)
        staged, mover = _moved(channel, plan, own.target, parts, unchanged, most)

    def stop_work() -> None:
        if before_switch is not None:
            before_switch(version)
        if own.target is not None:
            own.target.before_switch()

    what = f"switch to version {version} of the weights, update {channel.updates}"
    channel.together(f"prepare to {what}", stop_work, "No receiver has changed")
    with channel.failures_told():
        channel.agree(what)  # only after that do all ranks know that no rank has failed
        if own.target is not None:
            own.target.switch(version, staged)
        channel.synchronize()
        progress.switched(version, prints, [] if own.target is None else _places(own.target))
        channel.agree(f"have version {version} of the weights, update {channel.updates}")  # only then may a rank end
    channel.count_update()
    return Update(version, mover.sent, mover.received, mover.skipped)


def _said(plan: Plan, progress: Progress, own: _Ready, most: int) -> _Said:
    is_current = own.target is None or progress.places == _places(own.target)
    last = max(progress.version, -1 if own.target is None else own.target.version)
    settings = f"plan {plan.digest}, {most} bytes in flight"
    return _Said(settings, own.values is not None, own.version, last, own.skips, is_current)


def _version_of(channel: Channel, said: Sequence[_Said]) -> int:
    """The version of an update.

    Raises:
        RankMismatchError: ranks have different settings, or senders have different versions.
    """
    channel.compare([each.settings for each in said])
    sends = [rank for rank, each in zip(channel.ranks, said, strict=True) if each.sends]
    given = [each.version for each in said if each.sends]
    if len({*given}) > 1:
        raise RankMismatchError(
            f"version: ranks {sends} send the versions {given}; pass the same version on all of them. Nothing was sent"
        )
    return max(each.last for each in said) + 1 if given[0] is None else given[0]


def _moved(
    channel: Channel, plan: Plan, target: Target | None, parts: Parts | None, unchanged: Set[int], most: int
) -> tuple[dict[str, torch.Tensor], Mover]:
    """Send this rank's parts, and receive its new tensors in memory of their own."""
    wanted, staged = _staged(plan, channel.rank, target, unchanged)
    memory = Parts(staged, wanted, plan.source.ties)
    mover = Mover(channel, channel.progress(plan).course(plan, channel.rank, most), parts, memory, unchanged)
    mover.run()
    for each in staged.values():
        if not each.is_inference():
            torch.autograd.graph.increment_version(each)  # messages that arrive in a tensor do not count as a change
    for name, local in wanted.items():
        for box in local.zeros:
            staged[name][box.slices(whole_box(local.shape))].zero_()
    channel.synchronize()  # copies on an accelerator are only queued until here
    return staged, mover


def _staged(
    plan: Plan, rank: int, target: Target | None, unchanged: Set[int]
) -> tuple[Mapping[str, LocalTensor], dict[str, torch.Tensor]]:
    """A receiver's tensors that get new parts, and memory for its new version with all parts that do not arrive."""
    if target is None:
        return {}, {}
    wanted = plan.target.ranks[rank]
    if unchanged:
        wanted = plan.with_new_parts(rank, wanted, unchanged)
    staged = target.staged(wanted)
    kept = [name for name in staged if unchanged or name not in wanted]
    if kept:
        with torch.no_grad():
            torch._foreach_copy_([staged[name] for name in kept], [target.tensors[name] for name in kept])
    return wanted, staged


Prints = dict[tuple[str, Box], bytes]


def _changes(channel: Channel, plan: Plan, said: Sequence[_Said], parts: Parts | None) -> tuple[Prints, set[int]]:
    """Find what has not changed. A collective if any rank skips such parts.

    Args:
        channel: the channel.
        plan: the plan.
        said: what the ranks have said.
        parts: the weights that this rank sends, if it skips unchanged ones.

    Returns:
        Fingerprints of this rank's parts; and the index in the plan of each part that no rank sends, which is empty if
        a receiver's tensors are not the last version.
    """
    prints, own = ({}, []) if parts is None else _own_changes(plan, channel, parts)
    if not (any(each.skips for each in said) and all(each.is_current for each in said)):
        return prints, set()
    return prints, {index for some in channel.gather(own) for index in some}


def _own_changes(plan: Plan, channel: Channel, parts: Parts) -> tuple[Prints, list[int]]:
    sent = [(index, (each.name, each.box)) for index, each in plan.sent_by(channel.rank)]
    keys = [*dict.fromkeys(key for _, key in sent)]
    prints = dict(zip(keys, fingerprints([next(parts.of(*key)) for key in keys]), strict=True))
    last = channel.progress(plan).prints
    return prints, [index for index, key in sent if last.get(key) == prints[key]]


def _places(target: Target) -> list[Place]:
    """The memory of the tensors and their version counters, to notice other tensors and changes by other code."""
    return [_place(each) for each in target.tensors.values()]


def _place(tensor: torch.Tensor) -> Place:
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    # An inference tensor has no version counter, so it counts as changed: no other object is equal to this one.
    version = object() if tensor.is_inference() else tensor._version
    return storage, int(tensor.storage_offset()), version
