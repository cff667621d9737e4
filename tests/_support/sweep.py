"""Calls of torch's functions with drawn arguments, as losses of a row: the engine gives what the row alone gives.

torch's batching rules are trusted by design, and some are wrong. Rows have (1, 2) numbers, and there are four of them:
many other axes are of length 1, 2 or 4, so that an axis that is taken for another one shows.
"""

from __future__ import annotations

import inspect
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from row_programs import alone, credited
from torch import Tensor
from torch.utils import _pytree as pytree

DOUBLE = torch.float64
SAMPLES = 4
"""Rows of each batch. Many other axes are as long, so that a guess by length is wrong."""

# What is made of a batch of shape (4, 2), before the function is called. B: samples; 4: an axis as long as B.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "B2": lambda x: x,
    "B4": lambda x: torch.cat([x, x.sin()], 1),
    "4B": lambda x: torch.cat([x, x.sin()], 1).t(),
    "2B": lambda x: x.t(),
    "B": lambda x: x[:, 0],
    "B22": lambda x: torch.stack([x, x.cos()], 1),
    "2B2": lambda x: torch.stack([x, x.cos()]),
    "22B": lambda x: torch.stack([x, x.cos()]).mT,
    "1B4": lambda x: torch.cat([x, x.sin()], 1)[None],
    "B44": lambda x: x.repeat(1, 2)[:, :, None] * x.sin().repeat(1, 2)[:, None],
    "B144": lambda x: (x.repeat(1, 2)[:, :, None] * x.sin().repeat(1, 2)[:, None])[:, None],
    "1B42": lambda x: torch.stack([x, x.cos(), x.sin(), x * 2], 1)[None],
    "B2222": lambda x: torch.stack([x, x.cos(), x.sin(), x * 2], 1).view(-1, 2, 2, 2, 1).expand(-1, -1, -1, -1, 2),
    "matrices": lambda x: x[:, :, None] * x[:, None] + torch.eye(2, dtype=DOUBLE),
    "shares": lambda x: x.sigmoid(),
    "bools": lambda x: x > 0,
    "bools B": lambda x: x[:, 0] > 0,
    "integers": lambda x: (x * 3).long().abs(),
    "zeros and ones": lambda x: (x > 0).long(),
    "zeros and ones B": lambda x: (x[:, 1] > 0).long(),
    "zeros and ones 2B": lambda x: (x > 0).long().t(),
    "complex": lambda x: torch.complex(x, x.cos()),
    "complex 2B": lambda x: torch.complex(x, x.cos()).t(),
    "single": lambda x: x.float(),
}  # fmt: skip


def counted(*shape: int) -> Tensor:
    """Numbers that differ at all places."""
    return torch.arange(float(torch.Size(shape).numel()), dtype=DOUBLE).view(shape) + 0.5


# Alike: the same for each row, wherever the samples are. The others have an axis of length 4, on which they differ.
ALIKE: dict[str, Callable[[], Tensor]] = {
    "a number": lambda: torch.tensor(0.5, dtype=DOUBLE),
    "2": lambda: torch.tensor([1.0, 2.0], dtype=DOUBLE),
    "12": lambda: torch.tensor([[1.0, 2.0]], dtype=DOUBLE),
    "22": lambda: torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=DOUBLE),
    "212": lambda: counted(2, 1, 2),
    "212 22": lambda: counted(2, 1, 2, 2),
    "222": lambda: counted(2, 2, 2),
    "zeros 42": lambda: torch.zeros(4, 2, dtype=DOUBLE),
    "zeros 44": lambda: torch.zeros(4, 4, dtype=DOUBLE),
    "true 12": lambda: torch.tensor([[True, False]]),
    "index 1": lambda: torch.tensor([1]),
    "index 2": lambda: torch.tensor([1, 0]),
    "index 11": lambda: torch.tensor([[0]]),
    "index 12": lambda: torch.tensor([[0, 1]]),
    "ones 42": lambda: torch.ones(4, 2, dtype=torch.long),
}
DIFFERING: dict[str, Callable[[], Tensor]] = {
    "4": lambda: counted(4),
    "41": lambda: counted(4, 1),
    "14": lambda: counted(1, 4),
    "42": lambda: counted(4, 2),
    "44": lambda: counted(4, 4),
    "24": lambda: counted(2, 4),
    "422": lambda: counted(4, 2, 2),
    "242": lambda: counted(2, 4, 2),
    "411": lambda: counted(4, 1, 1),
    "4122": lambda: counted(4, 1, 2, 2),
    "true 4": lambda: torch.tensor([True, False, True, True]),
    "true 42": lambda: torch.arange(8).view(4, 2) % 3 == 0,
    "index 4": lambda: torch.arange(4) % 2,
    "index 42": lambda: torch.arange(8).view(4, 2) % 2,
    "order 4": lambda: torch.tensor([1, 0, 3, 2]),
}
CONSTANTS = {**ALIKE, **DIFFERING}


class Made(NamedTuple):
    """An argument that is made for each call: of the batch, or a constant."""

    name: str
    of_batch: bool

    def __repr__(self) -> str:
        return f"<{'batch' if self.of_batch else 'constant'} {self.name}>"

    def of(self, x: Tensor) -> Tensor:
        return LAYOUTS[self.name](x).clone() if self.of_batch else CONSTANTS[self.name]()


batch, constant = partial(Made, of_batch=True), partial(Made, of_batch=False)
AXES = (0, 1, 2, -1, -2)
NUMBERS = (0, 1, 2, 4, -1, 0.5)
EQUATIONS = ("bi,bi->b", "bi,bj->bij", "bi,ci->bc", "bi,ij->bj", "bi->ib", "bij,bjk->bik", "ij->j", "ii->i", "bi,b->bi")

# Places in a pattern of arguments, filled by draws: the batch; it, perhaps in another layout; a constant; ...
X = lambda rng, layout: batch(layout)
Y = lambda rng, layout: batch(layout if rng.random() < 0.4 else rng.choice(list(LAYOUTS)))
C = lambda rng, layout: constant(rng.choice(list(rng.choice([ALIKE, DIFFERING]))))
AXIS = lambda rng, layout: rng.choice(AXES)
NUMBER = lambda rng, layout: rng.choice(NUMBERS)
EQUATION = lambda rng, layout: rng.choice(EQUATIONS)
PATTERNS: list[tuple[Any, ...]] = [
    (X,), (X,), (X, AXIS), (X, AXIS), (X, AXIS, AXIS), (X, NUMBER), (X, NUMBER, AXIS), (X, AXIS, NUMBER, NUMBER),
    (X, AXIS, AXIS, NUMBER), (X, NUMBER, NUMBER), (X, NUMBER, AXIS, NUMBER), (X, (AXIS, AXIS)), (X, (NUMBER, NUMBER)),
    (X, (AXIS,)), (X, (NUMBER,), (AXIS,)), (X, (NUMBER,) * 4), (X, (NUMBER,) * 3),
    (X, C), (C, X), (X, Y), (X, C, C), (X, C, Y), (X, Y, C), (X, Y, Y), (C, X, Y), (C, C, X), (X, C, NUMBER),
    (X, Y, NUMBER), (X, Y, AXIS), (X, C, AXIS), (X, Y, NUMBER, NUMBER),
    (X, AXIS, C), (X, AXIS, Y), (X, AXIS, C, Y), (X, AXIS, Y, C), (X, AXIS, C, C), (X, AXIS, Y, Y), (X, AXIS, C, NUMBER),
    (X, AXIS, Y, NUMBER), (X, (AXIS, AXIS), NUMBER), (X, Y, C, C), (X, C, C, C), (X, C, C, C, C),
    ([X, Y],), ([X, Y], AXIS), ([X, C], AXIS), (X, [Y]), (X, [C]), (X, [C], Y), (X, [Y], C), (X, [C, C], Y), (X, (C, Y), C),
    (EQUATION, X, Y), (EQUATION, X, C), (EQUATION, X),
]  # fmt: skip
KEYWORDS: list[dict[str, Any]] = [
    {}, {}, {}, {}, {}, {"dim": AXIS}, {"dim": AXIS, "keepdim": True}, {"dim": (AXIS, AXIS)}, {"reduction": "none"},
    {"reduction": "none"}, {"out": C}, {"ord": 1, "dim": AXIS}, {"axis": AXIS}, {"descending": True}, {"weight": C},
    {"reduce": "amax"}, {"reduction": "sum"}, {"bias": C}, {"stride": 1}, {"training": True}, {"accumulate": True},
]  # fmt: skip


# Names, as regular expressions, whose arguments are seldom drawn by chance -> more patterns.
FITTING: dict[str, list[tuple[Any, ...]]] = {
    "addmm_?|sspaddmm": [(batch("B2"), batch("B2"), constant("22")), (constant("44"), batch("B2"), batch("2B")),
                         (constant("12"), batch("B4"), constant("42")), (batch("4B"), batch("4B"), batch("B4"))],
    "addmv_?": [(batch("B"), batch("B2"), constant("2")), (constant("2"), batch("2B"), constant("4")), (batch("B"), batch("4B"), constant("4"))],
    "addr_?": [(batch("B2"), batch("B"), constant("2")), (batch("4B"), constant("4"), batch("B"))],
    "baddbmm_?|addbmm_?": [(batch("B22"), batch("B22"), batch("matrices")), (constant("22"), batch("2B2"), constant("222")),
                           (batch("B44"), batch("B44"), batch("B44")), (batch("2B2"), batch("2B2"), constant("222"))],
    "bmm|matmul|mm|mv|multi_dot|chain_matmul|dot|vdot|inner|outer|ger|tensordot|kron": [
        (batch("B22"), batch("matrices")), (batch("2B2"), constant("222")), (batch("B2"), constant("22")), (batch("B"), constant("4")),
        (batch("B44"), batch("4B")), (constant("24"), batch("B2")), (batch("B2"), constant("2")), (batch("4B"), constant("4"))],
    "index_(add|copy|fill|put|reduce|select).*|take_along_dim|gather|scatter.*": [
        (X, 0, constant("order 4"), Y), (X, 1, constant("index 2"), Y), (X, AXIS, constant("index 12"), C), (X, AXIS, constant("index 42"), X),
        (X, 1, constant("index 12"), 2.0), (X, AXIS, batch("zeros and ones"), X), (X, AXIS, batch("zeros and ones 2B"), C),
        (X, 0, constant("index 2")), (X, 1, constant("index 2")), (X, batch("zeros and ones"), 1), (X, AXIS, constant("ones 42"), X),
        (X, AXIS, C, X, "sum"), (X, AXIS, C, X, "amax"), (X, AXIS, batch("zeros and ones"), X, "mean"), (X, AXIS, constant("index 2"), 2.0),
        (X, (constant("index 2"),), constant("2")), (X, (constant("order 4"),), X), (X, (constant("order 4"), batch("zeros and ones B")), constant("a number"))],
    "masked_.*|where": [(X, batch("bools"), C), (X, constant("true 12"), C), (X, batch("bools"), 2.0), (X, constant("true 42"), 1.0),
                        (batch("bools"), Y, X), (X, batch("bools"))],
    "put_?|take": [(X, constant("index 2"), constant("2")), (X, batch("zeros and ones"), X), (X, constant("order 4"), batch("B"))],
    ".*(select|diagonal|slice)_scatter|narrow.*|unflatten|.*split_with_sizes": [
        (X, batch("B"), AXIS, AXIS), (X, batch("B"), AXIS, 1), (X, C, AXIS, AXIS), (X, batch("2B"), 0, 1, 3), (X, AXIS, 0, 1), (X, AXIS, 1, 1), (X, AXIS, (2, -1)),
        (X, [1, 1], AXIS), (X, [1, 3], AXIS), (X, batch("B"))],
    "as_strided.*": [(X, (4, 2), (2, 1)), (X, (4, 2), (1, 4)), (X, (4,), (2,), 1), (X, (2, 4), (1, 2)), (X, (4, 1), (1, 1)), (X, (2, 2), (3, 1), 2)],
    "conv.*": [(batch("2B2"), constant("212")), (batch("B22"), constant("212")), (batch("B144"), constant("212 22")), (batch("B22"), constant("222")),
               (batch("4B"), constant("422")), (batch("1B42"), constant("4122"), None, 1, 0, 1, 4), (batch("B22"), constant("222"), constant("2"))],
    "layer_norm|rms_norm|group_norm|instance_norm|native_layer_norm": [(X, (2,)), (X, (4,)), (X, (4, 2)), (X, 2), (X, 1), (X, (2,), constant("2"), constant("2"))],
    "batch_norm": [(X, constant("2"), constant("2")), (X, constant("4"), constant("4")), (X, None, None, None, None, True),
                   (X, constant("4"), constant("4"), None, None, True)],
    "linear|bilinear": [(batch("B2"), constant("22")), (batch("4B"), constant("44")), (batch("2B"), constant("24")), (batch("B2"), batch("B2"), constant("222"))],
    "(fractional_|adaptive_|lp_|avg_|max_)?.*pool[123]d.*": [(X, 2), (X, 1), (X, (2, 1)), (X, 2, 2), (X, (2, 2), 1), (X, (1, 2, 2))],
    "pixel_.*|.*shuffle|fold|unfold.*|interpolate|upsample.*|grid_sample.*|affine_grid.*": [
        (X, 2), (X, 1, 2, 1), (X, (2, 2)), (X, (2, 2), (1, 2)), (batch("B144"), constant("4122")), (batch("B144"), batch("B2222")), (X, 4)],
    ".*attention": [(X, X, X), (batch("B22"), constant("222"), constant("222")), (X, X, Y), (X, X, X, C)],
    ".*solve.*|lstsq|cross|.*lu_.*|orm?gqr|householder_product|ldl.*": [
        (batch("matrices"), X), (constant("22"), X), (batch("matrices"), batch("B2")), (batch("4B"), X), (X, batch("matrices")),
        (batch("B22"), batch("zeros and ones")), (X, X), (batch("matrices"), batch("matrices"))],
    "inverse|inv.*|cholesky.*|det|logdet|slogdet|eig.*|qr|svd.*|matrix_.*|pinv|cond": [(batch("matrices"),), (batch("B44"),), (batch("4B"),), (batch("2B2"),)],
    ".*(loss|cross_entropy|entropy_with_logits|kl_div|nll).*": [
        (batch("B2"), batch("zeros and ones B"), None, None, -100, None, "none"), (batch("shares"), batch("shares"), None, None, None, "none"), (X, X),
        (batch("4B"), constant("index 4"), None, None, -100, None, "none"), (batch("B"), batch("B"), batch("B"), 0.5, None, None, "none"),
        (batch("B2"), batch("zeros and ones B"), 1, 1.0, None, None, None, "none"), (X, X, X, 1.0, 2.0, 1e-6, False, None, None, "none"), (X, X, X)],
    "embedding.*|one_hot|bincount|bucketize|searchsorted|isin": [
        (batch("zeros and ones"), constant("22")), (batch("zeros and ones 2B"), constant("42")), (batch("zeros and ones"), 2), (batch("zeros and ones"),),
        (X, constant("2")), (constant("2"), X), (X, constant("4")), (constant("22"), batch("zeros and ones"))],
    "bitwise_.*|logical_.*|gcd_?|lcm_?|.*shift.*": [(batch("integers"), batch("integers")), (batch("integers"), C), (C, batch("integers")), (X,)],
    "(h|v|d|row_|column_)?stack|cat|concat.*|cartesian_prod|block_diag|broadcast_tensors|meshgrid|einsum": [
        ([X, X],), ([X, X], AXIS), ([X, C], AXIS), (X, C), (EQUATION, X, C), (EQUATION, batch("B22"), batch("matrices")), (EQUATION, batch("4B")), (EQUATION, X, X)],
}  # fmt: skip

SPACES = {
    "torch": torch,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
}
# Reason -> names, as regular expressions. Functions that draw random numbers are not listed: the judge sees that.
LEFT_OUT = {
    "private: they do not check their arguments, and wrong ones end the process": r"_.*",
    "settings of the process": r"set_.*|use_.*|.*manual_seed|seed|.*autocast.*|.*num_threads|init_num.*|.*deterministic.*",
    "input and output": r"save|load|from_file|share_memory_|.*dlpack|storage.*|from_.*|to_mkldnn.*",
    "compilers, and functions of functions": (
        r"compile|export|vmap|cond|while_loop|import_ir.*|parse_.*|fork|wait|.*register.*|apply_|map.*|backward|compiled_with.*"
        r"|merge_type.*|unify_type.*|prepare_multi.*|handle_torch_function|has_torch_function.*|boolean_dispatch|module_load"
    ),
    "memory that was not written": r".*empty.*|resize.*|new",
    "deprecated, and wrong with `out`": r"chain_matmul",
    "kernels of other devices, and of quantized numbers": r"cudnn.*|miopen.*|mkldnn.*|fbgemm.*|.*quantize.*|q_.*|.*fake_quant.*",
}  # fmt: skip


def functions() -> dict[str, Callable[..., Any]]:
    """Each function by its name, but for those that are left out."""
    found: dict[str, Callable[..., Any]] = {}
    unfit = re.compile("|".join(f"(?:{names})" for names in LEFT_OUT.values()))
    for space, module in SPACES.items():
        for name in dir(module):
            value = inspect.getattr_static(module, name)
            if unfit.fullmatch(name) or inspect.isclass(value) or inspect.ismodule(value):
                continue
            value = getattr(module, name)
            if callable(value) and value not in found.values():
                found[f"{space}.{name}"] = value
    return found


class Call(NamedTuple):
    """A function and its arguments, with all choices made."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join([*map(repr, self.args), *(f'{k}={v!r}' for k, v in self.kwargs.items())])})"

    def __call__(self, x: Tensor) -> Any:
        args, kwargs = mapped(lambda part: part.of(x) if isinstance(part, Made) else part, (self.args, self.kwargs))
        return self.function(*args, **kwargs)


def drawn(rng: random.Random, pattern: Any, layout: str) -> Any:
    """A pattern with its places filled."""
    return mapped(lambda part: part(rng, layout) if callable(part) else part, pattern)


mapped = partial(pytree.tree_map, is_leaf=lambda part: isinstance(part, Made))
TRIES = 40


def chosen(rng: random.Random, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pattern of arguments and of keywords: half of the time of those that fit the name, if there are any."""
    short = name.rpartition(".")[2]
    fitting = [pattern for names, patterns in FITTING.items() if re.fullmatch(names, short) for pattern in patterns]
    if fitting and rng.random() < 0.6:
        return rng.choice(fitting), {}
    keywords = {} if rng.random() < 0.5 else rng.choice(KEYWORDS)
    return ((X,) if rng.random() < 0.15 else rng.choice(PATTERNS)), keywords


def value_of(result: Any) -> Tensor:
    """One number, in which all numbers of a result count differently."""
    total = torch.zeros((), dtype=DOUBLE)
    for part in pytree.tree_leaves(result):
        if isinstance(part, Tensor):
            part = torch.view_as_real(part) if part.is_complex() else part
            flat = part.to(DOUBLE).flatten().nan_to_num(3.0, 1e6, -1e6)
            total = total + (flat * torch.linspace(0.5, 1.5, max(1, flat.numel()), dtype=DOUBLE)[: flat.numel()]).sum()
    return total


def loss_of(call: Call) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The loss of a row by a call: its number depends on the parameter."""

    def loss_fn(p: dict[str, Tensor], b: Tensor) -> Tensor:
        x = b * p["v"]
        return x.sum(1) + value_of(call(x))

    return loss_fn


class Swept(NamedTuple):
    """What a sweep found: names of functions, outcomes counted, and calls whose rows are wrong."""

    names: set[str]
    outcomes: Counter[str]
    wrong: list[str]


def judged(call: Call, seed: int) -> str:
    """Outcome of a call: how the engine computed it, "refused", "wrong"; empty where a row alone says nothing."""
    generator, params = torch.Generator().manual_seed(seed), {"v": torch.tensor([1.0, 0.5], dtype=DOUBLE)}
    batch, loss_fn = torch.randn(SAMPLES, 2, generator=generator, dtype=DOUBLE), loss_of(call)
    state, tolerance = torch.get_rng_state(), 1e-2 if "single" in str(call) else 1e-6
    same = partial(torch.allclose, rtol=tolerance, atol=tolerance, equal_nan=True)
    truth, near = alone(loss_fn, params, batch), alone(loss_fn, params, batch * (1 + 1e-13))
    drew = not torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(state)
    if drew or truth is None or near is None or not same(truth, near):
        return ""
    found = credited(loss_fn, params, batch)
    if found is None:
        return "refused"
    return found[1] if same(found[0], truth) else "wrong"


def swept(seed: int, count: int, table: dict[str, Callable[..., Any]]) -> Swept:
    """Outcomes of so many calls: for each function in a drawn order one call, if some draws find one that runs."""
    rng, found, names = random.Random(seed), Swept(set(), Counter(), []), list(table)
    while True:
        rng.shuffle(names)
        for name in names:
            for _ in range(TRIES):
                layout = rng.choice(list(LAYOUTS))
                pattern, keywords = chosen(rng, name)
                call = Call(name, table[name], drawn(rng, pattern, layout), drawn(rng, keywords, layout))
                outcome = judged(call, seed)
                if outcome:
                    found.names.add(name)
                    found.outcomes[outcome] += 1
                    found.wrong.extend([str(call)] if outcome == "wrong" else [])
                    break
            if found.outcomes.total() >= count:
                return found
