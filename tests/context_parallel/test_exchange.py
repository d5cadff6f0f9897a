import pytest
import torch

from megatron_untied.context_parallel.exchange import HeadExchange, blocks
from tests.support.ranks import run_on_ranks


def check_element_identity(group, n, b, d, heads):
    """Every element says where it comes from: (rank, position, sample, head, dim)."""
    exchange, p = HeadExchange(group), group.size()
    first_head = [sum(heads[:r]) for r in range(p)]
    tag = torch.cartesian_prod(*map(torch.arange, (n, b, sum(heads), d)))
    tag = torch.cat([torch.full((len(tag), 1), group.rank()), tag], dim=1)
    tag = (tag * torch.tensor([10**8, 10**6, 10**5, 10**3, 1])).sum(1).view(n, b, sum(heads), d)
    send = torch.empty(tag.numel(), dtype=torch.int64)
    for view, start, count in zip(blocks(send, heads, n, b, d), first_head, heads, strict=True):
        view.copy_(tag[:, :, start : start + count])

    mine = heads[group.rank()]
    receive = torch.full((p * n, b, mine, d), -1)
    exchange.to_heads(send, receive, heads).wait()
    for index in torch.cartesian_prod(*map(torch.arange, receive.shape)) if mine else []:
        s, i, head, dim = index.tolist()
        expected = (s // n) * 10**8 + (s % n) * 10**6 + i * 10**5
        expected += (first_head[group.rank()] + head) * 10**3 + dim
        assert receive[s, i, head, dim] == expected

    back = torch.full_like(send, -1)
    exchange.to_sequence(receive, back, heads).wait()
    assert torch.equal(back, send)


@pytest.mark.parametrize(
    "heads", [(3,), (2, 2), (2, 3), (0, 4), (1, 2, 2, 2), (0, 1, 0, 1), (2, 2, 2, 2)]
)
def test_every_element_arrives_where_it_belongs_and_returns(heads):
    run_on_ranks(check_element_identity, len(heads), 5, 2, 3, heads)
