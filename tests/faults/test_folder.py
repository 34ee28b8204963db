"""Ranks that cannot continue together write their ledgers into a folder, if one is configured, and log the fault."""

from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from test_lost import ranks

import composable_shard as cs
from _decoders import Training
from _pool import distributed, more
from composable_shard._faults import dump
from composable_shard._faults.watch import WATCHER
from composable_shard.report._ledgers import explain_ledgers

LIMIT_S = 60.0
SOON_S = 10.0


class Heard(logging.Handler):
    """Collects level and text of the messages of the library's loggers."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append((record.levelname, record.getMessage()))

    def of(self, level):
        return [text for name, text in self.said if name == level]


@contextmanager
def watched(folder=None):
    """Configure the folder in this rank, and collect the messages of its loggers."""
    heard = Heard()
    logger = logging.getLogger("composable_shard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "level", logging.INFO)
        patch.delenv(dump.VARIABLE, raising=False)
        if folder is not None:
            patch.setenv(dump.VARIABLE, str(folder))
        logger.addHandler(heard)
        logger.manager._clear_cache()
        try:
            yield heard
        finally:
            logger.removeHandler(heard)
    logger.manager._clear_cache()


def trained(rank, world):
    run = Training(rank, world)
    for _ in range(2):
        run.step()
    return run


def gather_alone(run):
    if run.rank:
        run.model.blocks[1].unshard()
    run.forward()


def soon(holds):
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def read(folder, world, wanted):
    """The files of all ranks, once they are as wanted: a watcher may still write while the rank raises."""
    soon(lambda: len([*folder.glob("rank*.json")]) == world and wanted(explain_ledgers(folder)))
    dist.barrier()
    return explain_ledgers(folder)


@distributed(world=2, limit_s=LIMIT_S)
def test_ranks_that_differ_write_their_ledgers_and_a_later_fault_replaces_them(rank, world, tmp_path):
    folder = tmp_path / "faults" / "of this run"
    with watched(folder) as heard:
        run = trained(rank, world)
        if rank:
            run.model.blocks = torch.nn.ModuleList(reversed(run.model.blocks))
        with pytest.raises(cs.errors.RankMismatchError) as caught:
            run.forward()
        ending = f"; ledgers of the ranks: {folder} (python -m composable_shard explain {folder})"
        assert str(caught.value).endswith(ending)
        step = read(folder, world, lambda step: len(step.files) == world)
        [(fault, of)] = step.faults.items()
        assert (fault.kind, fault.text + ending, of) == ("RankMismatchError", str(caught.value), [0, 1])
        story = step.stories[0]
        assert (story.ranks, story.differ) == ((0, 1), True)
        assert f"(action {story.alike} of these ranks" in fault.text
        (_, first), (_, second) = story.last
        assert f"rank 0 is about to {first.note}, and rank 1 is about to {second.note} (action" in fault.text
        assert (first.mark, second.mark) == ("", "not agreed")  # one rank continued as before, the other asked
        assert heard.of("ERROR") == [f"rank {rank}: {fault.kind}: {fault.text}"]

        again = trained(rank, world)
        assert any("watching process group" in line and "of ranks 0-1" in line for line in heard.of("INFO"))
        if rank:
            with pytest.raises(IndexError):
                again.model(torch.full((2, 8), 99))
            soon(lambda: len(heard.of("ERROR")) == 2)  # the other rank has waited for this one
        with pytest.raises(cs.errors.PeerLostError, match="rank 1 failed after action"):
            again.step()
        later = read(folder, world, lambda step: {each.kind for each in step.faults} == {"PeerLostError"})
        assert later.failed == {"IndexError: index out of range in self": [1]}
        assert len(heard.of("ERROR")) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]


@distributed(world=2, limit_s=LIMIT_S)
def test_no_file_is_written_and_no_folder_is_mentioned_unless_one_is_configured(rank, world, tmp_path):
    with watched(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run = trained(rank, world)
        with pytest.raises(cs.errors.RankMismatchError, match=r"call unshard\(\) for it on all of them$"):
            gather_alone(run)
        dist.barrier()
        assert [*tmp_path.iterdir()] == []


@distributed(world=2, limit_s=LIMIT_S)
def test_a_folder_that_cannot_be_written_is_a_warning_and_the_fault_is_still_raised(rank, world, tmp_path):
    with watched(tmp_path / "file" / "faults") as heard:
        (tmp_path / "file").touch()
        run = trained(rank, world)
        with pytest.raises(cs.errors.RankMismatchError, match="do different things"):
            gather_alone(run)
        soon(lambda: heard.of("WARNING"))
        [warning] = heard.of("WARNING")
        assert "faults: cannot write the ledgers of this rank" in warning
        assert dump.VARIABLE in warning


@distributed(world=2, limit_s=LIMIT_S)
def test_a_question_that_waits_for_other_ranks_is_logged_after_a_second(rank, world):
    with watched() as heard:
        run = trained(rank, world)
        if rank:
            time.sleep(1.5)
        with torch.no_grad():
            run.forward()
        late = [line for line in heard.of("WARNING") if "(no_grad, " in line]
        assert len(late) == (rank == 0)
        assert all(line.startswith("rank 0 waits for others at action ") for line in late)


@distributed(world=2, limit_s=LIMIT_S)
def test_the_tail_of_a_ledger_contains_asked_places_and_taken_back_notes(rank, world):
    run = trained(rank, world)
    [ledger] = [each for each in WATCHER.ledgers() if each.plans]
    every = ledger.tail(1 << 20)
    assert (every.place, every.ranks, every.about_to, every.taken_back) == (ledger.place, "0-1", None, False)
    assert 0 in every.asked
    end = ledger.tail(3)
    assert (end.notes, end.place) == (every.notes[-3:], every.place)
    assert end.asked == tuple(at for at in every.asked if at >= every.place - 3)
    run.step()
    assert ledger.tail(1 << 20).notes[: every.place] == every.notes
    assert ledger.tail(1 << 20).asked[: len(every.asked)] == every.asked


@pytest.mark.parametrize("what", [more("fail"), more("kill"), more("leave")])
def test_a_lost_rank_wrote_its_ledgers_only_if_it_had_time(what, tmp_path, monkeypatch):
    monkeypatch.setenv(dump.VARIABLE, str(tmp_path))
    (said, _, errors), _ = ranks(what, 1)
    assert said["error"] == "PeerLostError", errors
    assert said["text"].endswith(f"explain {tmp_path})")
    step = explain_ledgers(tmp_path)
    assert [fault.kind for fault in step.faults] == ["PeerLostError"]
    assert step.silent == (() if what == "fail" else (1,))
    assert step.failed == ({"ValueError: bad data": [1]} if what == "fail" else {})
    assert step.world == 2
    assert json.loads((tmp_path / "rank0.json").read_text())["version"] == dump.JSON_VERSION
