"""A torch DataLoader on a mesh: each replica takes its share of each batch, as microbatches, and each row takes its
part of each microbatch.

    loader = ranvier.shard_loader(DataLoader(dataset, batch_size=32, shuffle=True), world, microbatch_size=4)
    for batch in loader:
        engine.train_batch(batch)

Shuffling samplers draw from each rank's own generator, so the batches are those of rank 0's sampler. They are sent to
all ranks when an epoch begins, and again after many batches of a long epoch; for a sampler with a state_dict, batch by
batch. A rank loads only the samples that it computes, and none if its stage needs neither inputs nor targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, islice, pairwise
from operator import index, length_hint
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader, IterableDataset

from ranvier.arguments import check_arguments
from ranvier.comm.board import call_of_all_ranks, describe_actions
from ranvier.config.run import Positive
from ranvier.errors import DataError
from ranvier.layout import part
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch, cut_batch
from ranvier.world import World

_BATCHES_AT_ONCE = 1 << 14
"""Batches whose sample numbers are drawn and sent together; some samplers are endless."""


def shard_loader(loader: DataLoader[Any], world: World, *, microbatch_size: Positive,
                 mesh: Mesh | None = None) -> ShardedLoader:
    """Return the batches of `loader`, which every rank passes, as this rank's microbatches.

    loader: of a data set with numbered samples, whose batches are (inputs, targets) pairs with the samples in dim 0.
    microbatch_size: samples of a replica's microbatch; the last one of a batch may have fewer. The rows' parts of a
    microbatch differ by one sample at most, and may be empty. mesh: as of the engine.

    Raises DataError for a loader of another kind, with its own iteration, or with a sampler that gives each process
    another part of the data.
    """
    check_arguments(shard_loader, locals(), but=("loader",))
    return ShardedLoader(loader, world, microbatch_size, mesh or world.mesh or Mesh.of_replicas(world.size))


class ShardedLoader:
    """See `shard_loader`. Each iteration is an epoch; all ranks begin it together."""

    def __init__(self, loader: DataLoader[Any], world: World, microbatch_size: int, mesh: Mesh) -> None:
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            raise DataError("is not a DataLoader of torch, or iterates in its own way, which would be ignored",
                            code="loader-of-another-kind", where="shard_loader(loader)", value=type(loader).__name__,
                            remedy="Give a torch.utils.data.DataLoader, and change samples in its data set or "
                                   "collate_fn; or cut each batch by ranvier.microbatches.")
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise DataError("has no batches of numbered samples", code="loader-without-samples",
                            where="shard_loader(loader)", value=type(loader.dataset).__name__,
                            remedy="Give a DataLoader with a batch_size over a data set with __getitem__ and __len__.")
        samplers = loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
        for sampler in samplers:
            if getattr(sampler, "num_replicas", 1) != 1:
                raise DataError("gives each process a part of the data, and all ranks would get rank 0's part",
                                code="sampler-of-a-part", where="the sampler of the DataLoader",
                                value=type(sampler).__name__,
                                remedy="Leave it out: shard_loader divides each batch among the replicas. shuffle=True "
                                       "shuffles; batch_size is that of all replicas together.")
        mesh.require_known_axes("shard_loader")
        self._loader, self._world, self._size, self._mesh = loader, world, microbatch_size, mesh
        # A sampler's state that a program saves within an epoch must not be ahead of the batches that the program has
        # seen.
        self._at_once = 1 if any(hasattr(sampler, "state_dict") for sampler in samplers) else _BATCHES_AT_ONCE
        at = mesh.coordinates(world.rank)
        self._share_index, self._part_index = at.batch_share, at.microbatch_part
        self._needs_samples = at.pipeline_rank in (0, mesh.pipeline_size - 1)  # of the first stage, and of the last

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Microbatch]]:
        old = self._loader
        generator = torch.default_generator if old.generator is None else old.generator
        seeds = generator.clone_state()
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # the workers' seed, before the sampler's draws
        sampler = iter(old.batch_sampler if self._world.rank == 0 else ())  # type: ignore[arg-type]  # not None
        with self._call_of_all_ranks():
            self._check_data()
        is_last = False
        while not is_last:
            with self._call_of_all_ranks():
                batches, is_last = self._next_batches(sampler)
            yield from self._microbatches_of([self._share(batch) for batch in batches], seeds)

    def _call_of_all_ranks(self) -> AbstractContextManager[None]:
        return call_of_all_ranks("the loop over shard_loader", partial(describe_actions, self._world.store,
                                                                       self._world.size))

    def _check_data(self) -> None:
        """DataError if the ranks' data sets differ in their size, or, for those of the package `datasets`, in the first
        or the last row as stored."""
        data: Any = self._loader.dataset
        size = length_hint(data, -1)
        found = [size]
        if size > 0 and hasattr(data, "_fingerprint"):
            found += [crc32(repr(data.with_format("arrow")[[0, size - 1]].to_pydict()).encode())]
        if any(other != found for other in self._world.gather_objects(found)):
            raise DataError("is not the same on all ranks, so rank 0's sample numbers would mean other samples there",
                            code="data-sets-differ", where="the data set of the DataLoader", value=size,
                            remedy="Give the full data set on every rank: shard_loader divides each batch among the "
                                   "replicas.")

    def _microbatches_of(self, shares: Sequence[Sequence[int]], seeds: torch.Generator) -> Iterator[list[Microbatch]]:
        old = self._loader
        if not self._needs_samples:
            for share in shares:
                yield [Microbatch(samples=torch.tensor(part, dtype=torch.int64)) for part in self._parts(share)]
            return
        loaded = iter(DataLoader(old.dataset, batch_sampler=[self._local_samples(share) for share in shares if share],
                                 num_workers=old.num_workers, collate_fn=old.collate_fn, pin_memory=old.pin_memory,
                                 timeout=old.timeout, worker_init_fn=old.worker_init_fn,
                                 multiprocessing_context=old.multiprocessing_context,
                                 prefetch_factor=old.prefetch_factor, generator=seeds))
        for share in shares:
            yield self._microbatches(next(loaded), share) if share else []

    def _next_batches(self, sampler: Iterator[Any]) -> tuple[list[list[int]], bool]:
        """The sample numbers of the next batches of rank 0's sampler, and whether they are the last ones."""
        found: list[list[int]] = []
        wrong = None
        for batch in islice(sampler, self._at_once):
            entries = list(batch)
            try:
                found.append([index(number) for number in entries])
            except TypeError:
                wrong = wrong or repr(entries[:8])
        sizes, wrong = self._world.broadcast([[len(batch) for batch in found], wrong])
        if wrong is not None:
            raise DataError("returns something other than sample numbers", code="sampler-not-numbers",
                            where="the sampler of the DataLoader", value=wrong,
                            remedy="Give a sampler of whole numbers.")
        flat = [number for batch in found for number in batch] or [0] * sum(sizes)
        numbers = self._world.broadcast(torch.tensor(flat, dtype=torch.int64)).tolist()
        return ([numbers[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))],
                len(sizes) < self._at_once)

    def _share(self, batch: Sequence[int]) -> list[int]:
        """This replica's share of a batch: the replicas' shares are consecutive, and differ by one sample at most."""
        count = self._mesh.batch_shares
        return list(batch[len(batch) * self._share_index // count:len(batch) * (self._share_index + 1) // count])

    def _parts(self, share: Sequence[int]) -> list[list[int]]:
        """This row's part of each microbatch of a replica's share."""
        found = []
        for start in range(0, len(share), self._size):
            samples = share[start:start + self._size]
            first, last = part(len(samples), self._mesh.microbatch_parts, self._part_index)
            found.append(list(samples[first:last]))
        return found

    def _local_samples(self, share: Sequence[int]) -> list[int]:
        """The samples of a share that this rank loads. A row without a sample loads one, for the shapes."""
        return [number for part in self._parts(share) for number in part] or [share[0]]

    def _microbatches(self, loaded: object, share: Sequence[int]) -> list[Microbatch]:
        if not isinstance(loaded, (tuple, list)) or len(loaded) != 2:
            raise DataError("gives batches that are not (inputs, targets) pairs", code="loader-not-pairs",
                            where="shard_loader(loader)", value=type(loaded).__name__,
                            remedy="Give the DataLoader a collate_fn that returns (inputs, targets).")
        edges = accumulate(map(len, self._parts(share)), initial=0)
        return cut_batch(loaded[0], loaded[1], torch.tensor(self._local_samples(share), dtype=torch.int64),
                         [slice(start, stop) for start, stop in pairwise(edges)])
