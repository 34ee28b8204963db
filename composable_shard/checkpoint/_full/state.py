"""Gather, stream and load the full tensors of a sharded model, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ..._torch.core import tree_tensors
from ..._torch.distributed import dtensor_at, dtensor_like
from ...errors import CheckpointError
from .entries import Entries, are_alike, memory_of
from .metadata import Metadata, metadata_for, metadata_of, with_metadata
from .names import plain_name
from .ranks import ModelRanks, Together
from .tensors import Held, Holdings
from .transfer import Expected, Part, gathered, sent


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Gather the full parameters and persistent buffers of a model.

    This is a collective: all ranks must call it.

    It works at any time except while a graph is compiled, even while parameters are unsharded. It also works for models
    that are partly sharded, sharded by torch's FSDP2, sharded over replicas, or tensor parallel. Tensors are gathered
    in batches: besides the result, a rank holds at most the bytes of the largest group or of the largest tensor.

    Args:
        model: the model.
        rank0_only: if True, only rank 0 gets the tensors. The other ranks get an empty dict and hold no copy. If only
            some ranks have the model, as for a stage of a pipeline, the first of them gets the tensors.
        cpu_offload: if True, the tensors are on the CPU. Otherwise they are on the compute device.
        dtype: dtype of floating-point tensors. Default: unchanged. Packed weights always keep their dtype.

    Returns:
        Full tensors by name (FQN), in the order of `model.state_dict()`. Each tensor has its own memory. Names that
        share a tied weight map to the same tensor object. Unsharded buffers and parameters are those of the rank that
        gets the result. Values that are not tensors (`get_extra_state`) are unchanged. The dict has the `_metadata` of
        `model.state_dict()`, with the versions of the modules.

    Raises:
        CheckpointError: a tensor is on the meta device or is a DTensor in a container, or a hook raised. Raised on all
            ranks.
        CheckpointMismatchError: the ranks built or sharded the model differently, or its hooks differ. Raised on all
            ranks.
    """
    held = Holdings.together(model, "gather the full state", lambda held: _check(held, "full_state_dict"))
    device = torch.device("cpu") if cpu_offload else None
    parts = [Part.of(each.name, each.tensor, each.as_kept(dtype)) for each in held.once()]
    full = dict(gathered(parts, held.ranks, limit=held.limit, lead_only=rank0_only, device=device))
    if rank0_only and not held.ranks.leads:
        return {}
    values = {each.key: full[each.first] for each in held.tensors.values()} | held.others
    return with_metadata({plain_name(key): values[key] for key in held.order}, held.metadata)


def iter_full_state(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the full parameters and persistent buffers of a model on every rank, in batches.

    Use it, for example, to send the weights to an inference engine after each step of reinforcement learning. A full
    copy of the model never exists. The tensors are on the compute device and have their own memory, so you may keep
    them.

    This is a collective: all ranks must iterate to the end, or stop after the same tensor. They must not change weights
    during the iteration. If one rank stops earlier, the other ranks wait for it in the next gather.

    Args:
        model: the model.
        dtype: dtype of floating-point tensors. Default: unchanged. Packed weights always keep their dtype.

    Yields:
        Name (FQN) and full tensor, in the order of `model.state_dict()`. A tied weight is yielded once, under its first
        name.

    Raises:
        CheckpointError: a tensor is on the meta device, a weight is in a container, or a hook raised. Raised on all
            ranks.
        CheckpointMismatchError: the ranks built or sharded the model differently, or its hooks differ. Raised on all
            ranks.
    """
    held = Holdings.together(model, "stream the full state", lambda held: _check(held, "iter_full_state"))
    parts = [Part.of(each.name, each.tensor, each.as_kept(dtype)) for each in held.once()]
    return gathered(parts, held.ranks, limit=held.limit, lead_only=False, device=None)


def load_full_state_dict(
    model: nn.Module,
    sd: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
    assign: bool = False,
) -> _IncompatibleKeys:
    """Load full tensors into a sharded or unsharded model.

    This is a collective: all ranks must call it.

    All ranks check everything first. If a check fails, the model is unchanged on all ranks. Hooks of `load_state_dict`
    run and see the tensors as the model holds them.

    Args:
        model: the model. If it is on the meta device, `assign` allocates memory, except for non-persistent buffers. No
            rank holds more than its shards and one tensor.
        sd: full tensors by name (FQN), as `full_state_dict` returns them. One name of a tied weight is enough. If it
            has `_metadata`, modules use the versions in it to convert states of older versions.
        strict: if True, the names must match those of the model.
        broadcast_from_rank0: if True, only rank 0 needs `sd`, and sends each rank its pieces, in bounded memory. `sd`
            of the other ranks is ignored. (For the meaning of rank 0, see `full_state_dict`.)
        assign: if True, replace the model's tensors by new ones with the dtypes of `sd`, which share no memory with
            `sd`. Otherwise, cast and copy the values into the model's tensors.

    Returns:
        `missing_keys` and `unexpected_keys`. Both are empty if `strict`.

    Raises:
        CheckpointMismatchError: names or shapes do not match, a value is sharded, a value cannot be cast (from floating
            point to integer), or the model is on the meta device without `assign`. Raised on all ranks.
        CheckpointError: a hook raised, or a hook of `state_dict` adds values that no hook of `load_state_dict` loads.
            In the latter case everything else is loaded. Raised on all ranks.
    """
    held = Holdings.together(model, "load a full state")
    given = {plain_name(name): value for name, value in (sd or {}).items()}
    offer = _Offer.of(given, metadata_of(sd))
    if broadcast_from_rank0:
        offer = held.ranks.from_lead(offer)
    known = {**held.hidden, **held.tensors}
    chosen = offer.names_for(known)
    keys = _differences(held, offer, chosen)
    problems = _misfits(known, offer, assign) + (_problems_of(keys) if strict else [])
    held.ranks.agree("load_full_state_dict", problems, held.layout())

    wanted = [known[name] for name in chosen.values()]
    pieces = _received(wanted, held, offer, given) if broadcast_from_rank0 else _cut(wanted, given)
    loaded = _loaded(pieces, held.ranks, assign)
    state = with_metadata(_as_state(held, offer, loaded, assign), metadata_for(model, offer.metadata))
    with torch.no_grad():
        result = Together(held.ranks).together(lambda: model.load_state_dict(state, strict=False, assign=assign))
    lost = _not_taken(model, held, _left_over(state, result.unexpected_keys))
    if lost and strict:
        raise CheckpointError(
            f"load_full_state_dict: {', '.join(lost[:20])}{', ...' if len(lost) > 20 else ''}: hooks of "
            "state_dict() add these values, but no hook of load_state_dict() loads them, so they are not loaded. "
            "Everything else is loaded. Add a hook (register_load_state_dict_pre_hook), or pass strict=False"
        )
    keys.unexpected_keys.extend(lost)
    return keys


def _check(held: Holdings, call: str) -> None:
    """Check that all values of a state dict can be gathered."""
    held.check_material(call)
    weights = {memory_of(each.tensor) for each in held.hidden.values() if each.first == each.name}
    for key, value in held.others.items():
        inside = tree_tensors(value)
        if any(isinstance(each, DTensor) for each in inside):
            raise CheckpointError(
                f"{call}: {key} is a {type(value).__name__} that contains sharded tensors, which are gathered only "
                "under separate keys; let the hook, or get_extra_state, return each tensor under its own key"
            )
        if call == "iter_full_state" and any(memory_of(each) in weights for each in inside):
            raise CheckpointError(
                f"{call}: {key} is a {type(value).__name__} that contains a parameter, but only tensors are streamed; "
                "let the hook return the parameter under its own key"
            )


_UNKNOWN = object()  # stands for a value that a hook has made; equals no other value


def _left_over(state: Mapping[str, Any], unexpected: Iterable[str]) -> dict[str, Any]:
    """Values of a state dict that no module loaded, by name.

    `unexpected` has the keys after hooks have changed them: wrappers add their part, and other hooks may rename keys.
    """
    given = {plain_name(key): value for key, value in state.items()}
    return {name: given.get(name, _UNKNOWN) for name in map(plain_name, unexpected)}


def _not_taken(model: nn.Module, held: Holdings, left: Mapping[str, Any]) -> list[str]:
    """Names of values that were passed to `load_state_dict`, but differ in the model afterwards. A collective.

    Args:
        model: the model.
        held: tensors of the model before the load.
        left: values that no module loaded, by name. Parameters among them are ignored, because they are loaded.
    """
    beside = {
        name: value for name, value in left.items() if name not in held.tensors or not held.tensors[name].is_param
    }

    def lost() -> list[str]:
        now = Entries.of(model).values() if beside else {}
        return [name for name, value in beside.items() if name not in now or not are_alike(now[name], value)]

    # A collective, because hooks may load a value on some ranks only, and hooks of the state dict may fail on some.
    _, of_ranks = Together(held.ranks).together_and_tell(lost, lambda names: names)
    return [*dict.fromkeys(name for names in of_ranks for name in names)]


def _differences(held: Holdings, offer: _Offer, chosen: Mapping[str, str]) -> _IncompatibleKeys:
    """The missing and the unexpected names of an offer. The keys of `chosen` are the first names of its tensors."""
    missing = [each.name for each in held.tensors.values() if each.first not in chosen]
    missing += [name for name in map(plain_name, held.others) if name not in offer.others]
    expected = {*map(plain_name, held.order), *held.hidden}
    return _IncompatibleKeys(missing, [name for name in (*offer.tensors, *offer.others) if name not in expected])


def _problems_of(keys: _IncompatibleKeys) -> list[str]:
    """The missing and unexpected names as problems of a strict load."""
    return [
        *(f"missing: {name}" for name in keys.missing_keys),
        *(f"unexpected: {name}" for name in keys.unexpected_keys),
    ]


def _as_state(held: Holdings, offer: _Offer, loaded: Mapping[str, torch.Tensor], assign: bool) -> dict[str, Any]:
    """The state dict that is passed to `load_state_dict`, which does not copy tensors that were written in place.

    If tensors are assigned, each name of a parameter gets the new one, including names that are not in the state dict.
    """
    hidden = [each for each in held.hidden.values() if assign or each.name in offer.tensors]
    state = {each.key: loaded[each.first] for each in (*hidden, *held.tensors.values()) if each.first in loaded}
    others = {key: plain_name(key) for key in held.others}
    return state | {key: offer.others[name] for key, name in others.items() if name in offer.others}


class _Offer(NamedTuple):
    """A description of a state dict for the other ranks.

    Attributes:
        tensors: shape and dtype of each tensor, by name.
        others: values that are not tensors, by name.
        problems: reasons why the state dict cannot be loaded.
        metadata: metadata of the state dict.
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    others: dict[str, Any]
    problems: list[str]
    metadata: Metadata | None

    @classmethod
    def of(cls, given: Mapping[str, Any], metadata: Metadata | None) -> _Offer:
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        sharded = [
            f"{name}: is a DTensor; pass full tensors (its full_tensor()), or load shards with model.load_state_dict"
            for name, value in tensors.items()
            if isinstance(value, DTensor)
        ]
        known = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        return cls(known, {name: value for name, value in given.items() if name not in tensors}, sharded, metadata)

    def names_for(self, known: Mapping[str, Held]) -> dict[str, str]:
        """Map the first name in the model of each known tensor to a name of it in this offer."""
        return {known[name].first: name for name in self.tensors if name in known}


def _misfits(known: Mapping[str, Held], offer: _Offer, assign: bool) -> list[str]:
    """Reasons why an offer does not match the tensors of a model."""
    problems = [*offer.problems]
    problems += [f"{name}: is not a tensor" for name in offer.others if name in known]
    for name, (shape, dtype) in offer.tensors.items():
        each = known.get(name)
        if each is None:
            continue
        if shape != each.tensor.shape:
            problems.append(f"{name}: has shape {tuple(shape)}, but {tuple(each.tensor.shape)} in the model")
        if not assign and not torch.can_cast(dtype, each.tensor.dtype):
            problems.append(f"{name}: has dtype {dtype}, which cannot be cast to {each.tensor.dtype} of the model")
        if not assign and each.local.is_meta:
            problems.append(f"{name}: is on the meta device in the model; pass assign=True, or call model.to_empty()")
    return problems


def _cut(wanted: list[Held], given: Mapping[str, torch.Tensor]) -> Iterator[tuple[Held, torch.Tensor]]:
    """Yield this rank's pieces of full tensors that this rank has."""
    for each in wanted:
        yield each, each.piece_of(given[each.name].detach())


def _received(
    wanted: list[Held], held: Holdings, offer: _Offer, given: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Held, torch.Tensor]]:
    """Yield this rank's pieces of full tensors that only the lead has."""
    by_name = {each.name: each for each in wanted}
    cuts = {each.name: each.cut if held.ranks.are_all_of(each.cut) else None for each in wanted}
    expected = [Expected(name, *offer.tensors[name], cuts[name]) for name in by_name]
    for name, value in sent(expected, held.ranks, lambda name: given[name].detach(), held.limit):
        yield by_name[name], value if cuts[name] is not None else by_name[name].piece_of(value)


def _loaded(pieces: Iterable[tuple[Held, torch.Tensor]], ranks: ModelRanks, assign: bool) -> dict[str, torch.Tensor]:
    """The loaded tensors of the model, by first name."""
    put = _assigned if assign else _written
    return {each.first: put(each, piece, ranks) for each, piece in pieces}


def _written(each: Held, piece: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
    """Overwrite the model's tensor. If it shares memory with another one, make a new one for `load_state_dict`."""
    if each.aliases:
        return placed_like(each, piece.to(each.tensor.dtype), ranks)
    with torch.no_grad():
        each.local.copy_(piece)
    return each.tensor


def _assigned(each: Held, piece: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
    """A new tensor with the placement of the model's tensor."""
    made = placed_like(each, piece, ranks)
    return nn.Parameter(made, requires_grad=each.tensor.requires_grad) if each.is_param else made


def placed_like(each: Held, piece: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
    """A new tensor from this rank's piece, with the placement of the model's tensor and the dtype of the piece."""
    old, home = each.tensor, each.home(ranks)
    pins = each.owner is not None and each.owner.info.pins and home.type == "cpu"
    with torch.no_grad():
        local = torch.empty(piece.shape, dtype=piece.dtype, device=home, pin_memory=pins).copy_(piece)
        if not isinstance(old, DTensor):
            return local
        if local.dtype == old.dtype:
            return dtensor_like(old, local)
        return dtensor_at(local, old.device_mesh, old.placements, old)
