"""Whether all ranks have the same plan: asked before the first payload moves, so that it is an error, and no hang.

Where all ranks are sure to ask, they ask by a collective (`agree`). A rank that wants another plan later may be alone
in that: it must neither follow it nor wait for the others, and votes (`Ballot`).
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

_ALONE = ("fake", "fabric")  # backends that play the other ranks
_SIMULATED = (*_ALONE, "simulated")
Settings = Mapping[str, Mapping[str, str]]  # by the FQN of a group: names of settings, and what they are set to
Among = Sequence[
    tuple[dist.ProcessGroup, torch.device, frozenset[str]]
]  # with its device, and whose parameters it moves


def groups_of(meshes: Iterable[tuple[str, MeshInfo]]) -> Among:
    """The process groups over which groups of parameters, by FQN, are sharded, each once; not those of one rank.

    Replicas are not among them: each may run a forward, or have transports, of its own (see `replicas_of`). Nor are
    groups of which this process has one rank, and there are no others.
    """
    found: dict[int, tuple[dist.ProcessGroup, torch.device, set[str]]] = {}
    for fqn, info in meshes:
        there = info.shard_group
        if there is not None and there.size() > 1 and backend_name(there, info.device) not in _ALONE:
            found.setdefault(id(there), (there, info.device, set()))[2].add(fqn)
    return [(group, device, frozenset(fqns)) for group, device, fqns in found.values()]


def replicas_of(meshes: Iterable[tuple[str, MeshInfo]]) -> Among:
    """The process groups of replicas that share nothing else: over which whole parameters, by FQN, are reduced alone.

    These ask when they first reduce: what went before they may do, or not do, each for itself.
    """
    found: dict[int, tuple[dist.ProcessGroup, torch.device, set[str]]] = {}
    for fqn, info in meshes:
        there = info.replicate_group
        if there is not None and there.size() > 1 and info.shard_size == 1:
            found.setdefault(id(there), (there, info.device, set()))[2].add(fqn)
    return real([(group, device, frozenset(fqns)) for group, device, fqns in found.values()])


def real(among: Among) -> Among:
    """Those without simulated worlds, which notice by themselves when ranks differ."""
    return [each for each in among if backend_name(each[0], each[1]) not in _SIMULATED]


def agree(plan: ShardPlan, among: Among, settings: Settings | None = None) -> None:
    """See that all ranks of some process groups have the same plan of the parameters there. A collective in each.

    Args:
        plan: of this rank.
        among: the process groups.
        settings: by FQN, what users have set that is no part of a plan, by name.

    Raises:
        RankMismatchError: on all ranks of the first group in which plans differ; it names two ranks, and what is
            otherwise on the second.
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
    """Settings that differ, a line each."""
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
    """Of a ballot."""

    OPEN = 0  # the ranks that others share a process group with have not been heard of yet
    ALL = 1  # every rank wants this plan
    APART = 2  # every rank wants a plan, and not all the same one
    SOME = 3  # only some ranks want one


class Ballot:
    """Whether all ranks want the same plan, found without a collective, and without waiting for anybody.

    A rank that wants a plan adds one to a count in the store of the process group when a forward begins. An all-gather
    of that forward, once it has arrived, has the data of every rank, which each has sent behind what it had to add. So
    ranks read final counts when the forward has ended, and all that have voted decide alike. Ranks that want nothing
    do nothing.

    With several process groups a vote takes as many rounds: a rank votes in the next one only if it has found all votes
    in the last, so that ranks which share no process group, but have others between them, decide alike as well.

    It rests on this: ranks run the root's forward equally often, and every rank sends something in a gather.

    Args:
        plan: what this rank wants.
        among: over which process groups.
        engine: its name in each of them, from `names_in`.
        forward: number of the forward of the root that has led to it.
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
        """A forward begins: vote, unless this rank has in this round."""
        if self._is_cast:
            return
        self._is_cast = True
        for (group, _, _), name, key in zip(self._among, self._names, self._keys, strict=True):
            store_of(group).add(f"{key}/{self._round}", 1)
            if not self._round:
                store_of(group).add(name, 1)

    def count(self, gathered: frozenset[str]) -> Outcome:
        """A forward has ended, in which these groups of parameters were gathered after the vote."""
        if not self._is_cast or not all(gathered & fqns for _, _, fqns in self._among):
            return Outcome.OPEN
        for _, device, _ in self._among:
            if device.type != "cpu":  # there, what the host has been told has not happened yet
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
        """All ranks want a plan, and not the same one: say what differs first. A collective.

        Raises:
            RankMismatchError: always, where ranks differ.
        """
        agree(self.plan, self._apart)


class Roll:
    """Whether all ranks of a process group have done the same in a forward, found as by a `Ballot`.

    Only ranks that did otherwise than planned enter what they did; whoever did the same has entered it, too.

    Args:
        group: the process group, with its device.
        key: names the engine, the forward, and what this rank has done.
    """

    def __init__(self, group: tuple[dist.ProcessGroup, torch.device], key: str) -> None:
        self._group, self._device = group
        self._key = f"composable_shard/rolls/{key}"
        store_of(self._group).add(self._key, 1)

    def is_full(self) -> bool:
        """Whether every rank has entered it; to be asked when a collective has arrived that was issued since."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return store_of(self._group).add(self._key, 0) >= self._group.size()


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def names_in(among: Among) -> list[str]:
    """Names for one more engine, one in each process group; all ranks make their engines in the same order."""
    for group, _, _ in among:
        _engines[group] = _engines.get(group, 0) + 1
    return [str(_engines[group]) for group, _, _ in among]


def slowest(seconds: Sequence[float], groups: Sequence[tuple[dist.ProcessGroup, torch.device]]) -> list[float]:
    """For each of some measured times, that of the slowest rank of some process groups, so that all decide alike."""
    found = torch.tensor(seconds, dtype=torch.float64)
    with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
        for group, device in [*groups] * len(groups):  # so that what one has found goes along the others
            there = found.to(device)
            group.allreduce([there], all_reduce_options(dist.ReduceOp.MAX)).wait()
            found = there.cpu()
    agreed: list[float] = found.tolist()
    return agreed


def _mismatch(plan: ShardPlan, settings: Settings, group: dist.ProcessGroup, differ: list[int]) -> RankMismatchError:
    """The error, in the same words on all ranks."""
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
