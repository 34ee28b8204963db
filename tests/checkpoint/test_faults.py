"""Checkpoints that are spoilt, from disks that are full, by ranks that disagree or die: an error, or what was there"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

import composable_shard as cs
from checkpoint._faults import body_of, content, copy_of, make_state, rewrite, seal
from composable_shard import checkpoint
from composable_shard.testing import spmd

STEP, FILE = "step-00000003", "rank-00000.safetensors"
KEY = "model.0.weight"
CORRUPT, MISMATCH = cs.CheckpointCorruptError, cs.CheckpointMismatchError
UNSAFE, INCOMPLETE = cs.CheckpointUnsafeError, cs.CheckpointIncompleteError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints that two ranks have saved, of steps 2 and 3."""
    directory = tmp_path_factory.mktemp("saved")

    def save():
        for step in (2, 3):
            checkpoint.save(directory, make_state(step), step=step, checksum="xxh3")

    spmd(2)(lambda here: save())
    return directory


def tried(directory, state, **options):
    """Load what must not be loaded; gives the error, and sees that the state is what it was."""
    before = content(state)
    try:
        checkpoint.load(directory, state, **options)
    except Exception as error:
        assert content(state) == before, error
        return type(error), str(error)
    return None, "it was loaded"


def see_refused(saved, tmp_path, cases):
    """Spoil a copy for each case; what two ranks that load it raise, and `verify`, is as the case says."""
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
        if kind is not MISMATCH:  # needs no state to be seen
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
    return None, "it is whole"


# ------------------------------------------------------------------------------------------- spoilt directories


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
    """Move something away, and leave a link to it."""
    outside = path.with_name(f"{path.name}-elsewhere")
    path.rename(outside)
    path.symlink_to(outside)


def sized(path, size, name="manifest.json"):
    with (path / name).open("wb") as file:
        file.truncate(size)


def tensor(change):
    """Change what a manifest says of one tensor."""
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
    "the last byte is gone": (
        lambda root: truncate(root / STEP / FILE, (root / STEP / FILE).stat().st_size - 1),
        CORRUPT,
        f"{FILE} has .* bytes, and .* were written",
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
    "a pipe for a file": (lambda root: become(root / STEP / FILE, os.mkfifo), UNSAFE, f"{FILE} is not an ordinary"),
    "a directory for a file": (lambda root: become(root / STEP / FILE, os.mkdir), UNSAFE, f"{FILE} is not an ordinary"),
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
STATEMENTS = {  # what the manifest says of itself
    "another format": (manifest(lambda c: c.update(format="dcp")), CORRUPT, "manifest.json is not the manifest"),
    "another version": (manifest(lambda c: c.update(version=2)), CORRUPT, "manifest.json has version 2"),
    "no algorithm": (manifest(lambda c: c["checksums"].update(algorithm="none")), CORRUPT, "checksums: 'none'"),
    "blocks of no bytes": (manifest(lambda c: c["checksums"].update(block=0)), CORRUPT, "checksums: "),
    "no tensors": (manifest(lambda c: c.pop("tensors")), CORRUPT, "tensors"),
    "another step": (manifest(lambda c: c.update(step=4)), CORRUPT, "manifest.json.* step 4"),
    "a step that is none": (manifest(lambda c: c.update(step=True)), CORRUPT, "True is not a count"),
    "no ranks": (manifest(lambda c: c.update(ranks=0)), CORRUPT, "ranks"),
    "values by rank of three": (manifest(lambda c: c["per_rank"]["mine"].append(1)), CORRUPT, "mine has values of 3"),
    "values by rank as a string": (manifest(lambda c: c["per_rank"].update(mine="ab")), CORRUPT, "mine"),
    "aliases of nothing": (manifest(lambda c: c["aliases"].update(a="b")), CORRUPT, "a is said to be b"),
    "aliases in a circle": (manifest(lambda c: c["aliases"].update(a="b", b="a")), CORRUPT, "a is said to be b"),
    "an alias of itself": (manifest(lambda c: c["aliases"].update({KEY: KEY})), CORRUPT, f"{KEY} is said to be"),
    "aliases as pairs": (manifest(lambda c: c.update(aliases=[["a", KEY]])), CORRUPT, "aliases"),
}
NAMES = {  # names of files
    **{
        f"a file called {name}": (manifest(lambda c, name=name: rename_file(c, name)), UNSAFE, re.escape(repr(name)))
        for name in (f"../{AT_2}/{FILE}", f"/tmp/{FILE}", "..", "", "evil.pkl", f"{FILE}\n", "rank-٠٠٠٠٠.safetensors")
    },
    "a piece outside": (piece(0, f"../{AT_2}/{FILE}"), UNSAFE, rf"\.\./{AT_2}.*{KEY}"),
    "a piece of no file": (piece(0, "rank-00009.safetensors"), CORRUPT, f"{KEY}: .*rank-00009"),
    "a piece of a number": (piece(0, 5), CORRUPT, KEY),
}
DIGESTS = {  # digests
    "too few digests": (manifest(lambda c: c["files"][FILE].update(blocks="AAAA")), CORRUPT, FILE),
    "digests that are none": (manifest(lambda c: c["files"][FILE].update(blocks="§")), CORRUPT, FILE),
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
    "a gap": (tensor(lambda saved: saved["pieces"].pop()), CORRUPT, f"{KEY}: its pieces do not fill it"),
    "an overlap": (piece(3, [4, 0]), CORRUPT, f"{KEY}: its pieces do not fill it"),
    "a piece beyond": (piece(3, [5, 0]), CORRUPT, f"{KEY} of shape .* has a piece beyond"),
    "an offset beyond the file": (
        tensor(lambda saved: saved["pieces"][0].__setitem__(slice(1, 3), [HUGE - 256, HUGE - 128])),
        CORRUPT,
        f"{KEY}: a piece in bytes",
    ),
    "an offset beyond 64 bits": (piece(1, 2**64), CORRUPT, KEY),
    "a negative offset": (piece(1, -128), CORRUPT, KEY),
    "an end before the begin": (piece(2, 0), CORRUPT, KEY),
    "bytes of another tensor": (manifest(point_to_the_bytes_of_another), CORRUPT, "share bytes of rank-0000"),
    "a shape that does not fit": (
        manifest(
            lambda c: (
                c["tensors"]["mean"].update(shape=[5, 1])
                or c["tensors"]["mean"]["pieces"][0].__setitem__(slice(3, 5), [[0, 0], [5, 1]])
            )
        ),
        MISMATCH,
        r"mean: has shape \(5,\) here, and \(5, 1\) in the checkpoint",
    ),
}
VALUES = {  # values
    "a value of an unknown kind": (
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
    "a device that is none": (
        manifest(lambda c: c["values"].update(epoch={"$": "device", "value": "evil"})),
        MISMATCH,
        "epoch.*device",
    ),
    "a number out of range": (
        manifest(lambda c: c["values"].update(epoch={"$": "float", "value": "0x1p99999"})),
        MISMATCH,
        "epoch.*float",
    ),
    "a tensor that is not there": (
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
    "a module whose names are none": (manifest(lambda c: c["values"]["model"].update(tensors=5)), MISMATCH, "model"),
    "an optimizer without groups": (
        manifest(lambda c: c["values"]["optimizer"].update(groups=[])),
        MISMATCH,
        "optimizer: has 1 groups",
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
    "LATEST of what is gone": (lambda root: shutil.rmtree(root / STEP), CORRUPT, f"LATEST names {STEP}.*{AT_2}"),
    "LATEST a link": (lambda root: linked(root / "LATEST"), UNSAFE, "LATEST"),
    "LATEST a pipe": (lambda root: become(root / "LATEST", os.mkfifo), UNSAFE, "LATEST"),
    "LATEST a directory": (lambda root: become(root / "LATEST", os.mkdir), UNSAFE, "LATEST"),
    "a link for a checkpoint": (lambda root: linked(root / STEP), UNSAFE, f"{STEP} is a symbolic link"),
    "nothing": (shutil.rmtree, INCOMPLETE, "holds no checkpoint"),
    "a file for the directory": (lambda root: become(root, lambda path: path.write_text("")), INCOMPLETE, "holds no checkpoint"),
}  # fmt: skip


def test_spoilt_files_of_tensors_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, FILES)


def test_spoilt_manifests_as_bytes_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, BYTES)


def test_spoilt_what_a_manifest_says_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, STATEMENTS)


def test_spoilt_names_of_files_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, NAMES)


def test_spoilt_digests_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, DIGESTS)


def test_spoilt_tensors_and_their_pieces_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, PIECES)


def test_spoilt_values_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, VALUES)


def test_spoilt_directories_and_latest_are_refused(saved, tmp_path):
    see_refused(saved, tmp_path, DIRECTORY)
