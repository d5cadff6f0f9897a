"""What the package logs, on a rank where pytest does not listen."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """The messages that are logged while it is entered."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("megatron_untied")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
