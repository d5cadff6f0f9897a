r"""Pretrain a GPT-style model with sequences sharded over context-parallel ranks.

On a laptop: random tokens, two ranks for each sequence, two query heads exchanged at a time.

    python -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --disable-bias-linear \
        --normalization RMSNorm --untie-embeddings-and-output-weights --seq-length 256 \
        --context-parallel-size 2 --cp-heads-per-chunk 2 --micro-batch-size 1 \
        --global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 \
        --train-iters 20 --lr 1e-3 --log-interval 5 --eval-interval 10 --eval-iters 2

On a node of eight GPUs: --nproc-per-node 8, --bf16, --use-distributed-optimizer and a real model.
Real text, checkpoints and metrics: examples/pretrain_tiny.sh. All flags: pretrain_gpt.py --help.
"""

import os
import sys

# Before torch is imported, which reads it once; a value of your own is kept. Buffers of many sizes
# follow each other and would leave gaps without expandable segments. Pinned memory is rounded up to
# a power of two by default, here from 1 MB on to nothing.
os.environ.setdefault(  # noqa: TID251 - torch is told in no other way
    "PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_max_round_threshold_mb:1"
)

import torch.distributed as dist
from torch import Tensor

from megatron_untied.checkpoint import Progress
from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.context_parallel.sequence import SequenceInfo, SequenceLayout, documents_of
from megatron_untied.data.datasets import Datasets, build_datasets
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.gpt_model import ChunkedLossGPTModel
from megatron_untied.model import build_run_model
from megatron_untied.platform import device
from megatron_untied.training.errors import print_error_once
from megatron_untied.training.initialize import errors_in_one_line, read_launch
from megatron_untied.training.loop import pretrain
from megatron_untied.training.step import Batch


def model_provider(config, groups, progress) -> ChunkedLossGPTModel:
    """This rank's share of the model, its weights not drawn yet; it reports to ``progress``."""
    return build_run_model(config, groups, progress)


def datasets_provider(config, start: Progress) -> Datasets:
    """Samples of ``--data-path`` or ``--mock-data`` for a whole run that begins at ``start``."""
    data = config.data
    tokenizer = build_tokenizer(
        data.tokenizer_type,
        model=data.tokenizer_model,
        vocab_size=data.vocab_size,
        parse_special_tokens=data.sft,  # those that a chat template writes
    )
    # With several sequence lengths: of all training samples since their order began.
    batches = config.batches(start.data_start, config.loop.train_iters)
    lengths = [(batch.seq_length, n * batch.global_batch_size) for batch, n in batches if n]
    valid = {
        stage.batch.seq_length: config.evaluation.eval_iters * stage.batch.global_batch_size
        for stage in config.stages
    }
    return build_datasets(
        data,
        tokenizer,
        seq_length=lengths[-1][0],
        num_samples=config.num_samples(
            iteration=start.iteration, consumed_samples=start.consumed_samples
        ),
        seed=config.seed,
        earlier=lengths[:-1],
        valid_lengths=valid,
    )


def get_batch(samples: dict[str, Tensor], config, groups) -> Batch:
    """This rank's tokens of a micro-batch: [b, s] -> [b, s/p], on its device.

    Labels are cut from the whole sequence too, so a shard's last label is the next shard's token.
    So are documents: attention is over the whole sequence, whatever this rank's share of it.
    """
    data, layout = config.data, SequenceLayout.of(config.parallel, rank=groups.cp.rank())
    shard = {name: layout.shard(x).to(device.current_device()) for name, x in samples.items()}
    masked = data.dataloader_inter_document_masking
    return Batch(
        tokens=shard["tokens"],
        labels=shard["labels"],
        loss_mask=shard["loss_mask"],
        sequence=SequenceInfo(
            positions=shard["positions"] if data.reset_position_ids else None,
            documents=documents_of(samples["positions"]) if masked else None,
        ),
    )


def forward_step(model, batch: Batch, token_weights: Tensor) -> Tensor:
    """This rank's part of the loss: the sum over its tokens of weight x cross-entropy."""
    return model(
        batch.tokens, labels=batch.labels, token_weights=token_weights, sequence=batch.sequence
    )


def main() -> None:
    """One rank of a run; torchrun starts as many as there are."""
    launch = read_launch()
    with print_error_once(launch):
        with errors_in_one_line():
            config = parse_arguments(sys.argv[1:], world_size=launch.world_size)
        pretrain(
            config,
            launch,
            model_provider=model_provider,
            datasets_provider=datasets_provider,
            get_batch=get_batch,
            forward_step=forward_step,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
