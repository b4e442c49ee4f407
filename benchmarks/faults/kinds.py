"""The kinds of faults of the soak: each makes its fault, and waits for the affected run to end.

Each is a context manager: inside, the fault is over, and the run can be resumed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.faults.filesystem import SmallDisk, can_mount
from benchmarks.faults.processes import Start
from benchmarks.faults.trial import Kind, Trial

# ---------------------------------------------------------------------- processes


@contextmanager
def killed_rank(trial: Trial) -> Iterator[None]:
    rank = trial.draw.randrange(trial.mesh.size)
    start = trial.start(paced=True)
    trial.wait_for_step(start)
    trial.say(f"rank {rank} is killed after step {trial.step}")
    if rank in (ranks := start.ranks()):
        start.signal(ranks[rank], signal.SIGKILL)
    trial.wait_gone(start)
    yield


@contextmanager
def killed_launcher(trial: Trial) -> Iterator[None]:
    start = trial.start(paced=True)
    trial.wait_for_step(start)
    trial.say(f"the launcher is killed after step {trial.step}")
    start.signal(start.pid, signal.SIGKILL)
    trial.wait_gone(start)
    yield


@contextmanager
def stopped_rank(trial: Trial) -> Iterator[None]:
    """A stopped rank: the others wait for it up to the time limit, and do not wait for ever."""
    rank = trial.draw.randrange(trial.mesh.size)
    start = trial.start(paced=True, timeout_seconds=trial.timeout_seconds)
    trial.wait_for_step(start)
    trial.say(f"rank {rank} is stopped (SIGSTOP) after step {trial.step}")
    if rank in (ranks := start.ranks()):
        start.signal(ranks[rank], signal.SIGSTOP)
    trial.allowance = trial.timeout_seconds
    trial.wait_gone(start)
    yield


@contextmanager
def double_start(trial: Trial) -> Iterator[None]:
    """A second start with --resume auto during the first: it is refused with the owner's name, while the first
    continues."""
    apart = trial.draw.choice((0.0, trial.draw.uniform(0.0, 3.0), None))
    trial.say("a second start " + (f"after step {trial.step}" if apart is None else f"{apart:.1f} s after the first"))
    for pace in (0.05, 0.3, 1.0):  # slower paces for a slow machine, where the first ends before the second looks
        if _started_twice(trial, apart, pace):
            break
        trial.forget()
        trial.outcome.codes.clear()
    else:
        trial.problem("the second start never came while the first was under way")
    yield


def _started_twice(trial: Trial, apart: float | None, pace: float) -> bool:
    """Run both starts to their ends, and judge; False if the owner ended too soon for that."""
    first = trial.start(faults=(slow := f"slow:rank=0,call=1,for={pace}",))
    if apart is None:
        trial.wait_for_step(first)
    else:
        time.sleep(apart)
    second, told = trial.start(faults=(slow,)), None  # on a loaded machine it may be first
    pids: dict[Start, set[int]] = {first: set(), second: set()}
    while first.code is None and second.code is None:
        for start in pids:
            pids[start] |= {start.pid, *(process.pid for process in start.processes())}
        if told is None and any(_names(start.text, pids[other]) for start, other in ((first, second), (second, first))):
            told = time.monotonic()
        time.sleep(0.05)
    ended, other = (second, first) if second.code is not None else (first, second)
    if ended.code == 0 and (ended is first or "done in " in first.text or _names(first.text, pids[second])):
        return False  # the other came after it had trained, or was still waiting for it
    trial.wait_gone(ended, since=told)
    if ended.code == 0:
        trial.problem("both starts trained in one folder")
    elif ended.code not in (1, 2) or not _names(ended.text, pids[other]):
        trial.problem(f"the start that is not the owner ended with {ended.code} and without the owner's name")
    trial.wait_gone_unharmed(other)
    if other.code != 0 or not trial.training.is_complete():
        trial.problem(f"the owner was harmed: it ended with {other.code}")
    return True


def _names(text: str, pids: Collection[int]) -> bool:
    """Whether a text names a process, and this machine."""
    return socket.gethostname() in text and any(re.search(rf"\b{pid}\b", text) for pid in pids)


# ---------------------------------------------------------------------- files


def _interrupted(trial: Trial) -> None:
    """A run that was killed after some steps; all processes at the same time, as if a machine loses power."""
    trial.step = max(trial.step, 3)
    start = trial.start()
    trial.wait_for_step(start)
    start.kill_all()


def _damage(lines: list[bytes], trial: Trial) -> tuple[str, list[bytes], set[int]]:
    """Damage a file of lines: description of the damage, the lines afterwards, and the numbers of the changed lines."""
    draw, number = trial.draw, trial.draw.randrange(len(lines))
    line = bytearray(lines[number])
    match draw.choice(("bit", "cut", "nested", "null", "bytes", "twice", "binary", "field")):
        case "bit":
            line[draw.randrange(len(line))] ^= 1 << draw.randrange(8)
            what = "a flipped bit"
        case "cut":
            what, line = "a line that is cut off", line[:draw.randrange(len(line))]
        case "nested":
            what, line = "a nested line", bytearray(b"[" * 20_000 + b"]" * 20_000)
        case "null":
            what, line = "null fields", bytearray(json.dumps({"step": 1, "event": None, "loss": None}).encode())
        case "bytes":
            what, line = "bytes that are no text", bytearray(draw.randbytes(40).replace(b"\n", b"") + b"\xff")
        case "twice":
            what, line = "a line that is there twice", line + b"\n" + line
        case "binary":
            what, line = "zeros", bytearray(len(line))
        case _:
            fields = {"step": 2, "event": draw.choice(("resume", "start", "transition", "checkpoint")),
                      "mesh": {"data": {"data": [1]}}, "folder": {"x": None}, "request_id": [[]]}
            what, line = "fields of other types", bytearray(json.dumps(fields).encode())
    return what, [*lines[:number], bytes(line), *lines[number + 1:]], {number}


@contextmanager
def damaged_logs(trial: Trial) -> Iterator[None]:
    """Logs are not load-bearing: a run resumes from its checkpoints whatever its logs look like."""
    _interrupted(trial)
    name = trial.draw.choice(("events.jsonl", "metrics.jsonl", "run.toml"))
    path = trial.training.run_dir / name
    lines = path.read_bytes().splitlines()
    what, damaged, numbers = _damage(lines, trial)
    if name == "metrics.jsonl":
        for number in numbers:
            for line in (lines[number], damaged[number]):
                with suppress(ValueError, RecursionError, AttributeError):
                    step = json.loads(line).get("step")
                    trial.missing |= {step} if isinstance(step, int) else set()
    path.write_bytes(b"\n".join(damaged) + (b"\n" if trial.draw.random() < 0.8 else b""))
    trial.say(f"{what} in {name} of a run that was killed after step {trial.step}")
    trial.outcome.seconds = 0.0
    yield


def _odd_file(path: Path, trial: Trial) -> str:
    """Put something odd in place of `path`."""
    elsewhere = trial.training.root / "not-yours.json"
    elsewhere.write_text(json.dumps({"data": 1, "pipe": 1, "request_id": "x"}))
    kind = trial.draw.choice(("FIFO", "folder", "full folder", "garbage", "link", "link to nothing", "link to itself",
                              "nested", "socket", "other types"))
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "full folder":
            path.mkdir()
            (path / "file").write_text("x")
        case "garbage":
            path.write_bytes(trial.draw.randbytes(5000))
        case "link":
            path.symlink_to(elsewhere)
        case "link to nothing":
            path.symlink_to(path.parent / "nothing-of-that-name")
        case "link to itself":
            path.symlink_to(path)
        case "nested":
            path.write_text("[" * 100_000)
        case "socket":
            with socket.socket(socket.AF_UNIX) as end, suppress(OSError):
                end.bind(str(path))
        case _:
            path.write_text(json.dumps({"data": [2], "pipe": {"x": 1}, "request_id": None}))
    return kind


@contextmanager
def control_file(trial: Trial) -> Iterator[None]:
    """Odd things in place of resize.json during the run: the run continues unharmed. Or in place of the lease of a run
    that was killed: the next start takes the folder over."""
    if trial.draw.random() < 0.25:
        _interrupted(trial)
        leases = sorted(trial.training.run_dir.glob(".owner.*"))
        if leases:
            leases[-1].unlink()
            trial.say(f"{leases[-1].name} is a {_odd_file(leases[-1], trial)} after the run was killed")
        else:
            trial.say("the run was killed and has left no lease")
        trial.outcome.seconds = 0.0
        yield
        return
    trial.step = max(trial.step, 1)
    start = trial.start()
    trial.wait_for_step(start)
    with suppress(FileExistsError):
        trial.say(f"resize.json is a {_odd_file(trial.training.run_dir / 'resize.json', trial)} after step "
                  f"{trial.step}")
    trial.wait_gone(start, may_go_on=True)
    if start.code != 0 or not trial.training.is_complete():
        trial.problem(f"the run was harmed: it ended with {start.code}")
    yield


@contextmanager
def removed_folder(trial: Trial) -> Iterator[None]:
    """The run's folder is removed during the run; in half of the cases its checkpoints are elsewhere."""
    trial.step = max(trial.step, 1)
    if trial.draw.random() < 0.5:
        trial.training.keep_checkpoints_elsewhere()
    start = trial.start(paced=True)
    trial.wait_for_step(start)
    trial.say(f"the run's folder is removed after step {trial.step}, checkpoints are " + (
        "elsewhere" if trial.training.checkpoints.parent != trial.training.run_dir else "in it"))
    gone = trial.training.root / "removed"
    trial.training.run_dir.rename(gone)  # atomic, so that nothing is written in between
    shutil.rmtree(gone)
    trial.wait_gone(start)
    trial.missing = set(range(1, max(trial.training.whole_steps(), default=0) + 1))
    yield


# ---------------------------------------------------------------------- disks


def _limited(trial: Trial) -> tuple[str, ...]:
    """Without the right to mount: a limit of the size of files for one rank."""
    rank = trial.draw.randrange(trial.mesh.size)
    return (f"disk:rank={rank},call={8 * trial.step + 1},bytes={trial.draw.choice((2000, 10_000))}",)


@contextmanager
def full_disk(trial: Trial) -> Iterator[None]:
    """The disk of the checkpoints, or of the entire run, is full; then it is not."""
    if not can_mount():
        trial.say(f"files cannot grow after step {trial.step}")
        trial.wait_gone(trial.start(faults=_limited(trial)), may_go_on=True)
        yield
        return
    whole = trial.draw.random() < 0.5
    folder = trial.training.run_dir if whole else trial.training.root / "elsewhere"
    with SmallDisk(folder) as disk:
        if not whole:
            trial.training.keep_checkpoints_elsewhere()
        start = trial.start()
        trial.wait_for_step(start)
        disk.fill(leave_bytes=trial.draw.choice((0, 0, 50_000)))
        trial.say(f"the disk of {'the run' if whole else 'its checkpoints'} is full after step {trial.step}")
        trial.wait_gone(start, may_go_on=True)
        disk.free()
        yield


@contextmanager
def read_only_disk(trial: Trial) -> Iterator[None]:
    """The disk of the checkpoints is read-only from a step on, or before the start; then it is not."""
    folder = trial.training.root / "elsewhere"
    trial.training.keep_checkpoints_elsewhere()
    trial.step = trial.draw.choice((0, trial.step))
    when = f"after step {trial.step}" if trial.step else "before the start"
    trial.say(f"the disk of its checkpoints is read-only {when}")
    if not can_mount():
        yield from _read_only_folder(trial, folder)
        return
    with SmallDisk(folder) as disk:
        if trial.step == 0:
            disk.read_only(True)
            trial.wait_gone(trial.start(), may_go_on=True)
        else:
            start = trial.start()
            trial.wait_for_step(start)
            disk.read_only(True)
            trial.wait_gone(start, may_go_on=True)
        disk.read_only(False)
        yield


def _read_only_folder(trial: Trial, folder: Path) -> Iterator[None]:
    folder.mkdir()
    folder.chmod(0o500 if trial.step == 0 else 0o700)
    start = trial.start()
    trial.wait_for_step(start)
    folder.chmod(0o500)
    trial.wait_gone(start, may_go_on=True)
    folder.chmod(0o700)
    yield


KINDS: dict[str, Kind] = {
    "killed-rank": killed_rank, "killed-launcher": killed_launcher, "stopped-rank": stopped_rank,
    "double-start": double_start, "damaged-logs": damaged_logs, "control-file": control_file,
    "removed-folder": removed_folder, "full-disk": full_disk, "read-only-disk": read_only_disk}

