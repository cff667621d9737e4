"""Image + text batches, what each strategy trains, and its agreement with single samples."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from image_text_models import samples
from models import Case
from packed import pack
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration
from zoo.parity import differences, nonzero_b, roughen, truth_of, without_gradient

import dpfunc
from dpfunc import clipping, engines, sampling
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.hf._facts import quantised_layers
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.vision_language import _strategies as vision_language
from dpfunc.hf.vision_language._images import IGNORED, image_text_collator
from dpfunc.hf.vision_language._strategies import strategy_table
from dpfunc.hf.vision_language.tiny_llava import IMAGE_SIZE, draw, tiny_llava, tiny_processor
from dpfunc.rng import insecure_key
from dpfunc.sampling.loader import without_rows
from dpfunc.train._records import _vqa_record
from dpfunc.train.config import DataSection

FLOAT = ("full", "lora", "projector")
samples_of = partial(samples, "LLaVA 1.5", marked=False)
UP_TO_TWO = (1, 2, 0, 2)  # images of each of four samples


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


def model_of():
    return roughen(tiny_llava())


def batch_of(processor, images, counts):
    return image_text_collator(processor, max_length=26, max_images=images)(samples_of(counts))


def answer_loss(forward):
    return make_loss_fn(forward, vision_language.image_text_loss)


def built(name, model):
    options = {"key": insecure_key(0), "rank": 2, "alpha": 4.0} if name in ("lora", "qlora") else {}
    return vision_language.strategy(model, name, **options)


@pytest.mark.parametrize(
    ("name", "other"), [("full", "loop"), ("lora", "ghost"), ("projector", "vmap"), ("PEFT", "loop")]
)
def test_engines_equal_single_samples_for_each_strategy(processor, name, other):
    """Every engine gives what single samples give, and the default one does not fall back."""
    if name == "PEFT":
        forward, params = functionalize(
            vision_language.prepare(model_of(), "lora", rank=2, alpha=4.0, train_projector=True).eval()
        )
        assert sum("multi_modal_projector" in name for name in params) == 4
    else:
        result = built(name, model_of())
        forward, params = result.forward, result.params
    case = Case(answer_loss(forward), nonzero_b(params), batch_of(processor, 2, UP_TO_TWO))
    truth = truth_of(case)
    assert not without_gradient(truth)
    for engine in (getattr(engines, other)(), auto := engines.auto()):
        assert max(differences(engine, case, truth).values()) < 1e-5
    assert auto.decision(case.loss_fn).engine == "one pass"


@pytest.mark.parametrize("engine", ["ghost", "auto"])
def test_images_that_cross_into_the_next_sample_are_refused(processor, engine):
    """As many tokens as images in all, but three images' tokens in one sample and one's in the next."""
    forward, params = functionalize(model_of(), "projector")
    collate = image_text_collator(processor, max_length=26, max_images=2)
    batch = collate(samples_of((2, 2)))
    image, tokens = processor.image_token_id, collate.tokens_per_image
    first = (batch["input_ids"][0] == image).nonzero()[-tokens:, 0]
    last = (batch["input_ids"][1] == processor.tokenizer.pad_token_id).nonzero()[:tokens, 0]
    batch["input_ids"][0, first], batch["input_ids"][1, last] = processor.tokenizer.pad_token_id, image
    with pytest.raises((UnsupportedModel, ValueError, RuntimeError)):
        getattr(engines, engine)()(answer_loss(forward), params, batch).sq_norms()


def test_unused_parameters_have_no_gradient(processor):
    """Found without values, confirmed with them; all others have one. The default engine takes all parameters."""
    model = model_of()
    forward, params = functionalize(model)
    case = Case(answer_loss(forward), params, batch_of(processor, 2, UP_TO_TWO))
    truth, auto = truth_of(case), engines.auto()
    assert max(differences(auto, case, truth).values()) < 1e-5
    assert auto.decision(case.loss_fn).engine == "one pass"
    assert set(without_gradient(truth)) == set(vision_language.unused_parameters(model))
    assert set(vision_language.trained_parameters(model, "full")) == set(params) - set(
        vision_language.unused_parameters(model)
    )
    assert len(vision_language.unused_parameters(model)) == 18  # the last of two layers, and the norm after it


@pytest.mark.parametrize("name", FLOAT)
def test_the_model_is_not_changed(processor, name):
    model = model_of()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    wanted = [p.requires_grad for p in model.parameters()]
    result = built(name, model)
    loss_fn = answer_loss(result.forward)
    engines.auto()(loss_fn, result.params, batch_of(processor, 1, (1, 1, 1))).sq_norms()
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == wanted
    merged = result.merge({n: p + 0.1 for n, p in result.params.items()})
    changed = {n for n, value in merged.state_dict().items() if not torch.equal(value, before[n])}
    expected = {f"{n}.weight" for n in vision_language.language_layers(model)} if name == "lora" else set(result.params)
    assert changed == expected
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())
    params, batch = {n: p + 0.05 for n, p in nonzero_b(result.params).items()}, batch_of(processor, 1, (1, 1))
    inputs = {n: v for n, v in batch.items() if n != "labels"}
    ours = result.forward(params, **inputs).logits
    assert torch.allclose(result.merge(params)(**inputs).logits, ours, atol=2e-5)


@pytest.mark.parametrize("name", FLOAT)
def test_prepare_trains_what_the_strategy_trains(name):
    options = {"rank": 2, "alpha": 4.0} if name == "lora" else {}
    model = vision_language.prepare(tiny_llava(), name, **options)
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    ours = built(name, tiny_llava()).params
    assert sum(trained.values()) == sum(p.numel() for p in ours.values())
    if name == "lora":
        assert all("language_model" in n and "lora_" in n for n in trained)
        both = vision_language.strategy(
            tiny_llava(), "lora", key=insecure_key(0), rank=2, alpha=4.0, train_projector=True
        )
        whole = [n for n in both.params if "lora_" not in n]
        assert whole == list(vision_language.trained_parameters(tiny_llava(), "projector"))
    else:
        assert set(trained) == set(ours)


def test_targets_of_no_module_are_refused_beside_others():
    """PEFT adapts the others, and says nothing; the model is left as it was."""
    model, options = tiny_llava(), {"rank": 2, "alpha": 4.0}
    for wrong in ("v_prj", "proj"):
        with pytest.raises(InvalidArgument, match=f"the end of the name of a module, got targets='{wrong}'"):
            vision_language.prepare(model, "lora", targets=["q_proj", wrong], **options)
    assert not any("lora" in name for name, _ in model.named_parameters())
    trained = vision_language.prepare(model, "lora", targets=["self_attn.q_proj", "v_proj"], **options)
    assert any("v_proj.lora_A" in name for name, p in trained.named_parameters() if p.requires_grad)


def packed_model(projector=False):
    model = model_of()
    chosen = list(vision_language.language_layers(model))
    chosen += ["model.multi_modal_projector.linear_1"] if projector else []
    return pack(model, chosen)


def test_qlora_over_packed_weights_equals_single_samples(processor):
    model = packed_model()
    assert quantised_layers(model) == vision_language.language_layers(model)
    result = built("qlora", model)
    assert all(p.dtype == torch.float32 for p in result.params.values())
    case = Case(answer_loss(result.forward), nonzero_b(result.params), batch_of(processor, 1, (1, 0, 1, 1)))
    truth = truth_of(case)
    assert not without_gradient(truth)
    assert max(differences(engines.auto(), case, truth).values()) < 1e-5
    with pytest.raises(UnsupportedModel, match="merge it into a base that was loaded in float"):
        result.merge(result.params)
    assert built("projector", packed_model()).params


KEYED = {"key": insecure_key(0), "rank": 2, "alpha": 4.0}


@pytest.mark.parametrize(
    ("make", "name", "options", "said"),
    [
        (tiny_llava, "qlora", KEYED, "in 4 bits.*pip install bitsandbytes.*take 'lora'"),
        (packed_model, "full", {}, "Take 'qlora'"), (packed_model, "lora", KEYED, "Take 'qlora'"),
        (lambda: packed_model(True), "projector", {}, "llm_int8_skip_modules"),
        (lambda: packed_model(True), "qlora", {**KEYED, "train_projector": True}, "llm_int8_skip_modules"),
        (lambda: nn.Linear(2, 2), "full", {}, "without vision, projector, language"),
        (tiny_llava, "head", {}, "one of 'full'"), (tiny_llava, "lora", {"key": insecure_key(0), "alpha": 4.0}, "rank"),
        (tiny_llava, "lora", {"rank": 2, "alpha": 4.0}, "key"), (tiny_llava, "full", {"rank": 2}, "no rank"),
        (tiny_llava, "projector", {"train_projector": True}, "no train_projector"),
        (tiny_llava, "projector", {"key": insecure_key(0)}, "no key"),
    ],
)  # fmt: skip
def test_a_strategy_that_does_not_fit_the_model_is_refused(make, name, options, said):
    with pytest.raises((InvalidArgument, UnsupportedModel), match=said):
        vision_language.strategy(make(), name, **options)


def cells_of(model, rank):
    table = strategy_table(model, rank=rank, noise_multiplier=2.0, expected_batch_size=10)
    return {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}


def test_the_table_of_strategies():
    cells = cells_of(tiny_llava(), 2)
    assert tuple(cells) == vision_language.STRATEGIES
    for name in FLOAT:
        trained = sum(p.numel() for p in built(name, tiny_llava()).params.values())
        assert (cells[name][0], cells[name][4]) == (f"{trained:,}", f"{0.2 * trained**0.5:.2g}")
    assert cells["qlora"][:2] == cells["lora"][:2]
    with torch.device("meta"):
        large = cells_of(LlavaForConditionalGeneration(LlavaConfig()).bfloat16(), 16)
    assert [cost[2] for cost in large.values()] == ["13.2", "13.2", "4.1", "13.2"]


def test_gradient_checkpointing_changes_no_norm(processor):
    def norms(checkpointed):
        model = model_of()
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        result = built("lora", model)
        model.train()
        loss_fn, params = answer_loss(result.forward), nonzero_b(result.params)
        return engines.ghost()(loss_fn, params, batch_of(processor, 2, (2, 1, 0))).sq_norms()

    torch.testing.assert_close(norms(True), norms(False), rtol=1e-5, atol=1e-8)


def test_batches_have_their_keys_shapes_and_labels(processor):
    """Labels are the answer and its end; everything else is ignored; the attention mask is what is not padding."""
    batch = batch_of(processor, 2, (1, 2, 0))
    words = processor.tokenizer.convert_ids_to_tokens
    assert batch["pixel_values"].shape == (3, 2, 3, IMAGE_SIZE, IMAGE_SIZE)
    image = processor.image_token_id
    assert (batch["input_ids"] == image).sum(1).tolist() == [8, 8, 8]
    assert ((batch["input_ids"] == image) * batch["attention_mask"]).sum(1).tolist() == [4, 8, 0]
    for row, labels, answer in zip(
        batch["input_ids"], batch["labels"], (["red"], ["red", "is"], ["red", "is", "blue"]), strict=True
    ):
        assert words(row[labels != IGNORED].tolist()) == [*answer, "</s>"]
    first = words(batch["input_ids"][0][batch["attention_mask"][0] == 1].tolist())
    assert first == ["<s>", "USER:", *["<image>"] * 4, "what", "ASSISTANT:", "red", "</s>"]


def test_prompts_without_a_template_are_taken_as_they_are(processor, tmp_path):
    """Without the template the prompt holds the image tokens itself; images may be paths."""
    draw("red", "circle", 24, 0).save(tmp_path / "a.png")
    collate = image_text_collator(processor, max_length=16, chat=False)
    sample = {"prompt": "USER: <image> colour ? ASSISTANT:", "answer": "red"}
    batch = collate([{**sample, "image": tmp_path / "a.png"}])
    drawn = collate([{**sample, "image": draw("red", "circle", 24, 0)}])
    assert torch.equal(batch["pixel_values"], drawn["pixel_values"])
    with pytest.raises(InvalidArgument, match="Expected one <image> in the prompt"):
        collate([{**sample, "prompt": "colour ?", "image": tmp_path / "a.png"}])


def test_marks_of_images_in_texts_are_taken_out(processor, tmp_path):
    """Tables of LLaVA have them; one that a person wrote must not end a run."""
    draw("red", "circle", 24, 0).save(tmp_path / "a.png")
    collate = image_text_collator(processor, max_length=26, chat=bool(processor.chat_template))
    data = DataSection("mails.csv", question_column="q", answer_column="a")
    said = (
        ("colour ?", "red"),
        ("<image>\n colour ?", "<image> red"),
        ("<ima<image>ge>colour ?", "<i<i<image>mage>mage>red"),
    )
    rows = [{"image": "a.png", "q": q, "a": a} for q, a in said]
    plain, *marked = (collate([_vqa_record(processor, row, data, tmp_path, "a row")]) for row in rows)
    assert all(torch.equal(each[name], value) for each in marked for name, value in plain.items())
    with pytest.raises(InvalidArgument, match="Expected an answer without <image>"):
        collate([{"prompt": "colour ?", "answer": "red <image>", "image": tmp_path / "a.png"}])


def test_images_and_texts_that_do_not_fit_are_refused(processor):
    """A processor that keeps the aspect ratio gives every image another number of tokens."""
    for options, said in (
        ({"max_length": 5}, "max_length >= 6"), ({"max_length": 9, "max_images": 2}, "max_length >= 10"),
        ({"max_length": 20, "padding_side": "up"}, "padding_side"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=said):
            image_text_collator(processor, **options)
    collate = image_text_collator(processor, max_length=20)
    for changes, said in (
        ({"text": "?"}, "Rename the columns"), ({"images": ["a", "b"]}, "at most max_images=1"),
        ({"image": "a", "images": []}, "got both"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=said):
            collate([{"prompt": "what ?", "answer": "red", **changes}])
    other = copy.deepcopy(processor)
    other.image_processor.do_center_crop = False
    with pytest.raises(UnsupportedModel, match="same number of tokens"):
        image_text_collator(other, max_length=200)
    other.tokenizer.eos_token = None
    with pytest.raises(InvalidArgument, match=r"an end token. Name two of its tokens: .*tokenizer.eos_token = '...'"):
        image_text_collator(other, max_length=16)


SHARED = tiny_processor()


@given(
    st.integers(0, 2), st.integers(0, 30), st.integers(0, 30), st.integers(0, 12), st.sampled_from(["left", "right"])
)
@example(0, 0, 0, 4, "left").via("room for one word more than there are")
@example(2, 5, 0, 12, "right").via("room for a few words more")
def test_long_texts_are_cut_and_images_never(images, words, answer, room, side):
    collate = image_text_collator(SHARED, max_length=10 + room, max_images=2, padding_side=side)
    pictures = [draw("red", "circle", 16, i) for i in range(images)]
    sample = {"images": pictures, "prompt": "the " * words, "answer": "red " * answer}
    batch = collate([sample])
    assert batch["input_ids"].shape == (1, 10 + room)
    assert int((batch["input_ids"] == collate.processor.image_token_id).sum()) == 8
    assert int((batch["labels"] != IGNORED).sum()) >= 1  # something of the answer is always learnt
    kept = batch["input_ids"][0][batch["attention_mask"][0] == 1]
    assert kept[0] == 1  # the beginning stays
    if 5 + 4 * images + words + answer + 4 * (2 - images) <= 10 + room:
        assert len(kept) == 4 + 4 * images + words + answer


@pytest.mark.parametrize("step", [None, 8])
def test_an_empty_draw_has_the_shapes_of_a_batch(processor, step):
    collate = image_text_collator(processor, max_length=26, max_images=2, pad_to_multiple_of=step)
    example = samples_of((1,))[0]
    for empty in (collate([]), without_rows(collate([example]))):
        assert {name: tuple(value.shape[:1]) for name, value in empty.items()} == dict.fromkeys(
            collate([example]), (0,)
        )
        assert {n: v.dtype for n, v in empty.items()} == {n: v.dtype for n, v in collate([example]).items()}
    assert collate([])["pixel_values"].shape == (0, 2, 3, IMAGE_SIZE, IMAGE_SIZE)
    short = image_text_collator(processor, max_length=14, pad_to_multiple_of=4)
    assert short(samples_of((1,)))["input_ids"].shape == (1, 12)
    assert short(samples_of((1, 1, 1, 1, 1)))["input_ids"].shape == (5, 14)  # max_length is the most
    result = built("projector", model_of())
    plan = dpfunc.Plan(sampling.Poisson(10, 0.1), clipping.Flat(1.0), 1.0, 1, delta=1e-3)
    grads, _, _ = dpfunc.make_dp_step(answer_loss(result.forward), plan, verify_batch=False)(result.params, collate([]))
    assert all(float(grad.norm()) > 0 for grad in grads.values())  # noise alone
