"""The converted model is the same function as the transformers library's.

In fp32; what differs is the order of sums, so logits of a magnitude of about one agree to 1e-5.
"""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.hf_conversion import convert, logits_and_loss
from tests.support.hf_models import FAMILIES, VOCAB_SIZE, save_model
from tests.support.ranks import run_on_ranks

SPLITS = {
    "1": (1, {}),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """By family: a checkpoint, text [2, 33], and the transformers library's logits and loss."""

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        model = AutoModelForCausalLM.from_pretrained(save_model(family, folder / "hf"))
        text = torch.randint(VOCAB_SIZE, (2, 33), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            answer = model.eval()(input_ids=text, labels=text)
        return convert(folder / "hf", folder / "save"), text, answer.logits[:, :-1], answer.loss

    return make


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_loss_are_those_of_transformers(reference, family, split):
    checkpoint, text, logits, loss = reference(family)
    world_size, flags = SPLITS[split]
    answers = run_on_ranks(logits_and_loss, world_size, checkpoint, text, **flags)
    dim = 1 if "context_parallel_size" in flags else 2
    ours = torch.cat([shard for shard, _ in answers], dim)[..., :VOCAB_SIZE]
    # Context-parallel ranks each have a part of the loss, tensor-parallel ranks all of it.
    total = sum(part for _, part in answers) / flags.get("tensor_model_parallel_size", 1)
    assert 0.3 < logits.std() < 30
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, loss, atol=1e-5, rtol=1e-5)
