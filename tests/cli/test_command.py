"""The command itself: what it prints, its exit codes, and what it leaves on disk."""

import dataclasses
import errno
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from ranvier import __main__
from ranvier.cli import main, options
from ranvier.cli.main import run_command
from ranvier.cli.ranks import print_once
from ranvier.cli.train import _planned_flags
from ranvier.config import read
from ranvier.config.resolve import resolve
from ranvier.config.run import MeshSettings, Run
from ranvier.launch import start
from ranvier.launch.launchers import Started
from ranvier.mesh import Mesh
from ranvier.system.lease import Owner, heartbeat_content
from ranvier.system.processes import process_state
from tests import tiny_runs
from tests.covering import first
from tests.errors import reports


def ranvier(*args, cwd=None):
    return subprocess.run([sys.executable, "-m", "ranvier", *map(str, args)], capture_output=True, text=True, cwd=cwd,
                          timeout=240, check=False)


@pytest.fixture
def tiny(tmp_path):
    return tiny_runs.flags(tmp_path, model__num_layers=1, batch__global_size=4, train__steps=2, train__sample_tokens=2)


@pytest.mark.parametrize("words", [["train", "{}"], ["check", "{}"], ["export", "{}", "out"], ["import", "{}", "out"],
                                   ["generate", "{}", "--prompt", "a"], ["evaluate", "{}"],
                                   ["check", "gpt-tiny", "--model.pretrained", "{}"]], ids=" ".join)
def test_a_path_that_cannot_be_looked_up_is_an_error_of_the_user(words, capsys):
    """For example a name that is too long, or a path below a folder that this user may not enter."""
    path = f"/{'n' * 300}"
    assert run_command([*(word.format(path) for word in words), "--json"]) == 2
    error, = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "path-unusable" and path in error["where"]


@pytest.mark.parametrize("words", [
    ["import", "{}", "out"], ["generate", "{}", "--prompt", "a"], ["evaluate", "{}"],
    ["check", "gpt-tiny", "--model.pretrained", "{}"], ["check", "gpt-tiny", "--lora.rank=2", "--lora.adapters", "{}"],
    ["check", "gpt-tiny", "--model.family", "transformers", "--model.pretrained", "{}"],
    ["check", "gpt-tiny", "--data.tokenizer", "{}"], ["check", "vit-cifar10", "--data.train", "{}"]], ids=" ".join)
def test_the_home_of_no_user_is_no_bug(words, capsys):
    assert run_command([word.format("~nobody-at-all/x") for word in words]) in (1, 2)
    out, err = capsys.readouterr()
    assert "~nobody-at-all/x" in out + err


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.EIO, errno.EISDIR, errno.EEXIST, errno.ENOTDIR])
def test_other_errors_of_files_keep_their_traceback(number, monkeypatch):
    """A leak of file descriptors, a full disk, a folder that is opened as a file: none is caused by a wrong name."""
    def fail(**settings):
        raise OSError(number, "it fails", "some/file")

    monkeypatch.setattr(main.command, "main", fail)
    with pytest.raises(OSError, match="it fails"):
        run_command(["doctor"])


def test_help_and_version_do_not_import_torch():
    program = ("import sys; from ranvier.cli.main import run_command\n"
               "codes = [run_command([*args]) for args in (['--help'], ['train', '--help-all'], ['--version'])]\n"
               "assert codes == [0, 0, 0], codes\n"
               "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in read.settings():
        assert f"--{read.flag(name)}" in done.stdout
    assert "Global batch size: sequences in one optimizer step" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("args", "text"), [
    (["train", "gpt-tiny", "--batch.global-siz", "3"], "No such option '?--batch.global-siz'?.*--batch.global-size"),
    (["train", "gpt-tiny", "--lr", "3"], "No such option '--lr'. Did you mean '--train.learning-rate'"),
    (["train", "gpt-tiny", "--max-iters", "3"], "Did you mean '--train.steps'"),
    (["train", "gpt-tiny", "--data", "text"], "Did you mean '--data.corpus'"),
    (["train", "gpt-tiny", "--resume_from_checkpoint", "x"], r"Did you mean '--resume'\?"),
    (["train", "gpt-tiny", "--train.warmup-ratio", "0.1"], "Did you mean '--train.warmup-steps'"),
    (["train", "--model", "folder"], "Did you mean '--model.pretrained'"),
    (["train", "gpt-tiny", "--deepspeed", "ds.json"], "Did you mean '--optim.shard'"),
    (["train", "gpt-tiny", "--memory.checkpoints", "1"], "Did you mean one of: '--checkpoint.best', '--memory-report'"),
    (["trian"], "No such command 'trian'"), (["train"], "Missing argument 'RECIPE'"),
    (["check", "gpt-tiny", "--ranks", "0"], "Invalid value for '--ranks'"),
    (["plan", "gpt-tiny", "--cluster", "h100", "--price", "free"], "'free' is not a valid number"),
    (["train", "gpt-tyni"], "recipe: is neither .*Did you mean gpt-tiny"),
    (["train", "gpt-tiny", "--seed", "x"], "seed: must be a whole number of at least 0"),
    (["train", "gpt-tiny", "--mesh.col", "3"], "mesh.col: does not divide model.heads 4"),
    (["check", "gone.toml"], "recipe: cannot be read"),
    (["export", "\ud800"], "no command line can contain the word .*ud800"),
    (["import", "a\0b", "c"], "no command line can contain the word .*x00")])
def test_mistakes_are_one_line(capsys, monkeypatch, tmp_path, args, text):
    monkeypatch.chdir(tmp_path)
    assert run_command(args) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"ranvier: error: .*{text}.*\n", err)
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_a_line(capsys):
    assert run_command(["train", "gpt-tiny", "--seed", "x", "--mesh.col", "2", "--model.heads", "3"]) == 2
    assert [line.split(":")[2].strip() for line in capsys.readouterr().err.splitlines()] == [
        "seed", "model.heads", "mesh.col"]


def test_only_the_first_rank_of_a_machine_tells_them(capsys, monkeypatch):
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert run_command(["train", "gpt-tiny", "--mesh.row", "2"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("MPI_LOCALRANKID", "0")
    assert run_command(["train", "gpt-tiny", "--mesh.row", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_refused_before_ranks_are_started(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "start_ranks", lambda *args, **settings: pytest.fail("ranks are started"))
    (tmp_path / "file").write_text("")
    assert run_command(["train", "gpt-tiny", "--run-dir", str(tmp_path / "file" / "run"), "--json"]) == 2
    assert [error["code"] for error in json.loads(capsys.readouterr().out)["errors"]] == ["lease-not-writable"]
    where = tmp_path / "file" / "cache"
    args = ["train", "gpt-tiny", "--data.cache-dir", str(where), "--run-dir", str(tmp_path / "run")]
    with reports("cache-not-writable"):
        assert run_command(args) == 2
    assert capsys.readouterr().err == (
        f"ranvier: error: cache {where}: lacks data of the run, and cannot be written: Not a directory. Choose another "
        "folder with --data.cache-dir.\n")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused(capsys, tmp_path):
    (tmp_path / "run.toml").write_text("")
    assert run_command(["train", "gpt-tiny", "--run-dir", str(tmp_path)]) == 2
    assert re.fullmatch(r"ranvier: error: run-dir: contains the results of another run .* Choose another folder .*\n",
                        capsys.readouterr().err)
    parent = os.getppid()
    owner = dataclasses.replace(Owner.this_process(), pid=parent, started=process_state(parent)[1])
    (tmp_path / ".owner.1").write_bytes(heartbeat_content(3, owner))
    assert run_command(["train", "gpt-tiny", "--run-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err  # not the advice to remove the folder of a run in progress
    assert f"belongs to a run in progress: process {parent} on " in err and "remove that folder" not in err


def test_check_as_json(capsys):
    args = ["check", "gpt-tiny", "--ranks", "4", "--json", "--train.steps", "70", "--pipeline.boundaries", "5"]
    assert run_command(args) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["problems"] == document["warnings"] == []
    assert [stage["blocks"][0] for stage in document["stages"]] == ["embedding", "layer2.attention"]
    assert [(entry["pipe"], entry["ranks"]) for entry in document["memory"]] == [(0, 2), (1, 2)]
    for entry in document["memory"]:
        assert entry["device_bytes"] == sum(entry["device"].values()) > 0
        assert entry["host_bytes"] == sum(entry["host"].values()) > 0 and set(entry["host"]) == {"checkpoint"}
    values = {entry["name"]: (entry["value"], entry["origin"]) for entry in document["values"]}
    assert values["train.steps"] == ("70", "flag")
    assert values["mesh.pipe"] == ("2", "recipe gpt-tiny")
    assert values["comm.transport"] == ("auto", "default")
    assert set(values) == {read.flag(name) for name in read.settings()}


def test_check_finds_everything_at_once(capsys):
    assert run_command(["check", "gpt-tiny", "--ranks", "6", "--json", "--seed", "x", "--model.heads", "3"]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["where"] for problem in problems] == ["seed", "model.heads", "mesh"]
    assert [problem["code"] for problem in problems] == ["malformed-value", "heads-do-not-divide-hidden",
                                                         "mesh-needs-ranks"]
    assert problems[2]["set"] == {"mesh.data": None, "mesh.pipe": None}
    for problem in problems:
        assert set(problem) == {"code", "where", "value", "message", "remedy", "set"}
        assert problem["message"] and problem["remedy"]


@pytest.mark.parametrize(("recipe", "columns"), first(  # the recipes with the most and the longest lines
    [("gpt-tiny", "100"), ("gpt-12b", "80"), ("llama-tiny", "80")], [("gpt-tiny", "100"), *(
        (one, "80") for one in read.recipe_names() if one not in ("bert-sentiment", "vit-cifar10", "smollm2-sft"))]))
def test_check_is_within_thirty_lines(capsys, monkeypatch, recipe, columns):
    """The verdict comes first, then memory, then the settings that differ from the defaults. The other recipes need
    pretrained models."""
    monkeypatch.setenv("COLUMNS", columns)
    assert run_command(["check", recipe]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no problems found" and len(lines) <= 30 and max(map(len, lines)) <= int(columns)
    assert "settings have their defaults" in lines[-1]


def test_check_for_people(capsys):
    assert run_command(["check", "gpt-tiny", "--ranks", "4", "--train.steps", "7"]) == 0
    out = capsys.readouterr().out
    for text in (r"\nfrom flag:  train\.steps 7\n", r"from recipe gpt-tiny:  mesh\.data 2  mesh\.pipe 2  ",
                 r"stage  blocks  parameters  ranks +MiB",
                 r"^no problems found\nwarning: train\.warmup-steps", "settings have their defaults"):
        assert re.search(text, out), text
    assert "comm.transport" not in out and "train.epochs" not in out  # steps override no epochs that are set
    assert run_command(["check", "gpt-tiny", "--ranks", "4", "--all"]) == 0
    assert re.search(r"comm\.transport +auto +default", capsys.readouterr().out)
    assert run_command(["check", "gpt-tiny", "--ranks", "5"]) == 2
    assert "problem: mesh: needs 4 ranks, not 5" in capsys.readouterr().out


def test_doctor(capsys):
    assert run_command(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in ("python", "torch", "cores", "cgroup memory limit", "Gloo", "MPI", "transport", "threads", "cache"):
        assert re.search(rf"\b{text}\b", out), text


def test_doctor_finds_fault(capsys, monkeypatch):
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0",
                        "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run_command(["doctor"]) == 2
    assert "Start the command with one mpiexec" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path, tiny):
    """The import of the compiler takes longer than that of torch, and that of sympy half as long."""
    args = ["train", "gpt-tiny", "--quiet", "--mesh.data", "1", "--mesh.pipe", "1", *tiny]
    program = ("import sys\n"
               "from ranvier.cli.main import run_command\n"
               "from ranvier.train import report\n"
               "report.timeline_picture = report.draw_loss = lambda *given: None\n"  # drawing takes longer than the run
               f"assert run_command({args}) == 0\n"
               "assert not {'torch._dynamo', 'sympy', 'matplotlib'} & sys.modules.keys()\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False,
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_stand_ins_for_the_compiler_behave_like_its_modules():
    """They exist only while blocks are counted."""
    program = ("import sys\n"
               "import torch\n"
               "from ranvier.system.compilation import without_compiler\n"
               "with without_compiler():\n"
               "    torch.ones(3, device='meta') + 1.0\n"
               "    assert type(sys.modules['torch._dynamo']).__name__ == '_ImportedOnUse'\n"
               "    import sympy as early\n"
               "    from torch.fx.experimental.symbolic_shapes import guard_or_false, is_nested_int, sym_eq\n"
               "    assert sym_eq((2, 3), [2, 3]) and not sym_eq((2, 3), (2, 4)) and not isinstance(1, early.Basic)\n"
               "    assert not is_nested_int(2.0)\n"  # not a size: torch, now imported, answers
               "    from torch._dynamo.utils import counters\n"
               "    assert torch._dynamo.__file__ and torch._dynamo.utils.counters is counters\n"
               "import sympy\n"
               "from torch.fx.experimental.symbolic_shapes import ShapeEnv\n"
               "assert early.Basic is sympy.Basic and early.Symbol is sympy.Symbol\n"
               "size = ShapeEnv().create_unbacked_symint()\n"
               "assert not guard_or_false(size == 7) and guard_or_false(sym_eq(size, size))\n"
               "assert torch.compile(torch.sin, backend='eager')(torch.zeros(1)).item() == 0.0\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_training_leaves_its_results_in_its_folder_only(tmp_path, tiny):
    args = ["train", "gpt-tiny", "--mesh.data", 1, "--mesh.pipe", 2, "--comm.transport", "torch", *tiny]
    done = ranvier(*args, "--planned", "mesh.pipe", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "cache", "runs"}
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"gpt-tiny-\d{8}-\d{6}", run_dir.name)
    assert {"run.toml", "metrics.jsonl", "summary.json", "timeline.json"} <= {path.name for path in run_dir.iterdir()}
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    found = read.merge([read.load(str(run_dir / "run.toml"))[1]])
    assert found.problems == ()
    assert (found.run.comm.transport, found.run.pipeline.in_flight) == ("torch", 2)
    assert isinstance(found.run.launch.threads, int)
    (page,) = re.findall(r'id="data">(.*?)</script>', (run_dir / "report.html").read_text(), re.DOTALL)
    origins = {name: origin for name, _, _, origin in json.loads(page)["settings"]}
    assert (origins["mesh.pipe"], origins["comm.transport"], origins["train.eval-every"]) == (
        "auto", "flag", "recipe gpt-tiny"), "as for ranks whose mesh auto chose before they were started"

    again = ranvier("train", run_dir / "run.toml", "--mesh.pipe", 1, "--pipeline.boundaries", "none",
                    "--pipeline.deferred", "none", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    (second,) = set((tmp_path / "runs").iterdir()) - {run_dir}
    assert second.name.startswith(f"{run_dir.name}-")
    repeated = [json.loads(line)["loss"] for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert repeated == pytest.approx(losses, rel=1e-5)


def test_the_ranks_command_says_what_auto_chose():
    before, after = Run(mesh=MeshSettings(data="auto")), resolve(Run(mesh=Mesh(data=2)))
    assert _planned_flags(before, after) == ["--mesh.data", "2", "--planned", "mesh.data"]
    assert not _planned_flags(Run(), resolve(Run()))


@pytest.mark.slow
def test_an_error_of_the_ranks_is_one_line(tmp_path, tiny):
    """With --quiet nothing else is printed."""
    done = ranvier("train", "gpt-tiny", "--quiet", "--mesh.data", 1, "--mesh.pipe", 2,
                   "--comm.transport", "torch", *tiny, "--data.corpus", tmp_path / "missing",
                   "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert re.fullmatch(r"ranvier: error: .*missing.*\n", done.stderr) and not done.stdout


def test_a_quiet_run_prints_nothing(tmp_path, tiny, capfd):
    assert run_command(["train", "gpt-tiny", "--quiet", "--mesh.data", "1", "--mesh.pipe", "1", "--comm.transport",
                        "torch", "--run-dir", str(tmp_path / "run"), *tiny]) == 0
    assert capfd.readouterr().out == "" and (tmp_path / "run" / "summary.json").exists()


def test_interrupting_a_command_in_this_process(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(read, "recipe_names", interrupted)
    assert run_command(["check", "gpt-tiny"]) == 130


def test_the_tests_run_outside_any_launcher():
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID"} & set(os.environ)


# ---------------------------------------------------------------------- switches

@pytest.mark.parametrize(("args", "value"), [
    (["--optim.shard", "gpt-tiny"], "true"), (["gpt-tiny", "--optim.shard"], "true"),
    (["--optim.shard", "true", "gpt-tiny"], "true"), (["--optim.shard", "false", "gpt-tiny"], "false"),
    (["--optim.shard=false", "gpt-tiny"], "false"), (["--no-optim.shard", "gpt-tiny"], "false"),
    (["--optim.shard", "gpt-tiny", "--no-optim.shard"], "false"), (["--optim.shard", "--", "gpt-tiny"], "true"),
    (["gpt-tiny", "--train.prompt", "--optim.shard"], "false"), (["gpt-tiny", "--seed", "3", "--optim.shard"], "true")])
def test_switches(capsys, args, value):
    assert run_command(["check", "--json", "--ranks", "4", *args]) == 0
    values = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["values"]}
    assert values["optim.shard"]["value"] == value
    assert values["train.prompt"]["value"] == ("--optim.shard" if "--train.prompt" in args else "def ")


@pytest.mark.parametrize(("args", "text"), [
    (["--no-optim.shard", "true"], r"unexpected extra argument \(true\)"),
    (["--no-seed"], "No such option '?--no-seed"), (["--no-optim.shard=true"], "No such option '?--no-optim.shard"),
    (["--optim.shard", "maybe"], r"unexpected extra argument \(maybe\)"),
    (["--optim.shard=maybe"], "optim.shard: must be true or false .got 'maybe'")])
def test_switches_that_are_none(capsys, args, text):
    assert run_command(["train", "gpt-tiny", *args]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_help_shows_both_forms_of_a_switch(capsys):
    assert run_command(["train", "--help-all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for setting in read.settings().values():
        assert (f"--{setting.flag} [true|false] / --no-{setting.flag} " in shown) == setting.is_switch, setting.name
    assert sum(setting.is_switch for setting in read.settings().values()) >= 8
    assert "default ]" not in shown and shown.count("default empty]") == sum(
        not read.as_text(setting.default) for setting in read.settings().values()) > 0


def test_the_first_help_has_examples_that_exist(capsys):
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 80
    examples = [shlex.split(line) for line in shown.splitlines() if line.startswith("    ranvier ")]
    assert len(examples) == 5
    assert run_command(["data", "--help"]) == 0 and "..." not in (shown + capsys.readouterr().out).replace("]...", "")
    for _, name, *args in examples:
        with main.command.commands[name].make_context(name, args):
            pass


@pytest.mark.parametrize("command", ["train", "check", "plan"])
def test_help_fits_on_a_screen_and_leads_to_the_rest(capsys, command):
    assert run_command([command, "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 70 and "--mesh.pipe" in short and "--tensor.scheme" not in short
    assert run_command([command, "--help-section", "tensor"]) == 0
    section = capsys.readouterr().out
    assert "--tensor.scheme" in section and "--mesh.pipe" not in section
    assert run_command([command, "--help-section", "tensors"]) == 2
    assert {*options.COMMON, *options.OF_EVALUATION, *options.OF_DATA} <= set(read.settings())


@pytest.mark.parametrize(("command", "has", "has_not"), [
    (["evaluate"], "--data.eval", "--optim.algorithm"), (["data", "prepare"], "--data.packing", "--mesh.pipe")])
def test_the_short_help_has_what_the_command_needs(capsys, command, has, has_not):
    assert run_command([*command, "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 70 and f" {has} " in short and f" {has_not} " not in short


# ---------------------------------------------------------------------- data that does not fit is found by check

@pytest.mark.parametrize(("task", "name", "content", "text"), [
    ("classification", "t.tsv", "label\tbody\n1\thello\n", "t.tsv: has no column `sentence`"),
    ("classification", "t.tsv", "sentence\nhello\n", "t.tsv: has no column `label`"),
    ("classification", "t.tsv", "a,b\n" * 9, "t.tsv: has no column `sentence`"),
    ("qa", "t.json", '{"data": [{"title": 1}]}', r"t.json data\[0\]: has no list 'paragraphs'"),
    ("qa", "t.json", "hello", "t.json: is not JSON"),
    ("images", "t", None, "data.train .*t: has fewer than two folders, one for each class"),
    ("lm", "t.jsonl", '{"body": 1}', "t.jsonl line 1: has no column `text`")])
def test_check_reads_as_much_of_the_data_as_shows_that_it_is_wrong(capsys, tmp_path, task, name, content, text):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_text(content)
    given = ["--data.corpus", str(path)] if task == "lm" else ["--data.task", task, "--data.train", str(path)]
    assert run_command(["check", "gpt-tiny", "--ranks", "4", *given]) == 2
    out = capsys.readouterr().out
    assert re.search(f"problem: .*{text}", out) and "no problems found" not in out


def test_ctrl_c_during_the_imports_has_no_traceback(monkeypatch):
    class Interrupts:
        def find_spec(self, name, path=None, target=None):
            if name == "ranvier.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ranvier.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 130


def test_what_concerns_all_ranks_is_told_once(monkeypatch, capsys):
    """The process that starts local ranks prints it, or rank 0 under another launcher."""
    for launcher, rank, is_told in ((None, 0, True), ("local", 0, False), ("torchrun", 0, True),
                                    ("torchrun", 1, False)):
        started = launcher and Started(launcher=launcher, rank=rank, size=2)
        monkeypatch.setattr("ranvier.cli.ranks.detect", lambda environ, found=started: found)
        print_once("a line")
        assert capsys.readouterr().err == "a line\n" * is_told


@pytest.mark.parametrize("args", [[], ["data"]])
def test_a_group_without_a_command_shows_its_help(args, capsys):
    run_command(args)
    out, err = capsys.readouterr()
    assert len((out + err).splitlines()) > 5 and "Commands:" in out + err
