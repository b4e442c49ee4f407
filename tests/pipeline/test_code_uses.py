"""Names that functions read and write, by their bytecode."""

import pytest

from ranvier.plan.code_uses import uses_of

context = log = table = None


def uses(function):
    return uses_of(function.__code__, "self")


def reads_first(self, x):
    context.kept = x
    return x * context.kept


def reads_in_one_branch(self, x):
    if self.first:
        context.kept = x
    return x * context.kept


def reads_by_name(self, x):
    setattr(context, "kept", x.mean().item())  # noqa: B010
    return getattr(context, "kept", 1.0)


def counts(self, x):
    context.kept += 1
    context.kept = context.kept + len(x)
    return x


def counts_and_reads(self, x):
    context.kept += 1
    return x * context.kept


def keeps_its_own(self, x):
    if self.kept is None:
        self.kept = x
    return self.kept


def computes_the_name(self, x):
    return getattr(context, "ke" + x)


@pytest.mark.parametrize(("function", "own", "others", "stores", "accumulates"), [
    (reads_first, False, False, True, False), (reads_in_one_branch, False, True, True, False),
    (reads_by_name, False, True, True, False), (counts, False, False, True, True),
    (counts_and_reads, False, True, True, True), (keeps_its_own, True, False, True, False)])
def test_an_attribute(function, own, others, stores, accumulates):
    found = uses(function)
    assert ("kept" in found.own, "kept" in found.others, "kept" in found.stores, "kept" in found.accumulates) == (
        own, others, stores, accumulates)
    assert not found.reads_any and not found.stores_any


def test_a_computed_name_is_any():
    assert uses(computes_the_name).reads_any


def only_adds(x, number):
    log.append(float(x.mean()))
    table[number] = x
    table[f"of {number}"].append(x.mean())
    table[number] += 1
    del table[0]
    table.setdefault(number, []).append(x)


def looks_too(x, number):
    return log.pop(), table.setdefault(number, [x])


def test_a_container_of_which_nothing_is_read():
    assert uses(only_adds).others.isdisjoint({"log", "table"}) and uses(only_adds).stores >= {"log", "table"}
    assert uses(looks_too).others >= {"log", "table"}
