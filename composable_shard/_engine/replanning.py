"""Replanning: what happens is compared with the plan. Each drift is logged with its cause, and the plan made anew.

what is compared                                when
order: the groups whose forwards began          at the end of each forward of the root
bytes: the most that were live at once          between two iterations, if the most has grown
time: measured costs                            see `tuning.py`

All ranks must follow one plan. The first forward comes on all ranks, so they agree on its order by a collective. Later,
a rank that sees another order than planned votes for a new plan (`Ballot`), and follows the old one until all ranks
have voted for the same. So a rank that deviates once changes no plan, not even its own, and no rank waits for another.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from .._comm.agreement import Among, Ballot, Outcome, Roll, agree, names_in
from .._errors import RankMismatchError
from .._group.phases import SHARDED
from .._plan.drift import DriftLog, around_drift, drift, order_drift
from .._plan.plan import Around, ShardPlan, replan
from .._plan.record import Record
from .._plan.schedule import AGAIN, NO_GRAD, NO_SYNC, ROOT_NAME, TRAIN, Kind
from .actions import Actions
from .history import around
from .order import Order

# How many votes one engine may start, as each makes a schedule and asks the store: these, and one more in so many.
_FREE_BALLOTS, _FORWARDS_A_BALLOT = 16, 64
# Forwards that gather otherwise than planned are compared among ranks: any of the first ones, then one in so many.
_FREE_ROLLS, _FORWARDS_A_ROLL = 256, 16


def phase_of(grad: bool, sync: bool, waiting: bool) -> str:
    """The phase of a forward, by name. Forwards of different phases may run the groups in different orders.

    Args:
        grad: whether the forward runs in grad mode.
        sync: whether its gradients are to be reduced.
        waiting: whether an earlier forward still waits for its backward.
    """
    kind = NO_GRAD if not grad else TRAIN if sync else NO_SYNC
    return kind + AGAIN if waiting else kind


class Learning:
    """Keeps the plan of one engine true to what happens, and the same on all ranks.

    Args:
        order: holds the plan.
        actions: their history is compared with the plan.
        among: the process groups of the model, whose ranks must follow the same plan.
        given: whether the plan is one that a user gave.

    Attributes:
        log: the drifts so far.
        forwards: how many forwards of the root have ended well.
        given: whether the plan in force is one that a user gave.
    """

    def __init__(self, order: Order, actions: Actions, among: Among, given: bool = False) -> None:
        self.log = DriftLog()
        self.forwards = 0
        self._order = order
        self._do = actions
        self._among = among
        self._engine = names_in(among)
        self.given = given
        self._has_learned = False
        self._phase = ""
        self._seen_from = self._done_from = 0
        self._changed = self._may_differ = False  # since the last forward: by a user; perhaps, by a conversion
        self._ballot: Ballot | None = None
        self._base: str | None = None  # digest of the plan that a vote would replace; None: it confirms that plan
        self._is_free = False  # whether it is no error if only some ranks vote
        self._ballots = 0
        self._rolls: list[tuple[Roll, frozenset[str], str]] = []  # with the FQNs on its process group, and an error
        self._most_bytes = 0
        self._has_warned = False

    # ---- order

    def begin(self, grad: bool, waiting: bool) -> None:
        """A forward of the root begins; arguments as for `phase_of`."""
        if self._changed or self._may_differ:
            self._take_changes()
        groups = self._do.groups
        sync = not groups or groups[0].options.requires_gradient_sync
        self._phase = phase_of(grad, sync, waiting)
        self._order.begin(self._phase, grad)
        self._seen_from, self._done_from = len(self._do.history.seen), len(self._do.history.done)
        if self._ballot is not None:
            self._ballot.cast()

    def end(self) -> None:
        """A forward of the root has ended well: count votes, and compare its order with the plan's.

        Raises:
            RankMismatchError: ranks have run their first forward in different orders, were given different plans, or
                have gathered different groups in an earlier forward.
            PoolBudgetError: a group does not fit in the order in which the forward ran.
        """
        self.forwards += 1
        began = self._do.history.seen[self._seen_from :]
        seen, inside = tuple([group.fqn for group in began]), around(began, self._do.history.seen_in[self._seen_from :])
        if self._rolls:
            self._call_rolls()
        if self._ballot is not None:
            self._count(self._ballot)
        if not self._has_learned and not self._phase.startswith(NO_GRAD):
            self._has_learned = True
            if self._learn_first(seen, inside):
                return
        expected, known = self._order.expected(self._phase), self._order.plan.around_in(self._phase)
        if seen != expected or not set(known).issuperset(inside):
            self.log.add("order", self.forwards, order_drift(expected, seen) + around_drift(known, inside))
            self._open_rolls(seen, expected)
            self._want(partial(self._with_order, seen, inside), self._may_be_alone(seen, expected))
        elif self._phase not in self._order.phases:
            self._order.note(self._phase, seen)

    def _with_order(self, seen: tuple[str, ...], inside: Around) -> ShardPlan:
        if self._phase != TRAIN:
            return self._order.plan.noting(self._phase, seen, inside)
        return replan(self._order.plan, Record((), (), seen, around=inside))

    def _learn_first(self, seen: tuple[str, ...], inside: Around) -> bool:
        """Learn the order of the first forward, and agree on it by a collective, as all ranks come here once.

        Where `reduce_unused` lets ranks run different modules, they agree on their gathers alone, and nothing is
        learned (false).
        """
        planned = self._order.plan
        if any(group.options.reduce_unused for group in self._do.groups):
            gathered = tuple(self._gathered_now())
            agree(replan(planned, Record((), (), gathered)) if gathered else planned, self._among)
            return False
        plan = replan(planned, Record((), (), seen, around=inside))
        agree(plan, self._among)
        if plan is not planned:
            found = order_drift(planned.order, seen) + around_drift(planned.around, plan.around)
            self.log.add("order", self.forwards, found)
            self._follow(plan)
        self._order.note(self._phase, seen)
        return True

    def _gathered_now(self) -> list[str]:
        """The groups of which this forward has issued gathers, in order."""
        done = self._do.history.done[self._done_from :]
        return [fqn for kind, fqn in zip(done[::3], done[1::3], strict=True) if kind is Kind.UNSHARD]

    # If ranks issue different gathers in a forward, these pair up wrongly; where their sizes are equal, each rank reads
    # weights of other modules without an error. So a rank that left the plan checks that all have left it likewise.

    def _open_rolls(self, seen: tuple[str, ...], expected: tuple[str, ...]) -> None:
        """This forward has left the plan: open a roll in each process group where its gathers differ from planned."""
        if not self._among or (self.forwards > _FREE_ROLLS and self.forwards % _FORWARDS_A_ROLL):
            return
        gathered = self._gathered_now()
        apart = self._gathers_apart(seen, expected, gathered)
        for (group, device, fqns), name in zip(self._among, self._engine, strict=True):
            if found := sorted(apart & fqns):
                here = ", ".join(fqn or ROOT_NAME for fqn in gathered if fqn in fqns)
                roll = Roll((group, device, fqns), f"rolls/{name}/{self.forwards}/{here}")
                self._rolls.append((roll, fqns, _gathered_alone(self.forwards, found, here)))

    def _gathers_apart(self, seen: Sequence[str], expected: Sequence[str], gathered: Sequence[str]) -> set[str]:
        """The FQNs of groups that a rank which follows the plan gathers otherwise than this one did.

        Groups that were gathered before this forward are so on all ranks.
        """
        if self._order.explicit:
            expected = [*expected, *(group.fqn for those in self._order.explicit.values() for group in those)]
        there, ran, planned = set(gathered), Counter(seen), Counter(expected)
        apart = {fqn for fqn in there if fqn in ran and fqn not in planned}
        for group in self._do.groups:
            fqn = group.fqn
            if fqn in planned and fqn not in ran and fqn not in there and group.phase is SHARDED:
                apart.add(fqn)
            elif not self._order.explicit and fqn in there and self._order.forward.reshards(group):
                apart |= {fqn} if planned[fqn] and ran[fqn] and ran[fqn] != planned[fqn] else set()
        if not self._order.explicit:
            first = [fqn for fqn in dict.fromkeys(gathered) if fqn in planned]
            usual = [fqn for fqn in dict.fromkeys(expected) if fqn in there]
            apart |= {one for one, other in zip(first, usual, strict=True) if one != other}
        return apart

    def _call_rolls(self) -> None:
        """Check open rolls in whose process group a gather has arrived: all ranks must have entered the same."""
        arrived = _gathered(self._do.history.done[self._done_from :])
        now = [each for each in self._rolls if each[1] & arrived]
        self._rolls = [each for each in self._rolls if not each[1] & arrived]
        for roll, _, error in now:
            if not roll.is_full():
                raise RankMismatchError(error)

    # ---- bytes

    def between_steps(self) -> None:
        """An iteration is over: compare its peak with the plan's, if it was the highest so far."""
        if self._do.pool.peak_bytes > self._most_bytes:
            self._compare_bytes()

    def _compare_bytes(self) -> None:
        """More bytes were live than ever before: log it if they are more than planned."""
        peak, plan, record = self._do.pool.peak_bytes, self._order.plan, self._do.history.last
        self._most_bytes = peak
        if record is None or peak <= plan.peak_bytes:
            return
        found = drift(plan, record) if record.peak_bytes == peak and record.order == plan.order else ()
        self.log.add(
            "bytes", self.forwards, [*found, f"{peak} bytes were live, and at most {plan.peak_bytes} are planned"]
        )
        if (described := self._order.described()) is not plan:
            self._want(lambda: described)

    # ---- what users change

    def asked(self, plan: ShardPlan, given: bool) -> None:
        """Follow a plan that a user wants, at once; the next forward starts a vote on whether all ranks have it.

        Raises:
            ShardConfigValueError, PoolBudgetError: as `Order.follow`.
        """
        self._order.follow(plan)
        self.given, self._ballot, self._changed = given, None, True

    def settings_changed(self) -> None:
        """Make the plan anew with the options that groups have now; all ranks must have changed these alike."""
        if (plan := self._order.described()) is not self._order.plan:
            self._warn_of_loss(self._order.plan.diff(plan).partition("\n")[0])
            self.asked(plan, given=False)

    def converted(self) -> None:
        """Parameters may have changed their dtype: the next forward looks, and asks other ranks only if they have."""
        self._may_differ = True

    def _take_changes(self) -> None:
        self._may_differ = False
        self.settings_changed()
        if self._changed and self._among and self._has_learned:
            self._ballot = Ballot(self._order.plan, self._among, self._engine, self.forwards)
            self._base, self._is_free = None, False
        self._changed = False

    # ---- a new plan

    def _may_be_alone(self, seen: Sequence[str], expected: Sequence[str]) -> bool:
        """Whether a rank may leave the plan in this way alone.

        It may if the groups that differ stay gathered after forward, and are reduced in one order after backward.
        """
        ran, planned = Counter(seen), Counter(expected)
        moved = ran == planned
        differing = [group for group in self._do.groups if moved or ran[group.fqn] != planned[group.fqn]]
        return all(group.options.reduce_unused and not group.resharding for group in differing)

    def _want(self, make: Callable[[], ShardPlan], free: bool = False) -> None:
        """Start a vote on another plan, which is followed once all ranks want it. Does nothing after too many votes.

        Args:
            make: makes the plan.
            free: whether it is no error, and no reason to warn, if only some ranks want the plan.
        """
        if self._ballot is not None or self._ballots >= _FREE_BALLOTS + self.forwards // _FORWARDS_A_BALLOT:
            return
        plan = make()
        if plan == self._order.plan:
            return
        self._ballots += 1
        if not self._among:
            self._follow(plan)
        else:
            self._ballot = Ballot(plan, self._among, self._engine, self.forwards)
            self._base, self._is_free = self._order.plan.digest, free

    def _count(self, ballot: Ballot) -> None:
        outcome = ballot.count(_gathered(self._do.history.done[self._done_from :]))
        if outcome is Outcome.OPEN:
            return
        self._ballot = None
        if outcome is Outcome.APART and not self._is_free:
            ballot.explain()
        if self._base is None:
            if outcome is not Outcome.ALL:
                raise RankMismatchError(_alone_with_change())
        elif outcome is not Outcome.ALL:
            self._warn_alone(ballot.plan)
        elif self._order.plan.digest == self._base:
            self._follow(ballot.plan)

    def _follow(self, plan: ShardPlan) -> None:
        before = self._order.plan
        if found := order_drift(before.order, plan.order) + around_drift(before.around, plan.around):
            self._warn_of_loss(found[0])
        self._order.replan(plan)

    def _warn_of_loss(self, why: str) -> None:
        if self.given:
            self.given = False
            text = (
                f"set_plan: the plan that was given is not followed any more ({why}); it was made anew by its policies"
            )
            warnings.warn(text, stacklevel=2)

    def _warn_alone(self, plan: ShardPlan) -> None:
        """Warn, once, that not all ranks have left the plan, or not alike; unless they may."""
        if self._is_free or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"rank {dist.get_rank()}: a forward of the root left the plan, and not on all ranks alike "
            f"({self._order.plan.diff(plan).partition(chr(10))[0]}). All keep the plan that they have. Where ranks run "
            "different modules in one step, their collectives meet those of other modules: run the same on all ranks, "
            "or unshard() on all of them what only some will run and call set_reduce_scatter_unused_params(True)",
            stacklevel=2,
        )


def _gathered(done: Sequence[Any]) -> frozenset[str]:
    """The groups whose gathers were both issued and waited for in `done`, a part of `History.done`."""
    issued: set[str] = set()
    arrived: set[str] = set()
    for kind, fqn in zip(done[::3], done[1::3], strict=True):
        if kind is Kind.UNSHARD:
            issued.add(fqn)
        elif kind is Kind.WAIT and fqn in issued:
            arrived.add(fqn)
    return frozenset(arrived)


def _gathered_alone(forward: int, apart: Sequence[str], gathered: str) -> str:
    return (
        f"rank {dist.get_rank()}: forward {forward} of the root left the plan at {apart[0] or ROOT_NAME} and gathered "
        f"{gathered or 'nothing'}, and not all ranks did the same: their gathers met those of other modules, so that "
        "weights and gradients since then are wrong. Run the same modules on all ranks, in one order, or unshard() "
        "on all of them what only some will run"
    )


def _alone_with_change() -> str:
    return (
        f"rank {dist.get_rank()}: was given another plan, policy or reshard_after_forward than other ranks, or at "
        "another time. Call set_plan, set_prefetch_policy, set_pool_policy and setters of modules on all ranks alike, "
        "between the same forwards"
    )
