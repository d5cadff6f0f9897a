"""``megatron-untied-torchrun``, from a checkout."""

import sys

from megatron_untied.commands.torchrun import main

if __name__ == "__main__":
    sys.exit(main())
