"""A command that saves when it is told to stop, for the tests of stop signals. Steps end in one sum, as a run's do.

Each rank announces itself as "rank R pid P" and its settings, before it handles signals ("early") or after.
"""

import os
import sys
import time
from types import SimpleNamespace

import torch

from ranvier.config.run import Comm, Launch
from ranvier.launch import start as launch
from ranvier.launch import supervision as supervise
from ranvier.launch.stop import StopRequest
from ranvier.mesh import Mesh
from ranvier.schedule.spans import Timeline
from ranvier.train.metrics import Meter

how, transport = sys.argv[1:3]
supervise._GRACE_SECONDS = 0.3  # shorter than what a rank takes to save
world = launch.start_ranks(Mesh(pipe=2), Comm(transport=transport), Launch(device="cpu", threads=1), saves_on_stop=True,
                           explain_stop=lambda: "The newest checkpoint is step-1.")
group = world.backend.group("train", [range(2)])


def announce():
    group.barrier()
    sys.stdout.write(f"rank {world.rank} pid {os.getpid()} {world.launcher} {world.backend.name}"
                     f" threads {torch.get_num_threads()}\n")
    sys.stdout.flush()


if how == "early":
    announce()
    time.sleep(300)
stop = StopRequest()
meter = Meter(Timeline(), group, world.device, stop)
result = SimpleNamespace(loss=1.0, weight=1.0, grad_norm=1.0, stepped=True)
announce()
pending, step = None, 0
while how == "deaf" or pending is None or not pending.stop_requested:
    step += 1
    pending = meter.step(step, result, 1e-3)
    time.sleep(0.02)
if how == "fail" and world.rank == 1:
    raise ValueError("the disk is full")
time.sleep(1.0)
sys.stdout.write(f"rank {world.rank} saved after step {step} for {stop.reason or 'another rank'}\n")
