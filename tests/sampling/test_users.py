"""Author-level privacy: a person with several texts is one row, whose contribution is bounded as a whole."""

from functools import partial

import pytest
import torch
from cases import flat
from hypothesis import assume, given
from hypothesis import strategies as st
from models import LENGTH, VOCAB, TinyTransformer, next_token, tiny_bert, tiny_gpt2
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping
from dpfunc.batches import take
from dpfunc.clipped import clipped_grad
from dpfunc.engines import auto, ghost, loop, vmap
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling import mean_over_views
from dpfunc.sampling.users import group_by_person, mean_over_texts

KEY = insecure_key(7)
ENGINES = {"vmap": vmap, "ghost": ghost, "auto": auto}
tables = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30)
caps = st.integers(1, 4)


def classify(forward, params, batch):
    return F.cross_entropy(forward(params, batch["ids"]).logits, batch["labels"], reduction="none")


def classify_tokens(forward, params, batch):
    return F.cross_entropy(forward(params, batch["ids"]).mean(1), batch["labels"], reduction="none")


def language(forward, params, batch):
    return next_token(forward, lambda out: out.logits)(params, batch)


MODELS = {"BERT": (tiny_bert, classify), "GPT-2": (tiny_gpt2, language), "torch": (TinyTransformer, classify_tokens)}


def linear(forward, params, batch):
    return forward(params, batch["x"])


def inner(params, x):
    return (params["w"] * x).sum(1)


def texts_of(table, persons):
    """Person -> the row numbers that are kept."""
    result = {}
    for index_K, mask_K in zip(persons.index_PK, persons.mask_PK, strict=True):
        own = index_K[mask_K].tolist()
        result[table[own[0]]] = own
        assert {table[row] for row in own} == {table[own[0]]}
        assert len(own) == len(set(own))
    return result


def build(name):
    """A transformer in float64 and persons with 1, 2, 3 and 5 texts, of which 3 are kept."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        forward, params = dpfunc.functionalize(MODELS[name][0]().eval().double())
        texts = {"ids": torch.randint(VOCAB, (11, LENGTH)), "labels": torch.randint(3, (11,))}
    return forward, params, group_by_person(list("abbcccddddd"), max_texts=3, key=KEY), texts


AGREE = [*((engine, "BERT") for engine in ENGINES), ("auto", "GPT-2"), ("auto", "torch"), ("vmap", "torch")]


@pytest.mark.parametrize(("engine", "name"), AGREE)
def test_engines_agree_on_persons(engine, name):
    forward, params, persons, texts = build(name)
    loss_fn = partial(mean_over_texts(MODELS[name][1]), forward)
    batch = persons.batch(texts)
    options = {"clip": clipping.Flat(0.5), "microbatch_size": 3}
    expected, one_by_one = clipped_grad(loss_fn, params, batch, engine=loop(), **options)
    used = ENGINES[engine]()
    got, unreleased = clipped_grad(loss_fn, params, batch, engine=used, **options)
    assert engine != "auto" or used.decision(loss_fn).engine == "one pass"
    assert unreleased.losses_B.shape == (4,)
    torch.testing.assert_close(unreleased.norms_BG, one_by_one.norms_BG, rtol=1e-6, atol=1e-9)
    for param in params:
        assert torch.allclose(got.sums[param], expected.sums[param], atol=1e-9), param


@given(table=tables, cap=caps, seed=st.integers(0, 99))
def test_removing_a_person_removes_one_row(table, cap, seed):
    """All texts of the others stay, and which of them are kept stays."""
    gone = table[0]
    assume(set(table) != {gone})
    key = insecure_key(seed)
    with_all, others = group_by_person(table, max_texts=cap, key=key), [p for p in table if p != gone]
    without = group_by_person(others, max_texts=cap, key=key)
    assert len(with_all) == len(without) + 1 == len(set(table))
    before, after = texts_of(table, with_all), texts_of(others, without)
    renumbered = [row for row, person in enumerate(table) if person != gone]
    assert {p: [renumbered[row] for row in rows] for p, rows in after.items()} == {
        p: rows for p, rows in before.items() if p != gone
    }


@given(table=tables, cap=caps)
def test_the_cap_holds_and_every_person_has_a_text(table, cap):
    persons = group_by_person(table, max_texts=cap, key=KEY)
    kept = texts_of(table, persons)
    assert {p: len(rows) for p, rows in kept.items()} == {p: min(cap, table.count(p)) for p in table}
    assert persons.index_PK.shape == persons.mask_PK.shape == (len(set(table)), cap)
    # free places repeat the own first text, so that a model never sees a text without a token
    assert torch.equal(
        torch.where(persons.mask_PK, persons.index_PK[:, :1], persons.index_PK), persons.index_PK[:, :1].expand(-1, cap)
    )
    assert persons.dropped == len(table) - sum(len(rows) for rows in kept.values())
    assert persons.max_texts == cap


def test_kept_texts_are_drawn_by_the_key_and_not_by_order():
    counts = torch.zeros(10)
    for seed in range(300):
        counts[group_by_person(["a"] * 10, max_texts=3, key=insecure_key(seed)).index_PK[0]] += 1
    assert counts.sum() == 900
    assert (counts > 50).all()  # 90 each on average, with a standard deviation of 8
    assert (counts < 130).all()
    again = [group_by_person(["a"] * 10, max_texts=3, key=KEY).index_PK for _ in range(2)]
    assert torch.equal(*again)
    both = group_by_person(["a", "b"] * 40, max_texts=8, key=KEY)  # equally many texts, drawn apart
    a, b = ({row // 2 for row in rows} for rows in texts_of("ab" * 40, both).values())
    assert a != b


@given(seed=st.integers(0, 2**31), sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5), power=st.integers(-6, 9))
def test_a_person_has_bounded_sensitivity(seed, sizes, power):
    """However many texts, however large: with and without the person the clipped sum differs by at most C."""
    table = [f"p{number}" for number, size in enumerate(sizes) for _ in range(size)]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(table), 5, generator=generator)
    x[: sizes[0]] *= 10.0**power
    params, loss_fn = {"w": torch.zeros(5)}, partial(mean_over_texts(linear), inner)

    def clipped(start):
        persons = group_by_person(table[start:], max_texts=4, key=KEY)
        return clipped_grad(loss_fn, params, persons.batch({"x": x[start:]}), clipping.Flat(0.7), engine=auto())

    full, without = clipped(0)[0], clipped(sizes[0])[0]
    assert (flat(full.sums) - flat(without.sums)).norm() <= full.sensitivity
    assert full.sensitivity == pytest.approx(0.7)


def test_batches_are_rows_of_the_whole():
    """Some persons, or nobody, whose clipped sum is zero."""
    forward, params, persons, texts = build("BERT")
    whole = persons.batch(texts)
    for chosen in (torch.tensor([3, 1]), torch.zeros(0, dtype=torch.int64)):
        some = persons.batch(texts, chosen)
        assert all(torch.equal(some[name], take(whole, chosen)[name]) for name in whole)
    clipped, _ = clipped_grad(partial(mean_over_texts(classify), forward), params, some, clipping.Flat(1.0))
    assert all(not value.any() for value in clipped.sums.values())
    assert len(group_by_person([], max_texts=2, key=KEY).batch({"x": torch.zeros(0)})["text_mask"]) == 0


def records_loss(params, batch):
    x, y = batch if isinstance(batch, tuple) else (batch, torch.ones(len(batch), dtype=torch.int64))
    return F.cross_entropy(torch.tanh(x @ params["v"]) @ params["w"], y, reduction="none")


WEIGHTS = {"v": torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), "w": torch.eye(5)[:, :3].clone()}


@pytest.mark.parametrize("engine", [auto, vmap, ghost])
@pytest.mark.parametrize("kind", ["tuple", "tensor"])
def test_persons_of_tuples_and_tensors(kind, engine):
    """The gradient of a person is the mean over the own rows, taken one after the other, clipped as a whole if it is long."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(11, 4, generator=generator), torch.randint(3, (11,), generator=generator)
    persons = group_by_person(list("abbcccddddd"), max_texts=3, key=KEY)
    batch = persons.batch((x, y) if kind == "tuple" else x, torch.tensor([3, 0, 2]))
    assert batch[1].tolist() == persons.mask_PK[[3, 0, 2]].tolist()
    total = {name: torch.zeros_like(p) for name, p in WEIGHTS.items()}
    for rows in (persons.rows()[person] for person in (3, 0, 2)):
        own = (x[rows], y[rows]) if kind == "tuple" else x[rows]
        grads = torch.func.grad(lambda params, own=own: records_loss(params, own).mean())(WEIGHTS)
        norm = torch.sqrt(sum(g.square().sum() for g in grads.values()))
        total = {name: value + grads[name] * min(1.0, 1.2 / float(norm)) for name, value in total.items()}
    got, _ = clipped_grad(mean_over_texts(records_loss), WEIGHTS, batch, clipping.Flat(1.2), engine=engine())
    for name, expected in total.items():
        torch.testing.assert_close(got.sums[name], expected, rtol=5e-4, atol=1e-4)


ONE = group_by_person(["a"], max_texts=1, key=KEY)


def test_what_is_printed_of_persons_says_nothing_of_them():
    assert repr(group_by_person(["a", "a", "b"], max_texts=1, key=KEY)) == "Persons()"


BAD = {
    "no cap": (lambda: group_by_person(["a"], max_texts=0, key=KEY), "an integer max_texts >= 1"),
    "no key": (lambda: group_by_person(["a"], max_texts=1, key=0), "key to be a dpfunc Key"),
    "one string": (lambda: group_by_person("ab", max_texts=1, key=KEY), "one person a row, got persons of type str"),
    "a mapping": (lambda: group_by_person({0: "a", 1: "a"}, max_texts=1, key=KEY), "one person a row"),
    "a set": (lambda: group_by_person({"a", "b"}, max_texts=1, key=KEY), "one person a row"),
    "a number and its text": (lambda: group_by_person([7, "7"], max_texts=1, key=KEY), "one spelling, got two"),
    "signs that do not show": (lambda: group_by_person(["a", "a\u200b"], max_texts=1, key=KEY), "one spelling"),
    "nobody": (lambda: group_by_person(["a", None], max_texts=1, key=KEY), "None in row 1"),
    "NaN": (lambda: group_by_person(["a", float("nan")], max_texts=1, key=KEY), "nan in row 1"),
    "too few texts": (
        lambda: group_by_person(["a", "b"], max_texts=1, key=KEY).batch({"x": torch.zeros(1)}),
        "a row for each text of the table, got some with fewer",
    ),
    "no tensors": (lambda: ONE.batch(["text"]), "to be a tensor, got .* of type str"),
    "no axis": (lambda: ONE.batch({"x": torch.tensor(1.0)}), r"axis 0 of batch\['x'\]"),
    "no pair": (lambda: mean_over_texts(records_loss)({}, torch.zeros(1, 1)), "a batch of Persons.batch"),
    "name taken": (lambda: ONE.batch({"text_mask": torch.zeros(1)}), "other names than 'text_mask'"),
    "no mask": (lambda: mean_over_texts(linear)(inner, {}, {"x": torch.zeros(1, 1)}), "a batch of Persons.batch"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_persons(name):
    call, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.parametrize("mean_over", [mean_over_texts, mean_over_views])
def test_a_loss_of_several_rows_a_record_is_a_value(mean_over):
    assert mean_over(classify) == mean_over(classify)


def test_aux_of_a_person_is_the_mean_over_the_texts():
    loss = mean_over_texts(
        lambda params, batch: (
            params["w"] * batch["x"],
            {"right": batch["x"] > 2, "two": batch["x"][:, None].repeat(1, 2)},
        )
    )
    people = group_by_person(["ann", "bob", "ann"], max_texts=2, key=insecure_key(0))
    losses, aux = loss({"w": torch.tensor(2.0)}, people.batch({"x": torch.tensor([1.0, 5.0, 3.0])}))
    assert losses.tolist() == [4.0, 10.0]
    assert aux["right"].tolist() == [0.5, 1.0]
    assert aux["two"].tolist() == [[2.0, 2.0], [5.0, 5.0]]
