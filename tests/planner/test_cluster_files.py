"""Cluster files: the shipped ones, what is written is read again, and every fault has a name."""

import copy
import tomllib
from importlib import resources

import pytest

from ranvier.cost.cluster_files import cluster_names, cluster_of, load_cluster, write_cluster
from ranvier.errors import ConfigError

LAPTOP = tomllib.loads((resources.files("ranvier") / "cost" / "clusters" / "laptop.toml").read_text())


def test_shipped_clusters():
    assert cluster_names() == ["a100", "frontera", "h100", "h200", "laptop", "summit"]
    for name in cluster_names():
        found = load_cluster(name)
        assert found.num_devices >= 1 and found.source
    summit, h200 = load_cluster("summit"), load_cluster("h200")
    assert summit.devices_per_node == 6 and summit.device.rates["fp16"].peak_flops == 125e12
    assert summit.inside.bandwidth == 50e9 and summit.between.bandwidth == 12.5e9
    assert h200.host.memory_bytes == 128 << 30 and h200.num_devices == 1


@pytest.mark.parametrize("name", ["summit", "laptop", "frontera"])
def test_what_is_written_is_read_again(name, tmp_path):
    write_cluster(load_cluster(name), tmp_path / "mine.toml")
    assert load_cluster(str(tmp_path / "mine.toml")) == load_cluster(name)


def changed(**changes):
    """The laptop's file with other values, by dotted name; None removes one."""
    tree = copy.deepcopy(LAPTOP)
    for name, value in changes.items():
        *path, last = name.split("__")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        if value is None:
            del place[last]
        else:
            place[last] = value
    return tree


@pytest.mark.parametrize(("changes", "text"), [
    ({"nodes": None},
     r"cluster's nodes: is missing, in file x\. Compare with a shipped one, for example .*laptop.toml"),
    ({"device__memory_bytes": None}, "cluster's device.memory_bytes: is missing"),
    ({"device__colour": 1}, r"cluster's device.colour: is not a setting of a cluster, in file x \(got 1\)"),
    ({"nodes": 0}, r"cluster's nodes: should be greater than or equal to 1, in file x \(got 0\)"),
    ({"nodes": "many"}, "cluster's nodes: should be a valid integer"),
    ({"devices_per_node": True}, r"cluster's devices_per_node: should be a number, in file x \(got True\)"),
    ({"device__reserved_bytes": 17_179_869_184},
     r"cluster's device.reserved_bytes: leaves nothing of the device's 17,179,869,184 bytes, in file x"),
    ({"device__cores": False}, "cluster's device.cores: should be a number"),
    ({"inside__share": 1.5}, "cluster's inside.share: should be less than or equal to 1"),
    ({"inside__bandwidth": float("inf")}, "cluster's inside.bandwidth: must be a finite number"),
    ({"between__latency_seconds": -1.0}, "cluster's between.latency_seconds: should be greater than or equal to 0"),
    ({"device__rates__fp12": {"peak_flops": 1.0}}, "cluster's device.rates.fp12"),
    ({"device__rates__fp32": {"share": 0.5}}, "cluster's device.rates.fp32.peak_flops: is missing"),
    ({"nodes": None, "name": None, "host": None}, r"is missing, in file x \(2 more faults\)"),
], ids=str)
def test_faults(changes, text):
    with pytest.raises(ConfigError, match=text):
        cluster_of(changed(**changes), "file x")


def test_a_device_that_computes_nothing():
    tree = changed()
    tree["device"]["rates"] = {}
    with pytest.raises(ConfigError, match=r"cluster's device.rates: is empty, in file x\. Give at least one"):
        cluster_of(tree, "file x")


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"is neither a shipped cluster nor a \.toml file .*Did you mean summit\?"):
        load_cluster("sumit")
    with pytest.raises(ConfigError, match=r"Shipped are: a100, .*doctor --measure"):
        load_cluster("qqqqqq")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_cluster(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="cannot be read: is not a regular file"):
        load_cluster(_pipe(tmp_path))
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_cluster(str(tmp_path / "bad.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: is not a regular file"):
        load_cluster(str(tmp_path / "folder.toml"))


def _pipe(folder):
    import os

    os.mkfifo(folder / "pipe.toml")
    return str(folder / "pipe.toml")
