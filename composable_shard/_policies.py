"""The options of a parameter group, and the policies that users set: torch's and this library's."""

from __future__ import annotations

import functools
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

from ._torch.core import default_reduce_dtype
from ._torch.distributed import AllGather as AllGather
from ._torch.distributed import DataParallelMeshDims as DataParallelMeshDims
from ._torch.distributed import FSDPMeshInfo as FSDPMeshInfo
from ._torch.distributed import HSDPMeshInfo as HSDPMeshInfo
from ._torch.distributed import ReduceScatter as ReduceScatter
from ._torch.distributed import ShardPlacementResult as ShardPlacementResult
from .errors import (
    ShardConfigTypeError,
    ShardConfigTypeValueError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)

AllReduceHook = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Comms:
    """Custom communication that a user has set instead of the library's own. Frozen, like `Options`.

    Attributes:
        all_gather, reduce_scatter: objects with torch's interfaces `AllGather` and `ReduceScatter`.
        reduce_group: the process group for reductions over the shard axis; None for that of the mesh.
        all_reduce_hook: called with the averaged gradients of a bucket, as a 1D tensor.
        hook_stream: the stream on which the hook runs; None for the stream of reductions.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    reduce_group: dist.ProcessGroup | None = None
    all_reduce_hook: AllReduceHook | None = None
    hook_stream: Any = None


def require_count(field: str, value: object, least: int) -> None:
    """Check that a value is an int of at least `least`.

    Raises:
        ShardConfigValueError: it is not; the message names `field`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ShardConfigValueError(f"{field}={value!r}: expected a whole number of at least {least}")


def plain_value(value: Any) -> Any:
    """Unwrap the bool or number in a NumPy scalar or in a tensor or array of one element; return others unchanged."""
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and hasattr(value, "item") and math.prod(shape) == 1 else value


def as_bool(name: str, value: Any) -> bool:
    """Convert a setting to a bool. Like torch's FSDP2, accept a bool, a number, None, or a tensor of one element.

    Raises:
        ShardConfigTypeValueError: another object, for example a string or a list, which is true unless it is empty.
    """
    if isinstance(value, bool):
        return value
    plain = plain_value(value)
    if plain is None or isinstance(plain, numbers.Real):
        return bool(plain)
    raise ShardConfigTypeValueError(f"{name} should be a bool, got {type(value)}: {value!r}; pass True or False")


class GradDtype(NamedTuple):
    """The `grad_dtype` that users have set on a parameter (`torch.Tensor.grad_dtype`).

    Attributes:
        is_set: whether they have set it. torch before 2.15 does not tell apart the parameter's own dtype from no dtype.
        dtype: the dtype of `.grad`; None for the dtype in which the gradient was computed and reduced.
    """

    is_set: bool = False
    dtype: torch.dtype | None = None

    def kept(self, stored: torch.dtype, reduced: torch.dtype) -> torch.dtype:
        """Return the dtype of `.grad` of a parameter stored as `stored` whose gradient was reduced as `reduced`."""
        return (self.dtype or reduced) if self.is_set else stored


class Wire(NamedTuple):
    """The format in which numbers are communicated.

    Attributes:
        form: ``fp8``, ``int8`` or ``bf16``.
        block: the largest number of elements that share a scale.
    """

    form: str
    block: int


FORMS = ("bf16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class CommPolicy:
    """Formats in which parameters and gradients are communicated. Default: the dtypes of the mixed-precision policy.

    With ``"fp8"`` and ``"int8"``, tensors are quantized in blocks, each with a scale of 4 bytes. A row is one index of
    the dim along which a tensor is sharded. Blocks never cross the end of a row, so the values do not depend on the
    number of ranks. Tensors that would not become smaller are sent unchanged. In 8-bit formats these are norms and
    biases, whose rows are single numbers. Integers and complex numbers are always sent unchanged.

    Parameters are rounded to nearest, so all ranks compute with the same values. Gradients are rounded stochastically,
    with random numbers that depend on the number of the reduction, the parameters and the rank.

    The dtype of compute is still `param_dtype` of the mixed-precision policy. Sharded parameters, optimizer state and
    checkpoints keep their dtypes.

    Attributes:
        gather: format of parameters on the shard axis: ``"fp8"`` (e4m3), ``"int8"``, ``"bf16"``, or None for the dtype
            of compute.
        reduce: format of gradients on the shard axis, or None for the dtype of reduction. Every rank receives the
            rounded pieces of the other ranks and adds them in float32, in rank order.
        replicas: format of gradients on the outer axis of a 2D mesh, or None for the dtype of reduction. With HSDP,
            each replica receives the rounded pieces of all others, so use it for few replicas on a slow network. With
            `outer_sharding` (HFSDP), every rank receives only the pieces that it reduces.
        refresh: format of parameters on the outer axis with `outer_sharding`, or None for the dtype of compute.
        block: number of elements that share a scale. A row is split into equal blocks of at most this size. If that is
            impossible with equal blocks of at least a quarter of this size, the row is one block.

    Raises:
        ShardConfigValueError: an unknown format, or `block` is not an int of at least 8.
    """

    gather: str | None = None
    reduce: str | None = None
    replicas: str | None = None
    block: int = 256
    refresh: str | None = None

    def __post_init__(self) -> None:
        for name in ("gather", "reduce", "replicas", "refresh"):
            if (form := getattr(self, name)) is not None and form not in FORMS:
                raise ShardConfigValueError(
                    f"CommPolicy.{name}={form!r}: expected one of {', '.join(map(repr, FORMS))}, or None"
                )
        require_count("CommPolicy.block", self.block, 8)

    def wire(self, kind: str, dtype: torch.dtype) -> Wire | None:
        """The format of a bucket for ``gather``, ``reduce``, ``replicas`` or ``refresh``; None if sent unchanged."""
        form = getattr(self, kind)
        return Wire(form, self.block) if form is not None and dtype.is_floating_point else None

    def __str__(self) -> str:
        parts = [
            f"{name} {form}" for name in ("gather", "reduce", "replicas", "refresh") if (form := getattr(self, name))
        ]
        return ", ".join(parts) or "as it is"


AS_IT_IS = CommPolicy()


@dataclass(frozen=True)
class Options:
    """The settings of one group. Frozen: a setter replaces the whole object.

    Attributes:
        reshard_after_forward: free the unsharded parameters between forward and backward (ZeRO-3). ``None`` means
            ``False`` for the root and ``True`` elsewhere. A number of ranks keeps them sharded over that many ranks.
        reshard_after_backward: free them at the end of backward; ``False`` keeps them for the next microbatch.
        requires_gradient_sync: reduce gradients in backward; ``False`` keeps them unsharded for a later backward.
        requires_all_reduce: with replicas, all-reduce over them; ``False`` stops after the reduce-scatter.
        unshard_in_backward: gather the parameters before backward; ``False`` gathers only if backward reads one.
        keep_storage: keep the memory of unsharded parameters while they are resharded, so that their addresses stay the
            same.
        reduce_unused: reduce zeros for parameters that got no gradient.
        divide_factor: divisor of the sum of gradients over ranks; ``None`` means the number of ranks.
        only_sums: reduce by sums and divide separately, even if the backend can average.
        max_reductions: how many reductions of the engine may be in flight when one of this group is issued. ``None``
            means two on an accelerator. On a CPU it means that no reduction is in flight during a gather of backward
            (see `ParamGroup.reduces_first`).
        mp_policy: dtypes of compute, of reduction and of the module's inputs and outputs.
        comms: custom communication.
        comm_policy: formats in which weights and gradients are communicated.
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
        """Whether the unsharded parameters are freed after forward. By default they are, except the root's."""
        wanted = self.reshard_after_forward
        return not is_root if wanted is None else bool(wanted)

    @property
    def outlives_forward(self) -> tuple[bool, bool]:
        """Whether unsharded parameters, or parts of them, may exist after forward: (of other groups, of the root)."""
        wanted, given_up = self.reshard_after_forward, self.reshard_after_backward
        return not (given_up and (wanted is None or wanted is True)), not (given_up and wanted is True)

    @property
    def few_ranks(self) -> int:
        """The number of ranks over which weights stay sharded between forward and backward; 0 without such a mesh."""
        wanted = self.reshard_after_forward
        return 0 if wanted is None or isinstance(wanted, bool) else wanted

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter stored as `stored` is gathered and used."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and stored.is_floating_point else stored

    def sum_dtype(self, stored: torch.dtype, gathered: torch.dtype, asked: GradDtype) -> torch.dtype:
        """The dtype in which gradients of a parameter are accumulated, and reduced if it is the only one of its group.

        Args:
            stored, gathered: the dtypes in which the parameter is stored and gathered.
            asked: its `grad_dtype`.
        """
        own = asked.dtype or gathered if asked.is_set else default_reduce_dtype(stored, self.compute_dtype(stored))
        return self.mp_policy.reduce_dtype or own


def reduce_dtypes(sums: Sequence[torch.dtype], asked: Sequence[GradDtype]) -> list[torch.dtype]:
    """Return the dtypes in which gradients that are reduced together are reduced.

    Each is reduced in the dtype in which it is accumulated. But if `grad_dtype` was set on any parameter, all are
    reduced in the dtype to which these dtypes promote, as in torch 2.15.

    Args:
        sums: `Options.sum_dtype` of each parameter.
        asked: the `grad_dtype` of each.
    """
    if any(each.is_set for each in asked):
        return [functools.reduce(torch.promote_types, sums)] * len(sums)
    return list(sums)


def as_precision(policy: Any) -> MixedPrecisionPolicy:
    """Check the mixed-precision policy that `fully_shard` was given; None casts nothing.

    Raises:
        ShardConfigTypeError: it is not a policy, one of its dtypes is not a dtype, or its `cast_forward_inputs` is not
            a bool.
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
    """Check for a dtype or None; convert Python's `float` to float64, as torch does.

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
    """Check the offload policy that `fully_shard` was given; None and False offload nothing.

    FSDP2 silently offloads nothing for any object that is not a `CPUOffloadPolicy`. Here FSDP1's `CPUOffload` is
    supported, and other objects are an error.

    Raises:
        ShardConfigTypeError: it is not a policy, or its `pin_memory` or `offload_params` is not a bool.
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
    """The policy without `param_dtype_override_fn` (torch 2.15), for parameters without an override."""
    return policy if overrides_of(policy) is None else replace(policy, param_dtype_override_fn=None)  # type: ignore[call-arg]


def overrides_of(policy: MixedPrecisionPolicy) -> Callable[[torch.nn.Parameter], torch.dtype | None] | None:
    """The policy's `param_dtype_override_fn`, if it has one."""
    return getattr(policy, "param_dtype_override_fn", None)


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How far ahead groups are gathered. Create it by `depth`, `bytes` or `auto`. Explicit prefetch lists override it.

    Attributes:
        kind: ``"depth"``, ``"bytes"`` or ``"auto"``.
        amount: number of groups or bytes; None for `auto`.
    """

    kind: str
    amount: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("depth", "bytes", "auto"):
            raise ShardConfigValueError(f"PrefetchPolicy.kind={self.kind!r}: expected 'depth', 'bytes' or 'auto'")
        if self.kind == "auto":
            if self.amount is not None:
                raise ShardConfigValueError(f"PrefetchPolicy.amount={self.amount!r}: auto takes no amount")
        else:
            require_count(f"PrefetchPolicy.{self.kind}", self.amount, 0)

    @classmethod
    def depth(cls, groups: int = 1) -> PrefetchPolicy:
        """Gather `groups` groups ahead. The default of 1 is similar to FSDP2. 0 gathers each group when it begins.

        If the parameters of one module are on several meshes, its groups begin together and count as one.

        Raises:
            ShardConfigValueError: `groups` is negative or not an int.
        """
        return cls("depth", groups)

    @classmethod
    def bytes(cls, nbytes: int) -> PrefetchPolicy:
        """Gather ahead as long as the prefetched groups take at most `nbytes` bytes, including landing buffers.

        Raises:
            ShardConfigValueError: `nbytes` is negative or not an int.
        """
        return cls("bytes", nbytes)

    @classmethod
    def auto(cls) -> PrefetchPolicy:
        """Gather each group just early enough to hide its gather, based on measured times.

        Until times are measured, gather one group ahead. Groups also stay unsharded between forward and backward if
        that reduces exposed communication. The memory limit is the budget of the `PoolPolicy` if there is one, else the
        peak that the plan of `depth(1)` predicts.
        """
        return cls("auto")

    def __str__(self) -> str:
        return self.kind if self.amount is None else f"{self.kind}({self.amount})"


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """How much memory the pool may use.

    Attributes:
        budget: the largest number of bytes that may be leased at the same time on a rank: unsharded parameters, landing
            buffers and reductions. None means no limit. The budget is a hard limit for planned training steps and for
            passes without gradients or gradient sync, with the exceptions that docs/memory.md lists. To stay within the
            budget, the planner drops in this order: 1. prefetching, 2. reductions in flight, 3. parameters that are
            kept for the next backward of their group, 4. parameters that are kept after forward. If the step still does
            not fit, a `PoolBudgetError` is raised.
        keep_idle: whether the pool keeps unused memory. This matters most between forward and backward, where the loss
            is computed and memory use often peaks. None keeps it on a CPU, because memory that was returned to the
            system is mapped again page by page, and returns it on an accelerator, whose caching allocator is fast.

    Raises:
        ShardConfigValueError: `budget` is not a positive int, or `keep_idle` is not a bool or None.
    """

    budget: int | None = None
    keep_idle: bool | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            require_count("PoolPolicy.budget", self.budget, 1)
        if not isinstance(self.keep_idle, bool | None):
            raise ShardConfigValueError(f"PoolPolicy.keep_idle={self.keep_idle!r}: expected True, False or None")


@dataclass
class HostOffloadPolicy(OffloadPolicy):
    """Keeps optimizer state in host memory; shards and gradients stay on the accelerator.

    Each step copies gradients and shards to the host, a few at a time, and the updated shards back. Call
    `offload_optimizer` for each optimizer. To keep shards and gradients on the host as well, use `CPUOffloadPolicy`.
    Without an accelerator, this policy has no effect.

    Attributes:
        pin_memory: whether to pin this memory, so that copies are asynchronous. Pinned memory cannot be swapped out.

    Raises:
        ShardConfigTypeError: `pin_memory` is not a bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise ShardConfigTypeError(f"HostOffloadPolicy.pin_memory={self.pin_memory!r}: expected True or False")


@dataclass
class DiskOffloadPolicy(OffloadPolicy):
    """Keeps optimizer state in files, and sharded parameters and their gradients in host memory.

    Call `offload_optimizer` to move an optimizer's state to the files. Without an accelerator, shards and gradients
    stay where they are.

    Attributes:
        directory: directory of the files, preferably on a local disk. It is created if it does not exist. The files
            have no names: any number of runs, ranks and optimizers may share a directory. When a process ends for any
            reason, the system frees the space of its files.
        memory: the largest number of bytes of host memory that a process uses for this state while optimizers step, for
            all optimizers with this policy together. A few hundred megabytes are enough to keep a disk busy. The state
            of the largest parameter's shard must fit.
        pin_memory: whether to pin the memory of shards and gradients, as for `CPUOffloadPolicy`.

    Raises:
        ShardConfigTypeError: `directory` is not a path, or `pin_memory` is not a bool.
        ShardConfigValueError: `memory` is not a positive int, or the system is not Linux (the latter as a
            `ShardConfigUnsupportedError`, which is also a NotImplementedError).
    """

    directory: str | os.PathLike[str]
    memory: int
    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ShardConfigUnsupportedError(
                f"DiskOffloadPolicy: this system is {sys.platform}, and state on disk needs Linux (unnamed files, "
                "direct I/O that bypasses the page cache); keep the state in memory, or train on Linux"
            )
        if not isinstance(self.directory, str | os.PathLike) or not isinstance(os.fspath(self.directory), str):
            raise ShardConfigTypeError(f"DiskOffloadPolicy.directory={self.directory!r}: expected a path")
        if not isinstance(self.pin_memory, bool):
            raise ShardConfigTypeError(f"DiskOffloadPolicy.pin_memory={self.pin_memory!r}: expected True or False")
        require_count("DiskOffloadPolicy.memory", self.memory, 1)
        self.directory = Path(self.directory)


def keeps_shards_on_host(policy: OffloadPolicy | None) -> bool:
    """Whether a policy keeps shards and their gradients in host memory."""
    return isinstance(policy, (CPUOffloadPolicy, DiskOffloadPolicy))


class Division(NamedTuple):
    """How the sum of gradients over ranks is divided.

    Attributes:
        mean: whether backends that can average do so.
        before, after: divisors of gradients before and after their reduction.
    """

    mean: bool
    before: float
    after: float


def division(factor: float | None, only_sums: bool, dtype: torch.dtype, axes: Sequence[tuple[int, bool]]) -> Division:
    """Decide how gradients of `dtype` are divided.

    float16 could overflow if the division came after the sum, or underflow if it came before. So, like torch's FSDP2,
    divide by a power of two near the square root of the factor before the reduction, and by the rest after it.

    Args:
        factor: the user's divisor of the sum; None for the number of ranks.
        only_sums: whether backends must not average.
        dtype: the dtype of reduction.
        axes: for each mesh axis to reduce over: its size, and whether its backend can average.
    """
    mean = not only_sums and factor is None and dtype != torch.float16
    if factor is None:
        factor = float(math.prod(size for size, averages in axes if not (mean and averages)))
    before = 1.0
    while dtype == torch.float16 and factor % before == 0 and factor / before > before:
        before *= 2
    return Division(mean, before, factor / before)


class Settings:
    """A mutable holder of a group's current `Options`, shared by the module's setters and the runtime.

    Attributes:
        current: the options.
        gives_up, outlives: whether forward frees the unsharded parameters (`Options.reshards`), and whether they may
            exist after it (`Options.outlives_forward`). Each is a pair: (for other groups, for the root's group).
        accumulates: whether gradient sync was ever off, so that unreduced gradients may exist.
        stays: whether a plan keeps the unsharded parameters between forward and backward; None if the plan agrees with
            the options.
    """

    __slots__ = ("accumulates", "current", "gives_up", "outlives", "stays")

    def __init__(self, current: Options) -> None:
        self.current = current
        self.gives_up = current.reshards(False), current.reshards(True)
        self.outlives = current.outlives_forward
        self.accumulates = not current.requires_gradient_sync
        self.stays: bool | None = None

    def reshards(self, is_root: bool) -> bool:
        """Whether forward frees the unsharded parameters: by the plan, else by the options."""
        return self.gives_up[int(is_root)] if self.stays is None else not self.stays  # 2.11 cannot trace a bool index

    def follow_plan(self, is_root: bool, keeps: bool | None) -> None:
        """Follow a plan: `keeps` is whether the unsharded parameters stay after forward; None: the options decide."""
        self.stays = keeps if keeps == self.gives_up[is_root] else None

    def change(self, **values: Any) -> None:
        """Set these values in the current options."""
        self.take(replace(self.current, **values))

    def take(self, options: Options) -> None:
        """Replace the current options."""
        self.current = options
        self.gives_up = self.current.reshards(False), self.current.reshards(True)
        self.outlives = self.current.outlives_forward
        self.accumulates |= not self.current.requires_gradient_sync


ONE_AHEAD = PrefetchPolicy.depth(1)  # the default
