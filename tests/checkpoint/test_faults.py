"""Damaged checkpoints, full disks, and ranks that disagree or die: an error, or the earlier checkpoint is intact."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable_shard as cs
from _pool import simulated
from checkpoint._faults import body_of, content, copy_of, make_state, rank_here, rewrite, seal
from composable_shard import checkpoint
from composable_shard.checkpoint._io import digests, files
from composable_shard.testing import spmd

STEP, FILE = "step-00000003", "rank-00000.safetensors"
KEY = "model.0.weight"
CORRUPT, MISMATCH = cs.errors.CheckpointCorruptError, cs.errors.CheckpointMismatchError
UNSAFE, INCOMPLETE = cs.errors.CheckpointUnsafeError, cs.errors.CheckpointIncompleteError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints of two ranks, at steps 2 and 3."""
    directory = tmp_path_factory.mktemp("saved")

    def save():
        for step in (2, 3):
            checkpoint.save(directory, make_state(step), step=step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "best", lambda: "crc32")
        spmd(2)(lambda here: save())
    return directory


def tried(directory, state, **options):
    """Load an invalid checkpoint. Returns the error, and checks that the state is unchanged."""
    before, caught = content(state), None
    try:
        checkpoint.load(directory, state, **options)
    except Exception as error:
        caught = error
    if caught is None:
        return None, "it was loaded"
    assert content(state) == before, caught
    return type(caught), str(caught)


def see_refused(saved, tmp_path, cases):
    """Damage a copy for each case, and check the errors of a load on two ranks and of `verify`."""
    for number, (spoil, _, _) in enumerate(cases.values()):
        spoil(copy_of(saved, tmp_path, str(number)))

    def load():
        state = make_state(1)
        return [tried(tmp_path / str(number), state) for number in range(len(cases))]

    by_rank = spmd(2, timeout=60)(lambda here: load())
    assert by_rank[0] == by_rank[1]
    wrong = []
    for (number, (case, (_, kind, text))), (raised, message) in zip(enumerate(cases.items()), by_rank[0], strict=True):
        if raised is not kind or not re.search(text, message, re.DOTALL):
            wrong.append(f"{case}: {raised and raised.__name__}: {message[:300]}")
        if kind is not MISMATCH:  # `verify` finds it without a state
            raised, message = verified(tmp_path / str(number))
            if raised is not kind or not re.search(text, message, re.DOTALL):
                wrong.append(f"{case}, by verify: {raised and raised.__name__}: {message[:300]}")
    assert not wrong, "\n" + "\n".join(wrong)
    assert not list(tmp_path.rglob("executed"))


def verified(directory):
    try:
        checkpoint.verify(directory)
    except Exception as error:
        return type(error), str(error)
    return None, "it is intact"


# ------------------------------------------------------------------------------------------ damaged directories


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def truncate(path, size):
    os.truncate(path, size)


def become(path, make):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path)


def linked(path):
    """Move a path, and replace it by a link."""
    outside = path.with_name(f"{path.name}-elsewhere")
    path.rename(outside)
    path.symlink_to(outside)


def sized(path, size, name="manifest.json"):
    with (path / name).open("wb") as file:
        file.truncate(size)


def tensor(change):
    """Change the entry of one tensor in the manifest."""
    return lambda root: rewrite(root / STEP, lambda manifest: change(manifest["tensors"][KEY]))


def piece(index, value):
    return tensor(lambda entry: entry["pieces"][0].__setitem__(index, value))


def entry(name, value):
    return tensor(lambda saved: saved.__setitem__(name, value))


def manifest(change):
    return lambda root: rewrite(root / STEP, change)


def swap_bytes_of_two_tensors(content):
    one, two = (content["tensors"][f"optimizer.state.{KEY}.{name}"] for name in ("exp_avg", "exp_avg_sq"))
    one["pieces"], two["pieces"] = two["pieces"], one["pieces"]


def point_to_the_bytes_of_another(content):
    tensors = content["tensors"]
    tensors[f"optimizer.state.{KEY}.exp_avg"]["pieces"] = tensors[KEY]["pieces"]


def exchange(one, two):
    middle = one.with_name("middle")
    one.rename(middle)
    two.rename(one)
    middle.rename(two)


def replaced(old, new):
    return lambda root: seal(root / STEP, body_of(root / STEP).replace(old, new, 1))


def deep(content):
    content["values"]["epoch"] = json.loads("[" * 900 + "]" * 900)


def rename_file(content, name):
    content["files"][name] = content["files"].pop(FILE)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(Bomb.at),)


def bomb(path):
    Bomb.at = path.parent / "executed"
    path.write_bytes(pickle.dumps(Bomb()))


HUGE = 2**62
AT_2 = STEP.replace("3", "2")
FILES = {  # files of tensors
    "a bit": (lambda root: flip(root / STEP / FILE, -3), CORRUPT, f"{FILE} is damaged in bytes"),
    "a bit of a header": (lambda root: flip(root / STEP / FILE, 30), CORRUPT, f"{FILE} is damaged in bytes"),
    "the last byte is missing": (
        lambda root: truncate(root / STEP / FILE, (root / STEP / FILE).stat().st_size - 1),
        CORRUPT,
        f"{FILE} has .* bytes, but .* were written",
    ),
    "an empty file": (lambda root: truncate(root / STEP / FILE, 0), CORRUPT, f"{FILE} has 0 bytes"),
    "a file that grew": (lambda root: truncate(root / STEP / FILE, 1 << 40), CORRUPT, f"{FILE} has 1,099,5"),
    "no file": (lambda root: (root / STEP / FILE).unlink(), CORRUPT, f"{FILE} is missing"),
    "another rank's file": (
        lambda root: exchange(root / STEP / FILE, root / STEP / FILE.replace("0.", "1.")),
        CORRUPT,
        FILE,
    ),
    "a file of another step": (lambda root: shutil.copy(root / AT_2 / FILE, root / STEP / FILE), CORRUPT, FILE),
    "a pickle for a file": (lambda root: bomb(root / STEP / FILE), CORRUPT, FILE),
    "a link for a file": (lambda root: linked(root / STEP / FILE), UNSAFE, f"{FILE} is a symbolic link"),
    "a pipe for a file": (lambda root: become(root / STEP / FILE, os.mkfifo), UNSAFE, f"{FILE} is not a regular"),
    "a directory for a file": (lambda root: become(root / STEP / FILE, os.mkdir), UNSAFE, f"{FILE} is not a regular"),
}
BYTES = {  # the manifest as bytes
    "no manifest": (lambda root: (root / STEP / "manifest.json").unlink(), CORRUPT, "LATEST names step-00000003"),
    "an empty manifest": (lambda root: sized(root / STEP, 0), CORRUPT, "manifest.json"),
    "half a manifest": (lambda root: truncate(root / STEP / "manifest.json", 700), CORRUPT, "manifest.json"),
    "a manifest of zeros": (lambda root: sized(root / STEP, 1 << 20), CORRUPT, "manifest.json"),
    "a manifest of terabytes": (lambda root: sized(root / STEP, 1 << 41), UNSAFE, "manifest.json.* bytes"),
    "a bit of the manifest": (lambda root: flip(root / STEP / "manifest.json", 400), CORRUPT, "manifest.json"),
    "a pickle for the manifest": (lambda root: bomb(root / STEP / "manifest.json"), UNSAFE, "manifest.json.* pickle"),
    "a link for the manifest": (lambda root: linked(root / STEP / "manifest.json"), UNSAFE, "manifest.json"),
    "the manifest of another step": (
        lambda root: shutil.copy(root / AT_2 / "manifest.json", root / STEP / "manifest.json"),
        CORRUPT,
        "manifest.json.* step 2",
    ),
    "a number too many digits": (replaced(b'"step":3', b'"step":' + b"9" * 5000), CORRUPT, "manifest.json"),
    "nan": (replaced(b'"epoch":3', b'"epoch":NaN'), CORRUPT, "manifest.json.*NaN"),
    "a name twice": (replaced(b'"epoch":3', b'"epoch":3,"epoch":4'), CORRUPT, "manifest.json.*epoch"),
    "two manifests in one": (
        lambda root: seal(root / STEP, body_of(root / STEP) + b',"manifest":' + body_of(root / AT_2)),
        CORRUPT,
        "manifest.json",
    ),
    "deeply nested": (
        lambda root: seal(root / STEP, b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
        CORRUPT,
        "manifest.json",
    ),
    "deeply nested values": (manifest(deep), MISMATCH, "epoch: is nested too deeply"),
    "a list for a manifest": (lambda root: seal(root / STEP, b"[1]"), CORRUPT, "manifest.json"),
}
STATEMENTS = {  # top-level entries of the manifest
    "another format": (manifest(lambda c: c.update(format="dcp")), CORRUPT, "manifest.json is not the manifest"),
    "another version": (manifest(lambda c: c.update(version=2)), CORRUPT, "manifest.json has format version 2"),
    "no algorithm": (manifest(lambda c: c["checksums"].update(algorithm="none")), CORRUPT, "checksums: 'none'"),
    "blocks of no bytes": (manifest(lambda c: c["checksums"].update(block=0)), CORRUPT, "checksums: "),
    "no tensors": (manifest(lambda c: c.pop("tensors")), CORRUPT, "tensors"),
    "another step": (manifest(lambda c: c.update(step=4)), CORRUPT, "manifest.json.* step 4"),
    "a step that is not a number": (manifest(lambda c: c.update(step=True)), CORRUPT, "True is not a count"),
    "no ranks": (manifest(lambda c: c.update(ranks=0)), CORRUPT, "ranks"),
    "values of three ranks": (manifest(lambda c: c["per_rank"]["mine"].append(1)), CORRUPT, "mine has values of 3"),
    "per-rank values as a string": (manifest(lambda c: c["per_rank"].update(mine="ab")), CORRUPT, "mine"),
    "an alias of a missing tensor": (
        manifest(lambda c: c["aliases"].update(a="b")),
        CORRUPT,
        "alias a of b: b is not the key",
    ),
    "aliases in a circle": (
        manifest(lambda c: c["aliases"].update(a="b", b="a")),
        CORRUPT,
        "alias a of b: b is not the key",
    ),
    "an alias of itself": (manifest(lambda c: c["aliases"].update({KEY: KEY})), CORRUPT, f"alias {KEY} of"),
    "aliases as pairs": (manifest(lambda c: c.update(aliases=[["a", KEY]])), CORRUPT, "aliases"),
}
NAMES = {  # names of files
    **{
        f"a file called {name}": (manifest(lambda c, name=name: rename_file(c, name)), UNSAFE, re.escape(repr(name)))
        for name in (
            f"../{AT_2}/{FILE}",
            f"/tmp/{FILE}",
            "..",
            "",
            "evil.pkl",
            f"{FILE}\n",
            FILE.replace("0", "\u0660"),
        )
    },
    "a piece outside": (piece(0, f"../{AT_2}/{FILE}"), UNSAFE, rf"\.\./{AT_2}.*{KEY}"),
    "a piece of no file": (piece(0, "rank-00009.safetensors"), CORRUPT, f"{KEY}: .*rank-00009"),
    "a piece of a number": (piece(0, 5), CORRUPT, KEY),
}
DIGESTS = {  # digests
    "too few digests": (manifest(lambda c: c["files"][FILE].update(blocks="AAAA")), CORRUPT, FILE),
    "invalid digests": (manifest(lambda c: c["files"][FILE].update(blocks="§")), CORRUPT, FILE),
    "another checksum of a file": (manifest(lambda c: c["files"][FILE].update(checksum="0" * 16)), CORRUPT, FILE),
    "a file of a negative size": (manifest(lambda c: c["files"][FILE].update(size=-1)), CORRUPT, FILE),
    "a file of a huge size": (manifest(lambda c: c["files"][FILE].update(size=HUGE - 1)), CORRUPT, FILE),
}
PIECES = {  # tensors and their pieces
    "an unknown dtype": (entry("dtype", "float3"), CORRUPT, f"{KEY}.*float3"),
    "a dtype that is code": (entry("dtype", "__class__"), CORRUPT, f"{KEY}.*__class__"),
    "a negative extent": (entry("shape", [-8, -8]), CORRUPT, f"{KEY}.*-8"),
    "a product that overflows": (entry("shape", [2**61, 2**61]), CORRUPT, KEY),
    "a shape of floats": (entry("shape", [8.0, 8]), CORRUPT, f"{KEY}.*8.0"),
    "a shape as a string": (entry("shape", ""), CORRUPT, KEY),
    "a thousand dimensions": (entry("shape", [1] * 1000), CORRUPT, f"{KEY}.*1000 dimensions"),
    "a gap": (tensor(lambda saved: saved["pieces"].pop()), CORRUPT, f"{KEY}: its pieces do not cover it"),
    "an overlap": (piece(3, [4, 0]), CORRUPT, f"{KEY}: its pieces do not cover it"),
    "a piece outside of its tensor": (piece(3, [5, 0]), CORRUPT, f"{KEY} of shape .* has a piece outside"),
    "an offset beyond the file": (
        tensor(lambda saved: saved["pieces"][0].__setitem__(slice(1, 3), [HUGE - 256, HUGE - 128])),
        CORRUPT,
        f"{KEY}: rank-.* has no bytes",
    ),
    "an offset beyond 64 bits": (piece(1, 2**64), CORRUPT, KEY),
    "a negative offset": (piece(1, -128), CORRUPT, KEY),
    "an end before its begin": (piece(2, 0), CORRUPT, KEY),
    "bytes of another tensor": (manifest(point_to_the_bytes_of_another), CORRUPT, "share bytes of rank-0000"),
    "a wrong shape": (
        manifest(
            lambda c: (
                c["tensors"]["mean"].update(shape=[5, 1])
                or c["tensors"]["mean"]["pieces"][0].__setitem__(slice(3, 5), [[0, 0], [5, 1]])
            )
        ),
        MISMATCH,
        r"mean: has shape \(5,\) here, but \(5, 1\) in the checkpoint",
    ),
}
VALUES = {  # values
    "a value of an unknown type": (
        manifest(lambda c: c["values"].update(epoch={"$": "pickle", "value": "gASV"})),
        MISMATCH,
        "epoch.*'pickle'",
    ),
    "an array of objects": (
        manifest(
            lambda c: c["values"].update(epoch={"$": "numpy", "dtype": "|O", "shape": None, "value": "AAAAAAAAAAA="})
        ),
        MISMATCH,
        "epoch.*numpy",
    ),
    "an array of no elements": (
        manifest(lambda c: c["values"].update(epoch={"$": "numpy", "dtype": "<f4", "shape": None, "value": ""})),
        MISMATCH,
        "epoch.*numpy",
    ),
    "an invalid device": (
        manifest(lambda c: c["values"].update(epoch={"$": "device", "value": "evil"})),
        MISMATCH,
        "epoch.*device",
    ),
    "a number out of range": (
        manifest(lambda c: c["values"].update(epoch={"$": "float", "value": "0x1p99999"})),
        MISMATCH,
        "epoch.*float",
    ),
    "a missing tensor": (
        manifest(lambda c: c["values"]["counter"]["value"].update(trace={"$": "tensor", "key": "none"})),
        MISMATCH,
        "counter.*none.*no such tensor",
    ),
    "a generator with the state of something else": (
        manifest(lambda c: c["values"].update(order={"$": "generator", "key": "mean"})),
        MISMATCH,
        "order",
    ),
    "a module that is a list": (manifest(lambda c: c["values"].update(model=[])), MISMATCH, "model: is a module here"),
    "a module without its names": (manifest(lambda c: c["values"]["model"].pop("tensors")), MISMATCH, "model"),
    "a module with invalid names": (manifest(lambda c: c["values"]["model"].update(tensors=5)), MISMATCH, "model"),
    "an optimizer without groups": (
        manifest(lambda c: c["values"]["optimizer"].update(groups=[])),
        MISMATCH,
        "optimizer: has 1 parameter groups here, but 0",
    ),
    "an optimizer whose groups are numbers": (
        manifest(lambda c: c["values"]["optimizer"].update(groups=[1])),
        MISMATCH,
        "optimizer",
    ),
    "an optimizer without a learning rate": (
        manifest(lambda c: c["values"]["optimizer"]["groups"][0].pop("lr")),
        MISMATCH,
        "optimizer.param_groups.0.*lr",
    ),
    "an optimizer whose state is a number": (
        manifest(lambda c: c["values"]["optimizer"]["state"].update({KEY: 5})),
        MISMATCH,
        "optimizer",
    ),
}
DIRECTORY = {  # the directory
    "LATEST outside": (lambda root: (root / "LATEST").write_text("../x"), UNSAFE, r"LATEST names '\.\./x'"),
    "LATEST absolute": (lambda root: (root / "LATEST").write_text(str(root / STEP)), UNSAFE, "LATEST names '/"),
    "LATEST outside, cleverly": (
        lambda root: (root / "LATEST").write_text(f"{STEP}\n/../{STEP}"), UNSAFE, "LATEST names"
    ),
    "LATEST empty": (lambda root: (root / "LATEST").write_text(""), CORRUPT, "LATEST"),
    "LATEST of zeros": (lambda root: (root / "LATEST").write_bytes(b"\0" * 13), CORRUPT, "LATEST"),
    "LATEST large": (lambda root: truncate(root / "LATEST", 1 << 41), UNSAFE, "LATEST"),
    "LATEST of a deleted one": (lambda root: shutil.rmtree(root / STEP), CORRUPT, f"LATEST names {STEP}.*{AT_2}"),
    "LATEST a link": (lambda root: linked(root / "LATEST"), UNSAFE, "LATEST"),
    "LATEST a pipe": (lambda root: become(root / "LATEST", os.mkfifo), UNSAFE, "LATEST"),
    "LATEST a directory": (lambda root: become(root / "LATEST", os.mkdir), UNSAFE, "LATEST"),
    "a link for a checkpoint": (lambda root: linked(root / STEP), UNSAFE, f"{STEP} is a symbolic link"),
    "nothing": (shutil.rmtree, INCOMPLETE, "has no checkpoint"),
    "a file for the directory": (lambda root: become(root, os.mknod), INCOMPLETE, "has no checkpoint"),
}  # fmt: skip


def test_damaged_files_and_directories_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, FILES | BYTES | DIRECTORY)


def test_wrong_manifests_with_a_valid_checksum_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, STATEMENTS | NAMES | DIGESTS | PIECES | VALUES)


# ------------------------------------------------------------------------- mismatches, and errors of user objects


def another(**options):
    return lambda state: state.update(make_state(1, **options))


def other_optimizer(state):
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)


def fewer_groups(state):
    one, *others = state["model"].parameters()
    state["optimizer"] = torch.optim.AdamW([{"params": [one]}, {"params": others}])


def fails_on(rank):
    return lambda state: setattr(state["counter"], "fails_on", rank)


def raises(state):
    def state_dict():
        raise KeyError("lost")

    if dist.get_rank() == 1:
        state["counter"].state_dict = state_dict


UNFIT = {
    "a module of another shape": (
        another(width=6),
        {},
        MISMATCH,
        r"0\.weight: has shape \(8, 6\) here, but \(8, 8\) in",
    ),
    "a module of another dtype": (
        lambda state: state["model"][2].to(torch.float64),
        {},
        MISMATCH,
        "2.weight: has dtype float64 here, but float32 in the checkpoint; cast=True converts it",
    ),
    "a tensor of another dtype": (
        lambda state: state.update(mean=state["mean"].long()),
        {"cast": True},
        MISMATCH,
        "mean: has dtype int64 here, but float32",
    ),
    "a tensor of another shape": (
        lambda state: state.update(mean=torch.zeros(6)),
        {},
        MISMATCH,
        r"mean: has shape \(6",
    ),
    "a missing key": (
        lambda state: state["model"].add_module("more", nn.Linear(2, 2)),
        {},
        MISMATCH,
        "model.more.weight: is not in the checkpoint",
    ),
    "a key too many": (
        another(bias=False),
        {},
        MISMATCH,
        "model.2.bias: is in the checkpoint, but not in the state",
    ),
    "an entry too many": (lambda state: state.update(more=1), {}, MISMATCH, "more: the checkpoint has no such entry"),
    "an entry of another type": (
        lambda state: state.update(epoch=state["counter"]),
        {},
        MISMATCH,
        "epoch: is an object with a state dict here, but a value in",
    ),
    "a generator for a number": (
        lambda state: state.update(epoch=torch.Generator()),
        {},
        MISMATCH,
        "epoch: is a generator here",
    ),
    "another optimizer": (other_optimizer, {}, MISMATCH, r"optimizer.param_groups.0.momentum: .*another type of opt"),
    "other groups": (fewer_groups, {}, MISMATCH, "optimizer: has 2 parameter groups here, but 1 in"),
    "values that are not per rank": (
        lambda state: state.update(epoch=checkpoint.PerRank(1)),
        {},
        MISMATCH,
        "epoch: the checkpoint has no per-rank values",
    ),
    "no such step": (lambda state: None, {"step": 7}, INCOMPLETE, "no checkpoint of step 7; committed steps: 2, 3"),
    "a load that one rank refuses": (
        fails_on(1),
        {},
        cs.errors.CheckpointError,
        "rank 1: .*its load_state_dict raised",
    ),
    "a load that rank 0 refuses": (
        fails_on(0),
        {},
        cs.errors.CheckpointError,
        "rank 0: .*ValueError: the counter is stuck",
    ),
    "a state that one rank refuses": (
        raises,
        {},
        cs.errors.CheckpointError,
        "rank 1: counter: its state_dict raised Key",
    ),
}


def test_mismatches_are_named_on_all_ranks_and_change_nothing(saved):
    def load():
        results = []
        for change, options, _, _ in UNFIT.values():
            state = make_state(1)
            change(state)
            results.append(tried(saved, state, **options))
        return results

    by_rank = spmd(2, timeout=60)(lambda here: load())
    assert by_rank[0] == by_rank[1]
    for (case, (_, _, kind, text)), (raised, message) in zip(UNFIT.items(), by_rank[0], strict=True):
        assert raised is kind, (case, message)
        assert re.search(text, message, re.DOTALL), (case, message)


@simulated(world=2)
def test_different_arguments_or_states_raise_on_all_ranks(rank, world, tmp_path):
    def save(kind, text, **changes):
        arguments = {"directory": tmp_path, "state": {"x": 1, "t": torch.ones(2)}, "step": 5} | changes
        with pytest.raises(kind, match=text):
            checkpoint.save(**arguments)
        assert [*tmp_path.iterdir()] == []

    for name, value in {
        "step": 5 + rank,
        "directory": tmp_path / str(rank),
        "overwrite": rank == 0,
        "keep": 1 if rank else None,
    }.items():
        save(MISMATCH, f"^{name}: rank 0 calls save with .* and rank 1 with", **{name: value})
    only_1 = {"step": -1, "keep": 0}
    for name, value in only_1.items():
        save(cs.errors.ShardConfigValueError, f"rank 1: {name}: ", **({name: value} if rank else {}))
    save(cs.errors.ShardConfigTypeError, "rank 1: step: 'x' is a str", **({"step": "x"} if rank else {}))
    save(cs.errors.ShardConfigTypeError, "rank 1: directory: None", **({"directory": None} if rank else {}))
    save(cs.errors.ShardConfigTypeError, "rank 1: state: is a list", **({"state": []} if rank else {}))
    save(
        cs.errors.ShardConfigTypeError, "rank 1: x is a builtins.object", **({"state": {"x": object()}} if rank else {})
    )
    save(MISMATCH, "x is 0 on rank 0 and 1 on rank 1", state={"x": rank})
    save(MISMATCH, r"t is .*shape \(1,\).* on rank 0 and .*shape \(2,\).* on rank 1", state={"t": torch.ones(1 + rank)})
    loop = {}
    loop["x"] = loop
    save(cs.errors.ShardConfigValueError, "nested too deeply, or contains itself", state=loop)

    checkpoint.save(tmp_path, {"x": 1}, step=5)
    (tmp_path / "other").mkdir(exist_ok=True)
    for name, value in {
        "directory": tmp_path if rank else tmp_path / "other",
        "step": None if rank else 5,
        "strict": rank == 0,
        "cast": rank == 0,
        "verify": rank == 0,
    }.items():
        state = {"x": 0}
        with pytest.raises(MISMATCH, match=f"^{name}: rank 0 calls load with .* and rank 1 with"):
            checkpoint.load(**({"directory": tmp_path, "state": state} | {name: value}))
        assert state == {"x": 0}
    for change, text in (({"step": "x"}, "step: 'x'"), ({"state": 5}, "state: is a int"), ({"directory": 5}, "direc")):
        with pytest.raises(cs.errors.ShardConfigTypeError, match=f"rank 1: {text}"):
            checkpoint.load(**({"directory": tmp_path, "state": {"x": 0}} | (change if rank else {})))


def test_ranks_with_and_without_the_checksum_package_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "best", lambda: ("xxh3", "crc32")[rank_here()])

    def save(here):
        text = r'^checksum \("xxh3" needs the package xxhash\): rank 0 calls save with .xxh3. and rank 1 with .crc32.'
        with pytest.raises(MISMATCH, match=text):
            checkpoint.save(tmp_path, {"x": 1}, step=0)

    spmd(2)(save)
    assert [*tmp_path.iterdir()] == []


@simulated(world=2)
def test_a_checkpoint_that_could_not_be_loaded_is_not_committed(rank, world, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if rank == 0:
        model[1].weight = model[0].weight  # tied on one rank only
    with pytest.raises(cs.errors.CheckpointError, match=r"could not be loaded again.*alias model.1.weight of model.0"):
        checkpoint.save(tmp_path, {"model": model}, step=0)
    assert [*tmp_path.iterdir()] == []


def test_generators_in_user_state_dicts_are_loaded_as_generators(tmp_path):
    class Sampler:
        def __init__(self, seed):
            self.generator = torch.Generator().manual_seed(seed)

        def state_dict(self):
            return {"generator": self.generator}

        def load_state_dict(self, state):
            self.generator.set_state(state["generator"].get_state())

    def states(seed):
        nested = {"one": torch.Generator().manual_seed(seed + 1)}
        return {
            "sampler": Sampler(seed),
            "mine": checkpoint.PerRank(nested),
            "new": torch.Generator().manual_seed(seed),
        }

    state, other = states(0), states(5)
    kept = other["mine"].value["one"]
    checkpoint.save(tmp_path, state, step=0)
    checkpoint.load(tmp_path, other | {"new": None})
    checkpoint.load(tmp_path, other)
    assert other["mine"].value["one"] is kept
    for one, two in (
        (other["sampler"].generator, state["sampler"].generator),
        (kept, state["mine"].value["one"]),
        (other["new"], state["new"]),
    ):
        assert torch.equal(one.get_state(), two.get_state())


def test_a_missing_checksum_package_is_named(saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    directory = copy_of(saved, tmp_path, "run")
    rewrite(directory / STEP, lambda manifest: manifest["checksums"].update(algorithm="xxh3"))
    for read in (checkpoint.verify, lambda directory: checkpoint.load(directory, {"epoch": 0})):
        with pytest.raises(
            cs.errors.CheckpointError, match=r"manifest.json has checksums that need .*pip install xxhash"
        ):
            read(directory)


def test_an_uncommitted_save_is_not_a_checkpoint(saved, tmp_path):
    partial = copy_of(saved, tmp_path, "run") / ".step-00000003.tmp-3f"
    (tmp_path / "run" / STEP).rename(partial)
    for read in (checkpoint.verify, lambda directory: checkpoint.load(directory, {"epoch": 0})):
        with pytest.raises(INCOMPLETE, match="its save is running or was interrupted"):
            read(partial)


# ---------------------------------------------------------------------------------------------------- disk errors


def observing(monkeypatch, observe):
    monkeypatch.setattr(files, "observe", observe)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_at_any_operation_keeps_earlier_checkpoints(tmp_path, monkeypatch, failing):
    """Fail each operation of a save in turn on one rank, until a save has no more operations."""

    def save(fail_at):
        done = [0]

        def observe(operation, path):
            if dist.get_rank() != failing:
                return
            done[0] += 1
            if done[0] == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        observing(monkeypatch, observe)

        def job():
            state = {"t": torch.arange(6.0), "mine": checkpoint.PerRank(dist.get_rank()), "n": fail_at}
            try:
                checkpoint.save(tmp_path, state, step=7)
            except cs.errors.CheckpointError as error:
                return type(error), str(error)
            return None

        try:
            return spmd(2, timeout=60)(lambda here: job())
        finally:
            observing(monkeypatch, None)

    checkpoint.save(tmp_path, {"n": 0}, step=6)
    before = sorted(each.name for each in tmp_path.rglob("*"))
    fail_at = 1
    while (results := save(fail_at)) != [None, None]:
        assert results[0] == results[1]
        raised, message = results[0]
        assert raised is cs.errors.CheckpointError
        assert re.fullmatch(rf"rank {failing}: OSError: \[Errno 28\] No space left on device: '{tmp_path}.*'", message)
        names = sorted(each.name for each in tmp_path.rglob("*"))
        if checkpoint.latest(tmp_path) == 7:  # the last fsync: committed, but possibly not on disk
            assert message.endswith(f"{tmp_path}'")
            shutil.rmtree(tmp_path / "step-00000007")
            (tmp_path / "LATEST").write_text("step-00000006")
        else:
            assert names == before
        fail_at += 1
    assert fail_at > (14 if failing == 0 else 3)
    state = {"n": 0}
    assert checkpoint.load(tmp_path, state).step == 7
    assert state == {"n": fail_at}


def test_a_file_size_limit_raises_an_error_that_names_the_file(tmp_path):
    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        with pytest.raises(cs.errors.CheckpointError, match=rf"{FILE}") as caught:
            checkpoint.save(tmp_path, {"t": torch.zeros(1 << 20)}, step=1)
        assert "File too large" in str(caught.value)

    assert in_child(save) == 0
    assert [*tmp_path.iterdir()] == []


@pytest.mark.matrix
def test_a_read_error_on_one_rank_is_raised_on_all_ranks(saved, monkeypatch):
    """Fail each read of a load in turn. Only the last reads fill tensors, so only they can leave changes."""

    def load(fail_at):
        done = [0]

        def observe(operation, path):
            if operation not in ("open", "read") or path.name == "LATEST" or dist.get_rank() != 1:
                return
            done[0] += 1
            if done[0] == fail_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        observing(monkeypatch, observe)

        def job():
            state = make_state(1)
            before = content(state)
            try:
                checkpoint.load(saved, state)
            except cs.errors.CheckpointError as error:
                after = content(state)
                changed = {name for name in before if before[name] != after[name]}
                return str(error), changed
            return None

        try:
            return spmd(2, timeout=60)(lambda here: job())
        finally:
            observing(monkeypatch, None)

    fail_at, untouched = 1, 0
    while (results := load(fail_at))[0] is not None:
        assert results[0][0] == results[1][0]
        assert re.search(r"rank-0000\d.safetensors.*Input/output error|Input/output error.*rank-0000", results[0][0])
        changed = results[0][1] | results[1][1]
        assert bool(changed) <= ("only partly filled: load again" in results[0][0]), changed
        untouched += not changed
        assert all(name.startswith(("model.", "optimizer.", "mean")) for name in changed), changed
        fail_at += 9 if changed else 1
    assert untouched >= 4


# -------------------------------------------------------------------------------------------- kills during a save


def begin_child(work):
    """Start `work` in a child process. Its exit code is 0 if `work` returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads; the child uses none of them
        child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)  # OpenMP's threads do not exist in the child
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def in_child(work):
    """Run `work` in a child process, and return its exit code, which is negative for a signal."""
    return ended(begin_child(work))


def ended(child, limit_s=60):
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"a child did not end in {limit_s} s")


def die_at(number):
    """Kill this process at the given file operation."""
    done = [0]

    def observe(operation, path):
        done[0] += 1
        if done[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    files.observe = observe


def values(step, rank=0):
    tensors = {"large": torch.full((3 << 18,), float(step)), "small": torch.tensor(step)}
    return tensors | {"step": step, "mine": checkpoint.PerRank([rank, step])}


def see_whole(directory, steps):
    """Check that the latest checkpoint is one of these steps and is intact."""
    step = checkpoint.latest(directory)
    assert step in steps
    assert checkpoint.verify(directory).step == step
    state = {"large": torch.zeros(3 << 18), "small": torch.tensor(0), "step": 0}
    checkpoint.load(directory, state)
    assert state["step"] == state["small"].item() == step
    assert torch.equal(state["large"], torch.full((3 << 18,), float(step)))
    return step


SAVES = {  # arguments of the killed save, and the steps that may be the latest afterwards
    "another step": ({"step": 2}, {1, 2}),
    "the same step": ({"step": 1, "overwrite": True}, {1}),
    "one that prunes": ({"step": 2, "keep": 1}, {1, 2}),
    "the first": ({"step": 2}, {None, 2}),
}


def killed_save(directory, how, number):
    """Kill a save after step 1 at an operation, and check the latest checkpoint. Returns whether it was killed."""
    options, steps = SAVES[how]
    directory.mkdir()
    if how != "the first":
        checkpoint.save(directory, values(1), step=1)

    def save():
        die_at(number)
        checkpoint.save(directory, values(options["step"]), **options)

    code = in_child(save)
    assert code in (0, -signal.SIGKILL)
    if checkpoint.latest(directory) is None:
        assert None in steps
    else:
        see_whole(directory, steps)
    checkpoint.save(directory, values(2), step=2, overwrite=True)
    assert see_whole(directory, {2}) == 2
    checkpoint.save(directory, values(3), step=3, keep=1)
    assert sorted(each.name for each in directory.iterdir()) == ["LATEST", "step-00000003"]
    assert see_whole(directory, {3}) == 3
    return code != 0


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.matrix
def test_after_a_kill_at_any_operation_the_old_or_the_new_checkpoint_is_intact(tmp_path, how):
    number = 1
    while killed_save(tmp_path / str(number), how, number):
        number += 1
    assert number > 15


def test_after_a_kill_at_some_operations_the_old_or_the_new_checkpoint_is_intact(tmp_path):
    for number in (3, 9, 12, 13, 15, 17):
        assert killed_save(tmp_path / str(number), "one that prunes", number)


def two_killed(directory, victim, number):
    """Save in two processes and kill one of them. Returns the exit codes of both."""

    def rank(index):
        store = dist.FileStore(str(directory / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=30))
        checkpoint.save(directory / "run", values(1, index), step=1)
        dist.barrier()
        if index == victim:
            die_at(number)
        try:
            checkpoint.save(directory / "run", values(2, index), step=2, keep=1)
        except cs.errors.CheckpointError as error:
            os._exit(7 if f"rank {index} of 2 cannot reach the other ranks" in str(error) else 98)

    directory.mkdir()
    children = [begin_child(partial(rank, index)) for index in range(2)]
    codes = [ended(child) for child in children]
    see_whole(directory / "run", {1, 2})
    return codes


def see_two_killed(directory, victim, numbers):
    for number in numbers:
        codes = two_killed(directory / f"{victim}-{number}", victim, number)
        assert codes[victim] in (0, -signal.SIGKILL), (victim, number, codes)
        assert codes[1 - victim] in ((0, 7) if codes[victim] else (0,)), (victim, number, codes)
        if codes[victim] == 0:
            return number
    return None


def test_after_a_rank_is_killed_all_ranks_see_the_old_or_the_new_checkpoint(tmp_path):
    assert see_two_killed(tmp_path, 1, (2,)) is None
    assert see_two_killed(tmp_path, 0, (9,)) is None


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [0, 1])
def test_either_rank_may_be_killed_at_any_operation(tmp_path, victim):
    assert see_two_killed(tmp_path, victim, range(1, 40)) > (17 if victim == 0 else 3)


# ------------------------------------------------------------------------------------------------- power failures


class Disk:
    """The guaranteed on-disk state of a directory: content of files and names in directories after their fsync.

    `observe` is called before each operation, so the previous operation is complete at each call.
    """

    def __init__(self, root):
        self.root = root
        self.data = {}  # by inode: content of a file that is on disk
        self.names = {}  # by inode of a directory: its names on disk, with their inodes
        self.views = []  # for each operation: its name, and a tree that may be on disk before it
        self.synced = None
        self.learn(root)

    def learn(self, path):
        """Record everything below a path as on disk."""
        self.names[path.stat().st_ino] = self.listed(path)
        for each in path.iterdir():
            if each.is_dir():
                self.learn(each)
            else:
                self.data[each.stat().st_ino] = each.read_bytes()

    def listed(self, path):
        return {each.name: (each.stat().st_ino, each.is_dir()) for each in path.iterdir()}

    def observe(self, operation, path):
        if self.synced is not None:
            inode = self.synced.stat().st_ino
            if self.synced.is_dir():
                self.names[inode] = self.listed(self.synced)
            else:
                self.data[inode] = self.synced.read_bytes()
        self.synced = path if operation == "fsync" else None
        there = {self.root.stat().st_ino: self.listed(self.root)}
        there |= {each.stat().st_ino: self.listed(each) for each in self.root.rglob("*") if each.is_dir()}
        for names in (self.names, there, self.names | {self.root.stat().st_ino: there[self.root.stat().st_ino]}):
            self.views.append((f"{operation} {path.name}", self.tree(self.root.stat().st_ino, names)))

    def tree(self, inode, names):
        """The tree after a power failure, if these names but only synced data are on disk."""
        return {
            name: self.tree(each, names) if is_directory else self.data.get(each, b"")
            for name, (each, is_directory) in names.get(inode, {}).items()
        }


def laid_out(path, tree):
    path.mkdir()
    for name, each in tree.items():
        if isinstance(each, bytes):
            (path / name).write_bytes(each)
        else:
            laid_out(path / name, each)


def test_after_a_power_failure_at_any_operation_the_old_or_the_new_checkpoint_is_intact(tmp_path, monkeypatch):
    root = tmp_path / "run"
    checkpoint.save(root, values(1), step=1)
    disk = Disk(root)
    observing(monkeypatch, disk.observe)
    checkpoint.save(root, values(2), step=2, keep=1)
    observing(monkeypatch, None)
    disk.observe("end", root)
    steps, trees = [], []
    for number, (operation, tree) in enumerate(disk.views):
        if tree in trees:
            continue
        trees.append(tree)
        where = tmp_path / str(number)
        laid_out(where, tree)
        try:
            steps.append(see_whole(where, {1, 2}))
        except Exception as error:
            raise AssertionError(f"before {operation}: {error}") from error
        shutil.rmtree(where)
    assert steps[0] == 1
    assert 2 in steps, steps
    assert len(steps) > 7
    see_whole(root, {2})


@simulated(world=2)
def test_all_files_are_on_disk_before_the_directory_gets_its_name(rank, world, tmp_path):
    done = []
    if rank == 0:
        files.observe = lambda operation, path: done.append(f"{operation} {path.name}")
    try:
        checkpoint.save(tmp_path / "new" / "run", {"t": torch.ones(2), "mine": checkpoint.PerRank(rank)}, step=3)
        checkpoint.save(tmp_path / "new" / "run", {"x": 1}, step=4, keep=1)
    finally:
        dist.barrier()
        files.observe = None
    if rank == 1:
        return
    assert done[:4] == ["mkdir new", f"fsync {tmp_path.name}", "mkdir run", "fsync new"]
    order = [
        *(f"fsync rank-0000{index}.safetensors" for index in range(2)),
        "create manifest.json",
        "fsync manifest.json",
        "fsync .step-00000003",
        "fsync .LATEST.tmp",
        "rename step-00000003",
        "fsync run",
        "rename LATEST",
        "fsync run",
    ]
    first = done[: done.index("rename LATEST") + 2]
    at = 1  # the files of two ranks are synced in any order
    places = [next(i for i, each in enumerate(first) if each.startswith(name)) for name in order[:2]]
    at = max(places)
    for name in order[2:]:
        at += 1 + next(i for i, each in enumerate(first[at + 1 :]) if each.startswith(name))
    second = done[len(first) :]
    assert all(second.index("rename LATEST") < index for index, each in enumerate(second) if each.startswith("remove"))
    assert any(each.startswith("remove rank-") for each in second)
