"""What a clipped sum launches, counted and not timed: `python -m benchmarks.launches`, in less than two minutes.

On a GPU most of a step is operations that Python launches one after the other. They are counted on the CPU, below all
levels, in a step after the first that computes no row alone: operations without views, bytes that they read and
write, floating-point operations of products, reads by the host, and calls by Python. A case is small, since counts of
operations do not depend on sizes. Beside them are the step without privacy and the two modes of Opacus.

Each case has a limit for the operations and the reads of dpfunc, which tests/benchmarks/test_launches.py holds. The
command lowers a limit to what it counts, and never raises one: that is done by hand, in the result file, with a reason.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

import dpfunc
from benchmarks.engines import contestants, nets
from benchmarks.engines.cases import Case
from benchmarks.engines.problem import Problem, Truth, classification, images, next_token, text, trained
from benchmarks.engines.runner import Truths
from benchmarks.measure import MIB, TOLERANCE, Contestant, reason
from benchmarks.results import DOCS, FOLDER, fill, listed, markdown, printed, read, write
from benchmarks.small_steps import recurrent
from dpfunc.engines.audit import Audits
from dpfunc.types import LossFn

RESULT = FOLDER / "launches.json"
PAGE, ALL_COUNTS = "performance.md", "results/launches.md"  # of docs
ROWS, LAYERS, WIDTH, LENGTH, VOCABULARY = 8, 4, 64, 32, 500
SIZES = {"layers": LAYERS, "width": WIDTH, "length": LENGTH, "vocabulary": VOCABULARY}
LIMITED = ("operations", "further", "reads")

# What is counted.

# operations after which the host waits for a number; and methods of tensors that run none on a CPU
READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
READING_METHODS = ("tolist", "numpy", "cpu")
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# these read as many numbers of their first argument as they write
LOOKS_UP = ("embedding", "index", "index_select", "gather")


def recurrent_flop(x: Tensor, weight: Tensor, state_weight: Tensor, *_: object, **__: object) -> int:
    """Products of a recurrent layer: each position of each sample with both matrices."""
    return 2 * x[..., 0].numel() * (weight.numel() + state_weight.numel())


# what torch does not count: kernels of a CPU
ATTENTION, RECURRENT = "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer"
FLOPS: dict[str, Callable[..., int]] = {
    ATTENTION: sdpa_flop, f"{ATTENTION}_backward": sdpa_backward_flop,
    RECURRENT: recurrent_flop, f"{RECURRENT}_backward": lambda *args, **_: 2 * recurrent_flop(*args),
}  # fmt: skip


def size_of(tensor: Tensor) -> int:
    """Bytes of the numbers of a tensor; along an axis that is expanded there is one."""
    lengths = (length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(lengths) * tensor.itemsize


def is_view(operation: Any) -> bool:
    aliases = [each.alias_info for each in operation._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


class Launches(TorchDispatchMode):
    """Count what runs below all levels.

    `trace` has an entry for each operation that is no view: its name, and the shapes of its tensors.
    """

    __module__ = "torch"  # a step refuses modes of others, which could mix rows

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[str, tuple[torch.Size, ...]]] = []
        self.read = self.written = self.flops = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        name = func._schema.name.partition("::")[2]
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.trace.append((name, tuple(tensor.shape for tensor in given)))
        masks = name.startswith("index") and any(tensor.dtype == torch.bool for tensor in given[1:])
        self.reads += name in READING or masks
        if name not in ALLOCATES:
            sizes, written = [size_of(tensor) for tensor in given], sum(size_of(tensor) for tensor in made)
            if name in LOOKS_UP:
                sizes[0] = min(sizes[0], written)
            self.read, self.written = self.read + sum(sizes), self.written + written
        formula = FLOPS.get(name) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of tensors by which the host reads, with its call counted."""

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.reads += tensor.dtype != torch.uint8  # the state of a generator is never on a device
            return method(tensor, *args, **kwargs)

        return call


@contextmanager
def no_rows_alone() -> Iterator[None]:
    """No step in here compares rows with what is computed of them alone, which some steps do by chance."""
    with mock.patch.object(Audits, "due", return_value=0):
        yield


def calls_of(step: Callable[[], object]) -> int:
    """Calls by Python, of its own functions and of built-in ones."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what a collection calls comes by chance
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def launches_of(step: Callable[[], object]) -> Launches:
    """What one call launches."""
    found = Launches()
    methods = {name: found.counting(getattr(Tensor, name)) for name in READING_METHODS}
    with mock.patch.multiple(Tensor, **methods), found:
        step()
    return found


def counts_of(contestant: Contestant) -> dict[str, float]:
    """All counts of a step of a contestant that has taken some."""
    with no_rows_alone():
        contestant.clear()
        found = launches_of(contestant.step)
        contestant.clear()
        calls = calls_of(contestant.step)
    numbers = {"operations": len(found.trace), "reads": found.reads, "calls": calls}
    return {**numbers, "read_mib": found.read / MIB, "written_mib": found.written / MIB, "mflop": found.flops / 1e6}


# Cases.


class Logits(nn.Module):
    """A model of Transformers that is given one tensor under one or several names, as `logits = module(tensor)`."""

    def __init__(self, model: nn.Module, *names: str, **options: Any) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(**dict.fromkeys(self.names, inputs), **self.options).logits


class Answer(nn.Module):
    """A model of images and text with one question for all images: logits of the first word of the answer."""

    def __init__(self, model: nn.Module, question_T: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("question_T", question_T)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        ids_BT = self.question_T.expand(len(images_BCHW), -1)
        return self.model(input_ids=ids_BT, pixel_values=images_BCHW, use_cache=False).logits[:, -1]


def vit(rows: int) -> Problem:
    """A vision transformer of Transformers, all parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, intermediate_size=2 * WIDTH, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=nets.CLASSES,
    )  # fmt: skip
    module = Logits(ViTForImageClassification(config), "pixel_values")
    return Problem(module, *images(rows, 32, nets.CLASSES), classification)


class Checkpointed(Problem):
    """A problem whose module computes activations anew in the backward pass; `functionalize` wants it in `eval()`."""

    def functional(self) -> tuple[LossFn, dict[str, Tensor]]:
        self.module.eval()
        found = super().functional()
        self.module.train()
        return found


def llama(rows: int, *, checkpointed: bool = False) -> Problem:
    """Llama of Transformers, with grouped queries, and LoRA of PEFT on all linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    model = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    module, (inputs, targets) = Logits(model, "input_ids", use_cache=False), text(rows, LENGTH, VOCABULARY)
    if not checkpointed:
        return Problem(module, inputs, targets, next_token)
    model.activation_checkpointing_enable()
    return Checkpointed(module, inputs, targets, next_token)


def t5(rows: int) -> Problem:
    """T5, all parameters: a text is read and written."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    module = Logits(model, "input_ids", "decoder_input_ids", use_cache=False)
    return Problem(module, *text(rows, LENGTH, VOCABULARY), next_token)


def llava(rows: int) -> Problem:
    """LLaVA: a vision transformer (CLIP), a projector and Llama, all parameters."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    image = VOCABULARY - 1
    sides = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sides, image_size=32, patch_size=16),
        text_config=LlamaConfig(**sides, num_key_value_heads=2, vocab_size=VOCABULARY), image_token_index=image,
    )  # fmt: skip
    question_T = torch.cat([torch.full((4,), image), torch.arange(10, 18)])
    module = Answer(LlavaForConditionalGeneration(config), question_T)
    return Problem(module, torch.randn(rows, 3, 32, 32), torch.randint(image, (rows,)), classification)


def with_lstm_of_opacus(module: nn.Module) -> nn.Module:
    from opacus.layers import DPLSTM

    module = copy.deepcopy(module)
    own, module.layer = module.layer, DPLSTM(32, 64, batch_first=True)
    module.layer.load_state_dict({name: value.clone() for name, value in own.state_dict().items()})
    return module


def lstm(rows: int) -> Problem:
    return replace(recurrent(rows), stand_in=with_lstm_of_opacus)


@dataclass(frozen=True)
class Counted:
    """A case of the table.

    Args:
        title: one line. build: makes the problem. sizes: its arguments. engine: of dpfunc.
        aim: the most operations that issue 42 wants, where it names them.
    """

    title: str
    build: Callable[..., Problem]
    sizes: Mapping[str, Any]
    engine: str = "auto"
    aim: int | None = None


DECODER = {**SIZES, "hidden": 2 * WIDTH, "norm": "layer", "lora": False}
CASES = {
    "gpt2": Counted("GPT-2, all parameters", nets.gpt2, SIZES, aim=480),
    "vit": Counted("ViT, all parameters", vit, {}, aim=390),
    "lora": Counted("Llama, LoRA on all linear layers", llama, {}, aim=950),
    "mnist": Counted("MNIST net", nets.mnist_net, {"widths": (16, 32, 32)}, aim=75),
    "perceptron": Counted("perceptron", nets.perceptron, {"width": 64}, aim=55),
    "decoder": Counted("decoder with LayerNorm, all parameters", nets.decoder, DECODER),
    "t5": Counted("T5, all parameters", t5, {}),
    "bert": Counted("BERT, LoRA", nets.bert, SIZES),
    "resnet18": Counted("ResNet18", nets.residual_net,
        {"kind": "basic", "widths": (16, 32, 64, 128), "blocks": 2, "image": 16}),
    "lstm": Counted("LSTM", lstm, {}),
    "llava": Counted("LLaVA, all parameters", llava, {}),
    "checkpointed": Counted("Llama, LoRA, layers checkpointed", llama, {"checkpointed": True}),
    "ghost": Counted("MNIST net, engine ghost", nets.mnist_net, {"widths": (16, 32, 32)}, "ghost"),
    "decoder ghost": Counted("decoder with LayerNorm, engine ghost", nets.decoder, DECODER, "ghost"),
}  # fmt: skip
ALL_CASES = {name: Case(each.title, each.build, ROWS, each.sizes, each.sizes) for name, each in CASES.items()}


# Counting all of a case.

OURS = "dpfunc"
WHO = {"plain": "plain PyTorch", OURS: "dpfunc", "opacus-hooks": "Opacus hooks", "opacus-ghost": "Opacus ghost"}
# words of an error -> why a contestant takes no step
WHY_NOT = {
    "Parameter tying": "a parameter is used twice",
    "stack expects": "a parameter is used without samples on axis 0",
    "layer with buffers": "a layer has parameters and buffers",
    "'NoneType' object": "samples have no gradients",
    "wrong": "its sums are wrong",
}


def spec_of(name: str) -> dict[str, Any]:
    """What a contestant of a case is told; half of the samples are clipped."""
    spec = {"cases": "benchmarks.launches", "case": name, "quick": False, "device": "cpu"}
    problem = contestants.problem_of(spec)
    return {**spec, "clip_norm": statistics.median_low(Truth.of(problem.module, problem, ()).norms)}


def counted(name: str, who: str, spec: Mapping[str, Any], truths: Truths) -> dict[str, Any]:
    """Counts of a contestant whose sums are right; or, as its status, why there are none."""
    try:
        contestant = contestants.contestant({**spec, "contestant": CASES[name].engine if who == OURS else who})
        result = [contestant.step() for _ in range(2)][1]  # the first step looks at the loss
        error = truths.error(who, contestant.sums(result), False) if contestant.sums else 0.0
        if not error <= TOLERANCE:
            return {"status": f"wrong: {error:.2g}"}
        return {"status": "ok", **counts_of(contestant)}
    except Exception as error:  # noqa: BLE001  (a contestant may fail in any way; that is its result)
        return {"status": f"x: {reason(error)}"}


def step_of(name: str, copies: int = 1) -> Callable[..., object]:
    """Function that computes a clipped sum of dpfunc, after the first two.

    Args:
        name: of the case. copies: of each of its rows.

    Returns:
        A function with the argument `checked`: as a step takes the sum, which has looked at parameters before.
    """
    problem, engine = ALL_CASES[name].problem(), getattr(dpfunc.engines, CASES[name].engine)()
    inputs, targets = (torch.cat([rows] * copies) for rows in (problem.inputs, problem.targets))
    loss_fn, params = problem.functional()
    clipped_grad = dpfunc.clipped.make_clipped_grad(loss_fn, dpfunc.clipping.Flat(problem.clip_norm), engine=engine)
    step = partial(clipped_grad, params, (inputs, targets))
    with no_rows_alone():
        for _ in range(2):
            step()
    return step


def further(name: str) -> int:
    """Operations that twice as many rows add.

    The same rows, since some numbers lose their digits by chance and are computed again.
    """
    with no_rows_alone():
        few, many = (len(launches_of(step_of(name, copies)).trace) for copies in (1, 2))
    return many - few


def measure(name: str) -> dict[str, Any]:
    """The record of a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and Opacus, about the models
        spec = spec_of(name)
        truths = Truths(contestants.problem_of(spec))
        found = {who: counted(name, who, spec, truths) for who in WHO}
        found[OURS]["further"] = further(name)
    base = found["plain"]
    for each in found.values():
        if each["status"] == "ok":
            each["ratio"] = each["operations"] / base["operations"]
    parameters = len(trained(contestants.problem_of(spec).module))
    return {"title": CASES[name].title, "rows": ROWS, "parameters": parameters, "contestants": found}


def lowered(record: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its limits: those of before, or what was counted now where that is less."""
    ours, before = record["contestants"][OURS], old.get("limits", {})
    return {**record, "limits": {kind: min(ours[kind], before.get(kind, math.inf)) for kind in LIMITED}}


def above(record: Mapping[str, Any]) -> list[str]:
    """Counts that are more than their limit."""
    ours = record["contestants"][OURS]
    return [f"{kind}: {ours[kind]} > {limit}" for kind, limit in record["limits"].items() if ours[kind] > limit]


# Tables.

HEADS = ("case", "trained tensors", *WHO.values(), f"{ROWS} more rows", "aim", "limit")
KINDS = {
    "operations": ("Operations", lambda one: one["operations"]),
    "bytes": ("MiB read and written", lambda one: one["read_mib"] + one["written_mib"]),
    "flops": ("Million floating-point operations", lambda one: one["mflop"]),
    "reads": ("Reads by the host", lambda one: one["reads"]),
    "calls": ("Calls by Python", lambda one: one["calls"]),
}


def cell(kind: str, one: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """A count, and its ratio to the plain step; or why there is none."""
    if one["status"] != "ok":
        return next((f"x: {why}" for words, why in WHY_NOT.items() if words in one["status"]), one["status"])
    number, first = (KINDS[kind][1](each) for each in (one, base))
    shown = f"{number:,.1f}" if isinstance(number, float) else f"{number:,}"
    return shown if one is base or kind == "reads" or not first else f"{shown} ({number / first:.1f})"


def cells(kind: str, record: Mapping[str, Any]) -> list[str]:
    found = record["contestants"]
    return [cell(kind, found[who], found["plain"]) for who in WHO]


def rows_of(cases: Mapping[str, Any]) -> list[list[str]]:
    shown = []
    for name, case in cases.items():
        last = (case["contestants"][OURS]["further"], CASES[name].aim or "", case["limits"]["operations"])
        shown.append([case["title"], str(case["parameters"]), *cells("operations", case), *map(str, last)])
    return shown


def tables(cases: Mapping[str, Any]) -> dict[str, str]:
    """The table of docs/performance.md."""
    return {"launches": markdown(HEADS, rows_of(cases))}


def page(report: Mapping[str, Any]) -> str:
    """The page with all counts."""
    parts = [
        f"## {title}\n\n"
        + markdown(("case", *WHO.values()), [[case["title"], *cells(kind, case)] for case in report["cases"].values()])
        for kind, (title, _) in KINDS.items()
    ]
    about = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        f"""# What a clipped sum launches

Counts of one step with {ROWS} rows on a CPU, below all levels of torch.func, for the models of \
[performance](../performance.md#launches); in brackets the ratio to the step without privacy. `python -m \
benchmarks.launches` writes this page: {about}.

An operation is one that torch runs and that is no view. Each of its tensors is read once, and each result is written \
once; an operation that looks numbers up reads as many as it writes. Floating-point operations are those of products, \
convolutions, attention and recurrent layers. The host reads where it waits for a number of the device: with a GPU \
nothing is launched meanwhile. Calls are those of Python's functions and of built-in ones.

"""
        + "\n\n".join(parts)
        + "\n"
    )


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--cases", default="all", callback=lambda _, option, text: listed(text, CASES, CASES),
              help="Names with commas; other cases stay as they are in the file.")  # fmt: skip
@click.option("--out", default=RESULT, type=click.Path(path_type=Path, dir_okay=False), help="Counts and limits.")
@click.option("--docs", default=DOCS, type=click.Path(path_type=Path, file_okay=False), help="For the tables.")
def main(cases: list[str], out: Path, docs: Path) -> None:
    logging.disable(logging.WARNING)  # of Transformers, and how the engine computes them
    torch.set_num_threads(1)
    old = read(out).get("cases", {})
    found = dict(old)
    for name in track(cases, "Cases", console=Console(stderr=True)):
        found[name] = lowered(measure(name), old.get(name, {}))
    found = {name: found[name] for name in CASES if name in found}
    write(out, {"rows": ROWS, "cases": found})
    report = read(out)
    fill(docs / PAGE, tables(report["cases"]))
    (docs / ALL_COUNTS).write_text(page(report), "utf-8")
    printed(HEADS, rows_of(report["cases"]))
    if over := [f"{name}, {text}" for name, case in found.items() for text in above(case)]:
        click.echo("More than the limit: " + "; ".join(over), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
