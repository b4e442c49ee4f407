"""Ranvier's ranks on a cluster of Ray: `python examples/ray_ranks.py --ranks 4 gpt-tiny --mesh.data 2 --mesh.pipe 2`.

Each actor of a placement group starts a process of `ranvier train`, with the variables that torchrun sets. If a rank
fails, or its actor or node is lost, the others are ended, and all start again from the newest checkpoint. `--run-dir`
must be a folder that all nodes share. Needs `pip install ray`.
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RESTARTS = 3


@ray.remote(max_restarts=0)
class Rank:
    """One rank's process, for as long as the actor lives."""

    def node(self):
        """The address of this actor's node, and a port that is free there."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, arguments, variables):
        """Exit code of the rank."""
        self.process = subprocess.Popen([sys.executable, "-m", "ranvier", "train", *arguments],
                                        env={**os.environ, **variables})
        return self.process.wait()


def variables_of(nodes, secret):
    """The environment of each rank, from the (address, port) of each: those of torchrun."""
    addresses = [address for address, _ in nodes]
    for rank, address in enumerate(addresses):
        yield {"TORCHELASTIC_RUN_ID": "ray", "RANK": str(rank), "WORLD_SIZE": str(len(nodes)),
               "LOCAL_RANK": str(addresses[:rank].count(address)), "LOCAL_WORLD_SIZE": str(addresses.count(address)),
               "MASTER_ADDR": nodes[0][0], "MASTER_PORT": str(nodes[0][1]), "RANVIER_SECRET": secret}


def train(arguments, ranks, gpus):
    """Whether all ranks have ended with exit code 0; if one has not, the others are ended, too."""
    group = placement_group([{"CPU": 1, **({"GPU": 1} if gpus else {})}] * ranks, strategy="PACK")
    ray.get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(placement_group=group)
    actors = [Rank.options(num_cpus=1, num_gpus=1 if gpus else 0, max_concurrency=2,  # type: ignore[attr-defined]
                           scheduling_strategy=strategy).remote() for _ in range(ranks)]
    try:
        nodes = ray.get([actor.node.remote() for actor in actors])
        waiting = [actor.train.remote(arguments, variables)
                   for actor, variables in zip(actors, variables_of(nodes, secrets.token_hex(16)), strict=True)]
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            if ray.get(done) != 0:
                return False
        return True
    except ray.exceptions.RayActorError as lost:
        print(f"lost a rank: {str(lost).splitlines()[0]}", file=sys.stderr)
        return False
    finally:
        for actor in actors:
            ray.kill(actor)  # its rank notices that its parent is gone
        remove_placement_group(group)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="as many as the mesh has")
    parser.add_argument("--gpus", action="store_true", help="one for each rank")
    options, given = parser.parse_known_args()
    ray.init()
    for attempt in range(1 + RESTARTS):
        if train([*given, "--resume", "auto"], options.ranks, options.gpus):
            sys.exit(0)
        print(f"attempt {attempt + 1} has failed", file=sys.stderr)
    sys.exit(1)
