"""Comparison of the ledgers that ranks wrote: where they diverged, and errors about files that cannot be read."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from composable_shard._faults.dump import FaultText, LedgerTail, RankLedgers, from_ranges, in_ranges
from composable_shard.cli.main import main
from composable_shard.errors import ShardConfigValueError
from composable_shard.report._ledgers import explain_ledgers

BEGIN, STEP = "begin a forward of model 1 (train)", "step an optimizer of model 1"
EVALUATE = "begin a forward of model 1 (no_grad)"
PASS = [BEGIN, *(f"gather blocks.{at} of model 1, 64 bytes" for at in (0, 1, 2))]
APART = FaultText("RankMismatchError", "ranks 0 and 1 do different things")
LOST = FaultText("PeerLostError", "rank 1 has given no sign of life for 3 s")


def tail(notes, ranks="0-1", group="0", about_to=None, asked=(), kept=200, **other):
    """A ledger that keeps only the last notes."""
    known = {"description": "shards", "device": "cpu", "limit": 8.0, "taken_back": False, "left": False}
    return LedgerTail(
        group,
        ranks=ranks,
        place=len(notes),
        notes=tuple(notes[-kept:]),
        asked=asked,
        about_to=about_to,
        **known | other,
    )


def write(folder, rank, *ledgers, world=2, fault=APART, failure=None, time="2026-01-02T03:04:05.678+00:00"):
    content = RankLedgers(rank, world, f"host{rank}", 7, time, "2.13.0", "0.1.0", failure, fault, ledgers)
    (folder / f"rank{rank}.json").write_text(content.to_json())


def said(folder, capsys):
    assert main(["explain", str(folder)]) == 0
    return capsys.readouterr().out.replace(str(folder), "FOLDER")


def test_two_ranks_that_were_about_to_do_different_things(tmp_path, capsys):
    for rank, about_to in enumerate([BEGIN, EVALUATE]):
        write(tmp_path, rank, tail([*PASS, STEP, *PASS, STEP], about_to=about_to, asked=(0, 1, 2, 3)))
    assert_expected_inline(
        said(tmp_path, capsys),
        """\
all of 2 ranks wrote their ledgers

Errors
  ranks 0-1: RankMismatchError: ranks 0 and 1 do different things

Process group "0" of ranks 0-1 on cpu
  ranks 0 and 1 agree up to action 9; action 10: rank 0: begin a forward of model 1 (train) (not agreed); rank
  1: begin a forward of model 1 (no_grad) (not agreed)
  action  rank 0                                           rank 1
       2  gather blocks.1 of model 1, 64 bytes             the same
       3  gather blocks.2 of model 1, 64 bytes             the same
       4  step an optimizer of model 1                     the same
       5  begin a forward of model 1 (train)               the same
       6  gather blocks.0 of model 1, 64 bytes             the same
       7  gather blocks.1 of model 1, 64 bytes             the same
       8  gather blocks.2 of model 1, 64 bytes             the same
       9  step an optimizer of model 1                     the same
      10  begin a forward of model 1 (train) (not agreed)  begin a forward of model 1 (no_grad) (not agreed)

What to do
  find out why rank 0 and rank 1 issued different actions at action 10: look for code that depends on the rank
  or its data; run the same modules, settings and optimizer steps on all ranks
""",
    )


def test_one_of_eight_ranks_differs_two_are_behind_and_one_wrote_nothing(tmp_path, capsys):
    notes = [*PASS, STEP] * 80
    for rank in range(8):
        ledger = tail([*notes, EVALUATE], "0-7")
        if rank == 5:
            ledger = tail([*notes, BEGIN, *PASS[1:]], "0-7")
        elif rank in (2, 6):
            ledger = tail(notes, "0-7")
        if rank != 3:
            write(tmp_path, rank, ledger, world=8)
    assert_expected_inline(
        said(tmp_path, capsys),
        """\
7 of 8 ranks wrote their ledgers; rank 3 wrote no file: killed, ended without an error, or on another machine

Errors
  ranks 0-2, 4-7: RankMismatchError: ranks 0 and 1 do different things

Process group "0" of ranks 0-7 on cpu
  ranks 0-2, 4-7 agree up to action 399; action 400: ranks 0-1, 4, 7: begin a forward of model 1 (no_grad);
  ranks 2, 6: nothing; rank 5: begin a forward of model 1 (train)
  rank 3 wrote no file: killed, ended without an error, or on another machine
  action  ranks 0-1, 4, 7                       ranks 2, 6  rank 5
     392  gather blocks.1 of model 1, 64 bytes  the same    the same
     393  gather blocks.2 of model 1, 64 bytes  the same    the same
     394  step an optimizer of model 1          the same    the same
     395  begin a forward of model 1 (train)    the same    the same
     396  gather blocks.0 of model 1, 64 bytes  the same    the same
     397  gather blocks.1 of model 1, 64 bytes  the same    the same
     398  gather blocks.2 of model 1, 64 bytes  the same    the same
     399  step an optimizer of model 1          the same    the same
     400  begin a forward of model 1 (no_grad)  -           begin a forward of model 1 (train)
     401  -                                     -           gather blocks.0 of model 1, 64 bytes
     402  -                                     -           gather blocks.1 of model 1, 64 bytes
     403  -                                     -           gather blocks.2 of model 1, 64 bytes

What to do
  find out why rank 5 and ranks 0-1, 4, 7 issued different actions at action 400: look for code that depends
  on the rank or its data; run the same modules, settings and optimizer steps on all ranks
""",
    )


def test_a_rank_that_failed_is_named_with_its_error_and_the_failed_action(tmp_path, capsys):
    write(tmp_path, 0, tail([*PASS, STEP, *PASS]), fault=LOST)
    write(
        tmp_path,
        1,
        tail([*PASS, STEP, *PASS[:2]], left=True, taken_back=True),
        fault=None,
        failure="ValueError: bad data",
    )
    assert_expected_inline(
        said(tmp_path, capsys),
        """\
all of 2 ranks wrote their ledgers

Errors
  rank 0: PeerLostError: rank 1 has given no sign of life for 3 s
  rank 1 failed: ValueError: bad data

Process group "0" of ranks 0-1 on cpu
  ranks 0 and 1 agree up to action 5; action 6: rank 0: gather blocks.0 of model 1, 64 bytes; rank 1: gather
  blocks.0 of model 1, 64 bytes (failed)
  action  rank 0                                rank 1
       0  begin a forward of model 1 (train)    the same
       1  gather blocks.0 of model 1, 64 bytes  the same
       2  gather blocks.1 of model 1, 64 bytes  the same
       3  gather blocks.2 of model 1, 64 bytes  the same
       4  step an optimizer of model 1          the same
       5  begin a forward of model 1 (train)    the same
       6  gather blocks.0 of model 1, 64 bytes  gather blocks.0 of model 1, 64 bytes (failed)
       7  gather blocks.1 of model 1, 64 bytes  -
       8  gather blocks.2 of model 1, 64 bytes  -

What to do
  fix the error of rank 1, and restart from a checkpoint
""",
    )


def test_a_killed_rank_is_named_although_the_others_agree(tmp_path, capsys):
    write(tmp_path, 0, tail(PASS), fault=LOST)
    assert_expected_inline(
        said(tmp_path, capsys),
        """\
1 of 2 ranks wrote their ledgers; rank 1 wrote no file: killed, ended without an error, or on another machine

Errors
  rank 0: PeerLostError: rank 1 has given no sign of life for 3 s

Process group "0" of ranks 0-1 on cpu
  only rank 0 wrote a ledger of this process group, with 4 actions
  rank 1 wrote no file: killed, ended without an error, or on another machine
  action  rank 0
       0  begin a forward of model 1 (train)
       1  gather blocks.0 of model 1, 64 bytes
       2  gather blocks.1 of model 1, 64 bytes
       3  gather blocks.2 of model 1, 64 bytes

What to do
  read the output of rank 1, and look for out-of-memory kills and signals in the system log; then restart from
  a checkpoint
""",
    )


def test_if_all_ranks_differ_four_columns_are_shown(tmp_path):
    for rank in range(6):
        write(tmp_path, rank, tail([*PASS, f"gather {rank % 5}"], "0-5"), world=6)
    [story] = explain_ledgers(tmp_path).stories
    assert [column.ranks for column in story.columns] == [(0, 5), (1,), (2,), (3,), (4,)]
    section = next(each for each in explain_ledgers(tmp_path).sections() if each.rows)
    assert section.heads == ("action", "ranks 0, 5", "rank 1", "rank 2", "rank 3")
    assert "not shown: rank 4" in section.lines
    assert section.lines[0].endswith("rank 3: gather 3; and so on")


def test_groups_whose_ranks_differ_come_first_and_only_a_few_are_shown(tmp_path):
    for rank in range(2):
        ledgers = [tail(PASS, group=str(at)) for at in range(9)]
        ledgers[5] = tail([*PASS, f"gather {rank}"], group="5")
        ledgers[7] = tail(PASS[: 2 + rank], group="7")
        write(tmp_path, rank, *ledgers)
    step = explain_ledgers(tmp_path)
    assert [story.name for story in step.stories][:2] == ["5", "7"]
    titles = [section.title for section in step.sections() if section.rows]
    assert [re.sub(" of .*", "", title) for title in titles] == ['Process group "5"', 'Process group "7"']
    assert any("7 more process groups" in line for section in step.sections() for line in section.lines)


def test_a_rank_behind_the_kept_notes_of_the_others_has_done_less(tmp_path):
    write(tmp_path, 0, tail([*PASS, STEP] * 80, kept=20))
    write(tmp_path, 1, tail(PASS, kept=20))
    [story] = explain_ledgers(tmp_path).stories
    assert (story.alike, story.differ, story.parted) == (4, False, True)
    assert [column.actions[3] is None for column in story.columns] == [True, False]


def test_a_rank_without_the_process_group_differs_from_one_without_a_file(tmp_path):
    write(tmp_path, 0, tail(PASS, "0-2"), world=3)
    write(tmp_path, 1, tail(PASS, "0-1", group="other"), world=3)
    by_name = {story.name: story for story in explain_ledgers(tmp_path).stories}
    assert (by_name["0"].without, by_name["0"].silent, by_name["other"].without) == ((1,), (2,), (0,))


def test_five_hundred_ranks_get_one_column_per_different_action(tmp_path, capsys):
    for rank in range(512):
        notes = [*PASS, STEP] * 40 + [f"gather {rank == 300}"]
        write(tmp_path, rank, tail(notes, "0-511"), world=512)
    text = said(tmp_path, capsys)
    assert re.search(r"action +ranks 0-299, 301-511 +rank 300\n", text)
    assert "ranks 0-299, 301-511 agree" not in text
    assert "ranks 0-511 agree up to action 199; action 200: ranks 0-299, 301-511: gather False; rank" in text


def test_json_has_the_same_content(tmp_path, capsys):
    for rank, about_to in enumerate([BEGIN, EVALUATE]):
        write(tmp_path, rank, tail(PASS, about_to=about_to, asked=(3,)))
    assert main(["explain", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["world"], answer["wrote"], answer["silent"]) == (2, [0, 1], [])
    assert answer["faults"] == [{"kind": APART.kind, "text": APART.text, "ranks": [0, 1]}]
    [group] = answer["groups"]
    assert (group["alike"], group["differ"], group["first"]) == (4, True, 0)
    assert [each["ranks"] for each in group["columns"]] == [[0], [1]]
    assert [each["actions"][-1]["note"] for each in group["columns"]] == [BEGIN, EVALUATE]
    assert [each["asked"] for each in group["columns"][0]["actions"]] == [False, False, False, True, True]
    assert [each["mark"] for each in group["columns"][0]["actions"]] == ["", "", "", "", "not agreed"]


def test_a_terminal_gets_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    for rank in range(2):
        write(tmp_path, rank, tail([*PASS, f"gather {rank}"]))
    assert main(["explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r" action +rank 0 +rank 1", re.sub(r"\x1b\[\d*m", "", text))


# ---------------------------------------------------------------------- invalid files


def damaged(folder):
    (folder / "rank1.json").write_text((folder / "rank0.json").read_text()[:-40])


def nested(folder):
    (folder / "rank1.json").write_text("[" * 100_000)


def no_text(folder):
    (folder / "rank1.json").write_bytes(b"\xff\xfe")


def foreign(folder):
    (folder / "rank1.json").write_text('{"version": 1, "plan": {}}')


def of_another_version(folder):
    data = json.loads((folder / "rank1.json").read_text())
    (folder / "rank1.json").write_text(json.dumps(data | {"version": 2}))


def of_another_type(folder):
    data = json.loads((folder / "rank1.json").read_text())
    data["ledgers"]["ledgers"][0]["notes"][0] = 3
    (folder / "rank1.json").write_text(json.dumps(data))


def of_another_rank(folder):
    (folder / "rank1.json").write_text((folder / "rank0.json").read_text())


def not_in_its_group(folder):
    write(folder, 1, tail(PASS, "2-3"))


def with_too_many_notes(folder):
    write(folder, 1, replace(tail(PASS), place=2))


def with_ranks_that_are_none(folder):
    write(folder, 1, tail(PASS, "0-999999999"))


def without_a_time(folder):
    write(folder, 1, tail(PASS), time="yesterday")


def of_another_world(folder):
    write(folder, 1, tail(PASS), world=4)


def of_an_earlier_run(folder):
    write(folder, 1, tail(PASS), time="2026-01-02T03:00:05.678+00:00")


def a_folder_of_that_name(folder):
    (folder / "rank1.json").unlink()
    (folder / "rank1.json").mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, "ledgers: is not valid JSON"),
        (nested, "recursion"),
        (no_text, "can't decode byte"),
        (foreign, "ledgers: missing; the JSON contains plan"),
        (of_another_version, "ledgers: version 2 is not supported; this library reads version 1"),
        (of_another_type, "ledgers.ledgers[0].notes[0]: expected str, got 3"),
        (of_another_rank, "is the file of rank 0 of 2"),
        (not_in_its_group, "process group 0: has ranks 2-3, but not rank 1"),
        (with_too_many_notes, "process group 0: has 4 notes of 2"),
        (with_ranks_that_are_none, "expected ranks such as '0, 2-7', got '0-999999999'"),
        (without_a_time, "Invalid isoformat string: 'yesterday'"),
        (of_another_world, "is of a run of 4 ranks, but rank0.json of 2. Move the files of an earlier run away"),
        (of_an_earlier_run, "is 240 s older than another file. Move the files of an earlier run away"),
        (a_folder_of_that_name, "cannot be read (Is a directory)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_invalid_file_is_named_in_one_line(tmp_path, capsys, spoil, message):
    for rank in range(2):
        write(tmp_path, rank, tail(PASS))
    spoil(tmp_path)
    assert main(["explain", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'rank1.json'}: " in error
    assert message in error
    assert error.count("\n") == 1


def test_folders_without_files_of_ranks_and_options_of_plans_are_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".rank0.host-1-2").touch()
    assert main(["explain", str(tmp_path)]) == 2
    assert "no rank has written a file here" in capsys.readouterr().err
    assert main(["explain", str(tmp_path), "--machine", "h100", "--json"]) == 2
    assert "options of plans are not allowed" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize("text", ["0", "0-1", "0, 2-7", "3, 1"])
def test_ranks_can_be_written_as_text_and_parsed_again(text):
    assert in_ranges(from_ranges(text)) == text


@pytest.mark.parametrize("text", ["", "a", "2-1", "0,1", "-1", "0-1048576", "1000000000"])
def test_text_that_is_not_ranks_is_refused(text):
    with pytest.raises(ShardConfigValueError, match="expected ranks such as"):
        from_ranges(text)
