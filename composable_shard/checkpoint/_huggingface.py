"""Export and import models in Hugging Face's layout. Each rank reads only the bytes of its own shards."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ShardConfigTypeError,
    ShardConfigValueError,
)
from ._exchange import ROOT, Imported, Options, aliases_of, fill, unwrapped
from ._format.huggingface import Described, Part, Stored, lay_out_parts, read_stored
from ._format.manifest import SAFETENSORS, Manifest, SavedTensor, name_of
from ._format.writing import bytes_of
from ._full.names import adapter_name
from ._full.ranks import Together
from ._full.tensors import Held, Holdings, ranks_of
from ._full.transfer import Part as Gathered
from ._full.transfer import gathered
from ._io.places import Place, Writing, created, place, remove_tree, size_of, write_file
from ._places import absolute, begin, commit, directory_of
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
    extra_files: Mapping[str, str | bytes] | None = None,
) -> Place:
    """Write a model in Hugging Face's layout: `model.safetensors`, or several files and an index.

        texts = {"config.json": config.to_json_string()}
        checkpoint.export_safetensors("out", model, dtype=torch.bfloat16, extra_files=texts)
        transformers.AutoModelForCausalLM.from_pretrained("out")

    This is a collective: all ranks of the model must call it with the same arguments.

    Rank 0 gathers the full tensors in batches and writes them. Besides the model, it holds at most the bytes of the
    largest group or of the largest tensor. The other ranks hold only their shards. The directory gets its final name
    only when all files are on disk, so it is either complete or does not exist.

    Args:
        path: directory to create, or a URL. It must not exist.
        model: sharded or unsharded model. Tied weights are written once, under their first name. Buffers are those of
            rank 0.
        dtype: dtype of floating-point tensors in the files. Default: unchanged. Packed weights always keep their dtype.
        max_shard_size: maximum bytes of tensors in one file. A larger tensor gets a file of its own.
        rename: maps each name (FQN) to the name in the files, or to None to omit the tensor.
        adapter: name of a `peft` adapter, for example "default". Writes only its tensors (LoRA and `modules_to_save`)
            to `adapter_model.safetensors`, under peft's names. Pass peft's `adapter_config.json` in `extra_files`.
        extra_files: content of other files in the directory, by name, for example `config.json`.

    Returns:
        The directory.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: an argument is invalid, the directory exists, or a value of the
            model cannot be stored in a safetensors file.
        CheckpointMismatchError: ranks export to different paths, with different arguments or different tensors.
        CheckpointError: a tensor is on the meta device, or a file could not be written. The directory does not exist
            then.
        RankMismatchError: a rank does something else, for example continues to train. Raised on all ranks.
    """
    model = unwrapped(model)
    ranks = Together(ranks_of(model))
    ranks.meet("export weights")

    def prepare() -> tuple[Holdings, Place, dict[str, Held], list[Described], dict[str, str | bytes]]:
        held = Holdings(model)
        held.check_material("export_safetensors")
        _check_arguments(dtype, max_shard_size, rename, adapter)
        chosen = _chosen(held, _renaming(rename, adapter))
        return held, directory_of(path, "path"), chosen, _described(chosen, dtype), _checked_files(extra_files)

    (held, directory, chosen, described, extra), said = ranks.together_and_tell(
        prepare,
        lambda made: (
            {"path": absolute(made[1]), "dtype": dtype, "max_shard_size": max_shard_size, "adapter": adapter},
            hashlib.sha256(repr(made[3]).encode()).digest(),
        ),
    )
    compare("export_safetensors", [about for about, _ in said])
    _compare_tensors(ranks, described, {digest for _, digest in said})
    stem = "model" if adapter is None else "adapter_model"
    parts, index = lay_out_parts(stem, described, max_shard_size, {})
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
                remove_tree(partial)
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
    """Fill a sharded or unsharded model from safetensors files.

    This is a collective: all ranks must call it with the same arguments.

    Each rank reads only the bytes of its own shards, directly into these shards. No rank holds a full copy of a sharded
    tensor. For a model on the meta device, memory is allocated for the tensors in the files. Make optimizers afterwards
    and initialize non-persistent buffers. All names, shapes, dtypes and headers are checked before anything changes.

    Args:
        path: directory in Hugging Face's layout, or one file. In a directory, looks for `model.safetensors.index.json`
            or `model.safetensors`, then for `adapter_model...`, then for the only model in it. Links from `snapshots/`
            to `blobs/` of Hugging Face's cache are followed; other links are an error.
        model: model to fill. One name of a tied weight in the files is enough.
        strict: require the names to match those in the files.
        cast: convert floating-point tensors whose dtypes differ.
        rename: maps each name in the files to the name in the model (FQN), or to None to ignore the tensor.
        adapter: name of a `peft` adapter of the model. Fills only its tensors; see `export_safetensors`.
        process_group: process group of the ranks that load. Default: all ranks.

    Returns:
        The missing and unexpected names, and the bytes read.

    Raises:
        CheckpointIncompleteError: there are no such files.
        CheckpointMismatchError: names, shapes or dtypes do not match. The message lists them.
        CheckpointCorruptError: a header or the index is inconsistent, or a file is missing.
        CheckpointUnsafeError: a file is a link, or a name points outside of the directory.
        RankMismatchError: a rank does something else, for example continues to train. Raised on all ranks.
    """
    ranks = Ranks(process_group)
    ranks.meet("import weights")
    model = unwrapped(model)

    def check() -> Place:
        _check_renaming(rename, adapter)
        return directory_of(path, "path")

    about = {"strict": strict, "cast": cast, "adapter": adapter}
    where, said = ranks.together_and_tell(check, lambda _: about)
    compare("import_safetensors", said)
    stored = ranks.first_alone(lambda: read_stored(where))
    manifest = ranks.together(lambda: _manifest(Holdings(model), stored, rename, adapter))
    concerns = None if adapter is None else lambda name: adapter_name(name, adapter) is not None
    return fill(ranks, where, manifest, {ROOT: model}, Options(strict, cast, lambda _: _check_sizes(stored), concerns))


# ----------------------------------------------------------------------------------------------------- names


def _check_renaming(rename: Rename | None, adapter: str | None) -> None:
    if rename is not None and not callable(rename):
        raise ShardConfigTypeError(f"rename: is a {type(rename).__name__}; pass a function of a name, as {{...}}.get")
    if adapter is not None and (not isinstance(adapter, str) or not adapter or "." in adapter):
        raise ShardConfigValueError(f"adapter: {adapter!r} is not the name of an adapter, such as 'default'")
    if rename is not None and adapter is not None:
        raise ShardConfigValueError("rename: cannot be combined with `adapter`, which uses peft's names; pass only one")


def _renaming(rename: Rename | None, adapter: str | None) -> Rename:
    """The function that maps the model's names to those in the files."""
    if adapter is not None:
        return functools.partial(adapter_name, adapter=adapter)
    return rename or (lambda key: key)


def _chosen(held: Holdings, rename: Rename) -> dict[str, Held]:
    """The model's tensors to write, by name in the files; tied weights once."""
    chosen: dict[str, Held] = {}
    for each in held.once():
        name = rename(each.name)
        if name is None:
            continue
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise ShardConfigValueError(f"rename: {each.name} gets the name {name!r}; return a string, or None")
        if name in chosen:
            raise ShardConfigValueError(f"rename: {each.name} and {chosen[name].name} both get the name {name}")
        chosen[name] = each
    others = [key for key in held.others if rename(key) is not None]
    if others:
        raise ShardConfigValueError(
            f"model: {', '.join(others[:5])} are not tensors (get_extra_state), so safetensors files cannot store "
            "them; let `rename` return None for them"
        )
    if not chosen:
        raise ShardConfigValueError("model: has no tensors to write; check that `rename` or `adapter` fits its names")
    return chosen


def _described(chosen: Mapping[str, Held], dtype: torch.dtype | None) -> list[Described]:
    described = []
    for name, each in chosen.items():
        kept = each.as_kept(dtype)
        if kept not in SAFETENSORS:
            raise ShardConfigValueError(f"model: {each.name} has dtype {name_of(kept)}, unsupported by safetensors")
        described.append((name, kept, tuple(each.tensor.shape)))
    return described


def _compare_tensors(ranks: Ranks, described: list[Described], digests: set[bytes]) -> None:
    """Check that all ranks write the same tensors as rank 0. The error names the first tensor that differs.

    Args:
        ranks: ranks that write.
        described: tensors that this rank would write.
        digests: digests of the tensors that each rank would write.
    """
    if len(digests) == 1:
        return
    said = ranks.gather(described)
    rank, other = next((rank, other) for rank, other in enumerate(said) if other != said[0])
    pairs = itertools.zip_longest(said[0], other)
    one, two = next((one, two) for one, two in pairs if one != two)
    raise CheckpointMismatchError(
        f"export_safetensors: rank 0 writes {_in_words(one)} where rank {rank} writes {_in_words(two)}; check that "
        "`rename` returns the same names on all ranks, and that all ranks build and shard the model in the same way"
    )


def _in_words(described: Described | None) -> str:
    if described is None:
        return "nothing more"
    name, dtype, shape = described
    return f"{name} of shape {shape} in {name_of(dtype)}"


# --------------------------------------------------------------------------------------------------- writing


def _check_arguments(dtype: torch.dtype | None, most: int, rename: Rename | None, adapter: str | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ShardConfigTypeError(f"dtype: {dtype!r} is not a floating-point dtype")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ShardConfigValueError(f"max_shard_size: {most!r} is not a number of bytes")
    _check_renaming(rename, adapter)


def _checked_files(extra: Mapping[str, str | bytes] | None) -> dict[str, str | bytes]:
    for name, content in (extra or {}).items():
        if _FILE_NAME.fullmatch(name) is None or ".safetensors" in name:
            raise ShardConfigValueError(f"extra_files: {name!r} is not a valid name for an extra file")
        if not isinstance(content, (str, bytes)):
            raise ShardConfigTypeError(f"extra_files: {name} is a {type(content).__name__}; pass str or bytes")
    return dict(extra or {})


class _Writer:
    """Writes the files of a model. `take` must be called with the tensors in the order of the files."""

    def __init__(self, directory: Place, parts: list[Part]) -> None:
        self._directory = directory
        self._places = ((part, name) for part in parts for name in part.names)
        self._file: Writing | None = None
        self._error: Exception | None = None

    def take(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor. An error is kept until `finish`, because the other ranks continue to send."""
        if self._error is not None:
            return
        try:
            part, name = next(self._places)
            assert name == key
            if self._file is None:
                self._file = created(self._directory / part.name)
                self._file.write(memoryview(part.header))
            self._file.write(bytes_of(tensor))
            if key == part.names[-1]:
                self._file.commit()
                self._file = None
        except Exception as error:
            self._error = error

    def finish(self, extra: Mapping[str, str | bytes], directory: Place) -> None:
        """Write the other files after all tensors are written, and give the directory its final name."""
        if self._error is None and (left := next(self._places, None)) is not None:
            self._error = CheckpointError(f"{left[1]} was not gathered")
        if self._error is not None:
            if self._file is not None:
                self._file.close()
            raise CheckpointError(f"{directory} could not be written: {self._error}") from self._error
        for name, content in extra.items():
            write_file(self._directory / name, content.encode() if isinstance(content, str) else content)
        commit(self._directory, directory)


# --------------------------------------------------------------------------------------------------- reading


def _manifest(held: Holdings, stored: Stored, rename: Rename | None, adapter: str | None) -> Manifest:
    """Describe the files as the manifest of a checkpoint whose state has only the model."""
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
        adapted = {adapter_name(name, adapter): name for name in held.tensors}
    tensors: dict[str, SavedTensor] = {}
    for key, tensor in stored.tensors.items():
        name = key if rename is None else rename(key)
        if name is None:
            continue
        name = adapted.get(name, name)
        if name in tensors:
            raise ShardConfigValueError(f"rename: two tensors in the files get the name {name}; one of them is {key}")
        tensors[name] = tensor
    return tensors


def _check_sizes(stored: Stored) -> None:
    """Check that this rank sees files of the same sizes as rank 0."""
    for path, size in stored.sizes.items():
        try:
            own = size_of(place(path))
        except OSError as error:
            raise CheckpointCorruptError(f"{place(path)}: {error.strerror}") from None
        if own != size:
            raise CheckpointCorruptError(
                f"{place(path)} has {own:,} bytes on this rank, but had {size:,} bytes on rank 0"
            )
