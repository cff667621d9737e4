"""Complex numbers, writes after use, and ways around what watches a loss: threads, modes, memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from isolation.cases import D, T, calm, case, features, params, squares, tokens

around = case("around: what watches")
later = case("around: what watches, idle at first", calm)
numbers = case("complex: rows meet")
honest_numbers = case("complex: own rows", honest=True)
written = case("writes: into copies of parameters", honest=True)


@around
def mean_in_another_thread(p, b):
    h = features(p, b)
    with ThreadPoolExecutor(1) as pool:
        mean = pool.submit(lambda: h.detach().mean(0)).result()
    return squares(h - 0.5 * mean)


@later
def mean_in_another_thread_of_large_values(p, b):
    h = torch.tanh(0.3 * b["y"] @ p["w"])
    with ThreadPoolExecutor(1) as pool:
        scale = pool.submit(lambda: b["y"].abs().max().clamp(min=2.0)).result()
    return squares(h / scale)


@later
def modes_switched_off(p, b):
    h = torch.tanh(0.3 * b["y"] @ p["w"])
    with _disable_current_modes():
        scale = b["y"].abs().max().clamp(min=2.0)
    return squares(h / scale)


@later
def functions_switched_off(p, b):
    h = torch.tanh(0.3 * b["y"] @ p["w"])
    with torch._C.DisableTorchFunction():
        scale = b["y"].abs().max().clamp(min=2.0)
    return squares(h / scale)


class Rolling(TorchDispatchMode):
    """Every tanh is that of the row before."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default and out.ndim == 2:
            return out.roll(1, 0)
        return out


@around
def mode_of_its_own(p, b):
    with Rolling():
        h = features(p, b)
    return squares(h.clone() * b["y"])


@later
def memory_read_as_bytes(p, b):
    h = torch.tanh(0.3 * b["y"] @ p["w"])
    largest = max(memoryview(b["y"].detach().contiguous().numpy().reshape(-1)).tolist())
    return squares(h) / max(2.0, largest)


@later
def repr_of_a_tensor(p, b):
    h = torch.tanh(0.3 * b["y"] @ p["w"])
    return squares(h) / max(1.0, len(str((b["y"] * 40).round().long().abs().max())) - 8.0)


@around
def storage_seen_anew(p, b):
    """A tensor of its own over the memory of the batch: a size larger than the row."""
    y = b["y"].contiguous()
    whole = torch.empty(0, dtype=y.dtype).set_(y.untyped_storage())
    return squares(features(p, b) - 0.5 * whole.mean())


@around
def row_before_by_memory(p, b):
    y = b["y"]
    start = max(0, y.storage_offset() - D)
    return squares(features(p, b) + torch.as_strided(y, (1, D), (D, 1), start)[0] - y[0])


@around
def dlpack_round_trip(p, b):
    h = features(p, b)
    return squares(h - 0.5 * torch.from_dlpack(h.detach()).mean(0))


@around
def forward_mode_derivative(p, b):
    h = features(p, b)
    _, slope = torch.func.jvp(lambda y: y.mean(0).sin(), (b["y"],), (b["z"],))
    return squares(h + slope)


@around
def compiled_with_eager(p, b):
    return squares(_compiled(features(p, b)))


@torch.compile(backend="eager", dynamic=True)
def _compiled(h):
    return h - 0.5 * h.mean(0)


@around
def nested_tensor(p, b):
    h = features(p, b)
    joined = torch.nested.to_padded_tensor(torch.nested.nested_tensor(list(h.detach())), 0.0)
    return squares(h - 0.5 * joined.mean(0))


@around
def sparse_tensor(p, b):
    h = features(p, b)
    return squares(h) + torch.sparse.mm(h.detach().to_sparse(), h.T).sum(1)


@numbers
def complex_centre(p, b):
    z = torch.complex(features(p, b), b["z"])
    return squares(torch.view_as_real(z - z.mean(0)))


@numbers
def fourier_over_rows_as_complex(p, b):
    z = torch.view_as_complex(torch.stack((features(p, b), b["z"]), -1))
    return squares(torch.view_as_real(torch.fft.ifft(torch.fft.fft(z, dim=0) * b["coin"][:, None], dim=0)))


@numbers
def conjugate_products_of_rows(p, b):
    z = torch.complex(features(p, b), b["z"])
    return squares(torch.view_as_real(z @ z.conj().T @ z / 4))


@honest_numbers
def complex_parameters_by_views(p, b):
    w = torch.view_as_complex(p["v"].reshape(D, 2, D).transpose(1, 2).contiguous())
    return squares(torch.view_as_real(torch.complex(b["y"], b["z"]) * w[0]))


@honest_numbers
def complex_product_with_parameters(p, b):
    w = torch.view_as_complex(torch.stack((p["w"], p["v"][:D]), -1))
    return squares(torch.view_as_real(torch.complex(b["y"], b["z"]) @ w))


@honest_numbers
def fourier_then_real_linear(p, b):
    f = torch.fft.rfft(b["x"], dim=1)
    return squares(torch.tanh(torch.view_as_real(f).transpose(2, 3) @ p["w"]))


@honest_numbers
def fourier_then_complex_linear(p, b):
    w = torch.complex(p["w"], p["w"].T)
    return squares(torch.fft.irfft(torch.fft.rfft(b["x"], dim=1) @ w, n=T, dim=1))


@honest_numbers
def rotary_as_complex(p, b):
    h = torch.cat([tokens(p, b), b["x"][..., :1]], -1).reshape(-1, T, 2, 2)
    turn = torch.polar(torch.ones(T, 1, dtype=h.dtype), torch.arange(T, dtype=h.dtype)[:, None])
    return squares(torch.view_as_real(torch.view_as_complex(h.contiguous()) * turn))


@written
def row_of_a_copy_zeroed_after_use(p, b):
    w = p["w"].clone()
    out = b["y"] @ w
    w[0] = 0.0
    return squares(torch.tanh(out))


@written
def row_of_a_copy_zeroed_before_use(p, b):
    w = p["w"].clone()
    w[0] = 0.0
    return squares(torch.tanh(b["y"] @ w))


@written
def copy_rectified_in_place_after_use(p, b):
    w = p["w"].clone()
    out = b["y"] @ w
    F.relu(w, inplace=True)
    return squares(out)


@written
def copy_scaled_in_place_between_uses(p, b):
    w = p["w"].clone()
    first = b["y"] @ w
    w.mul_(2.0)
    return squares(first) + squares(torch.tanh(b["z"] @ w))


@written
def view_of_a_copy_written(p, b):
    w = p["w"].clone()
    out = b["y"] @ w
    w.view(-1)[::2].mul_(0.0)
    return squares(out) + squares(b["z"] @ w)


@written
def transposed_view_written_after_use(p, b):
    w = p["w"].clone()
    out = F.linear(b["y"], w.t())
    w.t()[1].fill_(1.0)
    return squares(out + b["y"] @ w)


@written
def bias_accumulated_in_place(p, b):
    out = b["y"] @ p["w"]
    out += p["c"]
    out *= p["u"]
    return squares(out)


@written
def parameter_written_into_a_slice(p, b):
    out = torch.zeros_like(b["x"])
    out[:, 0] = p["u"]
    out[:, 1:] = tokens(p, b)[:, 1:]
    return squares(out * b["x"])


@written
def copy_with_data_replaced(p, b):
    """What is used later is not what the graph saved."""
    w = p["w"].clone()
    out = b["y"] @ w
    w.data = torch.zeros_like(w)
    return squares(torch.tanh(out) + b["z"] @ w)


@case("writes: into copies of parameters", honest=True, parameters=lambda dtype: tree_map(torch.clone, params(dtype)))
def tied_weights_and_a_copy(p, b):
    w = p["w"].clone()
    h = torch.tanh(b["y"] @ p["w"])
    w[1] = p["u"]
    return squares(h @ w.T)
