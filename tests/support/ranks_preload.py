"""Imported once by the fork server, so that ranks start with everything loaded."""

import warnings

import torch

import megatron_untied  # noqa: F401

warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
torch.set_num_threads(1)

import megatron.core  # noqa: E402
import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402, F401
import transformers  # noqa: E402, F401

import pretrain_gpt  # noqa: E402, F401
