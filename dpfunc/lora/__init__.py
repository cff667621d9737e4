"""Low-rank adapters without changing the module.

May import: its folder, functional and below. Privacy depends on it: no.
"""

from dpfunc.lora.adapter import LoRA, LoRAConfig, attach, load_adapter, save_adapter

__all__ = ["LoRA", "LoRAConfig", "attach", "load_adapter", "save_adapter"]
