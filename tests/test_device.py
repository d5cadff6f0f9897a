import pytest
import torch

from megatron_untied.platform import device
from tests.support.traces import config_of


def test_fp32_products_are_fp32():
    torch.set_float32_matmul_precision("high")  # what NVIDIA's images begin with
    device.select_device(0)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def old_driver(monkeypatch):
    """GPUs that NVML sees and a torch with CUDA that their driver is too old for."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("flags", ["", "--distributed-backend nccl"])
def test_gpus_that_torch_cannot_use_are_not_passed_over_for_cpus(old_driver, flags):
    with pytest.raises(ValueError, match=r"8 GPUs that torch's CUDA 13.0 cannot .* 580 or newer"):
        config_of(flags, world_size=1)


def test_cpus_may_be_asked_for_beside_such_gpus(old_driver):
    config = config_of("--distributed-backend gloo", world_size=1)
    assert config.distributed.backend == "gloo"


def test_a_machine_without_gpus_is_one_of_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.default_backend() == "gloo"
