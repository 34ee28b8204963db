"""Full tensors of a sharded model: gathered, streamed, and loaded back, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ..._torch.distributed import dtensor_at, dtensor_like
from .ranks import ModelRanks
from .tensors import Held, Holdings, plain_name
from .transfer import Expected, Part, gathered, sent


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Gather the full parameters and persistent buffers of a model. A collective: all ranks must call it.

    Works at any time outside of a graph that is being compiled, also while parameters are unsharded, and for models
    that are sharded in part, by torch's FSDP2, over replicas or with tensor parallelism. Tensors are gathered some at a
    time: besides the result, a rank holds at most the bytes of the largest group, or of the largest tensor.

    Args:
        model: the model.
        rank0_only: whether rank 0 alone gets the tensors; the others get an empty dict and hold no copy. Where the
            model lives on some ranks only, as a pipeline's stage does, the first of these takes the part of rank 0.
        cpu_offload: whether the tensors are on the CPU; else they are on the device on which the ranks compute.
        dtype: cast tensors of floating-point numbers; by default they keep theirs, as packed weights always do.

    Returns:
        full tensors by name (FQN), in the order of `model.state_dict()`, each with memory of its own. Names that share
        a tied weight map to one tensor object. Buffers and parameters that are not sharded are those of the rank that
        gets the result. What is no tensor (`get_extra_state`) is passed on as it is.

    Raises:
        CheckpointError: a tensor is on the meta device.
    """
    held = Holdings(model)
    held.check_material("full_state_dict")
    held.together("gather the full state")
    device = torch.device("cpu") if cpu_offload else None
    parts = [Part.of(each.name, each.tensor, each.as_kept(dtype)) for each in held.once()]
    full = dict(gathered(parts, held.ranks, limit=held.limit, lead_only=rank0_only, device=device))
    if rank0_only and not held.ranks.leads:
        return {}
    values = {each.key: full[each.first] for each in held.tensors.values()} | held.others
    return {plain_name(key): values[key] for key in held.order}


def iter_full_state(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the full parameters and persistent buffers of a model on every rank, some at a time.

    For the weights of an inference engine after each step of reinforcement learning, say: there is never a second copy
    of the model. The tensors are on the device on which the ranks compute, own their memory, and may be kept.

    A collective: all ranks must iterate alike, to the end, or stop after the same tensor, and change no weights on the
    way. A rank that stops early leaves the others waiting for it at the next gather.

    Args:
        model: the model.
        dtype: cast tensors of floating-point numbers; by default they keep theirs, as packed weights always do.

    Yields:
        name (FQN) and full tensor, in the order of `model.state_dict()`; a tied weight once, under its first name.

    Raises:
        CheckpointError: a tensor is on the meta device.
    """
    held = Holdings(model)
    held.check_material("iter_full_state")
    held.together("stream the full state")
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
    """Load full tensors into a model, sharded or not. A collective: all ranks must call it.

    All is checked first, on all ranks: if it fails, the model is as it was on each of them. Hooks of `load_state_dict`
    run, with the tensors as the model holds them.

    Args:
        model: the model. On the meta device it gets memory with `assign`, but for buffers that are not persistent; no
            rank holds more than its shards and a tensor.
        sd: full tensors by name (FQN), as `full_state_dict` gives them. Of tied weights one name is enough.
        strict: whether the names must be those of the model.
        broadcast_from_rank0: whether only rank 0 has `sd`, and sends each rank its pieces, in bounded memory; what
            others give is ignored. (For rank 0 see `full_state_dict`.)
        assign: whether to put new tensors in the place of the model's, which keep the dtypes of `sd`; they share no
            memory with it. By default values are copied into the model's tensors, and cast.

    Returns:
        `missing_keys` and `unexpected_keys`, which are empty if `strict`.

    Raises:
        CheckpointMismatchError: on all ranks; names or shapes do not fit, a value would lose its kind by the cast (from
            floating-point numbers to integers), is sharded, or the model is on the meta device without `assign`.
    """
    held = Holdings(model)
    held.together("load a full state")
    given = {plain_name(name): value for name, value in (sd or {}).items()}
    offer = _Offer.of(given)
    if broadcast_from_rank0:
        offer = held.ranks.from_lead(offer)
    chosen = {held.tensors[name].first: name for name in offer.tensors if name in held.tensors}
    keys = _differences(held, offer, chosen)
    problems = _misfits(held, offer, assign)
    if strict:
        problems += [f"missing: {name}" for name in keys.missing_keys]
        problems += [f"unexpected: {name}" for name in keys.unexpected_keys]
    held.ranks.agree("load_full_state_dict", problems, held.layout())

    wanted = [held.tensors[name] for name in chosen.values()]
    pieces = _received(wanted, held, offer, given) if broadcast_from_rank0 else _cut(wanted, given)
    put = _assigned if assign else _written
    loaded = {each.first: put(each, piece, held.ranks) for each, piece in pieces}
    with torch.no_grad():
        model.load_state_dict(_as_state(held, offer, loaded), strict=False, assign=assign)
    return keys


def _differences(held: Holdings, offer: _Offer, chosen: Mapping[str, str]) -> _IncompatibleKeys:
    """Names that an offer lacks, or has too many; `chosen` has the first names of tensors that it has."""
    missing = [each.name for each in held.tensors.values() if each.first not in chosen]
    missing += [name for name in map(plain_name, held.others) if name not in offer.others]
    expected = {plain_name(key) for key in held.order}
    return _IncompatibleKeys(missing, [name for name in (*offer.tensors, *offer.others) if name not in expected])


def _as_state(held: Holdings, offer: _Offer, loaded: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict with which `load_state_dict` ends the load; of tensors written in place it copies none."""
    state = {each.key: loaded[each.first] for each in held.tensors.values() if each.first in loaded}
    others = {key: plain_name(key) for key in held.others}
    return state | {key: offer.others[name] for key, name in others.items() if name in offer.others}


class _Offer(NamedTuple):
    """What a state dict has, by name: shapes and dtypes of tensors, and all else; and what of it cannot be loaded."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    others: dict[str, Any]
    problems: list[str]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Offer:
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        sharded = [
            f"{name}: is a DTensor; give full tensors (its full_tensor()), or load shards by model.load_state_dict"
            for name, value in tensors.items()
            if isinstance(value, DTensor)
        ]
        known = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        return cls(known, {name: value for name, value in given.items() if name not in tensors}, sharded)


def _misfits(held: Holdings, offer: _Offer, assign: bool) -> list[str]:
    """What of an offer does not fit to the tensors that a model holds."""
    problems = [*offer.problems]
    problems += [f"{name}: is no tensor" for name in offer.others if name in held.tensors]
    for name, (shape, dtype) in offer.tensors.items():
        each = held.tensors.get(name)
        if each is None:
            continue
        if shape != each.tensor.shape:
            problems.append(f"{name}: has shape {tuple(shape)}, and the model's has {tuple(each.tensor.shape)}")
        if not assign and not torch.can_cast(dtype, each.tensor.dtype):
            problems.append(f"{name}: is of {dtype}, which cannot be cast to {each.tensor.dtype} without loss of kind")
        if not assign and each.local.is_meta:
            problems.append(f"{name}: is on the meta device in the model; pass assign=True, or call model.to_empty()")
    return problems


def _cut(wanted: list[Held], given: Mapping[str, torch.Tensor]) -> Iterator[tuple[Held, torch.Tensor]]:
    """This rank's pieces of full tensors that it has itself."""
    for each in wanted:
        yield each, each.piece_of(given[each.name].detach())


def _received(
    wanted: list[Held], held: Holdings, offer: _Offer, given: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Held, torch.Tensor]]:
    """This rank's pieces of full tensors that the lead has."""
    by_name = {each.name: each for each in wanted}
    cuts = {each.name: each.cut if held.ranks.are_all_of(each.cut) else None for each in wanted}
    expected = [Expected(name, *offer.tensors[name], cuts[name]) for name in by_name]
    for name, value in sent(expected, held.ranks, lambda name: given[name].detach(), held.limit):
        yield by_name[name], value if cuts[name] is not None else by_name[name].piece_of(value)


def _written(each: Held, piece: torch.Tensor, _: ModelRanks) -> torch.Tensor:
    """The tensor that the model has, overwritten."""
    with torch.no_grad():
        each.local.copy_(piece)
    return each.tensor


def _assigned(each: Held, piece: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
    """A new tensor, placed as the one that the model has."""
    made = placed_like(each, piece, ranks)
    return nn.Parameter(made, requires_grad=each.tensor.requires_grad) if each.is_param else made


def placed_like(each: Held, piece: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
    """A new tensor of this rank's piece, placed as the one that the model has, in the dtype of the piece."""
    old, home = each.tensor, each.home(ranks)
    pins = each.owner is not None and each.owner.info.pins and home.type == "cpu"
    with torch.no_grad():
        local = torch.empty(piece.shape, dtype=piece.dtype, device=home, pin_memory=pins).copy_(piece)
        if not isinstance(old, DTensor):
            return local
        if local.dtype == old.dtype:
            return dtensor_like(old, local)
        return dtensor_at(local, old.device_mesh, old.placements, old)
