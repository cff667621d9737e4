"""The benchmark of published figures: costs of its settings, each row's code on tiny data, and the tables of its page."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest
import torch
from click.testing import CliRunner
from tiny_models import word_tokenizer

from benchmarks.published import __main__ as benchmark
from benchmarks.published import images, texts
from benchmarks.published.images import NETS, Images
from benchmarks.published.rows import ROWS, Setting, epsilon_of, noise_of
from benchmarks.results import filled, rows_of
from dpfunc.accounting import Ledger
from dpfunc.types import Event

RESULTS = {each["row"]: each for each in rows_of(benchmark.RESULT)}
TINY = Setting(40, 20, 2, 1.0, 0.1, 1.0, delta=1e-3)
EXACT = Setting(40, 40, 3, 0.5, 0.5, 1e-9, delta=1e-3)  # all records in each step, hardly any noise


@pytest.mark.parametrize(
    ("name", "epsilon"),
    [
        ("mnist-6.86", 5.431),
        ("mnist-2.91", 2.295),
        ("mnist-1.16", 0.834),
        ("cifar-wrn", 0.90277),
        ("fashion-linear", 2.3746),
        ("fashion-cnn", 2.3761),
    ],
)
def test_published_settings_cost(name, epsilon):
    assert epsilon_of(ROWS[name].setting) == pytest.approx(epsilon, abs=10.0 ** -(len(f"{epsilon}") - 2))


def test_the_noise_is_that_of_the_accountant_of_the_source():
    """By Renyi where they have it, so that the tight accountant says less; and all of a budget that is ours."""
    old, ours = ROWS["sst2-lora-8"].setting, ROWS["fashion-linear-spent"].setting
    assert old.ledger(noise_of(old)).epsilon(old.delta, "rdp").epsilon == pytest.approx(8.0, rel=1e-3)
    assert epsilon_of(old) < 7.0
    assert ours.ledger(noise_of(ours)).epsilon(1e-5).epsilon == pytest.approx(3.0, rel=1e-3)
    assert noise_of(ours) < noise_of(ROWS["fashion-linear"].setting)


def test_every_row_has_what_it_needs():
    for name, row in ROWS.items():
        assert name == row.name
        assert {"images": NETS, "texts": texts.KITS, "accounting": {"": None}}[row.kind].keys() >= {row.model}
        assert row.link.startswith("https://") or row.source == "dp-lora 0.1.0"  # a package without a page
        behind = benchmark.compared(row, [each["ours"] for each in RESULTS[name].get("runs", [])]) == "behind"
        assert row.why or not (behind or row.kind != "images"), f"{name} says why"


def drawn(model, n=40):
    """Made-up images of two classes, one with bars."""
    source = torch.Generator().manual_seed(1)
    pixels, y = 0.1 * torch.rand(n, 28, 28, generator=source), torch.arange(n) % 2
    pixels[y == 1, 10:14] += 0.8
    x = images.scattered(pixels) if model.startswith("scatter") else pixels[:, None]
    return Images(x, y, x, y)


@pytest.mark.parametrize("model", NETS)
def test_networks_are_trained(model):
    """Two noisy steps change all weights, and the network of the row goes in as it is."""
    data, net = drawn(model), images.new_net(model, 0)
    trained = images.train(net, data, TINY, seed=0)
    assert all((p != q).any() for p, q in zip(net.parameters(), trained.parameters(), strict=True))
    again = images.train(images.new_net(model, 0), data, TINY, seed=0)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), trained.parameters(), strict=True))
    assert 0 <= images.accuracy(trained, data) <= 1


def test_the_networks_have_the_published_sizes():
    sizes = {name: sum(p.numel() for p in NETS[name]().parameters()) for name in NETS}
    assert sizes["pixel-cnn"] == sizes["digit-cnn"] == 26_010
    assert sizes["scatter-linear"] == 81 * 49 * 10 + 10
    assert [f"{NETS['pixel-cnn']()(torch.zeros(2, 1, 28, 28)).shape}"] == ["torch.Size([2, 10])"]


def test_a_linear_layer_learns():
    data = drawn("scatter-linear")
    trained = images.train(images.new_net("scatter-linear", 0), data, replace(EXACT, steps=20), seed=0)
    assert images.accuracy(trained, data) == 1.0


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # hooks of Opacus on first layers
def test_both_libraries_compute_the_same():
    """With all records in each step and no noise to speak of, momentum included."""
    data, setting = drawn("digit-cnn"), replace(EXACT, momentum=0.9)
    ours = images.train(images.new_net("digit-cnn", 0), data, setting, seed=0)
    theirs = images.train_by_opacus(images.new_net("digit-cnn", 0), data, setting, seed=0)
    start = images.new_net("digit-cnn", 0)
    with torch.no_grad():
        found, other, before = (net(data.x) for net in (ours, theirs, start))
    torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-3)
    assert (found - before).abs().max() > 0.05


def test_scattered_images_are_normalised_alone():
    pixels = torch.rand(3, 28, 28, generator=torch.Generator().manual_seed(2))
    found = images.scattered(pixels)
    assert found.shape == (3, 81, 7, 7)
    assert torch.equal(found[1:2], images.scattered(pixels[1:2]))
    groups = found.float().reshape(3, 27, -1)
    assert groups.mean(2).abs().max() < 1e-2
    assert groups.var(2).max() < 1.1


WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "Sentence",
    ":",
    "Label",
    "->",
    "negative",
    "positive",
    "good",
    "bad",
    "film",
    "a",
    "is",
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Folders of small random models of the kinds that the kits take."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        MistralConfig,
        MistralForCausalLM,
        RobertaConfig,
        RobertaForMaskedLM,
    )

    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    models = {
        "roberta": lambda: RobertaForMaskedLM(
            RobertaConfig(**sizes, **ids, intermediate_size=16, max_position_embeddings=130)
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=128, **ids)
        ),
        "mistral": lambda: MistralForCausalLM(
            MistralConfig(**sizes, **ids, intermediate_size=16, num_key_value_heads=2)
        ),
    }
    folders = {}
    for name, make in models.items():
        folders[name] = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            make().save_pretrained(folders[name])
        word_tokenizer(WORDS, pad_token="<pad>", bos_token="<s>", eos_token="</s>").save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files as GLUE and E2E have them."""
    folder = tmp_path_factory.mktemp("data")
    sentences = "sentence\tlabel\n" + 'a good film "\t1\na bad film\t0\n' * 20
    meanings = "mr,ref\n" + '"a film, good",a film is good\n"a film, bad",a film is bad\n' * 20
    for name, text in (("train.tsv", sentences), ("dev.tsv", sentences), ("trainset.csv", meanings)):
        (folder / name).write_text(text)
    (folder / "devset.csv").write_text(meanings[: meanings.index("bad\n") + 4])
    return folder


def small(name):
    return replace(texts.KITS[name], length=16)


@pytest.mark.parametrize("name", texts.KITS)
def test_kits_run(name, weights, data):
    found = texts.run(small(name), TINY, str(weights[name.split("-")[0]]), data, seed=0, device="cpu")
    assert 0 <= found <= 100


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.kind == "texts"])
def test_the_command_runs_a_kit(name, weights, data, tmp_path, monkeypatch):
    """All of a row but its number of steps: adapters, length, prompt, generation; and the run is kept."""
    monkeypatch.setitem(benchmark.ROWS, name, replace(ROWS[name], setting=TINY))
    out, folder = tmp_path / "found.json", weights[ROWS[name].model.split("-")[0]]
    words = ["--row", name, "--seed", "3", "--weights", folder, "--data", data, "--out", out]
    done = CliRunner().invoke(benchmark.main, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (found,) = rows_of(out)
    assert [run["seed"] for run in found["runs"]] == [3]
    assert 0 <= found["runs"][0]["ours"] <= (1 if ROWS[name].measure == "accuracy" else 100)
    assert found["noise_multiplier"] == TINY.noise_multiplier


def test_a_kit_trains_what_its_row_says(weights, data):
    """Both factors and the head, or B and the head alone; frozen weights stay."""
    train, _ = texts.read_texts(data, "classes")
    assert train[0] == ('a good film "', "1")
    for name, both in (("roberta-2", True), ("roberta-ffa-16", False)):
        _, before = texts.load_kit(small(name), str(weights["roberta"]), "cpu")
        trained = [part for part, p in before.named_parameters() if p.requires_grad]
        assert any("lora_A" in part for part in trained) is both
        assert any("lora_B" in part for part in trained)
        assert any("classifier" in part for part in trained)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            _, start = texts.load_kit(small(name), str(weights["roberta"]), "cpu")
        _, model = texts.train(small(name), TINY, str(weights["roberta"]), train, 0, "cpu")
        old = dict(start.named_parameters())
        for part, p in model.named_parameters():
            assert torch.equal(p, old[part]) is (part not in trained), part


def test_a_language_model_learns_the_class(weights, data):
    """Hardly any noise, all records: the word after the sentence."""
    kit, setting = replace(small("mistral"), rank=8, length=8), replace(EXACT, steps=20, clip=10.0, rate=0.1)
    train, others = texts.read_texts(data, "answer")
    tokenizer, model = texts.train(kit, setting, str(weights["mistral"]), train, 0, "cpu")
    assert texts.accuracy(kit, tokenizer, model, others, "cpu") > 0.9


def test_losses_are_of_the_answer_alone(weights, data):
    """Padding and the prompt have no share in it. The text of the tutorial is learnt with both, and with its end."""
    kit = small("mistral")
    tokenizer, _ = texts.load_kit(kit, str(weights["mistral"]), "cpu")
    rows = texts.encoded(kit, tokenizer, [("a bad film", "0"), ("film", "1")])
    assert (rows["labels"] != texts.IGNORED).sum(1).tolist() == [1, 1]
    logits = torch.randn(2, 16, len(WORDS), generator=torch.Generator().manual_seed(3))
    found = texts.losses(kit, logits, rows["labels"])
    for row, answer in enumerate(("negative", "positive")):
        at = int(rows["attention_mask"][row].sum()) - 1
        assert found[row] == pytest.approx(-float(logits[row, at - 1].log_softmax(0)[WORDS.index(answer)]), rel=1e-5)
    kit = small("gpt2")
    whole = texts.encoded(kit, tokenizer, [("a film", "is good")])
    tokens = [WORDS.index(each) for each in ["a", "film", "->", "is", "good", "</s>"]]
    assert whole["labels"][0].tolist() == tokens + (kit.length - len(tokens)) * [tokenizer.pad_token_id]
    assert int(whole["attention_mask"].sum()) == len(tokens)


def test_bleu():
    """By hand: p = 4/5, 3/4, 2/3, 1/2; and the penalty of a text that is too short."""
    reference = ["the", "cat", "is", "on", "the", "mat"]
    assert texts.bleu([reference], [[reference]]) == pytest.approx(100)
    found = texts.bleu([["is", "on", "the", "mat", "now"]], [[["it", "is", "on", "the", "mat"]]])
    assert found == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    short = texts.bleu([reference[:5]], [[reference]])
    assert short == pytest.approx(100 * math.exp(1 - 6 / 5))
    assert texts.bleu([reference[:5]], [[reference, reference[:5]]]) == pytest.approx(100)  # the nearest length
    assert texts.bleu([["the", "the", "the", "the"]], [[reference]]) == 0.0


def test_words_and_bleu_of_a_corpus_are_those_of_sacrebleu():
    """Version 2.6.0, with several references: `corpus_score` of the same lines."""
    assert texts.words('It\'s $1,000.50 (£30) - "well-known", 5-star &amp; more.') == (
        ["It's", "$", "1,000.50", "(", "£30", ")", "-", '"', "well-known", '"', ",", "5", "-", "star", "&", "more", "."]
    )
    said = ["The Vaults is a pub near Café Adriatic, rated 5 out of 5.", "Prices of Blue Spice are high (£30)."]
    known = [
        [
            "The Vaults pub near Café Adriatic has a 5 star rating. Prices start at £30.",
            "The Vaults is a pub, rated 5.",
        ],
        ["Blue Spice is in the high price range (£30).", "Prices are high at Blue Spice: £30."],
    ]
    found = texts.bleu([*map(texts.words, said)], [[*map(texts.words, each)] for each in known])
    assert found == pytest.approx(43.98789, abs=1e-5)


def test_runs_of_a_row_are_added(tmp_path):
    """The command keeps what is there, replaces a seed that is run again, and needs no data for the costs."""
    out = tmp_path / "found.json"
    done = CliRunner().invoke(benchmark.main, ["--row", "cifar-wrn", "--row", "sst2-lora-1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "--weights FacebookAI/roberta-base --data FOLDER" in " ".join(done.output.split())
    assert [each["row"] for each in rows_of(out)] == ["cifar-wrn", "sst2-lora-1"]
    assert "sst2-lora-1 is not run: add --data, a folder with train.tsv and dev.tsv" in " ".join(done.output.split())
    old = {"row": "a", "runs": [{"seed": 0, "ours": 0.1}, {"seed": 2, "ours": 0.2}]}
    new = benchmark.merged(old, {"row": "a", "runs": [{"seed": 2, "ours": 0.3}, {"seed": 1, "ours": 0.4}]})
    assert [(each["seed"], each["ours"]) for each in new["runs"]] == [(0, 0.1), (1, 0.4), (2, 0.3)]


def test_a_row_without_its_data_says_what_to_do(tmp_path, monkeypatch):
    for name in ("DIGITS", "CLOTHES"):
        monkeypatch.setattr(images, name, tmp_path / name)
    assert images.missing("fashion-cnn") == "add --fetch, which gets Fashion-MNIST from Debian"
    assert images.missing("mnist-1.16") == "put the four files of MNIST into .cache/mnist"
    for name in ("DIGITS", "CLOTHES"):
        (tmp_path / name).mkdir()
    assert images.missing("fashion-cnn") is None
    assert images.missing("mnist-1.16") is None


def test_comparison_with_a_published_figure():
    row = ROWS["fashion-linear"]
    assert benchmark.compared(row, [0.895, 0.896, 0.897, 0.898, 0.899]) == "no difference seen"
    assert benchmark.compared(row, [0.881, 0.882, 0.883]) == "behind"
    assert benchmark.compared(row, [0.901, 0.902, 0.903]) == "above"
    assert benchmark.compared(row, [0.95]) == "one run"
    assert benchmark.shown(row, [0.89, 0.90]) == f"89.50 ± {12.706 * 100 * math.sqrt(5e-5 / 2):.2f} (2)"


def test_results_have_the_costs_of_now():
    assert RESULTS.keys() == ROWS.keys()
    for name, row in ROWS.items():
        assert RESULTS[name]["noise_multiplier"] == pytest.approx(noise_of(row.setting), rel=1e-4)
        event = Event(row.setting.batch / row.setting.dataset_size, noise_of(row.setting), row.setting.steps)
        epsilon = Ledger((event,)).epsilon(row.setting.delta).epsilon
        assert RESULTS[name]["epsilon"] == pytest.approx(epsilon, rel=1e-4)


def test_the_tables_are_those_of_the_result():
    page = benchmark.PAGE.read_text("utf-8")
    assert filled(page, benchmark.tables(RESULTS.values())) == page


def test_the_readme_has_the_numbers_of_the_result():
    """Mean and interval of the two rows that it names, and what the settings of Opacus cost."""
    readme = " ".join((benchmark.DOCS.parent / "README.md").read_text("utf-8").split())
    for name in ("fashion-linear", "fashion-linear-spent"):
        values = [100 * run["ours"] for run in RESULTS[name]["runs"]]
        assert f"{mean(values):.1f} % ({len(values)} runs, ± {benchmark.interval(values):.1f})" in readme, name
    costs = [f"{RESULTS[f'mnist-{stated}']['epsilon']:.2f}" for stated in ("6.86", "2.91", "1.16")]
    assert f"cost {costs[0]}, {costs[1]} and {costs[2]} instead of 6.86, 2.91 and 1.16" in readme
