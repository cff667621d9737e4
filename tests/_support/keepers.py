"""Places where a loss may keep something from call to call: each gives `value()`, 0 at first, and `change()`."""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import ctypes
import enum
import functools
import io
import itertools
import math
import queue
import sys
import threading
import types
import weakref

import numpy as np
import torch
from torch import nn


def of(kept, value, change):
    """What is kept, read and changed by functions of it."""
    return lambda: value(kept), lambda: change(kept)


def entry(kept):
    """The first number of a container."""
    return of(kept, lambda kept: float(kept[0]), lambda kept: kept.__setitem__(0, kept[0] + 1))


def attribute(kept, name="n"):
    """An attribute of any object."""
    setattr(kept, name, 0)
    return of(kept, lambda kept: getattr(kept, name), lambda kept: setattr(kept, name, getattr(kept, name) + 1))


def user():
    """A class of a user."""
    return type("User", (), {"n": 0, "__module__": __name__})


BOX = [0]
HELD = None


def static():
    kept = [0]

    class U:
        @staticmethod
        def value():
            return kept[0]

        @staticmethod
        def change():
            kept[0] += 1

    return U.value, U.change


def static_called():
    kept = [0]

    class U:
        @staticmethod
        def value():
            return kept[0]

        @staticmethod
        def change():
            kept[0] += 1

    return lambda: U.value(), lambda: U.change()


def static_default():
    class U:
        @staticmethod
        def value(kept=[0]):  # noqa: B006  (what this is about)
            return kept[0]

    return lambda: U.value(), lambda: U.value.__defaults__[0].__setitem__(0, 1)


def classmeth():
    kept = [0]

    class U:
        @classmethod
        def value(cls):
            return kept[0]

        @classmethod
        def change(cls):
            kept[0] += 1

    return lambda: U.value(), lambda: U.change()


def static_global():
    BOX[0] = 0

    class U:
        @staticmethod
        def value():
            return BOX[0]

        @staticmethod
        def change():
            BOX[0] += 1

    return lambda: U().value(), lambda: U().change()


def metaclass():
    Meta = type("Meta", (type,), {"n": 0, "__module__": __name__})
    U = Meta("U", (), {"__module__": __name__})
    return lambda: U.n, lambda: setattr(Meta, "n", 1)


def module_in_closure():
    mod = types.ModuleType("m_user")
    mod.n = 0

    def change():
        mod.n += 1

    return lambda: mod.n, change


def module_in_attribute():
    mod = types.ModuleType("m_user")
    mod.n = 0
    u = user()()
    u.mod = mod

    def change():
        u.mod.n += 1

    return lambda: u.mod.n, change


def module_list():
    mod = types.ModuleType("m_user")
    mod.kept = [0]
    return lambda: mod.kept[0], lambda: mod.kept.__setitem__(0, 1)


def module_setattr():
    mod = types.ModuleType("m_user")
    mod.n0 = 0
    return lambda: getattr(mod, "n" + str(0)), lambda: setattr(mod, "n" + str(0), 1)


def imported():
    mod = types.ModuleType("m_imported")
    mod.n = 0
    sys.modules["m_imported"] = mod

    def value():
        import m_imported

        return m_imported.n

    def change():
        import m_imported

        m_imported.n = 1

    return value, change


def imported_from():
    mod = types.ModuleType("m_imported2")
    mod.kept = [0]
    sys.modules["m_imported2"] = mod

    def value():
        from m_imported2 import kept

        return kept[0]

    def change():
        from m_imported2 import kept

        kept[0] = 1

    return value, change


def global_by_name():
    globals()["FOUND"] = 0
    return lambda: globals()["FOUND"], lambda: globals().__setitem__("FOUND", 1)


def global_by_built_name():
    globals()["FOUND1"] = 0
    return lambda: globals()["FOU" + f"ND{len(BOX)}"], lambda: globals().__setitem__(f"FOUND{len(BOX)}", 1)


def by_eval():
    globals()["FOUND2"] = 0
    return lambda: eval("FOU" + "ND2"), lambda: exec("global FOUND2; FOUND2 = 1")


def in_builtins():
    builtins.KEPT_N = 0

    def change():
        builtins.KEPT_N = 1

    return lambda: KEPT_N, change  # noqa: F821  (a name of `builtins`)


def on_library():
    nn.kept_number = 0

    def change():
        nn.kept_number = 1

    return lambda: nn.kept_number, change


def on_library_class():
    nn.Linear.kept_number = 0

    def change():
        nn.Linear.kept_number = 1

    return lambda: nn.Linear.kept_number, change


def environ():
    import os

    os.environ["KEPT_N"] = "0"
    return lambda: int(os.environ["KEPT_N"]), lambda: os.environ.__setitem__("KEPT_N", "1")


def buf(n, write, i=5, read=None):
    def make():
        t = torch.zeros(n)
        return (lambda: t[i].item()), (lambda: write(t, i))

    return make


def wdata(t, i):
    t.data[i] = 1.0


def wnumpy(t, i):
    t.numpy()[i] = 1.0


def numpy_handle(n=300, i=7):
    t = torch.zeros(n)
    a = t.numpy()
    return lambda: t[i].item(), lambda: a.__setitem__(i, 1)


def grad():
    t = torch.zeros(3, requires_grad=True)
    t.grad = torch.zeros(3)

    def change():
        t.grad = torch.ones(3)

    return lambda: t.grad[0].item(), change


def grad_set():
    t = torch.zeros(3, requires_grad=True)

    def change():
        t.grad = torch.ones(3)

    return lambda: 0 if t.grad is None else 1, change


def sparse():
    t = torch.eye(3).to_sparse()

    def change():
        t._values()[0] = 2.0

    return lambda: t._values()[0].item() - 1, change


def csr():
    t = torch.eye(3).to_sparse_csr()

    def change():
        t.values()[0] = 2.0

    return lambda: t.values()[0].item() - 1, change


def inference():
    with torch.inference_mode():
        t = torch.zeros(3)

    def change():
        with torch.inference_mode():
            t[0] = 1.0

    return lambda: t[0].item(), change


def quantised():
    t = torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8)

    def change():
        t.copy_(torch.ones(3))

    return lambda: t.dequantize()[0].item(), change


def weak():
    u = user()()
    u.n = 0
    globals()["HELD"] = u
    r = weakref.ref(u)
    return lambda: r().n, lambda: setattr(r(), "n", 1)


def weakproxy():
    u = user()()
    u.n = 0
    globals()["HELD"] = u
    r = weakref.proxy(u)
    return lambda: r.n, lambda: setattr(r, "n", 1)


def weakmethod():
    class U:
        n = 0

        def value(self):
            return self.n

        def change(self):
            self.n = 1

    u = U()
    globals()["HELD"] = u
    v, c = weakref.WeakMethod(u.value), weakref.WeakMethod(u.change)
    return lambda: v()(), lambda: c()()


def weakdict():
    key = user()()
    globals()["HELD"] = key
    d = weakref.WeakKeyDictionary({key: 0})
    return lambda: next(iter(d.values())), lambda: d.__setitem__(key, 1)


def weakvalues():
    u = user()()
    u.n = 0
    globals()["HELD"] = u
    d = weakref.WeakValueDictionary({"u": u})
    return lambda: d["u"].n, lambda: setattr(d["u"], "n", 1)


class Base:
    __slots__ = ("n",)


class Derived(Base):
    __slots__ = ("m",)


class DerivedD(Base):
    pass


class Hidden:
    __slots__ = ("__n",)

    def __init__(self):
        self.__n = 0

    def value(self):
        return self.__n

    def change(self):
        self.__n = 1


def slots_and_state():
    class S:
        __slots__ = ("n",)

        def __init__(self):
            self.n = 0

        def __getstate__(self):
            return None

        def __reduce__(self):
            return (S, ())

    return attribute(S())


def stringio():
    s = io.StringIO()
    return lambda: len(s.getvalue()), lambda: s.write("x")


def stringio_pos():
    s = io.StringIO("abc")
    return lambda: s.tell(), lambda: s.seek(1)


def bytesio():
    s = io.BytesIO()
    return lambda: len(s.getvalue()), lambda: s.write(b"x")


def swap(a, b, ident=True):
    def make():
        box = [a]
        return (lambda: 0 if (type(box[0]) is type(a) and str(box[0]) == str(a)) else 1), lambda: box.__setitem__(0, b)

    return make


def identity():
    a, b = object(), object()
    box = [a]
    return lambda: 0 if box[0] is a else 1, lambda: box.__setitem__(0, b)


def builtin_swap():
    box = [math.sin]
    return lambda: 0 if box[0] is math.sin else 1, lambda: box.__setitem__(0, math.cos)


def class_swap():
    box = [nn.Linear]
    return lambda: 0 if box[0] is nn.Linear else 1, lambda: box.__setitem__(0, nn.Conv1d)


def dtype_swap():
    box = [torch.float32]
    return lambda: 0 if box[0] is torch.float32 else 1, lambda: box.__setitem__(0, torch.float64)


def enum_swap():
    E = enum.Enum("E", "A B")
    box = [E.A]
    return lambda: 0 if box[0] is E.A else 1, lambda: box.__setitem__(0, E.B)


def code_swap():
    f, g = (lambda: 0), (lambda: 1)
    return lambda: f(), lambda: setattr(f, "__code__", g.__code__)


def cached_property():
    class U:
        n = 0

        @functools.cached_property
        def p(self):
            return self.n

    u = U()
    return lambda: int("p" in u.__dict__), lambda: u.p


def local():
    kept = threading.local()
    kept.n = 0
    return lambda: kept.n, lambda: setattr(kept, "n", 1)


def locals_attr_of_method():
    class V:
        def f(self):
            return V.f.n

    V.f.n = 0
    return lambda: V().f(), lambda: setattr(V.f, "n", 1)


def nested_module_fn():
    mod = types.ModuleType("m_fn")
    exec("N = 0\ndef value():\n    return N\ndef change():\n    global N\n    N += 1\n", mod.__dict__)
    return lambda: mod.value(), lambda: mod.change()


def recarr():
    r = np.rec.array([(0,)], dtype=[("n", int)])
    return lambda: r.n[0], lambda: r.n.__setitem__(0, 1)


def objarr():
    a = np.empty(1, dtype=object)
    a[0] = [0]
    return lambda: a[0][0], lambda: a[0].__setitem__(0, 1)


def masked():
    a = np.ma.zeros(3)
    return lambda: float(a.filled(1)[0]), lambda: a.__setitem__(0, np.ma.masked)


def ctype():
    c = ctypes.c_int(0)
    return lambda: c.value, lambda: setattr(c, "value", 1)


def cstruct():
    S = type("S", (ctypes.Structure,), {"_fields_": [("n", ctypes.c_int)]})
    return attribute(S())


def hook_dict():
    net = nn.Linear(1, 1)
    return lambda: len(net._forward_hooks), lambda: net.register_forward_hook(lambda *a: None)


def training():
    net = nn.Linear(1, 1).eval()
    return lambda: int(net.training), lambda: net.train()


def reqgrad():
    t = torch.zeros(3)
    return lambda: int(t.requires_grad), lambda: t.requires_grad_()


def tensorsub():
    T = type("T", (torch.Tensor,), {})
    t = torch.zeros(3).as_subclass(T)
    t.n = 0
    return lambda: t.n, lambda: setattr(t, "n", 1)


def np_rng_legacy():
    r = np.random.RandomState(0)
    return lambda: r.get_state()[2] != 624, lambda: r.rand()


def exc():
    e = ValueError(0)
    return lambda: e.args[0], lambda: setattr(e, "args", (1,))


def sub_int_attr():
    Own = type("Own", (int,), {})
    i = Own(3)
    i.n = 0
    return lambda: i.n, lambda: setattr(i, "n", 1)


def sub_int_val():
    Own = type("Own", (int,), {})
    box = [Own(0)]
    return lambda: int(box[0]), lambda: box.__setitem__(0, Own(1))


def sub_str_val():
    Own = type("Own", (str,), {})
    box = [Own("")]
    return lambda: len(box[0]), lambda: box.__setitem__(0, Own("x"))


def getset_closure():
    n = 0

    class P:
        @property
        def p(self):
            return n

        @p.setter
        def p(self, v):
            nonlocal n
            n = v

    o = P()
    return lambda: o.p, lambda: setattr(o, "p", 1)


def descriptor():
    class Dd:
        n = 0

        def __get__(self, o, t):
            return self.n

        def __set__(self, o, v):
            self.n = v

    class Has:
        p = Dd()

    o = Has()
    return lambda: o.p, lambda: setattr(o, "p", 1)


def wrapped():
    kept = [0]

    @functools.lru_cache
    def f():
        return None

    f.n = kept
    return lambda: f.n[0], lambda: kept.__setitem__(0, 1)


def lru_value():
    @functools.lru_cache
    def f():
        return [0]

    f()
    return lambda: f()[0], lambda: f().__setitem__(0, 1)


def chain():
    c = collections.ChainMap({}, {"n": 0})
    return lambda: c["n"], lambda: c.__setitem__("n", 1)


def order():
    d = {"a": 1, "b": 2}
    return lambda: int(next(iter(d)) != "a"), lambda: d.__setitem__("a", d.pop("a"))


def attr_name():
    o = types.SimpleNamespace(a=1)

    def change():
        del o.a
        o.b = 1

    return lambda: int(hasattr(o, "b")), change


def simplequeue():
    q = queue.SimpleQueue()
    return lambda: q.qsize(), lambda: q.put(1)


def arr():
    a = array.array("i", [0])
    return entry(a)


def memview():
    b = memoryview(bytearray(1))
    return entry(b)


def user_list():
    return entry(collections.UserList([0]))


def counter():
    c = collections.Counter()
    return lambda: c["a"], lambda: c.update("a")


def decorated():
    BOX[0] = 0

    def deco(f):
        @functools.wraps(f)
        def g(*a):
            BOX[0] += 1
            return f(*a)

        return g

    f = deco(lambda: None)
    return lambda: BOX[0], f


def cm():
    kept = [0]

    @contextlib.contextmanager
    def c():
        kept[0] += 1
        yield

    def change():
        with c():
            pass

    return lambda: kept[0], change


def cycle():
    c = itertools.cycle([0, 1])
    return lambda: len(c.__reduce__()[2][0]), lambda: next(c)


def param_list():
    p = nn.ParameterList([nn.Parameter(torch.zeros(100))])

    def change():
        p[0].data[50] = 1

    return lambda: p[0][50].item(), change


def mid_tensor():
    return buf(1000, wdata, 501)()


def uint64():
    t = torch.zeros(100, dtype=torch.uint64)
    n = t.numpy()
    return lambda: int(n[5]), lambda: n.__setitem__(5, 1)


def meta_attr():
    t = torch.zeros(3, device="meta")
    t.n = 0
    return lambda: t.n, lambda: setattr(t, "n", 1)


def minus_zero_tensor():
    t = torch.zeros(3)
    n = t.numpy()
    return lambda: int(np.signbit(n[0])), lambda: n.__setitem__(0, -0.0)


def stored_fn():
    t = torch.zeros(100)
    f = t.data.__setitem__
    return lambda: t[7].item(), lambda: f(7, 1.0)


def dataclass_slots():
    import dataclasses

    @dataclasses.dataclass(slots=True)
    class S:
        n: int = 0

    return attribute(S())


def tensor_kept_shape():
    box = [torch.zeros(2)]
    return lambda: len(box[0]) - 2, lambda: box.__setitem__(0, torch.zeros(3))


def autograd_fn_attr():
    F_ = type("Fn", (torch.autograd.Function,), {"n": 0})
    return lambda: F_.n, lambda: setattr(F_, "n", 1)


KEEPERS = {
 "static": static, "static called": static_called, "static default": static_default, "classmethod": classmeth, "static global": static_global,
 "metaclass": metaclass, "module in closure": module_in_closure, "module in attribute": module_in_attribute, "module list": module_list, "module setattr": module_setattr,
 "imported": imported, "imported from": imported_from, "globals by name": global_by_name, "globals by built name": global_by_built_name, "eval": by_eval,
 "builtins": in_builtins, "library module": on_library, "library class": on_library_class, "environ": environ,
 "buffer .data": buf(300, wdata), "buffer .numpy": buf(300, wnumpy), "mid tensor": mid_tensor, "numpy handle": numpy_handle, "buffer 60000": buf(60000, wdata, 777), "grad": grad, "grad set": grad_set,
 "sparse": sparse, "csr": csr, "inference": inference, "quantised": quantised, "weakref": weak, "weak proxy": weakproxy, "weak method": weakmethod, "weak dict": weakdict, "weak values": weakvalues,
 "slot of base": lambda: attribute(Derived()), "slot of base with dict": lambda: attribute(DerivedD()), "hidden slot": lambda: (lambda h: (h.value, h.change))(Hidden()), "own reduce": slots_and_state, "dataclass slots": dataclass_slots,
 "StringIO": stringio, "StringIO pos": stringio_pos, "BytesIO": bytesio, "True/1": swap(1, True), "1/1.0": swap(1, 1.0), "0/-0": swap(0.0, -0.0), "0j": swap(0j, -0j),"identity": identity, "builtin swap": builtin_swap,
 "class swap": class_swap, "dtype": dtype_swap, "enum": enum_swap, "code": code_swap, "cached_property": cached_property, "threading.local": local,
 "method attr": locals_attr_of_method, "module fn": nested_module_fn, "recarray": recarr, "object array": objarr, "masked array": masked, "ctypes": ctype, "ctypes struct": cstruct,
 "hooks": hook_dict, "training": training, "requires_grad": reqgrad, "tensor subclass": tensorsub, "tensor attr": lambda: attribute(torch.zeros(3)), "param attr": lambda: attribute(nn.Parameter(torch.zeros(3))),
 "RandomState": np_rng_legacy, "exception": exc, "int subclass attr": sub_int_attr, "int subclass": sub_int_val, "str subclass": sub_str_val, "property closure": getset_closure, "descriptor": descriptor, "wrapped": wrapped,
 "lru value": lru_value, "ChainMap": chain, "dict order": order, "attribute name": attr_name, "SimpleQueue": simplequeue, "array": arr, "memoryview": memview, "UserList": user_list,
 "Counter": counter, "decorated": decorated, "contextmanager": cm, "cycle": cycle, "ParameterList": param_list, "uint64": uint64, "meta attr": meta_attr, "-0 tensor": minus_zero_tensor,
 "stored fn": stored_fn, "tensor shape": tensor_kept_shape, "Function class": autograd_fn_attr,
}  # fmt: skip
