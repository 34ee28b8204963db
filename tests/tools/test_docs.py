"""What the documents say is true: files, names and links exist, and the script on the first page runs."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from _launched import finish
from composable_shard.testing import spmd

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "composable_shard"
README = ROOT / "README.md"
TRAINING = ROOT / "docs" / "training.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page):
    text = page.read_text()
    named = set(re.findall(r"(?:tests|bench|tutorials|docs)/[\w./-]+\.(?:py|md|json)", text))
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def rows(page):
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] != "shown by"]


def test_every_line_of_the_migration_page_names_a_test_or_says_that_there_is_none():
    found = rows(ROOT / "docs" / "migration.md")
    assert len(found) > 50
    untested = [" ".join(row) for row in found if "tests/" not in row[-1]]
    assert [row for row in untested if not re.search("not supported|never run", row)] == []


def sources():
    """The files of the package's wings and of its top, as paths below the package."""
    paths = [*PACKAGE.glob("_*.py"), *PACKAGE.glob("_*/*.py")]
    return {str(path.relative_to(PACKAGE)) for path in paths if path.name not in ("__init__.py", "__main__.py")}


def test_the_map_of_the_files_is_whole_and_lists_no_file_that_is_gone():
    table = (ROOT / "docs" / "architecture.md").read_text()
    known = {name for name in sources() if not name.startswith("_integrations")}
    listed = set(re.findall(r"`(_[\w/]+\.py)`", table)) - {"__main__.py"}
    assert known - listed == set()
    assert listed - known == set()


def defined(source):
    """The classes and functions of a file, and the methods of its classes as Class.method."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            names |= {f"{node.name}.{each.name}" for each in ast.iter_child_nodes(node) if hasattr(each, "name")}
    return names


def test_the_life_of_a_parameter_has_twelve_steps_whose_files_and_names_exist():
    text = (ROOT / "docs" / "life-of-a-parameter.md").read_text()
    steps = re.split(r"^## (?=\d+\. )", text, flags=re.MULTILINE)[1:]
    assert [int(step.partition(".")[0]) for step in steps] == list(range(1, 13))
    for step in steps:
        assert re.search(r"^In `", step, flags=re.MULTILINE), step
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", text)
    inside = [(path, name) for path, name in named if not path.startswith("tests/")]
    for path, name in inside:
        assert (PACKAGE / path).exists(), path
        assert not name or name in defined((PACKAGE / path).read_text()), f"{path}: {name}"
    wings = {path.partition("/")[0] for path, _ in inside if "/" in path}
    assert wings == {"_module", "_group", "_engine", "_plan", "_memory", "_comm", "_graph"}


LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in HEADING.findall(text)}


HEADING = re.compile(r"^#+ .*$", re.MULTILINE)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        leads_to = (page.parent / target) if target else page
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to.read_text()), f"{target}#{anchor}"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_first_page_is_short():
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.timeout(240)
def test_the_script_on_the_first_page_trains_by_the_command_beside_it(tmp_path):
    script = blocks("python")[0]
    assert 15 <= len(script.splitlines()) <= 25
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("torchrun")]
    launcher, *arguments = shlex.split(commands[0], comments=True)
    assert (launcher, arguments[:2]) == ("torchrun", ["--nproc-per-node", "2"])
    (tmp_path / arguments[-1]).write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    output, errors = finish(process, limit_s=180)
    assert process.returncode == 0, errors
    assert "Warning" not in errors
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", output, flags=re.MULTILINE)]
    assert len(losses) >= 2, output
    assert losses[-1] < losses[0] - 1


def test_the_examples_about_training_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```$", TRAINING.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(examples) > 3

    def body(world):
        names = {}
        for example in examples:
            exec(compile(example, str(TRAINING), "exec"), names)
        names["log"].close()

    spmd(2)(body)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "1" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert {"train/loss", "train/grad_norm", "step/tokens_per_second", "lr", "pool/peak_bytes"} <= lines[-1].keys()


def test_the_examples_about_optimizers_run():
    page = ROOT / "docs" / "optimizers.md"
    examples = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(examples) == 6

    def body(world):
        names = {}
        for example in examples:
            exec(compile(example, str(page), "exec"), names)

    spmd(2)(body)


def test_the_examples_about_quantized_weights_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "qlora.md"
    examples = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(examples) == 3

    def body(world):
        names = {}
        for example in examples:
            exec(compile(example, str(page), "exec"), names)
        first, last = names["losses"][0], names["losses"][-1]
        model, x = names["model"], names["x"]
        assert last < first
        return (model(x) - x[:, :8]).square().mean().item(), last

    merged, before = spmd(2)(body)[0]
    assert abs(merged - before) < 0.5 * before


def test_the_picture_on_the_first_page_is_made_by_the_script_beside_it():
    text = README.read_text()
    (picture,) = re.findall(r"!\[[^\]]*\]\(docs/(\w+\.png)\)", text)
    (script,) = re.findall(r"`python (tutorials/\w+\.py)`", text)
    assert f'"{picture}"' in (ROOT / script).read_text()
