"""Records of a run on disk: checkpoints, of one process or of several, and the journal of released steps."""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.checkpoint.journal import Journal
    from dpfunc.checkpoint.local import load, save
    from dpfunc.checkpoint.sharded_load import load_sharded
    from dpfunc.checkpoint.sharded_save import save_sharded

__all__ = ["Journal", "load", "load_sharded", "save", "save_sharded"]

if not TYPE_CHECKING:
    __getattr__ = lazy(
        __name__,
        {
            "Journal": "journal",
            "load": "local",
            "load_sharded": "sharded_load",
            "save": "local",
            "save_sharded": "sharded_save",
        },
    )
