"""Parameters that define their own all-gather: FSDP2's extension for tensor subclasses.

    inputs, metadata = shard.fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy])
    tensor, owned = shard.fsdp_post_all_gather(outputs, metadata, param_dtype)
    shard.fsdp_post_all_gather(outputs, metadata, param_dtype, out=tensor)  # from the second time on

`extension_bucket.py` gathers them in eager steps, `extension_gathers.py` for compiled graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from .._comm.mesh import MeshInfo
from .._plan.layout import bucket_layout
from .._policies import MixedPrecisionPolicy
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
        param, info = self.param, self.info
        local: Any = param.local.to(info.device, non_blocking=True) if info.offloads else param.local
        arguments: tuple[Any, ...] = (info.shard_mesh,)
        if self._takes_all:
            module = None if param.module is None else param.module()
            arguments = (*arguments, self.shape, self.stride, module, self._policy)
        with param.during_pre_all_gather(in_graph):
            inputs, metadata = local.fsdp_pre_all_gather(*arguments)
        inputs = [tensor.contiguous() for tensor in inputs]
        self._check_padded(inputs)
        return inputs, metadata

    def preview(self) -> tuple[list[torch.Tensor], Any]:
        """Like `call_pre`, but in a context of fake tensors (`without_data`), and without effects on the parameter."""
        attributes = self.param.local.__dict__
        before = dict(attributes)
        try:
            return self.call_pre(in_graph=True)
        finally:  # it may have stored fake tensors
            attributes.clear()
            attributes.update(before)

    def _check_padded(self, inputs: Sequence[torch.Tensor]) -> None:
        param, info = self.param, self.info
        layout = bucket_layout([param.shape], info.shard_size, dims=[param.dim]).params[0]
        rows = layout.rows_of(info.shard_rank)
        unpadded = torch.Size(layout.local_shape(info.shard_rank))
        if rows < layout.chunk and any(tensor.shape == unpadded for tensor in inputs):
            raise ShardConfigAssertionError(
                f"parameter {param.fqn}: When a parameter is unevenly sharded by FSDP (orig size="
                f"{torch.Size(param.shape)}, FSDP world size={info.size}), fsdp_pre_all_gather must return all-gather "
                f"inputs with the padded sharded size, of {layout.chunk} rows, on every rank, but got "
                f"{[tuple(t.shape) for t in inputs]}"
            )

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
            inputs, _ = Extension(param, dtype, info, policy).preview()
    except Exception:  # whatever the user's method raises, the gather will raise it again, with its values
        return ()
    return tuple((tensor.numel(), tensor.dtype) for tensor in inputs)
