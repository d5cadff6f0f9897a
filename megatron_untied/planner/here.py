"""The machine that this process runs on, as all ranks agree on it."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_untied.planner.machine import DEFAULT_GPU, GIB, Machine, read_gpus
from megatron_untied.platform import device


def this_machine(groups: ProcessGroupCollection) -> Machine:
    """Memory and number of GPUs of the smallest node; collective over all ranks.

    Without GPUs it is taken to be what the planner assumes if it is told nothing: its settings are
    then those of such a machine. Rates are those of the GPU of that name or of the default one.
    """
    gpus = read_gpus()
    gpu = gpus.get(device.gpu_name(), gpus[DEFAULT_GPU])
    assumed = Machine(gpu=gpu, gpu_memory_gib=gpu.memory_gib)
    world_size = dist.get_world_size()
    here = device.memory_bytes()
    gpus_per_node = device.num_devices() if here is not None else min(world_size, 8)
    here = here or (int(assumed.gpu_memory_gib * GIB), int(assumed.host_memory_gib * GIB))
    least = torch.tensor([*here, gpus_per_node], device=device.current_device())
    dist.all_reduce(least, dist.ReduceOp.MIN)
    device_bytes, host_bytes, gpus_per_node = least.tolist()
    most = min(gpus_per_node, world_size)
    gpus_per_node = next(size for size in range(most, 0, -1) if world_size % size == 0)
    return Machine(
        gpus_per_node=gpus_per_node,
        nodes=world_size // gpus_per_node,
        gpu=gpu,
        gpu_memory_gib=device_bytes / GIB,
        host_memory_gib=host_bytes / GIB,
    )
