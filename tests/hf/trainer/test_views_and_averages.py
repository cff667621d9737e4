"""Views of records, averages of parameters and a bound that adapts, by arguments of the Trainer."""

from __future__ import annotations

import pytest
import torch
import trainer_cases as cases
from transformers import get_linear_schedule_with_warmup
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import dpfunc
from dpfunc.clipping import Adaptive
from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.sampling import mean_over_views
from dpfunc.state import allow_repeat
from dpfunc.updates import Ema, LastSteps

KEY = dpfunc.rng.insecure_key
VALUES = {"dp_noise_multiplier": 1.0, "dp_delta": 1e-3, "dp_max_grad_norm": 1.0}
COLUMNS = ("input_ids", "attention_mask", "labels")


class Masked(torch.utils.data.Dataset):
    """Records of which a token is another one each time that they are read."""

    def __init__(self):
        self.records = cases.labelled()

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        record = {name: self.records[index][name] for name in COLUMNS}
        ids = record["input_ids"].clone()
        ids[torch.randint(0, 6, ())] = torch.randint(1, 50, ())
        return {**record, "input_ids": ids}


def sgd(params):
    optimizer = torch.optim.SGD(params, lr=0.1)
    return optimizer, get_linear_schedule_with_warmup(optimizer, 0, 3)


def test_views_are_those_of_a_plain_loop(tmp_path):
    """Drawn by the loader, averaged before the clip: bit for bit; and not the run with one view."""
    made = {}
    for views in (2, 1):
        model = cases.classifier(dropout=0.0)
        trainer = cases.private(
            model, tmp_path / str(views), key=KEY(4), data=Masked(), data_name="masked", changes={"max_steps": 3},
            privacy=PrivacyArguments(**VALUES, dp_views=views), optimizers=sgd(model.parameters()),
        )  # fmt: skip
        trainer.train()
        made[views] = cases.trained(trainer.model)
    model = cases.classifier(dropout=0.0)
    forward, _ = functionalize(model.eval())
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss_fn = mean_over_views(make_loss_fn(forward, "sequence_classification"))
    dp_step = dpfunc.make_dp_step(loss_fn, trainer.plan, microbatch_size=4)
    state, (optimizer, schedule) = allow_repeat(dp_step.init(params, KEY(4))), sgd(params.values())
    for batch in trainer.plan.loader(Masked(), state, views=2):
        assert batch["input_ids"].shape[1:] == (2, 6)
        grads, state, _ = dp_step({name: p.detach() for name, p in params.items()}, batch, state)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        schedule.step()
    assert cases.same(made[2], params)
    assert not cases.same(made[1], made[2])


@pytest.mark.parametrize(("text", "average"), [("ema:0.5", Ema(0.5)), ("last:3", LastSteps(3, 4))])
def test_the_model_at_the_end_is_the_average(tmp_path, text, average):
    """Over the parameters after each step, also of a run that was stopped and goes on from a checkpoint."""
    seen = []
    privacy = PrivacyArguments(**VALUES, dp_average=text)
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    keep = cases.at("on_step_end", lambda args, state, control: seen.append(copies(whole)))
    whole = cases.private(
        cases.classifier(), tmp_path / "whole", key=KEY(5), privacy=privacy, changes=changes, callbacks=[keep]
    )
    whole.train()
    averaged = average.begin()
    for params in seen:
        averaged = average.add(averaged, params)
    assert len(seen) == 4
    assert cases.same(cases.trained(whole.model), averaged["params"])
    assert not cases.same(averaged["params"], seen[-1])
    options = {"privacy": privacy, "changes": changes}
    cases.private(cases.classifier(), tmp_path / "parts", key=KEY(5), callbacks=[cases.stop(2)], **options).train()
    second = cases.private(cases.classifier(seed=9), tmp_path / "parts", **options)
    second.train(resume_from_checkpoint=True)
    assert cases.same(cases.trained(second.model), cases.trained(whole.model))


def test_an_average_is_complete_for_every_callback(tmp_path):
    """At the end it is the model's; a checkpoint that a signal asks for behind a step has that step, too."""

    def signalled(args, state, control):
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback):
                callback.jit_manager.is_checkpoint_requested = True

    ends = []
    end = cases.at("on_train_end", lambda args, state, control: ends.append(copies(trainer)))
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "enable_jit_checkpoint": True}
    trainer = cases.private(
        cases.classifier(), tmp_path, privacy=PrivacyArguments(**VALUES, dp_average="ema:0.5"), changes=changes,
        callbacks=[cases.at("on_optimizer_step", signalled, 1), end],
    )  # fmt: skip
    trainer.train()
    assert cases.same(ends[0], cases.trained(trainer.model))
    assert cases.same(ends[0], trainer._averaging.state["params"])
    assert torch.load(tmp_path / "checkpoint-2" / "average.pt", weights_only=True)["step"] == 2


def copies(trainer):
    return {name: value.clone() for name, value in cases.trained(trainer.model).items()}


def test_a_bound_that_adapts_is_logged(tmp_path):
    """It is public; the journal and the ledger are those of a bound that stays."""
    seen = cases.Seen()
    values = {**VALUES, "dp_max_grad_norm": None, "dp_clip": "adaptive"}
    trainer = DPTrainer(
        cases.classifier(), cases.training_arguments(tmp_path, max_steps=3, logging_steps=1),
        privacy=PrivacyArguments(**values), train_dataset=cases.labelled(), callbacks=[seen],
    )  # fmt: skip
    trainer.train()
    assert trainer.plan.clip == Adaptive()
    bounds = [line["privacy/max_grad_norm"] for line in seen.logs if "privacy/max_grad_norm" in line]
    assert len(set(bounds)) == 3
    assert trainer.ledger == trainer.plan.ledger()


def test_arguments():
    assert PrivacyArguments(**VALUES, dp_clip="adaptive").clip() == Adaptive(1.0)
    assert PrivacyArguments(**VALUES, dp_average="last:20").average(5) == LastSteps(5, 5)
    for bad, message in (
        ({"dp_average": "ema"}, "ema:DECAY, or last:COUNT"), ({"dp_average": "last:2.5"}, "ema:DECAY"),
        ({"dp_average": "ema:1.5"}, "decay"), ({"dp_average": "last:0"}, "count"), ({"dp_views": 0}, "dp_views"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            PrivacyArguments(**VALUES, **bad)


def test_refused(tmp_path):
    changes = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with pytest.raises(InvalidArgument, match="one model at the end"):
        cases.private(
            cases.classifier(), tmp_path, privacy=PrivacyArguments(**VALUES, dp_average="ema:0.9"), changes=changes,
            eval_dataset=cases.labelled(),
        )  # fmt: skip
