"""Language models that read the sizes of images: proven where all images have one size, and not where they differ."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    vision_utils,
)

from dpfunc import engines
from dpfunc.errors import UnsupportedModel

IMAGE, WORDS, LENGTH = 20, 24, 8
SAME, OTHER = [[1, 4, 4]] * 3, [[1, 4, 4], [1, 2, 8], [1, 4, 4]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}  # fmt: skip
    vision = {"hidden_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
              "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3}  # fmt: skip
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=IMAGE + 1)
    return Qwen2VLForConditionalGeneration(config).eval()


def images(grids, per_sample=1):
    """Texts that end in padding, with images of 16 patches at different positions."""
    generator = torch.Generator().manual_seed(1)
    count, positions = len(grids) // per_sample, 4 * per_sample
    ids = torch.randint(0, IMAGE, (count, LENGTH + positions), generator=generator)
    ids[:, 1:5] = IMAGE
    if per_sample == 2:
        ids[:, 6:10] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    patches = torch.randn(count, 16 * per_sample, 48, generator=generator)
    return {"ids": ids, "mask": mask, "patches": patches,
            "grid": torch.tensor(grids).view(count, per_sample, 3)}  # fmt: skip


def loss_of(model):
    def loss_fn(params, batch):
        logits = torch.func.functional_call(model, params, kwargs=inputs(batch)).logits
        losses = F.cross_entropy(logits[:, :-1].mT, batch["ids"][:, 1:], reduction="none")
        return (losses * batch["mask"][:, 1:]).sum(1)

    return loss_fn


def inputs(batch):
    return {"input_ids": batch["ids"], "attention_mask": batch["mask"],
            "pixel_values": batch["patches"].flatten(0, 1), "image_grid_thw": batch["grid"].flatten(0, 1),
            "mm_token_type_ids": (batch["ids"] == IMAGE).long()}  # fmt: skip


def compared(loss_fn, params, batch):
    """Doubts of one step, and the largest difference of squared norms from single samples."""
    found = engines.bookkeeping(unproven="audit")(loss_fn, params, batch)
    single = engines.loop()(loss_fn, params, batch).sq_norms()
    norms = found.sq_norms()
    off = (norms[name] - single[name] for name in single)
    return found.evidence.doubts, max(float(off_B.abs().max()) for off_B in off) / float(sum(single.values()).max())


@pytest.mark.parametrize("per_sample", [1, 2])
def test_images_of_one_size_are_proven(model, per_sample):
    params = dict(model.named_parameters())
    doubts, difference = compared(loss_of(model), params, images(SAME * per_sample, per_sample))
    assert doubts == ()
    assert difference < 1e-5


def test_images_of_different_sizes_are_not_proven(model):
    doubts, _ = compared(loss_of(model), dict(model.named_parameters()), images(OTHER))
    assert any("of numbers of the batch" in doubt for doubt in doubts)


def test_images_that_differ_within_each_sample_are_not_proven(model):
    """Which image a text has is counted from the first sample on."""
    batch = images([[1, 4, 4], [1, 2, 8]] * 3, 2)
    doubts, _ = compared(loss_of(model), dict(model.named_parameters()), batch)
    assert any("of numbers of the batch" in doubt for doubt in doubts)


def test_positions_of_an_earlier_batch_are_refused(model):
    """The model keeps what it has counted in a batch."""
    params, batch, loss_fn = dict(model.named_parameters()), images(SAME), loss_of(model)

    def keeps(params, batch):
        late = 0.0 if model.model.rope_deltas is None else model.model.rope_deltas[0, 0]
        return loss_fn(params, batch) * (1 + late)

    model.model.rope_deltas = None
    engine = engines.bookkeeping(unproven="audit")
    engine(keeps, params, batch)
    with pytest.raises(UnsupportedModel, match="computed from another batch"):
        engine(keeps, params, batch)
    model.model.rope_deltas = None


def small(use):
    """A loss with a product with the patches, and what `use` makes of the sizes of the images."""
    params = {"w": torch.randn(48, generator=torch.Generator().manual_seed(2))}

    def loss_fn(params, batch):
        values = (batch["patches"] @ params["w"]).flatten()
        return use(values, batch["grid"].flatten(0, 1)).reshape(len(batch["ids"]), -1).square().sum(1)

    return loss_fn, params


def by_lengths(values, grid):
    ends = vision_utils.get_vision_cu_seqlens(grid)
    return torch.cat([part.softmax(0) for part in values.split((ends[1:] - ends[:-1]).tolist())])


def by_position(values, grid):
    return values * vision_utils.get_vision_position_ids(grid, 2).sum(1)


def by_window(values, grid):
    order, _ = vision_utils.get_vision_window_index(grid, 2, 16, 4)
    return values.view(-1, 4)[order]


def by_table(values, grid):
    positions, weights = vision_utils.get_vision_interpolation_indices_and_weights(grid, 3, "bicubic")
    return values * (torch.arange(9.0)[positions] * weights).sum(1)


@pytest.mark.parametrize("use", [by_lengths, by_position, by_window, by_table])
def test_positions_of_images(use):
    loss_fn, params = small(use)
    doubts, difference = compared(loss_fn, params, images(SAME))
    assert doubts == ()
    assert difference < 1e-5
    doubts, difference = compared(loss_fn, params, images(OTHER))  # of as many patches as the others
    assert doubts or difference < 1e-5
    assert doubts or use in (by_lengths, by_table)


@pytest.mark.parametrize(
    "use",
    [
        lambda values, grid: values / sum(height for _, height, _ in grid.tolist()),
        lambda values, grid: values / int(grid.sum()),
        lambda values, grid: by_lengths(values, grid.amax(0, keepdim=True).expand(3, 3)),
        lambda values, grid: by_position(values, grid.float().mean(0, keepdim=True).long().repeat(3, 1)),
    ],
)
def test_sizes_of_the_batch_are_not_proven(use):
    """Sums over the batch, and sizes that come from all samples, also where all are the same."""
    loss_fn, params = small(use)
    assert engines.bookkeeping(unproven="audit")(loss_fn, params, images(SAME)).evidence.doubts


@pytest.fixture(scope="module")
def idefics():
    torch.manual_seed(0)
    text = {"model_type": "llama", "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = Idefics3Config(text_config=text, vision_config=vision, scale_factor=2, image_token_id=IMAGE)
    return Idefics3ForConditionalGeneration(config).eval().requires_grad_(False)


def pictures(counts):
    """At most two images of each sample; those that are all zero are padding."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(len(counts), 2, 3, 16, 16, generator=generator)
    ids = torch.randint(0, IMAGE, (len(counts), LENGTH), generator=generator)
    for row, count in enumerate(counts):
        pixels[row, count:] = 0.0
        ids[row, row : row + count] = IMAGE
    return {"ids": ids, "pixels": pixels}


def idefics_loss(model):
    def loss_fn(params, batch):
        given = {"input_ids": batch["ids"], "pixel_values": batch["pixels"]}
        logits = torch.func.functional_call(model, params, kwargs=given).logits
        return F.cross_entropy(logits[:, :-1].mT, batch["ids"][:, 1:], reduction="none").sum(1)

    return loss_fn


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 1, 1)])
def test_as_many_images_of_each_sample_are_proven(idefics, counts):
    doubts, difference = compared(idefics_loss(idefics), dict(idefics.named_parameters()), pictures(counts))
    assert doubts == ()
    assert difference < 1e-5


def test_different_numbers_of_images_are_not_proven(idefics):
    params = {name: param for name, param in idefics.named_parameters() if "connector" in name}
    assert engines.bookkeeping(unproven="audit")(idefics_loss(idefics), params, pictures((1, 2, 1))).evidence.doubts


def test_the_number_of_images_of_the_batch_is_not_proven():
    """Where each sample has as many as the others, too: it is a sum over the samples."""
    params = {"w": torch.randn(16, generator=torch.Generator().manual_seed(2))}

    def loss_fn(params, batch):
        flat = batch["pixels"].flatten(0, 1)
        real = flat[(flat != 0).flatten(1).any(1)]
        values = (real @ params["w"]).flatten(1).sum(1)
        return values.view(len(batch["ids"]), -1).sum(1) / len(real)

    assert engines.bookkeeping(unproven="audit")(loss_fn, params, pictures((2, 2, 2))).evidence.doubts


def one_by_one(join):
    """A loss that joins a parameter to the picture of each sample, one after the other."""
    params = {"w": torch.randn(16, generator=torch.Generator().manual_seed(2)), "end": torch.ones(3, 16, 1)}

    def loss_fn(params, batch):
        parts = [join(row * params["w"], params["end"], row) for row in batch["pixels"][:, 0].unbind(0)]
        return torch.stack(parts).flatten(1).tanh().square().sum(1)

    return loss_fn, params


@pytest.mark.parametrize("engine", [engines.bookkeeping, engines.ghost])
@pytest.mark.parametrize(
    "join",
    [
        lambda row, end, _: torch.cat((row, end), -1),
        lambda row, end, _: torch.cat((end * 2, row, end), dim=2),
        lambda row, end, _: row * end,
        lambda row, end, own: torch.cat((row, end.expand(3, 16, 2)), -1) * own.sum(),
    ],
)
def test_parameters_joined_to_one_sample(join, engine):
    loss_fn, params = one_by_one(join)
    found = engine(unproven="audit")(loss_fn, params, pictures((1, 2, 1)))
    single = engines.loop()(loss_fn, params, pictures((1, 2, 1)))
    assert found.evidence.doubts == ()
    for name, norms_B in single.sq_norms().items():
        torch.testing.assert_close(found.sq_norms()[name], norms_B, rtol=1e-4, atol=1e-6)


def test_a_parameter_joined_to_one_sample_that_others_see():
    params = {"end": torch.ones(3, 16, 1)}

    def loss_fn(params, batch):
        pixels = batch["pixels"][:, 0]
        first = torch.cat((pixels[0], params["end"]), -1)
        return (pixels + first[..., :-1] * first[..., -1:]).flatten(1).square().sum(1)

    assert engines.bookkeeping(unproven="audit")(loss_fn, params, pictures((1, 2, 1))).evidence.doubts


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_a_trained_table_of_positions_is_read_between_its_entries(mode):
    params = {"table": torch.randn(9, 4, generator=torch.Generator().manual_seed(2))}

    def loss_fn(params, batch):
        table = params["table"].view(3, 3, 4).permute(2, 0, 1).unsqueeze(0)
        positions = batch["pixels"].reshape(1, -1, 1, 2).tanh()
        read = F.grid_sample(table, positions, mode=mode, align_corners=False, padding_mode="border")
        values = read.squeeze(0).squeeze(-1).T
        return values.reshape(len(batch["ids"]), -1).square().sum(1)

    doubts, difference = compared(loss_fn, params, pictures((1, 2, 1)))
    assert doubts == ()
    assert difference < 1e-5
