"""What a user may choose for a group: torch's own policies, and our frozen options."""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

from ._errors import (
    ShardConfigTypeError,
    ShardConfigTypeValueError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)
from ._torch.core import default_reduce_dtype
from ._torch.distributed import AllGather as AllGather
from ._torch.distributed import DataParallelMeshDims as DataParallelMeshDims
from ._torch.distributed import FSDPMeshInfo as FSDPMeshInfo
from ._torch.distributed import HSDPMeshInfo as HSDPMeshInfo
from ._torch.distributed import ReduceScatter as ReduceScatter
from ._torch.distributed import ShardPlacementResult as ShardPlacementResult

AllReduceHook = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Comms:
    """What a user has put in the place of our own communication. Frozen, like `Options`.

    Attributes:
        all_gather, reduce_scatter: objects with torch's interfaces `AllGather` and `ReduceScatter`.
        reduce_group: the process group for reductions over the shard axis; None for that of the mesh.
        all_reduce_hook: called with the reduced gradients of a bucket (1D, averaged).
        hook_stream: where it runs; None for the stream of reductions.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    reduce_group: dist.ProcessGroup | None = None
    all_reduce_hook: AllReduceHook | None = None
    hook_stream: Any = None


def require_count(field: str, value: object, least: int) -> None:
    """Refuse what is not a whole number of at least `least`.

    Raises:
        ShardConfigValueError: naming `field`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ShardConfigValueError(f"{field}={value!r}: expected a whole number of at least {least}")


def plain_value(value: Any) -> Any:
    """The bool or number in a NumPy scalar, or in a tensor or an array of one element; other objects as they are."""
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and hasattr(value, "item") and math.prod(shape) == 1 else value


def as_bool(name: str, value: Any) -> bool:
    """A truth value as users and torch's FSDP2 have them: a bool, a number, None, or a tensor of one element.

    Raises:
        ShardConfigTypeValueError: another object, for example a string or a list, whose truth says whether it is empty.
    """
    if isinstance(value, bool):
        return value
    plain = plain_value(value)
    if plain is None or isinstance(plain, numbers.Real):
        return bool(plain)
    raise ShardConfigTypeValueError(f"{name} should be a bool, got {type(value)}: {value!r}; pass True or False")


class Wire(NamedTuple):
    """What numbers travel as.

    Attributes:
        form: ``fp8``, ``int8`` or ``bf16``.
        block: elements that share a scale, at most.
    """

    form: str
    block: int


FORMS = ("bf16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class CommPolicy:
    """In how many bits weights and gradients travel. By default in the dtypes of the mixed-precision policy.

    A tensor travels in blocks of a row: a row is one index of the dim along which it is cut, and no block reaches over
    its end, so that the values do not depend on the number of ranks. Each block has a scale of 4 bytes beside it. What
    would not become smaller travels as it is: norms and biases, whose rows are single numbers, and integers.

    What is computed in is `param_dtype` of the mixed-precision policy, as before; sharded parameters, optimizers and
    checkpoints keep every bit.

    Attributes:
        gather: what weights travel as: ``"fp8"`` (e4m3), ``"int8"``, ``"bf16"``, or None for the dtype of compute.
            What comes out of it is computed with, on all ranks alike: each weight rounded to nearest.
        reduce: what gradients travel as on the axis over which parameters are sharded, or None for the dtype of
            reduction. Every rank receives the others' quantised pieces and adds them up in float32, in the order of the
            ranks.
        replicas: what gradients travel as between the replicas of a mesh with two axes (HSDP), or None. Each replica
            receives the quantised pieces of all others, so that it pays for a few replicas behind slow links.
        block: elements that share a scale. A row is cut into equal blocks of at most so many; if it cannot be cut into
            equal ones of at least a quarter of that, it is one block.
        error_feedback: how gradients are rounded. False: stochastically, by random numbers that follow from the
            number of the reduction, the parameters and the rank. True: to nearest, and what rounding has left of a
            gradient is added to the next one. That takes 4 bytes for each element of an unsharded gradient for
            `reduce`, on each rank, and 4 for each of a sharded one for `replicas`.

    Raises:
        ShardConfigValueError: an unknown form, a block that is no whole number of at least 8, an `error_feedback` that
            is no bool, or one without gradients that are rounded.
    """

    gather: str | None = None
    reduce: str | None = None
    replicas: str | None = None
    block: int = 256
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name in ("gather", "reduce", "replicas"):
            if (form := getattr(self, name)) is not None and form not in FORMS:
                raise ShardConfigValueError(
                    f"CommPolicy.{name}={form!r}: expected one of {', '.join(map(repr, FORMS))}, or None"
                )
        require_count("CommPolicy.block", self.block, 8)
        if not isinstance(self.error_feedback, bool):
            raise ShardConfigValueError(f"CommPolicy.error_feedback={self.error_feedback!r}: expected True or False")
        if self.error_feedback and self.reduce is None and self.replicas is None:
            raise ShardConfigValueError(
                "CommPolicy(error_feedback=True): nothing is rounded that it could feed back; say what gradients "
                "travel as (reduce or replicas), too"
            )

    @property
    def rounds_gradients(self) -> bool:
        """Whether gradients travel in fewer bits."""
        return self.reduce is not None or self.replicas is not None

    def wire(self, kind: str, dtype: torch.dtype) -> Wire | None:
        """What a bucket of `dtype` travels as for ``gather``, ``reduce`` or ``replicas``; None for as it is."""
        form = getattr(self, kind)
        return Wire(form, self.block) if form is not None and dtype.is_floating_point else None

    def __str__(self) -> str:
        parts = [f"{name} {form}" for name in ("gather", "reduce", "replicas") if (form := getattr(self, name))]
        return ", ".join([*parts, *(["error feedback"] if self.error_feedback else [])]) or "as it is"


AS_IT_IS = CommPolicy()


@dataclass(frozen=True)
class Options:
    """The settings of one group. Frozen: a setter puts a new object in the place of the old one.

    Attributes:
        reshard_after_forward: free the unsharded parameters between forward and backward (ZeRO-3); ``None`` means
            ``False`` for the root and ``True`` elsewhere; a number of ranks keeps them cut among as many.
        reshard_after_backward: free them at the end of backward; ``False`` keeps them for the next micro-batch.
        requires_gradient_sync: reduce gradients in backward; ``False`` keeps them unsharded for a later backward.
        requires_all_reduce: on a mesh of replicas, finish the reduction; ``False`` stops after the reduce-scatter.
        unshard_in_backward: gather the parameters before backward; ``False`` only if backward asks for one of them.
        keep_storage: keep the memory of unsharded parameters when they are given up, so that they return to the same
            addresses.
        reduce_unused: reduce zeros for parameters that got no gradient.
        divide_factor: what the sum of gradients over ranks is divided by; ``None`` means the number of ranks.
        only_sums: never let the backend form a mean.
        max_reductions: how many reductions of the engine may be in flight when one of this group is issued; ``None``
            for few: two on an accelerator, and on a CPU none beside a gather of backward (see
            `ParamGroup.reduces_first`).
        mp_policy: dtypes of compute, of reduction and of the module's inputs and outputs.
        comms: what takes the place of our own communication.
        comm_policy: in how many bits it travels.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    unshard_in_backward: bool = True
    keep_storage: bool = False
    reduce_unused: bool = False
    divide_factor: float | None = None
    only_sums: bool = False
    max_reductions: int | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    comms: Comms = field(default_factory=Comms)
    comm_policy: CommPolicy = AS_IT_IS

    def reshards(self, is_root: bool) -> bool:
        """Whether forward gives up the unsharded parameters; by default all but the root's."""
        wanted = self.reshard_after_forward
        return not is_root if wanted is None else bool(wanted)

    @property
    def outlives_forward(self) -> tuple[bool, bool]:
        """Whether gathered weights, or pieces of them, may be there after their forward: others', and the root's."""
        wanted, given_up = self.reshard_after_forward, self.reshard_after_backward
        return not (given_up and (wanted is None or wanted is True)), not (given_up and wanted is True)

    @property
    def few_ranks(self) -> int:
        """Among how many ranks weights stay cut between forward and backward; 0 if they do not."""
        wanted = self.reshard_after_forward
        return 0 if wanted is None or isinstance(wanted, bool) else wanted

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter stored as `stored` is gathered and used."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and stored.is_floating_point else stored

    def reduce_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter stored as `stored` is reduced."""
        return self.mp_policy.reduce_dtype or default_reduce_dtype(stored, self.compute_dtype(stored))


def as_precision(policy: Any) -> MixedPrecisionPolicy:
    """The mixed-precision policy that `fully_shard` was given; None casts nothing.

    Raises:
        ShardConfigTypeError: it is no policy, one of its dtypes no dtype, or its `cast_forward_inputs` no truth value.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ShardConfigTypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {type(policy).__name__}")
    casts = as_bool("mp_policy.cast_forward_inputs", policy.cast_forward_inputs)
    changed: dict[str, Any] = {} if casts is policy.cast_forward_inputs else {"cast_forward_inputs": casts}
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        given = getattr(policy, name)
        if (dtype := _as_dtype(f"mp_policy.{name}", given)) is not given:
            changed[name] = dtype
    return replace(policy, **changed) if changed else policy


def _as_dtype(name: str, value: Any) -> torch.dtype | None:
    """A dtype, None, or Python's `float`, which torch takes for float64.

    Raises:
        ShardConfigTypeError: another object.
    """
    if value is float:
        return torch.float64
    if value is None or isinstance(value, torch.dtype):
        return value
    raise ShardConfigTypeError(
        f"{name}: expected a torch.dtype or None, got {type(value).__name__} ({value!r}); pass torch.bfloat16, for "
        "example"
    )


def as_offload(policy: Any) -> OffloadPolicy:
    """The offload policy that `fully_shard` was given; None and False offload nothing.

    FSDP2 offloads nothing for any object that is no `CPUOffloadPolicy`. Here FSDP1's `CPUOffload` does what it says,
    and what cannot be understood is an error.

    Raises:
        ShardConfigTypeError: it is no policy, or its `pin_memory` or `offload_params` no truth value.
    """
    if isinstance(policy, CPUOffload):
        offloads = as_bool("offload_policy.offload_params", policy.offload_params)
        return CPUOffloadPolicy() if offloads else OffloadPolicy()
    if isinstance(policy, CPUOffloadPolicy):
        pins = as_bool("offload_policy.pin_memory", policy.pin_memory)
        return policy if pins is policy.pin_memory else replace(policy, pin_memory=pins)
    if isinstance(policy, OffloadPolicy):
        return policy
    plain = plain_value(policy)
    if plain is None or (isinstance(plain, numbers.Real) and not plain):
        return OffloadPolicy()
    raise ShardConfigTypeError(
        f"offload_policy: expected an OffloadPolicy, got {type(policy).__name__} ({policy!r}); pass CPUOffloadPolicy() "
        "to offload, or None"
    )


def without_overrides(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy for all parameters that `param_dtype_override_fn`, of torch 2.15, gives no dtype of their own."""
    return policy if overrides_of(policy) is None else replace(policy, param_dtype_override_fn=None)  # type: ignore[call-arg]


def overrides_of(policy: MixedPrecisionPolicy) -> Callable[[torch.nn.Parameter], torch.dtype | None] | None:
    """The policy's `param_dtype_override_fn`, if it has one."""
    return getattr(policy, "param_dtype_override_fn", None)


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How far ahead groups are gathered. Made by `depth`, `bytes` or `auto`; explicit lists of a module go before it.

    Attributes:
        kind: which of the three it is.
        amount: groups or bytes; None for `auto`.
    """

    kind: str
    amount: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("depth", "bytes", "auto"):
            raise ShardConfigValueError(f"PrefetchPolicy.kind={self.kind!r}: expected 'depth', 'bytes' or 'auto'")
        if self.kind == "auto":
            if self.amount is not None:
                raise ShardConfigValueError(f"PrefetchPolicy.amount={self.amount!r}: auto takes none")
        else:
            require_count(f"PrefetchPolicy.{self.kind}", self.amount, 0)

    @classmethod
    def depth(cls, groups: int = 1) -> PrefetchPolicy:
        """Gather so many groups ahead; 1 is what torch's FSDP2 does, 0 gathers each when it begins.

        Groups of one module, whose parameters lie on several meshes, begin together, and count as one.

        Raises:
            ShardConfigValueError: `groups` is negative or no whole number.
        """
        return cls("depth", groups)

    @classmethod
    def bytes(cls, nbytes: int) -> PrefetchPolicy:
        """Gather as far ahead as what has not begun yet takes no more than `nbytes` bytes, landing buffers included.

        Raises:
            ShardConfigValueError: `nbytes` is negative or no whole number.
        """
        return cls("bytes", nbytes)

    @classmethod
    def auto(cls) -> PrefetchPolicy:
        """The least look-ahead that hides each gather, by measured times; one ahead until there are any.

        Groups also stay unsharded between forward and backward where that saves waiting. All of it stays within the
        memory that one ahead takes, or within the budget of the `PoolPolicy`, which may be more.
        """
        return cls("auto")

    def __str__(self) -> str:
        return self.kind if self.amount is None else f"{self.kind}({self.amount})"


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """How much memory the pool may take.

    Attributes:
        budget: the most bytes leased at once on a rank: unsharded parameters, landing buffers and reductions. A hard
            bound of a planned training step (in others what is on its way is given up first, but a gather that is
            needed at once may exceed it): gathers ahead yield to it first, then reductions in flight, then weights that
            stay for the next backward of their group, then those that are kept after forward; what cannot fit even so
            is a `PoolBudgetError`. None for no limit.
        mem_pool: on CUDA, whether the memory comes from a `torch.cuda.MemPool` of the model's own, so that it shares no
            segment with activations, and neither splits the other's. Elsewhere it is an error when the plan is made.
        keep_idle: whether the pool keeps memory that nothing is in, above all between forward and backward, where the
            loss is made and a step often needs most. None: on a CPU it does, for memory that goes back to the system
            comes back page by page; on an accelerator it does not, for its allocator gives memory out again at once.

    Raises:
        ShardConfigValueError: `budget` is not positive or no whole number; another one is no bool.
    """

    budget: int | None = None
    mem_pool: bool = False
    keep_idle: bool | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            require_count("PoolPolicy.budget", self.budget, 1)
        if not isinstance(self.mem_pool, bool):
            raise ShardConfigValueError(f"PoolPolicy.mem_pool={self.mem_pool!r}: expected True or False")
        if not isinstance(self.keep_idle, bool | None):
            raise ShardConfigValueError(f"PoolPolicy.keep_idle={self.keep_idle!r}: expected True, False or None")


@dataclass
class HostOffloadPolicy(OffloadPolicy):
    """What is kept in the memory of the host, and not on the accelerator. Without one it changes nothing.

    A gradient lies where its parameter lies, and an optimizer steps where its state lies: on the CPU. So either all
    three are offloaded, as `CPUOffloadPolicy` does, or the optimizer's state alone (with `offload_optimizer`), or none.

    Attributes:
        parameters: shards; they are copied to the accelerator before each gather.
        gradients: reduced gradients; as `parameters`.
        optimizer: the optimizer's state. Alone, gradients and shards are copied to the host for a step, some at a time,
            and the stepped shards back.
        pin_memory: whether this memory is pinned, so that copies do not block; it cannot be swapped out then.

    Raises:
        ShardConfigTypeError: one of them is no bool.
        ShardConfigValueError: only one of parameters and gradients, or these without the optimizer.
    """

    parameters: bool = True
    gradients: bool = True
    optimizer: bool = True
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "optimizer", "pin_memory"):
            if not isinstance(value := getattr(self, name), bool):
                raise ShardConfigTypeError(f"HostOffloadPolicy.{name}={value!r}: expected True or False")
        if self.parameters != self.gradients:
            raise ShardConfigValueError(
                f"HostOffloadPolicy(parameters={self.parameters}, gradients={self.gradients}): a gradient lies where "
                "its parameter lies; give both the same value"
            )
        if self.parameters and not self.optimizer:
            raise ShardConfigValueError(
                "HostOffloadPolicy(parameters=True, optimizer=False): an optimizer steps where its parameters lie, and "
                "keeps its state there; give optimizer=True, too, or parameters=False, gradients=False"
            )


@dataclass
class DiskOffloadPolicy(OffloadPolicy):
    """The optimizer's state is kept in files, and shards and gradients in the memory of the host.

    `offload_optimizer` gives an optimizer's state to the files. Without an accelerator shards and gradients stay where
    they are.

    Attributes:
        directory: where the files are, best on a local disk; it is made if it is not there. The files have no names:
            any number of runs, ranks and optimizers may share a directory, and when a process ends, however it ends,
            the space of its files is free again.
        memory: the most bytes of memory that a process keeps such state in while optimizers step, for all optimizers
            with this policy together. Some hundred megabytes are enough to keep a disk busy; at least the state of the
            largest parameter's shard must fit into it.
        pin_memory: of shards and gradients, as of `CPUOffloadPolicy`.

    Raises:
        ShardConfigTypeError: `directory` is no path, or `pin_memory` no bool.
        ShardConfigValueError: `memory` is not positive or no whole number; or the system is not Linux (as a
            `ShardConfigUnsupportedError`, which is also a NotImplementedError).
    """

    directory: str | os.PathLike[str]
    memory: int
    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ShardConfigUnsupportedError(
                f"DiskOffloadPolicy: this system is {sys.platform}, and state on disk needs Linux (files without "
                "names, reads and writes past the page cache); keep it in memory, or train on Linux"
            )
        if not isinstance(self.directory, str | os.PathLike) or not isinstance(os.fspath(self.directory), str):
            raise ShardConfigTypeError(f"DiskOffloadPolicy.directory={self.directory!r}: expected a path")
        if not isinstance(self.pin_memory, bool):
            raise ShardConfigTypeError(f"DiskOffloadPolicy.pin_memory={self.pin_memory!r}: expected True or False")
        require_count("DiskOffloadPolicy.memory", self.memory, 1)
        self.directory = Path(self.directory)


def keeps_shards_on_host(policy: OffloadPolicy | None) -> bool:
    """Whether shards and their gradients are to be in the memory of the host."""
    return isinstance(policy, (CPUOffloadPolicy, DiskOffloadPolicy)) or (
        isinstance(policy, HostOffloadPolicy) and policy.parameters
    )


class Division(NamedTuple):
    """How a sum of gradients becomes what a user wants.

    Attributes:
        mean: whether backends that can average do so.
        before, after: what gradients are divided by before and after their reduction.
    """

    mean: bool
    before: float
    after: float


def division(factor: float | None, only_sums: bool, dtype: torch.dtype, axes: Sequence[tuple[int, bool]]) -> Division:
    """How gradients of `dtype` are divided.

    float16 would overflow in the sum, or vanish if all of the division came before it: it is divided by a power of two
    near the square root of the factor before, and by the rest after, as torch's FSDP2 does.

    Args:
        factor: what a user wants the sum divided by; None for the number of ranks.
        only_sums: whether backends must not average.
        dtype: the dtype of reduction.
        axes: of the mesh that are reduced over: their sizes, and whether their backends can average.
    """
    mean = not only_sums and factor is None and dtype != torch.float16
    if factor is None:
        factor = float(math.prod(size for size, averages in axes if not (mean and averages)))
    before = 1.0
    while dtype == torch.float16 and factor % before == 0 and factor / before > before:
        before *= 2
    return Division(mean, before, factor / before)


class Settings:
    """The one place that holds a group's current `Options`; shared by the module's setters and the runtime.

    Attributes:
        current: the options.
        gives_up, outlives: whether forward gives up the unsharded parameters (`Options.reshards`), and whether they may
            be there after it (`Options.outlives_forward`): for other groups, and for the root's.
        accumulates: whether gradient sync was ever off, so that unsharded gradients may wait to be reduced.
        stays: whether a plan keeps the unsharded parameters between forward and backward; None where it says of that
            what the options say.
    """

    __slots__ = ("accumulates", "current", "gives_up", "outlives", "stays")

    def __init__(self, current: Options) -> None:
        self.current = current
        self.gives_up = current.reshards(False), current.reshards(True)
        self.outlives = current.outlives_forward
        self.accumulates = not current.requires_gradient_sync
        self.stays: bool | None = None

    def reshards(self, is_root: bool) -> bool:
        """Whether forward gives up the unsharded parameters: by the plan, or else by the options."""
        return self.gives_up[int(is_root)] if self.stays is None else not self.stays  # 2.11 traces no bool as an index

    def follow_plan(self, is_root: bool, keeps: bool | None) -> None:
        """A plan says whether the unsharded parameters stay behind forward, or nothing of that (None)."""
        self.stays = keeps if keeps == self.gives_up[is_root] else None

    def change(self, **values: Any) -> None:
        """Put options with these values in the place of the current ones."""
        self.current = replace(self.current, **values)
        self.gives_up = self.current.reshards(False), self.current.reshards(True)
        self.outlives = self.current.outlives_forward
        self.accumulates |= not self.current.requires_gradient_sync


ONE_AHEAD = PrefetchPolicy.depth(1)  # what is done if nothing is asked for
