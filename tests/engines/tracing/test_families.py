"""One line an operation: where its result has the rows, or that it mixes them; compared with numbers."""

from __future__ import annotations

import pytest
import torch
from oracle import clean, differences, quiet, replaced
from programs import Program, Rows, Step, run
from torch.nn import functional as F

from dpfunc.engines import bookkeeping, loop
from dpfunc.engines.tracing.families import FAMILIES

SIZES = {"B": 3, "T": 4, "d": 6, "e": 2, "H": 2}
MIXED = None

# name, function, inputs (B is the axis of the samples; an input without B is a constant), axis of the rows or MIXED
TABLE = [
    *[(f"{f.__name__} of features", lambda x, f=f: f(x, -1), "BTd", 0) for f in (
        torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, torch.var, torch.std, torch.argmax, torch.prod,
        torch.nansum, torch.nanmean, torch.count_nonzero, torch.all, torch.any, torch.softmax, torch.log_softmax,
        torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.argsort)],
    *[(f"{f.__name__} of samples", lambda x, f=f: f(x, 0), "BTd", MIXED) for f in (
        torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, torch.var, torch.std, torch.prod, torch.nansum,
        torch.nanmean, torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod, torch.logcumsumexp)],
    *[(f"{f.__name__}, first of two", lambda x, f=f: f(x, 1)[0], "BTd", 0) for f in (
        torch.max, torch.min, torch.median, torch.sort, torch.cummax, torch.cummin, torch.mode, torch.nanmedian)],
    *[(f"{f.__name__} of samples, first of two", lambda x, f=f: f(x, 0)[0], "BTd", MIXED) for f in (
        torch.max, torch.min, torch.median, torch.sort, torch.cummax, torch.cummin)],
    *[(f"{f.__name__}", f, "BTd", 0) for f in (
        torch.sin, torch.exp, torch.tanh, F.gelu, F.silu, F.elu, F.softplus, F.leaky_relu, F.hardtanh, F.logsigmoid,
        torch.nan_to_num, F.hardswish, F.mish, torch.sign, torch.erf)],
    ("sum where samples are second", lambda x: x.sum(0), "TBd", 0),
    ("sum of the axis behind", lambda x: x.sum(2), "TBd", 1),
    ("sum that keeps axes", lambda x: x.sum(0, keepdim=True), "TBd", 1),
    ("sum of two axes", lambda x: x.sum((0, 2)), "TBd", 0),
    ("sum of everything", lambda x: x.sum(), "BTd", MIXED),
    ("vector_norm", lambda x: torch.linalg.vector_norm(x, dim=-1), "BTd", 0),
    ("norm of everything", lambda x: x.norm(), "Bd", MIXED),
    ("topk", lambda x: x.topk(2, 1).values, "BTd", 0),
    ("topk of samples", lambda x: x.topk(2, 0).values, "BTd", MIXED),
    ("kthvalue", lambda x: x.kthvalue(2, 2).values, "TBd", 1),
    ("a default of the batch that no row needs", lambda x: torch.where(x.abs() >= 0, x, x.mean(0)), "BTd", 0),
    ("a default of the batch that all rows take", lambda x: torch.where(x.abs() >= 0, x.mean(0), x), "BTd", MIXED),
    ("a table of equal rows", lambda x: torch.ones(3, 6)[torch.arange(3)[:, None], x.argsort(1)[:, :2]], "Bd", 0),
    ("flip", lambda x: x.flip(1), "BTd", 0),
    ("flip of samples", lambda x: x.flip(0), "BTd", MIXED),
    ("roll", lambda x: x.roll(1, 2), "TBd", 1),
    ("roll of samples", lambda x: x.roll(1, 1), "TBd", MIXED),
    ("grid_sample of a constant", lambda g, x: F.grid_sample(x[None], g[None]), "BTe ddd", 2),
    ("grid_sample of own pictures", lambda g, x: F.grid_sample(x[:, None], g[:, None]), "BTe Bdd", 0),
    ("glu", F.glu, "BTd", 0),
    ("renorm", lambda x: x.renorm(2, 0, 0.1), "BTd", 0),
    ("renorm of channels", lambda x: x.renorm(2, 1, 0.1), "BTd", MIXED),
    ("tril", torch.tril, "BTd", 0),
    ("rfft", lambda x: torch.fft.rfft(x).abs(), "BTd", 0),
    ("fft of samples", lambda x: torch.fft.fft(x, dim=0).abs(), "BTd", MIXED),
    ("fft of two axes", lambda x: torch.fft.fft2(x).abs(), "BTd", 0),
    ("det", lambda x: torch.linalg.det(x @ x.mT + torch.eye(4)), "BTd", 0),
    ("inv", lambda x: torch.linalg.inv(x @ x.mT + torch.eye(4)), "BTd", 0),
    ("cholesky", lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)), "BTd", 0),
    ("solve with own matrices", lambda x, y: torch.linalg.solve(x @ x.mT + torch.eye(4), y), "BTd BTe", 0),
    ("lstsq of own matrices", lambda x, y: torch.linalg.lstsq(x.mT, y).solution, "BTd Bde", 0),
    ("lstsq of matrices over samples", lambda x, y: torch.linalg.lstsq(x.mT, y).solution, "TBd Tde", MIXED),
    ("pinv", torch.linalg.pinv, "BTd", 0),
    ("pinv with own tolerances", lambda x: torch.linalg.pinv(x, rtol=x[:, 0, 0].detach().sigmoid()), "BTd", 0),
    ("pinv with tolerances of other samples",
     lambda x: torch.linalg.pinv(x, rtol=x[:, :1, :1].detach().sigmoid()), "BTd", MIXED),
    ("pinv over samples", torch.linalg.pinv, "TBd", MIXED),
    ("solve for a vector of samples", lambda x, a: torch.linalg.solve(a[:3, :3] + torch.eye(3), x[:, 0]), "Bd Td", MIXED),
    ("linear", F.linear, "BTd ed", 0),
    ("linear over samples", lambda x: F.linear(x.movedim(0, -1), torch.ones(2, 3).double()), "BTd", MIXED),
    ("mm", torch.mm, "Bd de", 0),
    ("mm from the left", torch.mm, "ed dB", 1),
    ("mm of two matrices of samples", lambda x: x @ x.T, "Bd", MIXED),
    ("mm over samples", lambda x: x.T @ x, "Bd", MIXED),
    ("mv", torch.mv, "Bd d", 0),
    ("addmm", lambda x, w, b: torch.addmm(b, x, w), "Bd de e", 0),
    ("bmm", torch.bmm, "BTd Bde", 0),
    ("bmm of samples in rows", torch.bmm, "TBd Tde", 1),
    ("baddbmm", lambda x, y: torch.baddbmm(x @ y, x, y), "BTd Bde", 0),
    ("addbmm", lambda x, y: torch.addbmm(torch.zeros(4, 2).double(), x, y), "BTd Bde", MIXED),
    ("einsum", lambda x, y: torch.einsum("bij,bjk->ibk", x, y), "BTd Bde", 1),
    ("einsum of different samples", lambda x, y: torch.einsum("bij,cjk->bcik", x, y), "BTd Bde", MIXED),
    ("cross", lambda x, y: torch.linalg.cross(x[..., :3], y[..., :3]), "BTd BTd", 0),
    ("cross of constants", lambda x, y: torch.linalg.cross(x[..., :3], y[None, None, :3]), "TBd d", 1),
    ("cross where samples are second", lambda x: torch.linalg.cross(x[:3], x[1:], dim=0), "TBd", 1),
    ("cross over samples", lambda x, y: torch.linalg.cross(x, y, dim=0), "BTd BTd", MIXED),
    ("cdist", torch.cdist, "BTd BTd", 0),
    ("cdist to constants", torch.cdist, "Bd Td", 0),
    ("cdist of samples", lambda x: torch.cdist(x, x), "Bd", MIXED),
    ("outer difference", lambda x: x[:, None] - x[None], "Bd", MIXED),
    ("outer product with constants", torch.outer, "B d", 0),
    ("add of broadcast constants", torch.add, "BTd d", 0),
    ("where", lambda x, y: torch.where(x > 0, x, y), "BTd BTd", 0),
    ("masked_fill", lambda x: x.masked_fill(x > 0, 2.0), "BTd", 0),
    ("masked_fill with a mean", lambda x: x.masked_fill(x > 0, x.detach().mean()), "BTd", MIXED),
    ("maximum of other samples", lambda x: torch.maximum(x, x.flip(0)), "BTd", MIXED),
    ("gather", lambda x: x.gather(1, x.argsort(1)), "BTd", 0),
    ("gather of samples", lambda x: x.gather(0, x.argsort(0)), "BTd", MIXED),
    ("scatter", lambda x: torch.zeros_like(x).scatter(2, x.argsort(2), x), "BTd", 0),
    ("scatter_add into samples", lambda x: torch.zeros_like(x).scatter_add(0, torch.zeros(3, 6).long(), x), "Bd", MIXED),
    ("scatter_reduce", lambda x: torch.zeros_like(x).scatter_reduce(1, x.argsort(1), x, "amax"), "Bd", 0),
    ("index of own positions", lambda x: x[torch.arange(3), x.argmax(1)], "Bd", 0),
    ("index of other positions", lambda x: x[torch.arange(3), x.argmax(1).flip(0)], "Bd", MIXED),
    ("index_select", lambda x: x.index_select(1, torch.tensor([1, 0])), "BTd", 0),
    ("a table", lambda x, w: w[(x > 0).long()], "BT dH", 0),
    ("embedding", lambda x, w: F.embedding((x > 0).long(), w), "BT de", 0),
    ("one_hot", lambda x: F.one_hot((x > 0).long(), 2).double(), "BT", 0),
    ("index_put of own positions", lambda x: x.index_put((torch.arange(3), x.argmax(1)), x[:, 0] * 2), "Bd", 0),
    ("index_put at positions of all", lambda x: torch.ops.aten.index_put(x, [None, x.sum(0).argmax(0, True)], torch.ones(1).double()), "Bd", MIXED),
    ("index_add", lambda x: x.index_add(1, torch.tensor([0, 0]), x[:, :2] * 2), "BTd", 0),
    ("ordered and back", lambda x: (x[(o := x.sum(1).argsort())] * 2)[o.argsort()], "Bd", 0),
    ("the first of an order", lambda x: torch.cat([(y := x[(o := x.sum(1).argsort())])[:1] * 5, y[1:]])[o.argsort()], "Bd", MIXED),
    ("order as numbers", lambda x: x[:, :3] * torch.empty_like(o := x.sum(1).argsort()).index_put((o,), torch.arange(3)), "Bd", MIXED),
    ("masked_scatter of constants", lambda x, c: torch.zeros_like(x).masked_scatter(x > 0, c.expand(3, 4, 6)), "BTd Td", MIXED),
    ("how many were selected", lambda x: x * torch.ones_like(x[x.sum(1) > 0]).sum(), "Bd", MIXED),
    ("how many were selected, filled", lambda x: x * x[x.sum(1) > 0].detach().fill_(1.0).sum(), "Bd", MIXED),
    ("bucketize", lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]).double()).double(), "BTd", 0),
    ("searchsorted", lambda x: torch.searchsorted(x.sort(-1).values, x).double(), "BTd", 0),
    ("cat of features", lambda x, y: torch.cat([x, y], 2), "BTd BTe", 0),
    ("cat of samples", lambda x: torch.cat([x[:1] * 2, x[1:] * 2]), "BTd", 0),
    ("cat of samples and constants", lambda x, c: torch.cat([x, c.expand(3, 6)])[1:4], "Bd d", MIXED),
    ("stack in front", lambda x: torch.stack([x, x * 2]), "BTd", 1),
    ("stack behind", lambda x: torch.stack([x, x * 2], -1), "BTd", 0),
    ("stack of single samples", lambda x: torch.stack([row.sin() for row in x], 1), "Bd", 1),
    ("repeat of features", lambda x: x.repeat(1, 1, 2), "BTd", 0),
    ("repeat in front", lambda x: x.repeat(2, 1, 1, 1), "BTd", 1),
    ("pad of features", lambda x: F.pad(x, (1, 1)), "BTd", 0),
    ("pad of samples", lambda x: F.pad(x, (0, 0, 1, 0))[:3], "Bd", MIXED),
    ("repeat_interleave", lambda x: x.repeat_interleave(2, 1), "BTd", 0),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x[:, :, None].expand(3, 4, 6, 6), 2), "BTd", 0),
    ("diag_embed", lambda x: torch.diag_embed(x), "Bd", 0),
    ("diag_embed in front", lambda x: torch.diag_embed(x, dim1=0, dim2=1), "Bd", 2),
    ("copy into a part", lambda x: (y := x * 1.0).narrow(1, 0, 2).copy_(x[:, 1:3]) is not None and y, "BTd", 0),
    ("fill with a mean", lambda x: (y := x * 1.0).narrow(1, 0, 2).fill_(x.detach().mean()) is not None and y, "BTd", MIXED),
    ("samples written one by one", lambda x: [y := x.new_zeros(4, 3, 6), [y[:, k].copy_(x[k]) for k in range(3)]][0], "BTd", 1),
    ("outer of zeros and out=", lambda x: torch.mul(x.detach(), 2, out=torch.zeros(3, 4, 6, dtype=torch.float64)), "BTd", 0),
    ("conv1d", lambda x, w: F.conv1d(x, w[:, :, None]), "BTd eT", 0),
    ("conv1d of one without batch", lambda x: F.conv1d(x, torch.ones(2, 3, 1).double()), "TBd", MIXED),
    ("conv2d", lambda x, w: F.conv2d(x[:, None], w[:, None, None, :]), "BTd ee", 0),
    ("conv with samples in groups", lambda x: F.conv1d(x.reshape(1, 12, 6), torch.ones(3, 4, 2).double(), groups=3), "BTd", 1),
    ("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w[:, :, None]), "BTd Te", 0),
    ("layer_norm", lambda x: F.layer_norm(x, (6,)), "BTd", 0),
    ("layer_norm of samples", lambda x: F.layer_norm(x, (3, 6)), "TBd", MIXED),
    ("rms_norm", lambda x: F.rms_norm(x, (6,)), "BTd", 0),
    ("group_norm", lambda x: F.group_norm(x, 2), "BTd", 0),
    ("instance_norm", F.instance_norm, "BTd", 0),
    ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), "BTd", MIXED),
    ("batch_norm, fixed", lambda x: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double()), "BTd", 0),
    ("attention", F.scaled_dot_product_attention, "BTd BTd BTd", 0),
    ("attention over samples", F.scaled_dot_product_attention, "TBd TBd TBd", MIXED),
    ("max_pool1d", lambda x: F.max_pool1d(x, 2), "BTd", 0),
    ("max_pool2d of samples", lambda x: F.max_pool2d(x, 2, 1), "TBd", MIXED),
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 2), "BTd", 0),
    ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), "BTd", 0),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2), "BTd", 0),
    ("reflection", lambda x: F.pad(x, (1, 1), "reflect"), "BTd", 0),
    ("cross_entropy", lambda x: F.cross_entropy(x, x.detach().argmin(1), reduction="none"), "Bd", 0),
    ("cross_entropy of positions", lambda x: F.cross_entropy(x, x.detach().argmin(1), reduction="none"), "BTd", 0),
    ("cross_entropy, mean", lambda x: F.cross_entropy(x, x.detach().argmin(1)), "Bd", MIXED),
    ("cross_entropy, weights of the batch",
     lambda x: F.cross_entropy(x, x.detach().argmin(1), x.detach().abs().mean(0), reduction="none"), "Bd", MIXED),
    ("mse_loss", lambda x, y: F.mse_loss(x, y, reduction="none"), "BTd BTd", 0),
    ("mse_loss, mean", F.mse_loss, "BTd BTd", MIXED),
    ("binary_cross_entropy", lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid(), reduction="none"), "Bd", 0),
    ("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), "Bd Bd", 0),
    ("multi_margin_loss", lambda x: F.multi_margin_loss(x, x.detach().argmin(1), reduction="none"), "Bd", 0),
    ("unfold of images", lambda x: F.unfold(x[:, None], 2), "BTd", 0),
    ("prelu", lambda x, w: F.prelu(x, w), "BTd T", 0),
]  # fmt: skip


@pytest.mark.parametrize("line", TABLE, ids=lambda line: line[0])
def test_rows_of_an_operation(line):
    name, function, inputs, axis = line
    words = inputs.split()
    positions = [word.find("B") for word in words]
    generator = torch.Generator().manual_seed(0)
    shapes = [["B", *word.replace("B", "")] if "B" in word else list(word) for word in words]
    tensors = [torch.randn([SIZES[k] for k in shape], generator=generator, dtype=torch.float64) for shape in shapes]
    batch = tuple(tensor for tensor, position in zip(tensors, positions, strict=True) if position >= 0)
    constants = [tensor for tensor, position in zip(tensors, positions, strict=True) if position < 0]
    order, seen = [], [0, len(batch)]
    for position in positions:
        order.append(seen[position < 0])
        seen[position < 0] += 1

    def operation(*given):
        return function(
            *(t.movedim(0, position) if position >= 0 else t for t, position in zip(given, positions, strict=True))
        )

    program = Program(constants, [Step(name, operation, tuple(order))])
    with quiet():
        first = run(program, batch)
        kind, value = first.kinds[-1], first.values[-1]
        if axis is MIXED:
            assert kind is not None
            assert not clean(kind), kind
            others = ((row, run(program, replaced(batch, row, way)).values[-1]) for row in range(3) for way in range(8))
            assert any(mixes(value, other, row) for row, other in others), "it does not mix rows"
            return
        assert isinstance(kind, Rows), kind
        assert clean(kind), kind
        assert (kind.axis, kind.count, kind.ids) == (axis, 3, None)
        if run_backward(program, batch):
            first = run(program, batch)
        found = differences(
            program, batch, first, replaced(batch, 1, 0), lambda sample: None if sample == 1 else sample
        )
        assert not found


def run_backward(program, batch):
    """Take the gradient as well, where there is one."""
    program.loss = len(batch) + len(program.constants)
    try:
        run(program, batch)
    except RuntimeError:
        program.loss = None
    return program.loss is not None


def mixes(one, other, row):
    """Whether there is no axis along which only one row has changed."""
    changed = ~torch.isclose(one.double(), other.double(), equal_nan=True)
    return bool(changed.any()) and all(
        bool(changed.index_select(axis, torch.tensor([k for k in range(3) if k != row])).any())
        for axis in range(one.ndim) if one.shape[axis] == SIZES["B"]
    )  # fmt: skip


OTHER_BUILDS = frozenset(
    [
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
        "mkldnn_convolution",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "item",
        "is_nonzero",
        "clamp_backward",
        "binary_cross_entropy_with_logits_backward",
    ]
)


def test_names_are_those_of_operations():
    """Each name of the table is an ATen operation of this torch, or of a build with other devices."""
    missing = {
        name for name in FAMILIES if not hasattr(torch.ops.aten, name) and not hasattr(torch.ops.aten, f"{name}_")
    }
    assert missing <= OTHER_BUILDS, sorted(missing - OTHER_BUILDS)
    assert len(TABLE) >= 120


POSITIONS = torch.tensor([[0, 1, 2], [1, 0, 2]])


def made_sparse(positions, values):
    return torch.sparse_coo_tensor(positions, values, (3, 3), check_invariants=False)


def changed_in_place(sparse, b):
    sparse._values().mul_(b["x"][0, 0])
    return sparse


SPARSE = {
    "numbers": lambda fixed, b: made_sparse(POSITIONS, b["x"][0]),
    "positions": lambda fixed, b: made_sparse((b["x"][:2] > 0).long(), fixed.clone()),
    "positions of another type": lambda fixed, b: made_sparse((b["x"][:2] > 0).int(), fixed.clone()),
    "all": lambda fixed, b: b["x"][:3].to_sparse(),
    "rows chosen": lambda fixed, b: made_sparse(POSITIONS, fixed.clone()).index_select(0, b["x"][:3, 0].argsort()),
    "a factor": lambda fixed, b: made_sparse(POSITIONS, fixed.clone()) * b["x"][0, 0],
    "a factor in place": lambda fixed, b: made_sparse(POSITIONS, fixed.clone()).mul_(b["x"][0, 0]),
    "its numbers in place": lambda fixed, b: changed_in_place(made_sparse(POSITIONS, fixed.clone()), b),
    "a sum in place": lambda fixed, b: made_sparse(POSITIONS, fixed.clone()).add_(b["x"][:3].to_sparse()),
}


def sparse_loss(make):
    def loss_fn(p, b):
        return (b["x"] @ (p["w"].detach() + make(p["v"].detach(), b)).T @ p["w"]).square().sum(1)

    return loss_fn


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_of_the_batch_are_not_constants(name):
    """Their memory is filled by operations that are not seen."""
    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    params = {"w": torch.randn(3, 3, generator=torch.Generator().manual_seed(1)), "v": torch.ones(3)}
    assert bookkeeping(unproven="audit")(sparse_loss(SPARSE[name]), params, batch).evidence.doubts


def test_sparse_tensors_of_parameters_are_constants():
    """Also where they are trained."""

    def loss_fn(p, b):
        return (b["x"] @ (p["w"] + made_sparse(POSITIONS, p["v"] * 2)).T).square().sum(1)

    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    params = {"w": torch.randn(3, 3, generator=torch.Generator().manual_seed(1)), "v": torch.ones(3)}
    found = bookkeeping(unproven="refuse")(loss_fn, params, batch).sq_norms()
    for name, sq_B in loop()(loss_fn, params, batch).sq_norms().items():
        assert torch.allclose(found[name], sq_B, rtol=1e-5)
