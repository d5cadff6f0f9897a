"""Peak memory of the tool, measured from outside, does not grow with the model."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron_untied.checkpoint.global_tensor import row_blocks
from megatron_untied.config import ModelConfig
from megatron_untied.hf.config import model_config_to_hf
from megatron_untied.hf.folder import TensorSpec, write_safetensors_folder
from megatron_untied.hf.names import hf_layouts

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=30_001,
    max_position_embeddings=4096,
    untie_embeddings_and_output_weights=False,
)
MEASURE = """
import resource, sys
from megatron_untied.commands.convert import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def generate(folder, model):
    """A folder of bf16 weights."""
    folder.mkdir()
    layouts = hf_layouts(model)
    specs = {name: TensorSpec(x.local_shape, torch.bfloat16) for name, x in layouts.items()}

    def blocks(name):
        for tensor_slice in row_blocks(layouts[name].whole):
            yield torch.full(tensor_slice.sizes, len(name), dtype=torch.bfloat16)

    write_safetensors_folder(folder, specs, blocks, max_shard_bytes=10**9)
    config = model_config_to_hf(model, torch.bfloat16, {})
    (folder / "config.json").write_text(json.dumps(config))
    return sum(spec.nbytes for spec in specs.values())


def peak_mib(*arguments) -> int:
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(answer.stdout.splitlines()[-1])


def peaks(folder, num_layers):
    """Bytes of the model, MiB at the peak of the import and of the export."""
    folder.mkdir()
    num_bytes = generate(folder / "hf", replace(MODEL, num_layers=num_layers))
    into = peak_mib("hf-to-megatron", "--hf-path", folder / "hf", "--save", folder / "save")
    shutil.rmtree(folder / "hf")
    back = peak_mib("megatron-to-hf", "--load", folder / "save", "--hf-path", folder / "back")
    shutil.rmtree(folder)
    return num_bytes, into, back


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_model(tmp_path):
    small_bytes, *small = peaks(tmp_path / "small", 2)
    large_bytes, *large = peaks(tmp_path / "large", 24)
    assert large_bytes > small_bytes + 2 * 10**9
    for few_layers, many_layers in zip(small, large, strict=True):
        # The index has an entry for every part; weights are 0.1 GB more a layer.
        assert many_layers < few_layers + 64
        assert many_layers < 1024
