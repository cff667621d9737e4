"""Evidence that a claim holds: certificates of runs, audits by canaries, replays of a loop on neighbouring data.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.evidence._one_run import Audit, audit, largest_bound, plot
    from dpfunc.evidence.canaries import Canaries, coins, exposure, loss_drops
    from dpfunc.evidence.certificate import certify, check
    from dpfunc.evidence.neighbours import Replay, replay

__all__ = [
    "Audit", "Canaries", "Replay", "audit", "certify", "check", "coins", "exposure", "largest_bound",
    "loss_drops", "plot", "replay",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {
        "canaries": "Canaries coins exposure loss_drops", "certificate": "certify check",
        "neighbours": "Replay replay", "_one_run": "Audit audit largest_bound plot",
    })  # fmt: skip
