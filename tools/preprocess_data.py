"""``megatron-untied-preprocess``, from a checkout."""

import sys

from megatron_untied.commands.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
