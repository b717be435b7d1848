"""A worker as the API process sees it: its channel, its state, its load, and requests that may have killed it."""

from collections.abc import Sequence

from service.ipc.channel import Channel
from service.ipc.messages import Command, CommandBatch, WorkerReady, encode_commands
from service.ipc.shared_state import Watchdog, WorkerState
from service.requests.poison_detector import PoisonRequestDetector

# A worker without a heartbeat for this long is stalled. Heartbeats come after each step, and each second while idle.
# The alert fires within 60 s of a hang: this time, plus a scrape (5 s), plus an evaluation of the rules (15 s).
STALL_SECONDS = 20.0


class EngineWorker:
    """Connection to the worker process of one device, and to its replacement after its death.

    num_tokens: tokens of the worker's unfinished sequences, counted as in admission.
    """

    def __init__(self, channel: Channel, state: WorkerState, index: int = 0) -> None:
        self.channel, self.state, self.index = channel, state, index
        self.detector = PoisonRequestDetector()
        self.last_ready: WorkerReady | None = None  # message of the last worker process that became ready
        self.num_tokens = 0
        self.watchdog = Watchdog(lambda: state.signs)
        self.is_stalled = False  # as of the last call of `check_heartbeat`
        self._epoch = 0  # worker restarts before the worker process that gets the commands

    @property
    def ready(self) -> WorkerReady | None:
        """Start-up message of the worker process; None while no worker process serves."""
        ready = self.last_ready
        return ready if ready is not None and ready.epoch >= self.state.epoch.value else None

    @property
    def takes_requests(self) -> bool:
        """True if the worker process serves and does not hang."""
        return self.ready is not None and not self.is_stalled

    def check_heartbeat(self) -> float:
        """Return the seconds since the last heartbeat. Must be called once a second while the worker serves."""
        silence = self.watchdog.silence()
        self.is_stalled = silence > STALL_SECONDS
        return silence

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands to the current worker process; drop them if that process has died.

        The replacement gets all unfinished requests again when it is ready.
        """
        if commands and self.state.epoch.value <= self._epoch:
            self.channel.submit(encode_commands(CommandBatch(self._epoch, list(commands))))

    def accept(self, ready: WorkerReady) -> None:
        """Record that a worker process is ready, and send later commands to this process.

        If the process is new, discard the unsent commands to the process before it.
        """
        if ready.epoch != self._epoch:
            self._epoch = ready.epoch
            self.channel.discard_unsent()
        self.last_ready = ready
