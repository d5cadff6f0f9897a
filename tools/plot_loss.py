"""``megatron-untied-plot-loss``, from a checkout."""

import sys

from megatron_untied.commands.plot_loss import main

if __name__ == "__main__":
    sys.exit(main())
