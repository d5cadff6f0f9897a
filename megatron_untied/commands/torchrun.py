"""torchrun for the launchers: its arguments, and no traceback of its own when ranks end early.

    python tools/torchrun.py --nproc-per-node 8 pretrain_gpt.py FLAGS

There are three differences from torchrun. A rendezvous host that does not resolve ends it with one
line after half a minute. When ranks exit with an error, which they print themselves, it adds one
line instead of a traceback. With --exit-signal-handler, it waits on SIGTERM until the ranks have
finished their step; torchrun kills them after 30 seconds, unless --shutdown-timeout is given.
"""

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megatron_untied.commands import documentation
from megatron_untied.platform.host_names import require_resolvable

SHUTDOWN_SECONDS = int(timedelta(days=1).total_seconds())
"""Longer than any step and checkpoint; a scheduler sends SIGKILL earlier if it has a limit."""
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun's own environment variable."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them.

    Returns:
        The exit status: that of the first rank that failed, or 128 + the number of a signal.
    """
    parser = torchrun.get_args_parser()  # torchrun's own, so that no flag is missing
    parser.description, parser.formatter_class = documentation(__doc__), RawDescriptionHelpFormatter
    args = parser.parse_args(argv)
    try:
        require_rendezvous_host(args)
        finishes_step = "--exit-signal-handler" in args.training_script_args
        chosen = args.shutdown_timeout is not None or SHUTDOWN_TIMEOUT in os.environ  # noqa: TID251 - torchrun's
        if finishes_step and not chosen:  # a timeout of the user's own is kept
            args.shutdown_timeout = SHUTDOWN_SECONDS
        torchrun.run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        signaled = f" ({failure.signal_name()})" if failure.exitcode < 0 else ""
        print(f"rank {rank} ended with status {failure.exitcode}{signaled}", file=sys.stderr)
        # Negative: minus the number of a signal, which shells report as 128 + number.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        print(f"all ranks of this node ended after {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def require_rendezvous_host(args: Namespace) -> None:
    """Raise ``ValueError`` if the rendezvous host does not resolve."""
    # HOST:PORT, or HOST alone. Without an endpoint torchrun takes the master's address.
    endpoint = args.rdzv_endpoint.rpartition(":")[0] or args.rdzv_endpoint
    host, setting = (endpoint, "--rdzv-endpoint") if endpoint else (args.master_addr, "MASTER_ADDR")
    require_resolvable(host, setting, warn=lambda line: print(line, file=sys.stderr))
