"""Checks that all ranks have the same plan before they communicate: a difference raises an error instead of a hang.

Before the first step every rank checks, so the check is a collective (`agree`). Later, only some ranks may want a new
plan. Such a rank must neither follow the new plan alone nor block on the others, so it votes (`Ballot`). The ledger
records an adopted plan in the note of the next forward. All ranks compare that note before they gather by the new plan.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from .._plan.plan import ShardPlan
from .._plan.schedule import ROOT_NAME
from .._torch.core import without_dispatch_modes
from .._torch.distributed import all_reduce_options, backend_name, group_all_gather, store_of
from ..errors import RankMismatchError
from .lanes import WAITING
from .mesh import MeshInfo
from .own_groups import own_group

_ALONE = ("fake", "fabric")  # backends that simulate the other ranks in one process
_SIMULATED = (*_ALONE, "simulated")
Settings = Mapping[str, Mapping[str, str]]  # FQN of a parameter group -> name of a setting -> its value
Member = tuple[dist.ProcessGroup, torch.device, frozenset[str]]  # with the FQNs of the parameter groups it serves
Among = Sequence[Member]


def _by_process_group(served: Iterable[tuple[str, dist.ProcessGroup | None, torch.device]]) -> Among:
    """List each process group of several ranks once, with the FQNs of all parameter groups that it serves."""
    by_group: dict[dist.ProcessGroup, tuple[torch.device, set[str]]] = {}
    for fqn, group, device in served:
        if group is not None and group.size() > 1:
            by_group.setdefault(own_group(group, device), (device, set()))[1].add(fqn)
    return [(group, device, frozenset(fqns)) for group, (device, fqns) in by_group.items()]


def groups_of(meshes: Sequence[tuple[str, MeshInfo]]) -> Among:
    """List the process groups that shard parameter groups, given by FQN: each once, if it has several ranks.

    Process groups of replicas are left out, because each replica may run its own forward or use its own transports (see
    `replicas_of`). With `outer_sharding`, forwards refresh over the outer axis, so its process group is listed, too.
    Process groups whose other ranks are simulated in this process are left out.
    """
    served = [(fqn, info.shard_group, info.device) for fqn, info in meshes]
    served += [(fqn, info.replicate_group, info.device) for fqn, info in meshes if info.shards_outer]
    among = _by_process_group(served)
    return [each for each in among if backend_name(each[0], each[1]) not in _ALONE]


def replicas_of(meshes: Iterable[tuple[str, MeshInfo]]) -> Among:
    """List the replica process groups of those parameter groups, given by FQN, that are not sharded at all.

    Such replicas never take part in a gather. They agree before their first reduction, because nothing that they do
    before it involves another rank.
    """
    alone = [(fqn, info) for fqn, info in meshes if info.shard_size == 1 and not info.shards_outer]
    unsharded = [(fqn, info.replicate_group, info.device) for fqn, info in alone]
    return real(_by_process_group(unsharded))


def real(among: Among) -> Among:
    """Leave out the process groups of simulated worlds, which detect by themselves that ranks differ."""
    return [each for each in among if is_shared(each[0], each[1])]


def is_shared(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of a process group are separate processes or devices, and not simulated."""
    return backend_name(group, device) not in _SIMULATED


def agree(plan: ShardPlan, among: Among, settings: Settings | None = None) -> None:
    """Check, by a collective in each process group, that its ranks have the same plan for its parameter groups.

    Args:
        plan: this rank's plan.
        among: the process groups.
        settings: by FQN, then by name: user settings that are not part of a plan.

    Raises:
        RankMismatchError: on all ranks of the first process group in which plans differ. The message names two ranks
            and the first difference between their plans.
    """
    for group, device, fqns in among:
        part = plan.restricted_to(fqns)
        of_part = {fqn: settings[fqn] for fqn in sorted(fqns) if settings and settings.get(fqn)}
        text = json.dumps([part.digest, of_part], sort_keys=True)
        digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            own = digest.to(device)
            of_ranks = own.repeat(group.size())  # own digest for every rank: a simulated process group may copy nothing
            WAITING.wait(group_all_gather(of_ranks, own, group))
            digests = of_ranks.view(group.size(), -1)
            differ = (digests != digests[:1]).any(dim=1).nonzero().flatten().tolist()
        if differ:
            raise _mismatch(part, of_part, group, differ)


def _changes(old: Settings, new: Settings) -> list[str]:
    """Return a line for each setting that differs."""
    lines = []
    for fqn in dict.fromkeys([*old, *new]):
        one, two = old.get(fqn, {}), new.get(fqn, {})
        names = [name for name in dict.fromkeys([*one, *two]) if one.get(name) != two.get(name)]
        lines += [
            f"group {fqn or ROOT_NAME}: {name} {one.get(name, 'not set')} -> {two.get(name, 'not set')}"
            for name in names
        ]
    return lines


class Roll:
    """Counts the ranks of a process group that have done the same thing, without a collective and without blocking.

    A rank enters by adding one to a counter in the store of the process group, before it issues a gather. That gather
    completes only with the data of every rank, and each rank sends its data after it has entered. So when the gather
    has completed, the count is final, and all ranks that have entered read the same count.

    Args:
        member: the process group, with its device and the FQNs that it serves.
        key: identifies what this rank has done; equal on ranks that have done the same thing.

    Attributes:
        fqns: the parameter groups whose gathers make the count final.
    """

    def __init__(self, member: Member, key: str) -> None:
        self._group, self._device, self.fqns = member
        self._key = f"composable_shard/{key}"
        store_of(self._group).add(self._key, 1)

    def is_full(self) -> bool:
        """Whether every rank is counted; valid once a gather issued after this roll was made has completed."""
        if self._device.type != "cpu":  # the host may be ahead of the gathers that it has queued
            torch.accelerator.synchronize(self._device)
        return store_of(self._group).add(self._key, 0) >= self._group.size()


class Outcome(Enum):
    """The outcome of a `Ballot`."""

    OPEN = 0  # not decided yet: the votes are not final, or another round follows
    ALL = 1  # every rank wants this plan
    APART = 2  # every rank wants a plan, but not all want the same one
    SOME = 3  # only some ranks want a new plan


class Ballot:
    """A vote on whether all ranks want the same plan. A rank that wants one enters a `Roll` when a forward begins.

    When the forward has ended, all ranks that have voted reach the same decision. Ranks that want no new plan do
    nothing.

    A ballot takes one round per process group. A rank votes in the next round only if every vote of the last round was
    counted. So two ranks that share no process group, but are connected through other ranks, reach the same decision.

    Two assumptions: all ranks run the root's forward equally often, and every rank sends data in a gather.

    Args:
        plan: the plan that this rank wants.
        among: the process groups.
        engine: the engine's name in each of them, from `names_in`.
        forward: number of the root's forward that has led to the ballot.
    """

    def __init__(self, plan: ShardPlan, among: Among, engine: Sequence[str], forward: int) -> None:
        self.plan = plan
        self._among = among
        self._names = [f"plans/{name}/{forward}" for name in engine]
        self._digests = [plan.restricted_to(fqns).digest for _, _, fqns in among]
        self._round = 0
        self._for_this: list[Roll] = []  # this round's votes for this plan
        self._for_any: list[Roll] = []  # the first round's votes for any new plan
        self._apart: Among = ()

    def cast(self) -> None:
        """Vote at the start of a forward, unless this rank has already voted in this round."""
        if self._for_this:
            return
        keys = [f"{name}/{digest}/{self._round}" for name, digest in zip(self._names, self._digests, strict=True)]
        self._for_this = list(map(Roll, self._among, keys))
        if not self._round:
            self._for_any = list(map(Roll, self._among, self._names))

    def count(self, gathered: frozenset[str]) -> Outcome:
        """Count the votes at the end of a forward.

        Args:
            gathered: FQNs of the groups that were gathered after this rank's vote.
        """
        votes = self._for_this
        if not votes or not all(gathered & vote.fqns for vote in votes):
            return Outcome.OPEN
        lost = [index for index, vote in enumerate(votes) if not vote.is_full()]
        if lost:
            return self._refused(lost)
        self._round += 1
        self._for_this = []
        return Outcome.OPEN if self._round < len(self._among) else Outcome.ALL

    def _refused(self, lost: Sequence[int]) -> Outcome:
        """Return the outcome, given indices of the process groups in which not all ranks have voted for this plan.

        It is `APART` if all ranks of one of them have voted for some new plan in the first round, else `SOME`.
        """
        if not self._round:
            self._apart = [self._among[index] for index in lost if self._for_any[index].is_full()]
        return Outcome.APART if self._apart else Outcome.SOME

    def explain(self) -> None:
        """Find the first difference of the plans after `Outcome.APART`, by a collective.

        Raises:
            RankMismatchError: always, because the plans differ.
        """
        agree(self.plan, self._apart)


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def names_in(among: Among) -> list[str]:
    """Number a new engine in each process group. The numbers are equal if all ranks make engines in the same order."""
    for group, _, _ in among:
        _engines[group] = _engines.get(group, 0) + 1
    return [str(_engines[group]) for group, _, _ in among]


def slowest(seconds: Sequence[float], among: Among) -> list[float]:
    """Return the maximum of each measured time (seconds) over the ranks of all process groups, equal on all ranks."""
    times = torch.tensor(seconds, dtype=torch.float64)
    with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
        for group, device, _ in [*among] * len(among):  # repeat: a maximum must reach ranks of all other process groups
            on_device = times.to(device)
            group.allreduce([on_device], all_reduce_options(dist.ReduceOp.MAX)).wait()
            times = on_device.cpu()
    agreed: list[float] = times.tolist()
    return agreed


def _mismatch(plan: ShardPlan, settings: Settings, group: dist.ProcessGroup, differ: list[int]) -> RankMismatchError:
    """Make the error by a collective, with the same message on all ranks."""
    of_ranks: list[Any] = [None] * group.size()
    with without_dispatch_modes():
        dist.all_gather_object(of_ranks, (plan.to_json(), settings), group)
    ranks = dist.get_process_group_ranks(group)
    first, other = ranks[0], ranks[differ[0]]
    (plan_of_first, set_on_first), (plan_of_other, set_on_other) = of_ranks[0], of_ranks[differ[0]]
    lines = ShardPlan.from_json(plan_of_first).diff(ShardPlan.from_json(plan_of_other)).splitlines()
    lines += _changes(set_on_first, set_on_other)
    many = "" if len(differ) == 1 else f" (and {len(differ) - 1} more ranks differ from rank {first})"
    return RankMismatchError(
        f"ranks {first} and {other} have different plans{many}: {lines[0] if lines else 'their digests differ'}. Build "
        "and shard the model identically on all ranks; print(make_plan(model)) shows the plan of a rank"
    )
