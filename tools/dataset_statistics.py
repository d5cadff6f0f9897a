"""``megatron-untied-statistics``, from a checkout."""

import sys

from megatron_untied.commands.statistics import main

if __name__ == "__main__":
    sys.exit(main())
