"""Parameters that are added to modules after `fully_shard`.

A sharded parameter may move to another module. A new parameter raises an error if a forward would train it, because its
gradients would not be averaged over the ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .._group.faces import LEAF_OF
from .._group.param import ShardedParam, is_sharded_parameter
from .._torch.core import has_post_accumulate_hooks
from ..errors import ShardConfigStateError, ShardConfigValueError
from .entries import ModuleEntries, Place


def check_use(owner: nn.Module, name: str, fqn: str) -> None:
    """Refuse a parameter that its module uses in a way that sharding does not support.

    Raises:
        ShardConfigValueError: an embedding writes to its weight in forward, or gives it a sparse gradient.
    """
    if name != "weight" or not isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return
    where = f"parameter {fqn}: is the weight of an {type(owner).__name__} with"
    if owner.max_norm is not None:
        raise ShardConfigValueError(
            f"{where} max_norm, which modifies it in forward, and modifications of an unsharded copy are lost; set "
            "max_norm=None and clip the rows after the optimizer's step, or pass the weight in ignored_params"
        )
    if owner.sparse and owner.weight.requires_grad:
        raise ShardConfigValueError(
            f"{where} sparse=True, and a sparse gradient cannot be reduced into shards; set sparse=False, "
            "or pass the weight in ignored_params"
        )


class Top(NamedTuple):
    """The dictionaries of a module, without a reference to the module, so that it is not kept alive."""

    params: dict[str, Any]  # its `_parameters`
    children: dict[str, Any]  # its `_modules`


class _Seen:
    """A snapshot of the children and parameters of modules, for a cheap check whether they have changed.

    Args:
        tops: the modules, with all modules below them.
        known: the entries of the sharded parameters, whose own checks find that a parameter was deleted.
    """

    def __init__(self, tops: Sequence[Top], known: Iterable[ModuleEntries]) -> None:
        below = [top for _, _, top in _below(tops)]
        self._parents = [top.children for top in below]
        self._children = [*chain.from_iterable(map(dict.values, self._parents))]
        self._dicts = [*chain.from_iterable(below)]
        self._sizes = [*map(len, self._dicts)]
        self._filled = [
            (top.params, {name for name, param in top.params.items() if param is not None}) for top in below
        ]
        empty = [(params, name) for params, filled in self._filled for name in params.keys() - filled]
        self._empty = _columns(empty)
        self._others = _columns(_not_sharded(self._filled, known))

    def is_current(self) -> bool:
        """Whether the modules still have the same children, and no additional parameters."""
        return (
            [*map(len, self._dicts)] == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._parents)), self._children))
            and all(map(is_, map(dict.get, *self._empty), repeat(None)))
            # If one parameter was deleted and another one added, the size of a dictionary is the same.
            and all(map(dict.__contains__, *self._others))
        )

    def names(self) -> dict[int, set[str]]:
        """By id of a module's `_parameters`: the names of its parameters in the snapshot."""
        return {id(params): names for params, names in self._filled}


def _columns(places: Iterable[tuple[dict[str, Any], str]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The dictionaries and the names of places, as arguments of `map`."""
    listed = list(places)
    return [params for params, _ in listed], [name for _, name in listed]


def _not_sharded(
    filled: Iterable[tuple[dict[str, Any], set[str]]], known: Iterable[ModuleEntries]
) -> list[tuple[dict[str, Any], str]]:
    """The places of parameters that are not sharded.

    Args:
        filled: the dictionaries of all parameters, with the names of those that are not None.
        known: the entries of the sharded parameters.
    """
    sharded = {(id(params), name) for entries in known for params, name, _ in entries.places}
    return [(params, name) for params, names in filled for name in names if (id(params), name) not in sharded]


class WatchedEntries(ModuleEntries):
    """The entries of a call's own mesh, which also watch for parameters that are added.

    Args:
        places, params: as for `ModuleEntries`.
        tops: the modules of the call. They are watched with all modules below them.
        others: the entries of the call's other meshes.

    Attributes:
        claim: if set, called with a module into which a parameter of the call was moved.
    """

    def __init__(
        self,
        places: Sequence[Place],
        params: Sequence[ShardedParam],
        tops: Sequence[Top],
        others: Sequence[ModuleEntries] = (),
    ) -> None:
        super().__init__(places, params)
        self.claim: Callable[[nn.Module], None] | None = None
        self._tops = tops
        self._prefixes = [""] * len(tops)  # prefix of the names in each top; set once the root is known
        self._others = others
        self._seen = _Seen(tops, [self, *others])
        self._allows_unmanaged = False
        self._idle: list[nn.Parameter] = []  # parameters that are not sharded and that `adopt` has accepted so far

    def allow_unmanaged(self) -> None:
        """Accept parameters that are not sharded."""
        self._allows_unmanaged = True

    def name_modules(self, names: Mapping[int, str]) -> None:
        """Set the names of the call's modules in the root, for error messages.

        Args:
            names: the name of each module, by id of its `_parameters`.
        """
        known = [names.get(id(top.params), "") for top in self._tops]
        self._prefixes = [f"{name}." if name else "" for name in known]

    def adopt(self) -> bool:
        """Follow moved parameters, refuse new ones that would train, then call `ModuleEntries.adopt`.

        A new parameter is accepted if it does not train, or has post-accumulate hooks, which may average its gradients.
        It may be thawed, or lose its hooks, so accepted parameters are checked again in each forward.

        Raises:
            ShardConfigStateError: this forward trains parameters that were added and are not sharded; or a parameter
                was deleted, or replaced by one with another shape, mesh or placements.
        """
        if not self._seen.is_current() or (self._idle and any(map(_trains, self._idle))):
            self._look_anew()
        return super().adopt()

    def _look_anew(self) -> None:
        family = [self, *self._others]
        moved: list[tuple[ModuleEntries, nn.Module | None, Place]] = []
        added: dict[str, nn.Parameter] = {}
        for prefix, module, own, name in self._new_places(family):
            param = own[name]
            owners = [(each, index) for each in family if (index := each.index_of(param)) is not None]
            if owners:
                entries, index = owners[0]
                moved.append((entries, module, (own, name, index)))
            elif LEAF_OF not in param.__dict__ and not is_sharded_parameter(param):
                added[prefix + name] = param
        self._check_managed(added)
        self._follow_moved(moved)
        self._idle = [] if self._allows_unmanaged else [*added.values()]
        self._seen = _Seen(self._tops, family)

    def _new_places(
        self, family: Sequence[ModuleEntries]
    ) -> Iterator[tuple[str, nn.Module | None, dict[str, Any], str]]:
        """The places of parameters that are new, or that are not sharded and were accepted by an earlier check.

        Yields:
            the prefix of the names of a module's parameters, the module, its `_parameters`, and the parameter's name.
        """
        places = {(id(params), name) for entries in family for params, name, _ in entries.places}
        idle = {*map(id, self._idle)}
        seen = self._seen.names()
        for prefix, module, (own, _) in _below(self._tops, self._prefixes):
            known = seen.get(id(own), ())
            for name, param in own.items():
                is_new = param is not None and (name not in known or id(param) in idle)
                if is_new and (id(own), name) not in places:
                    yield prefix, module, own, name

    def _check_managed(self, added: dict[str, nn.Parameter]) -> None:
        trained = [name for name, param in added.items() if _trains(param)]
        if trained and not self._allows_unmanaged:
            raise ShardConfigStateError(
                f"parameters {', '.join(trained)}: were added after fully_shard, so they are not sharded and their "
                "gradients are not reduced; call fully_shard on the module that was added, or average their gradients "
                "in post-accumulate hooks, or call allow_unmanaged_parameters() on the model"
            )

    def _follow_moved(self, moved: Sequence[tuple[ModuleEntries, nn.Module | None, Place]]) -> None:
        """Note the new modules and places of parameters that were moved; each belongs to one of the entries."""
        for entries, module, (_, name, index) in moved:
            if module is not None:
                param = entries.params[index]
                check_use(module, name, param.fqn)
                param.set_module(weakref.ref(module))
                if self.claim is not None:
                    self.claim(module)
        for each in dict.fromkeys(entries for entries, _, _ in moved):
            each.move([place for entries, _, place in moved if entries is each])


def _below(tops: Sequence[Top], prefixes: Iterable[str] = repeat("")) -> Iterator[tuple[str, nn.Module | None, Top]]:
    """Walk the modules of `tops` and all modules below that no other call has sharded.

    Args:
        tops: where to begin.
        prefixes: prefix of the names in each of them; by default empty.

    Yields:
        the prefix of the parameters' names, the module (None for one of `tops`), and its dictionaries.
    """
    seen: set[int] = set()
    to_do: list[tuple[str, nn.Module | None, Top]] = []
    for prefix, top in zip(prefixes, tops, strict=False):
        to_do.insert(0, (prefix, None, top))
    while to_do:
        prefix, module, top = to_do.pop()
        if id(top.params) in seen:
            continue
        seen.add(id(top.params))
        yield prefix, module, top
        to_do += [
            (f"{prefix}{name}.", child, Top(child._parameters, child._modules))
            for name, child in reversed(top.children.items())
            if child is not None and not isinstance(child, FSDPModule)
        ]


def _trains(param: torch.Tensor) -> bool:
    """Whether a forward that begins now may give a parameter a gradient that is not averaged over the ranks."""
    return param.requires_grad and torch.is_grad_enabled() and not has_post_accumulate_hooks(param)
