"""Randomness as values: a 256-bit key, folded with what it is used for, opened into a stream where it is spent.

May import: types and below. Privacy depends on it: yes.

A key is as secret as the data: who holds it can subtract the noise.
"""

import hashlib
import os
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from dpfunc._utils.validation import integer
from dpfunc.errors import InvalidArgument, StateReused

_KEY_BYTES = 32
_marks = [os.urandom(8).hex()]


def process_mark() -> str:
    """A public name for this process; no other process has it, not even a forked one."""
    return f"{os.getpid()}.{_marks[-1]}"


if hasattr(os, "register_at_fork"):  # there are no forks on Windows
    os.register_at_fork(after_in_child=lambda: _marks.append(os.urandom(8).hex()))


class _Secret(bytes):
    """Bytes that `repr` and `str` never show, even if an object is printed field by field."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "hidden"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format("hidden", spec)


@dataclass(frozen=True)
class Key:
    """256 bits from which randomness is derived. The repr hides them, and so do those of its fields.

    Args:
        secret: 32 bytes. Use `secure_key()` to get them from the operating system.
        guessable: others can know the key, as one of `insecure_key`. No secret.
        made_in: `process_mark()` of the process that made the key, or the key from which it was derived. A step is
            taken in that process only: a copy that a fork or a pickle has carried into another process would draw the
            same noise there.

    Keys of the same secret are equal, whatever else is known about them.

    >>> Key(bytes(32))
    Key(hidden)
    >>> insecure_key(0)
    Key(hidden, guessable)
    >>> vars(Key(bytes(32), made_in="here"))
    {'secret': hidden, 'guessable': False, 'made_in': 'here'}

    Guarantees:
        tests/test_rng.py::test_no_way_of_printing_shows_the_key.
    """

    secret: bytes = field(repr=False)
    guessable: bool = field(default=False, compare=False)
    made_in: str = field(default_factory=process_mark, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != _KEY_BYTES:
            got = len(self.secret) if isinstance(self.secret, bytes) else type(self.secret).__name__
            raise InvalidArgument(f"Expected a key of {_KEY_BYTES} bytes, got {got}. Use dpfunc.secure_key().")
        object.__setattr__(self, "secret", _Secret(self.secret))

    def __repr__(self) -> str:
        return "Key(hidden, guessable)" if self.guessable else "Key(hidden)"


def check_key(key: object) -> Key:
    """Return the key; anything that is no key is refused."""
    if not isinstance(key, Key):
        raise InvalidArgument(f"Expected key to be a dpfunc Key, got {type(key).__name__}. Use dpfunc.secure_key().")
    return key


def check_process(key: Key) -> None:
    """Check that a key was made in this process: a copy in another process would draw the same noise.

    Covered: forks that Python knows of (os.fork, multiprocessing), and pickles of keys and states (spawned processes,
    torch.save). Not covered: processes that each make a `Key` of the same bytes, which only a journal can tell apart.
    """
    if key.made_in != process_mark():
        raise StateReused(
            "This key was made in another process, from which this one was forked or sent a copy: both would draw the "
            "same noise, and the difference of what they release would have none. Make the key in the process that "
            "uses it: dpfunc.secure_key(), or dpfunc.distributed.shared_key(ranks) for processes that take each step "
            "together. To go on with a run of another process, load its checkpoint: dpfunc.load(..., journal=path). "
            "Nothing was spent."
        )


def secure_key() -> Key:
    """A key from the operating system's entropy.

    >>> secure_key() == secure_key()
    False
    """
    return Key(os.urandom(_KEY_BYTES))


def insecure_key(seed: int) -> Key:
    """A guessable key, for tests and demonstrations on public data.

    All bits of the seed count: 1 and 1 + 2**32 give unrelated keys. A run that begins with it warns
    (`InsecureKeyWarning`).

    >>> insecure_key(1) == insecure_key(1 + 2**32)
    False
    """
    return Key(
        hashlib.blake2b(f"insecure:{integer('seed', seed)}".encode(), digest_size=_KEY_BYTES).digest(), guessable=True
    )


def fold_in(key: Key, *parts: int | str) -> Key:
    """The key derived for one purpose: keyed BLAKE2b over the parts, each with its type and length.

    >>> root = insecure_key(0)
    >>> fold_in(root, "noise", 3) == fold_in(root, "noise", 3)
    True
    >>> fold_in(root, "noise", 3) == fold_in(root, "noise3")
    False
    """
    digest = hashlib.blake2b(key=key.secret, digest_size=_KEY_BYTES)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, (int, str)):
            raise InvalidArgument(f"Expected int or str parts in fold_in, got {type(part).__name__}.")
        data = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return Key(digest.digest(), key.guessable, key.made_in)


def fingerprint(key: Key) -> str:
    """A public name for a key, from which the key cannot be found."""
    return fold_in(key, "fingerprint").secret[:8].hex()


class Streams:
    """`stream` of one key after the other, opened again: a new one takes ten times as long. One thread at a time."""

    def __init__(self) -> None:
        from randomgen import AESCounter

        self._words = AESCounter(key=0)
        self._generator = np.random.Generator(self._words)

    def opened(self, key: Key) -> np.random.Generator:
        """The stream of a key, from its beginning; the one that was opened before has ended."""
        self._words.seed(key=_aes_key(key))
        return self._generator


def stream(key: Key) -> np.random.Generator:
    """A keyed AES-128-CTR stream with numpy's distributions; the same key gives the same numbers.

    The 128-bit AES key is the first half of the folded key, so open a key that was folded for one purpose.
    """
    from randomgen import AESCounter

    return np.random.Generator(AESCounter(key=_aes_key(key)))


def numbers_of_numpy() -> str:
    """A digest of what numpy makes of one stream, to 9 digits: keys have other batches and noise where it differs."""
    drawn = stream(insecure_key(0))
    made = [
        drawn.random(9), drawn.permutation(99), drawn.integers(2**40, size=9), drawn.standard_normal(2**13).round(9),
        drawn.binomial(999, 0.1, 9), drawn.geometric(0.1, 9),
    ]  # fmt: skip
    return hashlib.blake2b(b"".join(each.tobytes() for each in made), digest_size=8).hexdigest()


def _aes_key(key: Key) -> int:
    return int.from_bytes(key.secret[:16], "little")


@contextmanager
def torch_seed(key: Key, *, accelerators: bool = True) -> Iterator[None]:
    """Drive torch's global generators (dropout) by a key inside the block, and restore them after it.

    Only 32 bits of the seed count on the CPU: for dropout, never for noise. Without accelerators it leaves them alone,
    as the worker processes of a data loader must.
    """
    devices = list(range(torch.cuda.device_count())) if accelerators and torch.cuda.is_available() else []
    seed = int.from_bytes(key.secret[:8], "little") >> 1
    with torch.random.fork_rng(devices=devices):
        if accelerators and torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # torch.manual_seed would note where it was called, for each kind of accelerator that is not there
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def cpu_seeds(key: Key) -> Iterator[None]:
    """Seed the CPU generators of torch, NumPy and Python by a key inside the block, and restore them after it."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    seed = int.from_bytes(fold_in(key, "other generators").secret[:4], "little")
    with torch_seed(key, accelerators=False):
        random.seed(seed)
        if numpy["bit_generator"] == "MT19937":  # others cannot be seeded; they tell nothing
            np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def cpu_generators() -> tuple[object, ...]:
    """The states of the CPU generators of torch, NumPy and Python, to compare."""
    numpy = pickle.dumps(np.random.get_state(legacy=False))
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy


@contextmanager
def with_generator_state(state: torch.Tensor) -> Iterator[None]:
    """Context in which torch's global CPU generator starts at a state; afterwards it continues as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(state)
        yield
