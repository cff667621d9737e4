"""Vision-language models: what is trained, and batches of images with text.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

from typing import TYPE_CHECKING

from dpfunc._utils.lazy import lazy

if TYPE_CHECKING:
    from dpfunc.hf.vision_language._images import image_text_collator
    from dpfunc.hf.vision_language._strategies import image_text_loss, prepare, strategy, strategy_table

__all__ = ["image_text_collator", "image_text_loss", "prepare", "strategy", "strategy_table"]

if not TYPE_CHECKING:
    _names = "image_text_loss prepare strategy strategy_table"
    __getattr__ = lazy(__name__, {"_images": "image_text_collator", "_strategies": _names})
