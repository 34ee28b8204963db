"""Checkpoints in object stores: they load bit for bit, old or new, whatever fails on the way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load as dcp_load

from _pool import POOL, distributed, more, simulated
from checkpoint import _s3
from checkpoint.test_save_and_load import content, run, train
from composable_shard import checkpoint, errors
from composable_shard.checkpoint._describe import describe
from composable_shard.checkpoint._io import objects, requests
from composable_shard.checkpoint._io.objects import ObjectPath
from composable_shard.checkpoint._ranks import Ranks
from composable_shard.cli.main import main

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP, without other ranks

# s3fs is given the credentials by environment variables, as users do; see _s3.py.


@pytest.fixture(scope="module")
def server():
    made = _s3.S3()
    yield made.url
    made.close()


@pytest.fixture
def s3(server, request):
    """The URL of a server without rules."""
    _s3.reset(server)
    _s3.use(server)
    return server


@pytest.fixture
def where(request):
    """A directory in the bucket for this test."""
    return f"s3://{_s3.BUCKET}/{request.node.name.partition('[')[0]}-{abs(hash(request.node.name)) % 10**6}"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(requests, "_PAUSES", (0.01,))
    monkeypatch.setenv(requests.PATIENCE, "2")


def unfinished(where):
    path = ObjectPath(where)
    return path.requests.uploads(path.key)


def filled(where):
    """The names of all objects that are not empty: an empty manifest stays for a while and prevents late commits."""
    store = _s3.store()
    return [name for name in _s3.names(where[5:]) if store.size(f"{where[5:]}/{name}")]


def tensors(value=1.0):
    return {"t": torch.arange(1 << 18, dtype=torch.float32) * value, "epoch": int(value)}


def empty():
    return {"t": torch.zeros(1 << 18), "epoch": 0}


def assert_loads(where, value, **options):
    state = empty()
    loaded = checkpoint.load(where, state, **options)
    assert torch.equal(state["t"], tensors(value)["t"])
    assert state["epoch"] == int(value)
    return loaded


# ---- the same as in a directory


def saved_on_three(rank, world, url, where, directory):
    _s3.use(url)
    state = run(0)
    torch.manual_seed(100 + rank)
    train(state, rank, 3)
    path = checkpoint.save(where, state, step=3)
    assert str(path) == f"{where}/step-00000003-000001"
    assert str(checkpoint.save(directory, state, step=3)) == f"{directory}/step-00000003"
    pending = checkpoint.async_save(where, state, step=4)
    after = content(state)
    train(state, rank, 1)
    assert str(pending.result(60)) == f"{where}/step-00000004-000002"
    written, total = pending.progress
    assert written == total > 0
    return {name: tensor.numpy() for name, tensor in after.items() if tensor.dtype != torch.bfloat16}


def loaded_on_two(rank, world, url, where, expected):
    _s3.use(url)
    _s3.reset(url) if rank == 0 else None
    dist.barrier()
    state = run(1)
    loaded = checkpoint.load(where, {name: state[name] for name in ("model", "optimizer", "schedule", "data")})
    assert loaded.step == 4
    there = content(state)
    assert all(torch.equal(there[name], torch.from_numpy(value)) for name, value in expected.items())
    return loaded.bytes_read


def test_training_resumes_on_another_number_of_ranks(s3, where, tmp_path):
    expected = POOL.run(f"{__name__}:saved_on_three", 3, {"url": s3, "where": where, "directory": str(tmp_path)})[0]
    read = POOL.run(f"{__name__}:loaded_on_two", 2, {"url": s3, "where": where, "expected": expected})
    assert len(read) == 2
    assert checkpoint.latest(where) == 4
    assert checkpoint.verify(where).files == 3

    # The objects are the files of a directory: their bytes are equal, and a download of them can be loaded.
    _s3.store().get(where.removeprefix("s3://"), str(tmp_path / "downloaded"), recursive=True)
    assert checkpoint.verify(tmp_path / "downloaded").step == 4
    for rank in range(3):
        [ours] = (tmp_path / "downloaded" / "step-00000003-000001").glob(f"rank-{rank:05d}-*.safetensors")
        assert ours.read_bytes() == (tmp_path / "step-00000003" / f"rank-{rank:05d}.safetensors").read_bytes()


@distributed(world=2)
def test_each_rank_downloads_its_blocks_once(rank, world, s3, where):
    _s3.use(s3)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    size = 40 << 20  # more than two requests per rank
    one = torch.distributed.tensor.distribute_tensor(
        torch.arange(size // 4, dtype=torch.float32), mesh, [torch.distributed.tensor.Shard(0)]
    )
    other = torch.distributed.tensor.zeros(size // 4, device_mesh=mesh, placements=[torch.distributed.tensor.Shard(0)])
    checkpoint.save(where, {"t": one}, step=1)
    dist.barrier()
    if rank == 0:
        _s3.reset(s3)
    dist.barrier()
    checkpoint.load(where, {"t": other})
    assert torch.equal(one.to_local(), other.to_local())
    dist.barrier()
    if rank == 0:
        got = [
            (path, span, count) for method, path, _, span, count in _s3.seen(s3) if method == "GET" and "rank-" in path
        ]
        assert all(span for _, span, _ in got), "no file is read as a whole"
        assert sum(count for _, _, count in got) <= size + 2 * (1 << 20)
        assert len(got) <= 2 * 3, "neighboring blocks are read together"
    dist.barrier()


def test_saves_are_numbered_and_the_last_one_is_the_latest(s3, where):
    for number, step in enumerate((1, 2, 3, 2), 1):  # resumed from step 1 before the last save
        options = {"overwrite": True} if number == 4 else {}
        path = checkpoint.save(where, tensors(number), step=step, **options)
        assert path.name == f"step-{step:08d}-{number:06d}"
    assert checkpoint.latest(where) == 2
    assert_loads(where, 4)
    assert_loads(where, 4, step=2)
    assert_loads(where, 3, step=3)
    assert_loads(f"{where}/step-00000002-000002", 2)
    checkpoint.save(where, tensors(5), step=3)  # higher than the latest: replaced without `overwrite`
    assert_loads(where, 5)
    with pytest.raises(errors.ShardConfigValueError, match=f"{where} already has a checkpoint of step 3"):
        checkpoint.save(where, tensors(), step=3)
    info = describe(where)
    assert (info.committed, info.latest, info.partial) == ((1, 2, 2, 3, 3), 3, ())
    removed = checkpoint.prune(where, keep=1)
    assert [str(path) for path in removed] == [
        f"{where}/step-{each}" for each in ("00000001-000001", "00000002-000002", "00000003-000003", "00000002-000004")
    ]
    assert [each.partition("/")[0] for each in _s3.names(where[5:])] == ["step-00000003-000005"] * 2
    with pytest.raises(errors.CheckpointIncompleteError, match=r"has no checkpoint of step 1; committed steps: 3"):
        checkpoint.load(where, empty(), step=1)
    with pytest.raises(errors.CheckpointIncompleteError, match="has no checkpoint; committed steps: none"):
        checkpoint.load(f"{where}/nothing", empty())
    assert checkpoint.latest(f"{where}/nothing") is None


# ---- what fails


@pytest.mark.parametrize("what", ["error", "cut", "lost", "busy"])
@pytest.mark.parametrize(
    ("method", "parts"),
    [("POST", ["uploads"]), ("PUT", ["partNumber=2"]), ("POST", ["uploadId"]), ("PUT", ["manifest.json"])],
    ids=["begin", "part", "finish", "manifest"],
)
def test_requests_that_fail_for_a_while_are_repeated(s3, where, impatient, monkeypatch, what, method, parts):
    monkeypatch.setattr(objects, "_PART", 5 << 20)  # the smallest part that S3 accepts
    state = {"t": torch.arange(3 << 20, dtype=torch.float32)}
    if what == "busy":  # s3fs repeats such a request itself, which would send an empty body
        _s3.fail(s3, "error", *parts, method=method, times=7, status=503, code="SlowDown")
    else:
        _s3.fail(s3, what, *parts, method=method)
    checkpoint.save(where, state, step=1)
    other = {"t": torch.zeros(3 << 20)}
    checkpoint.load(where, other)
    assert torch.equal(state["t"], other["t"])
    [data, manifest] = _s3.names(where[5:])
    assert manifest.endswith("/manifest.json") or data.endswith("/manifest.json")


@pytest.mark.parametrize("what", ["error", "truncated", "cut", "slow"])
def test_reads_that_fail_for_a_while_are_repeated(s3, where, impatient, what):
    checkpoint.save(where, tensors(2), step=1)
    _s3.fail(s3, what, "rank-", method="GET", times=2, seconds=0.2)
    _s3.fail(s3, what, "manifest", method="GET", seconds=0.2)
    assert_loads(where, 2)


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(s3, where, impatient, monkeypatch, call):
    checkpoint.save(where, tensors(1), step=1)
    before = _s3.names(where[5:])
    _s3.fail(s3, "error", "rank-", method="PUT", times=10**6)
    started = time.monotonic()
    saves = {
        "save": lambda: checkpoint.save(where, tensors(2), step=2),
        "async_save": lambda: checkpoint.async_save(where, tensors(2), step=2).result(120),
    }
    with pytest.raises(
        errors.CheckpointError, match=r"cannot write it for \d+ s .*try again.*rank-00000-\w+\.safetensors"
    ):
        saves[call]()
    assert time.monotonic() - started < 100
    _s3.reset(s3)
    assert _s3.names(where[5:]) == before
    assert_loads(where, 1)
    checkpoint.save(where, tensors(3), step=2)
    assert_loads(where, 3)


def test_damaged_missing_and_other_objects_are_named(s3, where):
    checkpoint.save(where, tensors(), step=1)
    store = _s3.store()
    [name] = [name for name in store.find(where[5:]) if "rank-" in name]
    data = store.cat_file(name)
    for content_, match in (
        (data[:-1], f"{name} has {len(data) - 1:,} bytes, but {len(data):,} were written"),
        (data[: 1 << 19] + b"\x55" + data[(1 << 19) + 1 :], f"{name} is damaged in bytes 0 to 1,048,576: t"),
    ):
        store.pipe_file(name, content_)
        state = empty()
        with pytest.raises(errors.CheckpointCorruptError, match=match):
            checkpoint.load(where, state)
        with pytest.raises(errors.CheckpointCorruptError, match=match):
            checkpoint.verify(where)
        assert not state["t"].any()
    store.rm_file(name)
    with pytest.raises(errors.CheckpointCorruptError, match=f"s3://{name} is missing"):
        checkpoint.load(where, empty())
    _s3.fail(s3, "error", "manifest.json", method="GET", times=10**6, status=403, code="AccessDenied", text="no")
    with pytest.raises(errors.CheckpointError, match=r"manifest\.json cannot be read: .*AccessDenied"):
        checkpoint.load(where, empty())


SCRIPT = """
    import sys, torch
    from composable_shard import checkpoint
    state = {{"t": torch.full((10 << 20,), {value}.0)}}
    def said(call):
        try:
            return call()
        except Exception as error:
            return f"{{type(error).__name__}} {{error}}"
    print("begins", flush=True)
    {call}
    print("ended", flush=True)
"""


def start(url, value, call):
    script = textwrap.dedent(SCRIPT.format(value=value, call=call))
    environment = {**os.environ, **_s3.settings(url), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


def until(condition, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "call", [more("checkpoint.save({!r}, state, step=2)"), "checkpoint.async_save({!r}, state, step=2).result()"]
)
@pytest.mark.parametrize("at", [more("partNumber=3"), "manifest.json"])
def test_a_process_killed_during_an_upload_costs_nothing(s3, where, at, call):
    checkpoint.save(where, {"t": torch.full((10 << 20,), 1.0)}, step=1)
    _s3.reset(s3)
    _s3.fail(s3, "slow", at, method="PUT", times=10**6, seconds=3.0)
    process = start(s3, 2, call.format(where))
    try:
        pattern = "partNumber=2" if at.startswith("part") else "rank-"
        until(lambda: any(pattern in f"{path}?{query}" for m, path, query, *_ in _s3.seen(s3) if m == "PUT"))
    finally:
        process.kill()
        process.communicate(timeout=30)
    time.sleep(4)  # requests on the way end
    _s3.reset(s3)
    state = {"t": torch.zeros(10 << 20)}
    loaded = checkpoint.load(where, state)
    assert state["t"].eq(loaded.step).all()
    if at != "manifest.json":
        assert loaded.step == 1
        assert unfinished(where), "parts of the upload are in the store"
    checkpoint.prune(where, keep=1)
    assert unfinished(where) == []
    assert len(filled(where)) == 2
    checkpoint.load(where, state)
    assert state["t"].eq(loaded.step).all()


@pytest.mark.matrix
def test_of_two_jobs_that_save_a_step_at_the_same_time_one_gets_an_error(s3, where):
    checkpoint.save(where, {"t": torch.zeros(10 << 20)}, step=1)
    _s3.fail(s3, "slow", "manifest.json", method="PUT", times=2, seconds=1.5)
    call = "print(said(lambda: checkpoint.save({!r}, state, step=2)))"
    jobs = [start(s3, value, call.format(where)) for value in (2, 3)]
    said = [job.communicate(timeout=120)[0] for job in jobs]
    failed = [index for index, text in enumerate(said) if "CheckpointError" in text]
    numbers = {line.rpartition("-")[2] for text in said for line in text.splitlines() if line.startswith("s3://")}
    state = {"t": torch.zeros(10 << 20)}
    checkpoint.load(where, state)
    values = state["t"].unique().tolist()
    assert len(values) == 1, "never a mix"
    if numbers == {"000002"}:  # both took the same number
        [loser] = failed
        assert "another job has committed" in said[loser]
        assert values == [3.0 - loser]
        assert len([name for name in _s3.names(where[5:]) if "000002" in name]) == 2, "its files are deleted"
    else:  # the second began when the first had ended
        assert numbers == {"000002", "000003"} or "already has a checkpoint of step 2" in "".join(said)


def test_a_job_that_is_killed_at_the_commit_of_another_one_leaves_files_that_prune_removes(s3, where):
    checkpoint.save(where, tensors(1), step=1)
    store = _s3.store()
    left = f"{where[5:]}/step-00000001-000001/rank-00000-abcdef123456.safetensors"
    store.pipe_file(left, b"of another job")
    assert_loads(where, 1)
    assert [str(path) for path in checkpoint.prune(where, keep=1)] == [f"s3://{left}"]
    assert_loads(where, 1)


def test_no_message_contains_credentials(s3, where, impatient, monkeypatch, caplog):
    monkeypatch.setenv(requests.PATIENCE, "0.1")
    checkpoint.save(where, tensors(), step=1)
    text = f"key={_s3.SECRET} is wrong: https://user:{_s3.SECRET}@host/?X-Amz-Signature=0123456789abcdef"
    for status, code in ((403, "AccessDenied"), (500, "InternalError"), (400, "Whatever")):
        _s3.reset(s3)
        _s3.fail(s3, "error", "rank-", times=10**6, status=status, code=code, text=text)
        for call in (
            lambda: checkpoint.save(where, tensors(), step=2),
            lambda: checkpoint.async_save(where, tensors(), step=2).result(60),
            lambda: checkpoint.load(where, empty()),
        ):
            with pytest.raises(errors.CheckpointError) as caught:
                call()
            said = "".join(map(str, _chain(caught.value)))
            assert _s3.SECRET not in said
            assert "0123456789abcdef" not in said
    assert "trying again" in caplog.text
    assert _s3.SECRET not in caplog.text


def _chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# ---- other libraries, other stores, commands


@ALONE
def test_exports_and_imports(s3, where, tmp_path):
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))
    other = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()

    def assert_same_and_forget():
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
            two.data.zero_()

    hub = checkpoint.export_safetensors(
        f"{where}/hub", model, max_shard_size=250_000, extra_files={"config.json": "{}"}
    )
    assert str(hub) == f"{where}/hub"
    assert len(_s3.names(f"{where[5:]}/hub")) == 2 + 2
    checkpoint.import_safetensors(hub, other)
    assert_same_and_forget()
    checkpoint.export_safetensors(f"{where}/one", model)
    checkpoint.import_safetensors(f"{where}/one/model.safetensors", other)
    assert_same_and_forget()
    with pytest.raises(errors.ShardConfigValueError, match=f"path: {where}/hub has files"):
        checkpoint.export_safetensors(hub, model)

    state = {"model": model, "optimizer": optimizer}
    dcp = checkpoint.export_dcp(f"{where}/dcp", state)
    wanted = {"model": other.state_dict()}
    dcp_load(wanted, storage_reader=FsspecReader(str(dcp)), no_dist=True)
    assert_same_and_forget()
    moments = torch.optim.AdamW(other.parameters())
    _s3.reset(s3)
    checkpoint.import_dcp(dcp, {"model": other, "optimizer": moments})
    assert_same_and_forget()
    assert len(_s3.seen(s3)) < 100
    for one, two in zip(optimizer.state.values(), moments.state.values(), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)

    # An export that is interrupted is not a model.
    for export in (
        lambda: checkpoint.export_safetensors(f"{where}/cut", model),
        lambda: checkpoint.export_dcp(f"{where}/cut", state),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(requests.PATIENCE, "0")
            _s3.fail(s3, "error", "/cut/", ".safetensors", method="PUT", times=10**6)
            _s3.fail(s3, "error", "/cut/", ".distcp", method="PUT", times=10**6)
            with pytest.raises(errors.CheckpointError, match="could not be written"):
                export()
        _s3.reset(s3)
        assert _s3.names(f"{where[5:]}/cut") == []
    _s3.store().pipe_file(f"{where[5:]}/killed/.unfinished", b"1")
    _s3.store().pipe_file(
        f"{where[5:]}/killed/model.safetensors", _s3.store().cat_file(f"{where[5:]}/one/model.safetensors")
    )
    with pytest.raises(errors.CheckpointIncompleteError, match="an export is running or was interrupted"):
        checkpoint.import_safetensors(f"{where}/killed", other)


@distributed(world=2)
def test_ranks_export_and_import_together(rank, world, s3, where):
    _s3.use(s3)
    model = run(0)["model"]
    checkpoint.export_dcp(f"{where}/dcp", {"model": model})
    checkpoint.export_safetensors(f"{where}/hub", model)
    for load in (
        lambda other: checkpoint.import_dcp(f"{where}/dcp", {"model": other}),
        lambda other: checkpoint.import_safetensors(f"{where}/hub", other),
    ):
        other = run(1)["model"]
        load(other)
        ours, loaded = checkpoint.full_state_dict(model), checkpoint.full_state_dict(other)
        assert ours.keys() == loaded.keys()
        assert all(torch.equal(ours[name], loaded[name]) for name in ours)


@ALONE
@pytest.mark.parametrize("url", ["memory://run-{}", "file://{}"])
def test_other_urls(tmp_path, url):
    where = url.format(tmp_path)
    for step in (1, 2):
        path = checkpoint.save(where, tensors(step), step=step)
    assert_loads(where, 2)
    assert_loads(path, 2)
    assert_loads(os.fspath(path), 2)
    checkpoint.async_save(where, tensors(3), step=3, keep=1).result(60)
    assert_loads(where, 3)
    assert describe(where).committed == (3,)
    model = torch.nn.Linear(3, 3)
    checkpoint.import_safetensors(checkpoint.export_safetensors(f"{where}/hub", model), model)
    checkpoint.import_dcp(checkpoint.export_dcp(f"{where}/dcp", {"model": model}), {"model": model})
    assert isinstance(path, Path if url.startswith("file") else ObjectPath)


@distributed(world=2)
def test_a_store_that_ranks_do_not_share_is_refused(rank, world):
    with pytest.raises(errors.CheckpointError, match=r"rank-00001-\w+\.safetensors is missing, .*the same store"):
        checkpoint.save("memory://apart", {"a": torch.ones(3), "b": torch.ones(3)}, step=1)


@simulated(world=3)
def test_simulated_ranks_share_memory(rank, world):
    checkpoint.save(
        "memory://simulated", {"mine": checkpoint.PerRank(rank), "t": torch.ones(5)}, step=1, overwrite=True
    )
    state = {"mine": checkpoint.PerRank(0), "t": torch.zeros(5)}
    checkpoint.load("memory://simulated", state)
    assert state["t"].all()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (Path("s3://bucket/run"), "directory: s3:/bucket/run is a URL that pathlib has changed; pass the URL as a str"),
        ("simplecache::s3://bucket/run", "directory: simplecache::s3://bucket/run: chained URLs"),
        ("s3://user:password@bucket/run?secret=1", "directory: s3://bucket/run: chained URLs and URLs with options"),
        ("none://bucket/run", "directory: Protocol not known: none"),
        ("s3://", "directory: s3:// names no bucket"),
    ],
)
def test_urls_that_are_not_supported_are_refused(given, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: checkpoint.save(given, {}, step=1),
        lambda: checkpoint.load(given, {}),
        lambda: checkpoint.latest(given),
    ):
        with pytest.raises(errors.ShardConfigValueError, match=match):
            call()
    assert [*tmp_path.iterdir()] == []


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        errors.ShardConfigUnsupportedError, match=r"directory: s3:// needs fsspec .*pip install .*\[remote\]"
    ):
        checkpoint.latest("s3://bucket/run")


def test_commands_take_urls(s3, where, capsys):
    for step in (1, 2):
        model = torch.nn.Linear(3, 3)
        checkpoint.save(where, {"model": model}, step=step)

    def called(*arguments):
        assert main(["checkpoint", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert called("verify", where)["path"] == f"{where}/step-00000002-000002"
    assert called("info", where)["committed"] == [1, 2]
    assert called("export", where, f"{where}/hub")["path"] == f"{where}/hub"
    other = torch.nn.Linear(3, 3)
    checkpoint.import_safetensors(f"{where}/hub", other)
    assert torch.equal(model.weight, other.weight)
    assert called("prune", where, "--keep", "1")["removed"] == [f"{where}/step-00000001-000001"]
    assert main(["checkpoint", "verify", f"{where}/none"]) == 1
    assert "has no checkpoint" in capsys.readouterr().err
    assert threading.active_count() < 100


@pytest.mark.matrix
def test_a_stalled_server_is_not_waited_for_forever(s3, where):
    """s3fs ends a request after 15 s without an answer; it is repeated."""
    checkpoint.save(where, tensors(2), step=1)
    _s3.fail(s3, "slow", "rank-", method="GET", seconds=40)
    started = time.monotonic()
    assert_loads(where, 2)
    assert time.monotonic() - started < 35


def test_the_writer_process_uses_new_credentials(s3, where, monkeypatch):
    """Its environment is that of the training process at the time of the save, not at that of its start."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    _s3.store().clear_instance_cache()
    with pytest.raises(errors.CheckpointError, match="Unable to locate credentials"):
        checkpoint.async_save(where, tensors(1), step=1).result(60)
    monkeypatch.undo()
    _s3.store().clear_instance_cache()
    checkpoint.async_save(where, tensors(2), step=2).result(60)
    assert_loads(where, 2)


@pytest.mark.parametrize("given", ["two minutes", "-1", "nan", "inf"])
def test_a_time_that_is_not_a_number_of_seconds_is_refused(monkeypatch, given):
    monkeypatch.setenv(requests.PATIENCE, given)
    with pytest.raises(errors.CheckpointError, match=rf"{requests.PATIENCE}='{given}' is not a time in seconds"):
        checkpoint.save("memory://refused", tensors(), step=1)


# ---- commits that are interrupted


def assert_whole(where, *values):
    """The latest checkpoint is whole, and is one of these."""
    state = empty()
    checkpoint.load(where, state)
    assert state["epoch"] in values
    assert torch.equal(state["t"], tensors(state["epoch"])["t"])
    return state["epoch"]


def test_a_commit_whose_answer_is_lost_is_kept_if_the_store_is_not_reached_again(s3, where, impatient, monkeypatch):
    checkpoint.save(where, tensors(1), step=1)
    monkeypatch.setenv(requests.PATIENCE, "0")
    _s3.fail(s3, "lost", "manifest.json", method="PUT")
    _s3.fail(s3, "error", "manifest.json", times=10**6)
    with pytest.raises(errors.CheckpointError, match=r"may be committed or not.*manifest\.json"):
        checkpoint.save(where, tensors(2), step=2)
    _s3.reset(s3)
    assert assert_whole(where, 2) == 2


def test_a_commit_whose_answer_is_lost_is_a_success(s3, where, impatient, monkeypatch):
    monkeypatch.setenv(requests.PATIENCE, "0")
    _s3.fail(s3, "lost", "manifest.json", method="PUT")
    assert checkpoint.save(where, tensors(2), step=2).name == "step-00000002-000001"
    assert_loads(where, 2)


def test_a_commit_that_fails_is_prevented(s3, where, impatient, monkeypatch):
    """Its request may be still on the way when the files are deleted."""
    checkpoint.save(where, tensors(1), step=1)
    monkeypatch.setenv(requests.PATIENCE, "0")
    _s3.fail(s3, "error", "manifest.json", method="PUT")
    with pytest.raises(errors.CheckpointError, match=r"manifest\.json"):
        checkpoint.save(where, tensors(2), step=2)
    left = f"{where[5:]}/step-00000002-000002/manifest.json"
    assert [name for name in _s3.names(where[5:]) if "000002" in name] == [left.removeprefix(f"{where[5:]}/")]
    assert _s3.store().cat_file(left) == b""
    assert assert_whole(where, 1) == 1
    assert describe(where).partial == ("step-00000002-000002",)
    checkpoint.save(where, tensors(3), step=2, keep=1)
    assert assert_whole(where, 3) == 3
    assert {name.partition("/")[0] for name in _s3.names(where[5:])} == {"step-00000002-000003"}


def test_nothing_is_deleted_after_a_commit(s3, where, monkeypatch):
    checkpoint.save(where, tensors(1), step=1)
    create, first_alone = objects.create_file, Ranks.first_alone

    def interrupted(path, data):
        create(path, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(objects, "create_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(where, tensors(2), step=2)
    assert assert_whole(where, 2) == 2

    def lost(ranks, work):
        first_alone(ranks, work)
        if "commit" in work.__name__:
            raise errors.CheckpointError("rank 1 has died")

    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "first_alone", lost)
        with pytest.raises(errors.CheckpointError, match="has died"):
            checkpoint.save(where, tensors(3), step=3)
    assert assert_whole(where, 3) == 3


@pytest.mark.parametrize("answers", [("lost", 412), (501,)], ids=str)
def test_answers_of_other_servers_to_conditional_writes_are_understood(s3, where, impatient, answers):
    for each in answers:
        if each == "lost":
            _s3.fail(s3, "lost", "manifest.json", method="PUT")
        else:
            code = {412: "PreconditionFailed", 501: "NotImplemented"}[each]
            _s3.fail(s3, "error", "manifest.json", method="PUT", status=each, code=code)
    checkpoint.save(where, tensors(2), step=1)
    assert_loads(where, 2)


def test_prune_keeps_a_save_that_is_committed_meanwhile(s3, where, monkeypatch):
    checkpoint.save(where, tensors(1), step=1)
    checkpoint.save(where, tensors(2), step=2)
    sizes = objects.sizes

    def earlier(path):  # the listing of a moment before the commit of the second save
        monkeypatch.setattr(objects, "sizes", sizes)
        return {name: size for name, size in sizes(path).items() if name != "step-00000002-000002/manifest.json"}

    monkeypatch.setattr(objects, "sizes", earlier)
    assert checkpoint.prune(where, keep=1) == []
    assert_loads(where, 2)


@pytest.mark.parametrize("later", [False, True])
def test_a_save_that_another_job_prunes_before_its_commit_is_an_error(s3, where, monkeypatch, later):
    """Also if this job was stopped for so long that the empty manifest, which prevents the commit, is deleted."""
    checkpoint.save(where, tensors(1), step=1)
    create = objects.create_file

    def pruned(path, data):
        monkeypatch.setattr(objects, "create_file", create)
        assert [path.name for path in checkpoint.prune(where, keep=1)] == ["step-00000002-000002"]
        if later:
            checkpoint.save(where, tensors(3), step=3)
            assert [path.name for path in checkpoint.prune(where, keep=2)] == ["step-00000002-000002"]
        create(path, data)

    monkeypatch.setattr(objects, "create_file", pruned)
    match = "is missing, so the checkpoint is not committed" if later else "another job has committed or pruned"
    with pytest.raises(errors.CheckpointError, match=match):
        checkpoint.save(where, tensors(2), step=2)
    assert_loads(where, 3 if later else 1)
    assert len(filled(where)) == (4 if later else 2)
    assert describe(where).committed == ((1, 3) if later else (1,))


def test_a_commit_that_arrives_after_a_prune_has_no_effect(s3, where, impatient, monkeypatch):
    checkpoint.save(where, tensors(1), step=1)
    kept = []
    create = objects.create_file

    def held(path, data):
        kept.append((path, data))
        raise OSError(5, "the answer is lost", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(objects, "create_file", held)
        with pytest.raises(errors.CheckpointError, match="may be committed or not"):
            checkpoint.save(where, tensors(2), step=2)
    path, data = kept[0]
    assert [each.name for each in checkpoint.prune(where, keep=1)] == ["step-00000002-000002"]
    assert checkpoint.prune(where, keep=1) == []
    with pytest.raises(FileExistsError):
        create(path, data)
    assert_loads(where, 1)
    assert checkpoint.save(where, tensors(3), step=2).name == "step-00000002-000003", "no number is used again"
    assert [each.name for each in checkpoint.prune(where, keep=2)] == ["step-00000002-000002"]
    assert len(_s3.names(where[5:])) == 4


def test_a_checkpoint_that_is_deleted_between_its_choice_and_its_read_is_replaced(s3, where, monkeypatch):
    from composable_shard.checkpoint._format import commits

    checkpoint.save(where, tensors(1), step=1)
    read = commits.manifest_bytes

    def later(path):
        monkeypatch.setattr(commits, "manifest_bytes", read)
        checkpoint.save(where, tensors(2), step=2, keep=1)
        return read(path)

    monkeypatch.setattr(commits, "manifest_bytes", later)
    assert_loads(where, 2)


def test_a_copy_with_an_empty_manifest_is_no_checkpoint(s3, where, tmp_path, impatient, monkeypatch):
    checkpoint.save(where, tensors(1), step=1)
    monkeypatch.setenv(requests.PATIENCE, "0")
    _s3.fail(s3, "error", "manifest.json", method="PUT")
    with pytest.raises(errors.CheckpointError):
        checkpoint.save(where, tensors(2), step=2)
    _s3.store().get(where[5:], str(tmp_path / "copy"), recursive=True)
    assert checkpoint.latest(tmp_path / "copy") == 1
    assert_loads(tmp_path / "copy", 1)


def test_a_prune_that_is_interrupted_leaves_whole_checkpoints(s3, where, monkeypatch):
    for step in (1, 2, 3):
        checkpoint.save(where, tensors(step), step=step)
    delete = requests.S3Requests.delete
    left = 1

    def interrupted(self, key):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        delete(self, key)

    monkeypatch.setattr(requests.S3Requests, "delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.prune(where, keep=1)
    monkeypatch.undo()
    assert describe(where).committed == (2, 3)
    assert describe(where).partial == ("step-00000001-000001",)
    assert_loads(where, 3)
    with pytest.raises(errors.CheckpointIncompleteError, match="no checkpoint of step 1; committed steps: 2, 3"):
        checkpoint.load(where, empty(), step=1)
    assert len(checkpoint.prune(where, keep=1)) == 2
    assert len(_s3.names(where[5:])) == 2


def test_the_interpreter_waits_for_a_save(s3, where):
    """Executors, which uploads and the lookup of a host's name need, end before other threads at an exit."""
    checkpoint.save(where, {"t": torch.ones(10)}, step=1)
    _s3.fail(s3, "slow", "partNumber=2", method="PUT", seconds=2.0)
    job = start(s3.replace("127.0.0.1", "localhost"), 2, f"checkpoint.async_save({where!r}, state, step=2, keep=1)")
    assert "ended" in job.communicate(timeout=120)[0]
    assert job.returncode == 0
    state = {"t": torch.zeros(10 << 20)}
    assert checkpoint.load(where, state).step == 2
    assert state["t"].eq(2).all()
    assert describe(where).committed == (2,)


# ---- requests


@pytest.mark.matrix
def test_a_request_is_not_repeated_by_several_libraries(s3, where, monkeypatch):
    checkpoint.save(where, tensors(), step=1)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    monkeypatch.setenv(requests.PATIENCE, "0")
    _s3.store().clear_instance_cache()
    _s3.fail(s3, "error", "manifest.json", method="GET", times=10**6)
    with pytest.raises(errors.CheckpointError, match="cannot read bytes"):
        checkpoint.load(where, empty())
    _s3.store().clear_instance_cache()
    assert len([method for method, path, *_ in _s3.seen(s3) if method == "GET" and "manifest" in path]) <= 5


def test_a_server_that_is_away_for_a_while_is_waited_for(s3, where, monkeypatch):
    checkpoint.save(where, tensors(2), step=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", closed)
    monkeypatch.setenv(requests.PATIENCE, "1.5")
    _s3.store().clear_instance_cache()
    started = time.monotonic()
    with pytest.raises(errors.CheckpointError, match="EndpointConnectionError"):
        checkpoint.load(where, empty())
    assert time.monotonic() - started > 1.5
    monkeypatch.undo()
    _s3.store().clear_instance_cache()
    assert_loads(where, 2)


@pytest.mark.parametrize("directory", ["url", "path"])
@pytest.mark.parametrize("how", ["atexit.register(last)", "threading.Thread(target=last).start()"])
def test_a_last_save_after_the_end_of_the_main_thread(s3, where, tmp_path, directory, how):
    where = where if directory == "url" else str(tmp_path / "run")
    call = f"""
    import atexit, threading, time
    def last():
        time.sleep(1.0)
        print(said(lambda: checkpoint.save({where!r}, state, step=1)), flush=True)
    {how}
    """
    job = start(s3, 2, textwrap.dedent(call).strip().replace("\n", "\n    "))
    output = job.communicate(timeout=100)[0]
    if directory == "path":
        assert checkpoint.latest(where) == 1
    else:  # the package of the store needs executors, which have ended
        assert "the main thread has ended" in output
        assert checkpoint.latest(where) is None


@pytest.mark.parametrize(
    ("url", "match"),
    [("s3://no bucket/run", "Invalid bucket name"), ("s3://absent/run", "NoSuchBucket")],
)
def test_requests_that_cannot_succeed_are_not_repeated(s3, url, match):
    started = time.monotonic()
    for call in (lambda: checkpoint.latest(url), lambda: checkpoint.save(url, tensors(), step=1)):
        with pytest.raises(errors.CheckpointError, match=match):
            call()
    assert time.monotonic() - started < 30
    assert len(_s3.seen(s3)) < 10


def test_the_login_of_a_url_is_not_in_messages(s3, caplog):
    for url in (f"s3://user:{_s3.SECRET}@bucket/run", f"ftp://user:{_s3.SECRET}@127.0.0.1:1/run"):
        with pytest.raises(errors.CheckpointError) as caught:
            checkpoint.latest(url)
        assert _s3.SECRET not in "".join(map(str, _chain(caught.value)))
    assert _s3.SECRET not in caplog.text


def test_options_of_a_store_that_may_be_secret_are_not_in_messages():
    options = {"secret": "first-one", "client_kwargs": {"aws_session_token": "second-one"}, "anon": "shown"}
    store = types.SimpleNamespace(storage_options=options)
    text = requests.said("s3://bucket/run", store, ValueError("first-one, second-one, shown, password=third ok=1"))
    assert text == "ValueError: ***, ***, shown, password=*** ok=1"


def test_parts_are_sent_and_fetched_at_the_same_time_and_get_larger(s3, where, monkeypatch):
    monkeypatch.setattr(objects, "_PART", 5 << 20)
    monkeypatch.setattr(objects, "_GROWTH", 2)
    state = {"t": torch.arange(10 << 20, dtype=torch.float32)}
    _s3.fail(s3, "slow", "partNumber", method="PUT", times=10, seconds=0.5)
    checkpoint.save(where, state, step=1)
    assert _s3.most(s3) >= 3
    parts = [query for method, _, query, *_ in _s3.seen(s3) if method == "PUT" and "partNumber" in query]
    assert len(parts) == 5  # of 5, 5, 10 and 10 MiB, and the rest
    _s3.reset(s3)
    _s3.fail(s3, "slow", "rank-", method="GET", times=20, seconds=0.5)
    other = {"t": torch.zeros(10 << 20)}
    checkpoint.load(where, other)
    assert torch.equal(state["t"], other["t"])
    assert _s3.most(s3) >= 3


def test_prune_deletes_uploads_of_this_run_only_and_marks_of_directories(s3, where):
    store = _s3.store()
    for run_ in (where, f"{where}2"):
        checkpoint.save(run_, tensors(1), step=1)
        key = f"{run_[5:]}/step-00000002-000002/rank-00000-abcdef.safetensors".removeprefix("bucket/")
        store.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    store.call_s3("put_object", Bucket="bucket", Key=f"{where[12:]}/step-00000005-000009/")
    assert len(unfinished("s3://bucket")) >= 2
    assert [path.name for path in checkpoint.prune(where, keep=1)] == ["step-00000005-000009", "step-00000002-000002"]
    assert (unfinished(where), len(unfinished(f"{where}2"))) == ([], 1)
    assert describe(where).partial == ("step-00000005-000009",)
    assert filled(where) == [name for name in _s3.names(where[5:]) if "000001-000001" in name]
    assert_loads(f"{where}2", 1)
    checkpoint.prune(f"{where}2", keep=1)


def test_a_stream_that_is_not_finished_leaves_no_object():
    file = objects.NewObject(ObjectPath("memory://streams/one"))
    file.write(memoryview(bytes(40 << 20)))
    file.close()
    assert objects.entries(ObjectPath("memory://streams")) == {}


def test_an_error_of_a_stream_is_named(monkeypatch):
    from fsspec.implementations.memory import MemoryFile

    def failed(self, data):
        raise ConnectionError("the store is away")

    checkpoint.save("memory://fails", tensors(1), step=1)
    monkeypatch.setattr(MemoryFile, "write", failed)
    with pytest.raises(errors.CheckpointError, match=r"ConnectionError: the store is away.*rank-00000"):
        checkpoint.save("memory://fails", {"t": torch.zeros(10 << 20)}, step=2)
    monkeypatch.undo()
    assert_loads("memory://fails", 1)


def test_roots_other_spellings_and_runs_that_are_named_like_checkpoints(s3, tmp_path):
    checkpoint.save("memory://", tensors(1), step=1)
    assert checkpoint.latest("memory://") == 1
    assert_loads("memory://", 1)
    checkpoint.save(f"file://localhost{tmp_path}/run/", tensors(2), step=2)
    assert_loads(tmp_path / "run", 2)
    checkpoint.save("S3://bucket/step-00000010//", tensors(3), step=3)
    assert_loads("s3://bucket/step-00000010", 3)
    assert checkpoint.latest("s3://bucket/step-00000010/") == 3
