"""What the documents say is true: files, names and links exist, and the script on the first page runs."""

from __future__ import annotations

import ast
import json
import logging
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
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
LINKED = [*PAGES, *REFERENCE, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]


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


CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in HEADING.findall(text)}


HEADING = re.compile(r"^#+ .*$", re.MULTILINE)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page):
    for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
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


# Of each how-to page: the ranks, and which of them see the same batch and so have the same losses.
HOW_TO = {
    "tensor_parallel": (4, [{0, 1}, {2, 3}]),
    "hsdp": (4, []),
    "experts": (4, []),
    "pipelines": (4, []),
    "long_sequences": (4, [{0, 1}, {2, 3}]),
    "lora": (2, []),
}


def run_examples(page, ranks, tmp_path, monkeypatch):
    """Run the Python blocks of a page one after the other, as all ranks; gives the names that each has at the end."""
    monkeypatch.chdir(tmp_path)
    path = ROOT / "docs" / f"{page}.md"
    examples = re.findall(r"^```python\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert examples

    def body(world):
        names = {}
        for example in examples:
            exec(compile(example, str(path), "exec"), names)
        return names

    return spmd(ranks)(body)


def test_the_examples_on_the_how_to_pages_train(tmp_path, monkeypatch):
    for page, (ranks, alike) in HOW_TO.items():
        losses = [names["losses"] for names in run_examples(page, ranks, tmp_path, monkeypatch)]
        assert any(losses), page
        for each in filter(None, losses):  # the first stage of a pipeline has no losses
            assert len(each) > 3, page
            assert each[-1] < 0.95 * each[0], page
        for same in alike:
            assert len({tuple(losses[rank]) for rank in same}) == 1, page
        assert len({tuple(each) for each in losses if each}) > 1, "batches differ by rank"


def test_the_examples_about_testing_pass_and_print_a_network(tmp_path):
    page = (ROOT / "docs" / "testing.md").read_text()
    layer, network = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "test_layer.py").write_text(layer)
    (tmp_path / "network.py").write_text(network)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    passed, printed = (
        subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        for arguments in (["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_layer.py"], ["network.py"])
    )
    assert "3 passed" in passed.stdout, passed.stdout + passed.stderr
    *log, exposed_s = printed.stdout.splitlines()
    assert len(re.findall("^reduce_scatter ", "\n".join(log), flags=re.MULTILINE)) == 4
    assert 0 < float(exposed_s) < 1e-3


def test_the_examples_about_monitoring_run(tmp_path, monkeypatch):
    level = logging.getLogger("composable_shard").level
    try:
        names = run_examples("monitoring", 2, tmp_path, monkeypatch)[0]
    finally:
        logging.getLogger("composable_shard").setLevel(level)
    folder = tmp_path / "runs" / "monitored"
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    assert names["figures"]["pool/peak_bytes"] == names["figures"]["plan/peak_bytes"] > 0
    assert {name for line in lines for name in line} >= {"train/loss", "train/skipped_steps", "step/tokens_per_second"}
    assert names["figures"].keys() >= {"pool/fallbacks", "plan/replans"}


def started(folder, *arguments):
    """What torchrun prints when it is called with these arguments in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    output, errors = finish(process, limit_s=280)
    assert process.returncode == 0, errors
    return output


@pytest.mark.timeout(600)
def test_the_page_for_the_beginning_is_a_script_that_plans_trains_compiles_and_goes_on(tmp_path):
    """Its first command runs eagerly here, as the page allows, and the second one compiled."""
    page = (ROOT / "docs" / "getting_started.md").read_text()
    by_language = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        by_language.setdefault(language, []).append(block)
    assert by_language.keys() == {"python", "text", "sh"}
    commands = [shlex.split(block) for block in by_language["sh"]]
    assert [command[0] for command in commands] == ["torchrun", "torchrun"]
    script = "\n".join(by_language["python"])
    eager = script.replace("run = cs.compile(model)", "run = model")
    assert eager != script
    losses = []
    for command, source in zip(commands, (eager, script), strict=True):
        (tmp_path / "train.py").write_text(source)
        output = started(tmp_path, *command[1:])
        found_plan = "".join(by_language["text"]) in output
        assert found_plan == (command[2] == "2")  # the page shows that of two ranks
        losses.append([(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss (.+)$", output, re.M)])
    assert [step for run in losses for step, _ in run] == [10, 20, 30, 40, 50, 60]
    first, second = ([loss for _, loss in run] for run in losses)
    assert first == sorted(first, reverse=True)
    assert second[-1] < first[-1]


IN_ONE_PROCESS = {"testing.md", "races.md"}  # pages whose ranks are all of one process, or alike by themselves


def test_examples_that_make_a_model_give_all_ranks_the_same_weights():
    """Sharding sends and compares no values: each rank keeps its part of what it has drawn itself."""
    seeded = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for script in re.split(r"^# train\.py$", "".join(blocks), flags=re.MULTILINE):
            sharded = re.search(r"fully_shard\(|shard_by_class\(|shard_by_size\(|shard_auto\(", script)
            before = script[: sharded.start()] if sharded else ""
            if "nn." in before and ".backward()" in script and page.name not in IN_ONE_PROCESS:
                assert "torch.manual_seed(" in before, page.name
                seeded.append(page.name)
    assert len(seeded) > 10, seeded


def test_every_error_is_explained():
    page = (ROOT / "docs" / "errors.md").read_text()
    kinds = defined((PACKAGE / "_errors.py").read_text())
    kinds = {name for name in kinds if "." not in name}
    assert len(kinds) > 25
    assert {name for name in kinds if not re.search(rf"`(composable_shard\.)?{name}`", page)} == set()


def test_the_picture_on_the_first_page_is_made_by_the_script_beside_it():
    text = README.read_text()
    (picture,) = re.findall(r"!\[[^\]]*\]\(docs/(\w+\.png)\)", text)
    (script,) = re.findall(r"`python (tutorials/\w+\.py)`", text)
    assert f'"{picture}"' in (ROOT / script).read_text()
