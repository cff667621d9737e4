"""What the workers of test_deepspeed.py do: three private steps on a model that DeepSpeed has partitioned."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from fsdp_jobs import LORA, LoRALinear, Net, classes, data, mesh_of, plan, ranks_of
from jobs import steps_of
from torch import nn
from workers import caught

import dpfunc
from dpfunc import distributed


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(nn.Linear).requires_grad_(False)


def adapt(model):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for layer in model.layers:
            layer.up, layer.down = LoRALinear(layer.up), LoRALinear(layer.down)
    return model


def initialize(model, stage, efficient):
    import deepspeed

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(dict(zip(names, (rank, rank, size, size, "0", "1"), strict=True)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", DS_ACCELERATOR="cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled now
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    trained = [param for param in model.parameters() if param.requires_grad]
    zero = {"stage": stage, "memory_efficient_linear": efficient, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}  # fmt: skip
    optimizer = torch.optim.SGD(trained, lr=0.1) if trained else None
    return deepspeed.initialize(
        model=model, model_parameters=trained or None, optimizer=optimizer, config=config, dist_init_required=False
    )[0]


def zero(stage, engine, efficient=False):
    """Three steps; stage 0 is the model without DeepSpeed."""
    refused, ranks = {}, distributed.data_parallel() if stage < 3 else ranks_of(mesh_of())
    if stage in (1, 2):
        wrapped = initialize(adapt(net()), stage, efficient)
        refused["engine"] = caught(dpfunc.functionalize, wrapped, LORA)
        model = wrapped.module
    elif stage == 3:
        model = initialize(net(), stage, efficient).module
        refused["partitioned"] = caught(dpfunc.functionalize, model, "head")
        model = adapt(model)
    else:
        model = adapt(net())
    forward, params = dpfunc.functionalize(model, LORA)
    found = []
    run = lambda: found.extend(steps_of(classes(forward), plan(6.0, steps=3), params, data(), ranks, engine=engine))
    refused["steps"] = caught(run)
    return (*found, refused) if found else (params, None, [], refused)
