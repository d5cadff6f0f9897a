"""``megatron-untied-compare-hf``, from a checkout."""

import sys

from megatron_untied.commands.compare_hf import main

if __name__ == "__main__":
    sys.exit(main())
