"""The entries of `_parameters` in which modules look up a group's parameters, and what is installed in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from operator import is_, setitem
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .._errors import ShardConfigStateError, ShardConfigValueError
from .._group.faces import LEAF_OF
from .._group.param import ShardedParam, is_sharded_parameter, run_all
from .._torch.core import has_post_accumulate_hooks

_setitem: Callable[[dict[str, Any], str, Any], None] = setitem


def check_use(owner: nn.Module, name: str, fqn: str) -> None:
    """Refuse a parameter that its module treats in a way that sharding cannot serve.

    Raises:
        ShardConfigValueError: an embedding writes to its weight in forward, or gives it a sparse gradient.
    """
    if name != "weight" or not isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return
    where = f"parameter {fqn}: is the weight of an {type(owner).__name__} with"
    if owner.max_norm is not None:
        raise ShardConfigValueError(
            f"{where} max_norm, which writes to it in forward, and what is written to an unsharded copy is lost; "
            "set max_norm=None and clip the rows after the optimizer's step, or pass the weight in ignored_params"
        )
    if owner.sparse and owner.weight.requires_grad:
        raise ShardConfigValueError(
            f"{where} sparse=True, and a sparse gradient cannot be reduced into shards; set sparse=False, "
            "or pass the weight in ignored_params"
        )


class ModuleEntries:
    """All entries of modules' `_parameters` that hold a group's parameters, sharded or unsharded.

    The dictionaries are held, never the modules, so that a module is not kept alive by its own state.

    Args:
        places: the entries: dictionary, name in it, and index of the parameter. A tied parameter has several.
        params: the sharded parameters, tied ones once.
        tops: `_parameters` and `_modules` of the modules of the call, which are watched with all modules below: no
            parameter may be added that nobody shards. Empty for the call's other meshes: the first entries watch for
            all.

    Attributes:
        shown: whether other tensors than the sharded parameters are installed.
        others: the entries of the call's other meshes, if these are the first ones.
        allows_unmanaged: whether parameters may be added that nobody shards.
        claim: if set, called with a module into which a parameter of this group was moved after the call.
        converted: whether `adopt` shall report a change even if it finds none.
    """

    def __init__(
        self,
        places: Sequence[tuple[dict[str, nn.Parameter | None], str, int]],
        params: Sequence[ShardedParam],
        tops: Sequence[Top] = (),
    ) -> None:
        self.params = params
        self._shards = [param.sharded for param in params]
        self._set_places(places)
        self.others: tuple[ModuleEntries, ...] = ()
        self.allows_unmanaged = False
        self.claim: Callable[[nn.Module], None] | None = None
        self._tops = list(tops)
        self._idle: list[nn.Parameter] = []
        self._note_watched()
        self.converted = False
        self.shown = False
        self._there: Sequence[torch.Tensor] = ()
        self._lists: list[weakref.ref[nn.Module]] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lists": []}  # a copy's engine sets it for its own modules

    def _set_places(self, places: Sequence[tuple[dict[str, nn.Parameter | None], str, int]]) -> None:
        self.places = list(places)
        # The columns of `places`: `show` and `_hold` map over all entries in every forward.
        self._dicts = [names for names, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._indices = [index for _, _, index in places]
        self._untied = self._indices == list(range(len(self.params)))

    def keep_lists(self, recurrent: Sequence[nn.Module]) -> None:
        """Note which of these RNNs have our parameters: `_flat_weights`, their second list, must follow the entries."""
        ours = {id(names) for names in self._dicts} if recurrent else ()
        of_ours = [module for module in recurrent if id(module._parameters) in ours]
        self._lists = [
            weakref.ref(module)
            for module in of_ours
            if module._parameters.keys() >= {*vars(module)["_flat_weights_names"]}
        ]

    def _list_anew(self) -> None:
        """Rebuild the lists of RNNs; not by their own method, which copies the weights to new memory on CUDA."""
        for known in self._lists:
            module: Any = known()
            if module is not None:
                flat = [module._parameters[name] for name in module._flat_weights_names]
                module._flat_weights = flat
                # Dynamo cannot compare weak references, and a traced module does not need them.
                traced = torch.compiler.is_compiling()
                module._flat_weight_refs = [None if traced else weakref.ref(weight) for weight in flat]

    def follow(self) -> None:
        """`adopt`, while Dynamo traces; `converted` tells the eager engine of the change at its next forward."""
        if self.shown:
            return
        if any([names.get(name) is not self._shards[index] for names, name, index in self.places]):  # noqa: C419
            self.adopt()
            self.converted = True

    def show(self, tensors: Sequence[torch.Tensor], traced: bool = False) -> None:
        """Install these tensors; with `traced`, one by one, which Dynamo can trace."""
        self.shown = True
        self._there = tensors
        if traced:
            self._put_one_by_one(tensors)
        else:
            there = tensors if self._untied else self._by_place(tensors)
            run_all(map(_setitem, self._dicts, self._names, there))
        if self._lists:
            self._list_anew()

    def hide(self, traced: bool = False) -> None:
        """Install the sharded parameters again; `traced` as for `show`."""
        if self.shown:
            self.show(self._shards, traced)
            self.shown = False
            self._there = ()

    def there(self, index: int) -> torch.Tensor:
        """The installed tensor of a parameter, by index."""
        return (self._there if self.shown else self._shards)[index]

    def _put_one_by_one(self, tensors: Sequence[Any]) -> None:
        for names, name, index in self.places:
            names[name] = tensors[index]

    def _by_place(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensor of each entry: that of a tied parameter several times."""
        return [tensors[index] for index in self._indices]

    def check_kept(self) -> None:
        """Check that modules still have the tensors that were installed last.

        Raises:
            ShardConfigStateError: somebody has replaced one, as `torch.func.functional_call` does.
        """
        there = self._there if self.shown else self._shards
        if self._hold(there):
            return
        for names, name, index in self.places:
            if names.get(name) is not there[index]:
                raise ShardConfigStateError(
                    f"parameter {self.params[index].fqn}: {_kind(names.get(name))} was put in its place while the "
                    "model runs (by torch.func.functional_call?), and sharding would put its own over it; use a "
                    "module that is not sharded for such calls"
                )

    def adopt(self) -> bool:
        """Take over parameters that a load or a conversion has put in the place of sharded ones.

        Returns:
            whether parameters were replaced, tied or converted since the last call.

        Raises:
            ShardConfigStateError: an entry is gone, or has no DTensor with the shape, mesh and placements of the old
                one; or parameters were added that nobody shards, and this forward trains them.
        """
        self._check_added()
        found, self.converted = self.converted, False
        if self.shown or self._hold(self._shards):
            return found
        tied = self._tie()
        replaced: dict[int, nn.Parameter] = {}
        for names, name, index in self.places:
            param, now = self.params[index], names.get(name)
            if now is param.sharded:
                continue
            if not isinstance(now, DTensor) or _spec(now) != _spec(param.sharded):
                self.converted = found
                raise ShardConfigStateError(
                    f"parameter {param.fqn}: was replaced by {_kind(now)} after sharding; "
                    "change the values of the DTensor parameter in place, or replace it by one placed alike"
                )
            replaced[index] = now
        for index, now in replaced.items():
            self.params[index].sharded = self._shards[index] = now
        if replaced:
            self._put_one_by_one(self._shards)
        return found or tied or len(replaced) > 0  # Dynamo of torch 2.11 knows no bool of a dict

    def _tie(self) -> bool:
        """Note entries that now hold another parameter of the group: users have tied the two.

        That parameter must still be in an entry of its own. To adopt it as the replaced parameter instead would give
        one tensor two gradients, of which one would be lost.

        Returns:
            whether there are such entries.
        """
        places = [(names, name, self._home_of(names.get(name), index)) for names, name, index in self.places]
        tied = [index for *_, index in places] != self._indices
        if tied:
            self._set_places(places)
        return tied

    def _home_of(self, tensor: Any, index: int) -> int:
        """The index of the sharded parameter that `tensor` is, if an entry of its own still holds it; else `index`."""
        for names, name, at in self.places:
            if tensor is self._shards[at] and names.get(name) is tensor:
                return at
        return index

    def _hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the modules have these tensors, in the order of the parameters."""
        expected = tensors if self._untied else self._by_place(tensors)
        return all(map(is_, map(dict.get, self._dicts, self._names), expected))

    def _note_watched(self) -> None:
        """Note sizes, children and empty entries, by which `_check_added` tells cheaply whether a module changed."""
        watched = [(own, children) for _, _, own, children in _below(self._tops)]
        self._known = {id(own): _filled(own) for own, _ in watched}
        self._sized = [entries for each in watched for entries in each]
        self._sizes = [len(entries) for entries in self._sized]
        empty = [(own, name) for own, _ in watched for name, value in own.items() if value is None]
        self._empty: tuple[list[Any], list[str]] = [own for own, _ in empty], [name for _, name in empty]
        self._parents: list[Any] = [children for _, children in watched]
        self._children = [child for _, children in watched for child in children.values()]

    def _check_added(self) -> None:
        if (
            list(map(len, self._sized)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._parents)), self._children))
            and all(map(is_, map(dict.get, *self._empty), repeat(None)))
            and not (self._idle and any(map(_trains, self._idle)))
        ):
            return
        self._look_anew()

    def _look_anew(self) -> None:
        """Modules have changed: find parameters of ours that have moved, and refuse those that nobody shards.

        Accepted are parameters that do not train, and those with post-accumulate hooks, which may average their
        gradients. Both kinds are noted in `_idle`, because that may change.
        """
        family = [self, *self.others]
        places = {(id(names), name) for each in family for names, name, _ in each.places}
        added: dict[str, nn.Parameter] = {}
        idle = {*map(id, self._idle)}
        moved: list[tuple[ModuleEntries, int, nn.Module | None, dict[str, Any], str]] = []
        for prefix, module, own, _ in _below(self._tops):
            known = self._known.get(id(own), ())
            for name, param in own.items():
                if param is None or (name in known and id(param) not in idle) or (id(own), name) in places:
                    continue
                ours = [(each, index) for each in family if (index := each._index_of(param)) is not None]
                if ours:
                    moved.append((*ours[0], module, own, name))
                elif LEAF_OF not in param.__dict__ and not is_sharded_parameter(param):
                    added[f"{prefix}{name}"] = param
        trained = [name for name, param in added.items() if _trains(param)]
        if trained and not self.allows_unmanaged:
            raise ShardConfigStateError(
                f"parameters {', '.join(trained)}: were added after fully_shard, so nobody shards them or reduces "
                "their gradients; call fully_shard on the module that was added, or, if you average their gradients "
                "yourself, do so in post-accumulate hooks, or call allow_unmanaged_parameters() on the model"
            )
        for each, index, module, own, name in moved:
            each._move(index, module, own, name)
        for each in {id(each): each for each, *_ in moved}.values():
            each.show(each._there) if each.shown else each._put_one_by_one(each._shards)
        self._idle = [] if self.allows_unmanaged else [*added.values()]
        self._note_watched()

    def _index_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the parameter that `tensor` is, sharded or unsharded; None if it is none of ours."""
        copy_of = tensor.__dict__.get(LEAF_OF)
        for index, param in enumerate(self.params):
            if tensor is param.sharded or tensor is self.there(index) or param.fqn == copy_of:
                return index
        return None

    def _move(self, index: int, module: nn.Module | None, own: dict[str, Any], name: str) -> None:
        """Note that a parameter was put into another module, and drop its old entries if these are empty."""
        param = self.params[index]
        if module is not None:
            check_use(module, name, param.fqn)
            param.module = weakref.ref(module)
            if self.claim is not None:
                self.claim(module)
        kept = [(names, at, of) for names, at, of in self.places if of != index or names.get(at) is not None]
        self._set_places([*kept, (own, name, index)])


Top = tuple[dict[str, Any], dict[str, Any]]  # a module's `_parameters` and `_modules`


def _below(tops: Sequence[Top]) -> Iterator[tuple[str, nn.Module | None, dict[str, Any], dict[str, Any]]]:
    """The modules of `tops` and all below that no other call has sharded.

    Yields:
        the prefix of its parameters' names, the module (None for one of `tops`), and the two parts of its `Top`.
    """
    seen: set[int] = set()
    to_do: list[tuple[str, nn.Module | None, Top]] = [("", None, top) for top in reversed(tops)]
    while to_do:
        prefix, module, (own, children) = to_do.pop()
        if id(own) in seen:
            continue
        seen.add(id(own))
        yield prefix, module, own, children
        to_do += [
            (f"{prefix}{name}.", child, (child._parameters, child._modules))
            for name, child in reversed(children.items())
            if child is not None and not isinstance(child, FSDPModule)
        ]


def _filled(entries: dict[str, Any]) -> set[str]:
    """Names of entries that are not None, which may become parameters later."""
    return {name for name, value in entries.items() if value is not None}


def _trains(param: torch.Tensor) -> bool:
    """Whether a forward that begins now may give a parameter a gradient that nobody averages."""
    return param.requires_grad and torch.is_grad_enabled() and not has_post_accumulate_hooks(param)


def _spec(tensor: Any) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.device_mesh, tensor.placements


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
