"""Any numbers in a cluster file or from measurements give either a named error or a finite answer."""

import copy
import math
import tomllib
from dataclasses import fields
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Memory, Optim, TensorParallel, Transformer
from ranvier.cost.cluster_files import cluster_names, cluster_of
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.planner import measure
from ranvier.planner.candidates import predict
from ranvier.planner.work import Work
from tests.covering import examples
from tests.errors import raises

TREES = {name: tomllib.loads((resources.files("ranvier") / "cost" / "clusters" / f"{name}.toml").read_text())
         for name in cluster_names()}
MODEL = Transformer(num_layers=4, hidden=64, heads=4, vocab=300, sequence=64)
RUNS = [ResolvedRun(model=MODEL, batch=Batch(global_size=16, microbatch_size=2), precision="fp32", **changes)
        for changes in (
    {"mesh": Mesh(data=2, pipe=2)}, {"mesh": Mesh(pipe=2, row=2, col=2), "memory": Memory(recompute=1)},
    {"mesh": Mesh(row=2, col=2), "tensor": TensorParallel(scheme="summa"), "optim": Optim(offload="stream")},
    {"mesh": Mesh(data=2, col=2), "tensor": TensorParallel(scheme="megatron"),
     "optim": Optim(offload="host", shard=True)})]
ODD = st.sampled_from([5e-324, 1e-300, 1e-30, 1e-6, 0.5, 1, 1.0, 1e3, 1e24, 1e30, 1e300, 1.7e308, math.inf, -math.inf,
                       math.nan, 0, 0.0, -0.0, -1, 10**18, 2**63, 10**40, True, "1e-300", None])
WORK = Work()


def numbers(tree, path=()):
    """The places of all numbers in a file, and of those that it may also have."""
    found = [(*path, name) for name, value in tree.items() if isinstance(value, (int, float))]
    for name, value in tree.items():
        found += numbers(value, (*path, name)) if isinstance(value, dict) else []
    more = {("device",): ("update_bandwidth", "reserved_bytes", "cores", "crowded_share", "turn_seconds"),
            ("inside",): ("single", "share"), ("between",): ("single",), (): ("chunk_seconds", "collective_seconds")}
    return found + [(*path, name) for name in more.get(path, ()) if name not in tree]


@examples(32)
@given(st.data())
def test_any_numbers(data):
    name = data.draw(st.sampled_from(["laptop", "h100", "summit"]))
    tree, run = copy.deepcopy(TREES[name]), data.draw(st.sampled_from(RUNS))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(numbers(TREES[name])))
        place = tree
        for part in path:
            place = place[part]
        place[last] = data.draw(ODD)
    try:
        cost = predict(run, cluster_of(tree, "file x"), WORK, exact=data.draw(st.booleans())).cost
    except RanvierError:
        return
    figures = [getattr(cost, field.name) for field in fields(cost) if field.name not in ("stages", "link_bytes")]
    figures += [getattr(stage, field.name) for stage in cost.stages for field in fields(stage)]
    figures += [*cost.link_bytes.values(), cost.tokens_per_second, cost.model_utilisation, cost.hardware_utilisation,
                cost.days()]
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures) and cost.seconds > 0


@pytest.mark.parametrize(("place", "value", "error"), [
    (("device", "rates", "fp32", "peak_flops"), 1e-300, ("cluster-malformed", 1)),
    (("inside", "share"), 1e-300, ("cluster-malformed",)),
    (("between", "bandwidth"), 1e300, ("cluster-malformed",)),
    (("inside", "latency_seconds"), 1e300, ("cluster-malformed",)),
    (("device", "cores"), 5e-324, ("cluster-malformed",)),
    (("nodes",), 10**40, ("cluster-malformed",))])
def test_what_no_machine_has_is_named(place, value, error):
    tree = copy.deepcopy(TREES["laptop"])
    *path, last = place
    inside = tree
    for part in path:
        inside = inside[part]
    inside[last] = value
    with raises(*error):
        cluster_of(tree, "file x")


@examples(24)
@given(st.lists(st.sampled_from([0.0, 1e-300, 1e-12, 1e-3, 1.0, 1e9, math.inf, math.nan]), min_size=9, max_size=9),
       st.booleans())
def test_any_measured_numbers(values, crowded):
    """Clocks that stand still and machines that hang give either a cluster or a named error."""
    def times(*numbers):
        return [max(number, measure.CLOCK_SECONDS) for number in numbers]

    seconds = times(*values[:3])
    samples = [([(1e9, 1e7)] * 10, seconds[0]), ([(1e8, 1e8)] * 20, seconds[1]), ([(0.0, 1e6)] * 90, seconds[2])]
    compute = {"precisions": {"fp32": {"samples": samples, "product_flops": 1e9 / seconds[0]}},
               "update_bandwidth": 1e9 / times(values[3])[0], "host_link": 1e9 / times(values[4])[0],
               "host_bandwidth": 1e9}
    if crowded:
        compute |= {"crowded_share": values[5], "turn_seconds": values[6]}
    links = {"messages": dict(zip(map(str, measure._MESSAGES), times(*values[5:]), strict=True)),
             "collective": values[8]}
    try:
        cluster = measure.make_cluster(compute, links, 2, "cpu")
    except RanvierError as error:
        assert error.code in ("measurement-not-a-cluster", "cluster-malformed"), error
        return
    assert math.isfinite(predict(RUNS[0], cluster, WORK, exact=False).cost.seconds)
