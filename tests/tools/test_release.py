"""The release check: the environments that it tests, its report, and the contents of the distributions."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest

from composable_shard.testing import spmd

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools" / "release"))

import _distributions as distributions  # noqa: E402
import _pythons as interpreters  # noqa: E402
import _smoke_checks as smoke  # noqa: E402
import check as release  # noqa: E402
import prepare as preparing  # noqa: E402

WHEEL, SDIST = Path("composable_shard-1-py3-none-any.whl"), Path("composable_shard-1.tar.gz")


# ---- Python and torch versions


def test_the_usual_pairs_cover_each_python_and_torch_and_there_are_nine_pairs():
    assert {python for python, _ in interpreters.USUAL} == set(interpreters.PYTHONS)
    assert {torch for _, torch in interpreters.USUAL} == set(interpreters.TORCHS)
    assert len(set(interpreters.ALL)) == 9
    listed = {name.rpartition(" ")[2] for name in distributions.project()["classifiers"] if "Python :: 3." in name}
    assert listed == set(interpreters.PYTHONS)
    assert release.parse(["--all"]).pairs == list(interpreters.ALL)
    assert release.parse(["--pair", "3.12:2.13.0"]).pairs == [("3.12", "2.13.0")]


def test_the_status_page_has_a_row_for_each_tested_version():
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "status.md").read_text().splitlines() if "|" in line]
    for version in interpreters.PYTHONS:
        assert sum(f"Python {version} " in row for row in rows) == 1, version
    for version in interpreters.TORCHS:
        assert sum("torch" in row and version in row for row in rows) == 1, version


@pytest.mark.parametrize("arguments", [["--pair", "3.12"], ["--checks", "imports,smell"], ["--artifacts", "egg"]])
def test_invalid_options_are_rejected(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        release.parse(arguments)
    assert arguments[1].rpartition(",")[2] in capsys.readouterr().err


def test_an_interpreter_is_chosen_by_the_version_that_it_reports(tmp_path):
    broken, wrong = tmp_path / "broken", tmp_path / "wrong"
    broken.write_text("#!/bin/sh\necho 3.98; exit 1\n")
    wrong.write_text("#!/bin/sh\necho 3.98\n")
    for each in (broken, wrong):
        each.chmod(0o755)
    mine = ".".join(map(str, sys.version_info[:2]))
    assert interpreters.interpreter(mine, [tmp_path / "missing", broken, wrong]) == Path(sys.executable)
    assert interpreters.interpreter("3.98", [broken, wrong]) == wrong
    with pytest.raises(interpreters.NotToBeHadError, match=r"no python3\.99 on this machine; --python PATH"):
        interpreters.interpreter("3.99", [broken, wrong])


def report_of(*requires):
    return {"install": [{"metadata": {"name": "torch", "version": "2.13.0+x", "requires_dist": list(requires)}}]}


def test_a_cuda_build_of_torch_is_detected_by_its_dependencies():
    linux = "platform_system == 'Linux'"
    report = report_of("sympy>=1.13", f"nvidia-nccl-cu13==2.1; {linux}", f"cuda-bindings<14; {linux}", "typing")
    assert interpreters.offer_of(report, "linux").cuda_packages == ("nvidia-nccl-cu13", "cuda-bindings")
    assert interpreters.offer_of(report, "darwin").cuda_packages == ()
    assert interpreters.offer_of(report_of("sympy"), "linux") == interpreters.TorchOffer("2.13.0+x", ())


def test_torch_is_reused_from_an_environment_with_the_same_python():
    mine, torch = ".".join(map(str, sys.version_info[:2])), distribution("torch")
    base = torch.version.partition("+")[0]
    offer = interpreters.lent_torch((mine, base), [Path(sys.executable)])
    assert offer == interpreters.TorchOffer(torch.version, lies_in=Path(torch.locate_file("")))
    assert interpreters.lent_torch((mine, "0.0.1"), [Path(sys.executable)]) is None
    assert interpreters.lent_torch(("3.99", base), [Path(sys.executable)]) is None


# ---- contents of the distributions


def tracked():
    """The files of the repository, or all files of an unpacked sdist."""
    if (ROOT / ".git").exists():
        return distributions.tracked_files()
    return {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()}


def test_faults_of_an_sdist_are_missing_files_and_unknown_files():
    names = {"README.md", "docs/a.md", "PKG-INFO"}
    assert distributions.faults_of_sdist(names, {"README.md", "docs/a.md", ".ci/run"}) == []
    assert distributions.faults_of_sdist(names, {"README.md", "docs/b.md"}) == [
        "missing: docs/b.md",
        "not in the repository: docs/a.md",
    ]


def test_faults_of_a_wheel_are_missing_files_and_files_outside_of_the_packages():
    info = "composable_shard-1.dist-info"
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    files = {"composable_shard/a.py", "composable_shard/py.typed"}
    assert distributions.faults_of_wheel(files | metadata, files | {"tests/b.py"}) == []
    assert distributions.faults_of_wheel(metadata - {f"{info}/licenses/LICENSE"} | {"tests/b.py"}, files) == [
        "missing: composable_shard-1.dist-info/licenses/LICENSE",
        "missing: composable_shard/a.py",
        "missing: composable_shard/py.typed",
        "not part of the packages: tests/b.py",
    ]


def test_the_sdist_includes_every_folder_and_file_of_the_repository():
    included = {line.strip(' ",/') for line in (ROOT / "pyproject.toml").read_text().splitlines() if '    "/' in line}
    always = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}
    tops = {name.partition("/")[0] for name in tracked() if "__pycache__" not in name}
    assert {"tests", "docs", "Makefile"} <= included
    assert tops - included - always <= {".ci", ".github", ".pytest_cache", ".hypothesis"}
    assert included <= tops


# ---- checks


def test_only_an_sdist_has_tests_to_run():
    assert smoke.checks_for(SDIST, list(smoke.CHECKS)) == list(smoke.CHECKS)
    assert set(smoke.CHECKS) - set(smoke.checks_for(WHEEL, list(smoke.CHECKS))) == {"tests"}
    assert smoke.checks_for(WHEEL, ["training", "imports"]) == ["imports", "training"]
    assert smoke.CHECKS.keys() == smoke.SHOWS.keys()


def test_every_tutorial_is_run_or_listed_as_omitted():
    scripts = {path.name for path in (ROOT / "tutorials").glob("[!_]*.py")}
    tried = {word for arguments in smoke.TUTORIALS.values() for word in arguments.split() if word.endswith(".py")}
    assert scripts - tried == {release.NO_RAY.split(":")[0].rpartition("/")[2]}
    assert tried <= scripts
    assert all((ROOT / name).exists() for name in smoke.TESTS)


def test_the_script_of_the_first_page_is_extracted_from_the_package_description():
    script = smoke.script_of((ROOT / "README.md").read_text().replace("\n", "\r\n"))
    assert script.startswith("import os\n\nimport torch\n")
    with pytest.raises(RuntimeError, match="no script"):
        smoke.script_of("# A page\n")


def test_mypy_must_reject_only_the_wrong_line():
    wrong = 'typed.py:8: error: Argument "budget" has incompatible type "str"; expected "int"  [arg-type]\n'
    assert smoke.verdict_of_mypy(wrong, last=8) == "mypy rejects only the wrong line"
    untyped = "typed.py:5: error: Skipping analyzing: module is installed, but missing py.typed  [import-untyped]\n"
    for output in ("Success: no issues found", untyped, untyped + wrong):
        with pytest.raises(RuntimeError, match="reject only the last line"):
            smoke.verdict_of_mypy(output, last=8)


def installation(tmp_path):
    return smoke.Installation(Path(sys.executable), tmp_path, WHEEL, "1")


def test_commands_do_not_use_the_checkout(tmp_path, monkeypatch):
    checkout = str(tmp_path / "checkout")  # not the real checkout, which may be installed in this environment
    monkeypatch.setenv("PYTHONPATH", checkout)
    monkeypatch.setenv("COMPOSABLE_SHARD_TRANSPORT", "torch")
    show = "import json, os, sys; print(json.dumps([sys.path, list(os.environ), os.getcwd()]))"
    path, names, where = json.loads(installation(tmp_path).run("-c", show))
    assert checkout not in path
    assert where == str(tmp_path.resolve())
    assert "COMPOSABLE_SHARD_TRANSPORT" not in names


def test_a_command_that_fails_or_hangs_fails_its_check_and_the_next_check_runs(tmp_path, monkeypatch):
    def hangs(it):
        return replace(it, limit_s=1.0).run("-c", "import subprocess; subprocess.run(['sleep', '200'])")

    checks = {"fails": lambda it: it.run("-c", "exit('no')"), "hangs": hangs, "runs": lambda it: "well"}
    monkeypatch.setattr(smoke, "CHECKS", checks)
    begun = time.monotonic()
    fails, hangs, runs = smoke.run_checks(installation(tmp_path), list(checks))
    assert time.monotonic() - begun < 150
    assert (fails.outcome, fails.detail) == ("failed", "exit code 1\nno\n")
    assert (hangs.outcome, hangs.detail) == ("failed", "still running after 1 s\n")
    assert (runs.outcome, runs.detail) == ("passed", "well")


def test_the_smoke_training_agrees_with_the_unsharded_model_on_simulated_ranks():
    spec = importlib.util.spec_from_file_location("smoke_training", smoke.SMOKE / "training.py")
    training = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(training)
    lines = spmd(2)(lambda world: training.run())
    assert all("on 2 ranks, equal to the unsharded model" in line for line in lines)


# ---- reports


def row(*outcomes, **fields):
    names = ("imports", "training")
    results = [smoke.Result(name, outcome, 2.6, "why") for name, outcome in zip(names, outcomes, strict=False)]
    return release.Row("3.11", "2.13.0", "wheel", results=results, **fields)


def report(*rows, contents=()):
    return release.Report("1", "a machine", {"a.whl": list(contents)}, list(rows), ["something"])


def test_the_exit_code_is_zero_only_if_there_were_checks_and_all_passed():
    good, bad, missing = row("passed", "passed"), row("passed", "failed"), row(not_checked="no python")
    assert report(good, missing).exit_code() == 0
    assert report(good, missing).exit_code(complete=True) == 1
    assert report(good).exit_code(complete=True) == 0
    assert report(good, bad).exit_code() == report(missing).exit_code() == report().exit_code() == 1
    assert report(good, contents=["missing: LICENSE"]).exit_code() == 1
    assert report(good, row("failed", not_checked="no torch")).exit_code() == 1


def test_the_table_lists_failed_checks_and_missing_environments():
    text = report(row("passed", "failed"), row(not_checked="no python"), contents=["missing: b.py"]).text()
    lines = text.splitlines()
    assert lines[1].split() == ["Python", "torch", "from", "imports", "training"]
    assert lines[2].split() == ["3.11", "2.13.0", "wheel", "3", "FAILED", "FAILED"]
    assert lines[3].split() == ["3.11", "2.13.0", "wheel", "-", "-", "not", "checked"]
    assert "  missing: b.py" in lines
    assert "FAILED 3.11, torch 2.13.0, wheel: training" in lines
    shown = lines[lines.index("Passed checks:") + 1 : lines.index("NOT CHECKED:") - 1]
    assert [line.split(":")[0].strip() for line in shown] == ["imports"]
    assert lines[lines.index("NOT CHECKED:") :] == [
        "NOT CHECKED:",
        "  Python 3.11, torch 2.13.0: no python",
        "  something",
    ]
    assert len(report(row(not_checked="no python")).text().splitlines()) > 3


def test_the_json_report_has_the_result_of_each_row():
    data = json.loads(json.dumps(report(row("passed"), row("failed"), row(not_checked="no")).data()))
    assert [each["passed"] for each in data["rows"]] == [True, False, False]
    assert data["rows"][0]["results"][0]["name"] == "imports"
    assert data["left_out"] == ["something"]


def test_an_unavailable_pair_has_a_row_with_the_reason(tmp_path, monkeypatch):
    options = release.parse(["--pair", "3.99:2.13.0"])
    artifacts = {"wheel": WHEEL, "sdist": SDIST}
    rows = release.try_pair(("3.99", "2.13.0"), artifacts, "1", tmp_path, options)
    assert ["no python3.99" in each.not_checked for each in rows] == [True, True]
    offer = interpreters.TorchOffer("2.13.0", ("nvidia-nccl-cu13",))
    monkeypatch.setattr(interpreters, "torch_offer", lambda *_: offer)
    monkeypatch.setattr(interpreters, "interpreter", lambda *_: Path(sys.executable))
    monkeypatch.setattr(distributions, "make_environment", lambda folder, python: python)
    installed = []
    monkeypatch.setattr(smoke.Installation, "install", lambda it, *names: installed.append((*it.pip, *names)))
    monkeypatch.setattr(smoke, "CHECKS", {name: lambda it: "well" for name in smoke.CHECKS})
    rows = release.try_pair(("3.11", "2.13.0"), artifacts, "1", tmp_path, options)
    assert "for CUDA, with nvidia-nccl-cu13 and" in rows[0].not_checked
    assert [[each.name for each in row.results] for row in rows] == [["compiles"], ["compiles"]]
    assert installed == [("--no-deps", str(WHEEL)), ("--no-deps", str(SDIST))]


def test_make_runs_the_check_without_a_virtual_environment():
    makefile = (ROOT / "Makefile").read_text()
    assert "release-check:\n\t$(PYTHON) tools/release/check.py $(RELEASE)\n" in makefile
    command = [sys.executable, "-S", str(ROOT / "tools" / "release" / "check.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--torch-index" in done.stdout


# ---- the version and the changelog


@pytest.fixture
def tree(tmp_path):
    """A copy of the files that a release changes, outside of the repository."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    fragments = tmp_path / "changelog.d"
    fragments.mkdir()
    shutil.copy(ROOT / "changelog.d" / "HOWTO.md", fragments)
    (fragments / "+a.added.md").write_text("A thing.\n")
    (fragments / "+b.fixed.md").write_text("Another thing,\nin two lines.\n")
    return tmp_path


def test_a_release_sets_the_version_adds_its_section_and_deletes_the_fragments(tree):
    preparing.prepare(tree, "98.0.0")
    assert '\nversion = "98.0.0"\n' in (tree / "pyproject.toml").read_text()
    page = (tree / "CHANGELOG.md").read_text()
    assert page.startswith((ROOT / "CHANGELOG.md").read_text().split("<!--")[0])
    section = page.partition("## 98.0.0 (")[2]
    assert section.index("Added") < section.index("- A thing.") < section.index("Fixed") < section.index("Another")
    assert [path.name for path in (tree / "changelog.d").iterdir()] == ["HOWTO.md"]
    with pytest.raises(ValueError, match="has no fragments"):
        preparing.prepare(tree, "98.1.0")
    preparing.prepare(tree, "98.1.0.dev0")
    assert '\nversion = "98.1.0.dev0"\n' in (tree / "pyproject.toml").read_text()
    assert (tree / "CHANGELOG.md").read_text() == page


def test_a_release_dates_the_section_that_was_written_for_it(tree):
    page = tree / "CHANGELOG.md"
    page.write_text("# Changelog\n\n## 98.0.0 (unreleased)\n\n- Highlights.\n")
    with pytest.raises(ValueError, match=r"move these fragments into it: \+a.added.md, \+b.fixed.md"):
        preparing.prepare(tree, "98.0.0")
    assert "(unreleased)" in page.read_text()
    assert "98.0.0" not in (tree / "pyproject.toml").read_text()
    for fragment in (tree / "changelog.d").glob("+*"):
        fragment.unlink()
    preparing.prepare(tree, "98.0.0")
    assert re.fullmatch(r"# Changelog\n\n## 98.0.0 \(20\d\d-\d\d-\d\d\)\n\n- Highlights.\n", page.read_text())
    assert '\nversion = "98.0.0"\n' in (tree / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "message"), [("0.0.1", "not later than"), ("v99", "is not a version"), ("99.0", "is not a version")]
)
def test_an_invalid_next_version_changes_nothing(tree, version, message):
    before = (tree / "pyproject.toml").read_text()
    with pytest.raises(ValueError, match=message):
        preparing.prepare(tree, version)
    assert (tree / "pyproject.toml").read_text() == before
    assert (tree / "changelog.d" / "+a.added.md").exists()


def test_versions_are_sorted_in_the_order_of_their_releases():
    course = ["0.1.0.dev0", "0.1.0rc1", "0.1.0rc2", "0.1.0", "0.1.1", "0.2.0.dev0", "0.10.0", "1.0.0"]
    assert sorted(course, key=preparing.order_of) == course


def test_the_version_is_defined_in_one_place():
    version = str(distributions.project()["version"])
    files = [ROOT / "pyproject.toml", *(ROOT / "composable_shard").rglob("*.py")]
    assert [path.name for path in files if version in path.read_text()] == ["pyproject.toml"]
