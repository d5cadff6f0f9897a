"""``megatron-untied-trace``, from a checkout."""

import sys

from megatron_untied.commands.trace import main

if __name__ == "__main__":
    sys.exit(main())
