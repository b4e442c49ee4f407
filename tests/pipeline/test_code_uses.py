"""Names that functions read and write, by their syntax trees."""

import pytest
import torch

from ranvier.plan.code_uses import is_key, uses_of, with_values

context = log = table = other = None


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


def test_two_lambdas_on_one_line_are_told_apart():
    first, second = lambda: context.kept, lambda: table.other
    assert uses(first).others == {"context", "kept"} and uses(second).others == {"table", "other"}


def test_without_source_every_name_is_read_and_comes_of_an_old_value():
    names = {}
    exec("def changed(self):\n    context.kept = self.other", names)
    found = uses(names["changed"])
    assert found.others & found.accumulates >= {"context", "kept", "other"} and found.stores == {"kept"}


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


def goes_back(self, x, number):
    context.mean = 0.9 * context.mean + 0.1 * x.mean()
    context.var = context.var.mul(0.9) + torch.where(x > 0, x, 1 - x)
    context.count = number + context.count
    table[number] = table.get(number, 0) + 1
    context.sums.mul_(0.9).add_(x)
    context.calls = getattr(context, "calls", 0) + 1
    return x


def goes_elsewhere(self, x, number):
    context.most = max(context.most, float(x.max()))
    context.mean = most = 0.9 * context.mean
    context.var = max(context.var, other(context.count))
    if number > context.longest:
        context.longest = number
        return most
    torch.add(context.sums, 1, out=x)
    context.total = context.rest + 1
    return x


def test_values_that_only_go_back_are_not_read():
    names = {"mean", "var", "count", "sums", "calls", "table"}
    found = uses(goes_back)
    assert found.others.isdisjoint(names) and found.stores >= names
    assert found.accumulates >= names
    assert uses(goes_elsewhere).others >= {"mean", "count", "longest", "sums", "rest", "most"}
    assert uses(goes_elsewhere).accumulates >= {"most", "longest"}


def grows(self, x):
    if self.table is None or len(x) > self.longest:
        self.longest = max(len(x), self.longest)
        self.table = x
    return self.table


def replaces(self, x):
    old = context.kept * table[self.number]
    context.kept = table[self.number] = 3
    return old


def uses_and_may_replace(self, x):
    y = x * context.kept
    if len(x) > 2:
        context.kept = 3
    return y


def test_an_old_value_is_read_where_a_new_one_always_follows():
    assert uses(grows).accumulates.isdisjoint({"longest", "table"}) and uses(grows).own >= {"longest", "table"}
    assert uses(replaces).accumulates >= {"kept", "table"} and "kept" in uses(uses_and_may_replace).accumulates
    assert uses(keeps_its_own).accumulates.isdisjoint({"kept"})


def marks(self, x, number):
    if context.kept != number:
        context.kept = number
        x = x * 2
    return x


def marks_and_returns(self, x, number):
    if context.kept == number:
        return x
    context.kept = number
    return x * 2


def marks_in_an_inner_branch(self, x, number):
    if getattr(context, "kept", 0) != number:
        if self.first:
            setattr(context, "kept", number)  # noqa: B010
        self.scale = 2
    return x * self.scale


def marks_beside_another_value(self, x, number):
    context.scale = 1
    if context.kept != number:
        context.kept, context.scale = number, 2
    return x * context.scale


def changes_its_own_list(self, x, number):
    scales = [1]
    if context.kept != number:
        context.kept = number
        scales.append(2)
    return x * sum(scales)


def keeps_an_old_one(self, x, number):
    kept = context.kept
    if kept is None:
        context.kept = number
    return x if kept else x * 2


def marks_in_one_of_two_arms(self, x, number):
    if not context.kept:
        new = x
        context.kept = True
    else:
        new = context.other
    return new


def adds_a_mark(self, x, number):
    if number not in context.kept:
        context.kept.add(number)
        x = x * 2
    return x


@pytest.mark.parametrize("function", [
    marks, marks_and_returns, marks_in_an_inner_branch, marks_beside_another_value, changes_its_own_list,
    keeps_an_old_one, marks_in_one_of_two_arms, adds_a_mark])
def test_who_goes_on_in_another_way_on_a_first_visit_needs_what_was_there(function):
    assert "kept" in uses(function).accumulates


def finds_or_makes(self, x, number):
    kept = getattr(context, "kept", None)
    if kept is None or len(kept) < number:
        scales = [1, 2]
        for scale in scales:
            kept = x * scale
        context.kept = kept
    for scale in range(number):
        x = x + kept * scale
    return x


def finds_or_returns(self, x, number):
    if context.kept is not None:
        return context.kept
    new = x * number
    context.kept = new
    return new


def finds_two_or_makes_them(self, x, number):
    if context.number != number:
        cos, sin = x.cos(), x.sin()
        context.number, context.kept, context.other = number, cos, sin
    else:
        cos, sin = context.kept, context.other
    return cos + sin


def finds_an_element(self, x, number):
    try:
        new = table[number]
    except KeyError:
        new = table[number] = x * 2
    return new


@pytest.mark.parametrize("function", [finds_or_makes, finds_or_returns, finds_two_or_makes_them, finds_an_element])
def test_who_makes_what_is_missing_does_not(function):
    assert uses(function).accumulates.isdisjoint({"kept", "number", "other", "table"})


def test_what_is_only_called():
    found = uses(lambda x: (x.mean(), x.scale, x.max().item(), x.max))
    assert found.called >= {"mean", "item", "max"} and found.others >= {"scale", "max"} and "mean" not in found.others


def by_keys(self, x, number):
    name = f"{self.path}.{number}"
    if self.number not in table:
        table[self.number] = 1
    cos = table.get((self.number, x.shape[0], "cos"), table[number])
    log[name] = table[name] + table["scale"] * cos
    return log[name]


def test_keys_of_elements():
    own = ("own", "number")
    found = uses(by_keys)
    assert {one.key for one in found.elements if one.name == "table"} == {
        own, ("tuple", (own, ("any",), ("is", "cos"))), ("any",), ("text", (("own", "path"), ("is", "."), ("any",))),
        ("is", "scale")}
    assert not found.whole & {"table", "log"} and "log" not in found.others
    assert uses(lambda self: [one for one in table]).whole >= {"table"}


@pytest.mark.parametrize(("key", "value", "is_one"), [
    (("is", 3), 3, True), (("is", 3), 4, False), (("is", "a"), "a", True), (("any",), object(), True),
    (("tuple", (("is", 3), ("any",))), (3, "x"), True), (("tuple", (("is", 3), ("any",))), (4, "x"), False),
    (("tuple", (("is", 3),)), 3, False), (("text", (("is", "a"), ("any",))), "b", True), (("text", ()), 3, False)])
def test_which_values_a_key_may_have(key, value, is_one):
    assert is_key(value, key) == is_one


def test_keys_with_an_objects_attributes():
    key = ("tuple", (("own", "number"), ("text", (("own", "name"), ("is", ".a")))))
    assert with_values(key, {"number": 3, "name": "b"}) == ("tuple", (("is", 3), ("is", "b.a")))
    assert with_values(key, {"number": 3}) == ("tuple", (("is", 3), ("text", (("any",), ("is", ".a")))))
