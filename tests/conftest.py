"""Options, marks and fixtures shared by all tests."""

import itertools
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import megatron_untied  # noqa: F401 - before any test imports megatron.core
from tests.support.corpus import train_small_tokenizer

# A shell that starts the tests in the background ignores these, and every process would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# As in a run; NVIDIA's images begin with TF32.
torch.set_float32_matmul_precision("highest")

# A deadline for each example would fail tests on a machine that is busy with something else.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

LONG_MODULES = ("test_memory_pairs.py", "test_guide.py", "test_readme.py")
"""Minutes each; begun first, else one of two pytests waits for the other at the end."""


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--fault-seed", type=int, default=0, help="of random kills, mutations and pairs of flags"
    )
    parser.addoption(
        "--claims",
        type=Path,
        metavar="FOLDER",
        help="share modules with another pytest: each runs those whose file it creates in FOLDER",
    )


def pytest_collection_modifyitems(config, items):
    skip_slow = pytest.mark.skip(reason="slow: give --slow")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
    if config.getoption("--claims"):
        items.sort(key=lambda item: item.path.name not in LONG_MODULES)  # stable


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """With ``--claims``: run the tests of the modules that this pytest claims."""
    folder = session.config.getoption("--claims")
    if folder is None or session.config.option.collectonly or session.testsfailed:
        return None
    items = _claimed(session.items, folder)
    item = next(items, None)
    while item is not None:
        # pytest tears down what the next test does not need, so that has to be known before.
        following = next(items, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _claimed(items, folder):
    """The tests of modules whose file this process was the first to create in ``folder``."""
    for module, tests in itertools.groupby(items, key=lambda item: item.nodeid.partition("::")[0]):
        try:
            (folder / module.replace("/", ".")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from tests


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory):
    return str(train_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def fault_seed(request):
    return request.config.getoption("--fault-seed")
