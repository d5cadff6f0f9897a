"""Attention from q, k, v over all ranks, forward and backward."""

import torch
import torch.distributed as dist

import megatron_untied

dist.init_process_group()  # nccl where there are GPUs, gloo where there are none
if torch.cuda.is_available():
    torch.cuda.set_device(dist.get_node_local_rank())
    torch.set_default_device("cuda")
n, b, h, g, d = 512, 1, 8, 2, 64  # tokens per rank, batch, query heads, key-value heads, width
q, k, v = (torch.randn(n, b, x, d, requires_grad=True) for x in (h, g, g))
out = megatron_untied.untied_attention(q, k, v, group=dist.group.WORLD, heads_per_chunk=4)
out.square().mean().backward()
print(f"rank {dist.get_rank()}: out {list(out.shape)}, dk {k.grad.norm():.6f}")
dist.destroy_process_group()
