"""Low-rank adapters without changing the module."""

from dpfunc.lora._files import load, save
from dpfunc.lora.adapter import LoRA, LoRAConfig, attach

__all__ = ["LoRA", "LoRAConfig", "attach", "load", "save"]
