"""Visual question answering in small: it runs, can be resumed, and its parts are what they are said to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import names, ran, smoke_run, written

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "vqa"
sys.path.insert(0, str(FOLDER))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return smoke_run(FOLDER / "train.py", tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data():
    import downloads
    from questions import load

    return load(downloads.fetch_questions(), 20)


@pytest.fixture(scope="module")
def network():
    import downloads
    from vision import load_vision

    return load_vision(downloads.fetch_vision())


@pytest.fixture(scope="module")
def encoder():
    import downloads
    from model import load_encoder

    return load_encoder(downloads.fetch_model())


@pytest.fixture(scope="module")
def model(encoder, data):
    from vlm import VisionLanguage

    return VisionLanguage(encoder, data.texts, data.answers, 80, seed=0).eval()


@pytest.mark.slow
def test_a_run_says_and_writes_what_was_spent(finished):
    folder, output = finished
    for line in ("majority answer", "question only", "non-private twin", "DP training", "one image with all"):
        assert line in output
    written(folder, 2)
    assert len(json.loads((folder / "metrics.json").read_text())["results"]) == 4


@pytest.mark.slow
def test_a_finished_vqa_run_resumes_to_the_same_result(finished):
    folder, _ = finished
    before, options = written(folder, 2), ("--smoke", "--insecure-seed", 5, "--resume", folder)
    result = ran(FOLDER / "train.py", *options)
    assert result.exit_code == 0, result.stderr[-2000:]
    assert "Resumed at step 2; 2 steps are in the ledger." in result.stdout
    assert written(folder, 2) == before


def test_the_vision_network_knows_a_photograph(network):
    # A portrait in uniform: class 652 of ImageNet. Wrong padding, normalisation or order of layers would lose it.
    import matplotlib as mpl
    from PIL import Image

    with Image.open(Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg") as file:
        image = file.convert("RGB").crop((0, 0, 512, 512)).resize((224, 224), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        probabilities = network(pixels).softmax(1)[0]
    assert probabilities.argmax() == 652
    assert probabilities[652] > 0.25


def test_features_are_a_function_of_each_image_alone(network, data):
    from vision import image_features

    together, alone = (image_features(network, pixels) for pixels in (data.train.pixels[:2], data.train.pixels[:1]))
    torch.testing.assert_close(together[:1].float(), alone.float(), rtol=2e-3, atol=5e-3)
    torch.testing.assert_close(together.float().mean(1).norm(dim=1), torch.ones(2), rtol=1e-2, atol=1e-2)


def test_the_last_layer_is_that_of_the_language_model(model, encoder, data):
    # Computed at one position only, it is the layer's own output: the answer token sees all but itself.
    from model import run_layers
    from vlm import lower_layers

    question = torch.tensor([[0, 7, 50]])
    features = torch.randn(1, 4, 80, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = model.projector(features)
        got = model.read(tokens, model.asked(question))
        words, mask = lower_layers(encoder, [data.texts[number] for number in question[0]])
        start = torch.stack([row[real].mean(0) for row, real in zip(words, mask, strict=True)])[:, None]
        mask = torch.cat([torch.zeros(3, 1, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool), mask], 1)
        expected = run_layers([model.layer], torch.cat([start, tokens.expand(3, -1, -1), words], 1), mask)[:, 0]
    torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-4)


def test_the_loss_of_an_image_is_the_mean_over_its_questions():
    from vlm import per_image_loss

    generator = torch.Generator().manual_seed(0)
    logits, answer = torch.randn(2, 3, 5, generator=generator), torch.tensor([[1, 2, 0], [4, 0, 0]])
    asked = torch.tensor([[True, True, True], [True, False, False]])
    losses = per_image_loss(logits, answer, asked)
    expected = -logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0]
    torch.testing.assert_close(losses, torch.stack([expected[0].mean(), expected[1, 0]]))
    changed = logits.clone()
    changed[1, 1:] = 9.0
    torch.testing.assert_close(per_image_loss(changed, answer, asked), losses)


@pytest.mark.slow
def test_a_record_is_an_image_with_its_questions(data):
    import downloads
    from questions import NUM_VALIDATION, PER_IMAGE, by_image, load

    whole = load(downloads.fetch_questions())
    assert (len(whole.train.pixels), len(whole.validation.pixels)) == (4000 - NUM_VALIDATION, NUM_VALIDATION)
    assert (len(whole.test.pixels), int(whole.test.asked.sum()), len(whole.answers)) == (1000, 9673, 13)
    assert 0.36 < whole.majority_accuracy < 0.38
    asked = by_image(downloads.fetch_questions() / "test" / "questions.json")[0]
    row = [
        (whole.texts[q], whole.answers[a])
        for q, a, is_asked in zip(whole.test.question[0], whole.test.answer[0], whole.test.asked[0], strict=True)
        if is_asked
    ]
    assert row == asked
    assert data.train.question.shape == (20, PER_IMAGE)
    train, held_out = ({image.numpy().tobytes() for image in part.pixels} for part in (whole.train, whole.validation))
    assert not train & held_out


def test_without_images_nothing_of_them_is_left():
    example, parts = names(FOLDER / "train.py"), ("train", "validation", "test")
    rows = {"features": torch.ones(2, 4, 80), "question": torch.ones(2, 3)}
    hidden = example.blind(example.task_of(None, {}, dict.fromkeys(parts, rows)))
    assert not any(getattr(hidden, part)["features"].any() for part in parts)
    assert torch.equal(hidden.test["question"], rows["question"])


def test_the_results_in_the_document_are_those_of_the_file():
    from collect import RESULTS, table

    runs = json.loads(RESULTS.read_text())["runs"]
    assert table(runs) in (FOLDER / "README.md").read_text()
    private, question_only = (
        [row["accuracy"] for run in runs for row in run["results"] if row["name"].startswith(name)]
        for name in ("DP", "question only")
    )
    assert min(private) > 0.8 > max(question_only)
