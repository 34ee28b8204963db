"""The plan: what is gathered and reduced together, in which order, and how many bytes that takes. Frozen data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ._arena import Lifetime, peak_bytes
from ._layout import GatherLayout, Route, bucket_layout, gather_layout, reduce_layout
from ._record import Record
from ._schedule import ROOT_NAME, Action, Kind, Step, training_step


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """A parameter: its name within the root, its unsharded shape, and the dtypes it has in turn."""

    fqn: str
    shape: tuple[int, ...]
    stored: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype
    trains: bool
    dim: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group of parameters that share their collectives.

    Attributes:
        fqn: name of its module within the root ("" for the root itself).
        params: its members, tied ones once.
        shard_size: number of ranks that each hold a piece.
        mesh: the mesh in words.
        is_root: whether it is the root's own group.
        reshard_after_forward: whether the unsharded parameters are given up between forward and backward.
        route: how it is moved; None if its axis has one rank only.
        small_size: among how many ranks weights stay cut between forward and backward; 0 if they do not.
        reduces_first: whether its backward waits for reductions before it gathers.
    """

    fqn: str
    params: tuple[ParamPlan, ...]
    shard_size: int
    mesh: str
    is_root: bool
    reshard_after_forward: bool
    route: Route | None
    small_size: int = 0
    reduces_first: bool = False

    @property
    def name(self) -> str:
        """The name to show."""
        return self.fqn or ROOT_NAME

    def gather_layouts(self) -> list[GatherLayout]:
        """Where each dtype's parameters are gathered."""
        found = []
        for dtype in dict.fromkeys(p.gathered for p in self.params):
            members = [p for p in self.params if p.gathered == dtype]
            shapes, dims = [p.shape for p in members], [p.dim for p in members]
            found.append(gather_layout(shapes, self.shard_size, dtype.itemsize, dims, self.route))
        return found

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the slots of its unsharded parameters, padding included."""
        return sum(_slot_bytes(layout.nbytes) for layout in self.gather_layouts())

    @property
    def landing_bytes(self) -> int:
        """Bytes of the buffers that a gather needs besides, until it is done."""
        return sum(_slot_bytes(layout.landing_bytes) for layout in self.gather_layouts() if layout.landing)

    def resident_bytes(self) -> tuple[int, int]:
        """Bytes of what this rank keeps of weights that a few ranks share, and of buffers to gather them again."""
        kept = landing = 0
        for dtype in dict.fromkeys(p.gathered for p in self.params):
            members = [p for p in self.params if p.gathered == dtype]
            dims = [p.dim for p in members]
            layout = bucket_layout([p.shape for p in members], self.small_size, dtype.itemsize, dims)
            kept += _slot_bytes(layout.numel * dtype.itemsize)
            landing += _slot_bytes(layout.total * dtype.itemsize)
        return kept, landing

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the buffers that a reduction needs until it is done."""
        if self.route is None:
            return 0
        total = 0
        slots = [layout.nbytes for layout in self.gather_layouts()]
        for dtype in dict.fromkeys(p.reduced for p in self.params if p.trains):
            members = [p for p in self.params if p.trains and p.reduced == dtype]
            shapes, dims = [p.shape for p in members], [p.dim for p in members]
            layout = reduce_layout(shapes, self.shard_size, dtype.itemsize, dims, self.route, slots)
            total += _slot_bytes(layout.nbytes)
            total += _slot_bytes(layout.scratch * dtype.itemsize) if layout.scratch else 0
        return total

    @property
    def shard_bytes(self) -> int:
        """Bytes of a full rank's pieces, as stored."""
        shapes, dims = [p.shape for p in self.params], [p.dim for p in self.params]
        layout = bucket_layout(shapes, self.shard_size, dims=dims)
        return sum(at.piece * p.stored.itemsize for at, p in zip(layout.params, self.params, strict=True))

    @property
    def trains(self) -> bool:
        """Whether any member gets a gradient."""
        return any(p.trains for p in self.params)


def _slot_bytes(nbytes: int) -> int:
    return -(-max(nbytes, 1) // 512) * 512


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The plan of one root.

    Attributes:
        groups: all groups, in the order of their modules.
        order: FQNs of the groups in the order in which their forwards begin, one entry a use. Declared at first (the
            order of the modules), learned from the first step.
    """

    groups: tuple[GroupPlan, ...]
    order: tuple[str, ...]

    def group(self, fqn: str) -> GroupPlan:
        """The group of the module `fqn`."""
        return next(g for g in self.groups if g.fqn == fqn)

    def actions(self) -> tuple[Action, ...]:
        """A training step as this plan expects it, every group used once."""
        used = dict.fromkeys(self.order)
        return training_step([_step(self.group(fqn)) for fqn in used])

    def live_bytes(self) -> tuple[int, ...]:
        """Bytes leased after each of `actions`."""
        return live_bytes(self, self.actions())

    @property
    def peak_bytes(self) -> int:
        """Predicted most bytes of unsharded parameters and communication buffers in a training step.

        Gradients that autograd has made and not yet handed over, `.grad` and activations are not among them.
        """
        return peak_bytes(_lifetimes(self, self.actions()))

    def __str__(self) -> str:
        params = sum(p.numel for g in self.groups for p in g.params)
        title = f"plan: {len(self.groups)} groups, {params:,} parameters, {_joined(g.mesh for g in self.groups)}"
        head = ("group", "parameters", "shard", "unsharded", "dtype", "reshard", "transport")
        rows = [head, *(_row(self.group(fqn)) for fqn in dict.fromkeys([*self.order, *(g.fqn for g in self.groups)]))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        left = (0, 4, 5, 6)
        lines = [
            "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        peak = f"peak of unsharded parameters and communication in a training step: {_mib(self.peak_bytes)}"
        return "\n".join(line.rstrip() for line in (title, *lines, peak))


def _step(group: GroupPlan) -> Step:
    return Step(
        group.fqn, group.is_root, group.reshard_after_forward, group.trains, group.small_size > 0, group.reduces_first
    )


def _row(group: GroupPlan) -> tuple[str, ...]:
    return (
        group.name,
        f"{sum(p.numel for p in group.params):,}",
        _mib(group.shard_bytes),
        _mib(group.unsharded_bytes),
        _joined(_dtype(p) for p in group.params),
        _resharded(group),
        _moved(group),
    )


def _moved(group: GroupPlan) -> str:
    if group.route is None:
        return "local"
    layouts = group.gather_layouts()
    alone, packed = sum(len(x.alone) for x in layouts), sum(len(x.packed) for x in layouts)
    if not packed:
        return group.route.name if group.route.name != "packed" else "direct"
    return f"{group.route.name}, {packed} packed" if alone else "packed"


def _resharded(group: GroupPlan) -> str:
    if not group.reshard_after_forward:
        return "after backward"
    return f"after forward, among {group.small_size}" if group.small_size else "after forward"


def _dtype(param: ParamPlan) -> str:
    stored, gathered, reduced = (str(d).removeprefix("torch.") for d in (param.stored, param.gathered, param.reduced))
    text = stored if gathered == stored else f"{stored} as {gathered}"
    if not param.trains:
        return f"{text} frozen"
    return text if reduced == gathered else f"{text}, reduced as {reduced}"


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def live_bytes(plan: ShardPlan, actions: Sequence[Action]) -> tuple[int, ...]:
    """Bytes leased from the pool after each action."""
    lives = _lifetimes(plan, actions)
    return tuple(sum(x.nbytes for x in lives if x.opened <= step < x.closed) for step in range(len(actions)))


def _lifetimes(plan: ShardPlan, actions: Sequence[Action]) -> list[Lifetime]:
    groups = {g.fqn: g for g in plan.groups}
    opened: dict[tuple[str, str], list[int]] = {}
    lives: list[Lifetime] = []

    def close(what: str, fqn: str, nbytes: int, step: int) -> None:
        begin = opened[what, fqn].pop(0)
        lives.append(Lifetime(f"{what} {fqn}", nbytes, begin, step))

    for step, action in enumerate(actions):
        group = groups[action.fqn]
        match action.kind:
            case Kind.UNSHARD:
                opened.setdefault(("weights", action.fqn), []).append(step)
                opened.setdefault(("landing", action.fqn), []).append(step)
            case Kind.WAIT if opened.get(("resident", action.fqn)):
                kept, landing = group.resident_bytes()
                close("landing", action.fqn, landing, step)
                close("resident", action.fqn, kept, step)
            case Kind.WAIT:
                close("landing", action.fqn, group.landing_bytes, step)
            case Kind.SHRINK:
                close("weights", action.fqn, group.unsharded_bytes, step)
                opened.setdefault(("resident", action.fqn), []).append(step)
            case Kind.RESHARD:
                close("weights", action.fqn, group.unsharded_bytes, step)
            case Kind.REDUCE:
                opened.setdefault(("reduction", action.fqn), []).append(step)
            case Kind.REDUCED:
                close("reduction", action.fqn, group.reduce_bytes, step)
    return lives


def replan(plan: ShardPlan, record: Record) -> ShardPlan:
    """The plan for the next step: the order that was seen takes the place of the one that was expected."""
    return plan if record.order == plan.order else replace(plan, order=record.order)
