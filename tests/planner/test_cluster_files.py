"""Cluster files: the shipped ones, files that are written and read again, and a named error for every fault."""

import copy
import tomllib
from importlib import resources

import pytest
import tomli_w

from ranvier.cost.cluster_files import cluster_names, cluster_of, load_cluster, write_cluster
from tests.errors import raises

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


@pytest.mark.parametrize(("changes", "error"), [
    ({"nodes": None},
     ("cluster-malformed",)),
    ({"device__memory_bytes": None}, ("cluster-malformed",)),
    ({"device__colour": 1}, ("cluster-malformed", 1)),
    ({"nodes": 0}, ("cluster-malformed", 1, 0)),
    ({"nodes": "many"}, ("cluster-malformed",)),
    ({"devices_per_node": True}, ("cluster-malformed",)),
    ({"device__reserved_bytes": 17_179_869_184},
     ("cluster-without-memory", "17,179,869,184")),
    ({"device__cores": False}, ("cluster-malformed",)),
    ({"inside__share": 1.5}, ("cluster-malformed", 1)),
    ({"inside__bandwidth": float("inf")}, ("cluster-malformed",)),
    ({"between__latency_seconds": -1.0}, ("cluster-malformed", 0)),
    ({"device__rates__fp12": {"peak_flops": 1.0}}, ("cluster-malformed",)),
    ({"device__rates__fp32": {"share": 0.5}}, ("cluster-malformed",)),
    ({"nodes": None, "name": None, "host": None}, ("cluster-malformed", "nodes is missing", "host is missing")),
], ids=str)
def test_faults(changes, error):
    with raises(*error):
        cluster_of(changed(**changes), "file x")


@pytest.mark.parametrize(("name", "value"), [
    ("device__memory_bytes", 80), ("device__rates__fp32__peak_flops", 989), ("between__bandwidth", 400),
    ("between__latency_seconds", 6), ("device__watts", 0.7)])
def test_a_users_file_in_other_units(tmp_path, name, value):
    (tmp_path / "x.toml").write_text(tomli_w.dumps(changed(**{name: value})))
    with raises("cluster-unit", f"{name.replace('__', '.')}", value=value):
        load_cluster(str(tmp_path / "x.toml"))


def test_a_device_that_computes_nothing():
    tree = changed()
    tree["device"]["rates"] = {}
    with raises("cluster-without-rates", "device.rates"):
        cluster_of(tree, "file x")


def test_files_that_are_none(tmp_path):
    for name, near in (("sumit", "Did you mean summit"), ("A100", "Did you mean a100"), ("qqqqqq", "")):
        with raises("unknown-cluster", "Shipped are: a100", near):
            load_cluster(name)
    with raises("cluster-unreadable"):
        load_cluster(str(tmp_path / "none.toml"))
    with raises("cluster-unreadable"):
        load_cluster(_pipe(tmp_path))
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with raises("cluster-not-toml"):
        load_cluster(str(tmp_path / "bad.toml"))
    (tmp_path / "folder.toml").mkdir()
    with raises("cluster-unreadable"):
        load_cluster(str(tmp_path / "folder.toml"))


def _pipe(folder):
    import os

    os.mkfifo(folder / "pipe.toml")
    return str(folder / "pipe.toml")
