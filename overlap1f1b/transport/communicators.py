"""The communicators of an engine as one thing: made before the first step, watched, and ended together."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from overlap1f1b.transport import devices, streams
from overlap1f1b.transport.budget import DeviceOptions
from overlap1f1b.transport.devices import Watch, watch_of
from overlap1f1b.transport.exchange import CollectiveExchange, Exchange, own_exchange
from overlap1f1b.transport.failures import Failures, LostRankError, headline
from overlap1f1b.transport.groups import abort, limit, side_by_side, users_aborts
from overlap1f1b.transport.limits import LATE_FACTOR, LOOK_S
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import EventMark


class Watchdog:
    """A thread that looks for failures of other ranks, and ends this rank's transfers if its host does not.

    It is for a host that waits inside the driver, as in ``tensor.item()``, where it cannot look for failures. A device
    that waits for a lost rank waits for ever, and so does its host. When the transfers are aborted, their kernels end,
    and the host goes on: with values that nobody sent, so whatever it does then counts as lost (:attr:`aborted`).

    What it finds it notes in ``failures``, where the host's own waits look. A device that stands still for twice its
    limit has lost a rank, too; as long as it does, ``aborts`` are called one after another. ``goes_on`` says whether
    the device has done what it had been given at the call before: a host that is busy with something else, such as a
    compiler, leaves it nothing to do, and may take any time.
    """

    def __init__(self, failures: Failures, aborts: Sequence[Callable[[], object]], goes_on: Callable[[], bool]) -> None:
        self.failures, self._aborts, self._goes_on = failures, aborts, goes_on
        self._limit = LATE_FACTOR * failures.limit.total_seconds()
        self.aborted = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overlap1f1b-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """End all communicators once a rank has failed, or the device stands still."""
        went_on = time.monotonic()
        while self.failures.lost is None and not self._ended.wait(LOOK_S):
            with suppress(RuntimeError):  # a request needs a thread, and there may be none now
                self.failures.lost = self.failures.read()
            if self._goes_on():
                went_on = time.monotonic()
            elif time.monotonic() - went_on > self._limit:
                self.failures.lost = self.failures.lost or f"the device stood still for {self._limit:g} s"
        for end in self._aborts:
            going = True  # the host's own waits come first: they name the node
            while going:
                if self._ended.wait(LOOK_S):
                    return
                going = self._goes_on()
            self.aborted = True
            end()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


class Communicators:
    """The groups of an engine, of its mesh and of its exchange, which end at once when ``owner`` is dropped.

    On gloo they are connected when they are made, and end with their last user. On a device, :meth:`warm_up` makes all
    communicators, in one order on all ranks: the first transfer of each would block its thread until all of its ranks
    come, and ranks whose first steps differ would wait for each other.

    An ``exchange`` that was given to the engine is left alone: it ``shares`` it with other users.
    """

    def __init__(self, owner: object, mesh: Mesh, options: DeviceOptions, exchange: Exchange | None = None) -> None:
        self.mesh, self.options, self._shared = mesh, options, exchange
        self.shares = exchange is not None
        self._aborts: list[Callable[[], None]] = [mesh.own.abort]
        for group in mesh.inner:
            limit(group, mesh.failures.limit)
            self._aborts.append(partial(abort, group))
        self._own: list[CollectiveExchange] = []
        self._device = torch.device("cpu")
        self._watch: Watch | None = None
        self._dropped = weakref.finalize(owner, _end, mesh, self._own)
        self._dropped.atexit = False

    def make_exchange(self) -> Exchange:
        """Return the exchange that was given, or a new one; all ranks must call this."""
        exchange, mesh = self._shared, self.mesh
        if exchange is None:
            exchange = own_exchange(
                mesh.exchanging, self.options.rows, limit=mesh.failures.limit, device=mesh.device_type
            )
            if isinstance(exchange, CollectiveExchange):
                self._own.append(exchange)
        self._aborts.append(exchange.abort)
        return exchange

    def use(self, device: torch.device) -> None:
        """Say which device's tensors the groups carry; ValueError if a group or the budget does not fit it."""
        self.mesh.check_device(device)
        if (gpu := devices.gpu_of(device)) is not None:
            self.options.check(device, gpu.get_device_properties(device).multi_processor_count)
        self._device, self._watch = device, watch_of(device)

    def warm_up(self) -> None:
        """Make all communicators on a device; all ranks must call this, else LostRankError after the limit."""
        if self._watch is not None:
            with self.watched():
                for exchange in self._own:
                    exchange.warm_up(self._device)
                self.mesh.own.warm_up(self._device)
                self.settle(lambda: "the first transfer of each communicator has not ended")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch over the body: if another rank fails, it ends on a device wherever it waits.

        It raises LostRankError then, or if the device stood still for twice the timeout and transfers were aborted;
        also instead of an error of the body, which may have computed with values that nobody sent, here or on another
        rank.
        """
        if self._watch is None or not self.mesh.several:
            yield
            return
        failures = self.mesh.failures
        aborts = self.abort, partial(side_by_side, users_aborts(self._device))
        watchdog = Watchdog(failures, aborts, streams.going_on(self._device))
        try:
            yield
        except Exception as error:
            watchdog.end()
            # A rank that has aborted may have sent what nobody computed, too: indices, at which kernels fail.
            cause = failures.read() if isinstance(error, IndexError | torch.AcceleratorError) else None
            if isinstance(error, LostRankError) or not (watchdog.aborted or cause):
                raise
            raise LostRankError(f"{failures.lost or cause}; here since then: {headline(error)}") from error
        finally:
            watchdog.end()
        if watchdog.aborted:
            raise LostRankError(failures.lost)

    def settle(self, pending: Callable[[], str]) -> None:
        """Wait until the device has done what it was given, inside :meth:`watched`.

        ``pending`` says what has not ended.

        LostRankError if another rank failed, or the device did not end within the limit.
        """
        if self._watch is None or not self.mesh.several:
            return
        failures = self.mesh.failures
        try:
            EventMark(self._device, None, self._watch.stamp()).synchronize(failures)
        except (TimeoutError, ConnectionError) as error:
            why = failures.read(wait=True) or failures.lost or f"no answer within {failures.limit.total_seconds():g} s"
            raise LostRankError(f"{pending()}: {why}") from error

    def abort(self) -> None:
        """End every transfer under way, after a failure."""
        if self._watch is not None:
            side_by_side(self._aborts)
            return
        for end in self._aborts:
            end()

    def close(self, *, failed: bool) -> None:
        """End all groups; all ranks must call this, unless one has ``failed``."""
        if self._dropped.detach() is None:
            return
        if failed:
            _end(self.mesh, self._own)
            return
        try:
            with self.watched():
                self.settle(lambda: "the last step has not ended on the device")
        except BaseException:
            _end(self.mesh, self._own)
            raise
        for exchange in self._own:
            exchange.close()
        self.mesh.close()


def _end(mesh: Mesh, exchanges: Sequence[CollectiveExchange]) -> None:
    """End the groups on a device at once, whatever other ranks do; groups on gloo end with their last user."""
    side_by_side([*(exchange.abort for exchange in exchanges), mesh.own.release])
