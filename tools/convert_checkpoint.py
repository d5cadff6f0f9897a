"""``megatron-untied-convert``, from a checkout."""

import sys

from megatron_untied.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
