"""Module hooks for tracing a sharded model with `torch.compile`.

A group's gather is one operator (see `operators.py`) under `torch.utils.checkpoint`, so that the partitioner gathers
again in backward instead of saving the weights. Everything that Dynamo reads here becomes a guard of the compiled code.
It must therefore be the same for equal layers, or they would not share code.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .._comm.copies import Gradients
from .._comm.mesh import MeshInfo
from .._group.edits import lost_edit
from .._group.exchange import Exchange
from .._group.group import Entries, ParamGroup
from .._group.optimizers import watch_steps
from .._group.param import ShardedParam, reduced_as
from .._group.phases import SHARDED
from .._group.reduction import UNUSED_ELSEWHERE
from .._plan.layout import bucket_layout, first_alike
from .._policies import Comms, Options, Settings
from .._torch.capturing import capture_number
from .._torch.core import (
    GRAPHS_GIVE_NONE,
    any_gradient_hooks,
    current_backward,
    node_will_run,
    queue_backward_callback,
    run_while_tracing,
    with_side_effects,
)
from .._torch.ragged import DISPATCHES
from ..errors import ShardConfigStateError, StaleStateError
from . import registry
from .edits import edited, watch_edits
from .extension import Parts, Traced
from .operators import ADDS, KEEP, REDUCE, STEPS, TAKE, Layout


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


_OWN_CONTEXT = "composable_shard saves gathered weights"
_save_gathered: Any = partial(create_selective_checkpoint_contexts, _policy)
_save_gathered.cache_hash = _OWN_CONTEXT  # without it, AOTAutograd does not cache such graphs


def _about_users(record: logging.LogRecord) -> bool:
    """Whether torch's warning about a `context_fn` is about that of a user.

    torch warns that a region under a `context_fn` must not contain in-place operators. The region of `_save_gathered`
    contains one operator, which is not in-place.
    """
    frame = sys._getframe() if "context_fn is passed" in str(record.msg) else None
    while frame is not None:
        if frame.f_code.co_name == "tag_activation_checkpoint_impl":
            return getattr(frame.f_locals.get("context_fn"), "cache_hash", None) != _OWN_CONTEXT
        frame = frame.f_back
    return True


logging.getLogger("torch._higher_order_ops.wrap").addFilter(_about_users)


NO_COMMS = Comms()


def _ports(params: Sequence[ShardedParam], options: Options) -> tuple[int, ...]:
    """Indices of DTensor parameters whose gradients are reduced in a wider dtype than they are computed in."""
    dtypes = [(p.compute_dtype(options), p.sum_dtype(options)) for p in params]
    wider = [own is not reduced and torch.promote_types(own, reduced) is reduced for own, reduced in dtypes]
    return tuple(i for i, p in enumerate(params) if p.parallel is not None and wider[i])


def _layout_of(
    params: Sequence[ShardedParam], info: MeshInfo, options: Options, parts: Sequence[Parts | None]
) -> Layout:
    """The layout of the group of these parameters."""
    rows = tuple(param.rows for param in params)
    return Layout(
        shapes=tuple(param.shape for param in params),
        dims=tuple(param.dim for param in params),
        rows=rows,
        keeps=tuple(param.keeps_dtype for param in params),
        grad_dtypes=tuple(param.grad_dtype for param in params),
        world=info.shard_size,
        rank=first_alike([p.shape[p.dim] for p in params], info.shard_size, info.shard_rank, rows),
        replicates=info.replicate_size > 1,
        outer=_outer_of(params, info),
        device=str(info.device) if info.offloads else "",
        ports=tuple(i for i in _ports(params, options) if parts[i] is None),
        options=Options(mp_policy=options.mp_policy),
        extended=tuple(parts),
    )


def _outer_of(params: Sequence[ShardedParam], info: MeshInfo) -> tuple[int, int]:
    """The size of the outer axis, and the first rank on it whose shards have the same shapes as this rank's.

    (1, 0) if that axis does not shard.
    """
    if not info.shards_outer:
        return 1, 0
    places = bucket_layout([p.shape for p in params], info.shard_size, dims=[p.dim for p in params]).params
    sizes = [at.rows_of(info.shard_rank) for at in places]
    return info.replicate_size, first_alike(sizes, info.replicate_size, info.outer_rank)


def _tag_of(params: Sequence[ShardedParam], device: torch.device) -> torch.Tensor | None:
    """A tensor whose memory identifies a group at run time, if this rank has no element of it."""
    if any(param.sharded.is_meta or param.local.numel() for param in params):
        return None
    return torch.empty(1, device=device)


class TracedSteps:
    """The state of traced code for an optimizer that steps inside of backward.

    Graphs of the model add gradients to `.grad` themselves, group by group, and the optimizer's hooks find them there.
    If a graph gathers a group in several uses, its gradients are complete when the backward of the first use is over.

    Args:
        root: the model. Graphs of parts of it do not know whether other graphs use a group as well, and leave gradients
            to autograd.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.is_open = False
        self._groups: list[TracedGroup] = []

    def take(self, group: TracedGroup) -> None:
        """Step a group inside of backward in graphs."""
        self._groups.append(group)
        group.stepped_by(self)

    def begin(self) -> None:
        """Begin to trace the root."""
        self.is_open = True

    def end(self) -> None:
        """End the trace of the root."""
        self.is_open = False
        for group in self._groups:
            group.forget_uses()

    def let_go(self) -> None:
        """Make new graphs leave gradients to autograd."""
        for group in self._groups:
            group.stepped_by(None)


_extended: weakref.WeakSet[TracedGroup] = weakref.WeakSet()  # groups that graphs take through stand-ins
_numbers = itertools.count()
_unprepared: weakref.WeakValueDictionary[str, TracedGroup] = weakref.WeakValueDictionary()


@run_while_tracing
def _prepare(number: str) -> bool:
    """Prepare a group with this number, and the others of its engine; see `_build_engine` in `_module/calls.py`.

    All together, because equal layers share code: it was compiled for groups that are prepared.
    """
    if number:
        first = _unprepared.pop(number, None)
        if first is None:  # a second use in the same trace, which still sees the number
            return True
        others = [other for other in list(_unprepared.values()) if other.is_of_engine(first)]
        for each in (first, *others):
            _unprepared.pop(each.unprepared, None)
            each.prepare()
    return True


def follow_freezing(*_: object) -> None:
    """Before a compiled model is called, let its stand-ins require gradients as their parameters do.

    Then Dynamo notices that a parameter was frozen or unfrozen.
    """
    for group in list(_extended):
        group.follow_freezing()


class _Sums(dict[int, torch.Tensor]):
    """The gradients of one backward, by index of the parameter; a class of its own, so that it can be held weakly."""

    __slots__ = ("__weakref__",)


class _Pending:
    """Gradients of parameters with hooks, which are added to `.grad` at the end of the running backward.

    A graph hands over a gradient for each use of a module, but hooks get the sum. Backwards may be nested or run in
    other threads, so each has its own sums. Its callback holds them, and torch drops the callback if the pass fails.

    Args:
        add: adds gradients, by index of the parameter, to `.grad` and calls the hooks.
    """

    def __init__(self, add: Callable[[Mapping[int, torch.Tensor]], None]) -> None:
        self._add = weakref.WeakMethod(add)
        self._by_backward: weakref.WeakValueDictionary[int, _Sums] = weakref.WeakValueDictionary()

    def begin(self) -> None:
        """Prepare for gradients of the running backward."""
        running = current_backward()
        if running >= 0 and running not in self._by_backward:
            sums = self._by_backward[running] = _Sums()
            queue_backward_callback(partial(self._end, sums))

    def add(self, index: int, piece: torch.Tensor) -> None:
        """Add a gradient to those of the same parameter."""
        sums = self._by_backward[current_backward()]
        sums[index] = sums[index] + piece if index in sums else piece

    def _end(self, sums: _Sums) -> None:
        add = self._add()
        if add is not None:
            add(sums)


class TracedGroup:
    """The state of a group for traced code.

    Attributes:
        key: key of its layout; equal on ranks that can share compiled code.
        number_until_built: number of a module of the group until the engine is built; empty afterwards.
        unprepared: a number, if parameters define their own all-gather and `prepare` was not called; else empty.
        refusal: why these parameters cannot be traced; empty if they can.
        is_root: whether this is the root's own group.
        watched: while its forward is traced, the number to pass to `edited`.
        uses: how many times the traced forward has gathered the group; counted if an optimizer steps inside of
            backward.
        steps: the state of that optimizer; None if there is none.
    """

    def __init__(self, params: Sequence[ShardedParam], info: MeshInfo, settings: Settings) -> None:
        self.number_until_built = ""
        self.is_root = False
        self._params = params
        self._settings = settings
        self._group: weakref.ref[ParamGroup] | None = None
        self._between_steps: weakref.WeakMethod[Callable[[], None]] | None = None
        self._info = info
        self.unprepared = self.refusal = self._replaced = ""
        self._extended: dict[int, Traced] = {}
        self.key, self._ports, self._sets_gradients = self._register()
        self.watched = 0
        self.uses = 0
        self.steps: TracedSteps | None = None
        self._pending = _Pending(self._add)
        self._marks_before: dict[tuple[int, ...], list[float]] = {}  # the last result of `marks_of_unused`, by indices
        self._tag = _tag_of(params, info.device)
        registry.add(self)

    def _register(self) -> tuple[str, list[int | None], bool]:
        """Register the layout, with the current `grad_dtype` of each parameter.

        Returns:
            its key; by parameter, the index of its port among the ports; and whether any `.grad` has another dtype than
            its parameter.
        """
        params, options = self._params, self._settings.current
        parts = [self._extended[i].parts if i in self._extended else None for i in range(len(params))]
        layout = _layout_of(params, self._info, options, parts)
        ports: list[int | None] = [None] * len(params)
        for place, index in enumerate(layout.ports):
            ports[index] = place
        kept = [
            p.grad_dtype.kept(p.dtype, reduced) for p, reduced in zip(params, reduced_as(params, options), strict=True)
        ]
        sets_gradients = any(p.dtype is not dtype for p, dtype in zip(params, kept, strict=True))
        return layout.register(), ports, sets_gradients

    def bind(self, group: ParamGroup | None, is_root: bool, between_steps: Callable[[], None]) -> None:
        """Bind the group of the eager runtime, because the root is now known.

        Args:
            group: the group; None if there are no parameters.
            is_root: whether this is the root's own group.
            between_steps: a method of the engine to call before a graph gathers, when no memory is leased.
        """
        self._between_steps = weakref.WeakMethod(between_steps)
        self.number_until_built = ""
        self.is_root = is_root
        self._group = weakref.ref(group) if group is not None else None
        self.reset()  # users may have set `grad_dtype` meanwhile

    def reset(self) -> None:
        """Discard the facts about the parameters, because these were converted or replaced."""
        _unprepared.pop(self.unprepared, None)
        _extended.discard(self)
        self._extended, self.unprepared, self.refusal = {}, "", ""
        group = self._of_runtime()
        if group is not None and group.layout.extended:
            self.unprepared = str(next(_numbers))
            _unprepared[self.unprepared] = self
        self.key, self._ports, self._sets_gradients = self._register()

    def prepare(self) -> None:
        """Prepare parameters that define their own all-gather, because the group is traced for the first time."""
        self.unprepared = ""
        group = self._of_runtime()
        assert group is not None
        options = self._settings.current
        try:
            self._extended = {index: Traced(each, options) for index, each in sorted(group.extensions().items())}
        except ShardConfigStateError as error:
            self.refusal = str(error)
        if self._extended:
            _extended.add(self)
        self.key, self._ports, self._sets_gradients = self._register()

    @property
    def _plain(self) -> list[int]:
        """Indices of the parameters that do not define their own all-gather."""
        return [index for index in range(len(self._params)) if index not in self._extended]

    def is_of_engine(self, other: TracedGroup) -> bool:
        """Whether two groups have the same engine."""
        return self._between_steps == other._between_steps

    def stepped_by(self, steps: TracedSteps | None) -> None:
        """Make graphs add gradients to `.grad` for an optimizer; None to stop this."""
        self.steps = steps

    def forget_uses(self) -> None:
        """Reset the count of uses for the next forward."""
        self.uses = 0

    # ---- while tracing

    def unshard(self, entries: Entries) -> list[torch.Tensor]:
        """The unsharded parameters of the tensors that are installed in the modules now."""
        with_side_effects(entries.follow)
        self._count_use()
        _prepare(self.unprepared)
        self._check_can_trace()
        extended = self._extended
        full = self._gather([extended[i].stand_in if i in extended else p.sharded for i, p in enumerate(self._params)])
        count, plain = len(self._params), self._plain
        # A plain view, made outside this checkpoint. Otherwise a user's checkpoint of the block would save the weights.
        views = [full[index].view(full[index].shape) for index in plain]
        with_side_effects(partial(setattr, self, "watched", watch_edits(len(views))))
        wholes = list(full[:count])
        for index, view in zip(plain, views, strict=True):
            wholes[index] = view
        self._lend_carried(wholes)
        return self._as_seen(wholes, full[count:])

    def _as_seen(self, wholes: list[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The unsharded parameters as modules see them.

        Args:
            wholes: one tensor for each parameter.
            others: the ports, and then the tensors inside of parameters that define their own all-gather. Without
                gradients, or if none is needed, there are no ports.
        """
        begin = len(others) - sum([traced.inner for traced in self._extended.values()])
        for index in self._plain:
            parallel, at = self._params[index].parallel, self._ports[index]
            if parallel is not None:
                wholes[index] = parallel.wrap(wholes[index], others[at] if begin and at is not None else None)
        for index, traced in self._extended.items():
            wholes[index] = traced.make(wholes[index], *others[begin : begin + traced.inner])
            begin += traced.inner
        return wholes

    def _check_can_trace(self) -> None:
        options = self._settings.current
        partial_sums = (
            self._info.replicate_size > 1 and options.requires_gradient_sync and not options.requires_all_reduce
        )
        if partial_sums or options.comms != NO_COMMS:
            raise ShardConfigStateError(
                "torch.compile: custom communication, all-reduce hooks and set_requires_all_reduce(False) work in "
                "eager steps only; unset them, or run this step with the uncompiled model"
            )
        if self._sets_gradients and not GRAPHS_GIVE_NONE:
            raise ShardConfigStateError(
                "torch.compile: a grad_dtype other than the dtype of the parameter needs torch 2.13 or later, this is "
                f"{torch.__version__}; compile the modules one by one with module.compile(), or do not compile"
            )
        if self.refusal:
            raise ShardConfigStateError(self.refusal)

    def _gather(self, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of the operator, called in a checkpoint that decides whether backward gathers again."""
        full: tuple[torch.Tensor, ...]
        if self._settings.reshards(self.is_root):
            full = checkpoint(self._again, *shards, use_reentrant=False)
        elif torch.compiler.is_compiling():  # gathers once, even if a user's checkpoint recomputes the module
            full = checkpoint(self._once, *shards, use_reentrant=False, context_fn=_save_gathered)
        else:
            full = self._once(*shards)
        return full

    def _lend_carried(self, views: Sequence[torch.Tensor]) -> None:
        for view, param in zip(views, self._params, strict=True):
            if param.carried is not None:
                param.carried.lend_in_graph(view)

    def check_edits(self) -> None:
        """End the forward that `unshard` began.

        Raises:
            StaleStateError: the forward has edited weights in place.
        """
        indices = edited(self.watched)
        with_side_effects(partial(setattr, self, "watched", 0))
        if indices:
            raise lost_edit([self._params[self._plain[int(index)]].fqn for index in indices.split()])

    def _count_use(self) -> None:
        if self.steps is not None and self.steps.is_open:
            with_side_effects(partial(setattr, self, "uses", self.uses + 1))

    def _again(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._made(self._call(shards, again=self._settings.current.unshard_in_backward))

    def _once(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._made(self._call(shards, again=False))

    def _made(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Replace the parts, which follow the weights, by the tensors inside of the parameters, at the end."""
        begin = len(self._params)
        weights = outputs[:begin]
        inner: list[torch.Tensor] = []
        for traced in self._extended.values():
            end = begin + traced.parts.count
            inner.extend(traced.take_apart(*outputs[begin:end]))
            begin = end
        return (*weights, *outputs[begin:], *inner)

    def _call(self, shards: Sequence[torch.Tensor], again: bool) -> tuple[torch.Tensor, ...]:
        self._check_placements()
        options = self._settings.current
        how = self.key, self._fate(), again, options.divide_factor, options.only_sums
        return tuple(
            torch.ops.composable_shard.unshard(
                [shard.to_local() if isinstance(shard, DTensor) else shard for shard in shards], self._tag, *how
            )
        )

    def _check_placements(self) -> None:
        if not DISPATCHES and (names := [param.fqn for param in self._params if param.rows > 1]):
            raise ShardConfigStateError(
                f"torch.compile: parameter {names[0]} is placed by Ragged, but compiled graphs return its "
                f"gradient from torch 2.13 on only, and this is torch {torch.__version__}; shard it by Shard(0), or do "
                "not compile"
            )

    def _fate(self) -> int:
        if not self._settings.current.requires_gradient_sync:
            if not GRAPHS_GIVE_NONE:  # zeros in `.grad` would have the same effect as `zero_grad`
                raise ShardConfigStateError(
                    f"torch.compile: set_requires_gradient_sync(False) needs torch 2.13 or later, this is "
                    f"{torch.__version__}; run such a microbatch with the uncompiled model"
                )
            return KEEP
        # Dynamo cannot trace while `.grad` has another dtype than its parameter, so one graph serves both cases then.
        fate = TAKE if self._sets_gradients or self._settings.accumulates else REDUCE
        if not GRAPHS_GIVE_NONE or not self.uses:
            return fate
        return fate | (STEPS if self.uses == 1 else ADDS)

    # ---- when a graph runs

    def anchors(self) -> list[torch.Tensor]:
        """The tensors whose memory identifies the group, after it has adopted parameters that users assigned."""
        self._adopt()
        if self._tag is not None:
            return [self._tag]
        extended = self._extended
        return [extended[i].stand_in if i in extended else param.local for i, param in enumerate(self._params)]

    def _adopt(self) -> None:
        """Adopt parameters that users have assigned. If graphs do not fit them, `before_gather` will refuse to run."""
        group = self._of_runtime()
        if group is None or not self._adopts(group):
            return
        group.rebuild()
        if group.extensions().keys() != self._extended.keys() or not all(x.fits() for x in self._extended.values()):
            self._replaced = self._replaced or ", ".join(each.name for each in self._extended.values())
            self.reset()

    def _adopts(self, group: ParamGroup) -> bool:
        """Adopt assigned parameters; returns whether the group does not have them yet."""
        entries = group.entries()
        if entries is None or group.phase is not SHARDED:
            return False
        entries.follow()
        return any(param.sharded is not shard for param, shard in zip(self._params, group.shards, strict=True))

    def exchange(self) -> Exchange | None:
        """The gathers and reductions of the group; None if the group of the eager runtime was freed."""
        group = self._of_runtime()
        return None if group is None else group.exchange()

    def before_gather(self, with_gradients: bool) -> bool:
        """Prepare for a graph that is about to gather the group.

        Let the engine arrange its memory if an arena is due or a capture began.

        Args:
            with_gradients: whether the graph was compiled with gradients enabled.

        Returns:
            whether the gradients of a forward that runs now will wait for a later reduction.

        Raises:
            StaleStateError: in a backward: a parameter that defines its own all-gather was edited since the forward.
            ShardConfigStateError: such a parameter was replaced or unfrozen, or its attributes have changed, so the
                graph does not fit it any more.
        """
        watch_steps(self)  # not earlier: without graphs that save shards, optimizer steps concern only the engine
        self._follow_shards(with_gradients)
        group, between_steps = self._of_runtime(), self._between_steps and self._between_steps()
        pends = not self._settings.current.requires_gradient_sync
        if group is None or between_steps is None:
            return pends
        if group.layout.copies is not None:
            group.before_graph()
        pool = group.exchange().pool
        if pool.wants_arena or pool.memory.capture != capture_number(pool.memory.device):
            between_steps()
        return pends

    def _follow_shards(self, with_gradients: bool) -> None:
        """Let the stand-ins follow the shards of parameters that define their own all-gather."""
        if not (self._extended or self._replaced):
            return
        self._refuse_replaced()
        self._refuse_changed_state()
        edited = [each.name for each in self._extended.values() if each.follow_version()]
        if edited and current_backward() >= 0:
            raise StaleStateError(
                f"{edited[0]} was changed between a forward and its backward, which gathers it again; change it after "
                "the backward"
            )
        self._refuse_unfrozen(with_gradients)

    def _in_engine(self) -> list[TracedGroup]:
        """All groups of the engine. One error is enough for them."""
        return [each for each in registry.owners() if isinstance(each, TracedGroup) and each.is_of_engine(self)]

    def trace_again(self) -> None:
        """Make the next call of the model trace its groups again."""
        for each in self._in_engine():
            each.reset()

    def _refuse_replaced(self) -> None:
        self._adopt()
        if names := self._replaced:
            for each in self._in_engine():
                each.adopt_quietly()
            raise ShardConfigStateError(
                f"{names}: at least one was replaced after this graph was compiled; call the model again, and "
                "torch.compile will compile it again"
            )

    def _refuse_changed_state(self) -> None:
        for each in list(self._extended.values()):
            if changed := each.changed_state():
                self.trace_again()
                raise ShardConfigStateError(
                    f"{each.name}: its {', '.join(changed)} changed after this graph was compiled, which contains the "
                    "old value; call the model again, and torch.compile will compile it again. To change it in every "
                    "step, return it as a tensor in the metadata of fsdp_pre_all_gather"
                )

    def _refuse_unfrozen(self, with_gradients: bool) -> None:
        thawed = self.follow_freezing()
        if thawed and with_gradients:
            follow_freezing()  # one error is enough for all groups
            raise ShardConfigStateError(
                f"{thawed[0]} requires a gradient now, unlike when this graph was compiled; call the model again, and "
                "torch.compile will compile it again. A model from composable_shard.compile needs only one call"
            )

    def follow_freezing(self) -> list[str]:
        """Let the stand-ins require gradients as their parameters do; returns the parameters that do only now."""
        return [each.name for each in self._extended.values() if each.follow_freezing()]

    def adopt_quietly(self) -> None:
        """Adopt parameters that users have assigned, and let `before_gather` not refuse to run because of them."""
        self._adopt()
        self._replaced = ""

    def _of_runtime(self) -> ParamGroup | None:
        return self._group() if self._group is not None else None

    def keep(self, gradients: Gradients) -> None:
        """Keep the current values of these gradients for a later backward."""
        group = self._of_runtime()
        if group is not None:
            self._set_hooks_aside([index for index, gradient in enumerate(gradients) if gradient is not None])
            group.gradients.accumulate(gradients, overwritten=True)
            if group.layout.copies is not None:
                group.layout.copies.keep()

    def take(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Return the sums of these gradients and the kept ones, which are no longer kept."""
        group = self._of_runtime()
        return list(gradients) if group is None else group.gradients.take(gradients)

    def settle(self, index: int, piece: torch.Tensor, complete: bool = True) -> None:
        """Add a reduced gradient to `.grad`, and call the hooks unless more gradients will follow."""
        if not self._is_wanted(index):
            return
        self._pending.begin()  # before `_set_hooks_aside`: callbacks run in order, and the sums need the hooks
        self._set_hooks_aside([index])
        if not complete:
            self._params[index].add_without_hooks(piece)
        elif self._params[index].hooks and index in self._extended:
            self._pending.add(index, piece)
        else:
            self._add({index: piece})

    def _add(self, pieces: Mapping[int, torch.Tensor]) -> None:
        group = self._of_runtime()
        if group is not None:
            group.gradients.add(pieces)
            return
        for index, piece in pieces.items():
            self._params[index].add_gradient(piece)

    def _is_wanted(self, index: int) -> bool:
        """Whether the running backward computes `.grad` of a parameter that does not get it from autograd."""
        sharded = self._params[index].sharded
        if not sharded.requires_grad:  # it was frozen after the graph was compiled
            return False
        leaf = self._extended[index].stand_in if index in self._extended else sharded
        # Not in `torch.autograd.grad`, or with `inputs`. A backward for the parameter itself counts, too.
        nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in (leaf, sharded) if each.requires_grad]
        return current_backward() < 0 or any(map(node_will_run, nodes))

    def _set_hooks_aside(self, indices: Sequence[int]) -> None:
        """Take hooks from autograd until this backward ends, because autograd would call them with None as gradient.

        Args:
            indices: the parameters whose gradients do not leave the graph through autograd.
        """
        group = self._of_runtime()
        if group is None:
            return
        if any_gradient_hooks(group.shards) or (not group.gradients.hooks_taken and group.gradients.may_have_hooks):
            group.gradients.take_hooks_of(indices)
            queue_backward_callback(group.gradients.give_hooks_back)

    def marks_of_unused(self, indices: Sequence[int], marks: torch.Tensor) -> list[float]:
        """The reduced marks of these parameters, which had no gradient on this rank: positive if any rank had one.

        In a capture of a CUDA graph, the host cannot read them. Then those of the last step outside count, and an
        assertion in the graph compares them.

        Raises:
            ShardConfigStateError: in a capture, there was no such step.
        """
        key = tuple(indices)
        if not capture_number(marks.device):
            self._marks_before[key] = marks.tolist()
        elif key not in self._marks_before:
            raise ShardConfigStateError(
                f"group with {self._params[0].fqn}: a captured step computes no gradient for {len(key)} of its "
                "parameters, unlike the steps before it; run one step before the capture, with the same code"
            )
        else:
            for mark, before in zip(marks.unbind(), self._marks_before[key], strict=True):
                torch._assert_async((mark > 0) if before > 0 else (mark == 0), UNUSED_ELSEWHERE)
        return self._marks_before[key]

    @property
    def zeros_for_unused(self) -> bool:
        """Whether a parameter that got no gradient on any rank gets zeros."""
        return self._settings.current.reduce_unused

    def before_optimizer_step(self, stepped: set[int], optimizer: Optimizer | None) -> None:
        """Note that an optimizer is about to change parameters, given by id.

        Foreach functions do not increase the versions of sharded parameters. Autograd would then not notice in backward
        that the shards which a graph has saved were changed.
        """
        if not stepped.isdisjoint([id(param.sharded) for param in self._params]):
            torch.autograd.graph.increment_version([param.local for param in self._params])
            self.note_change()

    def note_change(self) -> None:
        """Note that parameters that define their own all-gather are about to change."""
        if self._extended:
            torch.autograd.graph.increment_version([each.stand_in for each in self._extended.values()])

    def check_reduced(self, stepped: set[int]) -> None:
        """Do nothing: the group of the eager runtime also stores the gradients of graphs, and the engine checks it."""
