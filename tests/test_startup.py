"""Imports: names that come when they are used, accounting that does not import torch, other systems and versions.

What a test looks at is which modules are there, never how long that took; `benchmarks/startup.py` has the seconds.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_journal import line, written

import dpfunc
from dpfunc.accounting import Ledger
from dpfunc.types import Event

ROOT = Path(dpfunc.__file__).parent
HEAVY = ("torch", "opacus", "transformers", "peft", "accelerate")
GAUSSIAN = ("-q", "1", "--steps", "10", "--sigma", "5", "--delta", "1e-5")
COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "help of epsilon": ["epsilon", "--help"],
    "help of sigma": ["sigma", "--help"],
    "help of requirements": ["requirements", "--help"],
    "help of ledger show": ["ledger", "show", "--help"],
    "help of train": ["train", "--help"],
    "help of generate": ["generate", "--help"],
    "epsilon": ["epsilon", *GAUSSIAN],
    "epsilon in JSON": ["epsilon", *GAUSSIAN, "--json"],
    "epsilon of a batch size": ["epsilon", "-n", "64", "-b", "64", "--epochs", "3", "--sigma", "5", "--delta", "1e-3"],
    "sigma": ["sigma", "-q", "1", "--steps", "10", "--epsilon", "3", "--delta", "1e-5"],
    "ledger": ["ledger", "show", "{ledger}", "--delta", "1e-5"],
    "journal": ["ledger", "show", "{journal}", "--delta", "1e-5"],
    "error": ["epsilon", "-q", "2", "--steps", "10", "--sigma", "5", "--delta", "1e-5"],
}


def python(code, *arguments):
    """What a new process prints, which must end well."""
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


RUN = """
import json, sys
from dpfunc.cli import main
sys.argv[0] = "dpfunc"
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted(set(name.split(".")[0] for name in sys.modules))]))
"""


def ran(*arguments):
    """Exit code of a command of `dpfunc`, and the packages that it imported."""
    code, modules = json.loads(python(RUN, *arguments).splitlines()[-1])
    return code, {name for name in HEAVY if name in modules}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_do_not_import_torch(name, tmp_path):
    ledger, journal = tmp_path / "ledger.json", tmp_path / "journal.jsonl"
    ledger.write_text(Ledger((Event(1.0, 5.0, 10),)).to_json())
    written(journal, *(line(step) for step in range(10)))
    code, heavy = ran(*(word.format(ledger=ledger, journal=journal) for word in COMMANDS[name]))
    assert code == (1 if name == "error" else 0)
    assert heavy == set()


@pytest.mark.parametrize("method", ["prv", "rdp"])
def test_opacus_comes_with_the_methods_that_are_from_it(method):
    """The other half: the test above would see torch."""
    code, heavy = ran("epsilon", "-q", "0.1", "--steps", "3", "--sigma", "5", "--delta", "1e-5", "--method", method)
    assert code == 0
    assert {"opacus", "torch"} <= heavy


@pytest.mark.parametrize("module", ["dpfunc", "dpfunc.accounting", "dpfunc.cli", "dpfunc.journal", "dpfunc.errors"])
def test_modules_that_do_not_import_torch(module):
    code = f"import sys, {module}; print([name for name in {(*HEAVY, 'scipy')} if name in sys.modules])"
    assert python(code).strip() == "[]"


def test_names_come_when_they_are_used():
    code = (
        "import sys, dpfunc; before = 'torch' in sys.modules; dpfunc.epsilon; dpfunc.Ledger; "
        "between = 'torch' in sys.modules; dpfunc.Plan; print(before, between, 'torch' in sys.modules)"
    )
    assert python(code).split() == ["False", "False", "True"]


def typed_names():
    """Name -> module of dpfunc, as the imports for type checkers say: `from dpfunc import x` has no module."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        alias.name: node.module.removeprefix("dpfunc").removeprefix(".") for node in block.body for alias in node.names
    }


def test_the_lists_of_public_names_agree():
    typed = typed_names()
    assert sorted(typed) == sorted(dpfunc.__all__)
    assert {name: home for name, home in typed.items() if home} == dpfunc._HOMES


@pytest.mark.parametrize("name", dpfunc.__all__)
def test_public_names_are_what_they_are_at_home(name):
    home = dpfunc._HOMES.get(name)
    value = importlib.import_module(f"dpfunc.{home}").__dict__[name] if home else sys.modules[f"dpfunc.{name}"]
    assert getattr(dpfunc, name) is value
    assert name in dir(dpfunc)


def test_no_name_is_a_module_as_well():
    """Importing the module would replace the function."""
    assert not {info.name for info in pkgutil.iter_modules([str(ROOT)])} & set(dpfunc._HOMES)


def test_modules_are_attributes():
    assert python(
        "import dpfunc; print(dpfunc.state.replay.__name__, dpfunc.distributed_checkpoint.save_sharded.__name__)"
    )


@pytest.mark.parametrize("name", ["nothing", "_nothing", "a.b", "", "__wrapped__"])
def test_other_names_are_no_attributes(name):
    with pytest.raises(AttributeError, match="module 'dpfunc' has no attribute"):
        getattr(dpfunc, name)
    assert not hasattr(dpfunc, name)


def test_all_names_come_with_a_star():
    assert (
        python("from dpfunc import *; import dpfunc; print(all(name in globals() for name in dpfunc.__all__))")
        == "True\n"
    )


# Modules that Windows lacks, and names of `os` and `signal`.
POSIX = (
    "fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "nis", "spwd", "crypt", "readline", "curses",
    "_posixshmem", "_posixsubprocess", "posix",
)  # fmt: skip
POSIX_NAMES = {
    "os": ("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "setsid", "killpg", "sched_getaffinity", "O_DIRECTORY",
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


def test_modules_import_without_what_windows_lacks():
    assert python(OTHERS + BLOCKED + IMPORT_ALL) == "imported\n"


@pytest.mark.parametrize("code", ["import fcntl", "from pwd import getpwuid", "import os; os.register_at_fork"])
def test_the_stand_in_blocks(code, tmp_path):
    """Imported as a module of dpfunc, each of them fails."""
    (tmp_path / "extra.py").write_text(code)
    program = BLOCKED + f"""
import dpfunc
dpfunc.__path__.append({str(tmp_path)!r})
try:
    importlib.import_module("dpfunc.extra")
except (ImportError, AttributeError):
    print("blocked")
"""  # fmt: skip
    assert python(program).strip() == "blocked"


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


def test_modules_import_with_the_names_of_an_older_torch():
    assert python(OLDER + IMPORT_ALL) == "imported\n"


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
for engine in (engines.loop(), engines.vmap(), engines.bookkeeping(), engines.ghost()):
    clipped, _ = dpfunc.clipped_grad(loss_fn, params, batch, clipping.Flat(1.0), engine=engine)
    sums.append(torch.cat([clipped.sums[name].flatten() for name in params]))
print(all(torch.allclose(sums[0], each, atol=1e-5) for each in sums), float(sums[0].norm()) > 0)
"""


def test_a_step_with_the_names_of_an_older_torch():
    assert python(OLDER + STEP).split() == ["True", "True"]


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
    from dpfunc import distributed, distributed_checkpoint
    from dpfunc.errors import UnsupportedModel
    from dpfunc.versions import check_sharding

    check_sharding()
    old = signature_of(["tensor", "device_mesh=None"])
    old.__name__ = name
    monkeypatch.setattr(importlib.import_module(module), name, old)
    calls = (
        lambda: distributed.shard({}, None),
        lambda: distributed.sharded(None),
        lambda: distributed.shard_frozen(None, None),
        lambda: distributed_checkpoint.save_sharded(tmp_path, params={}, state=None, plan=None, data="x", ranks=None),
        lambda: distributed_checkpoint.load_sharded(tmp_path, params={}, plan=None, data="x", ranks=None),
    )
    for call in calls:
        with pytest.raises(UnsupportedModel, match=rf"{name}\({lacking}=\.\.\.\).*got torch"):
            call()


def test_compiling_with_an_older_torch_is_refused(monkeypatch):
    import torch

    from dpfunc import clipping
    from dpfunc.clipped import make_clipped_grad
    from dpfunc.errors import InvalidArgument

    def loss_fn(params, batch):
        return (params["w"] * batch).sum(1)

    make_clipped_grad(loss_fn, clipping.Flat(1.0), compile=True, microbatch_size=4)
    monkeypatch.setattr(torch._dynamo, "config", types.SimpleNamespace())
    make_clipped_grad(loss_fn, clipping.Flat(1.0), microbatch_size=4)
    with pytest.raises(InvalidArgument, match="Expected compile=False with torch"):
        make_clipped_grad(loss_fn, clipping.Flat(1.0), compile=True, microbatch_size=4)
