"""A user's own script for the tests of real starts: joins two ranks, agrees on a sum, then does what it is told.

Each rank announces itself as "rank R pid P"; the tests check that none of these processes is left.
"""

import os
import signal
import sys
import threading
import time

import torch

import ranvier

how, transport = sys.argv[1:3]
world = ranvier.start(pipe=2, transport=transport, launcher=sys.argv[3] if len(sys.argv) > 3 else "auto")
group = world.backend.group("sum", [range(world.size)])
total = torch.full((3,), world.rank + 1.0)
group.all_reduce(total).wait()
assert total.tolist() == [3.0] * 3
sys.stdout.write(f"rank {world.rank} pid {os.getpid()} {world.launcher} {world.backend.name}"
                 f" threads {torch.get_num_threads()}\n")
sys.stdout.flush()
if how == "collective" and world.rank == 0:
    time.sleep(300)  # the other rank waits in the barrier
group.barrier()
if how == "hang":
    print("past the barrier", flush=True)
if how == "late" and world.rank == 1:
    time.sleep(2.0)  # rank 0 has reached its end by now
if world.rank == 1:
    if how == "raise":
        raise ValueError("the user's own fault")
    if how == "refuse":
        raise ranvier.ConfigError("cannot be", where="batch.global-size", value=3, remedy="Set another.")
    if how == "thread":
        threading.Thread(target=lambda: {}["nothing"]).start()
    if how == "exit":
        sys.exit(5)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if how not in ("succeed", "late"):
    time.sleep(300)
