"""``megatron-untied-check-node``, from a checkout."""

import sys

from megatron_untied.commands.check_node import main

if __name__ == "__main__":
    sys.exit(main())
