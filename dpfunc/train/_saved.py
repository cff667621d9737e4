"""The model that a run leaves: written, read back as anybody would read it, and compared with the trained one.

May import: its folder, features and below. Privacy depends on it: no.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpfunc._utils.validation import refuse, shorten
from dpfunc.errors import CheckpointError
from dpfunc.functional import functionalize
from dpfunc.hf._facts import evaluating
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.rehearsal import moved
from dpfunc.train._collate import collator
from dpfunc.train._dataset import with_features
from dpfunc.train._features import Front, load_features, save_features
from dpfunc.train._made_up import made_up_row
from dpfunc.train._model import load_base, load_processing, one_line
from dpfunc.train._preferences import loss_of_record, without_references
from dpfunc.train._records import record_of
from dpfunc.train.config import ADAPTERS, FEATURES, Job

_KEPT = (
    "Nothing was lost: what was spent is in the journal, and the last checkpoint holds what was learnt. --resume with "
    "the same job saves and compares again"
)
_DECIMALS = 2e-2  # of losses, which may be computed on two devices, or in bfloat16; weights are compared bit for bit


def rehearse_saving(job: Job, model: Any, processing: Any) -> None:
    """Save the model before its first step, read it back with another seed, and compare: as at the end of a run.

    Meanwhile trained parameters are moved by about 1 %.
    """
    if job.strategy == "qlora" and not torch.accelerator.is_available():
        return  # bitsandbytes packs the weights of a model that is evaluated, and gradients no longer pass
    trained = {parameter: parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad}
    try:
        _set({parameter: moved(value) for parameter, value in trained.items()})
        with TemporaryDirectory() as name:
            save_model(Path(name) / "model", job, model, processing, kept="Nothing was spent")
    finally:
        _set(trained)


def _set(values: Mapping[nn.Parameter, Tensor]) -> None:
    """Give parameters these values."""
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(value)


def save_model(folder: Path, job: Job, model: Any, processing: Any, kept: str = _KEPT) -> None:
    """Save the model with its tokenizer or processor, for from_pretrained, and compare it with what is read back.

    An adapter gets what the folder of its base lacks, which the seed of the job has drawn: a new pooler, e.g.

    Raises:
        CheckpointError: another seed gives another model than the trained one, or other losses of made-up records.

    Guarantees:
        tests/train/test_saved.py: test_the_model_that_is_read_back_is_the_trained_one,
        test_what_is_lost_is_named_before_the_run_says_saved.
    """
    model.save_pretrained(folder)
    if isinstance(processing, Front):
        save_features(folder, processing)
    else:
        processing.save_pretrained(folder)
    other = dataclasses.replace(job, training=dataclasses.replace(job.training, seed=job.training.seed + 1))
    with one_line(f"a model in {str(folder)!r} that can be read back. {kept}"):
        again, processing_again = load_trained(other, folder, processing)
        if job.strategy in ADAPTERS and (lacking := _different(model, again)):
            path = folder / "adapter_model.safetensors"  # PEFT gives each tensor in it to the place of its name
            save_file({**load_file(path), **lacking}, path, metadata={"format": "pt"})
            again, _ = load_trained(other, folder, processing)
        inputs, read = made_up_batch(job, processing), made_up_batch(job, processing_again)
        differ = [*_different(model, again), *(f"inputs.{name}" for name in inputs if not _same(inputs, read, name))]
        own, theirs = _losses(job, model, inputs), _losses(job, again, read)
    if not torch.allclose(own, theirs, rtol=_DECIMALS, atol=_DECIMALS, equal_nan=True):
        differ.append("losses")
    refuse(
        (differ, CheckpointError(
            f"Expected the model in {str(folder)!r} to be the trained one when it is read back, got others for "
            f"{shorten(differ)}. Do not use it. {kept}.")),
    )  # fmt: skip


def load_trained(job: Job, folder: Path, processing: Any) -> tuple[Any, Any]:
    """The model and the processing in a folder of `save_model`, as users read them; adapters on the base of the job."""
    if job.task in FEATURES:
        return load_features(folder)
    saved = dataclasses.replace(job, model=dataclasses.replace(
        job.model, path=str(folder), tokenizer=None, gguf_file=None, init="pretrained", new_tokens=None,
    ))  # fmt: skip
    if job.strategy not in ADAPTERS:
        return load_base(saved, processing).train(False), load_processing(saved)
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base(job, processing), folder).train(False), load_processing(saved)


def _different(model: nn.Module, again: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers in float that are not the same bit for bit; weights in 4 bits are packed anew."""
    named = {name for part in (model.named_parameters, model.named_buffers) for name, _ in part(remove_duplicate=False)}
    own = {name: value for name, value in model.state_dict().items() if name in named and value.is_floating_point()}
    read = again.state_dict()
    return {name: own[name].cpu().clone().contiguous() for name in own if not _same(own, read, name)}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> bool:
    own, read = one[name].cpu(), other.get(name, torch.zeros(0)).cpu()
    return own.shape == read.shape and torch.allclose(own, read, rtol=0, atol=0, equal_nan=True)


def _losses(job: Job, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Losses of a batch in evaluation mode, one of each record; the model stays in the mode that it was in."""
    device = next(model.parameters()).device
    first = next(name for name, value in model.named_parameters() if value.is_floating_point())
    there = {name: value.to(device) for name, value in batch.items()}
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=job.training.bf16)
    with evaluating(model), torch.no_grad(), autocast:
        forward, params = functionalize(model, [first])
        losses: Any = make_loss_fn(forward, loss_of_record(job))(params, there)
    return cast(Tensor, losses.float().cpu())


def made_up_batch(job: Job, processing: Any) -> dict[str, Tensor]:
    """A batch of two made-up records of a job: nothing in it is private."""
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, unit_column=None, max_records_per_unit=None))
    with TemporaryDirectory() as name:
        folder = Path(name)
        made = [record_of(job, processing, made_up_row(job, number, folder), folder) for number in range(2)]
        records = with_features(processing, without_references(job, made))
        return cast(dict[str, Tensor], collator(job, processing)(records))
