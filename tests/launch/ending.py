"""Two ranks for the tests of stopped ranks: rank 0 comes to its end ("end"), or both wait for each other ("meet").

Each announces itself as "rank R pid P".
"""

import os
import sys
import time

import ranvier

how, transport, stopped_seconds, timeout_seconds = sys.argv[1:5]
world = ranvier.start(pipe=2, transport=transport, device="cpu", threads=1, stopped_seconds=float(stopped_seconds),
                      timeout_seconds=float(timeout_seconds))
group = world.backend.group("meeting", [range(world.size)])
group.barrier()
sys.stdout.write(f"rank {world.rank} pid {os.getpid()}\n")
sys.stdout.flush()
if how == "leave" and world.rank == 1:
    os._exit(0)
if how == "leave" or world.rank == 1:
    time.sleep(300)
if how == "meet":
    time.sleep(1.0)
    group.barrier()
