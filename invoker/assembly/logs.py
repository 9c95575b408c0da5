"""The log of functions on a node, with what killed nodes of its host left."""

import logging
from contextlib import AsyncExitStack

from invoker.assembly.setup import NodeSetup
from invoker.log_file import LogFile, recover_logs
from invoker.log_rings import STAMP, LoggedLine, LogRings
from rdmacast.aio.threads import run_in_thread

log = logging.getLogger("invoker.log_file")


async def open_logs(setup: NodeSetup, stack: AsyncExitStack) -> LogRings:
    """Return the log, of which the last lines are in a file beside the metering journal.

    Lines of killed nodes are in it already; those of another node than this one have its name.
    """
    recovered = await run_in_thread(recover_logs, setup.journals)
    try:
        file = LogFile(setup.journals, setup.settings.node_id, setup.epoch)
    except OSError as error:
        log.warning("log lines are kept in memory only: %s", error)
        rings = LogRings(setup.clock)
    else:
        stack.callback(file.close)
        rings = LogRings(setup.clock, file.write)
    for one in recovered:
        of = "" if one.node == setup.settings.node_id else f" [{one.node}]"
        rings.recover(
            LoggedLine(line.function, line.version, line.text[:STAMP] + of + line.text[STAMP:])
            for line in one.lines
        )
    return rings
