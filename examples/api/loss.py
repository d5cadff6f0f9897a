"""Cross-entropy over a vocabulary that is split over all ranks, without all logits at once."""

import torch
import torch.distributed as dist

import megatron_untied

dist.init_process_group()  # nccl where there are GPUs, gloo where there are none
if torch.cuda.is_available():
    torch.cuda.set_device(dist.get_node_local_rank())
    torch.set_default_device("cuda")
n, m, v, t = 4096, 64, 1000, dist.get_world_size()  # tokens, hidden size, vocabulary, ranks
torch.manual_seed(0)  # hidden states and labels are the same on every tensor-parallel rank
hidden = torch.randn(n, 1, m, requires_grad=True)
labels, weights = torch.randint(v, (1, n)), torch.full((1, n), 1 / n)
matrix = torch.randn(-(-v // t), m, requires_grad=True)  # this rank's rows
loss = megatron_untied.chunked_cross_entropy(
    hidden.clone(), matrix, labels, weights, vocab_size=v, chunk_size=256, tp_group=dist.group.WORLD
)  # a clone: the gradient is written over the hidden states
loss.backward()
print(f"rank {dist.get_rank()}: loss {loss.item():.6f}, gradient {matrix.grad.norm():.6f}")
dist.destroy_process_group()
