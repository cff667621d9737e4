"""The Trainer of Transformers with private steps: change the class, add PrivacyArguments.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput, align_special_tokens

from dpfunc import distributed
from dpfunc._utils.files import remove, sweep
from dpfunc._utils.locks import only_process
from dpfunc._utils.validation import refuse, total_steps
from dpfunc.accounting import Ledger
from dpfunc.accounting.record import ONE_RECORD, RECORD_FILE, Record
from dpfunc.batches import batch_size
from dpfunc.budget import Budget
from dpfunc.checkpoint import Checkpoint
from dpfunc.checkpoint.chain import known_end
from dpfunc.checkpoint.journal import Journal, as_charged
from dpfunc.checkpoint.not_written import writing
from dpfunc.checkpoint.record import make_record
from dpfunc.checkpoint.saving import save
from dpfunc.errors import InvalidArgument, NotWritten
from dpfunc.functional.fsdp import settle
from dpfunc.hf._facts import base_model, facts_of_model
from dpfunc.hf.preferences import Preference, margins
from dpfunc.hf.tasks import TASKS, infer_task, make_loss_fn
from dpfunc.hf.trainer import _files as files
from dpfunc.hf.trainer import _fsdp as fsdp
from dpfunc.hf.trainer import _run as runs
from dpfunc.hf.trainer import _settings as settings
from dpfunc.hf.trainer._data import evaluated, refuse_labels, refuse_padding, refuse_records
from dpfunc.hf.trainer._recipes import PHYSICAL, new_head, one_class, short_way, with_recipe
from dpfunc.hf.trainer._rehearsal import refuse_callbacks, rehearse_after_gradients, rehearse_gradients
from dpfunc.hf.trainer._saved import beside_adapters, complete, read_adapters
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.vision_language._strategies import image_text_loss
from dpfunc.plan import Plan
from dpfunc.rng import Key, secure_key
from dpfunc.sampling import data_name, mean_over_views
from dpfunc.sampling.loader import Collate, Draws, check_readable, data_loader
from dpfunc.sampling.records import check_repeatable
from dpfunc.state import StepState
from dpfunc.step import DPStep, make_dp_step
from dpfunc.updates import set_grads

_logger = logging.getLogger(__name__)

_NOT_RESUMED = "Nothing was resumed"
_SCHEDULER = "scheduler.pt"  # of the Trainer
_AVERAGE = "average.pt"
_PER_SAMPLE = {"max_grad_norm": 0.0, "average_tokens_across_devices": False}  # no mean of gradients or losses is used
_TIMES = ("_runtime", "_per_second")  # of steps, which take as long as their draws are large
LOGGED_LOSS = "the training loss, which was logged (dp_log_unreleased)"
OLD_BOUND = "the bound of clipping at the end: the run was interrupted, and max_grad_norm is that of an earlier step"


class DPTrainer(Trainer):  # type: ignore[misc]  # has no types
    """A `transformers.Trainer` whose optimizer gets private gradients, and nothing else of the training data.

    Each optimizer step takes one Poisson batch with an expected size of per_device_train_batch_size *
    gradient_accumulation_steps, clips the gradient of each sample, adds noise, and gives the mean to any optimizer and
    scheduler. Evaluation is the Trainer's own: metrics on private records are not covered by epsilon. Processes that
    torchrun starts share each draw: plan, epsilon and result are those of one process. With `args.fsdp` each of them
    holds a part of the model, which is divided here.

    Args:
        model: a model of Transformers or PEFT; the parameters that require gradients are trained.
        args: `TrainingArguments`. What would break privacy is refused by name.
        data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, optimizers,
            optimizer_cls_and_kwargs, preprocess_logits_for_metrics: as in `Trainer`. train_dataset needs a length.
        model_init, compute_loss_func: refused.
        privacy: what decides privacy.
        loss: the name of a task, or a function (forward, params, batch) -> one loss a sample. None: from the model.
        key: root of the randomness, as secret as the data. None takes `secure_key()`. A key starts one run.
        ledger: what earlier phases on the same records have cost.
        budget: budget of the data set, which says what was spent; the run reserves before its first step, and settles
            at its end. dp_epsilon is for all runs together.
        data_name: a name of the data set (a version, a hash); None reads them. The same for a resumed run.
        unit: what a record of train_dataset is, e.g. "one person" where it is the list of a person's texts; for the
            accounting. See docs/guides/trainer.md.

    Raises:
        InvalidArgument: naming what cannot be used under differential privacy; nothing was spent.

    Guarantees:
        tests/hf/trainer/test_trainer.py: the parameters are those of a plain loop over `dp_step`
        (test_the_trainer_equals_a_plain_loop); tests/hf/trainer/test_files.py: a killed run goes on bit for
        bit (test_a_killed_run_resumes_bit_for_bit).
    """

    def __init__(
        self, model: nn.Module, args: TrainingArguments | None = None, data_collator: Any = None,
        train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None, compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None, callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Tensor] | None = None, *,
        privacy: PrivacyArguments, loss: runs.Loss | None = None, key: Key | None = None, ledger: Ledger | None = None,
        data_name: str | None = None, unit: str = ONE_RECORD, budget: Budget | None = None,
    ) -> None:  # fmt: skip
        settings.refuse_values(self, DPTrainer, {
            "model": model, "privacy": privacy, "key": key, "model_init": model_init,
            "compute_loss_func": compute_loss_func, "unit": unit, "data_name": data_name,
        })  # fmt: skip
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self.args: Any = args
        ledger = budget.spent() if budget is not None and ledger is None and privacy.dp_enabled else ledger
        self._budget = budget
        unasked = args.per_device_train_batch_size
        self.recipe, args, privacy = with_recipe(model, train_dataset, args, privacy, ledger)
        if self.recipe is not None:
            unasked = min(PHYSICAL, self.recipe.expected_batch_size)
            refuse(
                (optimizer_cls_and_kwargs is not None,
                 "Expected optimizer_cls_and_kwargs=None with dp_recipe, which has an optimizer and a rate of its own, "
                 f"got {optimizer_cls_and_kwargs}. Leave one of them out."),
            )  # fmt: skip
        self.privacy = privacy
        self.logical_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.physical_batch_size = privacy.dp_physical_batch_size or unasked
        self._loss, self._given_key, self._earlier, self._data_name, self._unit = loss, key, ledger, data_name, unit
        self._start: runs.Start | None = None
        self._run: runs.Run | None = None
        self._twin: Callable[[Mapping[str, Any]], Tensor] | None = None
        self._warn_at, self._warned_of_one_class = math.inf, False
        self._told: list[Any] = []  # telemetry since the last line of the log
        self._averaging: runs.Averaging | None = None
        self._division: fsdp.Division | None = None
        self._whole: dict[str, Tensor] | None = None
        settings.refuse_arguments(args, privacy)
        if privacy.dp_enabled:
            one_draw_a_step = {"per_device_train_batch_size": self.logical_batch_size, "gradient_accumulation_steps": 1}
            args = settings.changed(args, {**one_draw_a_step, **_PER_SAMPLE})
            self._division, args = fsdp.shard(model, args, privacy, optimizers)
        self._ranks = runs.ranks_of(args) if self._division is None else self._division.ranks
        super().__init__(
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, compute_metrics=compute_metrics, callbacks=callbacks,
            optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        self.loss_is_scaled_for_ga = False  # of the twin: a mean over samples
        if privacy.dp_enabled:
            runs.without_times(self.callback_handler.callbacks)
            self._refuse_unread()

    def create_accelerator_and_postprocess(self) -> None:
        """As in `Trainer`. In a private run Accelerate neither wraps the model nor shards it once more."""
        with fsdp.without_fsdp() if self.privacy.dp_enabled else nullcontext():
            super().create_accelerator_and_postprocess()
        if not self.privacy.dp_enabled:
            return
        settings.refuse_outside(settings.ACCELERATOR, settings.attributes(self.accelerator))
        if self._ranks is not None:
            self.accelerator: Any = runs.Replicas(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As in `Trainer`; a sharded model stays where it was sharded."""
        if self._division is None:
            super()._move_model_to_device(model, device)

    # What a run is

    @cached_property
    def _task(self) -> runs.Loss:
        return infer_task(self.model) if self._loss is None else self._loss

    @property
    def _task_of_records(self) -> Any:
        """The task of single records, also where people are trained on: theirs are evaluated one by one."""
        return getattr(self._task, "sample_loss", self._task)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run; found once, before training."""
        n = self.privacy.public_size(check_readable(self.train_dataset, "train_dataset"))
        plan = self.privacy.plan(n, self.logical_batch_size, self._num_steps(n), self._earlier)
        return replace(plan, spent=None)  # a run begins with the ledger below; a resumed one has its own

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def ledger(self) -> Ledger:
        """Privacy spent so far, earlier phases included."""
        return self._spent_before if self._run is None else self._run.state.ledger

    @property
    def _spent_before(self) -> Ledger:
        return Ledger(adjacency=self.privacy.adjacency) if self._earlier is None else self._earlier

    @cached_property
    def _beside_adapters(self) -> list[str]:
        """Parameters that are saved with an adapter, and that PEFT does not save: see `beside_adapters`."""
        return beside_adapters(self.model) if self._division is None else []

    def _steps_per_epoch(self, num_records: int) -> int:
        return -(-num_records // int(self.logical_batch_size))

    def _num_steps(self, num_records: int) -> int:
        given, epochs = int(self.args.max_steps), float(self.args.num_train_epochs)
        return given if given > 0 else total_steps(self._steps_per_epoch(num_records), 1, epochs)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The expected logical batch of a private run, for all processes together."""
        return self.logical_batch_size if self.privacy.dp_enabled else int(super().get_total_train_batch_size(args))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, or the Adam of a recipe, in which a new head beside adapters has its own rate."""
        if self.optimizer is None and self.recipe is not None:
            params, head = runs.trainable(self.model), new_head(self.recipe.strategy, self.model)
            self.optimizer: Any = self.recipe.optimizer(params.values(), head.values())
        return super().create_optimizer(model)  # type: ignore[no-any-return]  # of Trainer

    def _refuse_unread(self) -> None:
        """Refuse settings that the optimizer does not read; nobody knows what another `create_optimizer` reads."""
        if self.recipe is not None or type(self).create_optimizer is not DPTrainer.create_optimizer:
            return
        given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        made = partial(self.get_optimizer_cls_and_kwargs, model=self.model)
        settings.refuse_unread(self.args, (lambda args: given) if given else made)

    # Training

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:  # fmt: skip
        """Train to the end of the plan or of the budget, whichever is first.

        Args:
            resume_from_checkpoint: True, or the path of a checkpoint: go on with that run, bit for bit. With True a
                folder in which nothing was released begins it.
            trial: refused. ignore_keys_for_eval: as in `Trainer`.

        Returns:
            `TrainOutput`, with the privacy spent in its metrics. `training_loss` is NaN: it is not released.

        Raises:
            InvalidArgument, UnsupportedModel, BudgetExhausted, CheckpointError: before anything is spent, e.g. because
                another process trains into output_dir. CheckpointError also at the end, if the journal has other steps.
        """
        if not self.privacy.dp_enabled:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        if trial is not None:
            raise InvalidArgument("Expected trial=None: each trial is a run on the private records, with its own cost.")
        if self.privacy.dp_dry_run:
            return self._dry_run()
        with ExitStack() as held:
            distributed.once(self._ranks, lambda: held.enter_context(only_process(self._folder)))
            return self._train(resume_from_checkpoint, ignore_keys_for_eval)

    def _train(self, resume_from_checkpoint: str | bool | None, ignore_keys_for_eval: list[str] | None) -> TrainOutput:
        self._prepare(resume_from_checkpoint)
        resumed = None if self._start is None or self._start.resumed is None else self._start.resumed.path.parents[1]
        done = False
        try:
            output = super().train(None if resumed is None else str(resumed), None, ignore_keys_for_eval)
            done = True
            if self._averaging is None and not self.args.load_best_model_at_end:  # which have written other values
                runs.set_mode(self.optimizer, "eval")
        finally:
            self._start = None
            if not done and self._run is not None and distributed.is_writer(self._ranks):  # the others may not come
                with suppress(NotWritten):  # which would hide why the run ended; the journal has its steps
                    self._write_accounting(ended=False)
        distributed.once(self._ranks, lambda: self._write_accounting(ended=True))
        distributed.once(self._ranks, self._settle)
        return output._replace(training_loss=math.nan)

    def _settle(self) -> None:
        """Settle a finished run, whose model must not get lost where the database cannot be reached."""
        try:
            if self._budget is not None:
                self._budget.settle(self._folder)
        except NotWritten as error:
            self._warn(f"The run stays charged all that it has reserved, until `dpfunc budget settle`: {error}")

    def _write_accounting(self, *, ended: bool) -> None:
        """Write what was spent, with every step in the journal: Ctrl-C can come between a release and its state."""
        if ended and self._run is not None:
            files.check_journal(self._folder / files.JOURNAL, self._run.state)
        record = self._accounting(self._folder / files.JOURNAL)
        if record.global_step:
            with writing(self._folder / RECORD_FILE, record.ledger, self.plan):
                files.write_accounting(self._folder, record)

    def rehearse(self, *, callbacks: bool = False) -> None:
        """Look for errors that would end a private run halfway; nothing is trained, logged, kept or spent.

        Every record is collated, and its token ids, length and label are held against the model; the gradient of the
        first records is computed and dropped; a few records are evaluated, with metrics; the optimizer steps with
        made-up gradients, and the schedule to its end; the weights are saved, into a folder that is removed, and read
        back; a budget is asked if it has room. `train` does the same before its first step, and `dp_dry_run` in its
        place.

        Args:
            callbacks: tell copies of your callbacks of a step, an evaluation and a save; what they do outside of
                themselves (files, loggers, uploads) happens. `state.trial_name` is "rehearsal", `args.output_dir` a
                folder that is removed. `train` and `dp_dry_run` only look at the arguments that they take.

        Raises:
            InvalidArgument, UnsupportedModel, CheckpointError: what the run would fail with, and what to do.

        Guarantees:
            tests/hf/trainer/test_rehearsal.py: test_one_record_in_the_midst_of_many,
            test_an_evaluation_that_fails_is_found_before_the_first_step,
            test_adapters_are_read_back_before_the_first_step, test_a_rehearsal_changes_no_bit_of_the_run;
            tests/hf/trainer/test_rehearsed_step.py: test_what_follows_a_step_is_found_before_it,
            test_callbacks_are_told_where_one_asks; tests/hf/trainer/test_saved.py:
            test_what_is_not_saved_is_found_before_the_first_step.
        """
        self._refuse()
        limit = self.plan.step_limit(self._spent_before)
        if self._budget is not None:
            whole = replace(self.plan, num_steps=limit, spent=self._earlier)
            distributed.once(self._ranks, partial(self._budget.check, whole, unit=self._unit))
        self._warn(self._check_data())
        if self._division is None:
            rehearse_gradients(self)
            rehearse_after_gradients(self, limit, callbacks=callbacks)

    def _refuse(self) -> None:
        """Refuse a model, an optimizer and callbacks with which a run would end, or train something else.

        The model gets the special tokens of its tokenizer before, as `Trainer` begins a run.
        """
        if isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin) and hasattr(
            self.model, "config"
        ):
            align_special_tokens(self.model, self.processing_class)
        settings.refuse_model(self.model)
        settings.refuse_optimizer(self.optimizer, runs.trainable(self.model))
        callbacks = self.callback_handler.callbacks
        refuse_callbacks(callbacks)
        settings.refuse_uploads(self.args, os.environ, callbacks)

    def _dry_run(self) -> TrainOutput:
        self.rehearse()
        if distributed.is_writer(self._ranks):
            print(runs.plan_text(self.plan, self.physical_batch_size))
            self._warn(self._noise_advice())
        epsilon = self.plan.guarantee().epsilon
        return TrainOutput(0, math.nan, {"privacy/planned_epsilon": epsilon, "privacy/num_steps": self.plan.num_steps})

    def _prepare(self, resume_from_checkpoint: str | bool | None) -> None:
        """Make all checks before training, and decide which run is started or resumed."""
        plan = self.plan
        settle(self.model)
        self.model.train()
        self._refuse()
        data = distributed.check_same_data(self._described_data, self._ranks)
        distributed.once(self._ranks, self._clean)
        saved = self._resume(resume_from_checkpoint, data) if resume_from_checkpoint else None
        if saved is None and self._run is not None and self._run.state.step:
            raise InvalidArgument(
                "Expected one run for each DPTrainer: the noise was chosen for one. After an interruption use train("
                "resume_from_checkpoint=True); for another phase make a new DPTrainer(..., ledger=trainer.ledger)."
            )
        spent, journal = self.ledger if saved is None else saved.state.ledger, self._folder / files.JOURNAL
        distributed.once(self._ranks, lambda: files.begin_accounting(journal, spent, resumed=saved is not None))
        start = self._start_of(saved, data, spent)
        if start.limit < self._num_steps(plan.sampler.dataset_size):
            self._warn(f"The budget allows {start.limit} steps: training stops there, as does the schedule.")
        self._warn(self._noise_advice())
        self._warn(self._advice())
        if self._budget is not None:
            whole = replace(plan, num_steps=start.limit, spent=self._earlier)
            distributed.once(self._ranks, partial(self._budget.reserve, whole, start.key, unit=self._unit))
            distributed.once(self._ranks, partial(known_end, journal))  # which says that it took no step
        self.args = settings.changed(self.args, {"max_steps": start.limit})
        self._warn_at = runs.warning_step(plan, self._spent_before, start.limit, self.privacy.dp_warn_at)
        self._start = start

    def _clean(self) -> None:
        """Remove what killed processes left unfinished; some of it holds the key."""
        folder = self._folder
        for path in (folder, *folder.glob("checkpoint-*"), *folder.glob(f"checkpoint-*/{files.FOLDER}")):
            sweep(path)

    def _noise_advice(self) -> str | None:
        """A sentence if noise hides what could be learnt, e.g. since earlier runs have spent nearly all of a budget."""
        return None if self.recipe is not None else self.plan.advice()  # a recipe has an advice of its own

    def _advice(self) -> str | None:
        """A sentence if the run cannot be expected to learn, with a number that would help; from public facts."""
        return short_way(self) if self.recipe is None else self.recipe.advice()

    def _described_data(self) -> str:
        self._check_data()
        check_repeatable(self.train_dataset, self._collator())
        return self._data_name or data_name(self.train_dataset)

    def _check_data(self) -> str | None:
        """Check each record to train on and to evaluate on, as far as the model says what it takes.

        Returns a warning that depends on the records: a run, whose output may be published, does not print it.
        """
        collate = self._collator()
        warning = refuse_labels(self.train_dataset, collate, self.model, self._task)
        refuse_records(self.train_dataset, collate, self.model, self._task, "train_dataset")
        for name, dataset in evaluated(self.eval_dataset).items():
            refuse_labels(dataset, collate, self.model, self._task, name or "eval_dataset")
            refuse_records(dataset, collate, self.model, self._task, name or "eval_dataset")
        return warning

    def _resume(self, checkpoint: str | bool, data: str) -> Checkpoint | None:
        """The checkpoint from which a run goes on; None if none was saved because nothing was released."""
        folder, ranks = self._folder, self._ranks

        def check() -> None:
            if self._division is not None:
                fsdp.check_frozen(self._division, saved.extra)
            before = None if self._run is None else self._run.state
            files.check_resumed(saved, self.plan, self._given_key, self._earlier, before)

        named = checkpoint if isinstance(checkpoint, str) else None
        found = distributed.by_writer(lambda: named or str(files.newest(folder) or ""), ranks, _NOT_RESUMED)
        if not found:
            _logger.warning("No step was released in %s: the run begins.", folder)
            return None
        params, journal = runs.trainable(self.model), folder / files.JOURNAL
        saved = files.load_run(Path(found), params=params, plan=self.plan, data=data, journal=journal, ranks=ranks)
        distributed.all_or_none(check, ranks, _NOT_RESUMED)
        return saved

    def _start_of(self, saved: Checkpoint | None, data: str, spent: Ledger) -> runs.Start:
        if saved is not None:
            return runs.Start(saved.state.key, saved.state.limit, data, saved)

        def own() -> Key:
            kept = self._budget is not None and self._saves_states() and distributed.is_writer(self._ranks)
            return files.kept_key(self._folder, self._given_key) if kept else self._given_key or secure_key()

        key = distributed.all_or_none(own, self._ranks, "Nothing was reserved")
        key = key if self._ranks is None else distributed.shared_key(self._ranks, key)
        return runs.Start(key, self.plan.step_limit(spent), data)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The plan's batches, one for each optimizer step. Inside of `train` this starts the run."""
        if not self.privacy.dp_enabled:
            return super().get_train_dataloader()  # type: ignore[no-any-return]  # of Trainer
        pending, self._start = self._start, None  # a run begins once, however often its batches are asked for
        start = pending or runs.Start(secure_key(), self.plan.num_steps, "")  # to look at batches: other draws
        if pending is not None:
            self._run = self._begin(pending)
        epoch = self._steps_per_epoch(self.plan.sampler.dataset_size)

        def steps() -> range:
            first = 0 if pending is None or self._run is None else self._first_step(self._run)
            return range(first, min(first + epoch, start.limit))

        args, (rank, size) = self.args, distributed.rank_and_size(self._ranks)
        # Processes with parts of a model need rows of one length: each collates the whole draw.
        read, deal = ((rank, size), (0, 1)) if self._division is None else ((0, 1), (rank, size))
        views = self.privacy.dp_views
        draws = Draws(self.plan.sampler, start.key, steps, epoch, *read, self._num_records(), views)
        # of several processes, one without records runs a row of weight 0
        collate = Collate(self._collator(), size == 1, *deal, views=views)
        return data_loader(
            self.train_dataset, draws, collate, num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers, prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        )  # fmt: skip

    def _begin(self, start: runs.Start) -> runs.Run:
        """The run, once the model is where it is trained. All processes begin with the model of the first one."""
        model, privacy = self.model, self.privacy
        if self._division is None:  # else parts differ, and are of the same values
            distributed.replicate((*model.parameters(), *model.buffers()), self._ranks)
        params = runs.trainable(model)
        if start.resumed is not None:
            with torch.no_grad():
                for name, value in start.resumed.params.items():
                    params[name].copy_(value)
        dp_step = self._dp_step(params, Journal(self._folder / files.JOURNAL, self.plan))
        if (average := privacy.average(start.limit)) is not None:
            self.pop_callback(runs.Averaging)
            self._averaging = runs.Averaging(average, params)
            self.callback_handler.callbacks.insert(0, self._averaging)  # the others see what it has done
        state = (
            dp_step.init(params, start.key, self._earlier, num_records=self._num_records())
            if start.resumed is None
            else start.resumed.state
        )
        return runs.Run(dp_step, params, state, state, start, runs.places_of(model, params))

    def _dp_step(self, params: dict[str, Tensor], journal: Journal | None) -> DPStep:
        """The private step of the model, which is in training mode after it."""
        model, privacy = self.model, self.privacy
        forward, engine, ranks = runs.as_function(model, params, privacy.dp_engine, self._ranks)
        on_cuda = all(param.is_cuda for param in params.values())
        loss_fn = make_loss_fn(forward, runs.with_accuracy(self._task, self.plan.telemetry))
        if self._division is None:  # else each process would need the others for a forward pass
            refuse_padding(loss_fn, params, model, self.train_dataset, self._collator(), self._prepare_inputs)
        if privacy.dp_views > 1:
            loss_fn = mean_over_views(loss_fn)
        return make_dp_step(
            loss_fn, self.plan, engine=engine, microbatch_size=self.physical_batch_size, ranks=ranks,
            noise_source="device" if on_cuda and not privacy.dp_secure_mode else "secure", journal=journal,
        )  # fmt: skip

    def _num_records(self) -> int | None:
        """Number of records, where the plan has a bound on it."""
        return None if self.privacy.dp_dataset_size is None else len(self.train_dataset)

    def _collator(self) -> Callable[[list[Any]], Any]:
        """The collator without the columns that the model does not take, whatever kind the data set is."""
        collate: Callable[[list[Any]], Any] = self._get_collator_with_removed_columns(self.data_collator, "training")
        return collate

    def _first_step(self, run: runs.Run) -> int:
        """Step at which the Trainer starts to iterate; after a resume it skips the used batches of the epoch."""
        step, resumed = run.state.step, run.start.resumed
        skips = resumed is not None and not self.args.ignore_data_skip and step == resumed.state.step
        return step - step % self._steps_per_epoch(self.plan.sampler.dataset_size) if skips else step

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Leave released gradients in `.grad`. The loss that is returned is 0, unless dp_log_unreleased asks for it."""
        run = self._run
        if run is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]  # of Trainer
        model.train()
        runs.set_mode(self.optimizer, "train")
        before = run.at(self.state.global_step)
        if before.step == 0 and run.start.resumed is None:
            self._begun(model, run)
        batch = dict(self._prepare_inputs(inputs))
        params = {name: param.detach() for name, param in run.params.items()}
        with fsdp.settled(self.model), runs.without_words(run.dp_step.clipped_grad.loss_fn, params, batch):
            runs.refuse_changed(run.places)
            grads, state, unreleased = run.dp_step(params, batch, before, mask_B=self._mask(batch, before))
        set_grads(run.params, grads)
        self._run = replace(run, state=state, previous=before)
        self._told.append(state.telemetry)
        if state.step >= self._warn_at:
            self._warn_at = math.inf  # once
            self._warn(runs.warning_text(self.plan, state))
        return (
            runs.mean_loss(unreleased.losses_B, self._ranks).to(self.args.device)
            if self.privacy.dp_log_unreleased
            else torch.zeros((), device=self.args.device)
        )

    def _begun(self, model: nn.Module, run: runs.Run) -> None:
        """Save the start of a run, and do the rest of `rehearse` with its own optimizer and schedule."""
        settings.refuse_optimizer(self.optimizer, run.params)  # which there was none of when the run was prepared
        written = None
        if self._saves_states():
            self._save_checkpoint(model, None)  # from here on a kill leaves what to go on from
            written = self._folder / f"checkpoint-{self.state.global_step}"
        if self._division is None:
            rehearse_after_gradients(self, run.start.limit, written, ranks=self._ranks)

    def _saves_states(self) -> bool:
        return self.args.save_strategy != "no" and not self.args.save_only_model

    def _mask(self, batch: dict[str, Any], before: StepState) -> Tensor | None:
        """Of a process without records among others: it runs a row of weight zero, since all communicate."""
        idle = self._ranks is not None and not len(self.plan.draw(before, before.step, self._ranks))
        return torch.zeros(batch_size(batch), dtype=torch.bool, device="cpu") if idle else None

    def _warn(self, text: str | None) -> None:
        """Warn of something, on one of the processes."""
        if text is not None and distributed.is_writer(self._ranks):
            _logger.warning("%s", text)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """As in `Trainer` to evaluate; to train the twin without privacy, the mean over the losses of the samples."""
        if self.privacy.dp_enabled or return_outputs or not model.training:
            if "pixel_values" in inputs and self._task_of_records in ("vqa", TASKS["vqa"], image_text_loss):
                inputs = facts_of_model(self.model).flatten_images(inputs)  # as the loss gives them to the model
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._twin is None:
            self._twin = runs.twin_loss(self.model, model, self._task)
        return self._twin(inputs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """As in `Trainer`; of preferences the mean loss of pairs, and as predictions their margins, with labels 1."""
        task = self._task_of_records
        if not isinstance(task, Preference):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with torch.no_grad(), self.compute_loss_context_manager():
            margin_B = margins(runs.called(self.model, model), {}, self._prepare_inputs(inputs)).detach()
        outputs = (None, None) if prediction_loss_only else (margin_B, torch.ones_like(margin_B))
        return task.loss(margin_B).mean(), *outputs

    def evaluation_loop(
        self, dataloader: DataLoader[Any], description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """As in `Trainer`, with a warning, once, if all predictions are one class."""
        with fsdp.settled(self.model):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        found = None if self._warned_of_one_class else one_class(output.predictions, output.label_ids)
        if found is not None:
            self._warned_of_one_class = True
            self._warn(f"{found} {self._advice() or 'Is the learning rate too small, or epsilon?'}")
        return output

    # What is logged and saved

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in `Trainer`. A private run adds what was spent, and omits the training loss or names it as unreleased."""
        if self._run is not None:
            for name in [name for name in logs if name.startswith("train_") and name.endswith(_TIMES)]:
                del logs[name]
            for name in [name for name in ("loss", "train_loss") if name in logs]:
                loss = logs.pop(name)
                if self.privacy.dp_log_unreleased:
                    logs[f"unreleased/{name}"] = loss
                logs.update({**runs.metrics(self._accounting()), **runs.averaged(self._told)})
                self._told = []
        super().log(logs, start_time)

    def _accounting(self, journal: Path | None = None) -> Record:
        if self._run is None:
            raise InvalidArgument("Expected a run under way, got none.")
        state, dp_step = self._run.state, self._run.dp_step
        not_covered = [LOGGED_LOSS] if self.privacy.dp_log_unreleased else []
        if journal is not None:
            state = as_charged(state, self.plan, journal, dp_step.facts)
            not_covered += [OLD_BOUND] if state.clip_state and state.step > self._run.state.step else []
        return make_record(
            dp_step, state, unit=self._unit, public_bound=self.privacy.dp_dataset_size is not None,
            epoch=state.step / self._steps_per_epoch(self.plan.sampler.dataset_size),
            not_covered=not_covered,
        )  # fmt: skip

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save_own, run, args = super()._save_checkpoint, self._run, self.args
        if run is None:
            return save_own(model, trial)  # type: ignore[no-any-return]  # of Trainer
        folder = self._folder / f"checkpoint-{self.state.global_step}"
        now, accounting = run.at(self.state.global_step), self._accounting()
        parts = {} if self._division is None else fsdp.parts_of_run(self._division, self.optimizer, run.params)
        with writing(folder, run.state.ledger, self.plan):
            if not args.save_only_model:  # which is also how to get a checkpoint without the key
                own = folder / files.FOLDER
                distributed.once(self._ranks, lambda: remove(own))  # of an earlier run, whose files are replaced
                save(
                    own, params=run.params, state=now, plan=self.plan, data=run.start.data, ranks=self._ranks, keep=1,
                    journal=self._folder / files.JOURNAL, **parts,
                )  # fmt: skip
            distributed.once(self._ranks, lambda: files.write_accounting(folder, accounting))
            self.args = settings.changed(args, {"save_total_limit": None})  # none is removed before this one is whole
            try:
                distributed.all_or_none(partial(save_own, model, trial), self._ranks, "No checkpoint was made")
            finally:
                self.args = args
            distributed.once(self._ranks, lambda: files.finish(folder, args, self.state))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`. If the model is sharded, all processes must call this: one writes the parts of all."""
        if self._division is not None:
            self._whole = fsdp.whole_state(self.model, self.args.should_save)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)
        complete(Path(output_dir or self.args.output_dir), self.model, self._beside_adapters)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As in `Trainer`, but for the optimizer of a sharded model, which the folder `dpfunc` of a checkpoint has."""
        if self._division is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)
        if self._averaging is not None and self.args.should_save:
            torch.save(self._averaging.state, Path(output_dir) / _AVERAGE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        saved = None if self._run is None else self._run.start.resumed
        if saved is not None and self._averaging is not None:
            self._averaging.load(Path(saved.path).parents[1] / _AVERAGE)
        if saved is None or saved.optimizer_state is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        fsdp.load_optimizer_state(self.optimizer, saved.optimizer_state)
        self.lr_scheduler.load_state_dict(torch.load(Path(saved.path).parents[1] / _SCHEDULER, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As in `Trainer`, with values alone; but for a sharded model, whose parts are read when the run begins."""
        if self._division is not None:
            return
        if base_model(self.model) is self.model:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            read_adapters(self.model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """As a resumed run reads it, which is tried before the first step; `Trainer` finds no adapter by its name."""
        best = self.state.best_model_checkpoint
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or not Path(best).exists():  # of another node
            super()._load_best_model()
        else:
            self._load_from_checkpoint(best)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """0 in a private run: the number of records in a batch is not released."""
        return 0 if self._run is not None else int(super().floating_point_ops(inputs))

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """As in `Trainer`; of the records of a private run the number that its plan publishes."""
        draws = dataloader.batch_sampler
        return draws.sampler.dataset_size if isinstance(draws, Draws) else int(super().num_examples(dataloader))

    def _no_search(self, *_: object, **__: object) -> None:
        raise InvalidArgument("Expected no hyperparameter search: each trial is a run on the private records.")

    hyperparameter_search = _no_search
