"""The entry of a model in the ledgers of its process groups, and the notes of its parameter groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .._comm.agreement import is_shared
from .._comm.mesh import MeshInfo
from .._comm.own_groups import own_group
from .._plan.plan import ShardPlan
from .._plan.schedule import NO_GRAD, Action, Kind
from .._torch.distributed import is_native
from ..errors import ComposableShardError
from .ledger import HOLD, STEP, Ledger
from .replicas import Rolling
from .settings import Credit, Having, rates_of
from .watch import WATCHER, ledger_of


@dataclass(frozen=True, eq=False)
class Notes:
    """The notes of a parameter group before its collectives.

    Attributes:
        gathers, reduces: the ledgers of the process groups over which it gathers, and reduces.
        name: name of the group and its model, for the notes.
        refreshes: the ledgers of the process group over which it refreshes its compute copy (`outer_sharding`).
    """

    gathers: tuple[Ledger, ...] = ()
    reduces: tuple[Ledger, ...] = ()
    name: str = ""
    refreshes: tuple[Ledger, ...] = ()

    def gather(self, how: str) -> str:
        """The note of a gather."""
        return f"gather {self.name}, {how}"

    def reduce(self, how: str) -> str:
        """The note of a reduction."""
        return f"reduce {self.name}, {how}"

    def refresh(self, how: str) -> str:
        """The note of a refresh."""
        return f"refresh {self.name}, {how}"

    def take_back(self, ledgers: Iterable[Ledger]) -> None:
        """Mark the last note in these ledgers as not issued."""
        for ledger in ledgers:
            ledger.take_back()


_MOST_PLANS = 8  # how many plans a ledger stores, to report how the plans of ranks differ
NOTHING_NOTED = Notes()


class Seat:
    """The entry of one model in the ledgers.

    Args:
        meshes: by FQN, the sharding of each parameter group.
        model: a number of the model that is the same on all ranks.
        root: the model.
    """

    def __init__(self, meshes: Iterable[tuple[str, MeshInfo]], model: str, root: nn.Module) -> None:
        self._model = f"model {model}"
        self._of: dict[str, Notes] = {}
        self._served: dict[Ledger, set[str]] = {}  # by ledger of gathers, FQNs of groups
        self._of_group: dict[dist.ProcessGroup, Ledger] = {}
        self._fqns: dict[Ledger, list[str]] = {}  # by ledger of gathers, or of reductions over replicas
        for fqn, info in meshes:
            shards = _ledgers(info.shard_group, info.device)
            replicas = _ledgers(info.replicate_group, info.device)
            for ledger in shards:
                self._served.setdefault(ledger, set()).add(fqn)
            axes = ((info.shard_group, shards), (info.replicate_group, replicas))
            self._of_group |= {group: here[0] for group, here in axes if group is not None and here}
            for ledger in dict.fromkeys([*shards, *replicas]):
                self._fqns.setdefault(ledger, []).append(fqn)
            refreshes = replicas if info.shards_outer else ()
            self._of[fqn] = Notes(shards, shards + replicas, f"{fqn or 'the root'} of {self._model}", refreshes)
        self._credit: weakref.WeakKeyDictionary[Optimizer, dict[Ledger, Credit]] = weakref.WeakKeyDictionary()
        self._plans: dict[Ledger, str] = {}
        self._rolling = Rolling(root)

    def of(self, fqn: str) -> Notes:
        """The notes of a parameter group."""
        return self._of[fqn]

    def follow(self, plan: ShardPlan) -> None:
        """Set the plan that the model follows from now on."""
        for ledger, fqns in self._served.items():
            part = plan.restricted_to(fqns)
            self._plans[ledger] = part.digest[:8]
            while len(ledger.plans) >= _MOST_PLANS:
                del ledger.plans[next(iter(ledger.plans))]
            ledger.plans[part.digest[:8]] = part

    def plan(self, actions: Iterable[Action], planned: Mapping[str, tuple[str, str, str]]) -> None:
        """Expect the notes of a step: all ranks have agreed on a plan, so its first step needs no questions.

        Args:
            actions: the actions of a step, in order.
            planned: by FQN, the notes of a gather, of a reduction and of a refresh.
        """
        notes: dict[Ledger, list[str]] = {ledger: [] for ledger in self._fqns}
        for action in actions:
            here = self._of.get(action.fqn, NOTHING_NOTED)
            if action.kind is Kind.UNSHARD:
                for ledger in here.gathers:
                    notes[ledger].append(planned[action.fqn][0])
            elif action.kind is Kind.REDUCE:
                for ledger in here.reduces:
                    notes[ledger].append(planned[action.fqn][1])
            elif action.kind is Kind.REFRESH:
                for ledger in here.refreshes:
                    notes[ledger].append(planned[action.fqn][2])
        for ledger, expected in notes.items():
            ledger.plan(expected)

    def begin(self, phase: str, checks: bool = True) -> None:
        """Begin a forward of the model; `checks` tells whether a check of replicas may follow."""
        if checks and self._of_group and not phase.startswith(NO_GRAD) and (due := self._rolling.due()) is not None:
            held, groups = due
            for ledger in {self._of_group[group]: None for group in groups if group in self._of_group}:
                ledger.stepped(f"{HOLD}{held} ({self._model})")
        for ledger, plan in self._plans.items():
            ledger.begin(_begun(self._model, phase, plan))

    def together(self, what: str) -> None:
        """Note a joint action of all ranks of the model that is not part of a step, for example "gather full tensors".

        Raises:
            RankMismatchError: some ranks are about to do something else. Raised on all ranks.
            PeerLostError: another rank is lost.
        """
        for ledger in self._fqns:
            ledger.issue(f"{what} of {self._model}")

    def stepped(self, optimizer: Optimizer | None, having: Mapping[str, Having]) -> None:
        """Note that an optimizer steps parameters of the model.

        Args:
            optimizer: the optimizer; None if it is not known, for example in a compiled step.
            having: by FQN of the groups that it steps, which of their parameters have a gradient.
        """
        details = self._details(optimizer, having) if optimizer is not None and self._fqns else {}
        for ledger in self._fqns:
            ledger.stepped(f"{STEP}an optimizer of {self._model}{details.get(ledger, '')}")

    def _details(self, optimizer: Optimizer, having: Mapping[str, Having]) -> dict[Ledger, str]:
        """By ledger, the text of the note about the settings of the step, for the groups in that ledger."""
        rates = rates_of(optimizer)
        if optimizer not in self._credit:
            self._credit[optimizer] = {ledger: Credit() for ledger in self._fqns}
        return {
            ledger: credit.in_note(rates, tuple([has for fqn in self._fqns[ledger] for has in having.get(fqn, ())]))
            for ledger, credit in self._credit[optimizer].items()
        }

    def failed(self, error: object) -> None:
        """Report a failed forward or backward of this rank."""
        if isinstance(error, ComposableShardError) and any(ledger.fault is not None for ledger in self._fqns):
            return
        why = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
        for ledger in self._fqns:
            ledger.leave(why)
        WATCHER.failed(why)


@cache
def _begun(model: str, phase: str, plan: str) -> str:
    return f"begin a forward of {model} ({phase}, plan {plan})"


def _ledgers(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Ledger, ...]:
    """The ledger of a process group; empty for groups of one rank, of a simulated world, or implemented in Python."""
    if group is None or group.size() == 1 or not is_native(group) or not is_shared(group, device):
        return ()
    return (ledger_of(own_group(group, device), device),)


def summary(nbytes: int, dtypes: Sequence[torch.dtype]) -> str:
    """Text with bytes and dtypes, for a note."""
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    return f"{nbytes:,} bytes of {', '.join(names)}"
