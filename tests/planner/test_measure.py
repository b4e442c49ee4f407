"""Measurements: known constants are recovered, a line through messages, and the file of this machine."""

import random

import pytest

from ranvier.cli.main import run_command
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.kernels import whole_waves_flops
from ranvier.launch.rank_processes import RanksFailed
from ranvier.planner import measure
from ranvier.planner.measure import _core_sharing_slowdown, fit, line, seconds_of_a_flop
from ranvier.planner.microbenchmarks import Sizes, measured_device, tile_rate
from ranvier.testing.ranks import run_processes
from tests.errors import reports


def samples(flop, byte, launch, noise=0.0):
    """Samples of 5 to 20 kernels, some bound by their FLOPs and some by their bytes."""
    generator = random.Random(0)
    found = []
    for _ in range(20):
        kernels = [(generator.choice([0.0, 10 ** generator.uniform(4, 8)]), 10 ** generator.uniform(3, 6))
                   for _ in range(generator.randint(5, 20))]
        seconds = sum(max(flops * flop, moved * byte) + launch for flops, moved in kernels)
        found.append((kernels, seconds * generator.uniform(1 - noise, 1 + noise)))
    return found


def test_the_constants_are_found_again():
    assert fit(samples(2e-11, 1e-10, 4e-6)) == pytest.approx((2e-11, 1e-10, 4e-6), rel=1e-6)
    assert fit(samples(2e-11, 1e-10, 4e-6, noise=0.1)) == pytest.approx((2e-11, 1e-10, 4e-6), rel=0.2)


def test_no_constant_is_negative():
    assert fit(samples(2e-11, 0.0, 4e-6)) == pytest.approx((2e-11, 0.0, 4e-6), rel=1e-6, abs=1e-16)
    assert all(one >= 0 for one in fit([([(1.0, 5.0)], 2.0), ([(2.0, 1.0)], 5.0), ([(3.0, 0.5)], 9.0)]))


def test_another_format_has_a_rate_beside_the_same_constants():
    measured = samples(5e-11, 1e-10, 4e-6)
    assert seconds_of_a_flop(measured, 1e-10, 4e-6) == pytest.approx(5e-11, rel=1e-9)
    assert seconds_of_a_flop(measured, 1.0, 4e-6) == 0.0


def test_a_machine_that_is_too_busy_is_told(capsys, monkeypatch, tmp_path):
    def late(*args, **more):
        raise RanksFailed("rank 0, 1 of 2 had not ended after 120 s\n--- rank 0:")

    monkeypatch.setattr(measure, "run_processes", late)
    monkeypatch.chdir(tmp_path)
    with reports("measurement-failed"):
        assert run_command(["doctor", "--measure"]) == 2
    assert ("ranvier: error: this machine: could not be measured: rank 0, 1 of 2 had not ended after 120 s. Measure "
            "again while the machine has nothing else to do.\n") in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_rate_of_products_and_the_start_of_a_tile_are_found_again():
    shapes = [(1, 8192, 8192, 8192), (1, 16384, 8192, 512), (1, 2048, 2048, 2048), (1, 512, 4096, 4096)]
    seconds = {shape: whole_waves_flops(shape, 132, 128, 90.0) / 7e14 for shape in shapes}
    assert tile_rate(seconds, 132, 128) == pytest.approx((7e14, 90.0), rel=1e-6)
    thin = {shape: each * (1.5 if shape[3] > 600 else 1.0) for shape, each in seconds.items()}
    assert tile_rate(thin, 132, 128)[1] == 0.0  # short sums are not slower, so their start takes no time


@pytest.mark.parametrize("formats", [("fp32", "bf16")])
def test_a_device_is_measured_kernel_by_kernel(formats):
    """With the code that measures a GPU, at small sizes."""
    sizes = Sizes(products=((64, 64, 64), (96, 32, 256)), attention=(1, 2, 32, 16), elements=1 << 12, seconds=0.0)
    device = measured_device("no GPU", formats, memory_bytes=1 << 30, multiprocessors=4, update_bandwidth=1e9,
                             sizes=sizes)
    assert tuple(device.rates) == formats and device.message_multiprocessors == 4 and device.operation_seconds > 0
    assert 0 < device.reduction_share <= 1
    for rate in device.rates.values():
        assert rate.share == 1.0 and 0 < rate.attention_share <= 1 and 0 < rate.attention_backward_share <= 1


def test_a_line_through_messages():
    assert line([(size, 1e-5 + size / 2e9) for size in (1e3, 1e5, 1e7)]) == pytest.approx((1e-5, 2e9), rel=1e-6)
    assert line([(1e3, 1e-9), (1e6, 1e-3)])[0] == 0.0


def test_what_taking_turns_costs():
    alone = [{"blocks": 1.0, "collective": 1e-4}, {"blocks": 3.0, "collective": 3e-4}]
    crowded = [{"blocks": 5.0, "collective": 9e-4}] * 4
    assert _core_sharing_slowdown(alone, crowded) == pytest.approx({"crowded_share": 0.8, "turn_seconds": 5e-4})
    assert _core_sharing_slowdown([{"blocks": 0.5, "collective": None}], crowded) == pytest.approx(  # one core
        {"crowded_share": 0.2, "turn_seconds": 0.0})
    assert _core_sharing_slowdown(crowded, alone) == {"crowded_share": 1.0, "turn_seconds": 0.0}


@pytest.mark.slow
def test_ranks_without_a_partner_compute_alone():
    for count in (1, 3):
        found = run_processes("ranvier.planner.measure:crowd_on_rank", count, "torch", args=[2])
        assert all(one["blocks"] > 0 and (one["collective"] is None) == (count == 1) for one in found)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_this_machine(tmp_path, capsys):
    assert run_command(["doctor", "--measure", "--out", str(tmp_path / "here.toml")]) in (0, 2)
    found = load_cluster(str(tmp_path / "here.toml"))
    assert found.num_devices >= 1 and set(found.device.rates) >= {"fp32"}
    assert 1e8 < found.device.rates["fp32"].peak_flops < 1e16 and 1e7 < found.inside.rate() < 1e13
    assert f"ranvier plan RECIPE --cluster {tmp_path / 'here.toml'}" in capsys.readouterr().out
