"""Evidence that a claim holds: audits of a run by canaries, and replays of a loop on neighbouring data."""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.evidence.canaries import Canaries, coins, exposure, loss_drops
    from dpfunc.evidence.neighbours import Replay, replay
    from dpfunc.evidence.one_run import Audit, audit, plot

__all__ = ["Audit", "Canaries", "Replay", "audit", "coins", "exposure", "loss_drops", "plot", "replay"]

if not TYPE_CHECKING:
    _HOMES = {
        "one_run": "Audit audit plot", "canaries": "Canaries coins exposure loss_drops", "neighbours": "Replay replay",
    }  # fmt: skip
    __getattr__ = lazy(__name__, _HOMES)
