"""Other systems and other versions of torch, as far as a stand-in can tell: what they lack is taken away."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from new_python import python
from run_cases import DATA, PLAN, start, store
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import dpfunc
from dpfunc import checkpoint, distributed
from dpfunc._utils.versions import check_sharding
from dpfunc.errors import UnsupportedModel

ROOT = Path(dpfunc.__file__).parent
# Modules that Windows lacks, and names of `os` and `signal`.
POSIX = ("fcntl", "grp", "pwd", "resource", "termios", "pty", "syslog", "readline", "curses", "posix")
POSIX_NAMES = {
    "os": ("fork", "register_at_fork", "getuid", "geteuid", "setsid", "killpg", "sched_getaffinity", "O_DIRECTORY",
           "O_NOFOLLOW", "uname", "sysconf", "fchmod", "WNOHANG", "statvfs"),
    "signal": ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "alarm", "setitimer", "pthread_sigmask"),
}  # fmt: skip
OTHERS = "import torch, transformers.trainer, peft, opacus.accountants, scipy.special\n"  # they may do as they like
BLOCKED = f"""
import builtins, importlib, os, signal, sys
real = builtins.__import__
def without(name, globals=None, locals=None, fromlist=(), level=0):
    if str((globals or {{}}).get("__name__")).split(".")[0] == "dpfunc" and name in {POSIX}:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = without
for module, names in {POSIX_NAMES}.items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
"""
MODULES = sorted(
    ".".join(("dpfunc", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)
IMPORT_ALL = f"""
import importlib
for name in {MODULES}:
    importlib.import_module(name)
print("imported")
"""
BLOCKS = """
for code in ("import fcntl", "from pwd import getpwuid", "import os; os.register_at_fork"):
    try:
        exec(code, {"__name__": "dpfunc.extra"})
    except (ImportError, AttributeError):
        continue
    print(code)
"""
# Names of torch 2.13 that torch 2.6 lacks; found by comparing what dpfunc uses with the files of its wheel.
OLDER = """
import torch
import torch._dynamo  # itself needs what is removed here
import torch.nn.functional as F
from torch._C._dynamo import eval_frame
for space, name in (
    (F, "grouped_mm"), (torch, "_grouped_mm"), (eval_frame, "_FrameAction"), (eval_frame, "_FrameExecStrategy"),
    (eval_frame, "set_code_exec_strategy"), (torch.utils._python_dispatch.TorchDispatchMode, "_should_skip_dynamo"),
    (torch.utils._python_dispatch.TorchDispatchMode, "__init_subclass__"),
):
    delattr(space, name)
group_norm = torch.nn.GroupNorm.__init__
def old_group_norm(self, num_groups, num_channels, eps=1e-5, affine=True, device=None, dtype=None):
    group_norm(self, num_groups, num_channels, eps, affine, device=device, dtype=dtype)
torch.nn.GroupNorm.__init__ = old_group_norm
"""
STEP = """
import dpfunc
torch.manual_seed(0)
from dpfunc import clipping, engines
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
                            torch.nn.Linear(4 * 36, 3))
forward, params = dpfunc.functionalize(dpfunc.replace_batchnorm(model))
batch = {"x": torch.arange(320.0).sin().reshape(5, 1, 8, 8), "y": torch.zeros(5, dtype=torch.long)}
def loss_fn(params, batch):
    return F.cross_entropy(forward(params, batch["x"]), batch["y"], reduction="none")
sums = []
for engine in (engines.loop(), engines.vmap(), engines.auto(), engines.ghost()):
    clipped, _ = dpfunc.clipped_grad(loss_fn, params, batch, clipping.Flat(1.0), engine=engine)
    sums.append(torch.cat([clipped.sums[name].flatten() for name in params]))
print(all(torch.allclose(sums[0], each, atol=1e-5) for each in sums), float(sums[0].norm()) > 0)
"""


def test_modules_and_a_step_without_what_windows_and_an_older_torch_lack():
    """The first lines print what the stand-in for Windows does not take away: nothing."""
    assert python(OTHERS + BLOCKED + BLOCKS + OLDER + IMPORT_ALL + STEP).split() == ["imported", "True", "True"]


def signature_of(parameters):
    """A function with these parameters only, as in an older torch."""
    namespace = {}
    exec(f"def function({', '.join(parameters)}): ...", namespace)
    return namespace["function"]


@pytest.mark.parametrize(
    ("module", "name", "lacking"),
    [
        ("torch.distributed.tensor", "distribute_tensor", "src_data_rank"),
        ("torch.distributed.fsdp", "fully_shard", "ignored_params"),
        ("torch.distributed.checkpoint.state_dict_saver", "save", "no_dist"),
    ],
)
def test_sharding_with_an_older_torch_is_refused(monkeypatch, tmp_path, module, name, lacking):
    check_sharding()
    old = signature_of(["tensor", "device_mesh=None"])
    old.__name__ = name
    monkeypatch.setattr(importlib.import_module(module), name, old)
    calls = (
        lambda: distributed.shard({}, None),
        lambda: distributed.sharded(None),
        lambda: distributed.shard_frozen(None, None),
        lambda: checkpoint.save(tmp_path, params={}, state=None, plan=None, data="x", ranks=object()),
        lambda: checkpoint.load(tmp_path, params={}, plan=None, data="x", ranks=object()),
    )
    for call in calls:
        with pytest.raises(UnsupportedModel, match=rf"{name}\({lacking}=\.\.\.\).*got torch"):
            call()


def test_one_process_saves_with_an_older_torch(monkeypatch, tmp_path):
    """Where `save` and `load` of torch have no `no_dist`, functions of torch that do are there."""
    for module, name in ((state_dict_saver, "save"), (state_dict_loader, "load")):
        monkeypatch.setattr(module, name, signature_of(["state_dict", "*", "process_group=None"]))
    state, values, optimizer = start()
    store(tmp_path, state, values, optimizer)
    found = dpfunc.load(tmp_path, plan=PLAN, params=values, data=DATA, without_journal="new_key")
    assert all(torch.equal(found.params[name], value) for name, value in values.items())
