"""`Ragged`, a placement that shards dim 0 at multiples of a number of rows, and the DTensors with this placement.

Torch has no such placement and cannot be extended by one, because it computes sizes and offsets of shards by `Shard`'s
rule in many places. So these tensors are a subclass of DTensor. Operators that treat all elements alike, as optimizers
do, run on the local tensors by the rules of `Shard(0)`, which are the same as long as no sizes are computed. Full
tensors and checkpoints have methods here. Everything else is an error.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ShardConfigTypeError, ShardConfigUnsupportedError, ShardConfigValueError

DISPATCHES = torch.__version__ >= "2.13"  # older DTensors did not call `__torch_dispatch__` of their subclasses


class Ragged(Placement):
    """Shard dim 0 into shards of unequal size, each a multiple of `rows` rows, except the last one.

    Return it from `shard_placement_fn` for parameters whose blocks of rows must not be split, for example because the
    optimizer quantizes its state by blocks. Each of n ranks gets ``ceil(b / n)`` of b blocks; the last ranks get fewer
    or none.

        cs.fully_shard(block, shard_placement_fn=lambda p: cs.Ragged(16) if p.ndim == 2 else None)

    Args:
        rows: rows of a block, at least 1.

    Raises:
        ShardConfigTypeError: `rows` is not an int.
        ShardConfigValueError: `rows` is less than 1.
    """

    dim = 0

    def __init__(self, rows: int) -> None:
        super().__init__()
        if not isinstance(rows, int) or isinstance(rows, bool):
            raise ShardConfigTypeError(f"rows: expected an int, got {rows!r}")
        if rows < 1:
            raise ShardConfigValueError(f"rows: expected at least 1, got {rows}")
        self.rows = rows
        self._name = ""

    def of(self, name: str) -> Ragged:
        """The same placement, with the name of a parameter for errors."""
        made = Ragged(self.rows)
        made._name = name
        return made

    @property
    def name(self) -> str:
        """The name of the parameter, for errors."""
        return self._name or "placed by Ragged"

    def chunk(self, size: int, world: int) -> int:
        """Rows of the largest shard of `size` rows over `world` ranks."""
        return rows_of_chunk(size, world, self.rows)

    def __eq__(self, other: object) -> bool:
        return type(other) is Ragged and other.rows == self.rows

    def __hash__(self) -> int:
        return hash((Ragged, self.rows))

    def __repr__(self) -> str:
        return f"Ragged({self.rows})"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {"Ragged": Ragged}

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.rows, self._name)


def _remade(rows: int, name: str) -> Ragged:
    return Ragged(rows).of(name)


def rows_of_chunk(size: int, world: int, rows: int) -> int:
    """Rows of the largest shard, if `size` rows are split over `world` ranks at multiples of `rows`."""
    blocks = -(-size // rows)
    return min(-(-blocks // world) * rows, size)


class RaggedTensor(DTensor):
    """A DTensor whose placement is `Ragged` on one mesh axis and `Replicate` on the others."""

    __slots__ = ()
    _spec: Any

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> RaggedTensor:
        if isinstance(context[0], DTensorSpec):  # before torch 2.13
            mesh, placements, meta = context[0].mesh, context[0].placements, context[0].tensor_meta
        else:
            mesh, (placements, meta, *_) = inner["device_mesh"], context
        assert meta is not None
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(size, stride, meta.dtype))
        return ragged_tensor(inner["_local_tensor"], spec, context[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        with torch.no_grad():
            made = ragged_tensor(self._local_tensor.clone(), self._spec, self.requires_grad)
        memo[id(self)] = made
        return made

    @property
    def ragged(self) -> tuple[int, Ragged]:
        """The axis of the mesh that is `Ragged`, and the placement."""
        return ragged_axis(self._spec.placements)

    def is_cut_as(self, other: RaggedTensor) -> bool:
        """Whether elements with the same index are on the same rank."""
        mine, others = self._spec, other._spec
        return self.shape == other.shape and mine.placements == others.placements and mine.mesh == others.mesh

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's shard; gradients flow through it."""
        if grad_placements not in (None, self._spec.placements):
            raise _refusal("to_local(grad_placements)", self)
        local: torch.Tensor = _ToLocal.apply(self) if torch.is_grad_enabled() else self._local_tensor  # type: ignore[no-untyped-call]
        return local

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The full tensor, gathered from all ranks; no gradient flows through it."""
        if grad_placements is not None:
            raise _refusal("full_tensor(grad_placements)", self)
        axis, placed = self.ragged
        mesh, rows = self._spec.mesh, self.shape[0]
        chunk = placed.chunk(rows, mesh.size(axis))
        with torch.no_grad():
            own = self._local_tensor
            padded = own.new_zeros((chunk, *self.shape[1:]))
            padded[: own.shape[0]] = own
            shape = torch.Size((chunk * mesh.size(axis), *self.shape[1:]))
            meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), own.dtype)
            even = _plain(padded, DTensorSpec(mesh, _as_shards(self._spec.placements), tensor_meta=meta))
            return even.full_tensor()[:rows].contiguous()

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """Return the same tensor, or a replicated one.

        Raises:
            ShardConfigUnsupportedError: another mesh, or placements that are neither the same nor all `Replicate`.
        """
        wanted = self._spec.placements if placements is None else tuple(placements)
        if device_mesh not in (None, self._spec.mesh) or any(value for value in options.values()):
            raise _refusal("redistribute to another mesh or dtype", self)
        if wanted == self._spec.placements:
            return self
        if not all(isinstance(placement, Replicate) for placement in wanted):
            raise _refusal(f"redistribute to {wanted}", self)
        meta = TensorMeta(self.shape, self.stride(), self.dtype)
        return _plain(self.full_tensor(), DTensorSpec(self._spec.mesh, wanted, tensor_meta=meta))

    # ---- torch.distributed.checkpoint

    def _chunk(self) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        begin, rows = own_rows_of(self.shape[0], self._spec.mesh, self._spec.placements)
        rest = list(self.shape[1:])
        return ChunkStorageMetadata(offsets=torch.Size([begin, *[0] * len(rest)]), sizes=torch.Size([rows, *rest]))

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        chunk = self._chunk()
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._local_tensor


class _ToLocal(torch.autograd.Function):
    """Converts a DTensor to this rank's shard."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> RaggedTensor:
        return ragged_tensor(gradient, ctx.spec)


def ragged_tensor(local: torch.Tensor, spec: Any, requires_grad: bool = False) -> RaggedTensor:
    """Make a tensor from this rank's shard and a DTensorSpec."""
    made: Any = DTensor.__new__(RaggedTensor, local, spec, requires_grad=requires_grad)
    return cast(RaggedTensor, made)


def is_ragged(placements: Sequence[Any]) -> bool:
    """Whether one of the placements is `Ragged`."""
    return any(type(placement) is Ragged for placement in placements)


def ragged_axis(placements: Sequence[Any]) -> tuple[int, Ragged]:
    """The axis of a mesh that is `Ragged`, and the placement."""
    return next((axis, placed) for axis, placed in enumerate(placements) if isinstance(placed, Ragged))


def own_rows_of(size: int, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[int, int]:
    """The first row and the number of rows of this rank's shard of `size` rows."""
    axis, placed = ragged_axis(placements)
    chunk = placed.chunk(size, mesh.size(axis))
    begin = min(chunk * mesh.get_local_rank(axis), size)
    return begin, min(chunk, size - begin)


# ---- operators


def _as_shards(placements: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(Shard(0) if isinstance(placed, Ragged) else placed for placed in placements)


def _plain(local: torch.Tensor, spec: Any) -> DTensor:
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def _stand_in(value: Any) -> Any:
    """Replace a ragged tensor by a DTensor with `Shard(0)`; return other values unchanged."""
    if not isinstance(value, RaggedTensor):
        return value
    spec = value._spec
    return _plain(
        value._local_tensor, DTensorSpec(spec.mesh, _as_shards(spec.placements), tensor_meta=spec.tensor_meta)
    )


_COPIES = frozenset({
    "aten::_to_copy", "aten::alias", "aten::clone", "aten::copy_", "aten::detach", "aten::empty_like", "aten::fill_",
    "aten::full_like", "aten::is_pinned", "aten::is_same_size", "aten::lerp_", "aten::ones_like", "aten::zero_",
    "aten::zeros_like", "aten::_amp_foreach_non_finite_check_and_unscale_",
})  # fmt: skip
_NORMS = frozenset({"aten::linalg_vector_norm", "aten::_foreach_norm", "aten::sum"})


def _takes_all_alike(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator treats all elements alike, or sums over all of them."""
    name = func._schema.name
    if name in _NORMS:
        dims = kwargs.get("dim", args[2] if len(args) > 2 and name == "aten::linalg_vector_norm" else None)
        return dims is None and (name != "aten::sum" or len(args) == 1)
    by_element = torch.Tag.pointwise in func.tags or name.startswith(("aten::_foreach_", "aten::_fused_"))
    return by_element or name in _COPIES


def _operands(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[list[torch.Tensor]]:
    """The tensors that an operator combines: from lists, those with the same index."""
    values = [*args, *kwargs.values()]
    alone = list(filter(_is_tensor, values))
    together = [*itertools.zip_longest(*filter(_is_list, values))] or [()]
    for index, taken in enumerate(together):
        yield [*filter(_is_tensor, taken), *(() if index else alone)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _check_operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check that ragged tensors are only combined with tensors that have the same shape, placements and mesh."""
    for operands in _operands(args, kwargs):
        large = [tensor for tensor in operands if tensor.ndim]
        ragged = [tensor for tensor in large if isinstance(tensor, RaggedTensor)]
        for tensor in large if ragged else ():
            if not isinstance(tensor, RaggedTensor) or not tensor.is_cut_as(ragged[0]):
                other = f"{type(tensor).__name__} {tuple(tensor.shape)}"
                raise _refusal(f"{func._schema.name} together with a {other}", ragged[0])


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on ragged tensors."""
    first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RaggedTensor))
    if not _takes_all_alike(func, args, kwargs):
        raise _refusal(func._schema.name, first)
    _check_operands(func, args, kwargs)
    changed = func(*pytree.tree_map(_stand_in, args), **pytree.tree_map(_stand_in, kwargs))
    if func._schema.name.endswith("_") and isinstance(args[0], torch.Tensor):
        return args[0]
    return pytree.tree_map(functools.partial(_as_ragged, _by_shape(args, kwargs)), changed)


def _by_shape(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[tuple[int, ...], Any]:
    """By shape, the specs of an operator's ragged arguments."""
    leaves = pytree.tree_leaves((args, kwargs))
    return {tuple(leaf.shape): leaf._spec for leaf in leaves if isinstance(leaf, RaggedTensor)}


def _as_ragged(specs: dict[tuple[int, ...], Any], value: Any) -> Any:
    spec = specs.get(tuple(value.shape)) if type(value) is DTensor else None
    if spec is None or value._spec.placements != _as_shards(spec.placements):
        return value
    made = DTensorSpec(spec.mesh, spec.placements, tensor_meta=value._spec.tensor_meta)
    return ragged_tensor(value._local_tensor, made)


def _refusal(what: str, tensor: RaggedTensor) -> ShardConfigUnsupportedError:
    _, placed = tensor.ragged
    return ShardConfigUnsupportedError(
        f"parameter {placed.name}: {what} is not supported with {placed}, whose shards have unequal sizes; use "
        "to_local() or full_tensor(), or shard the parameter by Shard(0)"
    )


# ---- older versions of torch


class _Dispatching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does the work of the class's `__torch_dispatch__`, which older DTensors do not call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, RaggedTensor) for leaf in leaves):
            return _run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _through_a_mode(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), _Dispatching():  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


if not DISPATCHES:
    RaggedTensor.__torch_function__ = classmethod(_through_a_mode)  # type: ignore[assignment]
