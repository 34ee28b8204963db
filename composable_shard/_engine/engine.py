"""The engine, one per root: modules and autograd tell it of events, and it answers with actions on groups.

The state of an iteration is held here and nowhere else. The engine holds groups, never modules or graphs. A graph may
therefore hold the engine: backward works after the model is gone, and a model is freed without the cycle collector.

    event                                method: what the engine does

    the outermost forward begins         enter: recover from a failure, drop outdated unsharded parameters
    a module's forward begins            before_forward: gather its group, make the node of the use, prefetch
    a module's forward ends              after_forward: reshard
    the outermost forward ends           leave: learn the order, drop what was prefetched and never used
    backward reaches a use's outputs     before_backward: gather, install the node's outputs again, prefetch
    backward unpacks a saved weight      fetch: gather, if the weight is not there
    the node of a use runs               on_gradients: reshard, hand the gradients on (see `gradients.py`)
    the outermost backward ends          _end_backward: wait for reductions, set `.grad`, reshard what is left

Two rarer events: the last saved weight of a use of a frozen group, which has no node, is freed (`on_handles_gone`); a
gradient outside forward comes (`on_gradient_outside_forward`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .._comm.agreement import Among
from .._comm.copies import Gradients
from .._errors import ShardConfigStateError
from .._faults.seat import Seat
from .._group.bucket import Bucket
from .._group.edits import lost_edit
from .._group.group import Entries, ParamGroup, Runtime
from .._group.hooks import WATCHED
from .._group.optimizers import watch_steps
from .._group.phases import SHARDED, UNSHARDED, GradPhase
from .._plan.plan import ShardPlan
from .._plan.record import Record
from .._plan.schedule import Kind
from .._torch.core import (
    Fate,
    apart_from_checkpoints,
    captures,
    current_backward,
    is_profiled,
    passes_through,
    queue_backward_callback,
)
from .actions import Actions, is_logged
from .backward import BackwardPass, Iterations, Passed, Token
from .gradients import GradientFlow, watch_leaf, watch_replaced
from .node import Keeper, Outputs, Use, Uses, Witness, unshard
from .order import Order
from .out_of_memory import Part
from .review import Review

LISTENERS: weakref.WeakSet[Any] = weakref.WeakSet()  # each a `listeners.Listener`


def _group_of(bucket: Bucket) -> ParamGroup:
    """The group that a bucket belongs to.

    Raises:
        ShardConfigStateError: the group is gone, or a conversion of its parameters has replaced its buckets.
    """
    group: ParamGroup | None = bucket.group()
    if group is None or bucket not in group.buckets:
        raise ShardConfigStateError(
            f"parameters {', '.join(bucket.fqns)}: were converted or replaced between forward and backward; "
            "run backward first, or run forward again"
        )
    return group


NO_CAPTURE = (
    "a sharded model runs while a CUDA graph is being captured: an eager step cannot be part of one. Its lanes wait "
    "for events from before the capture, what it schedules depends on what has run, and the host takes part in it. "
    "Capture what runs between sharded modules, or compile the model by torch.compile(mode='reduce-overhead'), which "
    "leaves the communication out of its graphs"
)


def _refuse_capture(device: torch.device) -> None:
    if captures(device):
        raise ShardConfigStateError(NO_CAPTURE)


class Engine:
    """Runs eager steps of the groups of one root.

    Args:
        groups: all groups.
        plan: the order of the groups, and predictions.
        runtime: pool and lanes that the groups were built with.
        among: the process groups of the meshes, with their devices.
        seat: of the model among others, in the ledgers of these process groups.
        look: called with the engine when a forward or a backward begins and there are tools, or were: they may need
            other classes of the engine and its parts (see `listeners.py`).
        without_group: the entries of sharded modules that have no parameters of their own.
        listener: returns the function to call when the plan or a user's prefetch list has changed, or None.
        is_given: whether the plan is one that a user gave.

    Attributes:
        groups: all groups.
        active: by group, the use whose backward has begun and not ended.
        order: which group comes next, by the plan or by the user's lists.
        review: compares what happens with the plan, and makes it anew.
        uses: the uses that a backward may still go through.
        pool: the memory of all groups.
        witness: tells nodes what becomes of their gradients.
        keepers: for each bucket of a frozen group whose forward runs, the object that all its new handles hold; its
            deletion tells the engine that the last handle is gone.
        under_hooks: whether the forward that began last runs under saved-tensor hooks of others, as of a checkpoint.
        is_last_backward: whether `torch.autograd.grad` reduces at once although gradient sync is off; never if the
            caller ends backward.
        ends_by_hand: whether the caller ends backward (`end_backward_by_hand`).
        changed_at: an event that a user recorded behind the last change of the parameters; good for one forward.
        profiled: whether profiler ranges are put around the engine's work (see `profiling.py`).
    """

    profiled = False

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        plan: ShardPlan,
        runtime: Runtime,
        among: Among,
        seat: Seat,
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
        self._do = Actions(groups, runtime, self.order, partial(watch_leaf, weakref.ref(self)), without_group)
        self._gradients = GradientFlow(self._do)
        self.review = Review(self.order, self._do, among, seat, is_given)
        self.uses = Uses()
        self.is_last_backward, self.ends_by_hand, self.under_hooks = True, False, False
        self.changed_at: torch.Event | None = None
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
        """Watch for gradients of tensors that users may hold from before the engine was made."""
        for index, param in enumerate(group.params):
            if (whole := param.replaced) is not None:
                watch_replaced(weakref.ref(self), whole)
            for leaf in param.kept_ones():
                if WATCHED in leaf.__dict__:
                    watch_leaf(weakref.ref(self), leaf, group, index)

    def parts(self) -> tuple[object, ...]:
        """The engine, its `Actions` and its `GradientFlow`: the objects whose classes `listeners.py` switches."""
        return self, self._do, self._gradients

    def part(self) -> Part:
        """What it runs, for `out_of_memory.explain`."""
        return Part(self.groups, self.pool, self.order.plan)

    @property
    def has_run(self) -> bool:
        """Whether a forward of any group has begun."""
        return self._iterations.has_run

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
        """The record of the last finished iteration; None if there was none yet."""
        over = (not self._iterations.waiting or self.uses.all_fired()) and self._depth == 0 and self._pass is None
        return (self._do.record_so_far() if over else None) or self._do.history.last

    def planned_notes(self) -> dict[str, tuple[str, str]]:
        """By FQN, the notes of each group's gather and reduction."""
        return {group.fqn: group.planned_notes() for group in self.groups}

    # ---- forward

    def enter(self, is_root: bool) -> None:
        """A sharded module is called. The outermost call begins a forward.

        Raises:
            ShardConfigStateError: another thread runs the root. (A checkpoint around the root calls it in backward.)
        """
        if (is_root or self._depth == 0) and current_backward() < 0:
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
        """A forward or a backward begins: if there are tools, or were, the engine gets the classes that they need."""
        if LISTENERS or is_profiled() or self.profiled or self.pool.owns or is_logged():
            self._look(self)

    def failed(self, error: BaseException) -> None:
        """A forward has failed. If it was interrupted (Ctrl-C), nothing is waited for; the next forward clears up."""
        self.review.seat.failed(error)
        if isinstance(error, Exception):
            self._do.explain(error)
        else:
            self._iterations.interrupt()

    def show_sharded(self) -> None:
        """A forward has failed: if it was the outermost one, install the sharded parameters, for whoever goes on."""
        if self._depth == 1 and current_backward() < 0:
            self._do.hide_idle()

    @apart_from_checkpoints
    def _begin_forward(self) -> None:
        _refuse_capture(self.pool.memory.device)
        self._end_abandoned()
        if self._pass is not None or self._iterations.was_interrupted:
            self._recover()
        waiting = self._iterations.begin()
        if self.uses.lost:
            self.uses.begin_iteration(waiting)
        if not waiting:
            self._do.roll_record()
        self._do.parameters_changed(self.changed_at)
        self.changed_at = None
        if self._do.drop_outdated(waiting):
            self._do.rebuild(self.groups)
        elif not waiting:
            if self.pool.wants_arena and self.uses.all_fired():  # ranks may differ, so no collective may depend on it
                self._do.plan_memory()
            self.review.between_steps()
        self.review.begin(torch.is_grad_enabled(), waiting)

    def leave(self, learn_order: bool, failed: bool) -> None:
        """A call of a sharded module has ended, well or not.

        Args:
            learn_order: whether it was a call of the root that has succeeded: then the review looks at its order.
            failed: whether it was any call that has failed.
        """
        self._depth -= 1
        if not self._depth and current_backward() < 0:
            try:
                self._end_forward(learn_order, failed)
            finally:
                self._iterations.release()

    @apart_from_checkpoints
    def _end_forward(self, learn_order: bool, failed: bool) -> None:
        self._end_abandoned(failed)  # as of a group of several modules, not all of which have run
        if not self._iterations.was_interrupted:
            self._do.drop_after_forward(failed)
        if learn_order:
            self.review.end()

    def _end_abandoned(self, failed: bool = True) -> None:
        """No forward runs any more: end those whose end was never reported.

        A checkpoint around `super().__call__` stops its recomputation by an exception, which no forward hook sees.
        """
        for group in self.groups:
            while group.running:
                self.after_forward(group, failed=failed)

    def before_forward(self, group: ParamGroup) -> tuple[Use, Outputs] | None:
        """A module is about to run: gather its group and install the unsharded parameters.

        Returns:
            the new use and the outputs of its node (empty for a frozen group); None if no backward can follow, or if
            the use exists already.
        """
        if group.running:
            group.running += 1
            return None
        made_in = current_backward()
        if made_in >= 0:
            self._open_pass(made_in)
            if group in self.active:  # recomputed in its own backward, which has installed the node's outputs
                if group.phase is not UNSHARDED:
                    self._do.gather_again(group)
                self._do.installed.show_gathered(group)
                group.running += 1
                return None
        self._do.need(group)
        self._iterations.has_run = True
        group.running += 1
        made: tuple[Use, Outputs] | None = None
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            made = self._begin_use(group, made_in)
        if made is None or not made[1]:
            self._do.installed.show_leaves(group)
        if made_in < 0:
            self._do.begin_forward(group)
            if following := self.order.after(group):
                self._do.prefetch(following)
        return made

    def _begin_use(self, group: ParamGroup, made_in: int) -> tuple[Use, Outputs]:
        """A backward may follow the forward that begins: make its use and, unless the group is frozen, the node."""
        forward = self._iterations.forward if made_in < 0 else 0
        use = self.uses.begin(group, made_in, forward, self.under_hooks)
        if not group.trains:
            self.keepers |= dict.fromkeys(group.buckets, Keeper(self, use))
            return use, ()
        outputs = unshard(self, use)
        entries = group.entries()
        assert entries is not None  # its module is running
        entries.show(outputs)
        group.begin_use(outputs, forward)
        if forward:
            self._iterations.await_backward(forward)
        return use, outputs

    def after_forward(self, group: ParamGroup, copied: Sequence[torch.Tensor] = (), failed: bool = False) -> None:
        """A module's forward has ended, well or not.

        Args:
            group: the module's group.
            copied: the views of weights that were in the module's outputs. Copies have replaced them there, so the
                caller is about to drop the views.
            failed: whether the forward has ended by an error, which the caller raises; then edits are not looked for,
                because other ranks may not have failed.

        Raises:
            StaleStateError: the forward has edited its weights in place; its group is resharded all the same.
        """
        group.running -= 1
        if group.running:
            return
        written = False
        if self.uses.end_forward(group) or not torch.is_grad_enabled():
            written = group.end_use(copied)  # the outputs may hide views of weights in objects that were not searched
        for bucket in group.buckets if self.keepers else ():
            self.keepers.pop(bucket, None)
        stays = group in self.active
        if failed:
            self._do.end_failed_forward(group, stays, written)
            return
        edited = self._do.find_edits(group) if written else ()
        self._do.end_forward(group, stays)
        if edited:
            self._do.drop(group, check_edits=False)  # what was edited must not be read again
            raise lost_edit(edited)

    # ---- backward

    def _open_pass(self, number: int, use: Use | None = None) -> BackwardPass:
        """The outermost backward pass that runs now; the first call within it queues `_end_backward`.

        Args:
            number: autograd's number of the pass that runs now, which may be nested in the outermost one.
            use: the use that backward has reached, if the caller knows one.
        """
        if self._pass is not None and not self._pass.alive:
            self._recover()
        if self._pass is None:
            self._follow_tools()
            token = Token()
            self._pass = BackwardPass(number, token, self.uses, weakref.WeakMethod(self.on_pass_gone), use)
            self._iterations.reach(self._pass.newest)
            self._do.open_backward(self._pass.repeated)
            queue_backward_callback(partial(self._end_backward, self._pass, token))
        if self._pass.current != number:
            self._pass.note(number)
        return self._pass

    def before_backward(self, use: Use, outputs: Outputs, gradients: object = None) -> None:
        """Backward has reached an output of a use. `gradients` are those of the output; they are not read."""
        now = self._open_pass(current_backward(), use)
        if use in now.entered:
            return
        if self.active:
            self._finish_later_uses(now, use)
        for passed in now.reach(use):
            self._pass_over(now, passed)
        now.entered.add(use)
        self.active[use.group] = use
        missed, following = self.order.before(use, now)
        self._do.begin_backward(use, outputs, missed, following)

    def _pass_over(self, now: BackwardPass, passed: Passed) -> None:
        """Backward goes past a use whose node runs later in this pass, or only on other ranks.

        All ranks must issue the same gathers in the same order, and another rank may reach the use here. So this rank
        gathers now what that rank gathers, and gives the weights up where that rank ends the use.
        """
        if passed.begins:
            self._do.pass_over(passed.use.group, *self.order.before(passed.use, now))
        else:
            self._do.end_use(passed.use.group, passed.following)

    def halfway(self) -> None:
        """Backward has read half of the saved weights of the use that it reached last: issue the waiting gathers."""
        self._do.catch_up()

    def _finish_later_uses(self, now: BackwardPass, use: Use) -> None:
        """Complete the uses that get no more gradients, now that backward has reached `use`.

        Backward visits uses from the last to the first, so it is done with all uses that began after the forward of
        `use` was over. One whose node this pass does not run would otherwise stay active until backward ends.
        """
        for later in list(self.active.values()):
            if later.number > use.last and not now.will_fire(later):
                self._complete(now, later, [None] * len(later.group.params))

    def fetch(self, bucket: Bucket) -> None:
        """Backward unpacks a saved weight of this bucket: see that the weight is gathered."""
        group = _group_of(bucket)
        if group.phase is UNSHARDED:
            return
        if (number := current_backward()) >= 0:
            self._open_pass(number)
            self._do.catch_up()
        self._do.gather_again(group)

    def on_gradients(self, use: Use, node: Any, gradients: Gradients) -> list[torch.Tensor | None]:
        """The node of a use runs.

        Returns:
            what the node gives autograd for the sharded parameters: gradients only where `torch.autograd.grad` asks
            for them, and None otherwise, as the engine sets `.grad` itself when the reduction is over.
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
        """The last gradients of a use have come: end the use, and hand their sum on."""
        total = use.complete(gradients)
        for passed in now.leave(use):
            self._pass_over(now, passed)
        self._end_use(now, use)
        self._gradients.take(now, use, total)

    def _end_use(self, now: BackwardPass, use: Use) -> None:
        """The backward of a use is over: reshard, unless its weights are needed again at once."""
        if self.active.get(use.group) is use:
            del self.active[use.group]
            self._do.budget.unread.pop(use.group, None)
        if use.group.running and not self._depth:  # a recomputation that its checkpoint stopped early
            use.group.running = 0
        self._do.end_use(use.group, now.next_group())

    def _end_backward(self, now: BackwardPass, _token: Token) -> None:
        """The outermost backward pass has ended without an error."""
        if now is not self._pass:
            return
        if self._do.watch is not None:
            self._do.watch.end(Kind.BACKWARD)
        with torch.no_grad():
            if not self._depth:
                self._end_abandoned()
            self._do.catch_up()
            for use in list(self.active.values()):
                self._complete(now, use, [None] * len(use.group.params))
            for passed in now.reach(None):
                self._pass_over(now, passed)
        self.end_backward_by_hand(not self.ends_by_hand, now)
        self._forget_pass()

    def end_backward_by_hand(self, wait: bool = True, now: BackwardPass | None = None) -> None:
        """Reduce the gradients that still wait, then reshard.

        Args:
            wait: whether to wait for all reductions; if not, a later `GradientFlow.settle` does.
            now: the pass that ends, if one runs.
        """
        with torch.no_grad():
            self._gradients.finish(now, self.groups, wait)
        # A pass that goes through no forward of the model, as of a loss that code outside reads unsharded weights for,
        # says nothing about weights that users have unsharded.
        self._do.drop_after_backward(pinned=now is None or now.newest > 0)

    def reset(self) -> None:
        """Give up whatever a failed forward or backward has left behind, and all accumulated gradients."""
        self._depth = 0
        self._iterations.release()
        self._forget_running()
        for group in self.groups:
            group.gradients.forget()
        self._recover()

    def _forget_running(self) -> None:
        for group in self.groups:
            group.running = 0  # one that has failed, or was stopped, does not report its end
        self.uses.in_forward.clear()

    def _forget_pass(self) -> None:
        if self._pass is not None and self.uses.lost:
            self.uses.forget(self._pass.forwards)
        self._pass = None
        self._do.close_backward()
        self.active.clear()

    def on_pass_gone(self) -> None:
        """A pass has ended: if it failed, install the sharded parameters. `_recover` does the rest later."""
        if self._pass is not None and not self._pass.alive:
            self._do.budget.unread.clear()
            if not self._depth:  # the end of an interrupted recomputation is never reported
                self._forget_running()
            self._do.hide_idle()
            self._do.installed.close_backward()
            self._do.end_reads()
            self.review.seat.failed("an error in its backward")

    def _recover(self) -> None:
        """A backward has failed, or a forward was interrupted: give up what it left behind."""
        self._gradients.discard()
        self._forget_pass()
        self._iterations.end()
        self.uses.forget()
        for use in self.uses:
            use.forget()
        self._do.give_up_idle()

    def on_handles_gone(self, use: Use) -> None:
        """The last saved weight of a use of a frozen group was freed: its backward, if one runs, is over.

        Not if the group has packed weights, which its backward may still read: layers keep views of them, unseen.
        """
        self.uses.graph_gone(use)
        if use.group.layout.packed:
            return
        if self.active.get(use.group) is use and self._pass is not None and self._pass.alive:
            self._end_use(self._pass, use)

    def on_gradient_outside_forward(self, group: ParamGroup, index: int, gradient: torch.Tensor) -> None:
        """A gradient came to an unsharded parameter that was read outside of its module's forward."""
        self._open_pass(current_backward())
        if (entries := group.entries()) is not None:
            entries.take_over()  # it may have been thawed since it was gathered
        self._gradients.add_outside_forward(group, index, gradient)

    def on_gradient_of_replaced(self, fqn: str) -> None:
        """A gradient came to the tensor that the parameter of this name was before sharding.

        Raises:
            ShardConfigStateError: this backward goes through the model. In another one, the tensor belongs to code that
                trains it without the model, as an unsharded copy of it does.
        """
        if self._pass is None and not any(passes_through(group.shards) for group in self.groups):
            return
        error = ShardConfigStateError(
            f"rank {dist.get_rank()}: parameter {fqn}: a gradient came to the tensor that it was before fully_shard. "
            "The model still computes with that tensor, so the sharded parameter gets no gradient. A list, tuple, "
            "dict, closure or partial that was made before sharding holds it. Read the parameter from its module in "
            "forward instead (self.linear.weight), or pass it in ignored_params"
        )
        self.review.seat.failed(error)
        raise error

    def before_first_reduction(self, ask: Callable[[], None]) -> None:
        """Have `ask` called before the next reduction; if it raises, again before the one after that."""
        self._do.before_first_reduction(ask)

    # ---- what users ask for

    def unshard(self, group: ParamGroup, wait: bool) -> None:
        """Gather a group and keep it until `reshard`, its next use, or a change of its parameters."""
        try:
            self._do.pin(group, wait)
        except BaseException as error:
            self.review.seat.failed(error)
            raise

    def reshard(self, group: ParamGroup) -> None:
        """Give the unsharded parameters of a group up, unless its forward runs now."""
        if not group.running and group.phase is not SHARDED:
            self._do.drop(group)

    def count_memory(self, wanted: bool) -> None:
        """Tell whether a tool counts memory on this rank: then each lease is an allocation of its own.

        This takes effect (`BufferPool.owns`) only while nothing runs, no graph may read weights and no reduction is in
        flight. Ranks may differ in this, so no collective may depend on it.
        """
        self.pool.count(wanted)
        busy = self._depth or self._pass is not None or current_backward() >= 0 or not self.uses.all_fired()
        if busy or any(group.gradients.phase is GradPhase.REDUCING for group in self.groups):
            return
        self._do.rebuild(self.groups)
        self.pool.own(wanted)

    def between_graphs(self) -> None:
        """A compiled step begins, and no memory is leased: lay the pool's slots out in an arena if that is due."""
        if not self._depth and self._pass is None and self.pool.wants_arena and self.uses.all_fired():
            self._do.plan_memory()

    def _watch(self, on: bool) -> None:
        self.review.measuring.watch(on)

    watched = property(fset=_watch, doc="Whether what is done is timed.")

    def converted(self, groups: Sequence[ParamGroup]) -> None:
        """Parameters were moved or converted: rebuild their groups, unless a backward may still need the memory."""
        if self._depth or self._pass is not None or not self.uses.all_fired():
            return
        self._gradients.settle()
        self._do.rebuild(groups)
        self.review.converted()

    def before_optimizer_step(self, stepped: set[int], optimizer: Optimizer | None = None) -> None:
        """An optimizer is about to change these parameters, by id: reshard their groups and end the iteration.

        Unsharded parameters must not outlive the values that they were gathered from.
        """
        groups = [group for group in self.groups if not stepped.isdisjoint(map(id, group.shards))]
        if groups:
            self._iterations.end()
            if self._pass is None:
                # Reductions of a backward that was not the last one. The backward of a graph may be running.
                self._gradients.settle(keeps_hooks=current_backward() >= 0)
            self.review.seat.stepped(optimizer, {group.fqn: group.having() for group in groups})
        for group in groups:
            group.stepped()
            if not group.running and group.phase is not SHARDED:
                self._do.drop(group)

    def check_reduced(self, stepped: set[int]) -> None:
        """An optimizer is about to read the gradients of these parameters, by id: see that they are reduced."""
        for group in self.groups:
            if group.gradients.phase is not GradPhase.NONE and not stepped.isdisjoint(map(id, group.shards)):
                if self._pass is None:
                    self._gradients.settle(keeps_hooks=current_backward() >= 0)  # as above
                group.gradients.check_reduced(stepped)
