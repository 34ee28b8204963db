"""The tutorial on testing a layer is a test file that passes unchanged."""

from __future__ import annotations

from pathlib import Path

pytest_plugins = ["pytester"]
TUTORIAL = Path(__file__).parents[2] / "tutorials" / "04_test_a_layer.py"


def test_a_copy_of_the_tutorial_passes(pytester, torch_is_loaded):
    pytester.makepyfile(test_my_layer=TUTORIAL.read_text())
    run = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "pytest_composable_shard", "--strict-markers")
    run.assert_outcomes(passed=7)
