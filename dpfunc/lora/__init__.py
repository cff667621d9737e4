"""Low-rank adapters without changing the module."""

from dpfunc.lora.adapter import LoRA, attach
from dpfunc.lora.files import load, save
from dpfunc.lora.layer import LoRAConfig

__all__ = ["LoRA", "LoRAConfig", "attach", "load", "save"]
