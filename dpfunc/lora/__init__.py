"""Low-rank adapters without changing the module."""

from dpfunc.lora.adapter import LoRA, attach
from dpfunc.lora.config import LoRAConfig
from dpfunc.lora.files import load, save

__all__ = ["LoRA", "LoRAConfig", "attach", "load", "save"]
