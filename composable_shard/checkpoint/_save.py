"""Save a checkpoint: the ranks agree on its content, each writes its file, and rank 0 commits all files atomically."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._plan.boxes import Box
from ..errors import CheckpointError, CheckpointMismatchError, ShardConfigTypeError, ShardConfigValueError
from ._collect import Collected, collect
from ._format.boxes import parts_of, plain
from ._format.commits import Attempt, Run, run_at
from ._format.manifest import Manifest, Piece, SavedFile, SavedTensor, name_of
from ._format.writing import FileLayout, bytes_of, stream, write
from ._io import digests
from ._io.places import Place, created
from ._layouts import layout_of
from ._pending import background
from ._places import directory_of
from ._pruning import prune as prune_directory
from ._ranks import Ranks, compare

_MOST_COMPARED = 1 << 20  # bytes of a tensor that ranks compare


def save(
    directory: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = None,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Place:
    """Save a state to a new checkpoint.

    This is a collective: all ranks must call it with the same arguments.

    Every rank writes one safetensors file with the parts of the tensors that it holds. A part that several ranks hold
    is written once. A checkpoint is either complete or does not exist: it is written to a temporary directory, which
    is renamed when all files are on disk. Then `LATEST` names it. In an object store, the manifest is written last,
    when all other files are in the store. Until then the previous checkpoint is the latest.

    Args:
        directory: directory of the run's checkpoints, or a URL such as ``s3://bucket/run``. Created if it does not
            exist. All ranks must see the same one.
        state: what to save, by name: modules, optimizers, objects with ``state_dict`` and ``load_state_dict``
            (schedulers, data loaders), tensors, DTensors, generators, numbers, strings, bytes, dtypes, NumPy arrays,
            and lists, tuples, sets and dicts of these. Wrap values that differ between ranks in `PerRank`. If a
            module's buffers differ between ranks, those of one rank are saved. Parameters and optimizer state are
            stored by fully qualified name (FQN), those of tied parameters once. The modules of an optimizer must be in
            the state, too.
        step: training step, at least 0. It is part of the checkpoint's name.
        keep: after the save, delete all checkpoints except the `keep` newest ones, and files that interrupted saves
            have left. Default: delete nothing.
        overwrite: replace a checkpoint of the same step. The old one exists until the new one is committed.
        process_group: process group of the ranks that save. Default: all ranks.

    Returns:
        The path of the checkpoint. For a URL, `str` of it is the URL of the checkpoint.

    Raises:
        ShardConfigTypeError: an argument has a wrong type, or a value in the state cannot be saved without pickle.
        ShardConfigValueError: an argument is invalid, a package for the URL is missing, a tensor cannot be stored, or
            there is a checkpoint of this step.
        CheckpointMismatchError: ranks save different steps, names or values.
        CheckpointError: a file could not be written. The message gives the rank and the reason. Earlier checkpoints are
            unchanged.
        RankMismatchError: a rank does something else, for example continues to train. Raised on all ranks.
    """
    ranks = Ranks(process_group)
    ranks.meet("save a checkpoint")
    prepared = prepare(ranks, lambda: Request.of(directory, step, overwrite, keep), state)
    path = finish(ranks, prepared, lambda: write_own(prepared))
    prune(ranks, prepared.request)
    return path


def prune(ranks: Ranks, request: Request) -> None:
    """Delete old checkpoints if `keep` is set. If this fails, the error states that the new checkpoint is committed."""
    keep = request.keep
    if keep is None:
        return
    try:
        ranks.first_alone(lambda: prune_directory(request.directory, keep=keep))
    except CheckpointError as error:
        raise type(error)(f"step {request.step} is committed, but old checkpoints were not deleted: {error}") from error


@dataclass(frozen=True)
class Request:
    """The checked arguments of a save."""

    directory: Place
    step: int
    overwrite: bool
    algorithm: str
    keep: int | None

    @staticmethod
    def of(directory: str | os.PathLike[str], step: int, overwrite: bool, keep: int | None) -> Request:
        """Check the arguments of a save.

        Raises:
            ShardConfigTypeError, ShardConfigValueError: an argument is invalid.
        """
        path = directory_of(directory)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ShardConfigTypeError(f"step: {step!r} is a {type(step).__name__}; pass an int")
        if not 0 <= step < 10**18:
            raise ShardConfigValueError(f"step: {step} is not between 0 and 10**18")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ShardConfigValueError(
                f"keep: {keep!r} is not a number of checkpoints; pass at least 1, or None to keep all"
            )
        return Request(path, step, overwrite, digests.best(), keep)


@dataclass(frozen=True)
class Known:
    """What a rank adds to the manifest, except its file."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    aliases: dict[str, str]
    values: dict[str, Any]
    per_rank: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A save that all ranks have agreed on, with this rank's part of it."""

    request: Request
    attempt: Attempt
    layout: FileLayout
    known: Known


def prepare(
    ranks: Ranks,
    asked: Callable[[], Request],
    state: Mapping[str, Any],
    stage: Callable[[FileLayout], None] | None = None,
) -> Prepared:
    """Collect the state, check that all ranks save the same, and create the temporary directory.

    Waits for a background save first.

    Args:
        ranks: ranks that save.
        asked: returns the checked arguments. Called on every rank, so that all ranks raise its errors.
        state: the state.
        stage: copies this rank's part, if given.
    """
    taken, said = ranks.together_and_tell(lambda: _take(ranks, asked(), state), lambda each: (each.about, each.digest))
    request, collected = taken.request, taken.collected
    holders = _agree(ranks, taken, said)
    run, attempt = run_at(request.directory), None

    def lay() -> FileLayout:
        nonlocal attempt
        layout = layout_of(ranks, collected, holders)
        if ranks.rank == 0:
            attempt = run.begin(request.step, request.overwrite)
        if stage is not None:
            stage(layout)
        return layout

    try:
        layout, attempts = ranks.together_and_tell(lay, lambda _: attempt)
    except BaseException:
        if attempt is not None:
            _remove(run, attempt)
        raise
    first = attempts[0]
    assert first is not None
    layout = replace(layout, name=first.named(layout.name))
    kinds = {k: (t.dtype, tuple(t.shape)) for k, t in (*collected.tensors.items(), *collected.own.items())}
    known = Known(kinds, collected.aliases, collected.values, collected.per_rank)
    return Prepared(request, first, layout, known)


def remove(prepared: Prepared) -> None:
    """Delete the files of a failed save. Files that cannot be deleted are left to `prune` and are never loaded."""
    _remove(run_at(prepared.request.directory), prepared.attempt)


def _remove(run: Run, attempt: Attempt) -> None:
    with contextlib.suppress(OSError):
        run.remove(attempt)


@dataclass(frozen=True)
class _Taken:
    """A collected state and its description. Ranks compare `about` and `digest`; the rest only if digests differ."""

    request: Request
    collected: Collected
    about: dict[str, Any]
    described: dict[str, str]
    plain: dict[str, Any]
    places: dict[str, list[int]]
    digest: bytes


def _take(ranks: Ranks, request: Request, state: Mapping[str, Any]) -> _Taken:
    background().settle()
    with torch.no_grad():
        collected = collect(state, ranks.rank)
        described = {
            key: _described(key, tensor, key in collected.buffers) for key, tensor in collected.tensors.items()
        }
    places = _places(collected)
    about = {
        "directory": str(request.directory),
        "step": request.step,
        "overwrite": request.overwrite,
        'checksum ("xxh3" needs the package xxhash)': request.algorithm,
        "keep": request.keep,
    }
    plain = {name: _shared(value) for name, value in collected.values.items()}
    compared = sorted(described.items()), plain, collected.aliases, places
    digest = hashlib.sha256(repr(compared).encode()).digest()
    return _Taken(request, collected, about, described, plain, places, digest)


def _places(collected: Collected) -> dict[str, list[int]]:
    """The ranks of the mesh of each sharded tensor."""
    ranks: dict[DeviceMesh, list[int]] = {}  # cached: to list a mesh's ranks takes as long as to read a small tensor
    places = {}
    for key, tensor in collected.tensors.items():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in ranks:
                ranks[mesh] = mesh.mesh.flatten().tolist()
            places[key] = ranks[mesh]
    return places


@contextlib.contextmanager
def _removed_if_it_fails(ranks: Ranks, prepared: Prepared) -> Iterator[None]:
    """Delete the files of a save if the context raises."""
    try:
        yield
    except BaseException:
        if ranks.rank == 0:
            remove(prepared)
        raise


def see(prepared: Prepared) -> None:
    """Raise ShardConfigValueError if this rank does not see the directory that rank 0 has made."""
    run_at(prepared.request.directory).check_seen(prepared.attempt)


def _agree(ranks: Ranks, taken: _Taken, said: list[tuple[dict[str, Any], bytes]]) -> dict[str, list[int]]:
    """Check that the ranks save the same, and return the ranks that have each key."""
    compare("save", [about for about, _ in said])
    everyone = list(range(ranks.size))
    if all(each == taken.digest for _, each in said):
        return dict.fromkeys(taken.described, everyone)
    holders: dict[str, list[int]] = {}
    gathered = ranks.gather((taken.described, taken.plain, taken.places))
    tensors_of: dict[str, tuple[int, Any, str]] = {}
    values_of: dict[str, tuple[int, Any, str]] = {}
    for rank, (tensors, values, _) in enumerate(gathered):
        for key, what in tensors.items():
            holders.setdefault(key, []).append(rank)
            _same(key, what, what, rank, tensors_of)
        for name, value in values.items():
            _same(name, value, _short(value), rank, values_of)
    _agree_on_pieces(ranks, taken, [places for _, _, places in gathered])
    return holders


def _agree_on_pieces(ranks: Ranks, taken: _Taken, places: list[dict[str, list[int]]]) -> None:
    """Check that tensors of one name on several meshes are equal. Pipeline stages may use a name for different ones."""
    several = {key for each in places for key, mesh in each.items() if any(mesh != p.get(key, mesh) for p in places)}
    if not several:
        return

    def digests_of() -> dict[tuple[Any, ...], str]:
        tensors = taken.collected.tensors
        parts = [(key, part) for key in several & taken.places.keys() for part in parts_of(key, tensors[key])]
        return {
            (key, part.box): digests.file_checksum(taken.request.algorithm, bytes(bytes_of(part.local)))
            for key, part in parts
        }

    _, said = ranks.together_and_tell(digests_of, lambda each: each)
    first: dict[tuple[Any, ...], tuple[int, Any, str]] = {}
    for rank, each in enumerate(said):
        for (key, box), digest in each.items():
            _same(key, digest, f"a piece with the checksum {digest}", rank, first, (key, box))


def _same(
    key: str, what: Any, text: str, rank: int, first: dict[Any, tuple[int, Any, str]], place: object = None
) -> None:
    one, its_value, its_text = first.setdefault(place or key, (rank, what, text))
    if repr(its_value) != repr(what):
        raise CheckpointMismatchError(
            f"{key} is {its_text} on rank {one} and {text} on rank {rank}; make it equal on all ranks, use different "
            "names (for stages of a pipeline), or wrap it in PerRank to save every rank's value"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _described(key: str, tensor: torch.Tensor, differs: bool) -> str:
    """The properties of a tensor that must be equal on all ranks; for a plain tensor its values, unless `differs`."""
    described = f"a tensor of dtype {name_of(tensor.dtype)} and shape {tuple(tensor.shape)}"
    if differs or isinstance(tensor, DTensor):
        return described
    tensor = plain(key, tensor)
    data = bytes_of(tensor) if tensor.numel() * tensor.element_size() <= _MOST_COMPARED else _sample(tensor)
    return f"{described} with the SHA-256 {hashlib.sha256(data).hexdigest()}"


def _sample(tensor: torch.Tensor) -> memoryview:
    """The bytes of some elements of a large tensor."""
    step = max(tensor.numel() * tensor.element_size() // _MOST_COMPARED, 1)
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return bytes_of(flat[::step].contiguous())


def _shared(value: Any) -> Any:
    """The part of a value that must be equal on all ranks. Pipeline stages have different modules and parameters."""
    kind = value.get("$") if isinstance(value, dict) else None
    if kind == "module":
        return kind
    if kind == "optimizer":
        return [{name: each for name, each in group.items() if name != "params"} for group in value["groups"]]
    return value


def write_own(prepared: Prepared, tell: Callable[[int], None] | None = None) -> SavedFile:
    """Write this rank's file. `tell` is called with the number of bytes written so far."""
    file = created(prepared.attempt.partial / prepared.layout.name)
    return write(file, stream(prepared.layout), prepared.request.algorithm, tell)


def finish(ranks: Ranks, prepared: Prepared, written: Callable[[], SavedFile]) -> Place:
    """Write every rank's file and commit. If a rank fails, the files of the save are deleted."""
    attempt = prepared.attempt

    def write_if_seen() -> SavedFile:
        see(prepared)
        return written()

    with _removed_if_it_fails(ranks, prepared):
        saved = ranks.together(write_if_seen)
        pieces = list(prepared.layout.pieces())
        parts = ranks.gather_on_first(_Part(prepared.layout.name, saved, pieces, prepared.known))

    begun = False

    def commit() -> None:
        nonlocal begun
        begun = True
        with _removed_if_it_fails(ranks, prepared):
            manifest = _merged(prepared.request, attempt, parts)
        run_at(prepared.request.directory).commit(attempt, manifest)

    try:
        ranks.first_alone(commit)
    except BaseException:
        if ranks.rank == 0 and not begun:  # otherwise `Run.commit` has deleted the files, unless they may be committed
            remove(prepared)
        raise
    return attempt.final


@dataclass(frozen=True)
class _Part:
    """What a rank adds to the manifest, including its file."""

    file: str
    saved: SavedFile
    pieces: list[tuple[str, Piece]]
    known: Known


def _merged(request: Request, attempt: Attempt, parts: list[_Part]) -> Manifest:
    manifest = Manifest(request.step, attempt.identity, len(parts), request.algorithm)
    pieces: dict[str, dict[Box, Piece]] = {}
    for part in parts:
        manifest.files[part.file] = part.saved
        manifest.aliases.update(part.known.aliases)
        for name, value in part.known.values.items():
            manifest.values[name] = _united(manifest.values.get(name), value)
        for key, piece in part.pieces:
            pieces.setdefault(key, {}).setdefault(piece.box, piece)
    for part in parts:
        for key, (dtype, shape) in part.known.tensors.items():
            manifest.tensors.setdefault(key, SavedTensor(dtype, shape, tuple(pieces.get(key, {}).values())))
    for name in {name: None for part in parts for name in part.known.per_rank}:
        manifest.per_rank[name] = [part.known.per_rank.get(name) for part in parts]
    return manifest


def _united(one: Any, other: Any) -> Any:
    """Merge a value of two ranks: the union for modules and optimizers. All other values are equal."""
    kind = other.get("$") if isinstance(other, dict) else None
    if one is None or one == other or kind not in ("module", "optimizer"):
        return other if one is None else one
    if kind == "module":
        tensors = list(dict.fromkeys((*one["tensors"], *other["tensors"])))
        return {"$": kind, "tensors": tensors, "extra": {**other["extra"], **one["extra"]}}
    groups = [
        {**ours, "params": list(dict.fromkeys((*ours["params"], *others["params"])))}
        for ours, others in zip(one["groups"], other["groups"], strict=True)
    ]
    both = {"$": kind, "groups": groups, "state": {**other["state"], **one["state"]}}
    plain_keys = list(dict.fromkeys((*one.get("plain", ()), *other.get("plain", ()))))
    return {**both, "plain": plain_keys} if plain_keys else both
