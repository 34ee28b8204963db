"""Parameters that define their own all-gather: FSDP2's extension for tensor subclasses.

    inputs, metadata = shard.fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy])
    tensor, owned = shard.fsdp_post_all_gather(outputs, metadata, param_dtype)
    shard.fsdp_post_all_gather(outputs, metadata, param_dtype, out=tensor)  # from the second time on

`extension_bucket.py` gathers them in eager steps, `extension_gathers.py` for compiled graphs.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .._comm.mesh import MeshInfo
from .._plan.layout import bucket_layout
from .._policies import MixedPrecisionPolicy
from .._torch.core import inner_values
from .._torch.tracing import without_data
from ..errors import ShardConfigAssertionError, ShardConfigTypeAssertionError
from .param import ShardedParam

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(param: ShardedParam) -> bool:
    """Whether a parameter defines its own all-gather.

    Raises:
        ShardConfigTypeAssertionError: it has only one of the two methods, or a signature that FSDP2 does not support.
    """
    local = param.local
    has_pre, has_post = hasattr(local, PRE), hasattr(local, POST)
    if has_pre is not has_post:
        present, missing = (PRE, POST) if has_pre else (POST, PRE)
        raise ShardConfigTypeAssertionError(
            f"parameter {param.fqn}: Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions: its tensor has {present} but not {missing}"
        )
    if has_pre:
        _takes_all(param)
    return has_pre


def warn_of_old_state(params: Iterable[ShardedParam]) -> None:
    """Before a load: warn if parameters hold tensors besides their values, for example scales.

    Warns:
        UserWarning: one does.
    """
    for param in params:
        others, _ = (inner_values(param.local) if is_extended(param) else None) or ((), None)
        if others:
            warnings.warn(
                f"parameter {param.fqn}: a load changes the values of this {type(param.local).__name__}, but not its "
                f"{', '.join(others)}; compute them again after the load, or reset them before",
                UserWarning,
                stacklevel=3,
            )
            return


def _takes_all(param: ShardedParam) -> bool:
    """Whether `fsdp_pre_all_gather` takes five arguments instead of only the mesh."""
    signature = inspect.signature(param.local.fsdp_pre_all_gather)  # type: ignore[attr-defined]
    if len(signature.parameters) not in (1, 5):
        raise ShardConfigTypeAssertionError(
            f"parameter {param.fqn}: Invalid fsdp_pre_all_gather: {signature}; it must take (mesh) or (mesh, "
            "outer_size, outer_stride, module, mp_policy)"
        )
    return len(signature.parameters) == 5


class Extension:
    """The all-gather that one parameter defines.

    Args:
        param: the parameter.
        dtype: the dtype in which it is used.
        info: the mesh.
        policy: the mixed-precision policy, for `fsdp_pre_all_gather`.

    Attributes:
        param, dtype, info: as given.
        shape: the unsharded shape.
        stride: the stride of the unsharded parameter.
    """

    def __init__(self, param: ShardedParam, dtype: torch.dtype, info: MeshInfo, policy: MixedPrecisionPolicy) -> None:
        self.param, self.dtype, self.info = param, dtype, info
        self.shape = torch.Size(param.shape)
        self.stride = torch.empty(self.shape, device="meta").stride()
        self._place = bucket_layout([param.shape], info.shard_size, dims=[param.dim]).params[0]
        self._policy = policy
        self._takes_all = _takes_all(param)

    @property
    def name(self) -> str:
        """The parameter and its class, for messages."""
        return f"parameter {self.param.fqn} (a {type(self.param.local).__name__})"

    def call_pre(self, in_graph: bool = False) -> tuple[list[torch.Tensor], Any]:
        """Call `fsdp_pre_all_gather`.

        Args:
            in_graph: whether a compiled graph gathers, and not the engine.

        Returns:
            the contiguous tensors that this rank sends, and the metadata.

        Raises:
            ShardConfigAssertionError: the shards are uneven, and the tensors are not padded.
        """
        inputs, metadata = self._call_pre(in_graph)
        for tensor in inputs:
            if self._lacks_padding(tensor):
                raise ShardConfigAssertionError(
                    f"parameter {self.param.fqn}: When a parameter is unevenly sharded by FSDP (orig size="
                    f"{self.shape}, FSDP world size={self.info.size}), fsdp_pre_all_gather must return all-gather "
                    f"inputs with the padded sharded size, of {self._place.chunk} rows, on every rank, but got "
                    f"{[tuple(t.shape) for t in inputs]}"
                )
        return inputs, metadata

    def preview(self) -> tuple[list[torch.Tensor], Any]:
        """Like `call_pre` in a graph, but in a context of fake tensors, and without effects on the parameter."""
        with self._unchanged():
            return self.call_pre(in_graph=True)

    def sizes(self) -> list[tuple[int, torch.dtype]]:
        """The elements and dtype of each tensor that a rank sends, with padding. Call it in a context of fake tensors.

        Ranks that forget the padding get the same result, and an error from `call_pre`.
        """
        with self._unchanged():
            inputs, _ = self._call_pre(in_graph=True)
        chunk = self._place.chunk
        return [
            (chunk * tensor.shape[1:].numel() if self._lacks_padding(tensor) else tensor.numel(), tensor.dtype)
            for tensor in inputs
        ]

    def _call_pre(self, in_graph: bool) -> tuple[list[torch.Tensor], Any]:
        param, info = self.param, self.info
        local: Any = param.local.to(info.device, non_blocking=True) if info.offloads else param.local
        arguments: tuple[Any, ...] = (info.shard_mesh,)
        if self._takes_all:
            module = None if param.module is None else param.module()
            arguments = (*arguments, self.shape, self.stride, module, self._policy)
        with param.during_pre_all_gather(in_graph):
            inputs, metadata = local.fsdp_pre_all_gather(*arguments)
        return [tensor.contiguous() for tensor in inputs], metadata

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Undo what `fsdp_pre_all_gather` stores in the parameter: fake tensors, for example."""
        attributes = self.param.local.__dict__
        before = dict(attributes)
        try:
            yield
        finally:
            attributes.clear()
            attributes.update(before)

    def _lacks_padding(self, tensor: torch.Tensor) -> bool:
        rank = self.info.shard_rank
        short = self._place.rows_of(rank) < self._place.chunk
        return short and tensor.shape == torch.Size(self._place.local_shape(rank))

    def call_post(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Call `fsdp_post_all_gather`; returns the unsharded parameter (or its local tensor), and the owned tensors."""
        local: Any = self.param.local
        made, owned = local.fsdp_post_all_gather(outputs, metadata, self.dtype)
        if made.shape != self.shape:  # it has padding rows at the end
            made = torch.as_strided(made, self.shape, self.stride, 0)
        return made, owned

    def refill(self, whole: torch.Tensor, outputs: tuple[torch.Tensor, ...], metadata: Any) -> None:
        """Call `fsdp_post_all_gather` with a tensor that an earlier call has made from the same outputs."""
        local: Any = self.param.local
        local.fsdp_post_all_gather(outputs, metadata, self.dtype, out=whole)


def gathered_shapes(inputs: Sequence[torch.Tensor], ranks: int) -> list[tuple[int, ...]]:
    """The shapes in which tensors of `ranks` ranks are gathered: one after the other along dim 0."""
    return [(ranks * tensor.shape[0], *tensor.shape[1:]) if tensor.ndim else (ranks,) for tensor in inputs]


def sent_by(
    param: ShardedParam, dtype: torch.dtype, info: MeshInfo, policy: MixedPrecisionPolicy
) -> tuple[tuple[int, torch.dtype], ...]:
    """The elements and dtype of each tensor that a rank sends for a parameter.

    Empty if the parameter does not define its own all-gather, or if this is known only when it is gathered.
    """
    if not is_extended(param):
        return ()
    try:
        with without_data(), torch.no_grad():
            return tuple(Extension(param, dtype, info, policy).sizes())
    except Exception:  # whatever the user's method raises; the gather calls it with real tensors
        return ()
