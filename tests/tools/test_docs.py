"""The docs are correct: files, names and links exist, and examples run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from _launched import finish
from _pool import more
from composable_shard.testing import spmd

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "composable_shard"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
LINKED = [*PAGES, *REFERENCE, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]


def test_every_file_named_on_a_page_exists():
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"(?:tests|bench|tutorials|docs)/[\w./-]+\.(?:py|md|json)", page.read_text())
    }
    assert len(named) > 50
    assert {(page, name) for page, name in named if not (ROOT / name).exists()} == set()


def rows(page):
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] != "shown by"]


def test_every_row_of_the_migration_page_names_a_test_or_is_unsupported():
    found = rows(ROOT / "docs" / "migration.md")
    assert len(found) > 50
    untested = [" ".join(row) for row in found if "tests/" not in row[-1]]
    assert [row for row in untested if not re.search("not supported|never run", row)] == []


def tool(name):
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_files_is_generated_from_their_docstrings():
    page = (ROOT / "docs" / "files.md").read_text()
    assert page == tool("list_files").page(), "run: python tools/list_files.py"
    listed = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", page, flags=re.MULTILINE)
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert {name for name, _ in listed} == {str(path) for path in paths}
    assert [name for name, purpose in listed if not purpose] == []


def test_the_page_of_private_names_is_generated_from_the_table():
    page = (ROOT / "docs" / "fsdp2_names.md").read_text()
    assert page == tool("list_fsdp2_names").page(), "run: python tools/list_fsdp2_names.py"


def test_files_that_the_architecture_page_names_exist():
    named = re.findall(r"`(\w+/[\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 20
    assert [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()] == []


def defined(source):
    """The classes and functions of a file, and the methods of its classes as Class.method."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            names |= {f"{node.name}.{each.name}" for each in ast.iter_child_nodes(node) if hasattr(each, "name")}
    return names


def check_named(named):
    """Check that these files exist in the package, and define these names, which may be empty."""
    for path, name in named:
        assert (PACKAGE / path).exists(), path
        assert not name or name in defined((PACKAGE / path).read_text()), f"{path}: {name}"


def test_the_table_of_changes_names_existing_code():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = text.partition("## Where to change what")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", rows)
    assert len(named) > 40
    check_named(named)


def test_the_life_of_a_parameter_has_twelve_steps_and_names_existing_code():
    text = (ROOT / "docs" / "life-of-a-parameter.md").read_text()
    steps = re.split(r"^## (?=\d+\. )", text, flags=re.MULTILINE)[1:]
    assert [int(step.partition(".")[0]) for step in steps] == list(range(1, 13))
    for step in steps:
        assert re.search(r"^In `", step, flags=re.MULTILINE), step
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", text)
    inside = [(path, name) for path, name in named if not path.startswith("tests/")]
    check_named(inside)
    wings = {path.partition("/")[0] for path, _ in inside if "/" in path}
    assert wings == {"_module", "_group", "_engine", "_plan", "_memory", "_comm", "_graph", "_compile"}


CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in HEADING.findall(text)}


HEADING = re.compile(r"^#+ .*$", re.MULTILINE)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_has_a_target(page):
    for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
        leads_to = (page.parent / target) if target else page
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to.read_text()), f"{target}#{anchor}"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_first_page_is_short():
    assert len(README.read_text().splitlines()) <= 130


@pytest.mark.timeout(240)
def test_the_script_on_the_first_page_trains_with_the_command_below_it(tmp_path):
    script = blocks("python")[0]
    assert 15 <= len(script.splitlines()) <= 32
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
    (plan,) = blocks("text")
    assert [line for line in plan.splitlines() if line != "..." and line not in output.splitlines()] == []


def results(entry, part):
    """The results of a part of a GPU queue entry on an H100, by engine (ours, fsdp2)."""
    file = ROOT / "bench" / "results" / "gpu" / f"{entry}-h100-80gb-hbm3.json"
    return json.loads(file.read_text())["parts"][part]["figures"]["results"]


def pair(entry, part, **settings):
    """Ours and FSDP2's result with these settings."""
    chosen = [each for each in results(entry, part) if settings.items() <= each.items()]
    ours, theirs = ([each for each in chosen if each["engine"] == engine] for engine in ("ours", "fsdp2"))
    return ours[0], theirs[0]


def with_quartiles(ratio):
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def figures_of_the_first_page():
    """Figure, composable_shard, FSDP2, ratio and entry of each row, from the stored results."""
    for world in (8, 512):
        ours, theirs = pair("host-overhead", "direct", world=world)
        times = [f"{each['added']['median'] / 1000:.2f} ms" for each in (ours, theirs)]
        yield "CPU time added per block", *times, with_quartiles(ours["ratio"]), "`host-overhead`"
    ours, theirs = pair("steps-1b", "batch8-direct")
    times = [f"{each['wall_ms']['median']:.0f} ms" for each in (ours, theirs)]
    yield "step with SGD, limited by the host", *times, with_quartiles(ours["wall_ratio"]), "`steps-1b`"
    ours, theirs = pair("gpu-bound-steps", "eager", tokens=4096)
    times = [f"{each['step_ms']['median']:.1f} ms" for each in (ours, theirs)]
    yield "forward and backward, limited by the GPU", *times, with_quartiles(ours["over_fsdp2"]), "`gpu-bound-steps`"
    for world in (8, 64):
        ours, theirs = pair("memory", "1b", world=world)
        sizes = [f"{each['peak'] / 2**20:,.0f} MiB" for each in (ours, theirs)]
        yield "peak of allocated memory", *sizes, f"{ours['peak'] / theirs['peak']:.2f}", "`memory`"
    (case,) = (each for each in results("nccl-peaks", "wide") if each["case"] == "bf16")
    sizes = [f"{case['peaks'][engine]['nbytes'] / 2**20:,.0f} MiB" for engine in ("ours", "fsdp2")]
    yield "added peak, 2 NCCL ranks", *sizes, f"{case['ratio']:.2f}", "`nccl-peaks`"


def test_the_figures_on_the_first_page_match_the_stored_results():
    table = [row for row in rows(README) if len(row) == 6 and row[0] != "figure"]
    assert [(row[0], *row[2:]) for row in table] == list(figures_of_the_first_page())


def test_the_settings_on_the_first_page_match_the_stored_commands():
    file = "bench/results/gpu/{}-h100-80gb-hbm3.json"
    commands = {
        entry: " ".join(json.loads((ROOT / file.format(entry)).read_text())["parts"][part]["command"])
        for entry, part in [
            ("host-overhead", "direct"),
            ("steps-1b", "batch8-direct"),
            ("memory", "1b"),
            ("nccl-peaks", "wide"),
        ]
    }
    assert "--world 8,64,512" in commands["host-overhead"]
    assert "--dtype bfloat16" in commands["steps-1b"]
    assert "--sizes 1b --batch 8" in commands["steps-1b"]
    assert "--sizes 1b --world 8,64" in commands["memory"]
    assert "--width 1024" in commands["nccl-peaks"]


FAULTS = {  # rows of the tables of faults, and the cases of bench/faults.py
    "skips an optimizer step": ["one rank skips an optimizer step"],
    "uses another learning rate, or drops a gradient": [
        "one rank has another learning rate",
        "one rank drops a gradient",
    ],
    "fails in forward and retries": ["one rank fails in a forward, and tries again"],
    "skips a layer": ["one rank leaves a layer out"],
    "skips a layer, or evaluates alone": ["one rank leaves a layer out", "one rank evaluates alone"],
    "runs an extra microbatch": ["one rank runs a micro-batch more"],
    "runs two models in another order": ["ranks run two models in another order"],
    "exits, or fails in forward, in backward or between steps": [
        "one rank ends",
        "one rank fails in a forward",
        "one rank fails in a backward",
        "one rank fails between steps",
    ],
    "is killed": ["one rank is killed"],
    "is later than the timeout": ["one rank is later than the limit"],
    "is slow for some seconds": ["one rank is slow for some seconds"],
    "raises the same exception in forward as the other rank, and both continue": [
        "all ranks fail in a forward, and go on"
    ],
}
OUTCOMES = {
    "silent": "silently wrong",
    "late": "timeout",
    "abort": "process aborted",
    "obscure": "gloo error",
    "clear": "error",
    "exact": "results unchanged",
}


def fault_outcome(cases, engine):
    """The cell of a table of faults, from the stored results."""
    results = json.loads((ROOT / "bench" / "results" / "faults-cpu-torch2.13.json").read_text())["results"]
    chosen = [each for each in results if each["case"] in cases and each["engine"] == engine]
    assert {each["case"] for each in chosen} == set(cases)
    (ended,) = {each["ended"] for each in chosen}
    if ended not in ("obscure", "clear"):
        return OUTCOMES[ended]
    times = [f"{each:.1f}" if each >= 0.1 else f"{each:.2f}" for each in sorted(each["seconds"] for each in chosen)]
    return f"{OUTCOMES[ended]}, {' to '.join(dict.fromkeys((times[0], times[-1])))} s"


@pytest.mark.parametrize(("page", "count"), [("README.md", 3), ("docs/errors.md", 11)])
def test_the_tables_of_faults_match_the_stored_results(page, count):
    table = {row[0]: row[1:] for row in rows(ROOT / page) if row[0] in FAULTS}
    assert len(table) == count
    expected = {name: [fault_outcome(FAULTS[name], engine) for engine in ("fsdp2", "ours")] for name in table}
    assert table == expected


SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
GENERATED = ("docs/integrations_table.md", "docs/files.md", "docs/fsdp2_names.md")
NOT_GUIDES = ("docs/reference/", *GENERATED, "bench/", "changelog.d/")


def guides():
    """The pages of the site, except the API reference and generated tables."""

    def pages(nav):
        if isinstance(nav, str):
            return [nav]
        return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]

    return [page for page in pages(SITE) if not page.startswith(NOT_GUIDES)]


def test_the_site_stays_small():
    pages = guides()
    assert 20 <= len(pages) <= 27
    words = {page: len((ROOT / page).read_text().split()) for page in pages}
    assert sum(words.values()) <= 30_000, words


EVERYDAY = {
    "gradient accumulation": "docs/training.md",
    "fp32 norms": "docs/sharding.md",
    "meta-device model": "docs/sharding.md",
    "overlapped on a GPU": "docs/memory.md",
    "clipping": "docs/training.md",
    "activation checkpointing": "docs/training.md",
    "memory budget costs": "docs/memory.md",
    "back to FSDP2": "docs/migration.md",
    "report a bug": "docs/faq.md",
    "ready for production": "docs/faq.md",
}


def test_everyday_questions_are_headings_two_clicks_away_from_the_first_page():
    first = {target for target, _ in LINK.findall(CODE.sub("", README.read_text()))}
    faq = {f"docs/{target}" for target, _ in LINK.findall((ROOT / "docs" / "faq.md").read_text())}
    assert "docs/faq.md" in first
    for words, page in EVERYDAY.items():
        assert page in first | faq, page
        headings = HEADING.findall(CODE.sub("", (ROOT / page).read_text()))
        assert any(words.lower() in heading.lower() for heading in headings), (words, page)


def examples(page):
    """The Python blocks of a page that are executed. A fence with the word `notest` is not."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run_as_ranks(scripts, ranks, source):
    """Run blocks one after the other on simulated ranks. Returns the names of each rank at the end."""

    def body(world):
        names = {}
        for script in scripts:
            exec(compile(script, source, "exec"), names)
        return names

    return spmd(ranks)(body)


def assert_losses_fall(losses):
    assert len(losses) > 3
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(
    "page",
    [
        "sharding",
        "checkpoints",
        "lora",
        "optimizers",
        "migration",
        "integrations",
        "low_precision",
        "cuda_graphs",
    ],
)
def test_the_examples_of_a_guide_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scripts = examples(page)
    assert scripts
    for names in run_as_ranks(scripts, 2, page):
        if "losses" in names:
            assert_losses_fall(names["losses"])


def test_the_examples_about_training_log_their_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for names in run_as_ranks(examples("training"), 2, "training"):
        names["log"].close()
    lines = [json.loads(line) for line in (tmp_path / "runs" / "1" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert {"train/loss", "train/grad_norm", "step/tokens_per_second", "lr", "pool/peak_bytes"} <= lines[-1].keys()


# Ranks that get the same batch, and so have the same losses.
PARALLELISM = {
    "hsdp": [],
    "tensor_parallel": [{0, 1}, {2, 3}],
    "experts": [],
    "pipelines": [],
    "long_sequences": [{0, 1}, {2, 3}],
}


def test_the_examples_about_parallelism_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scripts = dict(re.fullmatch(r"# --- (\w+) ---\n(.*)", each, re.DOTALL).groups() for each in examples("parallelism"))
    assert scripts.keys() == PARALLELISM.keys()
    for name, script in scripts.items():
        losses = [names["losses"] for names in run_as_ranks([script], 4, name)]
        assert any(losses), name
        for each in filter(None, losses):  # the first stage of a pipeline has no losses
            assert_losses_fall(each)
        for same in PARALLELISM[name]:
            assert len({tuple(losses[rank]) for rank in same}) == 1, name
        assert len({tuple(each) for each in losses if each}) > 1, "batches differ by rank"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "ranks"), [more("weights", 4), ("memory", 2), ("compiling", 2), more("offload", 2)])
def test_the_examples_of_a_guide_run_under_torchrun(page, ranks, tmp_path):
    script = "\n".join(examples(page))
    script = script.replace("cs.compile(model)", 'cs.compile(model, backend="aot_eager")')  # seconds instead of minutes
    (tmp_path / "train.py").write_text(script)
    output = started(tmp_path, "--nproc-per-node", str(ranks), "train.py")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for shown in re.findall(r"^```text\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        assert shown in output


@pytest.mark.matrix
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


def started(folder, *arguments):
    """The output of torchrun with these arguments, run in a folder."""
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


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_getting_started_page_is_a_script_that_trains_compiles_and_resumes(tmp_path):
    """The first command runs in eager mode here, as the page allows, and the second one compiled."""
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
        assert found_plan == (command[2] == "2")  # the page shows the plan for two ranks
        losses.append([(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss (.+)$", output, re.M)])
    assert [step for run in losses for step, _ in run] == [10, 20, 30, 40, 50, 60]
    first, second = ([loss for _, loss in run] for run in losses)
    assert first == sorted(first, reverse=True)
    assert second[-1] < first[-1]


IN_ONE_PROCESS = {"testing.md"}  # pages whose ranks run in one process with the same seed


def test_examples_that_create_a_model_set_a_seed():
    """Sharding does not broadcast weights: each rank keeps its part of its own random initialization."""
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


def test_every_error_type_is_documented():
    page = (ROOT / "docs" / "errors.md").read_text()
    kinds = defined((PACKAGE / "errors.py").read_text())
    kinds = {name for name in kinds if "." not in name}
    assert len(kinds) > 25
    assert {name for name in kinds if not re.search(rf"`(composable_shard\.errors\.)?{name}`", page)} == set()


def test_the_script_named_on_the_first_page_creates_its_picture():
    text = README.read_text()
    (picture,) = re.findall(r"!\[[^\]]*\]\(docs/(\w+\.png)\)", text)
    (script,) = re.findall(r"`python (tutorials/\w+\.py)`", text)
    assert f'"{picture}"' in (ROOT / script).read_text()


def test_the_picture_of_a_sharded_weight_shows_the_elements_that_each_rank_stores(tmp_path):
    script = tool("draw_owners")
    shard, hsdp, columns, rows = (script.owners(*layout) for layout in script.LAYOUTS.values())
    every = torch.ones(script.ROWS, script.COLUMNS, dtype=torch.int64)
    for layout, copies in ((shard, 1), (hsdp, 2), (columns, 1), (rows, 1)):
        assert torch.equal(layout.sum(0), copies * every)
    assert [rank[:, 0].sum().item() for rank in shard] == [3, 3, 3, 1]
    assert torch.equal(hsdp[0], hsdp[2])
    assert torch.equal(hsdp[1], hsdp[3])
    assert (columns[0] | columns[2]).any(1).tolist() == 5 * [True] + 5 * [False]  # tp rank 0 has the first outputs
    assert (rows[0] | rows[2]).any(0).tolist() == 4 * [True] + 4 * [False]  # tp rank 0 has the first inputs
    assert script.main([str(tmp_path / "owners.png")]) == 0
    assert (tmp_path / "owners.png").read_bytes().startswith(b"\x89PNG")
