"""Two ranks for the tests of stopped ranks: rank 0 reaches its end ("end"), or both wait for each other ("meet").

Each announces itself as "rank R pid P". With "begin-R" rank R stops itself before it is connected, and the other rank
catches the error, as the command does.
"""

import os
import signal
import sys
import time

import ranvier


def announce(rank):
    sys.stdout.write(f"rank {rank} pid {os.getpid()}\n")
    sys.stdout.flush()


how, transport, stopped_seconds, timeout_seconds = sys.argv[1:5]
if how.startswith("begin"):
    rank = os.environ.get("RANK") or os.environ["PMI_RANK"]
    announce(rank)
    if how == f"begin-{rank}":
        os.kill(os.getpid(), signal.SIGSTOP)
try:
    world = ranvier.start(pipe=2, transport=transport, device="cpu", threads=1, stopped_seconds=float(stopped_seconds),
                          timeout_seconds=float(timeout_seconds))
except ranvier.RanvierError as error:
    sys.exit(f"ranvier: error: {error}")
group = world.backend.group("meeting", [range(world.size)])
group.barrier()
announce(world.rank)
if how == "leave" and world.rank == 1:
    os._exit(0)
if how == "leave" or world.rank == 1:
    time.sleep(300)
if how == "meet":
    time.sleep(1.0)
    group.barrier()
