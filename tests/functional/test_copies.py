"""What keeps a module from being copied is said before a run, at no memory."""

import io
import warnings
from threading import Lock

import pytest
import torch
from torch import nn

import dpfunc
from dpfunc.errors import RunWarning, UnsupportedModel
from dpfunc.functional import functionalize, with_params
from dpfunc.functional.copies import uncopied
from dpfunc.rng import insecure_key


class Counted:
    """Copying is refused by the object's own class."""

    def __deepcopy__(self, memo):
        raise NotImplementedError("one in the process")


UNCOPIED = {
    "a lock": (Lock, "TypeError"),
    "a module of Python": (lambda: io, "TypeError"),
    "a generator of Python": (lambda: (i for i in range(3)), "TypeError"),
    "a generator of torch, in a list": (lambda: [torch.Generator()], None),
    "a class that refuses it": (Counted, "NotImplementedError: one in the process"),
    "a function without a name, and tensors": (lambda: [lambda x: x, torch.ones(2)], None),
}


@pytest.mark.parametrize("name", UNCOPIED)
def test_a_module_that_cannot_be_copied_is_named_before_the_run(name):
    """`with_params` is the last line of a run: it fails exactly where the first one has said so."""
    made, problem = UNCOPIED[name]
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].held = made()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, params = functionalize(module)
    if problem is None:
        assert not said
        assert torch.equal(with_params(module, params)[0].weight, module[0].weight)
    else:
        (warning,) = said
        assert warning.category is RunWarning
        assert warning.filename == __file__
        assert f"Sequential.0.held: {problem}" in str(warning.message)
        for last in (
            lambda: with_params(module, params),
            lambda: dpfunc.lora.attach(module, insecure_key(0), targets="0", rank=1, alpha=1),
        ):
            with pytest.raises(UnsupportedModel, match=r"Sequential\.0\.held"):
                last()


def test_the_check_of_copies_takes_no_memory_of_tensors():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.table, module.tables = torch.ones(1000), [torch.ones(1000), {"a": torch.ones(1000)}]
    module.register_buffer("kept", torch.ones(1000))
    with torch.profiler.profile(profile_memory=True) as seen:
        assert not uncopied(module)
    assert not [each for each in seen.events() if each.name in ("aten::clone", "aten::copy_", "aten::empty_like")]
