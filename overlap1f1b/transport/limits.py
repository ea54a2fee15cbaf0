"""All limits of waits, in seconds or in timeouts of the engine, and what happens when each runs out.

Ranks that wait for each other share their timeout in :class:`~overlap1f1b.transport.failures.Failures`. After a failure
every wait is short: nobody may come any more.
"""

# fmt: off
# during a step               # limit of                                      → when it runs out
DEFAULT_LIMIT_S = 600.0       # an engine's wait for another rank             → LostRankError: who failed, or is silent
COMMAND_LINE_LIMIT_S = 120.0  # the same of train and bench: small models     → the same; local ranks are ended
DOCTOR_LIMIT_S = 30.0         # the same of doctor: a few megabytes           → the same, in its report
LATE_FACTOR = 2.0             # timeouts: a transfer behind another; a device → LostRankError; of a device: abort
WATCHDOG_FACTOR = 4.0         # timeouts: NCCL's watchdog, since the launch   → NCCL ends the process: comes last
LATE_CALL_S = 10.0            # a call that all ranks make, on another rank   → a warning, and the wait goes on
CLOSE_S = 10.0                # the same of close                             → it ends alone: nothing is lost
LOOK_S = 1.0                  # a period of waiting ranks                     → they look for failures, and wait on

# after a failure
PROBE_S = 0.001               # a receive that nobody sends                   → gloo ends all of its group: meant
DRAIN_S = 1.0                 # transfers of a failed step                    → they are dropped
ABORT_S = 5.0                 # threads whose groups were aborted             → they are left behind
GRACE_S = 0.5                 # another rank's word of the cause              → this rank's error has none
GRACE_POLL_S = 0.02           # a period within it                            → the store is asked again
ROLL_CALL_S = 2.0             # a word of every rank                          → the error names the silent ranks
ROLL_CALL_POLL_S = 0.05       # a period within it                            → the store is asked again
ANSWER_S = 2.0                # an answer of the store: it needs milliseconds → the store is asked nothing more
FREED_S = 30.0                # torch's thread beside an aborted NCCL group   → the group is freed

# local processes of the command line
INTERRUPT_S = 3.0             # local ranks after Ctrl-C or SIGTERM           → SIGKILL
FOLLOW_S = 10.0               # local ranks after one has failed              → SIGTERM; before, each names the cause
TERM_S = 5.0                  # local processes after SIGTERM                 → SIGKILL
KILL_S = 5.0                  # processes after SIGKILL                       → they count as hung in the kernel
KILL_POLL_S = 0.02            # a period within it                            → it is looked whether they have ended
SHELL_S = 20.0                # a command that shapes or reads a link         → an error names the command
