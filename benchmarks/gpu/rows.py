"""The rows of `benchmarks.gpu.suite`: cases, their arguments, time limits and expected results.

One command measures a part in nine minutes, the most important rows first. Rows of part 4 need 141 GB; rows without a
part run with `--only`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import cases_correctness, cases_kernels, cases_memory, cases_speed
from benchmarks.gpu.case import Findings, Options
from benchmarks.gpu.programs import COMPILED_SECONDS, RANKS_SECONDS

CASES: dict[str, Callable[..., Findings]] = {
    "facts": cases_speed.facts, "parity": cases_correctness.parity, "placements": cases_correctness.placements,
    "repeat": cases_correctness.repeat, "syncs": cases_correctness.syncs, "ranks": cases_correctness.ranks,
    "lazy": cases_correctness.lazy, "kill": cases_correctness.kill, "mfu": cases_speed.mfu, "peer": cases_speed.peer,
    "profile": cases_speed.profile_step, "variants": cases_speed.variants, "batches-ahead": cases_speed.batches_ahead,
    "attention-kernels": cases_kernels.attention_kernels, "linear-kernels": cases_kernels.linear_kernels,
    "random-numbers": cases_kernels.random_numbers, "cuda-graphs": cases_kernels.cuda_graphs,
    "float8": cases_kernels.float8, "pinned": cases_memory.pinned, "fits": cases_memory.fits,
    "predict": cases_memory.predict, "offload-overlap": cases_memory.offload_overlap,
    "run-ahead": cases_memory.run_ahead}

_RANKS_SECONDS = RANKS_SECONDS + 30.0
"""Includes the training of one rank before, and the end of ranks that hang."""
_TESTS = ("tests/gpu", "tests/optim/test_optimizer_on_cuda.py", "tests/models/test_next_token_loss.py",
          "tests/elastic/test_cache_forward.py", "tests/tensor/test_dropout_kernel.py",
          "tests/tensor/test_cross_entropy_kernel.py", "tests/test_keyed_random.py",
          "tests/train/test_attention_kernel.py")


@dataclass(frozen=True, kw_only=True)
class Row:
    """case: of `CASES`, with its arguments; or `command`: the words of a command, from the folder in which the commands
    of one call of the suite may write. seconds: the time limit. parts: those that contain the row. eager: whether
    kernels are loaded when its process starts, as in a run. expected: for people."""

    case: str = ""
    arguments: Sequence[object] = ()
    command: Callable[[Options, Path], Sequence[str]] | None = None
    seconds: float
    parts: Sequence[int] = ()
    eager: bool = False
    expected: str = ""


def _train(options: Options, folder: Path, *more: str) -> list[str]:
    """A run of the command line, which draws its weights on the device, compiles, reports its memory and saves."""
    return [sys.executable, "-m", "ranvier", "train", "gpt-tiny", "--mesh.data", "1", "--mesh.pipe", "1",
            "--launch.device", options.device.type, "--precision", "bf16", "--memory-report", "true", "--run-dir",
            str(folder / "run"), *options.sized(
                ("--data.max-bytes", "1000000", "--checkpoint.every", "10"),
                ("--data.max-bytes", "100000", "--checkpoint.every", "1", "--batch.global-size", "4",
                 "--train.sample-tokens", "0")), *more]


def _start(options: Options, folder: Path) -> list[str]:
    return _train(options, folder, "--train.steps", options.sized("20", "1"))


def _resume(options: Options, folder: Path) -> list[str]:
    return _train(options, folder, "--train.steps", options.sized("30", "2"), "--resume", "auto")


def _gpu_tests(options: Options, folder: Path) -> list[str]:
    """The GPU tests, without those of ranks that share the device or are killed, which are separate rows."""
    return [sys.executable, "-m", "pytest", "-v", "-m", "gpu and not mpi", "-k", "not share_the_device and not killed",
            "-p", "no:cacheprovider", "--timeout", "80", *options.sized((), ("--collect-only",)), *_TESTS]


ROWS: dict[str, Row] = {
    # does it train, the same numbers as on a CPU, speed compared with plain torch, where does the time go
    "facts": Row(case="facts", seconds=60, parts=(1, 2, 3, 4), expected="link 50-55 GB/s one way, 80-100 both at once; "
                 "products 620-740 TFLOP/s"),
    "train": Row(command=_start, seconds=75, parts=(1,), expected="the loss falls; memory within 5 %"),
    "parity-1": Row(case="parity", arguments=("plain", "dropout", "stream", "one microbatch"), seconds=60, parts=(1,),
                    expected="fp64 below 1e-11, fp32 below 2e-4, fp16 below 1e-2, bf16 below 3e-2"),
    "mfu-1.3B": Row(case="mfu", arguments=("1.3B-8",), seconds=70, parts=(1,), expected="54-57 %"),
    "mfu-1.3B-compiled": Row(case="mfu", arguments=("1.3B-8", "compiled"), seconds=120, parts=(1,),
                             expected="56-60 %"),
    "peer-1.3B": Row(case="peer", arguments=("1.3B-8",), seconds=50, parts=(1,), expected="50 %"),
    "peer-1.3B-compiled": Row(case="peer", arguments=("1.3B-8", "compiled"), seconds=110, parts=(1,),
                              expected="56 %"),
    "ranks-pipe": Row(case="ranks", arguments=("pipe 2",), seconds=_RANKS_SECONDS, parts=(1,), eager=True,
                      expected="below 1e-3 from one rank, in 20-50 s"),
    "profile": Row(case="profile", arguments=("1.3B-8",), seconds=45, parts=(1,),
                   expected="products 700 ms, attention 110, idle below 5 %"),
    "fits-stream-24": Row(case="fits", arguments=("stream-half-d3", 24), seconds=90, parts=(1,),
                          expected="end of a step 1.1-1.4 s"),
    "mfu-3.6B": Row(case="mfu", arguments=("3.6B-2-half",), seconds=60, parts=(1,), expected="45-55 %"),
    "resume": Row(command=_resume, seconds=75, parts=(1,), expected="goes on at step 20"),
    "parity-2": Row(case="parity", arguments=("host", "hybrid", "recompute", "clip", "no deferral",
                                              "update in backward"), seconds=60, parts=(1,)),
    "peer-1.3B-bf16": Row(case="peer", arguments=("1.3B-8", "eager", "bf16"), seconds=50, parts=(1,),
                          expected="56 %, with 8 bytes a parameter"),
    # ranks that share the device, failures, the same bits, host waits, other sizes
    **{f"ranks-{name}": Row(case="ranks", arguments=(mesh,), seconds=_RANKS_SECONDS, parts=(2,), eager=True,
                            expected="below 1e-3 from one rank, in bf16 3e-2")
       for name, mesh in (("data", "data 2"), ("col", "col 2"), ("pipe-data", "pipe 2 x data 2"),
                          ("row-col", "row 2 x col 2, bf16"))},
    "kill": Row(case="kill", seconds=_RANKS_SECONDS, parts=(2,), eager=True, expected="below 20 s in all"),
    "ranks-free": Row(case="lazy", arguments=(("EAGER", "free", 2),), seconds=90, parts=(2,), eager=True,
                      expected="ranks that give memory back while they send do not hang"),
    "repeat": Row(case="repeat", seconds=45, parts=(2,),
                  expected="the same bits with deterministic algorithms, not without"),
    "syncs": Row(case="syncs", seconds=45, parts=(2,), expected="no operation waits"),
    "placements": Row(case="placements", seconds=45, parts=(2,), expected="the same bits"),
    "parity-all": Row(case="parity", seconds=90, parts=(2,)),
    "mfu-2.7B": Row(case="mfu", arguments=("2.7B-2",), seconds=60, parts=(2,), expected="50-55 %"),
    "mfu-3.6B-compiled": Row(case="mfu", arguments=("3.6B-2-half", "compiled"), seconds=110, parts=(2,)),
    "mfu-3.6B-float8": Row(case="mfu", arguments=("3.6B-2-half-float8", "compiled"), seconds=110, parts=(2,),
                           expected="faster than without float8"),
    "batches-ahead": Row(case="batches-ahead", seconds=60, parts=(2,), expected="0.97 to 1.00 of a step without"),
    "run-ahead": Row(case="run-ahead", seconds=45, parts=(2,), expected="device spans 10-100 ms, host spans 2-10 ms"),
    "ranks-tied": Row(case="ranks", arguments=("pipe 2, tied ends",), seconds=_RANKS_SECONDS, parts=(2,), eager=True),
    "ranks-compiled": Row(case="ranks", arguments=("col 2, compiled",), seconds=COMPILED_SECONDS + 30.0, parts=(2,),
                          eager=True, expected="below 1e-3 from one rank"),
    # memory, offload, kernels, and last the largest models, whose rows take longest
    "predict": Row(case="predict", seconds=100, parts=(3,), eager=True,
                   expected="allocated within 5 %, reserved 3-10 % above"),
    "offload-overlap": Row(case="offload-overlap", seconds=60, parts=(3,), expected="0.95 of the smaller at once"),
    "float8": Row(case="float8", seconds=60, parts=(3,), expected="1.5 times bf16 with casts; relative error 3e-2"),
    "attention-kernels": Row(case="attention-kernels", seconds=45, parts=(3,), expected="cudnn first"),
    "linear-kernels": Row(case="linear-kernels", seconds=45, parts=(3,), expected="one kernel saves the sum's 0.1 ms"),
    "random-numbers": Row(case="random-numbers", seconds=45, parts=(3,), expected="below 1 s per billion weights"),
    "mfu-3.6B-recompute": Row(case="mfu", arguments=("3.6B-8-recompute",), seconds=60, parts=(3,)),
    "profile-compiled": Row(case="profile", arguments=("1.3B-8", "compiled"), seconds=60, parts=(3,)),
    "pinned": Row(case="pinned", seconds=60, parts=(3,),
                  expected="pin_memory rounds 20.1 GiB up to 32; registered memory does not"),
    "fits-none-22": Row(case="fits", arguments=("none", 22), seconds=60, parts=(3,)),
    "fits-stream-24-d1": Row(case="fits", arguments=("stream-half-d1", 24), seconds=90, parts=(3,)),
    "fits-stream-36": Row(case="fits", arguments=("stream-half-d3", 36), seconds=110, parts=(3,)),
    "fits-hybrid-36": Row(case="fits", arguments=("hybrid", 36), seconds=110, parts=(3,)),
    "fits-stream-40": Row(case="fits", arguments=("stream-half-d3", 40), seconds=110, parts=(3,),
                          expected="8.27 B parameters"),
    # what needs 141 GB
    **{f"mfu-{name}": Row(case="mfu", arguments=(name,), seconds=90, parts=(4,)) for name in cases_speed.LARGE_SHAPES},
    "fits-none-40": Row(case="fits", arguments=("none", 40), seconds=90, parts=(4,)),
    # by `--only`
    "gpu-tests": Row(command=_gpu_tests, seconds=240, expected="all pass"),
    "parity-compiled": Row(case="parity", arguments=tuple(cases_correctness.COMPILED), seconds=240),
    "ranks-mpi": Row(case="ranks", arguments=("pipe 2", "mpi+torch"), seconds=_RANKS_SECONDS, eager=True),
    "lazy": Row(case="lazy", seconds=400, expected="no start hangs"),
    "variants": Row(case="variants", seconds=150),
    "cuda-graphs": Row(case="cuda-graphs", seconds=90, expected="a gain where launches bound the step"),
    **{f"mfu-{name}": Row(case="mfu", arguments=(name,), seconds=70) for name in cases_speed.SHAPES
       if name not in ("1.3B-8", "2.7B-2", "3.6B-2-half", "3.6B-2-half-float8", "3.6B-8-recompute")}}
