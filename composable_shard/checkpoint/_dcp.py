"""Import and export checkpoints of `torch.distributed.checkpoint` (DCP)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, CheckpointMismatchError, ShardConfigValueError
from ._dcp_store import StoreWriter
from ._exchange import ROOT, Imported, Options, aliases_of, fill, unwrapped
from ._format.dcp import Stored, check, read_stored
from ._format.manifest import Manifest, SavedTensor
from ._format.values import encode
from ._full.entries import parameters_of
from ._full.names import plain_name
from ._full.tensors import Holdings
from ._io.objects import ObjectPath
from ._io.places import Place, remove_tree
from ._places import absolute, begin, commit, directory_of
from ._ranks import Ranks, compare
from ._state import ModuleContent, Stateful, leaves


def import_dcp(
    path: str | os.PathLike[str],
    state: Mapping[str, Any] | nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Imported:
    """Load a DCP checkpoint that FSDP2, FSDP1 or this library has saved.

    This is a collective: all ranks must call it with the same arguments.

    No code in the checkpoint is executed. Each rank reads only the bytes of its own shards, directly into these shards.
    The number of ranks and the meshes may differ from those of the save.

    Args:
        path: directory or URL that was passed to `torch.distributed.checkpoint.save`.
        state: state to load into, as for `load`, by the names that were saved. Pass
            ``{"model": model, "optimizer": optimizer}`` if the results of `get_state_dict` were saved under these
            names. Pass a model if its state dict itself was saved. Objects with ``state_dict`` and ``load_state_dict``,
            tensors and plain values are loaded, too.
        strict: require the names of modules to match those in the checkpoint.
        cast: convert floating-point tensors whose dtypes differ.
        verify: before loading, read the needed pieces and compare them with the CRC-32 checksums of their archives.
        process_group: process group of the ranks that load. Default: all ranks.

    Returns:
        The missing and unexpected names, and the bytes read.

    Raises:
        CheckpointIncompleteError: there is no such checkpoint.
        CheckpointMismatchError: names, shapes or dtypes do not match. The message lists them.
        CheckpointCorruptError: files are missing or damaged. The message names them.
        CheckpointUnsafeError: a pickle needs more than DCP's own classes, or a file is a link or is outside of `path`.
        RankMismatchError: a rank does something else, for example continues to train. Raised on all ranks.
    """
    ranks = Ranks(process_group)
    ranks.meet("load a DCP checkpoint")
    where, names = _agreed(ranks, path, state, {"strict": strict, "cast": cast, "verify": verify})
    stored = ranks.first_alone(lambda: read_stored(where, names))
    given = {ROOT: state} if isinstance(state, nn.Module) else state
    manifest = ranks.together(lambda: _Translation(stored, given).manifest(ranks.size))

    def checked(wanted: Mapping[str, list[torch.Tensor]]) -> int:
        if not verify:
            return 0
        return check(stored, {k: [(manifest.tensors[k], each) for each in some] for k, some in wanted.items()})

    return fill(ranks, where, manifest, given, Options(strict, cast, checked))


def export_dcp(
    path: str | os.PathLike[str], state: Mapping[str, Any], *, process_group: dist.ProcessGroup | None = None
) -> Place:
    """Write a DCP checkpoint, as `torch.distributed.checkpoint.save` does.

    This is a collective: all ranks must call it with the same path.

    Modules and optimizers are saved in the format of torch's `get_model_state_dict` and `get_optimizer_state_dict`, so
    FSDP2 can load them with `torch.distributed.checkpoint.load` and `set_state_dict`. The directory gets its final name
    only when all files are on disk. In a store, `.metadata` is written last.

    Args:
        path: directory to create, or a URL. It must not exist.
        state: modules, their optimizers, and values that DCP can save, by name.
        process_group: process group of the ranks that save. Default: all ranks.

    Returns:
        The directory.

    Raises:
        ShardConfigValueError: the directory exists, or the module of an optimizer is not in the state.
        CheckpointMismatchError: ranks export to different paths, or a rank does not export a module or an optimizer of
            which it holds a part. Only one rank needs to export other entries.
        CheckpointError: the checkpoint could not be written. The directory does not exist then.
        RankMismatchError: a rank does something else, for example continues to train. Raised on all ranks.
    """
    ranks = Ranks(process_group)
    ranks.meet("export a DCP checkpoint")
    directory, said = ranks.together_and_tell(
        lambda: directory_of(path, "path"), lambda directory: ({"path": absolute(directory)}, _ranks_of(state))
    )
    compare("export_dcp", [about for about, _ in said])
    _check_complete(dict(zip(ranks.everyone, [entries for _, entries in said], strict=True)))
    partial = ranks.first_alone(lambda: begin(directory))
    try:
        content = ranks.together(lambda: _state_dicts(state))
        try:
            alone = not (dist.is_available() and dist.is_initialized())
            where: dict[str, Any] = {"checkpoint_id": partial}
            if isinstance(partial, ObjectPath):
                where = {"storage_writer": StoreWriter(partial)}
            save(content, **where, process_group=process_group, no_dist=alone)
        except CheckpointException as error:  # raised on all ranks; it is not a subclass of Exception
            failed = "; ".join(f"rank {rank}: {each[0]}" for rank, each in error.failures.items())
            raise CheckpointError(f"{directory} could not be written: {failed}") from error
        ranks.first_alone(lambda: commit(partial, directory))
    except BaseException:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                remove_tree(partial)
        raise
    return directory


def _agreed(
    ranks: Ranks, path: str | os.PathLike[str], state: Mapping[str, Any] | nn.Module, options: dict[str, bool]
) -> tuple[Place, set[str] | None]:
    """Check that the options of an import are equal on all ranks. Return the path and the entries that any rank loads.

    The entries are None if a rank loads all of them. Ranks may load different entries.
    """
    (where, _), said = ranks.together_and_tell(
        lambda: (directory_of(path, "path"), None if isinstance(state, nn.Module) else tuple(state)),
        lambda asked: (options, asked[1]),
    )
    compare("import_dcp", [about for about, _ in said])
    wanted = [names for _, names in said if names is not None]
    return where, {name for names in wanted for name in names} if len(wanted) == len(said) else None


def _ranks_of(state: Mapping[str, Any]) -> dict[str, set[int]]:
    """The ranks that hold parts of the parameters of each module and optimizer of a state, by name."""
    held = {name: _params_of(value) for name, value in state.items()}
    return {name: {rank for mesh in _meshes(params) for rank in mesh} for name, params in held.items() if params}


def _params_of(value: Any) -> list[torch.Tensor]:
    """The parameters of a module or an optimizer; an empty list for any other value."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [param for group in value.param_groups for param in group["params"]]
    return []


def _meshes(params: list[torch.Tensor]) -> set[tuple[int, ...]]:
    return {tuple(param.device_mesh.mesh.flatten().tolist()) for param in params if isinstance(param, DTensor)}


def _check_complete(said: Mapping[int, Mapping[str, set[int]]]) -> None:
    """Check that every rank that holds a part of a module or an optimizer exports it. Otherwise it cannot be loaded."""
    for rank, entries in said.items():
        for name, wanted in entries.items():
            for other in sorted(wanted & said.keys()):
                if name not in said[other]:
                    raise CheckpointMismatchError(
                        f"state: rank {rank} exports {name!r}, but rank {other}, which holds a part of it, does not; "
                        "export a model and its optimizer under the same name on all ranks that hold parts of them"
                    )


def _state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            content[name] = {key: _in_rows(each) for key, each in ModuleContent.of(unwrapped(value)).values.items()}
        elif isinstance(value, torch.optim.Optimizer):
            content[name] = get_optimizer_state_dict(_module_of(name, value, state), value)
        else:
            content[name] = value
    return content


def _in_rows(value: Any) -> Any:
    """The value as a contiguous tensor, as DCP's readers expect. A hook may have transposed it."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_contiguous():
        return value.contiguous()
    return value


def _module_of(name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> nn.Module:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in state.values():
        if isinstance(value, nn.Module) and stepped <= set(map(id, parameters_of(unwrapped(value)).values())):
            return value
    raise ShardConfigValueError(f"{name} updates parameters of no module in the state; add the module to the state")


class _Translation:
    """Translates the metadata of a DCP checkpoint into a manifest of this library."""

    def __init__(self, stored: Stored, state: Mapping[str, Any]) -> None:
        self._stored = stored
        self._entries = {name: value for name, value, _, _ in leaves(state)}
        self._modules = {n: unwrapped(value) for n, value in self._entries.items() if isinstance(value, nn.Module)}
        self._manifest = Manifest(0, "", 1, "crc32")

    def manifest(self, ranks: int) -> Manifest:
        """Build the manifest of the entries in the state."""
        for name, value in self._entries.items():
            keys = self._keys(name)
            if not keys:
                continue  # the load reports missing entries
            if isinstance(value, nn.Module):
                entry = self._module(name, keys)
            elif isinstance(value, torch.optim.Optimizer):
                entry = self._optimizer(name, value, keys)
            else:
                tree = self._tree(keys)
                entry = {"$": "stateful", "value": tree} if isinstance(value, Stateful) else tree
            self._manifest.values[name] = entry
        return self._manifest

    def _keys(self, name: str) -> dict[str, tuple[str | int, ...]]:
        """The keys below an entry, each with its path below the entry."""
        paths = self._stored.paths
        if name == ROOT:
            return {key: (key,) for key in paths}
        keys = {}
        for key, path in paths.items():
            if (depth := _depth(path, name)) is not None:
                keys[key] = path[depth:]
            elif key.startswith(f"{name}."):
                keys[key] = (key.removeprefix(f"{name}."),)
        return keys

    def _module(self, name: str, keys: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
        held = Holdings(self._modules[name])
        others = {*map(plain_name, held.others)}
        tensors: dict[str, SavedTensor] = {}
        trees: dict[str, dict[str, tuple[str | int, ...]]] = {}  # DCP flattens dictionaries; these rebuild them
        for key, path in keys.items():
            own = plain_name(".".join(map(str, path)))
            depth = next(
                (at for at in range(1, len(path)) if plain_name(".".join(map(str, path[:at]))) in others), None
            )
            if depth is not None:
                trees.setdefault(plain_name(".".join(map(str, path[:depth]))), {})[key] = path[depth:]
            elif key in self._stored.tensors:
                tensors[own] = self._stored.tensors[key]
            else:
                trees[own] = {key: ()}
        extra = {own: self._tree(keys) for own, keys in trees.items()}
        aliases = aliases_of(held, tensors)
        self._manifest.tensors.update({f"{name}.{own}": each for own, each in tensors.items() if own not in aliases})
        self._manifest.aliases.update({f"{name}.{own}": f"{name}.{first}" for own, first in aliases.items()})
        return {"$": "module", "tensors": [*dict.fromkeys((*tensors, *aliases))], "extra": extra}

    def _optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, keys: Mapping[str, tuple[str | int, ...]]
    ) -> dict[str, Any]:
        known = {own: f"{path}.{own}" for path, module in self._modules.items() for own in parameters_of(module)}
        first = next(iter(self._modules), name)

        def named(own: str) -> str:
            return known.get(plain_name(own), f"{first}.{own}")

        flat = all(len(path) == 1 for path in keys.values())  # saved with flatten_optimizer_state_dict=True
        tree = self._unflattened(optimizer, keys) if flat else self._tree(keys)
        groups = [{**group, "params": list(map(named, group["params"]))} for group in tree.get("param_groups", ())]
        return {"$": "optimizer", "groups": groups, "state": {named(k): v for k, v in tree.get("state", {}).items()}}

    def _unflattened(self, optimizer: torch.optim.Optimizer, keys: Mapping[str, tuple[str | int, ...]]) -> Any:
        state: dict[str, dict[str, Any]] = {}
        settings: dict[str, dict[str, Any]] = {}
        for key, (path, *_) in keys.items():
            kind, _, rest = str(path).partition(".")
            own, _, entry = rest.rpartition(".")
            (state if kind == "state" else settings).setdefault(own, {})[entry] = self._leaf(key)
        names = {id(p): own for module in self._modules.values() for own, p in reversed(parameters_of(module).items())}
        groups = []
        for group in optimizer.param_groups:
            params = [own for p in group["params"] if (own := names.get(id(p), "")) in settings]
            groups.append({**settings[params[0]], "params": params} if params else {"params": []})
        return {"state": state, "param_groups": groups}

    def _tree(self, keys: Mapping[str, tuple[str | int, ...]]) -> Any:
        root: dict[str | int, Any] = {}
        for key, path in keys.items():
            if not path:
                return self._leaf(key)
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self._leaf(key)
        return _lists(root)

    def _leaf(self, key: str) -> Any:
        if key in self._stored.values:
            value = encode(self._stored.values[key], key, _no_tensor)
            return _Leaf(value) if isinstance(value, dict) else value
        self._manifest.tensors[key] = self._stored.tensors[key]
        return _Leaf({"$": "tensor", "key": key})


def _depth(path: tuple[str | int, ...], name: str) -> int | None:
    """The number of leading path components that spell the name of the entry; None if the path is not below it."""
    return next((depth for depth in range(1, len(path) + 1) if ".".join(map(str, path[:depth])) == name), None)


class _Leaf(dict[str, Any]):
    """A subtree that is already encoded."""


def _lists(node: Any) -> Any:
    """Encode a tree as JSON. Dictionaries with the keys 0, 1, ... become lists."""
    if type(node) is not dict:
        return node
    if list(node) == list(range(len(node))):
        return [_lists(each) for each in node.values()]
    if all(isinstance(name, str) for name in node) and "$" not in node:
        return {name: _lists(each) for name, each in node.items()}
    return {"$": "dict", "items": [[name, _lists(each)] for name, each in node.items()]}


def _no_tensor(key: str, _: torch.Tensor) -> None:
    raise CheckpointMismatchError(f"{key}: DCP has pickled a tensor inside another value; save it under its own name")
