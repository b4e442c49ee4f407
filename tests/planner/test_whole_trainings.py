"""What a plan reports in addition to a mesh: days, money, devices, other numbers, other clusters, job files."""

import json
import re
import shlex
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from math import inf, nan, prod
from pathlib import Path

import pytest
import torch
import yaml

from ranvier.checkpoint.manifest import Saved
from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.config.resolve import Facts, resolve
from ranvier.config.run import Batch, Lora, MeshSettings, Run, Transformer
from ranvier.cost.cluster_files import load_cluster, write_cluster
from ranvier.mesh import Mesh
from ranvier.planner import page, report
from ranvier.planner.job_files import LAUNCHERS, write_job
from ranvier.planner.plan import Request, plan, simulate
from ranvier.planner.run_cost import saved_bytes
from ranvier.planner.search import search
from ranvier.planner.training import Goal, _least_days, changed_cluster, dollars_of, goal_of, tokens_of, training
from tests.errors import raises

RUN = Run(model=Transformer(num_layers=4, hidden=64, heads=4, vocab=512, sequence=32),
          batch=Batch(global_size=16, microbatch_size=1), mesh=MeshSettings(data="auto", pipe=1))


def priced(**changes):
    return replace(load_cluster("h100"), nodes=4, devices_per_node=2, price_per_hour=2.0, **changes)


@pytest.fixture
def here(tmp_path):
    write_cluster(priced(), tmp_path / "here.toml")
    return str(tmp_path / "here.toml")


def planned(capsys, *clusters, **request):
    plan("small", RUN, clusters, Request(searched="mesh", as_json=True, **request))
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("text", "tokens"), [("15T", 15e12), ("300b", 3e11), ("2e9", 2e9), ("1.5M", 1.5e6)])
def test_numbers_of_tokens(text, tokens):
    assert tokens_of(text) == tokens


@pytest.mark.parametrize(("arguments", "code"), [
    (("many", None, None, None), "malformed-tokens"), (("0", None, None, None), "malformed-tokens"),
    ((None, 3.0, None, None), "goal-without-tokens"), ((None, None, 9.0, None), "goal-without-tokens"),
    ((None, None, None, 5.0), "goal-without-tokens"), (("1B", nan, None, None), "not-finite-option"),
    (("1B", None, inf, None), "not-finite-option"), (("1B", None, None, nan), "not-finite-option")])
def test_what_is_no_goal(arguments, code):
    with raises(code):
        goal_of(*arguments)


def test_steps_beside_tokens_are_refused(capsys):
    for name in ("train.steps", "train.epochs"):
        with raises("tokens-beside-length", name, where="--tokens", value="1B"):
            goal_of("1B", None, None, None, flags=["model.hidden", name])
        flags = ["plan", "gpt-tiny", "--cluster", "h100", "--tokens", "1B", f"--{name}", "3", "--json"]
        assert run_command(flags) == 2
        assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "tokens-beside-length"


@pytest.mark.parametrize("every", [None, 7])
def test_the_run_file_has_the_best_interval_of_checkpoints_unless_one_is_given(tmp_path, capsys, every):
    out = tmp_path / "run.toml"
    given = [] if every is None else ["--checkpoint.every", str(every)]
    assert run_command(["plan", "gpt-tiny", "--cluster", "h100", "--ranks", "4", "--search", "microbatch", "--tokens",
                        "1B", "--mtbf-hours", "50", "--out", str(out), "--launcher", "kubernetes", "--json", *given]
                       ) == 0
    whole = json.loads(capsys.readouterr().out)["training"]
    wanted = every or whole["best_checkpoint_steps"]
    assert wanted not in (100, None) and whole["checkpoint_steps"] == wanted
    assert read.merge([read.load(str(out))[1]]).run.checkpoint.every == wanted
    job = next(yaml.safe_load_all(out.with_suffix(".yaml").read_text()))["data"]["run.toml"]
    assert f"every = {wanted}\n" in job


@pytest.mark.parametrize(("text", "dollars"), [("2M", 2e6), ("500k", 5e5), ("1250.5", 1250.5)])
def test_sums_of_dollars(text, dollars):
    assert dollars_of(text) == dollars


@pytest.mark.parametrize(("flags", "code", "value"), [
    (["--budget", "$2M"], "malformed-budget", "$2M"), (["--price", "nan"], "not-finite-option", "nan"),
    (["--price", "2", "--price", "1"], "repeated-option", "2.0, 1.0"),
    (["--nodes", "2", "--nodes", "1"], "repeated-option", "2, 1")])
def test_options_of_a_training_that_are_refused(flags, code, value, capsys):
    """The error is JSON, which has no NaN."""
    flags = ["plan", "gpt-tiny", "--cluster", "h100", "--cluster", "a100", "--tokens", "1B", "--json", *flags]
    assert run_command(flags) == 2
    problem, = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["errors"]
    assert (problem["code"], problem["value"]) == (code, value)


def test_no_number_of_devices_is_left_out_that_may_be_in_time():
    """Although a plan may use another number format than the run, or skip gradients of frozen weights."""
    cluster, goal = priced(), Goal(tokens=1e12)
    least = _least_days(RUN, cluster, goal, 4)
    found = search(replace(RUN, precision="bf16"), cluster, 4, ("mesh",)).best[0]
    flops = found.cost.model_flops / found.cost.tokens * 1e12
    assert least == pytest.approx(flops / (4 * 989e12) / 86400) and least < training(found, cluster, goal).days
    frozen = _least_days(replace(RUN, lora=Lora(rank=2)), cluster, goal, 4)
    quick = _least_days(replace(RUN, model=replace(RUN.model, float8=True)), cluster, goal, 4)
    assert frozen == pytest.approx(least / 3) and quick == pytest.approx(least * 989 / 1979)


def test_days_money_and_power_follow_from_the_step():
    cluster = priced()
    found = search(RUN, cluster, 4, ("mesh",)).best[0]
    whole = training(found, cluster, Goal(tokens=3e11))
    seconds = 3e11 / found.cost.tokens * found.cost.seconds
    assert whole.days == pytest.approx(seconds / 86400) and whole.device_hours == pytest.approx(seconds / 3600 * 4)
    assert whole.dollars == pytest.approx(2 * whole.device_hours)
    assert (whole.steps - 1) * found.cost.tokens < 3e11 <= whole.steps * found.cost.tokens
    assert whole.kilowatt_hours == pytest.approx(0.7 * whole.device_hours)
    failing = training(found, cluster, Goal(tokens=3e11, mtbf_hours=100.0))
    assert failing.goodput < 1 and failing.days == pytest.approx(whole.days / failing.goodput)
    assert failing.best_checkpoint_steps == failing.checkpoint_steps >= 1 and whole.checkpoint_steps == 100
    short = training(found, cluster, Goal(tokens=2 * found.cost.tokens, mtbf_hours=1e6))
    assert short.best_checkpoint_steps == short.steps == 2, "the interval is not longer than the run"
    own = training(found, cluster, Goal(tokens=3e11, mtbf_hours=100.0, keeps_interval=True))
    assert own.checkpoint_steps == 100 and own.best_checkpoint_steps == failing.best_checkpoint_steps
    assert own.goodput != failing.goodput and own.days == pytest.approx(whole.days / own.goodput)


def test_the_fewest_devices_that_are_in_time(here, capsys):
    """More devices take less time and cost more, so a deadline between two times needs the larger number."""
    goals = [Goal(tokens=1e12)] * 2
    few, many = (planned(capsys, here, ranks=count, goal=goal)["training"] for count, goal in zip(
        (2, 4), goals, strict=True))
    assert many["days"] < few["days"] and many["dollars"] > few["dollars"]
    between = (few["days"] + many["days"]) / 2
    found = planned(capsys, here, goal=Goal(tokens=1e12, deadline_days=between, budget=1.01 * many["dollars"]))
    assert found["ranks"] == 4 and found["training"] == many
    with raises("deadline-too-early"):
        planned(capsys, here, goal=Goal(tokens=1e12, deadline_days=1e-9))
    with raises("budget-of-deadline", 4):
        planned(capsys, here, goal=Goal(tokens=1e12, deadline_days=between, budget=few["dollars"]))
    with raises("deadline-too-early", 2):
        planned(capsys, here, ranks=2, goal=Goal(tokens=1e12, deadline_days=between))
    with raises("budget-too-small", 2):  # the cost of the fewest devices
        planned(capsys, here, goal=Goal(tokens=1e12, budget=1e-9))
    with raises("budget-too-small", 4):
        planned(capsys, here, ranks=4, goal=Goal(tokens=1e12, budget=1e-9))
    with raises("unknown-search"):  # an error for every number of devices, not one about the deadline
        plan("small", RUN, [here], Request(searched="nothing", goal=Goal(tokens=1e12, deadline_days=between)))


def test_clusters_and_other_numbers_side_by_side(here, capsys):
    found = planned(capsys, here, "a100", ranks=8, nodes=16, what_if=["device.memory_bandwidth=0.5"])["plans"]
    assert [each["cluster"] for each in found] == [
        "H100", "A100", "H100, device.memory_bandwidth x 0.5", "A100, device.memory_bandwidth x 0.5"]
    assert found[2]["plans"][0]["step_seconds"] > found[0]["plans"][0]["step_seconds"]
    plan("small", RUN, [here, "a100"], Request(searched="mesh", ranks=8, nodes=16, goal=Goal(tokens=1e9)))
    text = capsys.readouterr().out
    assert "A100" in text and "kWh" in text and max(map(len, text.splitlines())) <= 80
    assert changed_cluster(priced(), "nodes=2").nodes == 8


def test_a_cluster_without_a_plan_says_why_beside_the_others(here, capsys):
    goal = Goal(tokens=1e9, budget=1e6)
    text = planned(capsys, "a100", here, ranks=8, nodes=4, goal=goal)
    assert [each["cluster"] for each in text["plans"]] == ["H100"]
    assert [(each["cluster"], each["code"]) for each in text["without"]] == [("A100", "budget-without-price")]
    plan("small", RUN, ["a100", here], Request(searched="mesh", ranks=8, nodes=4, goal=goal))
    out = capsys.readouterr().out
    assert "--budget: needs to know" in " ".join(out.split()) and max(map(len, out.splitlines())) <= 80
    with raises("budget-without-price"):
        planned(capsys, "a100", "h100", ranks=8, nodes=4, goal=goal)


@pytest.mark.parametrize(("asked", "code"), [
    ({"what_if": ["between.speed=2"]}, "malformed-what-if"), ({"what_if": ["between.bandwidth"]}, "malformed-what-if"),
    ({"what_if": ["name=2"]}, "malformed-what-if"), ({"what_if": ["nodes=2"], "measure": 1}, "comparison-with-output"),
    ({"launcher": "slurm"}, "launcher-without-out"), ({"price": 2.0}, "goal-without-tokens"),
    ({"goal": Goal(tokens=1e9, budget=1.0)}, "budget-without-price"),
    ({"out": Path("same.toml"), "out_html": Path("./same.toml")}, "page-over-plan")])
def test_what_cannot_be_asked(asked, code):
    with raises(code):
        plan("small", RUN, ["h100"], Request(searched="mesh", ranks=2, **asked))


def test_the_run_file_trains_on_the_tokens_that_were_asked_for(here, tmp_path, capsys):
    """The page also has its days and steps, at a price that no file has."""
    out, html, goal = tmp_path / "run.toml", tmp_path / "page.html", Goal(tokens=1e9, mtbf_hours=100.0)
    plan("small", RUN, [here], Request(searched="mesh", ranks=8, goal=goal, price=3.0, out=out, out_html=html))
    steps = -(-10**9 // (16 * 32))
    merged = read.merge([read.load(str(out))[1]]).run
    assert merged.train.steps == steps and merged.train.epochs is None
    printed = capsys.readouterr().out
    assert f"{steps:,} steps" in printed and "batch 16 of 32 tokens" in printed
    found = search(RUN, priced(), 8, ("mesh",)).best[0]
    whole = training(found, priced(), goal)
    assert f"every {whole.best_checkpoint_steps} steps" in printed and f'"{steps}"' in html.read_text()
    dollars = 3 * whole.device_hours
    assert f"{dollars:,.0f}" in html.read_text() and "dollars" in html.read_text()


def test_the_table_has_one_line_for_what_differs_in_where_states_are_alone():
    """So the runner-up is another mesh, unless nothing else differs."""
    plan = search(replace(RUN, mesh=MeshSettings(data="auto", pipe="auto")), priced(), 8, ("mesh",))
    first, second = plan.best[:2]
    same = replace(first, run=replace(first.run, optim=replace(first.run.optim, offload="host")))
    both = replace(plan, best=(first, same, second))
    assert report.alternatives(both) == [first, second] and len(report.table(both).rows) == 2
    shown = report.table(both)
    column = shown.header.index("MiB per\ndevice")
    assert report.device_bytes(first) < 2**30 and all(float(row[column].replace(",", "")) > 0 for row in shown.rows)
    assert f"Next is {report.describe(second.run)}" in " ".join(report.explanation(both))
    assert len(report.table(replace(plan, best=(first, same))).rows) == 2


def test_what_needs_far_more_memory_than_there_is_is_not_told():
    small = priced(device=replace(load_cluster("h100").device, memory_bytes=1_520_000_000))
    run = replace(RUN, batch=Batch(global_size=256, microbatch_size=1))
    plan = search(run, small, 1, ("mesh", "microbatch", "recompute"))
    usable = small.device.memory_bytes - small.device.reserved_bytes
    assert plan.dropped and max(report.device_bytes(found) for found in plan.dropped) < 2 * usable


def test_why_a_candidate_lost_adds_up():
    """The named parts add up to the difference of the two steps."""
    plan = search(replace(RUN, mesh=MeshSettings(data="auto", pipe="auto")), priced(), 8, ("mesh",))
    assert len(plan.best) > 2
    for found in plan.best[1:]:
        text = page._why_slower(plan.best[0], found)
        named = [float(part) for part in re.findall(r"([+-][\d.e-]+) s", text)]
        if len(named) < 3:
            assert sum(named) == pytest.approx(found.cost.seconds - plan.best[0].cost.seconds,
                                               abs=0.003 * plan.best[0].cost.seconds)
    row = page._row(0, replace(plan.best[1], memory=()), "too large", 2**20)
    assert row[-2:] == ("", "too large")  # not 0.00 GiB


def test_what_cannot_be_written_is_told_before_the_search(here, tmp_path, monkeypatch):
    monkeypatch.setattr("ranvier.planner.plan.search", pytest.fail)
    with raises("plan-page-not-writable", where="--out-html", value=str(tmp_path / "none" / "x.html")):
        plan("small", RUN, [here], Request(ranks=8, out_html=tmp_path / "none" / "x.html"))
    with raises("plan-page-not-writable", where="--out-html", value="/proc/x.html"):  # its mode says that root may
        plan("small", RUN, [here], Request(ranks=8, out_html=Path("/proc/x.html")))
    (tmp_path / "job.sbatch").mkdir()
    with raises("job-not-writable", where="--launcher", value=str(tmp_path / "job.sbatch")):
        plan("small", RUN, [here], Request(ranks=8, out=tmp_path / "job.toml", launcher="slurm"))
    monkeypatch.setattr("ranvier.cli.doctor_report.examine", pytest.fail)
    assert run_command(["doctor", "--measure", "--out", str(tmp_path / "none" / "x.toml")]) == 2
    with raises("job-of-partial-nodes", 2, value=3):
        plan("small", RUN, [here], Request(ranks=3, out=tmp_path / "x.toml", launcher="slurm"))
    assert not (tmp_path / "x.toml").exists()
    monkeypatch.setattr("ranvier.planner.plan.load_cluster", pytest.fail)
    for name in ("none/x.png", "x.doc"):
        with raises("picture-not-writable", where="--draw", value=str(tmp_path / name)):
            simulate("small", RUN, "laptop", draw=tmp_path / name)


def test_a_job_file_beside_the_run(here, tmp_path, capsys, monkeypatch):
    for launcher in LAUNCHERS:
        out = tmp_path / f"{launcher}.toml"
        plan("small", RUN, [here], Request(searched="mesh", ranks=8, out=out, launcher=launcher))
        assert str(out) in capsys.readouterr().out
    for ranks, start in ((2, "bash {}\n"), (8, "bash {} FIRST_MACHINE (on each machine)\n")):
        plan("small", RUN, [here], Request(searched="mesh", ranks=ranks, out=tmp_path / "torchrun.toml",
                                           launcher="torchrun"))
        assert start.format(tmp_path / "torchrun.sh") in capsys.readouterr().out
    for script in ("slurm.sbatch", "torchrun.sh"):
        subprocess.run(["bash", "-n", tmp_path / script], check=True)
    batch = (tmp_path / "slurm.sbatch").read_text()
    assert "--nodes=4\n" in batch and "--ntasks-per-node=2\n" in batch and str(tmp_path / "slurm.toml") in batch
    assert "--nnodes 4 " in (tmp_path / "torchrun.sh").read_text()
    settings, _, job = yaml.safe_load_all((tmp_path / "kubernetes.yaml").read_text())
    assert job["spec"]["completions"] == 4 and "[mesh]" in settings["data"]["run.toml"]
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert job["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"] == "180"
    assert "--signal=USR1@180\n" in batch and "--exclusive\n#SBATCH --mem=0\n" in batch
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=$((SLURM_CPUS_ON_NODE / 2)) ranvier" in batch
    slow = resolve(replace(RUN, mesh=Mesh(data=8)))
    batch = write_job("slurm", slow, load_cluster("h100"), tmp_path / "slurm.toml", 52.7).read_text()
    assert "--signal=USR1@240\n" in batch  # two steps, and two minutes for saving
    batch = write_job("slurm", resolve(RUN, Facts(mesh=Mesh(data=4))), load_cluster("h100"), tmp_path / "slurm.toml",
                      1.0).read_text()
    assert "--ntasks-per-node=4\n" in batch and "--exclusive" not in batch and "--cpus-per-task" not in batch
    (tmp_path / "saved here" / "step-20").mkdir(parents=True)
    elsewhere = resolve(replace(slow, checkpoint=replace(slow.checkpoint, dir=tmp_path / "saved here")))
    batch = write_job("slurm", elsewhere, load_cluster("h100"), tmp_path / "slurm.toml", 1.0).read_text()
    newest = next(line for line in batch.splitlines() if line.startswith("newest()"))
    found = subprocess.run(["bash", "-c", f"{newest}\nnewest"], capture_output=True, text=True, check=True).stdout
    assert found == f"{tmp_path}/saved here/step-20\n"  # a job that finds no checkpoint is not requeued
    monkeypatch.setattr("ranvier.planner.job_files.saved_bytes", lambda run: 988e9)
    batch = write_job("slurm", slow, load_cluster("h100"), tmp_path / "slurm.toml", 1.0).read_text()
    assert "--signal=USR1@660\n" in batch and "988.0 GB at 2 GB/s" in batch
    three = resolve(replace(RUN, mesh=Mesh(data=3)))
    with raises("job-of-partial-nodes", 2, value=3):
        write_job("slurm", three, priced(), tmp_path / "slurm.toml", 1.0)
    spaced = tmp_path / "a run.toml"
    plan("small", RUN, [here], Request(searched="mesh", ranks=8, out=spaced, launcher="slurm"))
    said = capsys.readouterr().out
    assert f"sbatch '{tmp_path}/a run.sbatch'\n" in said and f"ranvier check '{spaced}' " in said
    (tmp_path / "torchrun.sh").unlink()
    (tmp_path / "torchrun.sh").mkdir()
    with raises("job-not-writable"):
        write_job("torchrun", three, load_cluster("h100"), tmp_path / "torchrun.toml", 1.0)


def test_a_pods_checkpoints_are_on_the_volume(tmp_path):
    (tmp_path / "x.toml").write_text("")
    for folder, fits in (("/runs/saved", True), ("/runs/l8/checkpoint", True), ("/scratch/saved", False),
                         ("saved", False), ("/runs/../scratch", False)):
        run = resolve(replace(RUN, mesh=Mesh(data=2), run_dir=Path("/runs/l8"), checkpoint=replace(
            RUN.checkpoint, dir=Path(folder))))
        with nullcontext() if fits else raises("job-checkpoints-off-volume", "/runs", value=folder):
            write_job("kubernetes", run, priced(), tmp_path / "x.toml", 1.0)


@pytest.mark.parametrize("stem", ["8b", "no", "1e5", "kubernetes", "My_Run", "\u00fcn\u00ef", "-", "a" * 80])
def test_a_job_for_kubernetes_has_a_valid_name(stem, tmp_path):
    run = resolve(RUN, Facts(mesh=Mesh(data=4)))
    (tmp_path / f"{stem}.toml").write_text("seed = 1\n")
    text = write_job("kubernetes", run, priced(), tmp_path / f"{stem}.toml", 1.0).read_text()
    settings, service, job = yaml.safe_load_all(text)
    names = {entry["metadata"]["name"] for entry in (settings, service, job)}
    names |= {service["spec"]["selector"]["job-name"], job["spec"]["template"]["spec"]["subdomain"]}
    name, = names
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,56}[a-z0-9])?", name) and name != "kubernetes"
    assert f"--rdzv-endpoint {name}-0.{name}:29400" in text


def test_a_job_file_has_the_folder_of_the_run(here, tmp_path):
    for folder, mounted, stored in (("/shared/it's: #1/l8", "/shared/it's: #1", "/shared/it's: #1/l8"),
                                    ("mine/l8", "/runs", "/runs/l8"), ("/l8", "/runs", "/runs/l8")):
        run = replace(RUN, run_dir=Path(folder))
        for launcher in LAUNCHERS:
            plan("small", run, [here], Request(searched="mesh", ranks=8, out=tmp_path / "x.toml", launcher=launcher))
        lines = (tmp_path / "x.sbatch").read_text().splitlines()
        script = next(line for line in lines if line.startswith("run_dir=")) + '\necho "$run_dir"'
        for given, found in (([], folder), (["/other"], "/other")):
            assert subprocess.run(["bash", "-c", script, "job", *given], capture_output=True, text=True,
                                  check=True).stdout == f"{found}\n"
        assert shlex.split((tmp_path / "x.sh").read_text(), comments=True)[-1] == folder
        container = list(yaml.safe_load_all((tmp_path / "x.yaml").read_text()))[-1]["spec"]["template"]["spec"][
            "containers"][0]
        assert shlex.split(container["args"][0])[-2:] == ["--run-dir", stored] and "\n" not in container["args"][0]
        assert container["volumeMounts"][0] == {"name": "runs", "mountPath": mounted}


@pytest.mark.parametrize("flags", [
    pytest.param(["--precision", "bf16", "--optim.ema", "0.9"], marks=pytest.mark.slow), ["--lora.rank", "2"]])
def test_a_checkpoint_has_as_many_bytes(tmp_path, flags):
    (tmp_path / "text.txt").write_text("day and night\n" * 400)
    (tmp_path / "recipe.toml").write_text("")
    assert run_command(["train", str(tmp_path / "recipe.toml"), "--run-dir", str(tmp_path / "run"), "--data.corpus",
                        str(tmp_path / "text.txt"), "--data.cache-dir", str(tmp_path), "--model.vocab", "260",
                        "--model.num-layers", "1", "--model.hidden", "8", "--model.heads", "1", "--model.sequence", "8",
                        "--train.steps", "1", "--batch.global-size", "2", "--batch.microbatch-size", "1", *flags]) == 0
    run = read.merge([read.load(str(tmp_path / "run" / "run.toml"))[1]]).run
    kinds = Saved(tmp_path / "run" / "checkpoint" / "step-1").manifest.tensors
    tensors = [one for kind in kinds if kind != "random" for one in kinds[kind].values()]  # random: 5 kB a rank
    assert saved_bytes(resolve(run)) == sum(prod(one.shape) * getattr(torch, one.dtype).itemsize for one in tensors)
