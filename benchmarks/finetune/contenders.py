"""The contenders: a loop over transformers' model, the same under DDP, and Ranvier's engine. Each rank has a core.

All start from the weights in one folder and take the same samples at each step, in the order of Ranvier's sampler,
which groups sentences by length. Every rank pads its share of a batch to its longest sentence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranvier.checkpoint.hf.from_pretrained import load_pretrained
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.protocol import Backend
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.run import Optim
from ranvier.data.arrays import Arrays
from ranvier.data.classification import Labelled
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.mesh import Mesh
from ranvier.models.bert import bert
from ranvier.pipeline.engine import Engine
from ranvier.world import World

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=300)
_PAD, _CLS, _SEP, _FIRST_WORD = range(4)
_MEAN_WORDS, _SHAPE = 11.5, 1.2

Step = Callable[[int], Callable[[], float]]
"""Training step `number`; returns a function that reads this rank's share of its loss."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """shard: whether Ranvier shards the optimizer states over its ranks. mpi: whether its ranks communicate over MPI
    rather than Gloo. The ranks of a `plain` contender train independently of each other."""

    name: str
    kind: Literal["plain", "ddp", "ours"]
    ranks: int
    shard: bool = False
    mpi: bool = False

    @property
    def batches(self) -> int:
        """Global batches that are trained on at each step."""
        return self.ranks if self.kind == "plain" else 1


PLAIN = Contender(name="transformers", kind="plain", ranks=1)
CONTENDERS = (
    PLAIN,
    Contender(name="Ranvier", kind="ours", ranks=1),
    Contender(name="two loops", kind="plain", ranks=2),
    Contender(name="DDP, data 2", kind="ddp", ranks=2),
    Contender(name="Ranvier, data 2", kind="ours", ranks=2),
    Contender(name="Ranvier, data 2, sharded", kind="ours", ranks=2, shard=True),
    Contender(name="Ranvier, data 2, MPI", kind="ours", ranks=2, mpi=True),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of all contenders. model: a folder with transformers' BERT; microbatch: most sentences in a microbatch
    of Ranvier, 0 for a rank's full share of a batch; bucket_size: of Ranvier's optimizer."""

    model: Path
    vocab: int
    sentences: int
    batch: int
    longest: int = 64
    learning_rate: float
    microbatch: int = 0
    bucket_size: int | Literal["auto"] = "auto"
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.sentences // self.batch


def make_sentences(work: Work) -> Labelled:
    """Sentences with lengths as in SST-2: 13.5 tokens on average, [CLS] and [SEP] included, at most 64. Frequencies of
    words follow Zipf's law; three of four words are even numbers in sentences of class 1, and odd numbers in those of
    class 0.
    """
    random = np.random.default_rng(work.seed)
    many = np.sort(random.gamma(_SHAPE, (_MEAN_WORDS - 0.5) / _SHAPE, 100_000))
    words = np.rint(many[((np.arange(work.sentences) + 0.5) / work.sentences * len(many)).astype(int)] + 0.5)
    lengths = random.permutation(np.clip(words.astype(np.int32), 1, work.longest - 2)) + 2
    labels = random.permutation(np.arange(work.sentences, dtype=np.int32) % 2)
    ids = np.full((work.sentences, work.longest), _PAD, dtype=np.int32)
    pairs = (work.vocab - _FIRST_WORD) // 2
    for row, (length, label) in enumerate(zip(lengths, labels, strict=True)):
        pair = (pairs ** random.random(length - 2)).astype(np.int32) - 1
        parity = (random.random(length - 2) < 0.75) == label
        ids[row, :length] = [_CLS, *(_FIRST_WORD + 2 * pair + parity), _SEP]
    firsts = np.full(work.sentences, work.longest, dtype=np.int32)  # no pairs
    return Labelled(Arrays(arrays={"ids": ids, "lengths": lengths, "labels": labels, "firsts": firsts}, facts={},
                           digest=""))


def loader_of(work: Work, *, rank: int = 0, ranks: int = 1, microbatch: int = 0) -> Loader:
    """The share of one of `ranks` replicas; in one piece, or in microbatches of a given size."""
    data = make_sentences(work)
    share = work.batch // ranks
    return Loader(data, Sampler(len(data), work.seed, lengths=data.sample_lengths), global_size=work.batch,
                  microbatch_size=min(microbatch or share, share), replica=rank, num_replicas=ranks,
                  lengths=data.sample_lengths)


@contextmanager
def open_torch(work: Work, contender: Contender, rank: int, store: dist.Store) -> Iterator[Step]:
    """A loop with dynamic padding over transformers' model and torch's AdamW, alone or under DDP over Gloo."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    network: nn.Module = transformers.BertForSequenceClassification.from_pretrained(
        work.model, attn_implementation="sdpa").train()
    is_ddp = contender.kind == "ddp"
    if is_ddp:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=contender.ranks, timeout=_TIMEOUT)
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=work.learning_rate, fused=True)
    loader = loader_of(work, rank=rank, ranks=contender.ranks) if is_ddp else loader_of(work)

    def step(number: int) -> Callable[[], float]:
        (batch,) = loader.microbatches(number)
        loss = network(input_ids=batch.inputs["ids"], attention_mask=batch.inputs["mask"],
                       token_type_ids=batch.inputs["types"], labels=batch.targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return lambda: loss.item() / contender.ranks

    yield step
    if is_ddp:
        dist.destroy_process_group()


@contextmanager
def open_ours(work: Work, contender: Contender, rank: int, store: dist.Store) -> Iterator[Step]:
    """Ranvier's engine on as many replicas as there are ranks."""
    seconds = _TIMEOUT.total_seconds()
    backend: Backend = (MPIBackend(_CPU, seconds) if contender.mpi
                        else TorchBackend(rank, contender.ranks, store, _CPU, seconds))
    world = World(backend=backend, store=store, launcher="benchmark", device=_CPU, local_rank=rank,
                  local_size=contender.ranks)
    pretrained = Pretrained(work.model)
    engine = Engine(bert(pretrained.config, "classes"), world, mesh=Mesh(data=contender.ranks), seed=work.seed,
                    optim=Optim(shard=contender.shard, bucket_size=work.bucket_size),
                    learning_rate=work.learning_rate, nominal_weight=work.batch)
    load_pretrained(engine, pretrained)
    loader = loader_of(work, rank=rank, ranks=contender.ranks, microbatch=work.microbatch)

    def step(number: int) -> Callable[[], float]:
        result = engine.train_batch(loader.microbatches(number))
        engine.timeline.take()
        return lambda: result.loss / contender.ranks

    yield step
    engine.close()
    backend.close()


def serve(commands: Connection, work: Work, contender: Contender, rank: int, port: int) -> None:
    """Process of one rank: build the model, then train as many steps as the driver sends, until it sends 0."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.manual_seed(work.seed + rank)  # dropout
    store = dist.PrefixStore(contender.name, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT))
    opened = open_ours if contender.kind == "ours" else open_torch
    with opened(work, contender, rank, store) as step:
        commands.send(None)
        number = 0
        while (steps := commands.recv()) > 0:
            began, losses = time.monotonic(), []
            read = step(number)
            for following in range(number + 1, number + steps):
                previous, read = read, step(following)
                losses.append(previous())
            losses.append(read())
            commands.send((began, time.monotonic(), losses))
            number += steps
