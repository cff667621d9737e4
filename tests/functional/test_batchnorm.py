"""replace_batchnorm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize
from dpfunc.functional.batchnorm import count_batchnorm, replace_batchnorm


def model():
    shared = nn.BatchNorm2d(12)
    return nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Conv2d(3, 12, 3), shared),
            "b": nn.Sequential(nn.Conv2d(12, 12, 3), shared, nn.InstanceNorm2d(12)),
            "c": nn.BatchNorm1d(7, affine=False),
            "d": nn.SyncBatchNorm(8),
        }
    )


def test_all_kinds_are_replaced_and_the_original_is_not():
    before = model()
    after = replace_batchnorm(before, max_groups=4)
    assert (count_batchnorm(before), count_batchnorm(after)) == (3, 0)
    assert after["a"][1].num_groups == 4
    assert after["a"][1] is after["b"][1]  # sharing is kept
    assert isinstance(after["b"][2], nn.InstanceNorm2d)
    assert (after["c"].num_groups, after["c"].weight) == (1, None)
    assert isinstance(after["d"], nn.GroupNorm)


def test_weights_and_options_are_kept():
    norm = nn.BatchNorm2d(6, eps=1e-3)
    with torch.no_grad():
        norm.weight.uniform_()
        norm.bias.uniform_()
    norm.weight.requires_grad_(False)
    group = replace_batchnorm(norm)
    assert torch.equal(group.weight, norm.weight)
    assert torch.equal(group.bias, norm.bias)
    assert (group.eps, group.weight.requires_grad, group.bias.requires_grad) == (1e-3, False, True)
    assert group.weight is not norm.weight
    net = replace_batchnorm(nn.Sequential(nn.BatchNorm2d(4, bias=False), nn.BatchNorm3d(4, dtype=torch.float64)).eval())
    assert (net[0].bias, net[1].weight.dtype, net[1].training) == (None, torch.float64, False)


def test_samples_no_longer_mix():
    net = replace_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).train()
    forward, params = functionalize(net)
    x = torch.randn(4, 3, 8, 8)
    alone = torch.cat([forward(params, row[None]) for row in x])
    assert torch.allclose(forward(params, x), alone, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "max_groups", "groups"),
    [(32, 32, 16), (64, 32, 32), (16, 32, 8), (48, 32, 16), (24, 32, 8), (7, 7, 1), (31, 32, 1), (2, 32, 1), (1, 32, 1),
     (12, 12, 6), (9, 9, 3), (15, 15, 5), (3, 3, 1)],
)  # fmt: skip
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_groups_have_two_channels_or_more(kind, channels, max_groups, groups):
    norm = replace_batchnorm(kind(channels), max_groups)
    assert norm.num_groups == groups
    assert channels == 1 or channels // norm.num_groups >= 2


def test_count():
    assert count_batchnorm(model()) == 3
    assert count_batchnorm(nn.BatchNorm2d(3)) == 1


class NormAct(nn.BatchNorm2d):
    """As in timm: normalise, drop, activate."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Limited(NormAct):
    def forward(self, x):
        return super().forward(x).clamp(max=1)


NormAct.forward.__module__ = "timm.layers.norm_act"


def test_activations_inside_of_the_norm_are_kept():
    x = torch.randn(2, 8, 4, 4)
    net = replace_batchnorm(nn.Sequential(NormAct(8)))
    assert torch.allclose(net(x), torch.relu(nn.GroupNorm(4, 8)(x)), atol=1e-6)
    assert net(x).min() == 0


class Scaled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_bad_groups():
    with pytest.raises(InvalidArgument, match="max_groups=0"):
        replace_batchnorm(nn.BatchNorm1d(4), max_groups=0)


class Doubled(nn.BatchNorm2d):
    def __call__(self, x):
        return 2 * super().__call__(x)


def changed(change):
    layer = nn.BatchNorm2d(4)
    change(layer)
    return layer


REFUSED = {
    "Scaled: forward": Scaled(4),
    "Limited: forward, drop, act": Limited(4),
    "Doubled: __call__": Doubled(4),
    "LazyBatchNorm2d: _forward_pre_hooks, _load_state_dict_pre_hooks": nn.LazyBatchNorm2d(),
    "BatchNorm2d: forward": changed(lambda own: setattr(own, "forward", torch.relu)),
    "BatchNorm2d: _forward_hooks": changed(lambda own: own.register_forward_hook(lambda *_: None)),
    "BatchNorm2d: _forward_pre_hooks": changed(lambda own: own.register_forward_pre_hook(lambda *_: None)),
    "BatchNorm2d: _backward_hooks": changed(lambda own: own.register_full_backward_hook(lambda *_: None)),
    "BatchNorm2d: scale": changed(lambda own: own.register_parameter("scale", nn.Parameter(torch.ones(1)))),
    "ParametrizedBatchNorm2d: parametrizations": changed(
        lambda own: nn.utils.parametrize.register_parametrization(own, "weight", nn.Softplus())
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name):
    with pytest.raises(UnsupportedModel, match=rf"got 0 \({name}\), which would be lost"):
        replace_batchnorm(nn.Sequential(REFUSED[name]))


def test_tied_weights_stay_tied():
    """Of two layers, and of one with a layer of another kind; the module's own are others."""
    net = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), NormAct(4))
    net[1].weight = net[2].weight = net[0].weight
    net[3].act = nn.PReLU(4)
    net[3].act.weight = net[0].bias
    after = replace_batchnorm(net)
    assert after[0].weight is after[1].weight is after[2].weight is not net[0].weight
    assert after[3].act.weight is after[0].bias is not net[0].bias
    assert len(list(after.parameters())) == len(list(net.parameters())) == 6


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")  # old models have it
def test_what_is_computed_from_parameters_is_copied():
    net = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(replace_batchnorm(net)[0](x), net[0](x))


def test_a_module_that_cannot_be_copied_is_named():
    net = nn.Sequential(nn.BatchNorm2d(4))
    net.held = (number for number in range(3))
    with pytest.raises(UnsupportedModel, match=r"Sequential\.held"):
        replace_batchnorm(net)
