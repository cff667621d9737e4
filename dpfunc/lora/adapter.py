"""Low-rank adapters (Hu et al. 2022) on named layers of a module, as a pure function; and their files.

May import: its folder, functional and below. Privacy depends on it: no.

A layer becomes `h = W x + (alpha / rank) B A x`, with A (rank, in) and B (out, rank); or, of vectors alone,
`h = W x + (alpha / rank) diag(b) B diag(d) A x`, with A and B of all layers (VeRA, Kopiczko et al. 2024).
"""

import copy
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from einops import einsum, rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dpfunc._utils.files import replacing
from dpfunc._utils.validation import below_one, boolean, checked, count, expect, fail, one_of, positive, shorten
from dpfunc.errors import CheckpointError, InvalidArgument, UnsupportedModel
from dpfunc.functional.copies import copied, uncopied
from dpfunc.functional.forward import Forward, check_params
from dpfunc.functional.modules import function_of, unwrapped
from dpfunc.functional.names import chosen_names, first_names, select
from dpfunc.rng import Key, fold_in, insecure_key, stream
from dpfunc.types import Params

SCHEMA = "dpfunc-lora-1"
# What is frozen as it was drawn, by what is trained.
_FIXED = {"AB": (), "B": (".lora_A",), "vectors": (".lora_A", ".lora_B")}
_PARTS = ("lora_A", "lora_B", "lora_d", "lora_b")  # d and b of vectors alone


@dataclass(frozen=True)
@checked({
    **dict.fromkeys(("targets", "also_train"), lambda name, value: tuple(value)),
    "rank": count,
    "alpha": positive,
    "dropout": below_one,
    "rslora": boolean,
    "train": partial(one_of, allowed=tuple(_FIXED)),
    "init": partial(one_of, allowed=("kaiming", "orthonormal")),
})  # fmt: skip
class LoRAConfig:
    """Configuration of an adapter; it is stored with the parameters.

    Args:
        targets: names of the adapted layers. rank: r >= 1. alpha: > 0.
        rslora: scale alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023).
        dropout: probability on the input of A, 0 <= dropout < 1; active in training mode only, not on embeddings.
        train: `AB`, or `B` with A frozen (FFA-LoRA, Sun et al. 2024), which halves the noisy coordinates and keeps the
            noise in `B A` linear; or `vectors` (VeRA): A and B are drawn once for all layers and frozen, and each layer
            has d, one number a rank, and b, one an output. For linear layers, of which ranks may exceed the sizes.
        init: of A: `kaiming` uniform, or `orthonormal` rows. B starts at zero.
        also_train: names of ordinary parameters that are trained too.

    >>> LoRAConfig(targets=("q",), rank=8, alpha=16.0).scale
    2.0
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    train: Literal["AB", "B", "vectors"] = "AB"
    init: Literal["kaiming", "orthonormal"] = "kaiming"
    also_train: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of the product B A: `alpha / rank`, or `alpha / sqrt(rank)` with `rslora`."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class LoRA:
    """An adapter: `forward(params, *args)` and the parameters it starts with. See `attach`.

    Args:
        params: initial trainable parameters, name -> tensor.
        constants: A of each target when only B is trained; of vectors A and B, under the name of the first target.
        config: what the adapter is. module: the original.
    """

    params: dict[str, Tensor]
    constants: dict[str, Tensor]
    config: LoRAConfig
    module: nn.Module = field(repr=False)
    _adapted: Forward = field(repr=False)
    _counterparts: tuple[tuple[nn.Module, nn.Module], ...] = field(repr=False)

    def forward(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The adapted module's output with these parameters; dropout as `module.train()` and `module.eval()` say."""
        every = self._every(params)
        # The copy of the structure is ours; parents come before their children, so that each ends in its own mode.
        if any(theirs.training != ours.training for theirs, ours in self._counterparts):
            for theirs, ours in self._counterparts:
                ours.train(theirs.training)
        return self._adapted(every, *args, **kwargs)

    @property
    def adapted(self) -> nn.Module:
        """The copy of the module's structure that `forward` runs. It shares the module's parameters."""
        return self._adapted.module

    @torch.no_grad()
    def merge(self, params: Params) -> nn.Module:
        """A copy of the original module with `W + scale B A`, and with the other trained parameters.

        A target whose weight is tied to another layer gets a weight of its own.

        Raises:
            InvalidArgument: params of another adapter. UnsupportedModel: a target with a quantised weight.
        """
        every = self._every(params)
        result: nn.Module = copied(self.module)
        for name in self.config.also_train:
            result.get_parameter(name).copy_(every[_adapted_name(name, self.config.targets)])
        for name in self.config.targets:
            layer = result.get_submodule(name)
            weight = layer.get_parameter("weight")
            if not weight.is_floating_point():
                raise UnsupportedModel(f"The weight of {name} is {weight.dtype}: merge into a model in float.")
            shared = self.config.targets[0] if self.config.train == "vectors" else name
            a, b = every[f"{shared}.lora_A"], every[f"{shared}.lora_B"]
            vectors = every.get(f"{name}.lora_d"), every.get(f"{name}.lora_b")
            merged = _merged_weight(layer, a, b, *vectors, self.config.scale)
            layer.register_parameter("weight", nn.Parameter(merged, requires_grad=weight.requires_grad))
        return result

    def _every(self, params: Params) -> dict[str, Tensor]:
        check_params(params, {name: param.shape for name, param in self.params.items()})
        return {**self.constants, **params}


def attach(
    module: nn.Module, key: Key, *, targets: str | Sequence[str], rank: int, alpha: float, rslora: bool = False,
    dropout: float = 0.0, train: Literal["AB", "B", "vectors"] = "AB",
    init: Literal["kaiming", "orthonormal"] = "kaiming", also_train: str | Sequence[str] = (),
) -> LoRA:  # fmt: skip
    """Low-rank adapters on named layers of a module, as a function of the adapter's parameters.

    Args:
        module: any module with Linear, Embedding, Conv2d or Hugging Face Conv1D layers. It is not changed: a copy of
            its structure shares its parameters, which follows `module.train()` and `module.eval()`.
        key: from which A is drawn, and B of vectors; the same key gives the same A. Public: no key of a run.
        targets: the layers: a regular expression that is searched in their names, or a list of names.
        rank, alpha, rslora, dropout, train, init: see `LoRAConfig`.
        also_train: ordinary parameters to train as well, e.g. of a new head: regular expression or list of names.

    Returns:
        A `LoRA`. All other parameters are constants. With B = 0 the function starts as the module's own.
        `{layer}.lora_A` is (rank, in), or (rank, in, height, width) of a Conv2d, or (rank, num_embeddings);
        `{layer}.lora_B` is (out, rank), or (out, rank, 1, 1). Of vectors, `{layer}.lora_d` is (rank,) and begins at
        0.1, `{layer}.lora_b` is (out,) and begins at 0 in the place of B. They have the weight's dtype, float32 if it
        is quantised.

    Raises:
        InvalidArgument: no such layer, a layer of another kind, a rank that is too large.
        UnsupportedModel: see `dpfunc.functionalize`; attributes that cannot be copied; a layer that has a forward of
            its own (an embedding that is scaled, as in Gemma 3), or forward hooks.

    Guarantees:
        equals the merged module (tests/lora/test_adapter.py::test_merge), leaves the module alone
        (tests/lora/test_adapter.py::test_module_is_unchanged).

    >>> from dpfunc.rng import insecure_key
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> adapter = attach(model, insecure_key(0), targets=["0"], rank=2, alpha=4, also_train="^2")
    >>> {name: tuple(p.shape) for name, p in adapter.params.items()}
    {'0.lora_A': (2, 4), '0.lora_B': (8, 2), '2.weight': (2, 8), '2.bias': (2,)}
    """
    module = unwrapped(module)
    layers = _select_layers(module, targets)
    trained = tuple(select(module, also_train)) if also_train else ()
    config = LoRAConfig(tuple(layers), rank, alpha, rslora, dropout, train, init, trained)
    expect(
        not config.dropout or not all(isinstance(layer, nn.Embedding) for layer in layers.values()),
        "dropout=0 where embeddings alone are adapted, whose inputs are not dropped", "dropout", dropout,
    )  # fmt: skip
    if problem := uncopied(module):
        raise UnsupportedModel(problem)
    adapted, counterparts = _adapted_copy(module, layers, config, key)
    places = {f"{name}.{part}" for name in layers for part in _PARTS}
    names = [name for name, _ in adapted.named_parameters() if name in places]
    forward, params = function_of(adapted, names + [_adapted_name(name, config.targets) for name in trained])
    fixed = [name for name in params if name in places and name.endswith(_FIXED[train])]
    return LoRA(params, {name: params.pop(name) for name in fixed}, config, module, forward, counterparts)


def _select_layers(module: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The layers that a regular expression or a list of names selects; each object once, in the module's order."""
    candidates = {name: layer for name, layer in module.named_modules() if name and adaptable(layer)}
    every = first_names(module.named_modules(remove_duplicate=False))
    names = {name: first for name, first in every.items() if first in candidates}
    chosen = chosen_names("targets", targets, names, "layer")
    for name in chosen:
        if name not in names:
            raise fail(
                "targets to be names of Linear, Embedding, Conv2d or Conv1D layers", "targets", name,
                _hint(name, dict(module.named_modules()), candidates),
            )  # fmt: skip
    expect(chosen, "targets to select a layer", "targets", targets, f"Layers: {shorten(list(candidates))}.")
    layers = {name: layer for name, layer in candidates.items() if name in chosen}
    if own := [f"{name} ({type(layer).__name__})" for name, layer in layers.items() if not _is_plain(layer)]:
        raise UnsupportedModel(
            f"Expected layers that compute with W and nothing else, got {shorten(own)} with a forward of its own, or "
            "with forward hooks: W + scale B A in it is not what would be trained. Take the hooks off, or leave it out "
            "of targets; also_train takes weights themselves."
        )
    return layers


def _hint(name: str, named: Mapping[str, nn.Module], candidates: Mapping[str, nn.Module]) -> str:
    if name and name in named:
        inside = [other for other in candidates if other.startswith(f"{name}.")]
        rest = f"Inside of it: {shorten(inside)}." if inside else "It cannot be adapted."
        return f"It is a {type(named[name]).__name__}. {rest}"
    if any(other.endswith(f".{name}") for other in candidates):
        return f"Names are whole paths; for all that end so, pass the regular expression r'(^|\\.){name}$'."
    close = difflib.get_close_matches(name, candidates, n=3)
    return f"Did you mean {shorten(close)}?" if close else f"Layers: {shorten(list(candidates))}."


def _adapted_name(name: str, targets: Sequence[str]) -> str:
    """The name of an ordinary parameter in the adapted module: one of a target layer is inside of its wrapper."""
    layer, _, attribute = name.rpartition(".")
    return f"{layer}.base.{attribute}" if layer in targets else name


def _adapted_copy(
    module: nn.Module, layers: Mapping[str, nn.Module], config: LoRAConfig, key: Key
) -> tuple[nn.Module, tuple[tuple[nn.Module, nn.Module], ...]]:
    """A copy of the structure that shares the tensors, with wrapped targets; and each module with its counterpart."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    wrappers: dict[int, Any] = {}
    shared = _shared_factors(layers, fold_in(key, "lora"), config) if config.train == "vectors" else None
    for name, layer in layers.items():
        factors = shared or _initial_factors(layer, fold_in(key, "lora", name), config.rank, config.init)
        wrappers[id(layer)] = LoRALayer(copy.deepcopy(layer, memo), *factors, config)
    memo.update(wrappers)  # deepcopy takes what its memo holds in place of the original, wherever it is referred to
    adapted: nn.Module = copy.deepcopy(module, memo)
    return adapted, tuple((part, memo[id(part)]) for part in module.modules())


class LoRALayer(nn.Module):
    """A frozen layer plus its low-rank part. Stands in for the layer in a copy of the module's structure."""

    def __init__(self, base: nn.Module, a: nn.Parameter, b: nn.Parameter, config: LoRAConfig) -> None:
        super().__init__()
        self.base, self.scale, self.dropout = base, config.scale, config.dropout
        self.lora_A, self.lora_B = a, b
        has_vectors = config.train == "vectors"
        self.lora_d = nn.Parameter(a.new_full((config.rank,), 0.1)) if has_vectors else None
        self.lora_b = nn.Parameter(b.new_zeros(_sizes(base)[1])) if has_vectors else None
        self.train(base.training)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """The layer's own output plus `scale * B A x`."""
        inputs = x if isinstance(self.base, nn.Embedding) else F.dropout(x, self.dropout, self.training)
        low = _low_rank(self.base, inputs, self.lora_A, self.lora_B, self.lora_d, self.lora_b)
        output: Tensor = self.base(x, *args)
        return output + self.scale * low.to(output.dtype)

    @property
    def weight(self) -> Tensor:
        """`W + scale * B A`, for models that use the weight without calling the layer (nn.MultiheadAttention)."""
        return _merged_weight(self.base, self.lora_A, self.lora_B, self.lora_d, self.lora_b, self.scale)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute (`bias`, `in_features`, ...) from the layer itself."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def _is_conv1d(layer: nn.Module) -> bool:
    """Hugging Face's Conv1D: a linear layer with weight (in, out). Recognised by form, not to import the library."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def adaptable(layer: nn.Module) -> bool:
    """True for a known kind of layer that holds its weight itself (no parametrization)."""
    known = isinstance(layer, (nn.Linear, nn.Embedding, nn.Conv2d)) or _is_conv1d(layer)
    return known and layer._parameters.get("weight") is not None


def _is_plain(layer: Any) -> bool:
    """True for the forward of torch or of Conv1D without hooks, and for a quantised weight, which is never merged."""
    forward = getattr(layer.forward, "__func__", None)  # of the layer itself: it may have been replaced there
    known = forward in (nn.Linear.forward, nn.Embedding.forward, nn.Conv2d.forward) or _is_conv1d(layer)
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return (known and not hooked) or not layer.weight.is_floating_point()


def _sizes(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a layer that is adaptable: the channels of a convolution, the rows of an embedding."""
    if isinstance(layer, nn.Linear):  # of 4 bits too, whose weight has another shape
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels, layer.out_channels
    inputs, outputs = layer.weight.shape
    return int(inputs), int(outputs)


def _low_rank(
    layer: nn.Module, x: Tensor, a: Tensor, b: Tensor, d: Tensor | None, of_outputs: Tensor | None
) -> Tensor:  # fmt: skip
    """`B A x` for each kind of layer; `diag(b) B diag(d) A x` with vectors."""
    if d is not None and of_outputs is not None:
        inputs, outputs = _sizes(layer)
        return of_outputs * F.linear(d * F.linear(x.to(a.dtype), a[:, :inputs]), b[:outputs])
    if isinstance(layer, nn.Embedding):
        return F.linear(F.embedding(x, a.t(), layer.padding_idx), b)
    x = x.to(a.dtype)
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(layer._conv_forward(x, a, None), b)
    return F.linear(F.linear(x, a), b)


def _merged_weight(
    layer: nn.Module, a: Tensor, b: Tensor, d: Tensor | None, of_outputs: Tensor | None, scale: float
) -> Tensor:  # fmt: skip
    """`W + scale B A` in the layer's form and dtype, added in float32 or better; a quantised weight stays as it is.

    With vectors `W + scale diag(b) B diag(d) A`, of A and B cut to the size of the layer.
    """
    weight = layer._parameters["weight"]
    if weight is None or not weight.is_floating_point():
        return weight  # type: ignore[return-value]  # adaptable() has seen that it is there
    if d is not None and of_outputs is not None:
        inputs, outputs = _sizes(layer)
        a, b = d[:, None] * a[:, :inputs], of_outputs[:, None] * b[:outputs]
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    a, b = a.to(wide), b.to(wide)
    if isinstance(layer, nn.Conv2d):
        delta = einsum(rearrange(b, "outputs rank 1 1 -> outputs rank"), a, "outputs rank, rank ... -> outputs ...")
    else:
        product = b @ a
        delta = product.T if isinstance(layer, nn.Embedding) or _is_conv1d(layer) else product
    return (weight.to(wide) + scale * delta).to(weight.dtype)


def _shared_factors(
    layers: Mapping[str, nn.Module], key: Key, config: LoRAConfig
) -> tuple[nn.Parameter, nn.Parameter]:  # fmt: skip
    """A and B of all layers by key, of the largest sizes: of `A x` and of `B x` the variance is at most 1/3."""
    other = [name for name, layer in layers.items() if not (isinstance(layer, nn.Linear) or _is_conv1d(layer))]
    expect(not other, "linear layers with train='vectors'", "targets", other)
    expect(config.init == "kaiming", "init='kaiming' with train='vectors'", "init", config.init)
    inputs, outputs = (max(sizes) for sizes in zip(*map(_sizes, layers.values()), strict=True))
    random = stream(key)
    a = random.uniform(-1, 1, (config.rank, inputs)) / math.sqrt(inputs)
    b = random.uniform(-1, 1, (outputs, config.rank)) / math.sqrt(config.rank)
    return _as_parameters(next(iter(layers.values())), a, b)


def _initial_factors(layer: nn.Module, key: Key, rank: int, init: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A by key, and B = 0, for a layer that is adaptable."""
    inputs, outputs = _sizes(layer)
    kernel: tuple[int, ...] = ()
    if isinstance(layer, nn.Conv2d):
        expect(layer.groups == 1, "Conv2d with groups=1", "groups", layer.groups, "Leave it out of targets.")
        kernel = layer.kernel_size
    fan_in, random = inputs * math.prod(kernel), stream(key)
    limit = min(outputs, fan_in)
    expect(rank <= limit, f"rank <= {limit}, the rank of {layer}", "rank", rank)
    shape = (rank, inputs, *kernel)
    not_zero = 1 if isinstance(layer, nn.Embedding) else fan_in  # of the inputs
    if init == "kaiming":  # either way `A x` has variance 1/3 for inputs of variance 1
        a = random.uniform(-1, 1, shape) / math.sqrt(not_zero)
    else:
        q, _ = np.linalg.qr(random.standard_normal((fan_in, rank)))
        a = np.ascontiguousarray(q.T).reshape(shape) * math.sqrt(fan_in / not_zero / 3)
    return _as_parameters(layer, a, np.zeros((outputs, rank, *(1 for _ in kernel))))


def _as_parameters(
    layer: nn.Module, a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]
) -> tuple[nn.Parameter, nn.Parameter]:  # fmt: skip
    """A and B in the dtype and on the device of the weight of a layer; in float32 where it is quantised."""
    weight = layer.get_parameter("weight")
    like = weight if weight.is_floating_point() else torch.empty(0, device=weight.device)
    return nn.Parameter(torch.from_numpy(a).to(like)), nn.Parameter(torch.from_numpy(b).to(like))


def save_adapter(path: Path | str, adapter: LoRA, params: Params) -> None:
    """Write an adapter as one safetensors file: parameters, frozen A, and the configuration in its metadata.

    Args:
        path: the file; replaced as a whole. adapter: from `attach`. params: trained parameters; released.

    >>> import tempfile
    >>> from dpfunc.rng import insecure_key
    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> adapter = attach(model, insecure_key(0), targets="0", rank=2, alpha=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_adapter(folder + "/adapter.safetensors", adapter, adapter.params)
    ...     again, params = load_adapter(folder + "/adapter.safetensors", model)
    >>> again.config == adapter.config
    True
    """
    every = {name: value.detach().cpu().clone().contiguous() for name, value in adapter._every(params).items()}
    config = json.dumps(asdict(adapter.config))
    with replacing(Path(path)) as new:
        save_file(every, new, metadata={"format": "pt", "schema": SCHEMA, "config": config})


def load_adapter(path: Path | str, module: nn.Module) -> tuple[LoRA, dict[str, Tensor]]:
    """Read an adapter for a module.

    Args:
        path: file from `save_adapter`. module: the module that the adapter was made for, or one of the same form.

    Returns:
        The adapter and its trained parameters, in the dtype and on the device of the module.

    Raises:
        CheckpointError: not an adapter file, or it does not fit the module.
    """
    saved, metadata = _read(path)
    if metadata.get("schema") != SCHEMA:
        raise CheckpointError(f"Expected an adapter with schema {SCHEMA!r} in {path}, got {metadata.get('schema')!r}.")
    try:
        adapter = attach(module, insecure_key(0), **json.loads(metadata["config"]))
    except (KeyError, TypeError, ValueError) as error:  # InvalidArgument is a ValueError
        problem = error if isinstance(error, InvalidArgument) else f"its configuration is damaged: {error!r}"
        raise CheckpointError(f"The adapter {path} does not fit the module: {problem}") from error
    expected = {**adapter.constants, **adapter.params}
    forms = {n: (_form(saved.get(n)), _form(expected.get(n))) for n in sorted(saved.keys() | expected.keys())}
    if differ := [f"{n}: saved {was}, module needs {need}" for n, (was, need) in forms.items() if was != need]:
        raise CheckpointError(f"The adapter {path} does not fit the module: {shorten(differ)}.")
    fitting = {name: saved[name].to(ours) for name, ours in expected.items()}
    return replace(adapter, constants={n: fitting.pop(n) for n in adapter.constants}), fitting


def _form(value: Tensor | None) -> str:
    return "absent" if value is None else str(tuple(value.shape))


def _read(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return load_file(path), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The adapter {path} cannot be read: {error}") from error
