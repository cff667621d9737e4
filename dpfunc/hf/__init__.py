"""Models of Transformers, adapters of PEFT, the Trainer. Needs `dpfunc[hf]`.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.hf.chats import chat_messages, chat_tokens, show_chat
    from dpfunc.hf.pairs import pair_messages, pair_tokens, show_pair
    from dpfunc.hf.preferences import CollatePairs, Preference, reference_log_probabilities
    from dpfunc.hf.tasks import make_loss_fn
    from dpfunc.hf.trainer.arguments import PrivacyArguments
    from dpfunc.hf.trainer.trainer import DPTrainer

__all__ = [
    "CollatePairs",
    "DPTrainer",
    "Preference",
    "PrivacyArguments",
    "chat_messages",
    "chat_tokens",
    "make_loss_fn",
    "pair_messages",
    "pair_tokens",
    "reference_log_probabilities",
    "show_chat",
    "show_pair",
]

if not TYPE_CHECKING:
    __getattr__ = lazy(
        __name__,
        {
            "trainer.trainer": "DPTrainer",
            "trainer.arguments": "PrivacyArguments",
            "chats": "chat_messages chat_tokens show_chat",
            "pairs": "pair_messages pair_tokens show_pair",
            "tasks": "make_loss_fn",
            "preferences": "CollatePairs Preference reference_log_probabilities",
        },
    )
