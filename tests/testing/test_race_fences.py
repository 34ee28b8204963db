"""Each wait of the library is necessary: without it, `testing.races` finds a race."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import composable_shard
from _race_mutants import COVERED, MUTANTS, PASSED_ON
from _race_scenarios import SCENARIOS
from _race_training import perform

LIBRARY = Path(composable_shard.__file__).parent
WINGS = ("_comm", "_memory", "_group", "_engine")
ORDERS = {  # attributes by which the library orders streams
    *("record_current_stream", "current_events", "queued", "record", "wait", "wait_event", "wait_stream"),
    *("add_events_of", "wait_until_free", "synchronize", "finish", "free_after", "changed", "take_events"),
    *("wait_before_free", "occupied", "occupy"),
}


def missed(names):
    """The mutants in whose scenario no race is found."""
    return [name for name in names if not is_seen(MUTANTS[name])]


def is_seen(mutant):
    with mutant.plant():
        return bool(perform(SCENARIOS[mutant.scenario], until_race=True).races)


# Two parts, so that pytest processes can share the work.
@pytest.mark.parametrize("part", range(2))
def test_removing_a_wait_of_the_library_causes_a_race(part):
    assert missed([*MUTANTS][part::2]) == []


def test_removing_a_wait_that_others_cover_causes_no_race():
    assert [name for name, mutant in COVERED.items() if is_seen(mutant)] == []


def ordering(source):
    """The functions of a source file that order streams, as Class.function."""
    functions = set()

    def visit(node, name):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                visit(child, f"{name}.{child.name}".strip("."))
                continue
            if isinstance(child, ast.Attribute) and child.attr in ORDERS and name:
                functions.add(name)
            visit(child, name)

    visit(ast.parse(source), "")
    return functions


def test_every_function_of_the_library_that_orders_streams_has_a_mutant():
    functions = {
        each for wing in WINGS for file in (LIBRARY / wing).glob("*.py") for each in ordering(file.read_text())
    }
    known = {mutant.site for mutant in (*MUTANTS.values(), *COVERED.values())} | PASSED_ON.keys()
    assert functions - known == set()
    assert known - functions == set()
