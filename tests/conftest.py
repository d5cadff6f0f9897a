"""Options and marks shared by all tests."""

import signal

import pytest
import torch
from hypothesis import settings

import megatron_untied  # noqa: F401 - before any test imports megatron.core
from tests.support.corpus import train_small_tokenizer

# A shell that starts the tests in the background ignores these, and every process would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A deadline for each example would fail tests on a machine that is busy with something else.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    skip_slow = pytest.mark.skip(reason="slow: give --slow")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory):
    return str(train_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))
