"""Evidence that a claim holds: audits of a run by canaries, and replays of a loop on neighbouring data."""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.evidence.audit import Audit, audit, plot
    from dpfunc.evidence.canaries import Canaries, coins, exposure, loss_drops

__all__ = ["Audit", "Canaries", "audit", "coins", "exposure", "loss_drops", "plot"]

if not TYPE_CHECKING:
    _HOMES = {"audit": "Audit audit plot", "canaries": "Canaries coins exposure loss_drops"}
    __getattr__ = lazy(__name__, _HOMES)
