"""All limits and defaults of waits, in seconds, with their reasons."""

DEFAULT_LIMIT_S = 600.0
"""Default ``timeout`` of engines for a wait for another rank; torch's own default for NCCL's collectives."""
COMMAND_LINE_LIMIT_S = 120.0
"""Default ``--timeout`` of ``train`` and ``bench``: their models are small, so a longer silence is a failure."""
DOCTOR_LIMIT_S = 30.0
"""Default ``--timeout`` of ``doctor``: two local ranks that start and exchange a few megabytes."""

# ---------------------------------------------------------------------------- during a step

LATE_FACTOR = 2.0
"""Limit of a wait for a transfer, in timeouts: one for the transfers ahead of it on its lane, one for itself."""
WATCHDOG_FACTOR = 4.0
"""Limit of NCCL's watchdog, in timeouts. It counts from the launch, which may be a step ahead, and ends the process
without a cause: the engine's own limit comes first."""
LOOK_S = 1.0
"""Period at which a waiting rank checks whether another rank has failed; each check is a request to the store."""

# ---------------------------------------------------------------------------- after a failure

PROBE_S = 0.001
"""Limit of a receive that nobody sends: gloo ends all transfers of its group when it passes."""
DRAIN_S = 1.0
"""Time for transfers to end after a failed step: their memory is in use until then, and the peer may be gone."""
ABORT_S = 5.0
"""Time for a lane's threads to end after its groups were aborted; gloo returns at once unless the machine is busy."""
GRACE_S = 0.5
"""Time for another rank to tell the cause of a failure before this rank raises without one."""
GRACE_POLL_S = 0.02
"""Period of the requests within :data:`GRACE_S`."""
ROLL_CALL_S = 2.0
"""Time for every rank to leave a word after a failure, before a message names the silent ranks."""
ROLL_CALL_POLL_S = 0.05
"""Period of the requests within :data:`ROLL_CALL_S`."""
ANSWER_S = 2.0
"""Time for the store to answer: it needs milliseconds, unless its process has stopped or ended."""
FREED_S = 30.0
"""Time before an aborted group on NCCL is freed, beyond the sleep of torch's thread beside it, see
:func:`~overlap1f1b.transport.groups.free_later`."""

# ---------------------------------------------------------------------------- local processes of the command line

INTERRUPT_S = 3.0
"""Time for local ranks to end by themselves after Ctrl-C or SIGTERM."""
FOLLOW_S = 10.0
"""Time for local ranks to end by themselves after one of them failed: long enough for each to name the cause."""
TERM_S = 5.0
"""Time for a local process to end after SIGTERM, before SIGKILL."""
KILL_S = 5.0
"""Time for a process to end after SIGKILL; after it, the process is assumed to hang in the kernel."""
KILL_POLL_S = 0.02
"""Period of looks whether killed processes have ended."""
SHELL_S = 20.0
"""Time for one command that sets up or reads a rate-limited link."""
