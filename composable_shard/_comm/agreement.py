"""Checks that all ranks have the same plan before they move data by it: a difference is an error, instead of a hang.

Before the first step all ranks are sure to check, and do so by a collective (`agree`). A rank that wants another plan
later may be the only one: it must neither follow that plan alone nor wait for the others, so it votes (`Ballot`).
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

from .._errors import RankMismatchError
from .._plan.plan import ShardPlan
from .._plan.schedule import ROOT_NAME
from .._torch.core import without_dispatch_modes
from .._torch.distributed import all_reduce_options, backend_name, group_all_gather, store_of
from .mesh import MeshInfo

_ALONE = ("fake", "fabric")  # backends of one process, which simulate the other ranks
_SIMULATED = (*_ALONE, "simulated")
Settings = Mapping[str, Mapping[str, str]]  # by the FQN of a group: names of settings, and what they are set to
Among = Sequence[
    tuple[dist.ProcessGroup, torch.device, frozenset[str]]
]  # process groups, each with its device and the FQNs of the groups of parameters that it serves


def groups_of(meshes: Iterable[tuple[str, MeshInfo]]) -> Among:
    """The process groups over which groups of parameters, by FQN, are sharded: each once, if it has several ranks.

    Process groups of replicas are left out: each replica may run a forward of its own, or have its own transports (see
    `replicas_of`). Process groups of which no other rank really exists are left out, too.
    """
    found: dict[int, tuple[dist.ProcessGroup, torch.device, set[str]]] = {}
    for fqn, info in meshes:
        there = info.shard_group
        if there is not None and there.size() > 1 and backend_name(there, info.device) not in _ALONE:
            found.setdefault(id(there), (there, info.device, set()))[2].add(fqn)
    return [(group, device, frozenset(fqns)) for group, device, fqns in found.values()]


def replicas_of(meshes: Iterable[tuple[str, MeshInfo]]) -> Among:
    """The process groups of replicas of groups of parameters, by FQN, that are not sharded at all.

    Such replicas meet in no gather. They agree before their first reduction: what they do before that concerns no
    other rank.
    """
    found: dict[int, tuple[dist.ProcessGroup, torch.device, set[str]]] = {}
    for fqn, info in meshes:
        there = info.replicate_group
        if there is not None and there.size() > 1 and info.shard_size == 1:
            found.setdefault(id(there), (there, info.device, set()))[2].add(fqn)
    return real([(group, device, frozenset(fqns)) for group, device, fqns in found.values()])


def real(among: Among) -> Among:
    """The process groups without those of simulated worlds, which detect by themselves that ranks differ."""
    return [each for each in among if backend_name(each[0], each[1]) not in _SIMULATED]


def agree(plan: ShardPlan, among: Among, settings: Settings | None = None) -> None:
    """Check, by a collective in each process group, that its ranks have the same plan of its groups of parameters.

    Args:
        plan: this rank's plan.
        among: the process groups.
        settings: by FQN, then by name: what users have set that is no part of a plan.

    Raises:
        RankMismatchError: on all ranks of the first process group in which plans differ; it names two ranks and the
            first difference between them.
    """
    for group, device, fqns in among:
        part = plan.part(fqns)
        its = {fqn: settings[fqn] for fqn in sorted(fqns) if settings and settings.get(fqn)}
        text = json.dumps([part.digest, its], sort_keys=True)
        own = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            there = own.to(device)
            found = there.repeat(group.size())  # a simulated process group may move nothing
            group_all_gather(found, there, group).wait()
            digests = found.view(group.size(), -1)
            differ = (digests != digests[:1]).any(dim=1).nonzero().flatten().tolist()
        if differ:
            raise _mismatch(part, its, group, differ)


def _changes(old: Settings, new: Settings) -> list[str]:
    """A line for each setting that differs."""
    lines = []
    for fqn in dict.fromkeys([*old, *new]):
        one, two = old.get(fqn, {}), new.get(fqn, {})
        names = [name for name in dict.fromkeys([*one, *two]) if one.get(name) != two.get(name)]
        lines += [
            f"group {fqn or ROOT_NAME}: {name} {one.get(name, 'not set')} -> {two.get(name, 'not set')}"
            for name in names
        ]
    return lines


class Outcome(Enum):
    """The outcome of a `Ballot`."""

    OPEN = 0  # not known yet: the votes are not final, or another round follows
    ALL = 1  # every rank wants this plan
    APART = 2  # every rank wants a plan, but not all want the same one
    SOME = 3  # only some ranks want one


class Ballot:
    """A vote on whether all ranks want the same plan, without a collective, and without waiting for other ranks.

    A rank that wants a plan votes when a forward begins: it adds one to a counter in the store of the process group. An
    all-gather of that forward completes only with the data of every rank, and each rank sends its data after its vote.
    So the counters are final when the forward has ended, and all ranks that have voted decide alike. Ranks that want
    no new plan do nothing.

    With several process groups, a ballot takes as many rounds. A rank votes in the next round only if it has found all
    votes in the last one: so ranks that share no process group, but are linked by ranks between them, decide alike.

    Two assumptions: ranks run the root's forward equally often, and every rank sends something in a gather.

    Args:
        plan: the plan that this rank wants.
        among: the process groups.
        engine: the engine's name in each of them, from `names_in`.
        forward: number of the root's forward that has led to the ballot.
    """

    def __init__(self, plan: ShardPlan, among: Among, engine: Sequence[str], forward: int) -> None:
        self.plan = plan
        self._among = among
        self._names = [f"composable_shard/plans/{name}/{forward}" for name in engine]
        self._keys = [f"{name}/{plan.part(fqns).digest}" for name, (_, _, fqns) in zip(self._names, among, strict=True)]
        self._apart: Among = ()
        self._round = 0
        self._is_cast = False

    def cast(self) -> None:
        """A forward begins: vote, unless this rank has voted in this round already."""
        if self._is_cast:
            return
        self._is_cast = True
        for (group, _, _), name, key in zip(self._among, self._names, self._keys, strict=True):
            store_of(group).add(f"{key}/{self._round}", 1)
            if not self._round:
                store_of(group).add(name, 1)

    def count(self, gathered: frozenset[str]) -> Outcome:
        """A forward has ended: count the votes.

        Args:
            gathered: FQNs of the groups that were gathered after this rank's vote.
        """
        if not self._is_cast or not all(gathered & fqns for _, _, fqns in self._among):
            return Outcome.OPEN
        for _, device, _ in self._among:
            if device.type != "cpu":  # the host may be ahead of the gathers that it has queued
                torch.accelerator.synchronize(device)
        by_group = list(zip(self._among, self._names, self._keys, strict=True))
        lost = [
            (each, name)
            for each, name, key in by_group
            if store_of(each[0]).add(f"{key}/{self._round}", 0) < each[0].size()
        ]
        if lost:
            self._apart = [each for each, name in lost if store_of(each[0]).add(name, 0) == each[0].size()]
            return Outcome.APART if self._apart and not self._round else Outcome.SOME
        self._round += 1
        self._is_cast = False
        return Outcome.OPEN if self._round < len(self._among) else Outcome.ALL

    def explain(self) -> None:
        """After `Outcome.APART`, find the first difference of the plans, by a collective.

        Raises:
            RankMismatchError: always, as plans differ.
        """
        agree(self.plan, self._apart)


class Roll:
    """A count of the ranks of a process group that have done the same in a forward, made as in a `Ballot`.

    Only ranks that have left their plan make a roll. As plans are equal, all ranks that have left it in the same way
    count under the same key.

    Args:
        group: the process group, with its device.
        key: names the engine, the forward, and what this rank has done.
    """

    def __init__(self, group: tuple[dist.ProcessGroup, torch.device], key: str) -> None:
        self._group, self._device = group
        self._key = f"composable_shard/rolls/{key}"
        store_of(self._group).add(self._key, 1)

    def is_full(self) -> bool:
        """Whether every rank is counted; valid once a collective that was issued after the roll was made is over."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return store_of(self._group).add(self._key, 0) >= self._group.size()


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def names_in(among: Among) -> list[str]:
    """A number for one more engine in each process group: equal on all ranks if these make engines in one order."""
    for group, _, _ in among:
        _engines[group] = _engines.get(group, 0) + 1
    return [str(_engines[group]) for group, _, _ in among]


def slowest(seconds: Sequence[float], groups: Sequence[tuple[dist.ProcessGroup, torch.device]]) -> list[float]:
    """For each measured time the maximum over the ranks of all `groups`, so that all ranks decide alike."""
    found = torch.tensor(seconds, dtype=torch.float64)
    with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
        for group, device in [*groups] * len(groups):  # a maximum must reach ranks of all others
            there = found.to(device)
            group.allreduce([there], all_reduce_options(dist.ReduceOp.MAX)).wait()
            found = there.cpu()
    agreed: list[float] = found.tolist()
    return agreed


def _mismatch(plan: ShardPlan, settings: Settings, group: dist.ProcessGroup, differ: list[int]) -> RankMismatchError:
    """Make the error, by a collective, with the same message on all ranks."""
    found: list[Any] = [None] * group.size()
    with without_dispatch_modes():
        dist.all_gather_object(found, (plan.to_json(), settings), group)
    ranks = dist.get_process_group_ranks(group)
    first, other = ranks[0], ranks[differ[0]]
    (mine, own), (theirs, others) = found[0], found[differ[0]]
    lines = ShardPlan.from_json(mine).diff(ShardPlan.from_json(theirs)).splitlines() + _changes(own, others)
    many = "" if len(differ) == 1 else f" (and {len(differ) - 1} more ranks differ from rank {first})"
    return RankMismatchError(
        f"ranks {first} and {other} have different plans{many}: {lines[0] if lines else 'they differ'}. Build and "
        "shard the model alike on all ranks; print(make_plan(model)) shows what each rank has"
    )
