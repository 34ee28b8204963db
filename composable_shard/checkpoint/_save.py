"""Saving: the ranks agree, each writes its file, and rank 0 commits all of it at once or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._errors import CheckpointError, CheckpointMismatchError, ShardConfigTypeError, ShardConfigValueError
from ._collect import Collected, collect
from ._format import commits
from ._format.boxes import boxes_of, plain
from ._format.manifest import Manifest, Piece, SavedFile, SavedTensor, name_of
from ._format.writing import FileLayout, bytes_of, stream, write
from ._io import digests, files
from ._layouts import layout_of
from ._pending import background
from ._pruning import prune_on_first
from ._ranks import Ranks, compare

_MOST_COMPARED = 1 << 20  # bytes of a tensor that ranks compare


def save(
    directory: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = None,
    overwrite: bool = False,
    checksum: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a state; all ranks call it alike.

    Every rank writes one file, in the format of safetensors, with what it holds of the tensors; what several ranks
    hold is written once. A checkpoint exists as a whole or not at all: it is written beside those that are there, and
    gets its name when all of it is on disk; then `LATEST` names it. Until then the one before is the latest.

    Args:
        directory: of the checkpoints of a run; made where it does not exist. All ranks must see the same one.
        state: what to save, by name: modules, optimizers, objects with ``state_dict`` and ``load_state_dict``
            (schedulers, data loaders), tensors, DTensors, generators, numbers, strings, and dictionaries and lists of
            those. What differs by rank is in `PerRank`. Of a module whose buffers differ by rank, one rank's are saved.
            Parameters are kept by fully qualified name, tied ones once, and so is the state of optimizers, whose
            modules must be in the state as well.
        step: of the training, at least 0; the checkpoint is named after it.
        keep: after the save, remove all but so many newest checkpoints, and what saves that were cut off have left.
        overwrite: replace a checkpoint of the same step; the old one is there until the new one is committed.
        checksum: "xxh3" (package xxhash), "crc32" or "sha256"; by default the first that is installed.
        process_group: of the ranks that save; by default all.

    Returns:
        the path of the checkpoint.

    Raises:
        ShardConfigTypeError: something in the state cannot be saved without pickle.
        ShardConfigValueError: an argument is wrong, or there is a checkpoint of this step.
        CheckpointMismatchError: ranks save other steps, other names or other values.
        CheckpointError: a file could not be written; it says on which rank, and why. The checkpoints that were there
            are unharmed.
        RankMismatchError: one of the ranks does something else, as trains on; on all ranks.
    """
    ranks = Ranks(process_group)
    ranks.meet("save a checkpoint")
    prepared = prepare(ranks, lambda: Request.of(directory, step, overwrite, checksum, keep), state)
    path = finish(ranks, prepared, lambda: write_own(prepared))
    prune(ranks, prepared.request)
    return path


def prune(ranks: Ranks, request: Request) -> None:
    """Remove old checkpoints, if that was asked for; where it fails, the error says that the new one is committed."""
    if request.keep is None:
        return
    try:
        prune_on_first(ranks, request.directory, request.keep)
    except CheckpointError as error:
        raise type(error)(f"step {request.step} is committed, but old checkpoints were not removed: {error}") from error


@dataclass(frozen=True)
class Request:
    """What is asked of a save."""

    directory: Path
    step: int
    overwrite: bool
    algorithm: str
    keep: int | None

    @staticmethod
    def of(
        directory: str | os.PathLike[str], step: int, overwrite: bool, checksum: str | None, keep: int | None
    ) -> Request:
        """Checked arguments."""
        if not isinstance(directory, (str, os.PathLike)):
            raise ShardConfigTypeError(f"directory: {directory!r} is a {type(directory).__name__}; give a path")
        if isinstance(step, bool) or not isinstance(step, int):
            raise ShardConfigTypeError(f"step: {step!r} is a {type(step).__name__}; give an int")
        if not 0 <= step < 10**18:
            raise ShardConfigValueError(f"step: {step} is not between 0 and 10**18")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ShardConfigValueError(
                f"keep: {keep!r} is not a number of checkpoints; give at least 1, or None for all"
            )
        return Request(Path(directory), step, overwrite, _algorithm(checksum), keep)


def _algorithm(checksum: str | None) -> str:
    """The checksums that were asked for, or the best that can be made here."""
    algorithm = digests.best() if checksum is None else checksum
    if algorithm not in digests.ALGORITHMS:
        raise ShardConfigValueError(f"checksum: {checksum!r} is not one of {', '.join(digests.ALGORITHMS)}")
    if algorithm == "xxh3" and digests.best() != "xxh3":
        raise ShardConfigValueError('checksum: "xxh3" needs the package xxhash: pip install xxhash')
    return algorithm


@dataclass(frozen=True)
class Known:
    """What a rank adds to the manifest, but for its file."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    aliases: dict[str, str]
    values: dict[str, Any]
    per_rank: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A save that all ranks have agreed on, with this rank's part of it."""

    request: Request
    attempt: commits.Attempt
    layout: FileLayout
    known: Known


def prepare(
    ranks: Ranks,
    asked: Callable[[], Request],
    state: Mapping[str, Any],
    stage: Callable[[FileLayout], None] | None = None,
) -> Prepared:
    """Take the state apart, see that all ranks save the same, and make the directory to write into.

    A save that goes on in the background ends first. `asked` gives the checked arguments, and `stage`, where it is
    given, copies this rank's part.
    """
    taken, said = ranks.together_and_tell(lambda: _take(ranks, asked(), state), lambda each: (each.about, each.digest))
    request, collected = taken.request, taken.collected
    holders = _agree(ranks, taken, said)
    attempt: commits.Attempt | None = None

    def lay() -> FileLayout:
        nonlocal attempt
        layout = layout_of(ranks, collected, holders)
        if ranks.rank == 0:
            attempt = commits.begin(request.directory, request.step, request.overwrite)
        if stage is not None:
            stage(layout)
        return layout

    try:
        layout, attempts = ranks.together_and_tell(lay, lambda _: attempt)
    except BaseException:
        if attempt is not None:
            remove(attempt)
        raise
    first = attempts[0]
    assert first is not None
    kinds = {k: (t.dtype, tuple(t.shape)) for k, t in (*collected.tensors.items(), *collected.own.items())}
    known = Known(kinds, collected.aliases, collected.values, collected.per_rank)
    return Prepared(request, first, layout, known)


def remove(attempt: commits.Attempt) -> None:
    """Remove what a save that has failed has written; what cannot be removed is left to `prune`, and never loaded."""
    with contextlib.suppress(OSError):
        files.remove_tree(attempt.partial)


@dataclass(frozen=True)
class _Taken:
    """A state taken apart, and what ranks compare of it: `about` and `digest` first, the rest where digests differ."""

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
        "checksum": request.algorithm,
        "keep": request.keep,
    }
    plain = {name: _shared(value) for name, value in collected.values.items()}
    compared = sorted(described.items()), plain, collected.aliases, places
    digest = hashlib.sha256(repr(compared).encode()).digest()
    return _Taken(request, collected, about, described, plain, places, digest)


def _places(collected: Collected) -> dict[str, list[int]]:
    """Of each sharded tensor, the ranks of its mesh."""
    ranks: dict[DeviceMesh, list[int]] = {}  # to ask a mesh takes as long as to read a small tensor
    places = {}
    for key, tensor in collected.tensors.items():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in ranks:
                ranks[mesh] = mesh.mesh.flatten().tolist()
            places[key] = ranks[mesh]
    return places


@contextlib.contextmanager
def _removed_if_it_fails(ranks: Ranks, attempt: commits.Attempt) -> Iterator[None]:
    """Nothing remains of a save that fails."""
    try:
        yield
    except BaseException:
        if ranks.rank == 0:
            remove(attempt)
        raise


def see(attempt: commits.Attempt) -> None:
    """Raise ShardConfigValueError where this rank does not see the directory that rank 0 has made."""
    if not attempt.partial.is_dir():
        raise ShardConfigValueError(
            f"directory: rank 0 has made {attempt.partial}, which this rank does not see; all ranks must save to "
            "one file system that they share"
        )


def _agree(ranks: Ranks, taken: _Taken, said: list[tuple[dict[str, Any], bytes]]) -> dict[str, list[int]]:
    """See that the ranks save the same; gives for each key the ranks that have it."""
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
    """See that what lies on several meshes is equal: stages of a pipeline may have different tensors of one name."""
    several = {key for each in places for key, mesh in each.items() if any(mesh != p.get(key, mesh) for p in places)}
    if not several:
        return

    def digests_of() -> dict[tuple[Any, ...], str]:
        boxes = [
            (key, box) for key in several & taken.places.keys() for box in boxes_of(key, taken.collected.tensors[key])
        ]
        return {
            (key, box.offsets, box.shape): digests.file_checksum(taken.request.algorithm, bytes(bytes_of(box.local)))
            for key, box in boxes
        }

    _, said = ranks.together_and_tell(digests_of, lambda each: each)
    first: dict[tuple[Any, ...], tuple[int, Any, str]] = {}
    for rank, each in enumerate(said):
        for (key, offsets, shape), digest in each.items():
            _same(key, digest, f"a piece with the checksum {digest}", rank, first, (key, offsets, shape))


def _same(
    key: str, what: Any, text: str, rank: int, first: dict[Any, tuple[int, Any, str]], place: object = None
) -> None:
    one, its_value, its_text = first.setdefault(place or key, (rank, what, text))
    if repr(its_value) != repr(what):
        raise CheckpointMismatchError(
            f"{key} is {its_text} on rank {one} and {text} on rank {rank}; make it equal, give it a name of its own on "
            "each rank, as stages of a pipeline need it, or wrap it in PerRank for every rank's to be saved"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _described(key: str, tensor: torch.Tensor, differs: bool) -> str:
    """What must be equal on the ranks that hold a tensor: of plain ones the values, too, unless they may differ."""
    described = f"a tensor of dtype {name_of(tensor.dtype)} and shape {tuple(tensor.shape)}"
    if differs or isinstance(tensor, DTensor):
        return described
    tensor = plain(key, tensor)
    data = bytes_of(tensor) if tensor.numel() * tensor.element_size() <= _MOST_COMPARED else _sample(tensor)
    return f"{described} with the SHA-256 {hashlib.sha256(data).hexdigest()}"


def _sample(tensor: torch.Tensor) -> memoryview:
    """Some numbers of a large tensor."""
    step = max(tensor.numel() * tensor.element_size() // _MOST_COMPARED, 1)
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return bytes_of(flat[::step].contiguous())


def _shared(value: Any) -> Any:
    """What of a value must be equal on all ranks: ranks of a pipeline have modules and optimizers of their own."""
    kind = value.get("$") if isinstance(value, dict) else None
    if kind == "module":
        return kind
    if kind == "optimizer":
        return [{name: each for name, each in group.items() if name != "params"} for group in value["groups"]]
    return value


def write_own(prepared: Prepared, tell: Callable[[int], None] | None = None) -> SavedFile:
    """Write this rank's file; `tell` is called with the bytes that are written."""
    file = files.NewFile(prepared.attempt.partial / prepared.layout.name)
    return write(file, stream(prepared.layout), prepared.request.algorithm, tell)


def finish(ranks: Ranks, prepared: Prepared, written: Callable[[], SavedFile]) -> Path:
    """Have every rank's file written, and commit; where a rank fails, nothing remains of the save."""
    attempt = prepared.attempt

    def write_if_seen() -> SavedFile:
        see(attempt)
        return written()

    with _removed_if_it_fails(ranks, attempt):
        saved = ranks.together(write_if_seen)
        pieces = list(prepared.layout.pieces())
        parts = ranks.gather_on_first(_Part(prepared.layout.name, saved, pieces, prepared.known))
        ranks.first_alone(lambda: _commit(prepared, parts))
    return attempt.final


@dataclass(frozen=True)
class _Part:
    """What a rank adds to the manifest."""

    file: str
    saved: SavedFile
    pieces: list[tuple[str, Piece]]
    known: Known


def _commit(prepared: Prepared, parts: list[_Part]) -> None:
    commits.commit(prepared.attempt, _merged(prepared.request, prepared.attempt, parts))


def _merged(request: Request, attempt: commits.Attempt, parts: list[_Part]) -> Manifest:
    manifest = Manifest(request.step, attempt.partial.name.rpartition("-")[2], len(parts), request.algorithm)
    pieces: dict[str, dict[tuple[Any, Any], Piece]] = {}
    for part in parts:
        manifest.files[part.file] = part.saved
        manifest.aliases.update(part.known.aliases)
        for name, value in part.known.values.items():
            manifest.values[name] = _united(manifest.values.get(name), value)
        for key, piece in part.pieces:
            pieces.setdefault(key, {}).setdefault((piece.offsets, piece.shape), piece)
    for part in parts:
        for key, (dtype, shape) in part.known.tensors.items():
            manifest.tensors.setdefault(key, SavedTensor(dtype, shape, tuple(pieces.get(key, {}).values())))
    for name in {name: None for part in parts for name in part.known.per_rank}:
        manifest.per_rank[name] = [part.known.per_rank.get(name) for part in parts]
    return manifest


def _united(one: Any, other: Any) -> Any:
    """A value of two ranks: of modules and optimizers what both have; all else is equal."""
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
