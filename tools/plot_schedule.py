"""``megatron-untied-plot-schedule``, from a checkout."""

import sys

from megatron_untied.commands.plot_schedule import main

if __name__ == "__main__":
    sys.exit(main())
