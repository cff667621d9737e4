"""Records of a run on disk: checkpoints, of one process or of several, and the journal of released steps."""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.checkpoint.journal import Journal
    from dpfunc.checkpoint.loading import load
    from dpfunc.checkpoint.saving import save

__all__ = ["Journal", "load", "save"]

if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {"Journal": "journal", "load": "loading", "save": "saving"})
