"""The review compares what happened with the plan. It counts each drift, and makes a new plan.

compared                                        when
order: the groups whose forwards began          at the end of each root forward
bytes: the peak of live bytes                   between two iterations, if the peak has grown
time: measured costs (see `measuring.py`)       between two iterations, less often after each comparison

All ranks must follow the same plan. All ranks run a first forward in grad mode, so they agree on its order by a
collective. They measure times in the same iterations, and agree on these in the same way. Later, a rank whose order
differs from the planned one votes for a new plan (`Ballot`), and follows the old one until all ranks have voted for the
same plan. So a single rank that deviates changes no plan, not even its own, and no rank waits for another.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from .._comm.agreement import Among, Ballot, Outcome, agree, names_in, real, slowest
from .._faults.seat import Seat
from .._plan.drift import order_drift, time_drift
from .._plan.plan import ShardPlan, replan
from .._plan.record import Record
from .._plan.schedule import NO_GRAD, TRAIN, Action, Kind
from .actions import Actions
from .history import Position
from .measuring import Measuring, costs_of
from .order import Order, PhaseSchedule, phase_of

# Each vote (`Ballot`) makes a schedule and queries the store, so votes are limited: an engine may start 16, plus one
# for every 64 forwards.
_FREE_BALLOTS, _FORWARDS_A_BALLOT = 16, 64


class Review:
    """Updates the plan of one engine when steps deviate from it, and keeps it the same on all ranks.

    Args:
        order: stores the plan.
        actions: their history is compared with the plan.
        among: the process groups of the model, whose ranks must follow the same plan.
        seat: the model's entry in the ledgers.
        given: whether a user set the plan.

    Attributes:
        drifts: number of forwards with a different order (``order``), of new peaks of live bytes above the planned one
            (``bytes``), and of measurements with different times (``time``).
        replans: how often a new plan was made because steps deviated or times were measured, and not because a user
            changed options.
        has_learned: whether a forward in grad mode has ended, whose order all ranks have compared.
        measuring: decides which steps are measured, and tracks whether the current one is.
        seat: the model's entry in the ledgers.
    """

    def __init__(self, order: Order, actions: Actions, among: Among, seat: Seat, given: bool) -> None:
        self.drifts = Counter(order=0, bytes=0, time=0)
        self.replans = 0
        self.measuring = Measuring(actions)
        self._order = order
        self._actions = actions
        # `_among` is without the process groups of `testing.spmd`, which simulates ranks as threads. Its ranks need no
        # votes, because it detects by itself that they differ. But each measures its own times, so they must agree on
        # times (`_linked`).
        self._linked, self._among = among, real(among)
        self.seat = seat
        seat.follow(order.plan)
        self._group_names = names_in(self._among)
        self._is_given = given  # whether a user set the current plan
        self._forwards = 0  # how many root forwards ended without an error
        self.has_learned = False
        self._phase = ""
        self._begun: Position = (0, 0, 0)  # where in the history the current forward began
        # Since the last forward: whether a user has changed the plan, and whether a conversion may have changed it.
        self._changed = self._may_differ = False
        # The open vote, and the function to call with its outcome.
        self._vote: tuple[Ballot, Callable[[Ballot, Outcome], None]] | None = None
        self._votes = 0
        self._most_bytes = 0
        self._has_warned = False

    # ---- order

    def begin(self, grad: bool, waiting: bool, captured: bool = False) -> None:
        """Begin a root forward.

        Args:
            grad, waiting: as for `phase_of`.
            captured: whether it is captured in a CUDA graph. Then nothing is voted on, compared or checked.
        """
        if self._changed or self._may_differ:
            self._take_changes()
        groups = self._actions.groups
        self._phase = phase_of(grad, not groups or groups[0].settings.current.requires_gradient_sync, waiting)
        self._order.begin(self._phase, grad)
        self.seat.begin(self._phase, checks=not captured)
        self._begun = self._actions.recorder.history.position()
        if self._vote is not None and not captured:
            self._vote[0].cast()

    @property
    def is_settled(self) -> bool:
        """Whether the next step is not measured, and no other plan is about to be followed. Equal on all ranks."""
        waits = self._order.plan.prefetch.kind == "auto" and self._order.plan.costs is None
        return not (self._changed or waits or self.measuring.is_on)

    def end(self, captured: bool = False) -> None:
        """End a successful root forward: count votes, and compare its order with the plan's.

        Args:
            captured: as for `begin`.

        Raises:
            RankMismatchError: ranks have run their first forward in grad mode in different orders.
            PoolBudgetError: a group does not fit in the order in which the forward ran.
        """
        self._forwards += 1
        if captured:
            return
        history = self._actions.recorder.history
        if self._vote is not None:
            self._count_votes(_arrived(history.since(self._begun).actions))
        if not self.has_learned and not self._phase.startswith(NO_GRAD):
            self.has_learned = True
            self._learn_first(history.since(self._begun))
        planned = self._order.phases.get(self._phase, self._order.usual)
        _, order, around = self._begun
        seen, inside = tuple(history.order[order:]), history.around[around:]
        if seen != planned.order or not planned.around.issuperset(inside):
            self._left_plan(planned, history.since(self._begun))
        elif self._phase not in self._order.phases:
            self._order.note(self._phase, seen)

    def _learn_first(self, seen: Record) -> None:
        """Learn the order of the first forward in grad mode, and compare it with that of other ranks by a collective.

        A collective is possible because all ranks reach this point once. With `reduce_unused`, ranks may run different
        modules. Then no order is adopted, but ranks must have gathered in the same order, and `agree` raises an error
        if not.
        """
        planned = self._order.plan
        if any(group.options.reduce_unused for group in self._actions.groups):
            gathered = tuple(_gathers(seen))
            agree(replan(planned, Record((), (), gathered)) if gathered else planned, self._among)
            return
        plan = replan(planned, seen)
        agree(plan, self._among)
        if plan is not planned:
            self.drifts["order"] += 1
            self._adopt(plan)
        self._order.note(self._phase, seen.order)

    def _left_plan(self, planned: PhaseSchedule, seen: Record) -> None:
        """Count a forward that deviated from the plan, and start a vote on a plan with its order."""
        self.drifts["order"] += 1
        plan = self._order.plan
        noted = partial(plan.noting, self._phase, seen.order, seen.around)
        self._want(partial(replan, plan, seen) if self._phase == TRAIN else noted, self._may_be_alone(planned, seen))

    def _may_be_alone(self, planned: PhaseSchedule, seen: Record) -> bool:
        """Whether one rank alone may deviate from the plan like this, without an error on any rank.

        The groups that differ must have `reduce_unused`, so that all ranks reduce them after backward in the same order
        anyway, and must stay unsharded after forward, so that backward gathers none of them.
        """
        expected, ran = Counter(planned.order), Counter(seen.order)
        moved = ran == expected
        differing = [group for group in self._actions.groups if moved or ran[group.fqn] != expected[group.fqn]]
        return all(group.options.reduce_unused and not group.settings.gives_up[group.is_root] for group in differing)

    def _count_votes(self, arrived: frozenset[str]) -> None:
        """Count the votes of those process groups in which a gather has arrived.

        A gather arrives after all ranks of its group have issued it, and so after they have cast their votes (`begin`).
        """
        assert self._vote is not None
        ballot, decide = self._vote
        outcome = ballot.count(arrived)
        if outcome is not Outcome.OPEN:
            self._vote = None
            decide(ballot, outcome)

    # ---- bytes and times

    def between_steps(self) -> None:
        """At the end of an iteration: compare its peak with the planned one if it has grown, and times if due."""
        if self._actions.pool.peak_bytes > self._most_bytes:
            self._compare_bytes()
        if self._order.plan.prefetch.kind == "auto" or self.measuring.is_on:
            self._compare_times()

    def _compare_bytes(self) -> None:
        """Count the peak of live bytes, which has grown, if it exceeds the planned peak."""
        self._most_bytes = self._actions.pool.peak_bytes
        if self._actions.recorder.history.last is None or self._most_bytes <= self._order.plan.peak_bytes:
            return
        self.drifts["bytes"] += 1
        self._want(self._order.described)  # dtypes or options may have changed since the plan was made

    def _compare_times(self) -> None:
        """After measured steps: make a new plan, unless the measured times match those of the plan."""
        plan = self._order.plan
        seconds = self.measuring.between_steps(plan)
        if seconds is None:
            return
        agreed = dict(zip(seconds, slowest(list(seconds.values()), self._linked), strict=True))
        costs = costs_of(plan, agreed, self._actions.streams)
        if plan.costs is not None:
            self.measuring.check_later()
            if not time_drift(plan, replace(plan, costs=costs).times() or {}):
                return
            self.drifts["time"] += 1
        measured = plan.with_policies(costs=costs)
        agree(measured, self._linked)
        self._adopt(measured)

    # ---- changes by users

    def asked(self, plan: ShardPlan, given: bool) -> None:
        """Follow a user's plan from now on. The next forward raises an error unless all ranks have the same plan.

        Raises:
            ShardConfigValueError, PoolBudgetError: as in `Order.follow`.
        """
        self._order.follow(plan)
        self._is_given, self._vote, self._changed = given, None, True

    def settings_changed(self) -> None:
        """Make a new plan from the current options of the groups; all ranks must have changed them in the same way."""
        if (plan := self._order.described()) is not self._order.plan:
            self._warn_of_loss(self._order.plan.diff(plan).partition("\n")[0])
            self.asked(plan, given=False)

    def converted(self) -> None:
        """Note that parameters may have a new dtype, or groups other communication.

        If the plan depends on it, the next forward makes a new plan and compares it with other ranks.
        """
        self._may_differ = True

    def _take_changes(self) -> None:
        self._may_differ = False
        self.settings_changed()
        if self._changed:
            self.seat.follow(self._order.plan)
        self._changed = False

    # ---- a new plan

    def _want(self, make: Callable[[], ShardPlan], may_be_alone: bool = False) -> None:
        """Start a vote on another plan, which takes effect once all ranks want it. Does nothing after too many votes.

        Args:
            make: makes the plan.
            may_be_alone: whether only some ranks may want the plan, without an error or a warning.
        """
        if self._vote is not None or self._votes >= _FREE_BALLOTS + self._forwards // _FORWARDS_A_BALLOT:
            return
        plan = make()
        if plan == self._order.plan:
            return
        self._votes += 1
        if self._among:
            self._vote = (
                Ballot(plan, self._among, self._group_names, self._forwards),
                partial(self._decide, may_be_alone),
            )
        else:
            self._adopt(plan)

    def _decide(self, may_be_alone: bool, ballot: Ballot, outcome: Outcome) -> None:
        """Act on the outcome of a vote; `may_be_alone` as for `_want`."""
        if outcome is Outcome.ALL:
            self._adopt(ballot.plan)
        elif not may_be_alone:
            if outcome is Outcome.APART:
                ballot.explain()
            self._warn_alone(ballot.plan)

    def _adopt(self, plan: ShardPlan) -> None:
        """Follow a new plan that all ranks made from what happened. A vote on the old plan becomes void."""
        if changes := order_drift(self._order.plan, plan):
            self._warn_of_loss(changes[0])
        self._order.follow(plan)
        self.seat.follow(plan)
        self._vote = None
        self.replans += 1

    def _warn_of_loss(self, why: str) -> None:
        if self._is_given:
            self._is_given = False
            text = f"set_plan: the given plan is no longer followed ({why}); its policies were used to make a new plan"
            warnings.warn(text, stacklevel=2)

    def _warn_alone(self, plan: ShardPlan) -> None:
        """Warn once that not all ranks have deviated from the plan, or not in the same way."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"rank {dist.get_rank()}: a root forward deviated from the plan, and not in the same way on all ranks "
            f"({self._order.plan.diff(plan).partition(chr(10))[0]}). All ranks keep their plan. If ranks run different "
            "modules in one step, a collective of one module is paired with that of another. Run the same modules on "
            "all ranks. If some modules run on some ranks only, call unshard() for them on all ranks and "
            "set_reduce_scatter_unused_params(True)",
            stacklevel=2,
        )


def _gathers(seen: Record) -> list[str]:
    """FQNs of the groups whose gathers were issued, in order."""
    return [action.fqn for action in seen.actions if action.kind is Kind.UNSHARD]


def _arrived(actions: Iterable[Action]) -> frozenset[str]:
    """FQNs of the groups whose gathers were both issued and waited for in these actions."""
    issued: set[str] = set()
    arrived: set[str] = set()
    for action in actions:
        if action.kind is Kind.UNSHARD:
            issued.add(action.fqn)
        elif action.kind is Kind.WAIT and action.fqn in issued:
            arrived.add(action.fqn)
    return frozenset(arrived)
