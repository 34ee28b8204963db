"""The engine: one per root. Events come in from modules and autograd; actions on groups go out.

It is the only holder of iteration state. It holds groups, never modules nor graphs: a graph may hold the engine, so
that backward works after the model is gone, and a model is freed without the cycle collector.

    the outermost forward begins    enter: recover from a failure, drop weights that are out of date
    forward of a module begins      before_forward: gather, make the node, gather the next one ahead
    ... ends                        after_forward: reshard
    the outermost forward ends      leave: learn the order, drop what was gathered in vain
    backward reaches its outputs    before_backward: gather, show the node's outputs, gather the next one ahead
                                    (in a checkpoint under a budget: when its weights are asked for, see `_late`)
    backward asks for a weight      fetch: gather
    its gradients are there         on_gradients: end the use (reshard), hand the gradients on (see `_gradients`)
    backward ends                   _end_backward: wait, set `.grad`, reshard what is left

What else it hears of: the end of a graph (`on_node_gone`), of the saved weights of a frozen group, which has no node
(`on_handles_gone`), and gradients of weights that were read outside of a forward (`on_gradient_outside_forward`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .._comm.agreement import Among, real
from .._errors import ShardConfigStateError
from .._group.bucket import Bucket
from .._group.group import Entries, Gradients, ParamGroup, Runtime
from .._group.optimizers import watch_steps
from .._group.phases import SHARDED, UNSHARDED, GradPhase
from .._plan.plan import ShardPlan
from .._plan.record import Record
from .._plan.schedule import Kind
from .._torch.core import Fate, apart_from_checkpoints, current_backward, queue_backward_callback
from .actions import Actions
from .backward import BackwardPass, Passed, Token, Uses
from .gradients import GradientFlow, watch_leaf
from .iterations import Iterations
from .late import LateUses
from .node import Keeper, Outputs, Use, Witness, unshard
from .order import Order
from .replanning import Learning
from .stopwatch import Stopwatch
from .tuning import Tuning


def _group_of(bucket: Bucket) -> ParamGroup:
    """Whose bucket it is. Conversions make buckets anew.

    Raises:
        ShardConfigStateError: nobody's any more.
    """
    group: ParamGroup | None = bucket.group()
    if group is None or bucket not in group.buckets:
        raise ShardConfigStateError(
            f"parameters {', '.join(bucket.fqns)}: were converted or replaced between forward and backward; "
            "run backward first, or run forward again"
        )
    return group


class Engine:
    """Runs the groups of one root.

    Args:
        groups: all groups.
        plan: order and predictions.
        runtime: pool and lanes that the groups were built with.
        among: the process groups of the meshes, with their devices.
        look: called with the engine when a forward or a backward begins, to see whether somebody profiles it.
        without_group: the entries of sharded modules that have no parameters of their own.
        listener: gives who is told when the plan or a list of what to gather ahead has changed; None for nobody.
        is_given: whether the plan is one that a user gave.

    Attributes:
        active: by group, the use whose backward has begun and not ended.
        order, learning: what comes next, by the plan or by the user; what is learned for the next plan.
        has_run, pool: whether a module has run forward; the memory of all groups.
        witness: by which nodes learn what becomes of their gradients.
        is_last_backward: whether backward waits, at its end, for the reductions that it has issued.
        ends_by_hand: whether the caller ends backward (`end_backward_by_hand`).
        changed_at: an event behind the last change of the parameters, from a user; good for one forward.
        profiled: whether ranges for a profiler are put around what is done (see `_profiled`).
    """

    profiled = False

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        plan: ShardPlan,
        runtime: Runtime,
        among: Among,
        look: Callable[[Engine], None],
        without_group: Sequence[Entries] = (),
        listener: Callable[[], Callable[[Order], None] | None] = lambda: None,
        is_given: bool = False,
    ) -> None:
        self._look = look
        self.groups = groups
        self.pool = runtime.pool
        self.witness = Witness()
        self.order = Order(plan, groups, runtime.pool, listener)
        self._do = Actions(groups, runtime, self.order, partial(watch_leaf, weakref.ref(self)))
        self._without_group = list(map(weakref.ref, without_group))
        self._late = LateUses(self._do.shown)
        self._gradients = GradientFlow(self._do)
        self.learning = Learning(self.order, self._do, real(among), is_given)
        self._tuning = Tuning(self.learning, self.order, self._do, among)
        self._uses = Uses()
        self.has_run, self.is_last_backward, self.ends_by_hand, self.under_hooks = False, True, False, False
        self.changed_at: torch.Event | None = None
        self._was_interrupted = False
        self._count = 0
        self._iterations = Iterations()
        self._depth = 0  # forwards of sharded modules that run inside one another
        self._pass: BackwardPass | None = None
        self.active: dict[ParamGroup, Use] = {}
        self._open: dict[ParamGroup, Use] = {}  # uses whose forward runs now
        self.keepers: dict[Bucket, Keeper] = {}  # and what the handles of frozen ones hold
        watch_steps(self)

    def parts(self) -> tuple[object, ...]:
        """The engine itself, what issues actions for it, and what decides about gradients."""
        return self, self._do, self._gradients

    @property
    def in_forward(self) -> bool:
        """Whether a forward of a sharded module runs."""
        return self._depth > 0

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun that has not ended."""
        return self._pass is not None

    @property
    def last_record(self) -> Record | None:
        """What the last finished iteration did; None if there was none yet."""
        over = (not self._iterations.waiting or self._uses.all_fired()) and self._depth == 0 and self._pass is None
        return (self._do.record_so_far() if over else None) or self._do.history.last

    # ---- forward

    def enter(self) -> None:
        """A sharded module is called. The outermost call begins a forward."""
        if self._depth == 0 and current_backward() < 0:
            self._iterations.claim()
            try:
                self._look(self)
                self._begin_forward()
            except BaseException:
                self._iterations.release()
                raise
        self._depth += 1

    def check_thread(self) -> None:
        """The root is called: not while another thread is in it. (A checkpoint around it calls it within backward.)"""
        if current_backward() < 0:
            if self._pass is not None and self._pass.alive:
                self._iterations.check_thread()
            self._iterations.claim()

    def interrupted(self) -> None:
        """A forward ends by an interrupt (Ctrl-C), which waits for nothing: the next one clears up after it."""
        self._was_interrupted = True

    @apart_from_checkpoints
    def _begin_forward(self) -> None:
        self._end_abandoned()
        if self._pass is not None or self._was_interrupted:
            self._was_interrupted = False
            self._recover()
        waiting = self._iterations.begin()
        self._uses.begin_forward(waiting)
        self._do.history.interrupted()
        if not waiting:
            self._do.roll_record()
        self._do.parameters_changed(self.changed_at)
        self.changed_at = None
        for known in self._without_group:
            if (entries := known()) is not None:
                entries.adopt()  # there is nothing to, but something may have been added
        if self._do.drop_outdated(waiting):
            self._do.rebuild(self.groups)
        elif not waiting:
            if self._uses.all_fired():  # on this rank alone: no collective may depend on it
                self._do.plan_memory()
            self.learning.between_steps()
            self._tuning.between_steps()
        self.learning.begin(torch.is_grad_enabled(), waiting)

    def leave(self, learn_order: bool) -> None:
        """The call has ended; the order of its groups is learned if it was a whole forward of the root."""
        self._depth -= 1
        if not self._depth and current_backward() < 0:
            try:
                self._end_forward(learn_order)
            finally:
                self._iterations.release()

    @apart_from_checkpoints
    def _end_forward(self, learn_order: bool) -> None:
        self._end_abandoned()  # groups of several modules, not all of which have run
        if not self._was_interrupted:
            self._do.drop_after_forward()
        if learn_order:
            self.learning.end()

    def _end_abandoned(self) -> None:
        """No forward runs now: end those of which nobody has told the end.

        Such are recomputations by a checkpoint around `super().__call__`, which end by an exception that no hook sees.
        """
        for group in self.groups:
            while group.running:
                self.after_forward(group)

    def before_forward(self, group: ParamGroup) -> tuple[Use, Outputs] | None:
        """Show the unsharded parameters to a module that is about to run; returns its use, if backward may follow."""
        if group.running:
            group.begin_forward()
            return None
        made_in = current_backward()
        if made_in >= 0:
            self._open_pass(made_in)
            self._late.begin_again(group, self._do.repeated)
        again = made_in >= 0 and group in self.active and group not in self._late
        if not again:
            self._do.need(group)
        group.begin_forward()
        self.has_run = True
        if again:
            return None  # recomputed in its own backward: the node's outputs are on show already
        made: tuple[Use, Outputs] | None = None
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._count += 1
            forward = self._iterations.forward if made_in < 0 else 0
            use = Use(group, self._count, made_in, forward, self.under_hooks)
            group.buckets[0].count_saved()
            self._open[group], made = use, (use, ())
            self._uses.add(use)
            if group.trains:
                made = (use, unshard(self, use))
                entries = group.entries()
                assert entries is not None  # its module is running
                entries.show(made[1])
                if forward:
                    self._iterations.await_backward(forward)
                    group.note_use(forward)
            else:
                self.keepers |= dict.fromkeys(group.buckets, Keeper(self, use))
        if made is None or not made[1]:
            self._do.shown.show_leaves(group)
        if made_in < 0:
            self._do.begin_forward(group, self.order.after(group))
        return made

    def after_forward(self, group: ParamGroup, copied: Sequence[torch.Tensor] = ()) -> None:
        """A module has run, or failed; views of weights in its outputs were copied and will be dropped."""
        if not group.end_forward():
            return
        ended = self._open.pop(group, None)
        if ended is not None:
            ended.end_forward(self._count, group.buckets[0].saved)
        if ended is not None or not torch.is_grad_enabled():
            group.end_use(copied)  # its outputs may hold views of weights in objects that nobody looks into
        for bucket in group.buckets if self.keepers else ():
            self.keepers.pop(bucket, None)
        self._do.end_forward(group)
        if group in self.active and group not in self._late:
            return
        self._do.leave_forward(group)

    # ---- backward

    def _open_pass(self, number: int, use: Use | None = None) -> BackwardPass:
        """The pass that runs now; its end is queued when it is first heard of."""
        if self._pass is not None and not self._pass.alive:
            self._recover()
        if self._pass is None:
            self._look(self)
            token = Token()
            self._pass = BackwardPass(number, token, self._uses, weakref.WeakMethod(self.on_pass_gone), use)
            self._iterations.reach(self._pass.newest)
            self._do.open_backward(self._pass.repeated)
            queue_backward_callback(partial(self._end_backward, token))
        self._pass.note(number)
        return self._pass

    def before_backward(self, use: Use, outputs: Outputs, gradients: object = None) -> None:
        """Backward has reached an output of a use, with these gradients."""
        now = self._open_pass(current_backward(), use)
        if use.entered == now.number:
            return
        self._finish_later_uses(now, use)
        for passed in now.reach(use):
            self._pass_over(now, passed)
        use.reach(now.number)
        self.active[use.group] = use
        missed, following = self.order.before(use, now)
        if use.under_hooks and self._do.budget.puts_off(use.group):
            self._late.put_off(use, partial(self._do.begin_backward, use, outputs, missed, following))
        else:
            self._do.begin_backward(use, outputs, missed, following)

    def _pass_over(self, now: BackwardPass, passed: Passed) -> None:
        """Gradients reach a use later, or only on other ranks: gather what is gathered with it all the same."""
        if passed.begins:
            self._do.pass_over(passed.use.group, *self.order.before(passed.use, now))
        else:
            self._do.end_use(passed.use.group, passed.following)

    def halfway(self) -> None:
        """Backward has read half of the weights of the use that it has reached last."""
        self._do.catch_up()

    def _finish_later_uses(self, now: BackwardPass, use: Use) -> None:
        """Complete the uses that get no more gradients.

        Backward goes from late uses to early ones. One that began after the forward of `use` was over has been passed;
        if its own node does not run in this pass, nothing more will come.
        """
        for later in [u for u in self.active.values() if u.number > use.last and not now.will_fire(u)]:
            self._complete(now, later, [None] * len(later.group.params))

    def fetch(self, bucket: Bucket) -> None:
        """Backward asks for a saved weight."""
        group = _group_of(bucket)
        if group.phase is UNSHARDED:
            return
        if (number := current_backward()) >= 0:
            self._open_pass(number)
            self._late.begin(group)
            self._do.catch_up()
        self._do.need(group)

    def on_gradients(self, use: Use, node: Any, gradients: Gradients) -> list[torch.Tensor | None]:
        """The node of a use runs."""
        number = current_backward()
        now = self._open_pass(number, use)
        self._gradients.take_hooks(use.group)
        fates = self.witness.fates(node, number)
        wanted = gradients
        if fates is not None:
            wanted = [None if fate is Fate.DROPPED else g for fate, g in zip(fates, gradients, strict=True)]
            if Fate.RETURNED in fates:
                self._end_use(now, use)
                return self._gradients.returned(use, fates, wanted, self.is_last_backward)
        if now.completes(use, number):
            self._complete(now, use, wanted)
        else:
            use.keep(wanted)
        return [None] * len(gradients)

    def _complete(self, now: BackwardPass, use: Use, gradients: Gradients) -> None:
        """The last gradients of a use are there."""
        total = use.complete(gradients)
        for passed in now.leave(use):
            self._pass_over(now, passed)
        self._end_use(now, use)
        self._gradients.take(now, use, total)

    def _end_use(self, now: BackwardPass, use: Use) -> None:
        """The backward of a use is over: reshard, unless its weights are about to be needed again."""
        if self.active.get(use.group) is use:
            del self.active[use.group]
            self._late.end(use.group)
        if use.group.running and not self._depth:  # a recomputation that was stopped as soon as it had done enough
            use.group.forget_forwards()
        for bucket in use.group.buckets:
            bucket.end_reads()
        self._do.end_use(use.group, now.next_group())

    def _end_backward(self, token: Token) -> None:
        """The outermost pass has ended well."""
        if (now := self._pass) is None or not now.is_of(token):
            return
        self._do.compute_ended(Kind.BACKWARD)
        with torch.no_grad():
            if not self._depth:
                self._end_abandoned()
            self._do.catch_up()
            for use in list(self.active.values()):
                self._complete(now, use, [None] * len(use.group.params))
            for passed in now.reach(None):
                self._pass_over(now, passed)
        self.end_backward_by_hand(self.is_last_backward and not self.ends_by_hand, now)
        self._forget_pass()

    def end_backward_by_hand(self, wait: bool = True, now: BackwardPass | None = None) -> None:
        """Reduce what is kept, wait (or leave that to `settle`), and reshard."""
        with torch.no_grad():
            self._gradients.finish(now, self.groups, wait)
        self._do.drop_after_backward()

    def reset(self) -> None:
        """Give up whatever a failed forward or backward has left behind, and all gradients that are kept."""
        self._depth = 0
        self._iterations.release()
        self._forget_running()
        for group in self.groups:
            group.forget_gradients()
        self._recover()

    def _forget_running(self) -> None:
        for group in self.groups:
            group.forget_forwards()
        self._open.clear()

    def _forget_pass(self) -> None:
        self._uses.forget(self._pass.forwards if self._pass is not None else ())
        self._late.clear()
        self._pass = None
        self._do.close_backward()
        self.active.clear()

    def on_pass_gone(self) -> None:
        """A pass has ended, or failed: then modules get their sharded parameters back; `_recover` does the rest."""
        if self._pass is not None and not self._pass.alive:
            self._late.clear()
            if not self._depth:  # an interrupted recomputation tells nobody of its end
                self._forget_running()
            self._do.shown.hide_idle(self.groups)

    def _recover(self) -> None:
        """A backward has failed: give up what it left behind."""
        self._gradients.discard()
        self._forget_pass()
        self._iterations.end()
        self._uses.forget()
        for use in self._uses:
            use.forget()
        self._do.drop_idle()

    def on_node_gone(self, use: Use) -> None:
        """The graph of a use was freed."""
        self._uses.graph_gone(use)

    def on_handles_gone(self, use: Use) -> None:
        """The last saved weight of a use of a group without gradients was freed."""
        self._uses.graph_gone(use)
        if self.active.get(use.group) is use and self._pass is not None and self._pass.alive:
            self._end_use(self._pass, use)

    def on_gradient_outside_forward(self, group: ParamGroup, index: int, gradient: torch.Tensor) -> None:
        """A gradient came to an unsharded parameter that was read outside of its module's forward."""
        self._open_pass(current_backward())
        self._gradients.add_outside_forward(group, index, gradient)

    def before_first_reduction(self, ask: Callable[[], None]) -> None:
        """Have this called before any gradient is reduced, until it succeeds."""
        self._do.before_first_reduction(ask)

    # ---- what users ask for

    def unshard(self, group: ParamGroup, wait: bool) -> None:
        """Gather a group and keep it until `reshard`, its next use, or a change of its parameters."""
        self._do.pin(group, wait)

    def reshard(self, group: ParamGroup) -> None:
        """Give the weights of a group up, unless a forward reads them now."""
        if not group.running and group.phase is not SHARDED:
            self._do.drop(group)

    def count_memory(self, wanted: bool) -> None:
        """Whether a tool counts memory on this rank: then what is leased is memory of its own (`BufferPool.owns`).

        That is from the next forward that begins when no graph reads weights. No collective may depend on it: what is
        gathered or reduced right now stays so.
        """
        self.pool.count(wanted)
        busy = self._depth or self._pass is not None or current_backward() >= 0 or not self._uses.all_fired()
        if busy or any(group.grad_phase is GradPhase.REDUCING for group in self.groups):
            return
        self._do.rebuild(self.groups)
        self.pool.own(wanted)

    def _watch(self, on: bool) -> None:
        self._tuning.watch(Stopwatch(self.pool.device) if on else None)

    watched = property(fset=_watch, doc="Whether what is done is timed.")

    def converted(self, groups: Sequence[ParamGroup]) -> None:
        """Parameters were moved or converted: memory goes back, unless a graph still needs it for its backward."""
        if self._depth or self._pass is not None or not self._uses.all_fired():
            return
        self._gradients.settle()
        self._do.rebuild(groups)
        self.learning.converted()

    def before_optimizer_step(self, theirs: set[int]) -> None:
        """No unsharded copy outlives the values that it was made of, and no graph may ask for them any more."""
        for group in self.groups:
            if not theirs.isdisjoint(map(id, group.shards)):
                self._iterations.end()
                if self._pass is None:
                    self._gradients.settle()  # of a backward that was not the last one
                group.stepped()
                self.reshard(group)

    def check_reduced(self, theirs: set[int]) -> None:
        """An optimizer is about to read the gradients of these parameters, by id."""
        for group in self.groups:
            if group.grad_phase is not GradPhase.NONE and not theirs.isdisjoint(map(id, group.shards)):
                if self._pass is None:
                    self._gradients.settle()  # of a backward that was not the last one
                group.check_reduced(theirs)
