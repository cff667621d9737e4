"""Low-rank adapters without changing the module."""

from dpfunc.lora.adapter import LoRA, LoRAConfig, attach, load, save

__all__ = ["LoRA", "LoRAConfig", "attach", "load", "save"]
