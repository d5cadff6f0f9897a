"""``megatron-untied-inspect-dataset``, from a checkout."""

import sys

from megatron_untied.commands.inspect_dataset import main

if __name__ == "__main__":
    sys.exit(main())
