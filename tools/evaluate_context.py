"""``megatron-untied-evaluate-context``, from a checkout."""

import sys

from megatron_untied.commands.evaluate_context import main

if __name__ == "__main__":
    sys.exit(main())
