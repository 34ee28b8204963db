"""`python -m composable_shard run`: a script runs as it does without it, and uses this library as torch's FSDP2."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from _pool import POOL
from composable_shard.cli import main as command_line
from composable_shard.cli.run import split

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "composable_shard", "run"]
ALONE = [sys.executable]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
LIMIT_S = 120


def start(command, folder, **environment):
    """Run a command in a separate process, which is killed at the time limit."""
    environment = {**ENVIRONMENT, **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def write(path, source):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


@pytest.fixture(scope="module")
def forks():
    """A process that forks for each run, because importing torch takes long."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "_forking_run.py"], env=ENVIRONMENT, stdin=-1, stdout=-1, text=True
    )
    yield process
    process.stdin.close()
    try:
        process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def run(forks, tmp_path, tmp_path_factory):
    """Run our command in a fork of that process."""

    def call(*arguments):
        folder = tmp_path_factory.mktemp("output")
        output, errors = folder / "output", folder / "errors"
        forks.stdin.write(json.dumps([str(output), str(errors), str(tmp_path), ["run", *arguments]]) + "\n")
        forks.stdin.flush()
        assert select.select([forks.stdout], [], [], LIMIT_S)[0], f"{arguments}: does not end"
        code = int(forks.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())

    return call


@pytest.fixture
def both(run, tmp_path):
    """Run a script directly and by our command, and check that output and exit code are equal."""

    def call(*arguments):
        alone, ours = start([*ALONE, *arguments], tmp_path), run(*arguments)
        assert (ours.stdout, ours.stderr, ours.returncode) == (alone.stdout, alone.stderr, alone.returncode)
        return ours

    return call


SHOW = '''
"""The script's own words."""
import sys
print(sys.argv, sys.path[0])
for name in sorted(globals()):
    value = globals()[name]
    print(name, type(value) if name in ("__loader__", "sys") else re.sub(" at 0x.*>", "", str(value)))
assert vars(sys.modules["__main__"]) is globals()
'''.replace("import sys", "import re, sys")


# ---- the same as without the command


@pytest.mark.parametrize("path", ["show.py", "./inner/../inner/show.py", "link.py", "{here}/inner/show.py"])
def test_a_script_has_the_same_name_path_and_arguments(both, tmp_path, path):
    write(tmp_path / "show.py", SHOW)
    write(tmp_path / "inner" / "show.py", SHOW)
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "show.py")
    done = both(path.format(here=tmp_path), "--lr", "3e-4", "-m", "--help", "--", "-x")
    assert "'--lr', '3e-4', '-m', '--help', '--', '-x']" in done.stdout
    assert "__name__ __main__" in done.stdout


@pytest.mark.parametrize("name", ["package.show", "package", "single"])
def test_a_module_has_the_same_name_path_and_arguments(both, tmp_path, name):
    write(tmp_path / "package" / "__init__.py", "import sys; print('package', sys.argv, sys.path[0])")
    write(tmp_path / "package" / "show.py", SHOW)
    write(tmp_path / "package" / "__main__.py", SHOW)
    write(tmp_path / "single.py", SHOW)
    done = both("-m", name, "-h", "word")
    assert "'-h', 'word']" in done.stdout


@pytest.mark.matrix
def test_a_script_in_a_new_process_has_the_same_environment(tmp_path):
    """The runs above are forks of a process that has imported the library already."""
    write(tmp_path / "inner" / "show.py", SHOW + "1 / 0")
    for arguments in (["inner/show.py"], ["-m", "inner.show"]):
        alone, ours = (start([*how, *arguments, "-x"], tmp_path) for how in (ALONE, RUN))
        assert (ours.stdout, ours.returncode) == (alone.stdout, alone.returncode)
        assert "in <module>" in ours.stderr
        assert ours.stderr == re.sub(r'  File "<frozen runpy>".*\n', "", alone.stderr)


def test_a_directory_runs_its_main_module(both, tmp_path):
    write(tmp_path / "program" / "__main__.py", SHOW)
    assert "__name__ __main__" in both("program", "word").stdout


def test_a_compiled_script_runs(both, tmp_path):
    import py_compile

    py_compile.compile(str(write(tmp_path / "show.py", "print(__file__, __name__)")), cfile=str(tmp_path / "show.pyc"))
    assert "show.pyc __main__" in both("show.pyc").stdout


@pytest.mark.matrix
def test_with_safe_path_nothing_is_added_to_the_path(tmp_path):
    write(tmp_path / "inner" / "show.py", "import sys; print(sys.path)")
    alone, ours = (start([*how, "inner/show.py"], tmp_path, PYTHONSAFEPATH="1") for how in (ALONE, RUN))
    assert ours.stdout == alone.stdout
    assert ours.returncode == 0


ENDS = {
    "an error": "def inner():\n    raise ValueError('mine')\ninner()",
    "a chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('mine') from error",
    "a group": "raise ExceptionGroup('mine', [ValueError(1)])",
    "a syntax error": "print('never')\nthis is no python",
    "an error of an import": "import other",
    "an exit": "import sys; sys.exit(7)",
    "an exit with words": "import sys; sys.exit('words')",
    "an exit with nothing": "raise SystemExit",
    "an interrupt": "raise KeyboardInterrupt",
    "a hook of its own": """
import sys
def hook(kind, value, traceback):
    print("hooked", kind, value, traceback.tb_frame.f_code.co_name, value.__traceback__ is traceback)
sys.excepthook = hook
raise ValueError("mine")""",
    "an error at the end": "import atexit\n@atexit.register\ndef last():\n    print('last')\nraise ValueError('mine')",
    "a killed process": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_with_the_same_output_and_exit_code(both, tmp_path, end):
    write(tmp_path / "script.py", ENDS[end])
    write(tmp_path / "other.py", "import missing_module_of_nobody")
    done = both("script.py")
    assert (done.returncode == 0) == (end == "an exit with nothing")
    assert "runpy" not in done.stderr
    assert "composable_shard" not in done.stderr


def test_the_traceback_of_a_module_has_only_its_own_frames(run, tmp_path):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "broken.py", "raise ValueError('mine')")
    write(tmp_path / "broken" / "__init__.py", "raise ValueError('mine')")
    write(tmp_path / "broken" / "part.py", "")
    for name, file in (("package.broken", "package/broken.py"), ("broken.part", "broken/__init__.py")):
        done = run("-m", name)
        assert done.returncode == 1
        files = re.findall(r'File "(.*)", line', done.stderr)
        assert files == [str(tmp_path / file)], done.stderr


def heed_interrupts():
    """Restore the default for Ctrl-C. In a background job of a shell, tests and their children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.matrix
def test_ctrl_c_has_the_same_effect_as_for_a_script(tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import atexit, time
        atexit.register(print, "cleaned up", flush=True)
        print("ready", flush=True); time.sleep(100)
        """,
    )
    ends = []
    for how in (ALONE, RUN):
        process = subprocess.Popen(
            [*how, script],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=-1,
            stderr=-1,
            text=True,
            preexec_fn=heed_interrupts,
        )
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=LIMIT_S)
            # The interrupt may arrive during `print`, so the markers in the traceback can differ.
            ends.append((output, re.sub(r" *\^+\n", "", errors), process.returncode))
        finally:
            process.kill()
            process.wait()
    assert ends[0] == ends[1]
    assert ends[0][0] == "cleaned up\n"
    assert ends[0][2] == -signal.SIGINT


# ---- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "can't open file 'missing.py': No such file or directory"),
        (["missing/script.py", "-x"], "can't open file 'missing/script.py'"),
        (["empty"], "can't find __main__.py in 'empty'"),
        (["-m", "missing_module"], "no module named missing_module"),
        (["-m", "missing_package.part"], "no module named missing_package.part"),
        (["-m", "empty.part"], "no module named empty.part"),
        (["-m", "empty"], "no module named empty.__main__"),
        (["-m", ".relative"], "'.relative' is not the full name of a module"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_missing_script_or_module_gives_a_message_of_one_line_and_exit_code_2(arguments, words, run, tmp_path):
    (tmp_path / "empty").mkdir()
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"python -m composable_shard run: {words}")


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "-m"], ["run", "--unknown", "script.py"], ["unknown"]])
def test_wrong_arguments_print_the_usage_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        command_line.main(arguments)
    assert left.value.code == 2
    assert "usage: " in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_has_an_example(asked, capsys):
    for arguments, words in (([asked], "run a script"), (["run", asked], "torchrun --nproc-per-node 8 -m composable")):
        with pytest.raises(SystemExit) as left:
            command_line.main(arguments)
        assert left.value.code == 0
        assert words in capsys.readouterr().out


def test_a_command_line_is_split_after_the_script_or_module():
    assert split(["run", "a.py", "-m", "b"]) == (["run", "a.py"], ["-m", "b"])
    assert split(["run", "-m", "a.b", "c.py", "-h"]) == (["run", "-m", "a.b"], ["c.py", "-h"])
    assert split(["run", "-ma.b", "--", "x"]) == (["run", "-ma.b"], ["--", "x"])
    assert split(["run", "-h", "a.py"]) == (["run", "-h", "a.py"], [])


def test_the_program_is_an_entry_point_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"composable-shard": "composable_shard.cli.main:main"}


def test_the_program_shows_its_name_in_messages(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/composable-shard", "run"])
    with pytest.raises(SystemExit):
        command_line.main()
    assert capsys.readouterr().err.startswith("usage: composable-shard run ")


@pytest.mark.matrix
def test_the_program_puts_the_folder_of_the_script_first_in_the_path_like_python(tmp_path):
    """Runs a file like the one that an installer creates for the entry point, in another directory."""
    program = write(
        tmp_path / "bin" / "composable-shard",
        "import sys\nfrom composable_shard.cli.main import main\nsys.exit(main())",
    )
    write(tmp_path / "inner" / "show.py", "import sys; print(sys.path[0], sys.argv)")
    done = start([sys.executable, program, "run", "inner/show.py"], tmp_path)
    assert done.stdout == f"{tmp_path / 'inner'} ['inner/show.py']\n", done.stderr


# ---- training

TRAIN = """
import sys
import time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

def train():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(model, FSDPModule) and all(isinstance(param, DTensor) for param in model.parameters())
    home = type(model).__mro__[1].__module__.split(".")[0]
    return f"{home} {dist.get_rank()} {loss.item():.6f}"

if __name__ == "__main__":
    dist.init_process_group("gloo")
    sys.stdout.write(f"{train()} {sys.argv[1:]}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    time.sleep(0.5)  # a thread of gloo that drops the last tensor while Python ends makes torch abort
"""


def train_alone(rank, world):
    names = {}
    exec(TRAIN, names)
    return names["train"]()


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["script", "module"])
def test_a_script_under_torchrun_uses_this_library_as_fsdp2(tmp_path, how):
    write(tmp_path / "train.py", TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    what = ["train.py"] if how == "script" else ["-m", "train"]
    done = start([*torchrun, "-m", "composable_shard", "run", *what, "--lr", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    alone = POOL.run("test_run:train_alone", 2)
    assert [line.partition(" ")[0] for line in alone] == ["torch", "torch"]
    ours = [line.replace("torch", "composable_shard", 1) + " ['--lr', '1']" for line in alone]
    assert sorted(done.stdout.splitlines()) == ours


@pytest.mark.matrix
def test_torchrun_gets_the_exit_code_and_the_traceback_of_the_script(tmp_path):
    write(tmp_path / "train.py", "import sys\nif True:\n    raise ValueError('mine')")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = start([*torchrun, "-m", "composable_shard", "run", "train.py"], tmp_path)
    assert done.returncode == 1
    assert f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 3, in <module>' in re.sub(
        r"\[rank\d\]:\s?", "", done.stderr
    )


CHILDREN = """
import multiprocessing, pickle, sys
from concurrent.futures import ProcessPoolExecutor

from torch.distributed.fsdp import fully_shard
import torch.distributed.fsdp as fsdp


class Mine:
    value = 3

    @staticmethod
    def shard():
        return fully_shard

    def __eq__(self, other):
        return type(other) is Mine


def which(mine):
    assert mine == Mine()
    assert fully_shard is fsdp.fully_shard is Mine.shard()
    return fully_shard.__module__.split(".")[0]


def of_grandchild(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(which, [Mine()])[0]


if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    method = sys.argv[1]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        print(which(Mine()), pool.submit(which, Mine()).result(), pool.submit(of_grandchild, method).result())
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("method", "how"),
    [("spawn", "script"), ("spawn", "module"), ("forkserver", "script"), ("fork", "script")],
)
def test_objects_of_a_script_can_be_pickled_and_child_processes_are_installed_too(tmp_path, method, how):
    write(tmp_path / "children.py", CHILDREN)
    done = start([*RUN, *(["children.py"] if how == "script" else ["-m", "children"]), method], tmp_path)
    assert done.stdout == "composable_shard composable_shard composable_shard\n", done.stderr


@pytest.mark.matrix
def test_child_processes_find_the_library_if_the_current_directory_is_a_checkout(tmp_path):
    write(tmp_path / "children.py", "import os\nos.chdir('/')\n" + CHILDREN)
    done = start([*RUN, tmp_path / "children.py", "spawn"], ROOT, PYTHONPATH="")
    assert done.stdout == "composable_shard composable_shard composable_shard\n", done.stderr
