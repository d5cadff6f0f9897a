"""``megatron-untied-plan``, from a checkout."""

import sys

from megatron_untied.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
