"""A training job as values, checked before anything is loaded: types, limits and texts document the job file.

May import: its folder, features and below. Privacy depends on it: no.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, cast, get_args, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from dpfunc._utils.validation import expect, fail, one_of, refuse, suggestion, total_steps, wrong_type
from dpfunc.accounting import record
from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer.arguments import PrivacyArguments, own_names
from dpfunc.train._views import VIEWS

Task = Literal[
    "text_classification", "text_regression", "token_classification", "causal_lm", "seq2seq", "vqa",
    "preference", "table_classification", "image_classification",
]  # fmt: skip
# Those of Transformers that need no setting of their own, and follow no evaluation: its records are not protected.
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
RIGHT, _LOSS, PREFERRED = record.SCORES


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """Model, loss and score of a task. What its records are is in `_records`, and the keys that it has in `_ONLY`.

    Attributes:
        strategies: what it can train; a language model shares its head with its embeddings.
        loss: name in `dpfunc.hf.tasks`; none for preferences, whose loss has settings of its own.
        model: class of Transformers that loads its model; none for a model of features.
        peft: name of the task in PEFT; none where dpfunc adapts the model.
        changes: changes of the configuration of the model, from which Transformers takes its loss.
        score: how runs of a search are compared; none where they cannot be.
    """

    strategies: tuple[str, ...]
    loss: str = ""
    model: str = ""
    peft: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    score: str = ""


TASKS: dict[Task, TaskFacts] = {
    "text_classification": TaskFacts(
        strategies=("lora", "qlora", "full", "head", "bitfit"), loss="sequence_classification",
        model="AutoModelForSequenceClassification", peft="SEQ_CLS",
        changes={"problem_type": "single_label_classification"}, score=RIGHT,
    ),
    "text_regression": TaskFacts(
        strategies=("lora", "full", "head", "bitfit"), loss="sequence_classification",
        model="AutoModelForSequenceClassification", peft="SEQ_CLS",
        changes={"num_labels": 1, "problem_type": "regression"},
    ),
    "token_classification": TaskFacts(
        strategies=("lora", "full", "head", "bitfit"), loss="token_classification",
        model="AutoModelForTokenClassification", peft="TOKEN_CLS",
    ),
    "causal_lm": TaskFacts(
        strategies=("lora", "qlora", "full", "bitfit"), loss="causal_lm",
        model="AutoModelForCausalLM", peft="CAUSAL_LM", score=_LOSS,
    ),
    "seq2seq": TaskFacts(
        strategies=("lora", "full", "bitfit"), loss="seq2seq", model="AutoModelForSeq2SeqLM", peft="SEQ_2_SEQ_LM",
    ),
    "vqa": TaskFacts(
        strategies=("lora", "qlora", "full", "projector"), loss="vqa", model="AutoModelForImageTextToText", score=_LOSS,
    ),
    "preference": TaskFacts(
        strategies=("lora", "qlora", "full", "bitfit"), model="AutoModelForCausalLM", peft="CAUSAL_LM", score=PREFERRED,
    ),
    "table_classification": TaskFacts(strategies=("head", "full"), loss="sequence_classification", score=RIGHT),
    "image_classification": TaskFacts(strategies=("head", "full"), loss="sequence_classification", score=RIGHT),
}  # fmt: skip
ADAPTERS = ("lora", "qlora")  # strategies that train adapters, over a base in float or in 4 bits
FEATURES = ("table_classification", "image_classification")  # tasks whose records become features before training
CLASSIFIES = ("text_classification", "token_classification", *FEATURES)  # tasks with a list of classes
NEW_HEAD = (*CLASSIFIES, "text_regression")  # tasks with a head that starts anew
LANGUAGE = ("causal_lm", "seq2seq", "preference")  # tasks that learn to write texts
PAIRS = ("text_classification", "text_regression")  # tasks that take a second text
_ONLY: dict[tuple[str, str], tuple[str, ...]] = {  # keys that some tasks alone have; in others they have their default
    **{("model", key): tuple(task for task in TASKS if task != "table_classification")
       for key in ("path", "local_files_only")},
    **{place: tuple(task for task in TASKS if task not in FEATURES)
       for place in (("model", "init"), ("model", "tokenizer"), ("model", "gguf_file"), ("data", "max_length"),
                     ("training", "gradient_checkpointing"))},
    ("model", "new_tokens"): tuple(task for task in TASKS if task not in ("vqa", *FEATURES)),
    ("model", "hidden"): FEATURES,
    **{("lora", key): tuple(task for task in TASKS if task not in ("vqa", *FEATURES))
       for key in ("dropout", "top_layers", "rslora", "method", "modules_to_save")},
    ("data", "labels"): CLASSIFIES,
    ("data", "text_column"): (*PAIRS, "token_classification", "causal_lm", "seq2seq"),
    ("data", "text_pair_column"): PAIRS,
    ("data", "label_column"): (*PAIRS, "token_classification", "table_classification"),
    ("data", "loss_on"): ("causal_lm",),
    **{("data", key): ("vqa",) for key in ("image_column", "max_images", "question_column", "answer_column")},
    ("data", "image_size"): ("vqa", "image_classification"),
    ("data", "grey"): ("image_classification",),
    ("data", "chat"): ("causal_lm", "vqa", "preference"),
    ("data", "tools_column"): ("causal_lm", "preference"),
    **{("data", key): LANGUAGE for key in ("prompt_column", "prompt_template")},
    ("data", "response_column"): ("causal_lm", "seq2seq"),
    **{("data", key): ("preference",) for key in ("chosen_column", "rejected_column")},
    **{("preference", key): ("preference",) for key in ("loss", "beta", "label_smoothing")},
    **{("data", key): ("table_classification",) for key in ("numbers", "categories", "missing")},
}  # fmt: skip

# A list of texts. A number among them is a text as well: labels are often 0 and 1.
Texts = Annotated[tuple[Annotated[str, Field(strict=False, coerce_numbers_to_str=True)], ...], Field(min_length=1)]
_Count = Annotated[int, Field(ge=1)]
_Whole = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, lt=1)]


# Keys of the section data of which one alone is given, and keys that are given together; and why.
_APART = {
    ("eval", "eval_fraction"): "", ("budget", "spent"): ": the budget knows what was spent",
    ("prompt_column", "prompt_template"): "",
    **{("chat", key): ": a chat has its prompts in it" for key in ("prompt_column", "prompt_template")},
}  # fmt: skip
_TOGETHER = {
    ("budget", "budget_run"): " The run has a name in it.",
    ("unit_column", "max_records_per_unit"): " A person with more records gives that many of them. It is a public "
    "number: choose it without a look at the table.",
}


def _key(text: str, default: object = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ModelSection:
    """Source of the model. Nothing is downloaded unless `local_files_only` is false."""

    path: str | None = _key("Folder of a model, or its name on the hub. Images without one are scattered.", None)
    init: Literal["pretrained", "random"] = _key("`random` takes the configuration only: for tests.", "pretrained")
    tokenizer: str | None = _key("Folder or name of the tokenizer; the model's by default.", None)
    new_tokens: Texts | None = _key("Tokens that get a row of the embedding; the tokenizer gets those it lacks.", None)
    gguf_file: str | None = _key("Weights in a GGUF file of that folder.", None)
    pooling: Literal["auto", "mean", "model"] = _key("Of tokens; `auto` is `mean` if 1_Pooling says so.", "auto")
    hidden: _Count = _key("Neurons of the hidden layer, for tables and images with strategy full.", 64)
    local_files_only: bool = _key("False allows downloads from the hub.", True)

    def __post_init__(self) -> None:
        refuse(
            (self.gguf_file is not None and self.init == "random",
             "Expected model.gguf_file or model.init: random, got both."),
            (len(set(self.new_tokens or ())) < len(self.new_tokens or ()),
             fail("different tokens", "model.new_tokens", self.new_tokens)),
        )  # fmt: skip


@dataclass(frozen=True)
class DataSection:
    """The table of private records, .jsonl, .json, .csv or .txt, and which column is what."""

    train: str = _key("Table to train on, .jsonl, .json, .csv or .txt; or a folder of images; private.")
    eval: str | None = _key("Table to evaluate on; not protected.", None)
    eval_fraction: _Share = _key("Or: the share of `train` that is held out, chosen record by record.", 0.0)
    spent: Texts | None = _key("Journals or ledgers of earlier runs on these records: the budget counts them.", None)
    budget: str | None = _key("Or: budget of the data set, a path or a URL: the run reserves, and settles.", None)
    budget_run: str | None = _key("With budget: name of this run, of which it has one.", None)
    budget_spender: str | None = _key("With budget: who spends; by default the user of this process.", None)
    deduplicate: bool | None = _key("Leave out exact duplicates; by default true, but for tables of numbers.", None)
    max_length: Annotated[int, Field(ge=2)] = _key("Tokens of a record that are used.", 128)
    unit_column: str | None = _key("Column that says whose record a row is: one person is then protected.", None)
    max_records_per_unit: _Count | None = _key("With unit_column: most records of a person; public.", None)
    text_column: str = _key("Column with the text; for token_classification with its words.", "text")
    text_pair_column: str | None = _key("Column with a second text, for classes or numbers of pairs.", None)
    label_column: str = _key("Column with the label, the number, or the labels of all words.", "label")
    labels: Texts | None = _key("The classes: published with the model, so not read off the table.", None)
    prompt_column: str | None = _key("Column with the prompt, together with response_column.", None)
    response_column: str | None = _key("Column with the response; the loss is on it.", None)
    prompt_template: str | None = _key("Or: a prompt made of columns, `Label: {label} Text:`; then the text.", None)
    loss_on: Literal["response", "all"] = _key("Which tokens are learnt when there is a prompt.", "response")
    chat: Texts | None = _key("Or: columns of a chat, [messages], of question and answer, or of a pair.", None)
    tools_column: str | None = _key("With chat: column with definitions of tools, a list, or none.", None)
    chosen_column: str = _key("Column with the answer that people chose (preference).", "chosen")
    rejected_column: str = _key("Column with the answer that they rejected (preference).", "rejected")
    image_column: str = _key("Column with a path, or a list of paths, from the table's folder (vqa).", "image")
    max_images: _Count = _key("Most images of a record; public. With 1, each record has one (vqa).", 1)
    image_size: tuple[int, ...] | None = _key("Height and width that images are fitted into; public.", None)
    question_column: str = _key("Column with the question (vqa).", "question")
    answer_column: str = _key("Column with the answer (vqa).", "answer")
    numbers: Mapping[str, tuple[float, ...]] | None = _key("Columns with ranges, {age: [0, 100]}; public.", None)
    categories: Mapping[str, Texts] | None = _key("Columns with their values, {sex: [f, m]}; public.", None)
    missing: Literal["refuse", "feature"] = _key("A missing number is refused, or has its own feature.", "refuse")
    grey: bool = _key("Read images in grey, without a model (image_classification).", False)

    def __post_init__(self) -> None:
        given = {name for name, value in vars(self).items() if value}
        labels, size = self.classes, self.image_size
        refuse(
            *((given.issuperset(pair), f"Expected data.{pair[0]} or data.{pair[1]}, got both{why}.")
              for pair, why in _APART.items()),
            *((len(given.intersection(pair)) == 1,
               f"Expected data.{pair[0]} and data.{pair[1]} together, got one of them.{why}")
              for pair, why in _TOGETHER.items()),
            (self.budget_spender and not self.budget, "Expected data.budget together with data.budget_spender."),
            (self.tools_column and not self.chat, "Expected data.chat together with data.tools_column."),
            *((self.chat and getattr(self, name) != default,
               f"Expected no data.{name} with data.chat, which names all columns of the texts.") for name, default in
              (("text_column", "text"), ("question_column", "question"), ("answer_column", "answer"),
               ("chosen_column", "chosen"), ("rejected_column", "rejected"))),
            (len(set(labels)) != len(labels), fail("different labels", "data.labels", labels)),
            (len(labels) == 1, fail("at least two labels", "data.labels", labels)),
            (size is not None and (len(size) != 2 or min(size) < 1),
             fail("data.image_size to be [height, width], both >= 1", "data.image_size", size)),
        )  # fmt: skip
        self.placeholders()

    @property
    def units_size(self) -> int:
        """Most records of a unit."""
        return self.max_records_per_unit or 1

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels; none where there are no classes."""
        return self.labels or ()

    def placeholders(self) -> tuple[str, ...]:
        """The columns that the prompt template names."""
        try:
            parts = list(Formatter().parse(self.prompt_template or ""))
        except ValueError as error:
            raise fail("columns in braces, as in `Label: {label} Text:`", "data.prompt_template",
                       self.prompt_template, f"({error})") from error  # fmt: skip
        names = tuple(name for _, name, _, _ in parts if name is not None)
        plain = all(name.isidentifier() for name in names) and not any(spec or change for _, _, spec, change in parts)
        expect(plain, "plain column names in braces", "data.prompt_template", self.prompt_template)
        return names


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters, in the terms of PEFT."""

    rank: _Count = _key("Rank of the adapters.", 8)
    alpha: _Positive = _key("Their output is scaled by alpha / rank.", 16.0)
    targets: Texts | None = _key("Names of adapted layers, or `all-linear`; by default PEFT's choice.", None)
    dropout: _Share = _key("Dropout before the adapters.", 0.0)
    top_layers: _Count | None = _key("Adapters in so many of the highest layers; all, or as the recipe says.", None)
    rslora: bool = _key("Scale by alpha / sqrt(rank) instead.", False)
    method: Literal["lora", "ffa", "dora", "vera"] = _key(
        "`ffa` trains B alone; `dora` lengths of weights too; `vera` two vectors a layer, with shared A and B.", "lora"
    )
    modules_to_save: Texts | None = _key("Modules trained whole besides; a new head always is.", None)


@dataclass(frozen=True)
class PreferenceSection:
    """The loss of a pair of answers, as `dpfunc.hf.Preference`."""

    loss: Literal["sigmoid", "ipo", "hinge"] = _key("`sigmoid` is DPO.", "sigmoid")
    beta: _Positive = _key("A larger one keeps the model nearer to the reference.", 0.1)
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = _key("Share of pairs the wrong way round.", 0.0)

    def __post_init__(self) -> None:
        expect(
            self.label_smoothing == 0 or self.loss == "sigmoid", "no label_smoothing with another loss than sigmoid",
            "preference.loss", self.loss,
        )  # fmt: skip


@dataclass(frozen=True)
class TrainingSection:
    """Optimizer, length and memory; what is left out of rate, batch size and steps comes from a recipe."""

    learning_rate: _Positive | None = _key("Peak learning rate; by default that of the recipe.", None)
    head_rate: _Positive | None = _key("Rate of a new head beside adapters; by default that of all.", None)
    batch_size: _Count | None = _key("Expected number of records in a step; by default that of the recipe.", None)
    steps: _Count | None = _key("Optimizer steps; or epochs, by default those of the recipe.", None)
    epochs: _Positive | None = _key("Passes over the records; rounded up to steps.", None)
    physical_batch_size: _Count | None = _key("Records differentiated at once, for memory only.", None)
    optimizer: str = _key("As in the Trainer's `optim`.", "adamw_torch")
    weight_decay: Annotated[float, Field(ge=0)] = _key("Weight decay.", 0.0)
    scheduler: Scheduler = _key("How the rate changes, by the number of the step alone.", "linear")
    warmup_steps: _Whole = _key("Steps in which the rate grows to its peak.", 0)
    seed: _Whole = _key("Where new parameters start, and the split: public. The noise does not depend on it.", 0)
    eval_steps: _Count | None = _key("Evaluate every so many steps; only at the end by default.", None)
    save_steps: _Count = _key("Write a checkpoint every so many steps.", 100)
    keep_checkpoints: _Count = _key("Older checkpoints are removed.", 2)
    logging_steps: _Count = _key("Log every so many steps.", 10)
    report_to: Texts | None = _key("The Trainer's loggers, e.g. [tensorboard].", None)
    bf16: bool = _key("bfloat16 in forward and backward passes; clipping and noise stay in float32.", False)
    gradient_checkpointing: bool = _key("Less memory for activations, more time.", False)
    cache_mib: _Whole = _key("Most memory for what frozen layers give, computed once a record; 0 for none.", 2048)

    def __post_init__(self) -> None:
        refuse(
            (self.steps is not None and self.epochs is not None,
             "Expected one of training.steps and training.epochs, got both."),
            (self.head_rate is not None and self.optimizer != "adamw_torch",
             fail("no training.head_rate with another optimizer than adamw_torch", "optimizer", self.optimizer)),
            (self.warmup_steps and self.scheduler == "constant",
             fail("no training.warmup_steps with a constant rate; constant_with_warmup has them", "scheduler",
                  self.scheduler)),
        )  # fmt: skip

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys that the recipe has to give."""
        length = () if self.steps is not None or self.epochs is not None else ("steps",)
        return tuple(name for name in ("learning_rate", "batch_size") if getattr(self, name) is None) + length

    def num_steps(self, dataset_size: int) -> int:
        """Optimizer steps over that many records; a part of a step is a step."""
        return (
            self.steps
            if self.steps is not None
            else total_steps(dataset_size, self.batch_size or 0, self.epochs or 0.0)
        )


_NONE_BY_DEFAULT = frozenset(each.name for each in dataclasses.fields(PrivacyArguments) if each.default is None)


def _given(values: object) -> object:
    """Privacy arguments under their own names, without those that are None anyway: HfArgumentParser, where it has seen
    the class, has taken None out of the types of its fields."""
    if not isinstance(values, Mapping):
        return values
    own = own_names(values)
    return {name: value for name, value in own.items() if value is not None or name not in _NONE_BY_DEFAULT}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A whole job; see docs/guides/train.md for every key. Values that contradict each other are refused."""

    # For pydantic, which also applies it to the sections: no key is dropped, and no value is taken for another type.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, str_min_length=1
    )

    task: Task
    output_dir: str
    model: ModelSection = ModelSection()
    data: DataSection
    privacy: Annotated[PrivacyArguments, BeforeValidator(_given)]
    training: TrainingSection = TrainingSection()
    strategy: str = "lora"
    lora: LoraSection = LoraSection()
    preference: PreferenceSection = PreferenceSection()

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, TASKS[self.task].strategies, f"These are what {self.task} can train.")
        refuse(*_rules_of_strategy(self), *_rules_of_task(self), *_rules_of_tables(self), *_rules_of_images(self))

    @property
    def deduplicates(self) -> bool:
        """True if exact duplicates are left out."""
        return self.task != "table_classification" if self.data.deduplicate is None else self.data.deduplicate

    @property
    def model_path(self) -> str:
        """Folder or name of the model that the job starts from."""
        if self.model.path is None:
            raise fail("a folder", "model.path", None)
        return self.model.path

    @property
    def physical_batch_size(self) -> int:
        """Number of records differentiated at once; at most the logical batch size."""
        chosen, batch = self.training.physical_batch_size or self.privacy.dp_physical_batch_size, self.batch_size
        return min(chosen or batch, batch)

    @property
    def batch_size(self) -> int:
        """Logical batch size; 0 as long as no recipe has given what is missing."""
        return self.training.batch_size or 0


_Rules = tuple[tuple[object, InvalidArgument | str], ...]


def _rules_of_strategy(job: Job) -> _Rules:
    adapts, head_rate = job.strategy in ADAPTERS, job.training.head_rate
    mine, theirs = job.training.physical_batch_size, job.privacy.dp_physical_batch_size
    return (
        (not adapts and job.lora != LoraSection(),
         f"Expected no section lora with strategy={job.strategy!r}, which has no adapters."),
        (job.strategy == "qlora" and job.lora.method == "dora",
         fail("no lora.method=dora over a base in 4 bits, whose lengths it needs in float", "strategy", job.strategy)),
        (job.strategy == "qlora" and job.lora.method == "vera",
         fail("no lora.method=vera over a base in 4 bits, which was never tried", "strategy", job.strategy)),
        (job.model.new_tokens and (job.strategy == "qlora" or job.lora.method == "vera"),
         fail("no model.new_tokens with strategy='qlora' or lora.method=vera, beside which their rows are not trained",
              "model.new_tokens", job.model.new_tokens)),
        (job.lora.method == "vera" and (job.lora.rslora or job.lora.alpha != LoraSection.alpha),
         "Expected no lora.alpha and no lora.rslora with lora.method=vera, whose vectors are its scale."),
        (job.strategy == "qlora" and (job.model.init == "random" or job.model.gguf_file is not None),
         "Expected weights in float that are read in 4 bits with strategy='qlora', got model.init: random or "
         "model.gguf_file. Name the folder of a pretrained model."),
        (mine and theirs and mine != theirs,
         f"Expected one physical batch size, got training.physical_batch_size={mine} and "
         f"privacy.dp_physical_batch_size={theirs}."),
        (job.privacy.dp_recipe is not None,
         fail("no dp_recipe in a job", "privacy.dp_recipe", job.privacy.dp_recipe,
              "What the section training leaves out comes from the recipe of the strategy.")),
        (job.privacy.dp_views > 1 and job.task != "image_classification",
         fail(f"privacy.dp_views=1 with task={job.task!r}", "privacy.dp_views", job.privacy.dp_views,
              "Images alone have views in a job: this task reads each record in one way, and views would be copies. "
              "Augment in a script of your own.")),
        (job.privacy.dp_views > len(VIEWS),
         fail(f"1 <= dp_views <= {len(VIEWS)}, as many as there are of an image", "privacy.dp_views",
              job.privacy.dp_views)),
        (head_rate is not None and not (job.task in NEW_HEAD and adapts),
         fail("no head_rate without a new head beside adapters", "training.head_rate", head_rate)),
    )  # fmt: skip


def _rules_of_task(job: Job) -> _Rules:
    """Keys that the task must have, and that others alone have."""
    task, data = job.task, job.data
    columns, answers = len(data.chat or ()), 2 if job.task == "preference" else 1
    return (
        (data.chat and (not answers <= columns <= 2 + answers or len({*data.chat}) < columns),
         fail("the columns of a pair, at most two of its prompt, then those of the chosen and of the rejected answer"
              if answers == 2 else "one column of turns, or two or three of texts, the last with the answer",
              "data.chat", data.chat)),
        *((task not in tasks and getattr(getattr(job, section), name) != getattr(SECTIONS[section], name),
           fail(f"{section}.{name} with task {' or '.join(tasks)} only", "task", task))
          for (section, name), tasks in _ONLY.items()),
        (task == "seq2seq" and not (data.prompt_column or data.prompt_template),
         "Expected what the encoder reads with task='seq2seq': data.prompt_column and data.response_column; or "
         "a data.prompt_template, e.g. `summarize: {article}`, and the response in data.text_column."),
        (task != "preference" and bool(data.prompt_column) != bool(data.response_column),
         "Expected data.prompt_column and data.response_column together, got one of them."),
        (data.response_column and data.text_column != DataSection.text_column,
         "Expected no data.text_column with data.response_column, which has what is learnt."),
        (data.loss_on == "all" and not (data.prompt_column or data.prompt_template or data.chat),
         fail("a prompt or a chat with data.loss_on; without one all of the text is learnt", "data.loss_on", "all")),
        (job.training.eval_steps is not None and not (data.eval or data.eval_fraction),
         "Expected data.eval_fraction or data.eval together with training.eval_steps: there are no records to evaluate "
         "on."),
        (job.strategy != "full" and job.model.hidden != ModelSection.hidden,
         fail("model.hidden with strategy full only, which has a hidden layer", "strategy", job.strategy)),
        (job.model.path is None and task not in FEATURES,
         "Expected model.path in the job. Name the folder of a model."),
        (task in CLASSIFIES and data.labels is None,
         "Expected data.labels, the list of classes, e.g. [ham, spam]. They are published with the model, so they "
         "are not read off the private table."),
    )  # fmt: skip


def _rules_of_tables(job: Job) -> _Rules:
    numbers, categories = job.data.numbers or {}, job.data.categories or {}
    columns = [*numbers, *categories]
    return () if job.task != "table_classification" else (
        (not columns,
         "Expected columns to learn from: data.numbers, each with a range, e.g. {age: [0, 100]}, or data.categories, "
         "each with its values, e.g. {sex: [f, m]}. They are public: what anybody would write without the table."),
        (job.data.missing == "feature" and not numbers,
         fail("data.numbers together with this, which is about missing numbers", "data.missing", job.data.missing)),
        (len({*columns, job.data.label_column}) <= len(columns),
         fail("each column once in data.numbers, data.categories and data.label_column", "columns", columns)),
        *((len(ends) != 2 or ends[0] >= ends[1],
           fail("a public range [low, high], low < high", f"data.numbers.{name}", list(ends)))
          for name, ends in numbers.items()),
        *((len(set(values)) != len(values), fail("different values", f"data.categories.{name}", list(values)))
          for name, values in categories.items()),
    )  # fmt: skip


def _rules_of_images(job: Job) -> _Rules:
    data, scatters = job.data, job.model.path is None
    return () if job.task != "image_classification" else (
        (scatters and any(side % 4 or side < 8 for side in data.image_size or (0,)),
         fail("[height, width], multiples of 4 and at least 8, for images without a model", "data.image_size",
              data.image_size)),
        (not scatters and (data.image_size or data.grey),
         "Expected no data.image_size and no data.grey with a model, whose processor decides them."),
        (scatters and not job.model.local_files_only,
         "Expected model.path together with model.local_files_only: false: without a model nothing is downloaded."),
        (data.unit_column is not None,
         fail("no data.unit_column for images, whose folders say their class alone", "unit_column", data.unit_column)),
    )  # fmt: skip


# The type of an error of pydantic -> domain, what to do.
_KINDS = {
    **dict.fromkeys(("bool_parsing", "bool_type"), ("true or false", "")),
    **dict.fromkeys(("mapping_type", "dataclass_type"), ("keys under {name}", "Write `key: value` lines, indented.")),
    **dict.fromkeys(("finite_number", "float_parsing"), ("a finite number", "")),
    **dict.fromkeys(("int_parsing", "int_type"), ("an integer", "")),
    "float_type": ("a finite number", "A number has no quotes."),
    "string_too_short": ("text", "Leave it out, or give it a value."),
    "string_type": (
        "text",
        "Put it in quotes: YAML reads yes, no, on and off as true and false, and digits as a number.",
    ),
    "too_short": ("a list of texts", "Leave it out, or write [first, second]."),
    "tuple_type": ("a list", "Write [first, second]."),
}
# Advice on a key, or on the keys of a mapping: what each of them needs.
_EACH = {
    "training.scheduler": "A rate that follows an evaluation would carry records into the model that no epsilon "
    "covers, and one with settings of its own has none in a job.",
    "data.numbers": "Each column needs a public range [low, high], e.g. age: [0, 100]; it is not read off the table.",
    "data.categories": "Each column needs the public list of its values, e.g. sex: [f, m]; others share a slot.",
}
_OUTSIDE = ("greater_than", "greater_than_equal", "less_than")
_LONGEST = 200  # characters of a value in a message
_UNKNOWN = "unexpected_keyword_argument"
_JOBS = TypeAdapter(Job)
SECTIONS = {
    name: kind
    for name, kind in get_type_hints(Job).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
TOP = ("task", "strategy", "output_dir")


def job_from_dict(values: Mapping[str, Any]) -> Job:
    """A job from the values of a YAML file: every name is checked (test_misspelt_names_are_refused), and every type.

    >>> job_from_dict({"taks": "causal_lm"})
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a key of a job, got 'taks'. Did you mean 'task'?
    """
    try:
        # pydantic is strict about types in JSON, and yet takes a list for a tuple and a mapping for a section
        text = json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgument("Expected text in the job, got half of a surrogate pair, which no text has.") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"Expected texts, numbers, true, false, lists and sections in the job, got another value: {error}. Put "
            "dates in quotes."
        ) from error
    try:
        return _JOBS.validate_json(text)
    except ValidationError as error:
        raise explained(error) from None


def job_to_dict(job: Job) -> dict[str, Any]:
    """The job as JSON values."""
    return cast(dict[str, Any], _JOBS.dump_python(job, mode="json"))


def explained(error: ValidationError, flag: str = "", key: str = "") -> InvalidArgument:
    """The first problem of an error of pydantic about keys, or the flag of a key, unknown keys first; nothing long."""
    problem = min(error.errors(include_url=False), key=lambda each: each["type"] != _UNKNOWN)
    kind, place, value = problem["type"], problem["loc"], problem["input"]
    name, last = flag or ".".join(map(str, place)), str(place[-1] if place else "")
    of, section = (place[0], SECTIONS.get(str(place[0]), Job)) if len(place) > 1 else ("a job", Job)
    keys = {each.name: each.metadata.get("help", "") for each in dataclasses.fields(section)}
    if kind == "value_error":  # of a section itself, which says it in its own words
        return InvalidArgument(str(problem["ctx"]["error"]))
    if kind == _UNKNOWN:
        return InvalidArgument(f"Expected a key of {of}, got {last!r}. {suggestion(last, keys)}")
    if kind == "missing":
        return InvalidArgument(f"Expected {name} in the job. {keys[last]}".rstrip())
    domain, hint = _domain(problem, section, last, name)
    hidden = isinstance(value, list | dict) or len(repr(value)) > _LONGEST
    hint = _EACH.get(key or ".".join(map(str, place[:2])), hint)
    return (wrong_type if hidden else fail)(domain.replace("{name}", name), name, value, hint)


def _domain(problem: Any, section: Any, key: str, name: str) -> tuple[str, str]:
    """The domain of a value, of a number by the constraints of its type, `0 <= NAME < 1`; and advice."""
    if problem["type"] == "literal_error":
        return f"{name} to be one of {problem['ctx']['expected']}", ""
    if problem["type"] not in _OUTSIDE:
        return _KINDS.get(problem["type"], ("a value that can be read", problem["msg"]))
    kind = get_type_hints(section, include_extras=True)[key]
    number = next(each for each in (kind, *get_args(kind)) if hasattr(each, "__metadata__"))
    limits = {type(limit).__name__: limit for limit in number.__metadata__[0].metadata}
    if number.__origin__ is int:
        return f"an integer {name} >= {limits['Ge'].ge}", ""
    low = f"{limits['Gt'].gt} <" if "Gt" in limits else f"{limits['Ge'].ge} <="
    return f"{low} {name} < {limits['Lt'].lt if 'Lt' in limits else 'inf'}", ""
