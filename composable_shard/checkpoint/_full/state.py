"""Full tensors of a sharded model: gathered, streamed, and loaded back, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ..._errors import CheckpointError
from ..._torch.core import tree_tensors
from ..._torch.distributed import dtensor_at, dtensor_like
from .entries import Entries, are_alike, memory_of
from .metadata import Metadata, metadata_for, metadata_of, with_metadata
from .names import plain_name
from .ranks import ModelRanks, Together
from .tensors import Held, Holdings
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
        gets the result. What is no tensor (`get_extra_state`) is passed on as it is. The dict has the `_metadata` of
        `model.state_dict()`, so that modules know by which of their versions it was made.

    Raises:
        CheckpointError: on all ranks; a tensor is on the meta device or is a DTensor in a container, or a hook raised.
        CheckpointMismatchError: on all ranks; they have built, sharded or hooked the model differently.
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
        CheckpointError: on all ranks; a tensor is on the meta device, a weight is in a container, or a hook raised.
        CheckpointMismatchError: on all ranks; they have built, sharded or hooked the model differently.
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
    """Load full tensors into a model, sharded or not. A collective: all ranks must call it.

    All is checked first, on all ranks: if it fails, the model is as it was on each of them. Hooks of `load_state_dict`
    run, with the tensors as the model holds them.

    Args:
        model: the model. On the meta device it gets memory with `assign`, but for buffers that are not persistent; no
            rank holds more than its shards and a tensor.
        sd: full tensors by name (FQN), as `full_state_dict` gives them. Of tied weights one name is enough. If it has
            `_metadata`, modules get the versions in it, by which they convert states of older versions.
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
        CheckpointError: on all ranks; a hook raised, or a hook of `state_dict` gives values that no hook of
            `load_state_dict` takes. All else is loaded then.
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
            "state_dict() give these values, and no hook of load_state_dict() takes them back, so they are not "
            "loaded, and all else is; add one (register_load_state_dict_pre_hook), or pass strict=False"
        )
    keys.unexpected_keys.extend(lost)
    return keys


def _check(held: Holdings, call: str) -> None:
    """See that all that a state dict has can be gathered."""
    held.check_material(call)
    weights = {memory_of(each.tensor) for each in held.hidden.values() if each.first == each.name}
    for key, value in held.others.items():
        inside = tree_tensors(value)
        if any(isinstance(each, DTensor) for each in inside):
            raise CheckpointError(
                f"{call}: {key} is a {type(value).__name__} that holds sharded tensors, which are gathered only under "
                "keys of their own; have the hook, or get_extra_state, give it apart"
            )
        if call == "iter_full_state" and any(memory_of(each) in weights for each in inside):
            raise CheckpointError(
                f"{call}: {key} is a {type(value).__name__} that holds a parameter, and only tensors are streamed; "
                "have the hook give it a key of its own"
            )


_UNKNOWN = object()  # a value that a hook has made; it is like no other one


def _left_over(state: Mapping[str, Any], unexpected: Iterable[str]) -> dict[str, Any]:
    """Values of a state dict that no module took, by name.

    `unexpected` has the keys as hooks have left them: wrappers add their part, and others may rename a key.
    """
    given = {plain_name(key): value for key, value in state.items()}
    return {name: given.get(name, _UNKNOWN) for name in map(plain_name, unexpected)}


def _not_taken(model: nn.Module, held: Holdings, left: Mapping[str, Any]) -> list[str]:
    """Names of values that `load_state_dict` was given and did not take: the model has others. A collective.

    Args:
        model: the model.
        held: what it had before.
        left: what no module took, by name. Parameters are loaded all the same.
    """
    beside = {
        name: value for name, value in left.items() if name not in held.tensors or not held.tensors[name].is_param
    }

    def lost() -> list[str]:
        now = Entries.of(model).values() if beside else {}
        return [name for name, value in beside.items() if name not in now or not are_alike(now[name], value)]

    # All ranks take part, since hooks may take a value on some ranks alone, and hooks of the state dict may fail.
    _, of_ranks = Together(held.ranks).together_and_tell(lost, lambda names: names)
    return [*dict.fromkeys(name for names in of_ranks for name in names)]


def _differences(held: Holdings, offer: _Offer, chosen: Mapping[str, str]) -> _IncompatibleKeys:
    """Names that an offer lacks, or has too many; `chosen` has the first names of tensors that it has."""
    missing = [each.name for each in held.tensors.values() if each.first not in chosen]
    missing += [name for name in map(plain_name, held.others) if name not in offer.others]
    expected = {*map(plain_name, held.order), *held.hidden}
    return _IncompatibleKeys(missing, [name for name in (*offer.tensors, *offer.others) if name not in expected])


def _problems_of(keys: _IncompatibleKeys) -> list[str]:
    """Names that do not fit, as a strict load reports them."""
    return [
        *(f"missing: {name}" for name in keys.missing_keys),
        *(f"unexpected: {name}" for name in keys.unexpected_keys),
    ]


def _as_state(held: Holdings, offer: _Offer, loaded: Mapping[str, torch.Tensor], assign: bool) -> dict[str, Any]:
    """The state dict with which `load_state_dict` ends the load; of tensors written in place it copies none.

    Where tensors are assigned, each name of a parameter gets the new one, also those that the state dict does not have.
    """
    hidden = [each for each in held.hidden.values() if assign or each.name in offer.tensors]
    state = {each.key: loaded[each.first] for each in (*hidden, *held.tensors.values()) if each.first in loaded}
    others = {key: plain_name(key) for key in held.others}
    return state | {key: offer.others[name] for key, name in others.items() if name in offer.others}


class _Offer(NamedTuple):
    """What a state dict has, by name: shapes and dtypes of tensors, and all else; and what of it cannot be loaded.

    `metadata` is that of the state dict.
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    others: dict[str, Any]
    problems: list[str]
    metadata: Metadata | None

    @classmethod
    def of(cls, given: Mapping[str, Any], metadata: Metadata | None) -> _Offer:
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        sharded = [
            f"{name}: is a DTensor; give full tensors (its full_tensor()), or load shards by model.load_state_dict"
            for name, value in tensors.items()
            if isinstance(value, DTensor)
        ]
        known = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        return cls(known, {name: value for name, value in given.items() if name not in tensors}, sharded, metadata)

    def names_for(self, known: Mapping[str, Held]) -> dict[str, str]:
        """The name of each known tensor that this has: by its first name in the model, one under which this has it."""
        return {known[name].first: name for name in self.tensors if name in known}


def _misfits(known: Mapping[str, Held], offer: _Offer, assign: bool) -> list[str]:
    """What of an offer does not fit to the tensors that a model holds, by name."""
    problems = [*offer.problems]
    problems += [f"{name}: is no tensor" for name in offer.others if name in known]
    for name, (shape, dtype) in offer.tensors.items():
        each = known.get(name)
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


def _loaded(pieces: Iterable[tuple[Held, torch.Tensor]], ranks: ModelRanks, assign: bool) -> dict[str, torch.Tensor]:
    """The tensors of the model that these pieces make, by first name."""
    put = _assigned if assign else _written
    return {each.first: put(each, piece, ranks) for each, piece in pieces}


def _written(each: Held, piece: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
    """The tensor that the model has, overwritten; a new one for `load_state_dict` to take if others have its memory."""
    if each.aliases:
        return placed_like(each, piece.to(each.tensor.dtype), ranks)
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
