"""Evidence for a claim of privacy: what anyone can check, and a budget that outlives the run."""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.evidence.certificate import certify, check

__all__ = ["certify", "check"]

if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {"certificate": "certify check"})
