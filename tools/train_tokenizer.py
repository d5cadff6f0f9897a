"""``megatron-untied-train-tokenizer``, from a checkout."""

import sys

from megatron_untied.commands.train_tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
