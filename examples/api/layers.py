"""A stack of streamed layers over all ranks, forward and backward."""

import torch
import torch.distributed as dist

import megatron_untied

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig

dist.init_process_group()  # nccl where there are GPUs, gloo where there are none
if torch.cuda.is_available():
    torch.cuda.set_device(dist.get_node_local_rank())
    torch.set_default_device("cuda")
parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=4, hidden_size=256, num_attention_heads=8, hidden_dropout=0, attention_dropout=0,
    context_parallel_size=dist.get_world_size(), cp_comm_type="a2a", normalization="RMSNorm",
    transformer_impl="local", use_cpu_initialization=True,
)  # fmt: skip
layers = megatron_untied.streamed_layers(config, heads_per_chunk=4)
torch.manual_seed(dist.get_rank())
hidden = torch.randn(512, 1, config.hidden_size, requires_grad=True)  # this rank's tokens
out = layers(hidden.clone())  # a clone: the layers overwrite what they are given
out.square().mean().backward()
print(f"rank {dist.get_rank()}: out {list(out.shape)}, gradient {hidden.grad.norm():.6f}")
dist.destroy_process_group()
