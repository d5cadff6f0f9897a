"""Fine-tuning on packed chats, against the chats one by one; resumed; and refused on all ranks."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron_untied.config import MemoryConfig, ParallelConfig
from megatron_untied.data.chat_datasets import tokenize_chats
from megatron_untied.data.loader import micro_batches
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.training.metrics import read_metrics
from megatron_untied.training.step import count_valid_tokens
from tests.support.chats import CHATS, said, write_chats, write_tokenizer
from tests.support.command_line import tiny_config
from tests.support.ranks import RankFailure, run_on_ranks
from tests.support.tiny_model import make_model, parallel_groups, tiny
from tests.support.tiny_run import SFT, train_on_chats

S = 320
MODEL = tiny(vocab_size=400, max_position_embeddings=S)
STREAMED = MemoryConfig(recompute_granularity="selective", sequence_tile_size=50)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Flags of a run on 26 chats, of which one is too long."""
    folder = tmp_path_factory.mktemp("chats")
    records = [chat for name, chat in CHATS.items() if name != "without a turn"]
    for i in range(20):
        turns = [said("user", f"number {i}"), said("assistant", f"it is {i} " * (1 + 7 * i % 11))]
        records.append({"messages": turns})
    records.append({"messages": [said("user", "tell"), said("assistant", "more " * S)]})
    return {
        "tokenizer_model": write_tokenizer(folder / "tokenizer"),
        "data_path": write_chats(folder / "chats.jsonl", records),
        "seq_length": S,
        "split": 1,
        "long_samples": "drop",
    }


def global_batch(config, groups, num_samples):
    """This rank's micro-batches of the first ``num_samples`` samples."""
    data = config.data
    tokenizer = build_tokenizer(
        data.tokenizer_type, model=data.tokenizer_model, parse_special_tokens=True
    )
    datasets = pretrain_gpt.build_datasets(
        data, tokenizer, seq_length=S, num_samples=(num_samples, 0, 0), seed=config.seed
    )
    size = groups.dp.size()
    loader = micro_batches(
        datasets.train,
        consumed_samples=0,
        micro_batch_size=1,
        data_parallel_rank=groups.dp.rank(),
        data_parallel_size=size,
        num_workers=0,
        global_batch_size=num_samples,
    )
    batches = []
    for samples in itertools.islice(loader, num_samples // size):
        samples.pop("number")  # as in training, which keeps it for messages
        batches.append(pretrain_gpt.get_batch(samples, config, groups))
    members = datasets.train._packed.members[: datasets.train._packed.ends[num_samples - 1]]
    return batches, members.tolist(), tokenize_chats(data, tokenizer)


def one_by_one(model, chats, members, weighting):
    """Loss and gradients from the definition: the mean over tokens, or over means of chats."""
    losses, counts = [], []
    for chat in members:
        ids, trained = (torch.tensor(x) for x in chats.chat(chat))
        weights = trained[None, 1:].double()
        counts.append(weights.sum())
        losses.append(
            model(ids[None, :-1].long(), labels=ids[None, 1:].long(), token_weights=weights)
        )
    if weighting == "token":
        loss = sum(losses) / sum(counts)
    else:
        loss = sum(x / n for x, n in zip(losses, counts, strict=True)) / len(losses)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_equals_the_chats_one_by_one(group, flags, parallel, weighting):
    config = tiny_config(
        group.size(), **flags, **SFT, loss_weighting=weighting,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
    )  # fmt: skip
    groups = parallel_groups(parallel)
    batches, members, chats = global_batch(config, groups, num_samples=4)
    count, total = count_valid_tokens(batches, groups.dp_cp)
    assert count == sum(int(chats.chat(i)[1][1:].sum()) for i in members)
    results = []
    for memory in (MemoryConfig(), STREAMED):
        model = make_model(MODEL, parallel, memory, groups=groups).double()
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            part = pretrain_gpt.forward_step(model, batch, batch.loss_mask.double() / total)
            part.backward()
            loss += part.detach()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for x in (loss, *gradients.values()):
            dist.all_reduce(x, group=groups.dp_cp)
        results.append((loss, gradients))
    parallel_groups(ParallelConfig())
    expected = one_by_one(make_model(MODEL).double(), chats, members, weighting)
    # Weights of chats are 1 / n in fp32.
    tolerance = 1e-10 if weighting == "token" else 1e-6
    for loss, gradients in results:
        torch.testing.assert_close(loss, expected[0], rtol=tolerance, atol=0)
        for name, gradient in gradients.items():
            error = (gradient - expected[1][name]).abs().max() / expected[1][name].abs().max()
            assert error < tolerance, f"{name}: {error:.1e}"


CP2 = ParallelConfig(context_parallel_size=2, heads_per_chunk=2)


@pytest.mark.parametrize(
    ("world_size", "parallel", "weighting"),
    [
        pytest.param(1, ParallelConfig(), "token", id="cp1"),
        pytest.param(2, CP2, "token", id="cp2"),
        pytest.param(2, replace(CP2, cp_comm_type="p2p"), "sample", id="ring2"),
        pytest.param(
            4, replace(CP2, context_parallel_size=4, heads_per_chunk=4), "token", id="cp4"
        ),
        pytest.param(4, CP2, "sample", id="cp2-dp2"),
    ],
)
def test_a_packed_batch_equals_its_chats_one_by_one(chats, world_size, parallel, weighting):
    run_on_ranks(check_equals_the_chats_one_by_one, world_size, chats, parallel, weighting)


def curve(path, world_size, **flags):
    run_on_ranks(train_on_chats, world_size, path, **flags)
    return [
        (line["iteration"], line["lm_loss"], line["valid_tokens"]) for line in read_metrics(path)
    ]


def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_same_run(chats, tmp_path):
    flags = {**chats, "global_batch_size": 2, "context_parallel_size": 2, "train_iters": 9,
             "loss_weighting": "sample"}  # fmt: skip
    whole = curve(tmp_path / "whole.jsonl", 2, **flags)
    folder = tmp_path / "checkpoints"
    saved = {"save": folder, "load": folder, "save_interval": 100}
    first = curve(tmp_path / "parts.jsonl", 2, **flags, **saved, exit_interval=4)
    assert [iteration for iteration, *_ in first] == [1, 2, 3, 4]
    # Appends to the file: both parts are read.
    assert curve(tmp_path / "parts.jsonl", 2, **flags, **saved) == whole
    other = flags | {"long_samples": "truncate", "train_iters": 12}
    with pytest.raises(RankFailure, match="in another order: --long-samples"):
        curve(tmp_path / "other.jsonl", 2, **other, **saved)


def test_two_data_parallel_ranks_train_as_one(chats, tmp_path):
    flags = {**chats, "global_batch_size": 4, "train_iters": 4}
    one, two = (curve(tmp_path / f"{n}.jsonl", n, **flags) for n in (1, 2))
    assert [x[2] for x in one] == [x[2] for x in two]
    assert [x[1] for x in one] == pytest.approx([x[1] for x in two], rel=1e-5)
    assert one[-1][1] < one[0][1]


def check_refused(group, flags, message):
    """The same one line on every rank."""
    with pytest.raises(SystemExit, match=message) as error:
        train_on_chats(group, **flags)
    lines = [None] * group.size()
    dist.all_gather_object(lines, str(error.value))
    assert len(set(lines)) == 1
    assert "\n" not in lines[0]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"messages": [said("bot", "a")]}], "chats.jsonl:1: message 1 has the unknown role 'bot'"),
        ([], "holds no chats"),
        ([CHATS["without a turn"]], "no trained tokens in 1 chats"),
    ],
)
def test_what_cannot_be_trained_on_ends_every_rank_with_one_line(chats, tmp_path, records, message):
    path = write_chats(tmp_path / "chats.jsonl", records)
    run_on_ranks(check_refused, 2, {**chats, "data_path": path}, message)
