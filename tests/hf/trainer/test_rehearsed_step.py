"""What follows a private step is tried before the first one: optimizers, schedules, callbacks and metrics of the user."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch.optim import lr_scheduler
from trainer_cases import NOISY, PRIVACY, again, classifier, labelled, private, trained, training_arguments
from transformers import TrainerCallback, get_linear_schedule_with_warmup

from dpfunc.checkpoint.journal import count_steps
from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer import _rehearsal
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.rng import insecure_key

KEY = insecure_key(78)
STEPS = 6


class Attributes(torch.optim.SGD):
    """An optimizer that keeps numbers outside of its state, and in its groups."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        self.param_groups[0]["seen"] = self.param_groups[0].get("seen", 0) + self.calls
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
                param.data.sub_(0.1 * self.calls * param.grad)


class Ahead(torch.optim.Optimizer):
    """An optimizer around another one, whose state is not its own."""

    def __init__(self, params):
        self.inside = [torch.optim.SGD(params, lr=0.5, momentum=0.9)]
        super().__init__(self.inside[0].param_groups, {})

    def step(self, closure=None):
        self.inside[0].step()


class ScheduleFree(torch.optim.SGD):
    """An optimizer that steps in training mode only, which it does not begin in."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)
        self.eval()

    def train(self):
        self.param_groups[0]["train_mode"] = True

    def eval(self):
        self.param_groups[0]["train_mode"] = False

    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        super().step()


def trainer_of(folder, optimizer=None, schedule=None, privacy=NOISY, **options):
    """A run of six steps; the optimizer is of its own kind, or the Trainer's."""
    model = classifier(dropout=0.0)
    made = None if optimizer is None else optimizer(model.parameters())
    chosen = None if schedule is None else schedule(made)
    size = {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1}  # one microbatch, but in large draws
    changes = {"max_steps": STEPS, **size, **options.pop("changes", {})}
    return private(
        model, folder, data=labelled(40), privacy=privacy, optimizers=(made, chosen), changes=changes, **options
    )


def refused(folder, trainer, message):
    """The run ends before its first step, and a rehearsal finds the same."""
    for act in (trainer.rehearse, trainer.train):
        with pytest.raises(InvalidArgument, match=message) as caught:
            act()
        assert "Nothing was spent" in str(caught.value)
    assert count_steps(folder / "privacy_journal.jsonl") == 0
    assert trainer.ledger.num_steps == 0


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def of(rate):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, rate)


FAULTS = {  # optimizer, schedule, message
    "an optimizer of sparse gradients": (lambda params: torch.optim.SparseAdam([*params]), None, "an optimizer that steps, got RuntimeError: SparseAdam"),
    "an optimizer that needs a closure": (lambda params: torch.optim.LBFGS(params), None, "an optimizer that steps, got TypeError"),
    "a schedule of other steps, which ends": (sgd, lambda made: lr_scheduler.OneCycleLR(made, 0.5, total_steps=4), "a schedule of 6 steps, got at step 5 ValueError: Tried to step 5 times"),
    "a schedule of fewer steps": (sgd, lambda made: get_linear_schedule_with_warmup(made, 0, 2), "whose rates are 0 from step 2 on"),
    "a schedule that divides by zero": (sgd, of(lambda step: 1 / (3 - step)), "a schedule of 6 steps, got at step [34] ZeroDivisionError"),
    "a rate that is no number": (sgd, of(lambda step: float("nan") if step == 4 else 1.0), r"rates >= 0 in all steps, got \[nan\] at step 4"),
    "a rate below zero": (sgd, of(lambda step: 1.0 - step / 3), r"rates >= 0 in all steps, got \[-"),
    "a complex rate": (sgd, of(lambda step: (0.5 - step) ** 0.5), "TypeError"),
}  # fmt: skip


class Averaged(ScheduleFree):
    """A schedule-free optimizer whose parameters are others in each of its modes."""

    def train(self):
        self._move(train_mode=True)

    def eval(self):
        self._move(train_mode=False)

    @torch.no_grad()
    def _move(self, train_mode):
        group = self.param_groups[0]
        if group.setdefault("train_mode", train_mode) != train_mode:
            for param in group["params"]:
                param.mul_(2.0 if train_mode else 0.5)
        group["train_mode"] = train_mode


def test_a_run_ends_with_the_average_of_a_schedule_free_optimizer(tmp_path):
    """What is saved after it would be a point on the way, as noisy as the last steps, which cost the budget."""
    trainer = trainer_of(tmp_path, Averaged)
    at_the_end = []

    class Noted(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            at_the_end.append({name: value.clone() for name, value in trained(trainer.model).items()})

    trainer.add_callback(Noted())
    trainer.train()
    assert all(torch.equal(value, at_the_end[0][name] / 2) for name, value in trained(trainer.model).items())


@pytest.mark.parametrize("name", FAULTS)
def test_what_follows_a_step_is_found_before_it(tmp_path, name):
    optimizer, schedule, message = FAULTS[name]
    refused(tmp_path, trainer_of(tmp_path, optimizer, schedule), message)


SOUND = {  # name -> optimizer, schedule, arguments
    "AdamW of the Trainer": (None, None, {"weight_decay": 0.1, "warmup_steps": 2}),
    "Adafactor of the Trainer": (None, None, {"optim": "adafactor"}),
    "RMSprop of the Trainer": (None, None, {"optim": "rmsprop", "lr_scheduler_type": "cosine"}),
    "a plateau": (None, None, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}),
    "attributes": (Attributes, None, {}),
    "an optimizer in another one": (Ahead, None, {}),
    "a schedule-free one": (ScheduleFree, None, {}),
    "a momentum": (lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9), lambda made: lr_scheduler.OneCycleLR(made, 0.5, total_steps=STEPS + 1), {}),
    "several schedules": (sgd, lambda made: lr_scheduler.SequentialLR(made, [lr_scheduler.LinearLR(made), lr_scheduler.ExponentialLR(made, 0.5)], [3]), {}),
    "no rate at all": (None, None, {"learning_rate": 0.0}),
}  # fmt: skip


# SequentialLR of torch calls its parts in a way that it deprecates.
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SOUND)
def test_a_run_after_it_has_the_same_bits(tmp_path, name, monkeypatch):
    """Of its parameters, its optimizer and its schedule; also after a rehearsal that was asked for."""
    optimizer, schedule, changes = SOUND[name]
    found = []
    for kind in ("asked", "own", "none"):
        if kind == "none":
            monkeypatch.setattr(_rehearsal, "rehearse_step", lambda *args: None)
        evaluated = labelled(16) if "eval_steps" in changes else None
        trainer = trainer_of(tmp_path / kind, optimizer, schedule, changes=changes, eval_dataset=evaluated, key=KEY)
        if kind == "asked":
            trainer.rehearse(callbacks=True)
        again(KEY)
        trainer.train()
        rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
        made = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        plain = {
            each: value for each, value in vars(made).items() if isinstance(value, (int, float)) and each[0] != "_"
        }
        groups = [{each: value for each, value in group.items() if each != "params"} for group in made.param_groups]
        found.append((rates, plain, groups, trainer.lr_scheduler.last_epoch, trained(trainer.model)))
    for one in found[:2]:
        assert one[:4] == found[2][:4]
        assert all(torch.equal(one[4][each], found[2][4][each]) for each in one[4])


class Told(TrainerCallback):
    """Notes what it is told, outside of itself and inside."""

    def __init__(self, outside):
        self.outside, self.inside = outside, []

    def _note(self, event, args, state, **more):
        self.inside.append(event)
        self.outside.append((event, state.trial_name, state.global_step, more))

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        assert optimizer.param_groups
        assert lr_scheduler.last_epoch > 0
        control.should_training_stop = state.trial_name == "rehearsal"
        with torch.no_grad():
            next(model.parameters()).add_(0.0 if state.trial_name is None else 1.0)
        self._note("on_step_end", args, state)

    def on_log(self, args, state, control, logs, **kwargs):
        self._note("on_log", args, state, logs=logs)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self._note("on_evaluate", args, state, metrics=metrics)

    def on_save(self, args, state, control, **kwargs):
        from pathlib import Path

        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._note("on_save", args, state, files=sorted(path.name for path in folder.glob("*.safetensors")))

    def __deepcopy__(self, memo):
        made = Told(self.outside)
        made.inside = copy.deepcopy(self.inside, memo)
        return made


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


EVERY = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


def test_callbacks_are_told_where_one_asks(tmp_path):
    """Copies of them, and never by `train` or a dry run; the run after it is not stopped, and as without it."""
    outside: list = []
    callback = Told(outside)
    options = {"callbacks": [callback], "eval_dataset": labelled(16), "compute_metrics": accuracy, "changes": EVERY}
    trainer = trainer_of(tmp_path, privacy=PRIVACY, key=KEY, **options)
    trainer.rehearse()
    assert outside == []
    before = trained(trainer.model)
    before = {name: value.clone() for name, value in before.items()}
    trainer.rehearse(callbacks=True)
    assert [event for event, *_ in outside] == ["on_step_end", "on_log", "on_log", "on_evaluate", "on_save"]
    assert {(name, step) for _, name, step, _ in outside} == {("rehearsal", 1)}
    told = {event: more for event, _, _, more in outside}
    assert told["on_evaluate"]["metrics"].keys() == {"eval_loss", "eval_accuracy"}
    assert told["on_save"]["files"] == ["model.safetensors"]
    rehearsed = {name for event, _, _, more in outside if event == "on_log" for name in more["logs"]}
    assert callback.inside == []
    assert (trainer.state.global_step, trainer.state.log_history, trainer.state.trial_name) == (0, [], None)
    assert all(torch.equal(before[name], value) for name, value in trained(trainer.model).items())
    assert not list(tmp_path.glob("checkpoint-*"))
    outside.clear()
    trainer.train()
    assert callback.inside == [event for event, *_ in outside]
    assert {name for _, name, _, _ in outside} == {None}
    assert [step for event, _, step, _ in outside if event == "on_step_end"] == [1, 2, 3, 4, 5, 6]
    logged = {name for event, _, _, more in outside if event == "on_log" for name in more["logs"]}
    assert rehearsed - logged == set()  # nothing is told that a run does not log


def raising(event):
    def act(self, args, state, control, **kwargs):
        raise KeyError("mine")

    return type("Raising", (TrainerCallback,), {event: act})()


@pytest.mark.parametrize(
    "event", ["on_step_end", "on_pre_optimizer_step", "on_log", "on_evaluate", "on_save", "on_train_end"]
)
def test_a_callback_that_fails_is_found_where_one_asks(tmp_path, event):
    options = {"eval_dataset": labelled(16), "changes": EVERY}
    trainer = trainer_of(tmp_path, callbacks=[raising(event)], **options)
    trainer.rehearse()
    own = trainer.callback_handler
    with pytest.raises(InvalidArgument, match=f"callbacks that take {event}, got KeyError: 'mine'.* Nothing was spent"):
        trainer.rehearse(callbacks=True)
    assert trainer.callback_handler is own
    assert trainer.args.output_dir == str(tmp_path)


def test_a_log_of_a_private_run_has_no_loss(tmp_path):
    """Which a callback that was written for another Trainer may read."""

    class Reads(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            assert "loss" in logs

    with pytest.raises(InvalidArgument, match="callbacks that take on_log, got AssertionError"):
        trainer_of(tmp_path, callbacks=[Reads()]).rehearse(callbacks=True)


def test_callbacks_that_cannot_be_called_are_found_without_a_call(tmp_path):
    class Narrow(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            raise KeyError("called")

        def on_save(self, args, state, control):
            raise KeyError("called")

    message = r"Narrow.on_save to take what the Trainer gives: got an .* 'model'\. Write it as on_save\(self, args,"
    refused(tmp_path, trainer_of(tmp_path, callbacks=[Narrow()]), message)


def test_a_callback_that_cannot_be_copied_is_not_told(tmp_path):
    class Locked(TrainerCallback):
        def __init__(self):
            self.lock = threading.Lock()

        def on_step_end(self, args, state, control, **kwargs):
            raise KeyError("called")

    trainer = trainer_of(tmp_path, callbacks=[Locked()])
    trainer.rehearse()
    with pytest.raises(InvalidArgument, match="callbacks that can be copied, got TypeError.*Nothing was spent"):
        trainer.rehearse(callbacks=True)


def test_a_callback_with_the_trainer_in_it(tmp_path):
    """One that evaluates tells copies alone, and its own log stays out of that of the run."""

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.trainer.evaluate()

    outside: list = []
    first = Evaluates()
    trainer = trainer_of(tmp_path, callbacks=[first, Told(outside)], eval_dataset=labelled(16))
    first.trainer = trainer
    trainer.rehearse(callbacks=True)
    assert {name for _, name, _, _ in outside} == {"rehearsal"}
    assert trainer.state.log_history == []


class Batches:
    """A metric of batches one by one, which ends with the last one."""

    def __init__(self, fault=None):
        self.fault, self.seen = fault, 0

    def __call__(self, prediction, compute_result):
        self.seen += len(prediction.label_ids)
        if self.fault:
            return {"seen": getattr(prediction, self.fault)}
        if not compute_result:
            return None
        seen, self.seen = self.seen, 0
        return {"seen": float(seen)}


def test_metrics_of_batches_are_tried(tmp_path):
    changes = {"batch_eval_metrics": True, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 8}
    options = {"eval_dataset": labelled(20), "changes": changes}
    refused(tmp_path / "a", trainer_of(tmp_path / "a", compute_metrics=Batches("scores"), **options), "compute_metrics")
    trainer = trainer_of(tmp_path / "b", compute_metrics=Batches(), **options)
    trainer.train()
    assert [line["eval_seen"] for line in trainer.state.log_history if "eval_seen" in line] == [20.0, 20.0]


def test_a_rehearsal_computes_gradients(tmp_path):
    """Of a loss that has none; in a dry run as well."""

    def rounded(forward, params, batch):
        return forward(params, **batch).logits.detach().sum(1)

    model = classifier()
    args = training_arguments(tmp_path, max_steps=STEPS)
    trainer = DPTrainer(model, args, privacy=NOISY, train_dataset=labelled(40), loss=rounded)
    training = model.training
    with pytest.raises((InvalidArgument, RuntimeError)):
        trainer.rehearse()
    assert model.training == training
