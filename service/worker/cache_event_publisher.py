"""Publisher of the prefix cache's changes over ZeroMQ, in the format of vLLM's ZmqEventPublisher."""

import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from service.engine.scheduling.cache_events import CacheEvent
from service.ipc.shared_state import name_thread

# Batches that a subscriber can ask for again, and that wait for a slow subscriber. It misses further batches, and can
# ask for them. The batch of a step of 512 tokens has 3 kB.
_NUM_KEPT = 10_000
_MAX_RECEIVED_BYTES = 2**12  # of a request or a topic; a connection with a larger message is closed
# Subscribers of a dead worker try to connect to its replacement every 0.1 s. They miss what is sent before.
_CONNECT_SECONDS = 0.5
_END = (-1).to_bytes(8, "big", signed=True)  # sequence number of the last reply


class CacheEventPublisher:
    """Publisher of batches of events to all subscribers. Repeats the last batches on request.

    A published message has three frames: the topic; the batch's sequence number, 8 bytes, big-endian, from 0 on; and in
    MessagePack the array [time in seconds, events, rank].

    A request at `replay_endpoint` is one frame, the sequence number of the first missing batch. The replies have two
    frames: number and payload of each kept batch from there on, and at the end the number -1 with an empty payload.

    A thread owns the sockets of the subscribers. `publish` sends to this thread and must be called from one thread.

    Args:
        endpoint: address to bind, such as "tcp://*:5557".
        replay_endpoint: address to bind for requests; None: no batch can be repeated.
        rank: index of this worker among the workers of the service. Each publishes at addresses of its own; see
            `address_of`.

    Raises:
        OSError: an address is wrong or in use; the message names it and says what to do.
    """

    def __init__(self, endpoint: str, *, replay_endpoint: str | None = None, topic: str = "", rank: int = 0) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._encode, self._rank = msgspec.msgpack.Encoder().encode, rank
        self._outbox = context.socket(zmq.PAIR)
        inbox, subscribers, requests = (context.socket(kind) for kind in (zmq.PAIR, zmq.PUB, zmq.ROUTER))
        for queue in (self._outbox, inbox, subscribers, requests):
            queue.set_hwm(_NUM_KEPT + 1)  # the replies to a request are one more
        own = f"inproc://cache-events-{uuid.uuid4()}"  # a closed socket keeps its address for a while
        self._outbox.bind(own)
        inbox.connect(own)
        try:
            _bind(subscribers, address_of(endpoint, rank), "--kv-events-endpoint")
            if replay_endpoint is not None:
                _bind(requests, address_of(replay_endpoint, rank), "--kv-events-replay-endpoint")
        except OSError:
            for opened in (self._outbox, inbox, subscribers, requests):
                opened.close(linger=0)
            raise
        self._thread = threading.Thread(
            target=_carry, args=(inbox, subscribers, requests, topic.encode()), name="cache-events", daemon=True
        )
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send a batch of events to all subscribers, unless it is empty."""
        if events:
            published_at = time.time()
            self._outbox.send(self._encode((published_at, events, self._rank)))

    def close(self) -> None:
        """Close the publisher's sockets, once all batches are sent."""
        self._outbox.send(b"")
        self._thread.join()
        self._outbox.close()


def address_of(address: str, rank: int) -> str:
    """Return the address of a worker as in vLLM: the port plus its rank, or the name with "_dp" and its rank."""
    if rank == 0:
        return address
    start, _, port = address.rpartition(":")
    return f"{start}:{int(port) + rank}" if port.isdigit() else f"{address}_dp{rank}"


def _bind(bound: "zmq.Socket[bytes]", address: str, flag: str) -> None:
    try:
        bound.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        bound.bind(address)
    except zmq.ZMQError as error:
        raise OSError(f"{flag} {address}: {zmq.strerror(error.errno or 0).lower()}; choose another address") from None


def _carry(
    inbox: "zmq.Socket[bytes]", subscribers: "zmq.Socket[bytes]", requests: "zmq.Socket[bytes]", topic: bytes
) -> None:
    """Number the batches, send them to the subscribers, and answer requests for earlier ones."""
    name_thread("kvasir-kvevents")
    kept: deque[tuple[bytes, bytes]] = deque(maxlen=_NUM_KEPT)  # number, payload
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(requests, zmq.POLLIN)
    number = 0
    time.sleep(_CONNECT_SECONDS)
    while True:
        ready = dict(poller.poll())
        if inbox in ready:
            if not (payload := inbox.recv()):  # `close`
                break
            batch = (number.to_bytes(8, "big"), payload)
            kept.append(batch)
            subscribers.send_multipart((topic, *batch))
            number += 1
        if requests in ready:
            frames = requests.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:  # the client's identity, an empty frame, the number
                missing = (batch for batch in kept if batch[0] >= frames[2])
                for reply in (*missing, (_END, b"")):
                    requests.send_multipart((*frames[:2], *reply))
    for opened in (inbox, subscribers, requests):
        opened.close(linger=0)
