"""Run programs of other libraries with torch's FSDP2 and with composable_shard, and compare the results.

    python downstream/run.py                                      # all; environments are created on first use
    python downstream/run.py --only accelerate_fsdp2,peft_adapters  # these files of rows/
    python downstream/run.py --only torch_utils --row AveragedModel # rows whose title contains this text
    python downstream/run.py --table docs/integrations_table.md   # also write the page with all results
    python downstream/run.py --no-run --table docs/integrations_table.md    # only write the page

Results are stored in results.json; running a part again replaces only its rows. The exit status is 1 if a row is a
defect of composable_shard.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from _load import HERE, files

ROOT = HERE.parent
RESULTS = HERE / "results.json"
DEFECT = "DEFECT"
TORCH = "2.13.0"
ALONE = "  # --no-deps"  # marks a requirement whose own requirements are not installed, for example CUDA-only packages


@dataclass(frozen=True)
class Part:
    """A file of rows, with the arguments of its `Rows(...)`, read without importing the file."""

    name: str
    path: Path
    library: str
    environment: str

    @classmethod
    def of(cls, name: str, path: Path) -> Part:
        for statement in ast.parse(path.read_text()).body:
            match statement:
                case ast.Assign([ast.Name("rows")], ast.Call(ast.Name("Rows"), [ast.Constant(library)], keywords)):
                    given = {each.arg: ast.literal_eval(each.value) for each in keywords}
                    return cls(name, path, str(library), str(given["environment"]))
        raise SystemExit(f"{path}: no line `rows = Rows(LIBRARY, environment=..., ...)`")


def python_of(environment: str, folder: Path, console: Console) -> str:
    """Return the interpreter of an environment. Create the environment if it is missing or its requirements changed."""
    if environment == "torch":
        return sys.executable
    asked = HERE / "environments" / f"{environment}.txt"
    made, stamp = folder / environment, folder / environment / "made-of.txt"
    python = made / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != asked.read_text():
        console.print(f"creating the environment [bold]{environment}[/] (only once)")
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={TORCH}"], check=True)  # first, so that the requirements add no CUDA build
        lines = asked.read_text().splitlines()
        alone = [line.removesuffix(ALONE) for line in lines if line.endswith(ALONE)]
        subprocess.run([*pip, *(line for line in lines if not line.endswith(ALONE)), f"torch=={TORCH}"], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
        stamp.write_text(asked.read_text())
    return str(python)


def run_part(part: Part, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the rows of a file with the two implementations; return their verdicts by title, and the versions."""
    python = python_of(part.environment, options.environments, console)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
    }

    def worker(task: str, *rest: str, timeout: float | None = None) -> str:
        command = [python, str(HERE / "_worker.py"), task, str(part.path), *rest]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True)
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""

    listed = json.loads(worker("list"))
    asked = [i for i, (title, _) in enumerate(listed["rows"]) if options.row.lower() in title.lower()]
    console.rule(f"{part.library}: {', '.join(f'{n} {v}' for n, v in listed['versions'].items())}")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="downstream-") as made:
        folder = Path(options.keep) / part.name if options.keep else Path(made)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(0, len(asked), options.batch):
            some = [str(index) for index in asked[i : i + options.batch]]
            begun = time.monotonic()
            for side in ("torch", "ours"):
                worker(side, str(folder), *some)
            took = time.monotonic() - begun
            verdicts = json.loads(worker("judge", str(folder), *some))
            for index in some:
                title, verdict = listed["rows"][int(index)][0], verdicts[index]
                rows[title] = verdict
                show(console, title, verdict)
            console.print(f"[dim]{len(some)} rows in {took:.0f} s[/]")
    date = datetime.now(UTC).date().isoformat()
    return {"library": part.library, "date": date, "versions": listed["versions"], "rows": rows}


def show(console: Console, title: str, verdict: dict[str, Any]) -> None:
    """Print the verdict of one row."""
    color = {"same": "green", "better": "cyan", DEFECT: "red"}.get(verdict["word"], "yellow")
    console.print(f"[{color}]{verdict['word']:15}[/] {title}{_difference(verdict)}", highlight=False)
    if verdict["text"]:
        console.print(f"                {verdict['text']}", style="dim", markup=False, highlight=False)


def _difference(verdict: dict[str, Any]) -> str:
    return f" ({verdict['difference']:.0e})" if verdict["difference"] else ""


def page(results: dict[str, Any]) -> str:
    """Format the results as a Markdown page with a section and a table for each library."""
    count = sum(len(part["rows"]) for part in results.values())
    last = max((part["date"] for part in results.values() if "date" in part), default="")
    made = f"{count} programs, generated by `make downstream`"
    head = ["# Results with other libraries", "", f"{made}, last run {last}." if last else f"{made}."]
    return "\n".join([*head, *(line for part in results.values() for line in _section(part)), ""])


def _section(part: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    run = f"{versions}; run {part['date']}" if "date" in part else versions
    yield from ("", f"## {part['library']}", "", f"{run}.", "", "| program | result | details |", "|---|---|---|")
    for title, row in part["rows"].items():
        result, details = _result(row)
        yield f"| {_cell(title)} | {result} | {_cell(details)} |"


def _result(row: dict[str, Any]) -> tuple[str, str]:
    """Return the text for a verdict of `_compare.judge`, and its details."""
    ours, _, torchs = row["text"].partition("torch: ")
    match row["word"]:
        case "same" if not row["difference"]:
            return "bitwise identical", ""
        case "same":
            return f"within {row['difference']:.0e}", row["text"]
        case "better" if "differ from the unsharded model" in torchs:
            return "matches the unsharded model", f"FSDP2: {torchs}"
        case "better":
            return "works" if "ours runs" in ours else "matches the unsharded model", f"FSDP2 fails: {torchs}"
        case "torch fails too":
            return "fails with both", torchs.partition(" / ours: ")[0]
    return row["word"], row["text"]


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def kept() -> dict[str, Any]:
    """Return the stored results by name of the file of rows."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files of rows, separated by commas (default: all)")
    parser.add_argument("--row", default="", help="run only rows whose title contains this text")
    parser.add_argument("--batch", type=int, default=8, help="number of rows that share one import of the libraries")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the outputs and errors of all ranks in FOLDER")
    parser.add_argument("--environments", type=Path, default=ROOT / ".downstream", help="folder of the environments")
    parser.add_argument("--no-run", action="store_true", help="run nothing; only write the page from results.json")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the page with all results")
    options = parser.parse_args()
    known = files()
    options.files = [name for name in options.only.split(",") if name] or ([] if options.no_run else list(known))
    if unknown := [name for name in options.files if name not in known]:
        parser.error(f"no file rows/{unknown[0]}.py; choose from {', '.join(known)}")
    return options


def main() -> int:
    """Run the selected rows, store the results, and return 1 if a row is a defect."""
    options = parse()
    console = Console()
    defects = 0
    for name in options.files:
        found = run_part(Part.of(name, files()[name]), options, console)
        defects += sum(row["word"] == DEFECT for row in found["rows"].values())
        results = kept()  # read again: another run may have stored results meanwhile
        if options.row and name in results:
            found["rows"] = results[name]["rows"] | found["rows"]
        results[name] = found
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    if options.table:
        options.table.write_text(page(kept()))
    console.print(f"{defects} defects" if defects else "no defects")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
