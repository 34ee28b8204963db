"""Models in Hugging Face's layout: written from shards, and read into them, by the bytes that each rank needs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .._errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ShardConfigTypeError,
    ShardConfigValueError,
)
from ._exchange import ROOT, Imported, Options, aliases_of, begin, commit, fill, unwrapped
from ._format.huggingface import Described, Part, Stored, lay_out_parts, read_stored
from ._format.manifest import SAFETENSORS, Manifest, SavedTensor, name_of
from ._format.writing import bytes_of
from ._full.ranks import Together
from ._full.tensors import Held, Holdings, ranks_of
from ._full.transfer import Part as Gathered
from ._full.transfer import gathered
from ._io import files
from ._ranks import Ranks, compare

Rename = Callable[[str], str | None]

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}", re.ASCII)


def export_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    rename: Rename | None = None,
    adapter: str | None = None,
    metadata: Mapping[str, str] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write a model as Hugging Face's libraries read it: `model.safetensors`, or parts of it and an index.

        texts = {"config.json": config.to_json_string()}
        checkpoint.export_safetensors("out", model, dtype=torch.bfloat16, extra_files=texts)
        transformers.AutoModelForCausalLM.from_pretrained("out")

    All ranks of the model call it alike. Rank 0 gets the full tensors, some at a time, and writes them: besides the
    model it holds at most the bytes of the largest group, or of the largest tensor; the other ranks hold no more than
    their shards. The directory gets its name when all of it is on disk, so that it is whole, or not there.

    Args:
        path: a directory, which does not exist yet.
        model: sharded or not. Tied weights are written once, under their first name. Buffers are rank 0's.
        dtype: of tensors of floating-point numbers in the files; by default they keep theirs, as packed weights always
            do.
        max_shard_size: bytes of a file's tensors; a tensor that has more gets a file of its own.
        rename: gives for each name (FQN) the one in the files, or None to leave it out.
        adapter: name of a `peft` adapter ("default", say), to write its tensors alone, as `adapter_model.safetensors`
            with peft's names: LoRA and `modules_to_save`. Give peft's `adapter_config.json` as one of `extra_files`.
        metadata: for the headers of the files.
        extra_files: further files of the directory, by name, such as `config.json`.

    Returns:
        the directory.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: an argument is wrong, the directory exists, or a value of the model
            cannot be in such a file.
        CheckpointMismatchError: ranks export to other paths, by other arguments or other tensors.
        CheckpointError: a tensor is on the meta device, or a file could not be written; the directory is then absent.
        RankMismatchError: one of the ranks does something else, as trains on; on all ranks.
    """
    model = unwrapped(model)
    ranks = Together(ranks_of(model))
    ranks.meet("export weights")

    def prepare() -> tuple[Holdings, Path, dict[str, Held], list[Described], dict[str, str | bytes]]:
        held = Holdings(model)
        held.check_material("export_safetensors")
        _check_arguments(dtype, max_shard_size, rename, adapter)
        chosen = _chosen(held, _renaming(rename, adapter))
        return held, Path(path), chosen, _described(chosen, dtype), _checked_files(extra_files)

    (held, directory, chosen, described, extra), said = ranks.together_and_tell(
        prepare,
        lambda made: (
            {"path": os.path.abspath(made[1]), "dtype": dtype, "max_shard_size": max_shard_size, "adapter": adapter},
            hashlib.sha256(repr(made[3]).encode()).digest(),
        ),
    )
    compare("export_safetensors", [about for about, _ in said])
    _compare_tensors(ranks, described, {digest for _, digest in said})
    stem = "model" if adapter is None else "adapter_model"
    parts, index = lay_out_parts(stem, described, max_shard_size, dict(metadata or {}))
    if index is not None:
        extra = {**extra, f"{stem}.safetensors.index.json": index}
    partial = ranks.first_alone(lambda: begin(directory))
    writer = _Writer(partial, parts) if held.ranks.leads else None
    wanted = [Gathered.of(key, chosen[key].tensor, chosen[key].as_kept(dtype)) for part in parts for key in part.names]
    try:
        cpu = torch.device("cpu")
        for key, full in gathered(wanted, held.ranks, limit=held.limit, lead_only=True, device=cpu):
            if writer is not None:
                writer.take(key, full)
        ranks.first_alone(lambda: writer.finish(extra, directory) if writer is not None else None)
    except BaseException:
        if writer is not None:
            with contextlib.suppress(OSError):
                files.remove_tree(partial)
        raise
    return directory


def import_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    rename: Rename | None = None,
    adapter: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Imported:
    """Fill a model, sharded or not, from files of safetensors; all ranks call it alike.

    Each rank reads the bytes of its own shards straight into them; nowhere is there a full copy of a sharded tensor.
    A model on the meta device gets memory for what the files hold: make optimizers afterwards, and give buffers that
    are not persistent their values. All names, shapes, dtypes and headers are looked at before anything changes.

    Args:
        path: a directory of Hugging Face's (`model.safetensors.index.json` or `model.safetensors`, else
            `adapter_model...`, else the only one it has), or one file. Links are followed from `snapshots/` to `blobs/`
            of Hugging Face's cache, and refused otherwise.
        model: to fill. Of tied weights one name in the files is enough.
        strict: names must be those of the files.
        cast: convert floating-point tensors where dtypes differ.
        rename: gives for each name in the files the one of the model (FQN), or None to leave it out.
        adapter: name of a `peft` adapter of the model, to fill its tensors alone; see `export_safetensors`.
        process_group: of the ranks that load; by default all.

    Returns:
        what was not found, and bytes read.

    Raises:
        CheckpointIncompleteError: there are no such files.
        CheckpointMismatchError: names, shapes or dtypes do not fit; it lists them.
        CheckpointCorruptError: a header or the index contradicts itself, or a file is missing.
        CheckpointUnsafeError: links, or names that lead outside of the directory.
        RankMismatchError: one of the ranks does something else, as trains on; on all ranks.
    """
    ranks = Ranks(process_group)
    ranks.meet("import weights")
    model = unwrapped(model)
    where, said = ranks.together_and_tell(
        lambda: _checked_path(path, rename, adapter),
        lambda _: {"strict": strict, "cast": cast, "adapter": adapter},
    )
    compare("import_safetensors", said)
    stored = ranks.first_alone(lambda: read_stored(where))
    manifest = ranks.together(lambda: _manifest(Holdings(model), stored, rename, adapter))
    concerns = None if adapter is None else lambda name: _adapter_name(name, adapter) is not None
    return fill(ranks, where, manifest, {ROOT: model}, Options(strict, cast, lambda _: _check_sizes(stored), concerns))


# ----------------------------------------------------------------------------------------------------- names


def _check_renaming(rename: Rename | None, adapter: str | None) -> None:
    if rename is not None and not callable(rename):
        raise ShardConfigTypeError(f"rename: is a {type(rename).__name__}; give a function of a name, as {{...}}.get")
    if adapter is not None and (not isinstance(adapter, str) or not adapter or "." in adapter):
        raise ShardConfigValueError(f"adapter: {adapter!r} is not the name of an adapter, such as 'default'")
    if rename is not None and adapter is not None:
        raise ShardConfigValueError("rename: names of an adapter are peft's; give `rename` or `adapter`")


def _checked_path(path: str | os.PathLike[str], rename: Rename | None, adapter: str | None) -> Path:
    _check_renaming(rename, adapter)
    return Path(path)


def _renaming(rename: Rename | None, adapter: str | None) -> Rename:
    """From the model's names to those of the files."""
    if adapter is not None:
        return functools.partial(_adapter_name, adapter=adapter)
    return rename or (lambda key: key)


def _adapter_name(key: str, adapter: str) -> str | None:
    """The name that peft gives a tensor of an adapter in files; None for another tensor."""
    parts = key.split(".")
    for at, (part, following) in enumerate(itertools.pairwise(parts)):
        if following == adapter and (part.startswith("lora_") or part == "modules_to_save"):
            kept = [*parts[:at], *([] if part == "modules_to_save" else [part]), *parts[at + 2 :]]
            if part == "lora_magnitude_vector" and kept[-1] == "weight":
                kept.pop()
            name = ".".join(kept)
            return name if name.startswith("base_model.model.") else f"base_model.model.{name}"
    return None


def _chosen(held: Holdings, rename: Rename) -> dict[str, Held]:
    """By name in the files, what the model holds, tied weights once."""
    chosen: dict[str, Held] = {}
    for each in held.once():
        name = rename(each.name)
        if name is None:
            continue
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise ShardConfigValueError(f"rename: {each.name} gets the name {name!r}; give a string, or None")
        if name in chosen:
            raise ShardConfigValueError(f"rename: {each.name} and {chosen[name].name} both get the name {name}")
        chosen[name] = each
    others = [key for key in held.others if rename(key) is not None]
    if others:
        raise ShardConfigValueError(
            f"model: {', '.join(others[:5])} are no tensors (get_extra_state), which such files cannot hold; let "
            "`rename` give None for them"
        )
    if not chosen:
        raise ShardConfigValueError("model: has no tensors to write; see that `rename` or `adapter` fit to its names")
    return chosen


def _described(chosen: Mapping[str, Held], dtype: torch.dtype | None) -> list[Described]:
    described = []
    for name, each in chosen.items():
        kept = each.as_kept(dtype)
        if kept not in SAFETENSORS:
            raise ShardConfigValueError(f"model: {each.name} has dtype {name_of(kept)}, which such files do not know")
        described.append((name, kept, tuple(each.tensor.shape)))
    return described


def _compare_tensors(ranks: Ranks, described: list[Described], digests: set[bytes]) -> None:
    """See that all ranks write the same tensors as rank 0; the error names the first that differs.

    Args:
        ranks: that write.
        described: what this one would write.
        digests: of what each would write.
    """
    if len(digests) == 1:
        return
    said = ranks.gather(described)
    rank, other = next((rank, other) for rank, other in enumerate(said) if other != said[0])
    pairs = itertools.zip_longest(said[0], other)
    one, two = next((one, two) for one, two in pairs if one != two)
    raise CheckpointMismatchError(
        f"export_safetensors: rank 0 writes {_in_words(one)} where rank {rank} writes {_in_words(two)}; see that "
        "`rename` gives the same names on all ranks, and that all have built and sharded the model alike"
    )


def _in_words(described: Described | None) -> str:
    if described is None:
        return "nothing more"
    name, dtype, shape = described
    return f"{name} of shape {shape} in {name_of(dtype)}"


# --------------------------------------------------------------------------------------------------- writing


def _check_arguments(dtype: torch.dtype | None, most: int, rename: Rename | None, adapter: str | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ShardConfigTypeError(f"dtype: {dtype!r} is no dtype of floating-point numbers")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ShardConfigValueError(f"max_shard_size: {most!r} is not a number of bytes")
    _check_renaming(rename, adapter)


def _checked_files(extra: Mapping[str, str | bytes] | None) -> dict[str, str | bytes]:
    for name, content in (extra or {}).items():
        if _FILE_NAME.fullmatch(name) is None or ".safetensors" in name:
            raise ShardConfigValueError(f"extra_files: {name!r} is no name for a file beside the model's")
        if not isinstance(content, (str, bytes)):
            raise ShardConfigTypeError(f"extra_files: {name} is a {type(content).__name__}; give text or bytes")
    return dict(extra or {})


class _Writer:
    """Writes the files of a model, whose tensors come in the order of the files."""

    def __init__(self, directory: Path, parts: list[Part]) -> None:
        self._directory = directory
        self._places = self._all_places(parts)
        self._file: files.NewFile | None = None
        self._error: Exception | None = None

    @staticmethod
    def _all_places(parts: list[Part]) -> Iterator[tuple[Part, str]]:
        yield from ((part, name) for part in parts for name in part.names)

    def take(self, key: str, tensor: torch.Tensor) -> None:
        """The next tensor. An error is kept for the end: the others go on to send."""
        if self._error is not None:
            return
        try:
            part, name = next(self._places)
            assert name == key
            if self._file is None:
                self._file = files.NewFile(self._directory / part.name)
                self._file.write(memoryview(part.header))
            self._file.write(bytes_of(tensor))
            if key == part.names[-1]:
                self._file.commit()
                self._file = None
        except Exception as error:
            self._error = error

    def finish(self, extra: Mapping[str, str | bytes], directory: Path) -> None:
        """With all tensors written: write the other files, and give the directory its name."""
        if self._error is None and (left := next(self._places, None)) is not None:
            self._error = CheckpointError(f"{left[1]} was not gathered")
        if self._error is not None:
            if self._file is not None:
                self._file.close()
            raise CheckpointError(f"{directory} could not be written: {self._error}") from self._error
        for name, content in extra.items():
            files.write_file(self._directory / name, content.encode() if isinstance(content, str) else content)
        commit(self._directory, directory)


# --------------------------------------------------------------------------------------------------- reading


def _manifest(held: Holdings, stored: Stored, rename: Rename | None, adapter: str | None) -> Manifest:
    """The files as a checkpoint of a state that has the model alone."""
    tensors = _by_own_name(held, stored, rename, adapter)
    aliases = aliases_of(held, tensors)
    manifest = Manifest(0, "", 1, "crc32")
    manifest.tensors.update({f"{ROOT}.{name}": tensors[name] for name in tensors if name not in aliases})
    manifest.aliases.update({f"{ROOT}.{name}": f"{ROOT}.{first}" for name, first in aliases.items()})
    manifest.values[ROOT] = {"$": "module", "tensors": [*dict.fromkeys((*tensors, *aliases))], "extra": {}}
    return manifest


def _by_own_name(held: Holdings, stored: Stored, rename: Rename | None, adapter: str | None) -> dict[str, SavedTensor]:
    adapted = {}
    if adapter is not None:
        adapted = {_adapter_name(name, adapter): name for name in held.tensors}
    tensors: dict[str, SavedTensor] = {}
    for key, tensor in stored.tensors.items():
        name = key if rename is None else rename(key)
        if name is None:
            continue
        name = adapted.get(name, name)
        if name in tensors:
            raise ShardConfigValueError(f"rename: two tensors of the files get the name {name}, {key} is one of them")
        tensors[name] = tensor
    return tensors


def _check_sizes(stored: Stored) -> None:
    """See that this rank sees the files that rank 0 has looked at."""
    for path, size in stored.sizes.items():
        try:
            own = files.size_of(Path(path))
        except OSError as error:
            raise CheckpointCorruptError(f"{path}: {error.strerror}") from None
        if own != size:
            raise CheckpointCorruptError(f"{path} has {own:,} bytes, and {size:,} when rank 0 looked at it")
