"""The name of the log that calls of checkpoint functions go to, and the handler that it has by default."""

import logging

from torch.distributed.logging_handlers import _log_handlers

__all__: list[str] = []

DCP_LOGGER_NAME = "dcp_logger"

# Somebody who wants the log may have put a handler there already.
_log_handlers.setdefault(DCP_LOGGER_NAME, logging.NullHandler())
