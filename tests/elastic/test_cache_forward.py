"""The cache returns what the frozen blocks would have computed, and runs them no more often than necessary."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from ranvier.elastic import cache_file
from ranvier.elastic.cache import AutoCache, digests
from ranvier.elastic.cache_file import CHECKSUM_BYTES, CacheFile
from ranvier.testing.ranks import run_ranks
from tests.elastic.cached import HIT, MISS, NUM_SAMPLES, Cached, Prefix, files, same


@pytest.mark.parametrize("state", ["tensor", "dict"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_hit_is_the_computed_state_to_the_bit(tmp_path, dtype, state):
    with Cached(tmp_path, Prefix(dtype=dtype, state=state)) as cached:
        assert cached.right(3, 1, 7) == MISS
        assert cached.right(3, 1, 7) == HIT
        assert cached.right(7, 3) == HIT  # with any other samples
        counts = cached.cache.counts
        assert (counts.hits, counts.misses, counts.upgraded, counts.unwritten) == (5, 3, 0, 0)
        assert counts.bytes_read > 0 and counts.bytes_written > 0 and counts.seconds["compute"] > 0
        assert not cached.told


@pytest.mark.parametrize(("dtype", "error"), [
    (torch.float32, 2.0 ** -11), (torch.float64, 2.0 ** -11), (torch.bfloat16, 0), (torch.float16, 0)], ids=str)
def test_half_precision_keeps_eleven_bits_and_masks_exactly(tmp_path, dtype, error):
    with Cached(tmp_path, Prefix(dtype=dtype, state="dict"), precision="half") as cached:
        same(cached(*range(8))[0], cached.prefix.truth([*range(8)]))
        state, calls = cached(*range(8))
        truth = cached.prefix.truth([*range(8)])
        assert calls == HIT
        same(state["mask"], truth["mask"])
        same(state["place"], truth["place"])
        for name in ("x", "scalar"):
            assert state[name].dtype is dtype
            difference = (state[name].double() - truth[name].double()).abs()
            assert (difference <= error * truth[name].double().abs() + 2.0 ** -25).all()
        assert (difference > 0).any() == (error > 0)
        x, mask, place, scalar = 60, 5, 240, 2  # two bytes a number, one byte, eight bytes
        assert cached.cache.counts.bytes_written == 8 * (CHECKSUM_BYTES + x + mask + place + scalar)


def test_numbers_beyond_half_precision_are_not_kept(tmp_path):
    """Infinities, which masks contain, are kept."""
    prefix = Prefix(depth=1)
    prefix.compute = lambda first, state, rows: prefix.calls.append(first) or state * 1.0
    prefix.x[5, 2, 3], prefix.x[6] = 65520.0, float("-inf")
    prefix.x[7, 0, 0] = float("nan")
    prefix.x[8] = -65519.0
    with Cached(tmp_path, prefix, precision="half") as cached:
        cached(8)
        cached(4, 5, 6, 7)
        assert cached(8)[1] == HIT and cached(8)[0].eq(-65504).all()
        assert cached(4, 6, 7)[1] == HIT
        assert cached(6)[0].eq(float("-inf")).all() and cached(7)[0].isnan().sum() == 1
        assert cached(5)[1] == [0] and cached(5)[1] == [0]
        assert cached.cache.counts.unwritten == 3
        assert len(cached.told) == 1 and "--elastic.cache-precision full" in cached.told[0]
    with Cached(tmp_path, prefix) as cached:
        cached(5)
        assert cached(5)[1] == HIT


def change_weight(prefix):
    prefix.blocks[1][2].scale[2] += 1e-6


def change_buffer(prefix):
    prefix.blocks[2][2].offset[0] += 1e-6


def replace_weight(prefix):
    prefix.blocks[3][2].scale = nn.Parameter(prefix.blocks[3][2].scale + 1e-6, requires_grad=False)


@pytest.mark.parametrize("change", [change_weight, change_buffer, replace_weight])
def test_other_weights_or_buffers_are_a_miss(tmp_path, change):
    with Cached(tmp_path) as cached:
        cached.right(1, 2)
        change(cached.prefix)
        assert cached.right(1, 2) == MISS  # in the same run
        assert cached.right(1, 2) == HIT
    changed = Prefix()
    change(changed)
    with Cached(tmp_path, changed, knows=True) as again:
        assert again.right(1, 2) == HIT  # on another rank


@pytest.mark.parametrize("when", ["epoch", "depth"])
def test_weights_changed_behind_torchs_back_are_seen_after_an_epoch_and_when_more_are_frozen(tmp_path, when):
    with Cached(tmp_path) as cached:
        cached.right(1, 2)
        cached.cache.check_weights()
        assert cached.right(1, 2) == HIT
        cached.prefix.blocks[0][2].scale.data.mul_(2)
        cached.deepen(5) if when == "depth" else cached.cache.check_weights()
        assert cached.right(1, 2) == MISS


@pytest.mark.parametrize("option", [{"precision": "half"}, {"part": "col 0 of 2"}])
def test_what_else_an_entry_depends_on(tmp_path, option):
    with Cached(tmp_path) as cached, Cached(tmp_path, **option) as other:
        cached.right(1, 2)
        assert other.right(1, 2) == MISS


def test_blocks_of_other_names_or_order_are_others(tmp_path):
    with Cached(tmp_path) as cached:
        cached.right(1)
    prefix = Prefix()
    prefix.blocks[0], prefix.blocks[1] = prefix.blocks[1], prefix.blocks[0]
    with Cached(tmp_path, prefix, knows=True) as cached:
        assert cached.right(1) == MISS


def named_as(names):
    """A module of two equal tensors under these names."""
    module = nn.Module()
    for name in names:
        setattr(module, name, nn.Parameter(torch.ones(2), requires_grad=False))
    return module


def test_the_hash_is_of_names_formats_and_shapes_too():
    """Hashes differ although the bytes are the same."""
    def weights(module, name="block", number=0):
        return digests([(number, name, module)])[1]

    plain = weights(named_as(["a", "b"]))
    assert plain == weights(named_as(["a", "b"]))
    others = [named_as(["a", "c"]), named_as(["b", "a"]), named_as(["a", "b"]), named_as(["a", "b"])]
    others[2].a.data = others[2].a.data.view(2, 1)
    others[3].a.data = others[3].a.data.view(torch.int32)
    found = {weights(other) for other in others} | {weights(named_as(["a", "b"]), "other")}
    found |= {weights(named_as(["a", "b"]), number=1)}
    assert len(found) == 6 and plain not in found


def test_some_rows_are_there_and_only_the_others_are_computed(tmp_path):
    with Cached(tmp_path) as cached:
        cached.right(1, 3)
        assert cached.right(0, 1, 2, 3, 4) == [(0, [0, 2, 4])]
        assert cached.right(4, 3, 2, 1, 0) == HIT
        counts = cached.cache.counts
        assert (counts.hits, counts.misses, counts.written) == (7, 5, 5)


def test_repeats_come_back_in_place(tmp_path):
    with Cached(tmp_path, Prefix(state="dict")) as cached:
        assert cached.right(2, 1, 2, 2) == MISS
        assert cached.right(1, 2, 1, 1) == HIT
        assert cached.right(1, 5, 5, 1) == [(0, [1, 2])]
        counts = cached.cache.counts
        assert (counts.hits, counts.misses, counts.written) == (6, 6, 6)


def test_microbatches_with_other_numbers_than_those_of_samples_are_computed_and_not_kept(tmp_path):
    with Cached(tmp_path) as cached:
        assert cached.right(4, NUM_SAMPLES, 5) == MISS and cached.right(4, NUM_SAMPLES, 5) == MISS
        assert cached.right(4, 5) == MISS and cached.right(4, 5) == HIT
        cached.cache.prefetch([torch.tensor([4, NUM_SAMPLES]), torch.tensor([5])])
        assert list(cached.cache._newest._ahead) == [(5,)]
        assert cached.right(4, NUM_SAMPLES) == MISS
        assert cached.cache.counts.written == 2


def test_an_upgrade_runs_only_the_newly_frozen_blocks(tmp_path):
    with Cached(tmp_path, Prefix(depth=2)) as cached:
        cached.right(0, 1, 2)
        cached.deepen(4)
        assert cached.right(0, 1) == [(2, None)]
        assert cached.right(0, 1) == HIT
        cached.deepen(6)  # samples 0 and 1 are at depth 4; sample 2 is at depth 2, which is no longer read
        assert cached.right(3, 2, 1, 0) == [(4, [2, 3]), (0, [0, 1])]
        assert len(files(tmp_path)) == 2
        assert cached.right(0, 1, 2, 3) == HIT
        counts = cached.cache.counts
        assert (counts.hits, counts.upgraded, counts.misses, counts.written) == (6, 4, 5, 9)


def test_an_upgrade_of_repeats(tmp_path):
    with Cached(tmp_path, Prefix(depth=2)) as cached:
        cached.right(0, 1)
        cached.deepen(4)
        assert cached.right(1, 0, 1) == [(2, None)]
        assert cached.right(1, 0, 1) == HIT


def test_an_older_depth_of_other_weights_is_no_source(tmp_path):
    with Cached(tmp_path, Prefix(depth=3)) as cached:
        cached.right(0, 1)
        cached.deepen(2)
        cached.right(0)
        change_buffer(cached.prefix)  # of block 2
        cached.deepen(4)
        assert cached.right(0, 1) == [(2, [0]), (0, [1])]


def test_a_new_rank_upgrades_what_another_has_written(tmp_path):
    """The new rank learns the format of a row from the check of its blocks."""
    with Cached(tmp_path, Prefix(depth=2)) as cached:
        cached.right(0, 1)
        with Cached(tmp_path, Prefix(depth=5), knows=True) as other:
            assert other.right(0, 1) == [(2, None)]


def test_a_rank_finds_what_another_writes_meanwhile(tmp_path):
    with Cached(tmp_path) as one, Cached(tmp_path) as other:
        assert other.right(5) == MISS
        one.right(0)
        assert other.right(0) == HIT
        assert other.right(1) == MISS
        assert other.right(0, 1) == HIT and one.right(1, 0) == HIT


def test_gradients_do_not_go_into_the_frozen_blocks(tmp_path):
    prefix = Prefix()
    for _, _, module in prefix.blocks:
        module.scale.requires_grad_(True)
    with Cached(tmp_path, prefix) as cached:
        for _ in range(2):
            state, _ = cached(1, 2)
            assert not state.requires_grad and state.grad_fn is None


def test_a_changed_state_does_not_change_its_entry(tmp_path):
    with Cached(tmp_path) as cached:
        for _ in range(3):
            cached(1, 2)[0].zero_()
        assert cached.right(1, 2) == HIT
        cached.cache.prefetch([torch.tensor([1, 2])])
        cached(1, 2)[0].zero_()
        assert cached.right(1, 2) == HIT


def test_errors_of_the_blocks_go_through(tmp_path):
    with Cached(tmp_path) as cached:
        with pytest.raises(ZeroDivisionError):
            cached.cache.forward(torch.tensor([0]), cached.prefix.inputs([0]), lambda *_: 1 / 0)
        assert cached.right(0) == MISS


def odd_layout(state):
    """Every other row and column of a larger tensor, a transposed one, one number, no numbers."""
    return {"part": state.repeat(2, 2, 2)[::2, ::2, 1::2], "turned": state.transpose(1, 2), "one": state[:, :1, 0],
            "none": state[:, :0], "flag": state[:, 0, 0] > 0}


@pytest.mark.parametrize("samples", [(0,), (0, 1, 2), (2, 2)])
def test_states_in_any_memory_layout(tmp_path, samples):
    prefix = Prefix(depth=1)
    prefix.compute = lambda first, state, rows: prefix.calls.append((first, None)) or odd_layout(state)
    prefix.truth = lambda samples: odd_layout(prefix.inputs(samples))
    with Cached(tmp_path, prefix) as cached:
        assert cached.right(*samples) == MISS and cached.right(*samples) == HIT
    prefix.blocks[0][2].scale = nn.Parameter(torch.rand(9, 6)[:1, 3], requires_grad=False)
    with Cached(tmp_path, prefix) as cached:
        assert cached.right(*samples) == MISS and not cached.told


# ---------------------------------------------------------------------- what cannot be kept

def test_other_shapes_are_not_kept_and_told_once(tmp_path):
    with Cached(tmp_path) as cached:
        cached.right(0, 1)
        for _ in range(2):
            short = cached.prefix.inputs([0, 1])[:, :3]
            made = cached.cache.forward(torch.tensor([0, 1]), short, cached.prefix.compute)
            assert made.shape == (2, 3, 6)
        assert cached.right(0, 1) == HIT
        assert len(cached.told) == 1 and "shapes of inputs differ" in cached.told[0]


def test_outputs_whose_shape_depends_on_the_sample_are_told_once(tmp_path):
    prefix = Prefix(depth=1)
    prefix.compute = lambda first, state, rows: state[:, :2 if state[0, 0, 0] == prefix.x[1, 0, 0] else 3]
    with Cached(tmp_path, prefix) as cached:
        assert cached(0)[0].shape == (1, 3, 6)
        for _ in range(2):
            assert cached(1)[0].shape == (1, 2, 6)
        assert cached(1, 0)[0].shape == (2, 2, 6)  # one of them was kept with shape 3: all are computed again
        assert len(cached.told) == 1 and "state's shapes differ between microbatches" in cached.told[0]


def positions(state):
    return {"x": state, "positions": torch.arange(5)}


def complex_numbers(state):
    return state.to(torch.complex64)


@pytest.mark.parametrize(("made", "message"), [
    (positions, "first dim"), (complex_numbers, "torch.complex64"), (lambda x: x.sum(0), "first dim")])
def test_states_that_are_no_rows_are_not_kept_and_told_once(tmp_path, made, message):
    prefix = Prefix(depth=1)
    prefix.compute = lambda first, state, rows: prefix.calls.append((first, None)) or made(state)
    with Cached(tmp_path, prefix) as cached:
        for _ in range(3):
            assert cached(0, 1)[1] == MISS
        cached(1, 1)
        assert len(cached.told) == 1 and message in cached.told[0]
    assert not files(tmp_path)


def test_inputs_that_are_no_rows_are_not_kept(tmp_path):
    with Cached(tmp_path) as cached:
        for _ in range(2):
            made = cached.cache.forward(torch.tensor([0, 1]), cached.prefix.inputs([0, 1, 2]), cached.prefix.compute)
            assert made.shape[0] == 3
        assert len(cached.told) == 1


def test_outputs_of_blocks_that_change_their_own_buffers_are_not_kept(tmp_path):
    """A norm that collects statistics as it runs."""
    prefix = Prefix(depth=1)

    def compute(first, state, rows):
        prefix.blocks[0][2].offset += 1
        return prefix.blocks[0][2](state)

    prefix.compute = compute
    with Cached(tmp_path, prefix) as cached:
        for _ in range(5):
            cached(0, 1)
        assert cached.cache.counts.misses == 10 and cached.cache.counts.written == 0


def test_nothing_frozen_and_empty_microbatches(tmp_path):
    with Cached(tmp_path, Prefix(depth=0)) as cached:
        assert cached.right(0, 1) == MISS and cached.right(0, 1) == MISS
        cached.deepen(2)
        assert cached.right(0, 1) == MISS and cached.right(0, 1) == HIT
        state, calls = cached()
        assert state.shape == (0, 5, 6) and calls == MISS
        assert cached.right(1) == HIT


def test_after_it_was_closed_all_is_computed(tmp_path):
    with Cached(tmp_path) as cached:
        cached.right(0)
        cached.cache.close()
        cached.cache.prefetch([torch.tensor([0])])
        assert cached.right(0) == MISS
        assert cached.cache.times(torch.tensor([0])) is None


# ---------------------------------------------------------------------- ranks that act together

def test_ranks_of_a_stage_hit_together_or_not_at_all(tmp_path):
    """Two ranks have their own slices; when one rank loses an entry, both compute."""
    votes, meeting = [True, True], threading.Barrier(2, timeout=20)

    def work(world):
        rank = world.backend.rank

        def agree(mine):
            votes[rank] = mine
            meeting.wait()
            both = all(votes)
            meeting.wait()
            return both

        steps = []
        prefix = Prefix(depth=2)
        with Cached(tmp_path, prefix, agree=agree, part=f"col {rank} of 2") as cached:
            steps += [cached.right(0, 1), cached.right(1, 0), cached.right(0, 2), cached.right(2, 2, 1)]
            if rank == 1:
                damage(cached.cache)
            steps += [cached.right(0, 1), cached.right(0, 1)]
            cached.deepen(4)
            steps += [cached.right(1, 0, 1), cached.right(0, 3), cached.right(0, 1)]
            if rank == 0:
                change_weight(cached.prefix)  # of block 1, on one rank only
            steps += [cached.right(0, 1), cached.right(0, 1)]
            steps += [cached.right(0, NUM_SAMPLES), cached.right(0, NUM_SAMPLES)]
            assert not cached.told
        return steps

    expected = [MISS, HIT, MISS, HIT, MISS, HIT, [(2, None)], MISS, HIT, MISS, HIT, MISS, MISS]
    assert run_ranks(work, 2) == [expected, expected]


def damage(cache: AutoCache):
    """Break the entry of sample 1."""
    place = int(cache._newest._starts[1]) + 40
    with open(cache._folder.path / f"{cache._newest.key}.rows", "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


# ---------------------------------------------------------------------- reading ahead

def on_thread():
    return threading.current_thread().name.startswith("ranvier-cache")


def wait(cached):
    for future in cached.cache._newest._ahead.values():
        future.exception()


def test_what_was_read_ahead_is_not_read_again(tmp_path, monkeypatch):
    with Cached(tmp_path) as cached:
        cached.right(0, 1, 2, 3)
        readers, read = [], CacheFile._read
        monkeypatch.setattr(CacheFile, "_read", lambda self, samples, pinned: readers.append(
            (on_thread(), list(samples))) or read(self, samples, pinned))
        cached.cache.prefetch([torch.tensor([0, 1]), torch.tensor([2, 3, 2])])
        wait(cached)
        assert cached.right(0, 1) == HIT and cached.right(2, 3, 2) == HIT
        assert readers == [(True, [0, 1]), (True, [2, 3, 2])]
        assert cached.right(1, 0) == HIT  # not foreseen
        assert readers[2:] == [(False, [1, 0])]
        assert not cached.cache._newest._ahead


def test_what_was_not_there_when_read_ahead_is_looked_for_again(tmp_path):
    """For example, a sample can be in the last step of an epoch and in the first step of the next."""
    with Cached(tmp_path) as cached:
        cached.right(0)
        cached.cache.prefetch([torch.tensor([0, 1])])
        wait(cached)
        cached.right(1)
        assert cached.right(0, 1) == HIT


def test_reading_ahead_is_bounded_and_follows_the_last_call(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "_AHEAD_BYTES", 3 * 2 * (CHECKSUM_BYTES + 120))
    with Cached(tmp_path) as cached:
        assert cached.right(*range(10)) == MISS
        cached.cache.prefetch([torch.tensor([i, i + 1]) for i in range(8)])
        assert list(cached.cache._newest._ahead) == [(0, 1), (1, 2), (2, 3)]
        cached.cache.prefetch([torch.tensor([2, 3]), torch.tensor([5])])
        assert list(cached.cache._newest._ahead) == [(2, 3), (5,)]
        assert cached.right(2, 3) == HIT and cached.right(0, 1) == HIT


def test_errors_of_the_thread_are_reads_that_found_nothing(tmp_path, monkeypatch):
    with Cached(tmp_path) as cached:
        cached.right(0, 1)
        read = CacheFile._read

        def broken(self, samples, pinned):
            if on_thread():
                raise MemoryError
            return read(self, samples, pinned)

        monkeypatch.setattr(CacheFile, "_read", broken)
        cached.cache.prefetch([torch.tensor([0, 1])])
        wait(cached)
        assert cached.right(0, 1) == HIT


def test_a_microbatch_that_the_thread_has_not_begun_is_not_waited_for(tmp_path, monkeypatch):
    with Cached(tmp_path) as cached:
        cached.right(0, 1)
        hold, begun, read = threading.Event(), threading.Event(), CacheFile._read

        def held(self, samples, pinned):
            if on_thread():
                begun.set()
                hold.wait(20)
            return read(self, samples, pinned)

        monkeypatch.setattr(CacheFile, "_read", held)
        cached.cache.prefetch([torch.tensor([0]), torch.tensor([1])])
        assert begun.wait(20)
        assert cached.right(1) == HIT
        hold.set()
        assert cached.right(0) == HIT


def test_reading_ahead_across_new_weights_and_depths(tmp_path):
    """Rows that were read ahead from old files are never used as the new files', and no file is closed while read."""
    with Cached(tmp_path, Prefix(depth=2)) as cached:
        cached.right(0, 1)
        cached.cache.prefetch([torch.tensor([0, 1])])
        change_weight(cached.prefix)
        assert cached.right(0, 1) == MISS
        cached.cache.prefetch([torch.tensor([0, 1])])
        cached.deepen(4)
        cached.cache.prefetch([torch.tensor([0, 1])])
        assert cached.right(0, 1) == [(2, None)]


def test_no_file_is_closed_while_it_is_read(tmp_path, monkeypatch):
    with Cached(tmp_path) as cached:
        cached.right(0, 1)
        hold, begun, read = threading.Event(), threading.Event(), CacheFile._read

        def held(self, samples, pinned):
            begun.set()
            assert hold.wait(20)
            return read(self, samples, pinned)

        monkeypatch.setattr(CacheFile, "_read", held)
        cached.cache.prefetch([torch.tensor([0])])
        assert begun.wait(20)
        closing = threading.Thread(target=cached.cache.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        hold.set()
        closing.join(20)
        assert not closing.is_alive()


def test_ranks_vote_on_one_depth_at_a_time_whatever_was_read_ahead(tmp_path):
    votes = []
    with Cached(tmp_path, Prefix(depth=1), agree=lambda mine: votes.append(mine) or mine) as cached:
        cached.right(0, 1)
        cached.deepen(2)
        cached.right(2)
        cached.cache.prefetch([torch.tensor([0, 1])])
        wait(cached)
        votes.clear()
        assert cached.right(0, 1) == [(1, None)]
        assert votes == [True, False, True]  # weights unchanged; not at depth 2; at depth 1


def test_the_thread_ends_at_close(tmp_path):
    before = threading.active_count()
    with Cached(tmp_path) as cached:
        cached.right(0, 1)
        cached.cache.prefetch([torch.tensor([0]), torch.tensor([1])])
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_times_are_of_what_was_done(tmp_path):
    with Cached(tmp_path) as cached:
        assert cached.cache.times(torch.tensor([0])) is None
        cached.right(0, 1)
        times = cached.cache.times(torch.tensor([0, 1]))
        assert min(times.compute, times.read, times.write) > 0
        assert times.compute == cached.cache.counts.seconds["compute"] / 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["full", "half"])
def test_states_on_a_gpu(tmp_path, precision):
    """States go through pinned memory and come back on the device."""
    prefix = Prefix(depth=2, state="dict")
    prefix.x = prefix.x.cuda()
    for _, _, module in prefix.blocks:
        module.cuda()
    with Cached(tmp_path, prefix, precision=precision, device=torch.device("cuda")) as cached:
        cached.right(0, 1, 2)
        cached.cache.prefetch([torch.tensor([2, 1])])
        state, calls = cached(2, 1)
        truth = prefix.truth([2, 1])
        assert calls == HIT and state["x"].is_cuda
        assert torch.allclose(state["x"], truth["x"], rtol=0 if precision == "full" else 2 ** -11, atol=2 ** -25)
        same(state["mask"].cpu(), truth["mask"].cpu())
        cached.deepen(4)
        assert cached(0, 1, 2)[1] == [(2, None)] and cached(0, 5)[1] == [(0, [1])]


# ---------------------------------------------------------------------- samples with different lengths

class Ragged(Prefix):
    """Inputs that are padded to the longest sample of a microbatch; the padding has other values each time."""

    lengths = np.arange(NUM_SAMPLES) % 5 + 1
    noise = 0.0

    def inputs(self, samples):
        length = int(self.lengths[list(samples)].max()) + (1 if len(samples) == 3 else 0)
        x = torch.randn(NUM_SAMPLES, 6, 6, generator=torch.Generator().manual_seed(9))[list(samples), :length]
        mask = torch.arange(length) < torch.tensor(self.lengths[list(samples)])[:, None]
        self.noise += 1
        return {"x": torch.where(mask[..., None], x, self.noise), "mask": mask}


def own_part(state, samples):
    """The samples' own positions; checks that the mask excludes all others."""
    rows = [state["x"][row, :Ragged.lengths[sample]] for row, sample in enumerate(samples)]
    assert state["mask"].sum(1).tolist() == Ragged.lengths[list(samples)].tolist()
    return torch.cat(rows)


@pytest.mark.parametrize("precision", ["full", "half"])
def test_entries_have_the_positions_of_their_own_samples(tmp_path, precision):
    with Cached(tmp_path, Ragged(), lengths=Ragged.lengths, precision=precision) as cached:
        first = {samples: cached(*samples)[0] for samples in ((0, 1, 2), (3, 4), (5, 9))}
        for samples in ((0, 1, 2), (0, 4), (9, 0, 3), (1,)):  # with other samples, so other lengths
            state, calls = cached(*samples)
            assert calls == HIT and state["x"].shape[:2] == state["mask"].shape
            truth = own_part(cached.prefix.truth(list(samples)), samples)
            assert torch.allclose(own_part(state, samples), truth, atol=1e-2 if precision == "half" else 0, rtol=0)
        assert not cached.told and len(first) == 3
        short = cached.cache.counts.bytes_written
        cached.deepen(5)
        state, calls = cached(0, 4)
        assert calls == [(4, None)] and torch.allclose(own_part(state, (0, 4)), own_part(
            cached.prefix.truth([0, 4]), (0, 4)), atol=1e-2 if precision == "half" else 0, rtol=0)
    record = 6 * (4 if precision == "full" else 2) + 1
    assert short == sum(int(Ragged.lengths[sample]) for sample in (0, 1, 2, 3, 4, 5, 9)) * record + 7 * CHECKSUM_BYTES


def test_states_without_positions_are_not_kept(tmp_path):
    class Pooled(Ragged):
        def compute(self, first, state, rows):
            return {"x": super().compute(first, state, rows)["x"][:, 0, 0]}

    with Cached(tmp_path, Pooled(), lengths=Ragged.lengths) as cached:
        cached(0, 1)
        cached(0, 1)
        assert len(cached.told) == 1 and "positions as their second dim" in cached.told[0]
