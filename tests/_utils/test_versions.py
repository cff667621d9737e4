"""Other systems, as far as a stand-in can tell: what they lack is taken away."""

from __future__ import annotations

from pathlib import Path

from new_python import python

import dpfunc

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
STEP = """
import torch
import torch.nn.functional as F
import dpfunc
torch.manual_seed(0)
from dpfunc import clipping, engines
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
                            torch.nn.Linear(4 * 36, 3))
forward, params = dpfunc.functionalize(dpfunc.functional.replace_batchnorm(model))
batch = {"x": torch.arange(320.0).sin().reshape(5, 1, 8, 8), "y": torch.zeros(5, dtype=torch.long)}
def loss_fn(params, batch):
    return F.cross_entropy(forward(params, batch["x"]), batch["y"], reduction="none")
sums = []
for engine in (engines.loop(), engines.vmap(), engines.auto(), engines.ghost()):
    clipped, _ = dpfunc.clipped.clipped_grad(loss_fn, params, batch, clipping.Flat(1.0), engine=engine)
    sums.append(torch.cat([clipped.sums[name].flatten() for name in params]))
print(all(torch.allclose(sums[0], each, atol=1e-5) for each in sums), float(sums[0].norm()) > 0)
"""


def test_modules_and_a_step_without_what_windows_lacks():
    """The first lines print what the stand-in for Windows does not take away: nothing."""
    assert python(OTHERS + BLOCKED + BLOCKS + IMPORT_ALL + STEP).split() == ["imported", "True", "True"]
