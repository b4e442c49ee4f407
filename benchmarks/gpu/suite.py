"""Everything that one CUDA device can show, as cases of their own; the plan for the first half an hour with a device.

    python -m benchmarks.gpu.suite                     all cases, block by block
    python -m benchmarks.gpu.suite --block 2           one block: 1 correctness, 2 speed, 3 memory
    python -m benchmarks.gpu.suite --only facts mfu    these cases
    python -m benchmarks.gpu.suite --dry-run           all cases on the CPU, with tiny shapes

Each case runs in a process of its own with a time limit and prints one line of JSON, so that a hang or a crash costs
only that case. At the end all lines come again in one table, those that matter most last. Exit code 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import cases_correctness, cases_kernels, cases_memory, cases_speed
from benchmarks.gpu.case import Options

Run = Callable[[Options], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """seconds: limit on a device. matters: how far down the summary shows it. expected: for a person."""

    run: Run
    block: int
    seconds: float
    matters: int
    expected: str


CASES: dict[str, Case] = {
    "facts": Case(run=cases_speed.facts, block=1, seconds=90, matters=3,
                  expected="PCIe 5 x16: 50-56 GB/s one way; products 620-700 TFLOP/s at hidden 2048, 690-780 at 4096"),
    "gpu-tests": Case(run=cases_correctness.gpu_tests, block=1, seconds=240, matters=9, expected="all pass"),
    "parity": Case(run=cases_correctness.parity, block=1, seconds=120, matters=9,
                   expected="fp64 to 1e-12, fp32 to 2e-5; offload stream equals none; dropout masks equal the CPU's"),
    "repeat": Case(run=cases_correctness.repeat, block=1, seconds=60, matters=5,
                   expected="bit-identical with deterministic algorithms, not without"),
    "syncs": Case(run=cases_correctness.syncs, block=1, seconds=60, matters=6, expected="no host wait inside a step"),
    "nccl-one-gpu": Case(run=cases_correctness.nccl_one_gpu, block=1, seconds=240, matters=9,
                         expected="losses of one rank, on pipe 2, data 2, col 2, row 2 x col 2"),
    "mpi-one-gpu": Case(run=cases_correctness.mpi_one_gpu, block=1, seconds=120, matters=6,
                        expected="losses of one rank, with messages over MPI and collectives over NCCL"),
    "lazy": Case(run=cases_correctness.lazy, block=1, seconds=180, matters=7,
                 expected="no start hangs, with lazy loading, forced synchronizations or cudaFree in the step"),
    "kill": Case(run=cases_correctness.kill, block=1, seconds=90, matters=7, expected="the other rank leaves in 10 s"),
    "mfu": Case(run=cases_speed.mfu, block=2, seconds=300, matters=10, expected="1.3B 43-52 %, 6.7B 47-55 % eager"),
    "profile": Case(run=cases_speed.profile_step, block=2, seconds=120, matters=6,
                    expected="a microbatch of 1.3B: products 201 ms, attention 33, elementwise 30, loss 8"),
    "variants": Case(run=cases_speed.variants, block=2, seconds=150, matters=6,
                     expected="cuDNN attention +2-3 points, bucket size 2^28 +2-5, no guard +1-2"),
    "batches-ahead": Case(run=cases_speed.batches_ahead, block=2, seconds=90, matters=4,
                          expected="0.97 to 1.00 of a step whose batch is not read ahead"),
    "peer": Case(run=cases_speed.peer, block=2, seconds=150, matters=8,
                 expected="plain torch 47-50 % eager, 55-59 % compiled"),
    "compiled": Case(run=cases_kernels.compiled, block=2, seconds=420, matters=10,
                     expected="5 to 8 points over eager at 1.3B and 6.7B; losses apart by 1e-5 at most"),
    "attention-kernels": Case(run=cases_kernels.attention_kernels, block=2, seconds=60, matters=6,
                              expected="cudnn first, 2-3 points of a step at 2048 tokens and 6 at 8192"),
    "linear-kernels": Case(run=cases_kernels.linear_kernels, block=2, seconds=60, matters=5,
                           expected="one kernel saves the sum's 0.1 ms; padded logits 1.2 to 2 times as fast"),
    "random-numbers": Case(run=cases_kernels.random_numbers, block=2, seconds=60, matters=7,
                           expected="under 1 s per billion weights (26 s on the host); dropout at the speed of copies"),
    "cuda-graphs": Case(run=cases_kernels.cuda_graphs, block=2, seconds=90, matters=3,
                        expected="a gain where launches bound the step: 350M with one sequence"),
    "float8": Case(run=cases_kernels.float8, block=2, seconds=60, matters=3,
                   expected="1.5 times bf16 with casts at 4096; relative error 3e-2"),
    "pinned": Case(run=cases_memory.pinned, block=3, seconds=90, matters=6,
                   expected="pin_memory rounds 20.1 GiB up to 32; registered memory does not"),
    "sizes": Case(run=cases_memory.sizes, block=3, seconds=330, matters=8,
                  expected="none 8.2-8.6 B, stream 10.5 B; end of step d1 3.3-3.6 s, d3 1.7-2.0 s at 6.7 B"),
    "predict": Case(run=cases_memory.predict, block=3, seconds=120, matters=7,
                    expected="allocated within 5 %; reserved 3-10 % above; context 0.6-1 GB"),
    "offload-overlap": Case(run=cases_memory.offload_overlap, block=3, seconds=90, matters=6,
                            expected="over 0.9 of the smaller stream is covered"),
    "run-ahead": Case(run=cases_memory.run_ahead, block=3, seconds=90, matters=5,
                      expected="device spans 10-100 ms, host spans 2-10 ms"),
}


def run_case(name: str, options: Options) -> dict[str, Any]:
    """One line's content: the case, whether it ended well, its seconds, and what it found or why it failed."""
    began = time.monotonic()
    try:
        found = {"ok": True, **CASES[name].run(options)}
    except Exception as error:
        found = {"ok": False, "error": f"{type(error).__name__}: {str(error)[-2000:]}",
                 "trace": traceback.format_exc().splitlines()[-6:]}
    return {"case": name, **found, "seconds": round(time.monotonic() - began, 2)}


def _in_subprocess(name: str, options: Options, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.suite", "--one", name]
    command += ["--dry-run"] if options.dry_run else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False,
                              cwd=Path(__file__).parents[2])
    except subprocess.TimeoutExpired as error:
        tail = (error.stderr or b"")[-2000:]
        return {"case": name, "ok": False, "error": f"had not ended after {seconds:g} s", "seconds": seconds,
                "stderr": tail.decode(errors="replace") if isinstance(tail, bytes) else tail}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"case"')]
    if not lines:
        return {"case": name, "ok": False, "error": f"ended with {done.returncode}", "stderr": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _in_fork(name: str, options: Options, seconds: float) -> dict[str, Any]:
    """In a fork of this process, which starts at once: only for the CPU, since CUDA does not survive a fork."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send_case, args=(name, options, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return {"case": name, "ok": False, "error": f"had not ended after {seconds:g} s", "seconds": seconds}
        found: dict[str, Any] = receiver.recv()
        return found
    except EOFError:
        return {"case": name, "ok": False, "error": "ended without a result"}
    finally:
        process.kill()
        process.join()


def _send_case(name: str, options: Options, sender: Connection) -> None:
    sender.send(run_case(name, options))


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each case, those that matter most last."""
    ordered = sorted(rows, key=lambda row: CASES[row["case"]].matters)
    return [f"{row['case']:16} {'ok' if row['ok'] else 'FAILED':6} " + (
        str(row.get("says", "")) if row["ok"] else str(row["error"]).splitlines()[-1][:160])
        + f"   [expected: {CASES[row['case']].expected}]" for row in ordered]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--block", type=int, choices=(1, 2, 3))
    made.add_argument("--only", nargs="+", choices=list(CASES))
    made.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny shapes")
    made.add_argument("--subprocesses", action="store_true", help="a new interpreter for each case in a dry run, too")
    made.add_argument("--one", choices=list(CASES), help="one case, in this process")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    if not asked.dry_run and not torch.cuda.is_available():
        print("benchmarks.gpu.suite: this machine has no CUDA device; --dry-run runs the cases on the CPU")
        return 0
    options = Options(dry_run=asked.dry_run)
    if asked.one:
        print(json.dumps(run_case(asked.one, options)), flush=True)
        return 0
    torch.set_num_threads(1 if asked.dry_run else torch.get_num_threads())
    names = asked.only or [name for name, case in CASES.items() if asked.block in (None, case.block)]
    rows = []
    for name in names:
        run = _in_fork if asked.dry_run and not asked.subprocesses else _in_subprocess
        rows.append(run(name, options, CASES[name].seconds))
        print(json.dumps(rows[-1]), flush=True)
    print("\n" + "\n".join(summary(rows)))
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
