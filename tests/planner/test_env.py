"""`python -m composable_shard env`: what it prints about a machine, and what it hides."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from composable_shard.cli import env
from composable_shard.cli import main as command_line
from composable_shard.planner import environment
from composable_shard.planner.environment import BACKENDS, HIDDEN, PACKAGES, Device, Environment

CPU = Environment(
    versions={"python": "3.11.7", "torch": "2.13.0+cpu", "CUDA": None, **dict.fromkeys(PACKAGES, "1.0")},
    torch_build={"for": "CPU"},
    platform={"system": "Linux-6.1"},
    devices=(Device("cpu", "A processor", 25 * 10**9, 20 * 10**9),),
    backends={**dict.fromkeys(BACKENDS, False), "gloo": True},
    tools={"C++ compiler": "/usr/bin/g++", "Python.h": "/usr/include/Python.h", "triton": None},
    variables={"OMP_NUM_THREADS": "1"},
)
CUDA = replace(
    CPU,
    devices=(*CPU.devices, Device("cuda", "A GPU", 80 * 10**9, None)),
    backends={**CPU.backends, "nccl": True},
    tools={**CPU.tools, "triton": "3.5.0"},
)


def support(seen):
    return {each.what: (each.state, each.why) for each in seen.support}


def test_the_text_for_a_machine_without_an_accelerator(monkeypatch, capsys):
    bare = {**CPU.versions, "xxhash": None, "safetensors": None, "rich": None, "matplotlib": None, "ray": None}
    seen = replace(CPU, versions=bare, tools={**CPU.tools, "C++ compiler": None})
    monkeypatch.setattr(env, "environment", lambda: seen)
    assert command_line.main(["env"]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
Versions
  python        3.11.7
  torch         2.13.0+cpu
  CUDA          not found
  rich          not found
  matplotlib    not found
  safetensors   not found
  xxhash        not found
  transformers  1.0
  accelerate    1.0
  lightning     1.0
  peft          1.0
  ray           not found

Build of torch
  for  CPU

Platform
  system        Linux-6.1
  C++ compiler  not found
  Python.h      /usr/include/Python.h
  triton        not found

Devices
  type  name         memory   free
  cpu   A processor  25.0 GB  20.0 GB

Backends of torch.distributed
  gloo  available
  nccl  not in this build of torch
  mpi   not in this build of torch
  ucc   not in this build of torch
  xccl  not in this build of torch

Environment variables
  OMP_NUM_THREADS  1

What works here
  torch                              yes         2.13.0+cpu (tested with 2.11 to 2.15)
  operating system                   yes         Linux
  communication                      falls back  no accelerator: gloo, with broadcasts, messages and local sums
  torch.compile                      no          no C++ compiler: Inductor does not work on CPU; 'aot_eager' does
  checksums of checkpoints           falls back  xxhash is not installed: CRC32, about six times slower than xxhash's
  checkpoints for other programs     falls back  safetensors is not installed: only other programs need it
  tables and progress on a terminal  falls back  rich is not installed: plain text, no progress
  figures                            no          matplotlib is not installed: composable_shard.report cannot draw
""",
    )


def test_json_contains_everything(capsys):
    assert command_line.main(["env", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen.keys() == {
        "environment", "versions", "torch_build", "platform", "devices", "backends", "tools", "variables", "support",
    }  # fmt: skip
    assert seen["environment"] == 1
    assert {"python", "composable_shard", "torch", "numpy", "CUDA", "NCCL", *PACKAGES} == seen["versions"].keys()
    assert seen["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert seen["backends"]["gloo"] is True
    assert seen["devices"][0]["kind"] == "cpu"
    assert 0 < seen["devices"][0]["free"] <= seen["devices"][0]["memory"]
    assert {each["state"] for each in seen["support"]} <= {"yes", "untested", "falls back", "no"}
    assert len(seen["support"]) == len({each["what"] for each in seen["support"]}) == 8


def test_the_text_has_a_table_for_each_part_of_the_json(capsys):
    command_line.main(["env"])
    text = capsys.readouterr().out
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == [table.title for table in env.tables(CPU)]
    assert all(f"\n  {package} " in text for package in PACKAGES)


def test_on_a_terminal_rich_draws_the_tables(monkeypatch, capsys):
    monkeypatch.setattr(env, "environment", lambda: CPU)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "150")
    assert command_line.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "────" in text
    assert "A processor" in text


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["env", "--help"])
    assert "python -m composable_shard env > env.txt" in capsys.readouterr().out


def test_the_command_line_page_documents_every_command():
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    for command in command_line.COMMANDS:
        assert f"\n| [`{command.NAME}`](#{command.NAME}) |" in page
        section = page.split(f"\n## {command.NAME}\n")[1].split("\n## ")[0]
        assert re.search(rf"\n\$ \S.* -m composable_shard {command.NAME}\b", section)  # possibly with a launcher


# ---- variables


def test_only_variables_that_affect_the_library_are_shown():
    given = {
        "COMPOSABLE_SHARD_DEBUG": "1", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_AVOID_RECORD": "1",
        "OMP_NUM_THREADS": "2", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512",
        "PATH": "/bin", "HF_TOKEN": "hf_x", "MY_TORCH_": "1",
    }  # fmt: skip
    shown = environment._shown(given)
    assert set(given) - set(shown) == {"PATH", "HF_TOKEN", "MY_TORCH_"}
    assert all(shown[name] == given[name] for name in shown)


def test_every_variable_that_the_package_reads_is_shown():
    package = Path(environment.__file__).parents[1]
    named = {
        word.strip("\"'`=,.():")
        for path in package.rglob("*.py")
        for word in path.read_text().split()
        if word.strip("\"'`").startswith("COMPOSABLE_SHARD_") and len(word) > len("COMPOSABLE_SHARD_") + 4
    }
    names = {name.partition("=")[0] for name in named}
    assert {"COMPOSABLE_SHARD_DEBUG", "COMPOSABLE_SHARD_TRANSPORT"} <= names
    assert set(environment._shown(dict.fromkeys(names, "1"))) == names


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_API_KEY", "short"),
        ("TORCH_HUB_TOKEN", "short"),
        ("GLOO_PASSWORD", "short"),
        ("TORCH_PROXY", "https://user:word@host/path"),
        ("TORCH_X", "hf_abc"),
        ("TORCH_X", "path/AKIAABCDEFGHIJKLMNOP"),
        ("TORCH_X", "eyJhbGciOi.e30.abc"),
        ("TORCH_X", "0123456789abcdef0123456789abcdef"),
    ],
)
def test_values_that_look_like_secrets_are_hidden(name, value):
    assert environment._shown({name: value}) == {name: HIDDEN}


def test_the_home_directory_is_not_shown(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert environment._shown({"TORCH_HOME": "/home/someone/cache"}) == {"TORCH_HOME": "~/cache"}


# ---- what works


@pytest.mark.parametrize(
    ("version", "state"), [("2.10.1", "no"), ("2.11.0", "yes"), ("2.15.0+cu130", "yes"), ("2.16.0a0", "untested")]
)
def test_versions_of_torch(version, state):
    assert support(replace(CPU, versions={**CPU.versions, "torch": version}))["torch"][0] == state


def test_communication_by_device_and_backend():
    assert support(CPU)["communication"][0] == "falls back"
    assert support(CUDA)["communication"] == ("yes", "nccl: gathers directly into the memory of the weights")
    without = replace(CUDA, backends=CPU.backends)
    assert support(without)["communication"] == ("no", "this build of torch lacks nccl, the backend for cuda")
    other = replace(CUDA, devices=(*CPU.devices, Device("mtia", "Another", None, None)))
    assert support(other)["communication"][0] == "untested"
    forced = replace(CPU, variables={"COMPOSABLE_SHARD_TRANSPORT": "p2p"})
    assert support(forced)["communication"][1].endswith("; COMPOSABLE_SHARD_TRANSPORT is set to 'p2p'")


@pytest.mark.parametrize(("seen", "tool"), [(CPU, "C++ compiler"), (CPU, "Python.h"), (CUDA, "triton")])
def test_compiling_needs_its_tools(seen, tool):
    assert support(seen)["torch.compile"][0] == "yes"
    state, why = support(replace(seen, tools={**seen.tools, tool: None}))["torch.compile"]
    assert state == "no"
    assert f"no {tool}" in why
