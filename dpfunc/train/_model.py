"""The model of a job, with exactly those parameters requiring gradients that its strategy trains.

May import: its folder, features and below. Privacy depends on it: no.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn

from dpfunc._utils.validation import fail, refuse, shorten, suggestion
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf._facts import facts_of_model, quantised_layers
from dpfunc.hf.models import four_bit
from dpfunc.hf.pooled import NO_DROPOUT, MeanPooledClassifier, load_mean_pooled
from dpfunc.hf.vision_language import prepare
from dpfunc.rng import fold_in, insecure_key, torch_seed
from dpfunc.train._features import load_front, names_of_classes, new_model
from dpfunc.train.config import ADAPTERS, CLASSIFIES, FEATURES, NEW_HEAD, TASKS, Job, LoraSection

# The factor of an adapter that PEFT draws at random; the other one begins at zero. Of embeddings it is the second.
_DRAWN = (".lora_A.", ".lora_embedding_B.")


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turn errors of other libraries inside the block into one line that names what was expected."""
    try:
        yield
    except (InvalidArgument, UnsupportedModel):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise InvalidArgument(f"Expected {what}: {' '.join(str(error).split()).rstrip('.')}.") from error


@contextmanager
def _loading(what: str, job: Job, path: str) -> Iterator[None]:
    """As `one_line`; about a missing folder the error of Transformers is one of the connection to the hub."""
    offline = ", without download (model.local_files_only)" if job.model.local_files_only else ""
    try:
        with one_line(f"{what} in {path!r}{offline}"):
            yield
    except InvalidArgument as error:
        if not job.model.local_files_only or Path(path).exists() or not isinstance(error.__cause__, OSError):
            raise
        key = "path" if path == job.model.path else "tokenizer"
        raise InvalidArgument(
            f"Expected the folder of a model, got model.{key}={path!r}: there is no such folder here, and no model of "
            "that name that was downloaded before. Give the path of a folder, or set local_files_only: false to "
            "download it from the hub."
        ) from error


def load_processing(job: Job) -> Any:
    """The tokenizer, or for VQA the processor, with a padding token; of tables and images what makes features."""
    if job.task in FEATURES:
        with _loading("an encoder of images and its processor", job, job.model.path or ""):
            front = load_front(job, _options(job))
            front.size  # noqa: B018  (an encoder is tried on a blank image)
            return front
    path = job.model.tokenizer or job.model_path
    options = _options(job) if job.model.tokenizer is None else {"local_files_only": job.model.local_files_only}
    if job.task == "token_classification":  # tokenizers of GPT-2's kind take lists of words with this only
        options["add_prefix_space"] = True
    with _loading("a tokenizer", job, path):
        kind: Any = transformers.AutoProcessor if job.task == "vqa" else transformers.AutoTokenizer
        processing = kind.from_pretrained(path, **options)
    tokenizer = getattr(processing, "tokenizer", processing)
    refuse(
        (tokenizer.eos_token is None and (job.task not in NEW_HEAD or tokenizer.pad_token is None),
         f"Expected an end-of-text token in the tokenizer of {path!r}, which has none. Name one of its tokens, by "
         "tokenizer.eos_token = '...' and tokenizer.save_pretrained(folder), and the folder in model.tokenizer."),
        (job.task == "token_classification" and not tokenizer.is_fast,
         f"Expected a tokenizer that tells which word a token is of, got {type(tokenizer).__name__} in {path!r}. "
         "Save a fast one there (tokenizer.json), or name its folder in model.tokenizer."),
    )  # fmt: skip
    tokenizer.add_tokens(list(job.model.new_tokens or ()))
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token})
    return processing


def _options(job: Job) -> dict[str, Any]:
    """Options of `from_pretrained` that the job decides: no download, and a file of GGUF weights."""
    gguf = {} if job.model.gguf_file is None else {"gguf_file": job.model.gguf_file}
    return {"local_files_only": job.model.local_files_only, **gguf}


def load_base(job: Job, processing: Any) -> nn.Module:
    """The model before training, in float32, or with `qlora` in 4 bits; new parameters by the job's seed."""
    if job.task in FEATURES:
        return new_model(job, processing, key_of(job, "model"))
    options, path, packed = _options(job), job.model_path, {}
    if job.strategy == "qlora":  # refused first: without bitsandbytes no weights are read
        packed["quantization_config"] = four_bit(torch.bfloat16 if torch.accelerator.is_available() else torch.float32)
    with _loading(f"a model for {job.task}", job, path), torch_seed(key_of(job, "model")):
        config = transformers.AutoConfig.from_pretrained(path, **options, **_changes(job, processing))
        if job.task != "vqa":
            _check_length(job, getattr(config, "max_position_embeddings", None), processing)
        if getattr(config, "quantization_config", None) is not None:
            packed = {}  # the weights in the folder are packed already
        model = _read(job, config, {**options, **packed})
        if job.task != "vqa":  # RoBERTa and its like have fewer positions than their configuration says
            _check_length(job, facts_of_model(model).tables.positions, processing)
            _give_rows(model, job, processing)
    quantised = quantised_layers(model)
    refuse(
        (bool(quantised) != (job.strategy == "qlora"), UnsupportedModel(
            f"Expected weights in 4 bits with strategy='qlora', and only with it, got strategy={job.strategy!r} and "
            f"{f'quantised weights in {shorten(quantised)}' if quantised else 'weights in float'} in {path!r}.")),
    )  # fmt: skip
    return model if quantised else model.float()


def _check_length(job: Job, positions: object, processing: Any) -> None:
    """Check that the model has a position for each token: a longer record would end the run halfway."""
    if not isinstance(positions, int) or positions < 1:
        return
    most = min(positions, getattr(processing, "model_max_length", positions))
    refuse(
        (job.data.max_length > most,
         f"Expected data.max_length <= {most}, the tokens that the model in {job.model_path!r} takes, got "
         f"{job.data.max_length}. Longer texts are cut."),
    )  # fmt: skip


def _give_rows(model: Any, job: Job, tokenizer: Any) -> None:
    """Give the new tokens of the job rows of the embedding, near the mean of the others.

    Refused are tokens that would get one and are not named, as with the tokenizer of another model, and a padding token
    without one, which each batch would have.
    """
    rows, named = int(model.get_input_embeddings().weight.shape[0]), job.model.new_tokens or ()
    beyond = sorted((place, token) for token, place in tokenizer.get_vocab().items() if place >= rows)
    size = 1 + max((place for place, token in beyond if token in named), default=rows - 1)
    used = [token for place, token in beyond if place < size or token == tokenizer.pad_token]
    unnamed = [token for token in used if token not in named]
    refuse(
        (unnamed,
         f"Expected a row of the embedding for each token, got {rows} rows in {job.model_path!r} and none for "
         f"{shorten(unnamed)}. Name what is new in model.new_tokens, or the tokenizer of this model in "
         "model.tokenizer."),
    )  # fmt: skip
    if size > rows:
        model.resize_token_embeddings(size)


def _read(job: Job, config: Any, options: dict[str, Any]) -> nn.Module:
    """The model of a configuration: with the weights in the folder, or with new ones."""
    random, path = job.model.init == "random", job.model_path
    if job.model.pooling == "mean":
        return MeanPooledClassifier(config) if random else load_mean_pooled(path, config=config, **options)
    kind: Any = getattr(transformers, TASKS[job.task].model)
    given: dict[str, Any] = {"config": config, "dtype": torch.float32, **options}
    return cast(nn.Module, kind.from_config(config) if random else kind.from_pretrained(path, **given))


def _changes(job: Job, processing: Any) -> dict[str, Any]:
    """Changes that the job makes to the configuration of the model."""
    changes = {**(names_of_classes(job) if job.task in CLASSIFIES else {}), **TASKS[job.task].changes}
    if job.task in NEW_HEAD:
        changes["pad_token_id"] = processing.pad_token_id
    if job.model.pooling == "mean":  # noise is regularisation enough, and what is frozen is computed without dropout
        changes |= NO_DROPOUT
    return changes


def key_of(job: Job, purpose: str) -> Any:
    """A public key for random numbers that are no noise."""
    return fold_in(insecure_key(job.training.seed), purpose)


def choose_parameters(model: nn.Module, job: Job, processing: Any) -> nn.Module:
    """The model to train: with adapters of PEFT around it, or with some of its own parameters requiring gradients."""
    if job.task == "vqa":
        return _with_strategy(model, job)
    if job.strategy in ADAPTERS:
        return _checked(_with_lora(model, job, processing), job.lora)
    parameters, base = dict(model.named_parameters()), f"{getattr(model, 'base_model_prefix', '')}."
    head = {name for name in parameters if job.task in NEW_HEAD and not name.startswith(base)}
    chosen = {
        "full": {*parameters}, "head": head, "bitfit": {name for name in parameters if name.endswith("bias")},
    }[job.strategy]  # fmt: skip
    refuse((not chosen, f"Expected parameters for strategy={job.strategy!r}, {type(model).__name__} has none."))
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen | head)
    return model


def _with_strategy(model: nn.Module, job: Job) -> nn.Module:
    """A vision-language model with one of its own strategies."""
    lora = job.lora
    if job.strategy not in ADAPTERS:
        return prepare(model, job.strategy)
    with torch_seed(key_of(job, "adapters")):
        return prepare(model, job.strategy, rank=lora.rank, alpha=lora.alpha, targets=_targets(lora))


def _targets(lora: LoraSection) -> str | list[str] | None:
    if lora.targets == ("all-linear",):
        return "all-linear"
    return None if lora.targets is None else list(lora.targets)


def _checked(model: Any, lora: LoraSection) -> nn.Module:
    """The model, if each name in the section lora is of a module that it trains: PEFT drops those that it does not find
    beside others (tests/train/test_model.py::test_a_name_of_no_module_is_refused)."""
    names = [f".{name}" for name, _ in model.named_modules()]
    targets = () if lora.targets == ("all-linear",) else lora.targets or ()
    adapted = [f".{name}" for name in model.base_model.targeted_module_names] if targets else []
    wanted = [("targets", name, f".{name}", adapted) for name in targets]
    wanted += [("modules_to_save", name, f"{name}.modules_to_save", names) for name in lora.modules_to_save or ()]
    refuse(
        *((not any(each.endswith(end) for each in there),
           fail("the end of the name of a module that can be trained so", f"lora.{key}", name,
                suggestion(name, sorted({each.rpartition(".")[2] for each in names}))))
          for key, name, end, there in wanted),
    )  # fmt: skip
    return cast(nn.Module, model)


def _rows_to_train(model: Any, job: Job, tokenizer: Any) -> dict[str, list[int]] | None:
    """The rows of new tokens in each table of tokens, by its name; of two that are tied PEFT finds the other."""
    if not job.model.new_tokens:
        return None
    tables = {
        id(table.weight): table for table in (model.get_output_embeddings(), model.get_input_embeddings()) if table
    }
    rows = tokenizer.convert_tokens_to_ids(list(job.model.new_tokens))
    return {name: rows for name, module in model.named_modules() if module in tables.values()}


def _with_lora(model: nn.Module, job: Job, processing: Any) -> nn.Module:
    with one_line('peft, from pip install "dpfunc[hf]"'):
        from peft import LoraConfig, VeraConfig, get_peft_model
    lora, total = job.lora, int(getattr(model.config, "num_hidden_layers", 0))
    highest = range(total - (lora.top_layers or 0), total)
    refuse((highest.start < 0, f"Expected lora.top_layers <= {total}, the layers of the model, got {lora.top_layers}."))
    common: dict[str, Any] = {
        "task_type": TASKS[job.task].peft, "r": lora.rank, "target_modules": _targets(lora),
        "layers_to_transform": list(highest) or None,
        "modules_to_save": lora.modules_to_save and list(lora.modules_to_save),
        "fan_in_fan_out": any(type(module).__name__ == "Conv1D" for module in model.modules()),
    }  # fmt: skip
    with one_line("lora.targets that name layers of the model"), torch_seed(key_of(job, "adapters")):
        if lora.method == "vera":  # its matrices are a function of the job's public seed, and saved with the adapter
            config = VeraConfig(**common, vera_dropout=lora.dropout, projection_prng_key=job.training.seed)
        else:
            config = LoraConfig(
                **common, lora_alpha=lora.alpha, lora_dropout=lora.dropout, use_rslora=lora.rslora,
                use_dora=lora.method == "dora", trainable_token_indices=_rows_to_train(model, job, processing),
            )  # fmt: skip
        adapted = cast(nn.Module, get_peft_model(model, config))
    if lora.method == "ffa":
        for name, parameter in adapted.named_parameters():
            if any(part in name for part in _DRAWN):
                parameter.requires_grad_(False)
    return adapted
