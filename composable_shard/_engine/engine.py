"""The engine, one per root. Modules and autograd report events to it, and it responds with actions on groups.

The engine holds the state of an iteration as a whole: what runs, and what comes next. It holds groups and never
modules. It holds outputs of nodes, and with them graphs, only while a forward or backward needs them. Graphs may
therefore hold the engine: backward still works after the model was deleted, and a model is freed without the cycle
collector.

    event                                method: what the engine does

    the outermost forward begins         enter: recover from a failure, reshard outdated groups
    a module's forward begins            before_forward: gather its group, make the node of the use, prefetch
    a module's forward ends              after_forward: reshard
    the outermost forward ends           leave: learn the order, reshard prefetched groups that were not used
    backward reaches a use's outputs     before_backward: gather, install the node's outputs again, prefetch
    backward unpacks a saved weight      fetch: gather, if the group is sharded
    the node of a use runs               on_gradients: reshard, pass the gradients on (see `gradients.py`)
    the outermost backward ends          _end_backward: wait for reductions, set `.grad`, reshard the remaining groups

Rarer events, such as a failure, or a gradient for a tensor that was read outside forward, have methods of their own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .._comm.agreement import Among
from .._comm.copies import Gradients
from .._faults.seat import Seat
from .._group.bucket import Bucket, Saved
from .._group.edits import lost_edit
from .._group.group import Entries, ParamGroup
from .._group.hooks import WATCHED
from .._group.optimizers import watch_steps
from .._group.phases import SHARDED, UNSHARDED, GradPhase
from .._group.setup import Runtime
from .._plan.plan import ShardPlan
from .._plan.record import Record
from .._plan.schedule import Kind
from .._torch.core import (
    Fate,
    apart_from_checkpoints,
    current_backward,
    is_profiled,
    passes_through,
    queue_backward_callback,
)
from ..errors import ShardConfigStateError
from .actions import Actions
from .backward import BackwardPass, Skipped, Token
from .capturing import Capturing
from .gradients import GradientFlow, watch_leaf, watch_replaced
from .iterations import Iterations
from .node import Keeper, Outputs, Use, Uses, Witness, unshard
from .order import Order
from .recorder import is_logged
from .review import Review

# Packages above the engine (`_fsdp2`) add functions here. Each takes an engine, and returns subclasses to which the
# engine and its parts must be switched while a tool needs that, or None (`tools.py`).
CHOOSERS: list[Callable[[Engine], tuple[type, ...] | None]] = []


def _group_of(bucket: Bucket) -> ParamGroup:
    """The group that a bucket belongs to.

    Raises:
        ShardConfigStateError: the group was freed, or its buckets were replaced, for example by a conversion of
            its parameters.
    """
    group: ParamGroup | None = bucket.group()
    if group is None or bucket not in group.buckets:
        raise ShardConfigStateError(
            f"parameters {', '.join(bucket.fqns)}: were converted or replaced between forward and backward; "
            "run backward before the change, or run forward again after it"
        )
    return group


class Engine:
    """Runs eager steps of the groups of one root.

    Args:
        groups: all groups.
        plan: the order of the groups, and predictions.
        runtime: the pool and lanes that the groups were built with.
        among: the process groups of the meshes, with their devices.
        seat: the model's entry in the ledgers of these process groups.
        on_tools_changed: called with the engine when a forward, a backward or an `unshard()` begins and *tools* are
            active, or were: a profiler, debug logs, or listeners of `_fsdp2`. It switches the engine to the classes
            that they need (`tools.py`).
        without_group: the entries of sharded modules that have no parameters of their own.
        listener: returns the function to call when the plan or a user's prefetch list has changed, or None.
        is_given: whether a user set the plan.

    Attributes:
        groups: all groups.
        active: by group, the use whose backward is running.
        order: which group comes next, according to the plan or to the user's lists.
        review: compares what happens with the plan, and makes a new plan if they differ.
        uses: the uses that a backward may still go through.
        pool: the memory of all groups.
        witness: tells what autograd will do with the gradients that a node returns (`Witness.fates`).
        keepers: by bucket, for frozen groups whose forward is running. A frozen group has no node that tells when its
            backward is over. Instead, all handles made in this forward hold its keeper, and the engine is told when
            the keeper is deleted, that is, when the last of these handles was freed (`on_handles_gone`).
        under_hooks: whether the last forward that began runs under saved-tensor hooks of other code, such as a
            checkpoint.
        is_last_backward: set by `set_is_last_backward`. If True, gradients that `torch.autograd.grad` returns are
            reduced even if gradient sync is off, unless `ends_by_hand`.
        ends_by_hand: whether the caller finishes each backward (`finish_backward`), as a pipeline does.
        capturing: keeps work in captures of CUDA graphs apart from work outside.
        profiled: whether the engine's work runs in profiler ranges (see `profiling.py`).
    """

    profiled = False

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        plan: ShardPlan,
        runtime: Runtime,
        among: Among,
        seat: Seat,
        on_tools_changed: Callable[[Engine], None],
        without_group: Sequence[Entries],
        listener: Callable[[], Callable[[Order], None] | None],
        is_given: bool,
    ) -> None:
        self._on_tools_changed = on_tools_changed
        self.groups = groups
        self.pool = runtime.pool
        self.witness = Witness()
        self.order = Order(plan, groups, runtime.pool, listener)
        take_gradient = weakref.WeakMethod(self.on_gradient_outside_forward)
        self._actions = Actions(groups, runtime, self.order, partial(watch_leaf, take_gradient), without_group)
        self._gradients = GradientFlow(self._actions)
        self.review = Review(self.order, self._actions, among, seat, is_given)
        self.uses = Uses()
        self.is_last_backward, self.ends_by_hand, self.under_hooks = True, False, False
        self.capturing = Capturing(self._actions, runtime.pool)
        self._iterations = Iterations()
        self._depth = 0  # how many forwards of sharded modules are nested now
        self._pass: BackwardPass | None = None
        self.active: dict[ParamGroup, Use] = {}
        self.keepers: dict[Bucket, Keeper] = {}
        watch_steps(self)
        for group in groups:
            self._watch_copies(group)
        if runtime.gather_lane.streams:
            weakref.finalize(self, runtime.pool.memory.leave, runtime.gather_lane, runtime.reduce_lane)

    def _watch_copies(self, group: ParamGroup) -> None:
        """Watch for gradients of tensors that users may have kept from before the engine was created."""
        take = weakref.WeakMethod(self.on_gradient_outside_forward)
        refuse = weakref.WeakMethod(self.on_gradient_of_replaced)
        for index, param in enumerate(group.params):
            if (whole := param.replaced) is not None:
                watch_replaced(refuse, whole)
            for leaf in param.kept_ones():
                if WATCHED in leaf.__dict__:
                    watch_leaf(take, leaf, group, index)

    def parts(self) -> tuple[object, ...]:
        """The objects whose classes `tools.py` replaces, in the order in which it names them."""
        return self, self._actions, self._actions.recorder, self._actions.reductions, self._gradients

    @property
    def changed_at(self) -> torch.Event | None:
        """An event that a user recorded after the last parameter change (`set_post_optim_event`).

        The next forward uses it instead of recording one.
        """
        return self.capturing.changed_at

    @changed_at.setter
    def changed_at(self, event: torch.Event | None) -> None:
        self.capturing.note_change(event)

    @property
    def has_run(self) -> bool:
        """Whether a forward of any group has begun."""
        return self._iterations.has_run

    @property
    def is_of_this_thread(self) -> bool:
        """Whether no other thread has run its last eager forward. Simulated ranks are threads."""
        return self._iterations.thread in (0, threading.get_ident())

    @property
    def runs(self) -> tuple[int, int, int]:
        """Numbers that change if the model runs: of root forwards, gathers of compiled graphs, and the capture."""
        return self._iterations.forward, sum([group.gathers_of_graphs for group in self.groups]), self.capturing.number

    @property
    def in_forward(self) -> bool:
        """Whether a forward of a sharded module is running."""
        return self._depth > 0

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and not ended, or has failed and was not cleaned up yet."""
        return self._pass is not None

    @property
    def last_record(self) -> Record | None:
        """The record of the last finished iteration; None if there is none yet."""
        # A forward whose backward will follow has only the first half of the actions.
        over = (not self._iterations.waiting or self.uses.all_fired()) and self._depth == 0 and self._pass is None
        return (self._actions.recorder.so_far() if over else None) or self._actions.recorder.history.last

    # ---- forward

    def enter(self, is_root: bool) -> None:
        """Enter a call of a sharded module. The outermost call begins a forward.

        A call in backward begins none: it is a recomputation by a checkpoint.

        Raises:
            ShardConfigStateError: another thread is running the root.
        """
        if (is_root or self._depth == 0) and current_backward() < 0:
            # While a backward is running, only the thread of its forward may begin another forward. `claim` compares
            # threads only while forwards run.
            if is_root and self._pass is not None and self._pass.alive:
                self._iterations.check_thread()
            self._iterations.claim()
            if self._depth == 0:
                try:
                    self._follow_tools()
                    self._begin_forward()
                except BaseException:
                    self._iterations.release()
                    raise
        self._depth += 1

    def _follow_tools(self) -> None:
        """At the start of a forward, backward or unshard: if tools are or were active, switch to their classes."""
        if CHOOSERS or is_profiled() or self.profiled or is_logged():
            self._on_tools_changed(self)

    def failed(self, error: BaseException) -> None:
        """Report a failed forward. After an interrupt (Ctrl-C), wait for nothing; the next forward cleans up."""
        self.review.seat.failed(error)
        if isinstance(error, Exception):
            self._actions.recorder.explain(error)
        else:
            self._iterations.interrupt()

    def show_sharded(self) -> None:
        """After the outermost forward failed: install the sharded parameters, so that the program can continue."""
        if self._depth == 1 and current_backward() < 0:
            self._actions.install_sharded()

    @apart_from_checkpoints
    def _begin_forward(self) -> None:
        self.capturing.follow()
        self._end_abandoned()  # of an earlier forward that failed
        if self._pass is not None or self._iterations.was_interrupted:  # a pass that succeeds sets `_pass` to None
            self._recover()
        waiting = self._iterations.begin()
        if self.uses.lost:
            self.uses.forget_lost(waiting)
        if not waiting:  # otherwise this forward belongs to the iteration of the one that waits for its backward
            self._actions.recorder.end_iteration()
        self._actions.parameters_changed(self.capturing.take_change())
        replaced = self._actions.reshard_outdated(waiting)
        if self.capturing.number:
            self.capturing.check_forward(replaced, self.review.has_learned if torch.is_grad_enabled() else self.has_run)
        elif replaced:
            self._actions.rebuild(self.groups)
        elif not waiting:
            self._between_iterations()
        self.review.begin(torch.is_grad_enabled(), waiting, bool(self.capturing.number))
        self._actions.begin_refreshes()

    def _between_iterations(self) -> None:
        # Ranks may differ in which graphs are alive, and so make an arena at different times. They may, because making
        # one needs no collective.
        if self.pool.wants_arena and self.uses.all_fired():
            self._actions.plan_memory()
        self.review.between_steps()

    def leave(self, learn_order: bool, failed: bool) -> None:
        """Leave a call of a sharded module, successful or not.

        Args:
            learn_order: whether it was a successful call of the root. Then the review checks its order.
            failed: whether the call failed.
        """
        self._depth -= 1
        if not self._depth and current_backward() < 0:
            try:
                self._end_forward(learn_order, failed)
            finally:
                self._iterations.release()

    @apart_from_checkpoints
    def _end_forward(self, learn_order: bool, failed: bool) -> None:
        self._end_abandoned(failed)  # for example, of a group with several modules that have not all run
        self._actions.end_refreshes(self._iterations.was_interrupted)
        if not self._iterations.was_interrupted:
            self._actions.end_root_forward(failed)
        if not torch.is_grad_enabled():
            self.capturing.end()
        if learn_order:
            self.review.end(bool(self.capturing.number))

    def _end_abandoned(self, failed: bool = True) -> None:
        """After the last forward: end the forwards whose end was not reported.

        A checkpoint around `super().__call__` stops its recomputation by an exception, which no forward hook sees.
        """
        for group in self.groups:
            while group.running:
                self.after_forward(group, failed=failed)

    def before_forward(self, group: ParamGroup) -> tuple[Use, Outputs] | None:
        """Before a module runs: gather its group and install the unsharded parameters.

        Returns:
            the new use and the outputs of its node (empty for a frozen group). None if no backward can follow, or if
            the use exists already.
        """
        if group.running:
            group.running += 1
            return None
        made_in = current_backward()
        if made_in >= 0:
            self._open_pass(made_in)
            if group in self.active:  # a checkpoint recomputes it within its own backward: this is no new use
                if group.phase is not UNSHARDED:
                    self._actions.gather_again(group)
                self._actions.installed.install_gathered(group)
                group.running += 1
                return None
        self._actions.gather(group)
        self._iterations.has_run = True
        group.running += 1
        made: tuple[Use, Outputs] | None = None
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            made = self._begin_use(group, made_in)
        if made is None or not made[1]:  # there is no node whose outputs could be installed
            self._actions.installed.install_leaves(group)
        if made_in < 0:  # recomputations are part of a backward, which has prefetches of its own
            self._actions.begin_forward(group)
            if following := self.order.after(group):
                self._actions.prefetch(following)
        return made

    def _begin_use(self, group: ParamGroup, made_in: int) -> tuple[Use, Outputs]:
        """Make the use of a forward that a backward may follow and, unless the group is frozen, its node."""
        forward = self._iterations.forward if made_in < 0 else 0
        use = self.uses.begin(group, made_in, forward, self.under_hooks)
        if not group.trains:
            self.keepers |= dict.fromkeys(group.buckets, Keeper(self, use))
            return use, ()
        outputs = unshard(self, use)
        entries = group.entries()
        assert entries is not None  # its module is running
        entries.install(outputs)
        group.begin_forward(outputs, forward)
        if forward:
            self._iterations.await_backward(forward)
        return use, outputs

    def after_forward(self, group: ParamGroup, copied: Sequence[torch.Tensor] = (), failed: bool = False) -> None:
        """End a module's forward, successful or not.

        Args:
            group: the module's group.
            copied: the views of weights that were in the module's outputs. The caller has replaced them by copies and
                is about to release them.
            failed: whether the forward ended with an error, which the caller raises. Then edits are not checked for,
                because other ranks may not have failed.

        Raises:
            StaleStateError: the forward edited its weights in place. Its group is still resharded.
        """
        group.running -= 1
        if group.running:
            return
        written = False
        # Not after a recomputation of an active use: it has no use of its own, and its weights stay as they are.
        if self.uses.end_forward(group) or not torch.is_grad_enabled():
            written = group.end_forward(copied)  # also finds views of weights that user code keeps
        for bucket in group.buckets if self.keepers else ():
            self.keepers.pop(bucket, None)
        stays = group in self.active
        if failed:
            self._actions.end_failed_forward(group, stays, written)
            return
        edited = self._actions.find_edits(group) if written else ()
        self._actions.end_forward(group, stays)  # also after an edit: it ends timers and installs the right tensors
        if edited:
            self._actions.reshard(group, check_edits=False)  # if it stayed unsharded: edited weights must not be read
            raise lost_edit(edited)

    # ---- backward

    def _open_pass(self, number: int, use: Use | None = None) -> BackwardPass:
        """Return the outermost backward pass that is running. The first call in a pass creates it.

        Before that, it cleans up after an earlier pass that failed. Then it queues `_end_backward` for the pass's end.

        Args:
            number: autograd's number of the running pass, which may be nested in the outermost one.
            use: the use that backward has reached, if known.
        """
        if self._pass is not None and not self._pass.alive:
            self._recover()
        if self._pass is None:
            self.capturing.follow()
            self._follow_tools()
            token = Token()
            self._pass = BackwardPass(number, token, self.uses, weakref.WeakMethod(self.on_pass_ended), use)
            self._iterations.reach(self._pass.newest)
            self._actions.open_backward(self._pass.repeated)
            queue_backward_callback(partial(self._end_backward, self._pass, token))
        if self._pass.current != number:
            self._pass.note(number)
        return self._pass

    def before_backward(self, use: Use, outputs: Outputs, gradients: object = None) -> None:
        """Backward has reached an output of a use. `gradients` are the gradients of this output; they are not read."""
        now = self._open_pass(current_backward(), use)
        if use in now.entered:
            return
        if self.active:
            self._finish_later_uses(now, use)
        for skipped in now.reach(use):
            self._skip(now, skipped)
        now.entered.add(use)
        self.active[use.group] = use
        missed, following = self.order.before(use, now)
        self._actions.begin_backward(use, outputs, missed, following)

    def _skip(self, now: BackwardPass, skipped: Skipped) -> None:
        """Handle a use that backward skips: its node runs later in this pass, or only on other ranks.

        All ranks must issue the same gathers in the same order, and another rank may reach the use here. So this rank
        issues the gathers of that rank now, and reshards where that rank ends the use.
        """
        if skipped.begins:
            self._actions.skip_use(skipped.use.group, *self.order.before(skipped.use, now))
        else:
            self._actions.end_use(skipped.use.group, skipped.following)

    def halfway(self) -> None:
        """Backward has read half of the saved weights of the use that it reached last: issue the held-back gathers."""
        self._actions.issue_held_prefetches()

    def _finish_later_uses(self, now: BackwardPass, use: Use) -> None:
        """Complete the uses that get no more gradients once backward has reached `use`.

        Without this, a use whose node this pass does not run would stay active, and gathered, until backward ends.
        """
        for later in list(self.active.values()):
            if self._is_past(later, use) and later not in now.will_fire:
                self._complete(now, later, [None] * len(later.group.params))

    def _is_past(self, other: Use, use: Use) -> bool:
        """Whether backward, which has now reached `use`, is done with `other`, a use that it has reached before.

        There are two cases. (Uses are numbered in the order in which they begin, see `Use.number` and `Use.last`.)

        1. `other` began after the forward of `use` had ended. Backward goes from the last use to the first.
        2. Checkpoints have recomputed both, first `other` and then `use`. Backward recomputes from the last block to
           the first, so it is done with the block of `other`. The exception: if `use` is a module within `other`, a
           checkpoint within `other` has recomputed it, and backward is still in `other`.
        """
        if other.number > use.last:
            return True
        return other.made_in >= 0 and other.last < use.number and not self.order.encloses(other.group, use.group)

    def fetch(self, bucket: Bucket) -> None:
        """Gather the group of a saved weight that backward unpacks, unless it is unsharded already."""
        group = _group_of(bucket)
        if group.phase is UNSHARDED:
            return
        if (number := current_backward()) >= 0:
            self._open_pass(number)
            # Some gathers may be held back until reductions are waited for. All ranks issue them first, in this order.
            self._actions.issue_held_prefetches()
        self._actions.gather_again(group)

    def on_gradients(self, use: Use, node: Any, gradients: Gradients) -> list[torch.Tensor | None]:
        """Handle the gradients of a use when its node runs.

        Returns:
            the values that the node returns to autograd for the sharded parameters. These are gradients where
            `torch.autograd.grad` asks for them, and None elsewhere, because the engine sets `.grad` itself after the
            reduction.
        """
        number = current_backward()
        now = self._open_pass(number, use)
        self._gradients.take_hooks(use.group)
        fates = self.witness.fates(node, number)
        wanted = gradients
        if fates is not None:
            wanted = [None if fate is Fate.DROPPED else g for fate, g in zip(fates, gradients, strict=True)]
            if Fate.RETURNED in fates:
                self._end_use(now, use)
                is_last = self.is_last_backward and not self.ends_by_hand
                return self._gradients.returned(use, fates, wanted, is_last)
        if now.completes(use, number):
            self._complete(now, use, wanted)
        else:
            use.keep(wanted)
        return [None] * len(gradients)

    def _complete(self, now: BackwardPass, use: Use, gradients: Gradients) -> None:
        """End a use whose last gradients have arrived, and pass their sum on."""
        total = use.complete(gradients)
        for skipped in now.leave(use):
            self._skip(now, skipped)
        self._end_use(now, use)
        self._gradients.take(now, use, total)

    def _end_use(self, now: BackwardPass, use: Use) -> None:
        """End the backward of a use: reshard, unless its weights are needed again immediately."""
        if self.active.get(use.group) is use:
            del self.active[use.group]
            self._actions.budget.unread.pop(use.group, None)
        # A checkpoint stops a recomputation as soon as all tensors are recomputed, so its end is not reported. (If
        # `_depth` is not 0, this backward runs within a forward. That forward may be running the group.)
        if use.group.running and not self._depth:
            use.group.running = 0
        self._actions.end_use(use.group, now.next_group())

    def _end_backward(self, now: BackwardPass, _token: Token) -> None:
        """End the outermost backward pass, which had no error. Autograd calls this (`queue_backward_callback`).

        The callback holds the pass's token, so that the token is deleted if autograd drops the callback (`Token`).
        """
        if now is not self._pass:  # `reset`, or a forward that began during the pass, has cleaned up already
            return
        if (watch := self._actions.recorder.watch) is not None:
            watch.end(Kind.BACKWARD)
        with torch.no_grad():
            if not self._depth:  # otherwise this backward runs within a forward, whose modules are still running
                self._end_abandoned()
            self._actions.issue_held_prefetches()
            for use in list(self.active.values()):
                self._complete(now, use, [None] * len(use.group.params))
            for skipped in now.reach(None):
                self._skip(now, skipped)
        self.finish_backward(not self.ends_by_hand, now)
        self._forget_pass()

    def finish_backward(self, wait: bool = True, now: BackwardPass | None = None) -> None:
        """Reduce the remaining gradients, then reshard.

        Args:
            wait: whether to wait for all reductions; if not, a later `GradientFlow.settle` does.
            now: the pass that ends, if there is one; None for a call of `finalize_backward`.
        """
        if now is None:
            self.capturing.follow_end_by_hand()
        with torch.no_grad():
            self._gradients.finish(now, self.groups, wait)
        # A pass may go through no forward of the model, for example if a loss outside reads unsharded weights. After
        # such a pass, groups on which users have called `unshard` stay unsharded. A backward that the caller finishes
        # itself (`now` is None) goes through forwards.
        self._actions.end_root_backward(ends_pins=now is None or now.newest > 0)
        self.capturing.end()

    def reduce_waiting(self, group: ParamGroup) -> None:
        """Between backwards, with gradient sync on: reduce what a group has accumulated, and set `.grad`."""
        if self._pass is None and current_backward() < 0:
            with torch.no_grad():
                self._gradients.finish_group(group)

    def reset(self) -> None:
        """Clean up after a failed forward or backward, and discard all accumulated gradients."""
        self._depth = 0
        self._iterations.release()
        self._forget_running()
        for group in self.groups:
            group.forget_gradients()
        self._recover()

    def _forget_running(self) -> None:
        for group in self.groups:
            group.running = 0  # a forward that failed or was stopped does not report its end
        self.uses.in_forward.clear()

    def _forget_pass(self) -> None:
        if self._pass is not None and self.uses.lost:
            self.uses.forget(self._pass.forwards)
        self._pass = None
        self._actions.close_backward()
        self.active.clear()

    def on_pass_ended(self) -> None:
        """Called when the token of a pass is deleted. If the pass failed, install the sharded parameters.

        The rest of the cleanup needs collectives to be waited for: `_recover`, when the next forward or pass begins.
        """
        if self._pass is not None and not self._pass.alive:  # None after a success: `_end_backward` has run before
            self._actions.budget.unread.clear()
            if not self._depth:  # an interrupted recomputation never reports its end
                self._forget_running()
            self._actions.install_sharded()
            self._actions.installed.close_backward()
            self._actions.end_reads()
            self.review.seat.failed("an error in its backward")

    def _recover(self) -> None:
        """Clean up after a failed backward or an interrupted forward."""
        self._gradients.discard()
        self._actions.forget_copies()
        self._forget_pass()
        self._iterations.end()
        self.uses.forget()
        for use in self.uses:
            use.forget()
        self._actions.reshard_after_failure()

    def on_handles_gone(self, use: Use, saved: Saved) -> None:
        """The last saved weight of a use of a frozen group was freed: end its backward, if no weight can still be read.

        In two cases, weights can still be read without having been saved. Layers with packed weights keep views of
        them, and read these in their own backward. A module that has saved none of its weights may have run in a
        checkpoint, whose recomputation reads them (`ParamGroup.all_have_saved`).
        """
        self.uses.graph_gone(use)
        if self.active.get(use.group) is not use or self._pass is None or not self._pass.alive:
            return
        if not use.group.layout.packed and use.group.all_have_saved(saved):
            self._end_use(self._pass, use)

    def on_gradient_outside_forward(self, group: ParamGroup, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient of an unsharded parameter that was read outside its module's forward."""
        self._open_pass(current_backward())
        if (entries := group.entries()) is not None:
            entries.adopt_changes()  # the parameter may have been thawed since it was gathered
        self._gradients.add_outside_forward(group, index, gradient)

    def on_gradient_of_replaced(self, fqn: str) -> None:
        """Refuse a gradient of the tensor that the parameter of this name was before sharding.

        Raises:
            ShardConfigStateError: this backward goes through the model. In other backwards, the tensor belongs to code
                that trains it without the model, for example an unsharded copy of the model.
        """
        if self._pass is None and not any(passes_through(group.shards) for group in self.groups):
            return
        error = ShardConfigStateError(
            f"rank {dist.get_rank()}: parameter {fqn}: backward computed a gradient for the tensor that it was before "
            "fully_shard. "
            "The model still computes with that tensor, so the sharded parameter gets no gradient. A list, tuple, "
            "dict, closure or partial that was made before sharding holds it. Read the parameter from its module in "
            "forward instead (self.linear.weight), or pass it in ignored_params"
        )
        self.review.seat.failed(error)
        raise error

    def before_first_reduction(self, ask: Callable[[], None]) -> None:
        """Call `ask` before the next reduction. If it raises, call it again before the following one."""
        self._actions.reductions.call_before_next(ask)

    # ---- requests of users

    def unshard(self, group: ParamGroup, wait: bool) -> None:
        """Gather a group and keep it unsharded, as described at `FSDPModule.unshard`."""
        self._follow_tools()
        try:
            self.capturing.follow()
            # Pinned parameters whose shards have changed are gathered again, unless a backward needs the old values.
            idle = not (group.running or self._iterations.waiting or self.in_backward)
            may_differ = self._actions.may_be_replayed or group.is_stale()
            if idle and group.stay.pinned and group.phase is UNSHARDED and may_differ:
                self._actions.reshard(group)
            self._actions.pin(group, wait)
        except BaseException as error:
            self.review.seat.failed(error)
            raise

    def reshard(self, group: ParamGroup) -> None:
        """Reshard a group, unless its forward is running."""
        self.capturing.follow()
        if not group.running and group.phase is not SHARDED:
            self._actions.reshard(group)

    def rebuild_if_idle(self) -> bool:
        """Free the pool's memory and rebuild all groups, if no work uses the memory. Returns whether it did.

        Groups that stay unsharded keep their memory, and are not rebuilt. It does nothing while a forward or backward
        is running, a graph may read weights, or a reduction is in flight.
        """
        busy = self._depth or self._pass is not None or current_backward() >= 0 or not self.uses.all_fired()
        if busy or any(group.gradients.phase is GradPhase.REDUCING for group in self.groups):
            return False
        self._actions.rebuild(self.groups)
        return True

    def before_capture(self) -> None:
        """Before a capture: place the pool's slots in an arena if that is due, because a capture makes none.

        In the capture, each request gets memory from the graph's pool. With an arena, requests share it.
        """
        self.capturing.follow()
        if not self._depth and self._pass is None and self.pool.wants_arena and self.uses.all_fired():
            self._actions.plan_memory()
        self.capturing.expect(True)

    def after_capture(self) -> None:
        """After a capture for which `before_capture` was called, successful or not."""
        self.capturing.expect(False)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """In this context, no other thread can run the model.

        Raises:
            ShardConfigStateError: another thread does.
        """
        self._iterations.claim()
        try:
            yield
        finally:
            self._iterations.release()

    def before_replay(self) -> None:
        """Before a replay of a captured step: reshard all groups, as at the beginning of a capture.

        Modules then have the sharded parameters, whose `.grad` the replay sets. If a user has set an event after the
        last parameter change, the replay waits for it.
        """
        self.capturing.follow()
        for group in self.groups:
            if group.phase is not SHARDED and not group.running:
                self._actions.reshard(group)
        if (event := self.capturing.take_change()) is not None:
            event.wait()

    def replayed(self, stepped: Collection[ParamGroup]) -> None:
        """After a replay of a captured step: its optimizers have changed the shards of these groups."""
        for group in stepped:
            group.before_change()
            # For graphs outside of the model that have saved a shard: their backward then raises an error.
            torch.autograd.graph.increment_version([param.local for param in group.params])
        if stepped:
            self._iterations.end()

    def between_graphs(self) -> None:
        """Between compiled steps, when no memory is leased: place the pool's slots in an arena if that is due.

        Also notice that a capture of a CUDA graph has begun or ended.
        """
        self.capturing.follow()
        if self.capturing.number:
            return
        if not self._depth and self._pass is None and self.pool.wants_arena and self.uses.all_fired():
            self._actions.plan_memory()

    def _watch(self, on: bool) -> None:
        self.review.measuring.watch(on)

    watched = property(fset=_watch, doc="Whether all actions are timed.")

    def converted(self, groups: Sequence[ParamGroup]) -> None:
        """Rebuild groups whose parameters were moved or converted, unless a backward may still use the memory."""
        if self._depth or self._pass is not None or not self.uses.all_fired():
            return
        self._gradients.settle()
        self._actions.rebuild(groups)
        self.review.converted()

    def before_optimizer_step(self, stepped: set[int], optimizer: Optimizer | None = None) -> None:
        """Reshard the groups of these parameters, given by id, and end the iteration: an optimizer will change them.

        Unsharded parameters must not outlive the values that they were gathered from.
        """
        groups = [group for group in self.groups if not stepped.isdisjoint(map(id, group.shards))]
        if not groups:
            self.capturing.before_step(optimizer, ())
        else:
            self.capturing.follow()
            self.capturing.before_step(optimizer, groups)
            self._iterations.end()
            if self._pass is None:
                # Reductions may be in flight if the caller finishes backward itself. If the optimizer steps within the
                # backward of a compiled graph, hooks stay removed from autograd: `TracedGroup` returns them at its end.
                self._gradients.settle(keeps_hooks=current_backward() >= 0)
            settings_of = None if self.capturing.number else optimizer  # the host would read its learning rates
            self.review.seat.stepped(settings_of, {group.fqn: group.having() for group in groups})
        for group in groups:
            group.before_change()
            if not group.running and group.phase is not SHARDED:
                self._actions.reshard(group)

    def check_reduced(self, stepped: set[int]) -> None:
        """Check that the gradients of these parameters, given by id, are reduced: an optimizer will read them."""
        for group in self.groups:
            if group.gradients.phase is not GradPhase.NONE and not stepped.isdisjoint(map(id, group.shards)):
                if self._pass is None:
                    self._gradients.settle(keeps_hooks=current_backward() >= 0)  # as in `before_optimizer_step`
                group.gradients.check_reduced(stepped)
